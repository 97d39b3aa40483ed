"""
`connect_sync`: a client for code without an event loop, usable from any thread.

The calls of all threads run on one event loop, in a thread of the client's own: there the store is open, and results
arrive as they do for `connect`. A call blocks its thread, so it is refused where an event loop runs.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

from reefknot.app.stores import connect
from reefknot.core.messages import ExecAssignment, ExecResult
from reefknot.errors import EventLoopRunningError, StoreUnavailableError
from reefknot.router.client import Client, Handle

T = TypeVar("T")
CLOSE_S = 10.0


class SyncHandle:
    """A submitted assignment: its result, once there is one, and a way to cancel it."""

    def __init__(self, client: "SyncClient", handle: Handle) -> None:
        self.assignment_id = handle.assignment_id
        self.tenant_id = handle.tenant_id
        self._client = client
        self._handle = handle

    def result(self, timeout: float | None = None) -> ExecResult:
        """The result, waited for at most `timeout` seconds; see `reefknot.router.client.Handle.result`."""
        return self._client.call(self._handle.result(timeout))

    def status(self) -> str:
        """The state: `pending`, `running`, `succeeded`, `failed`, `cancelled`, …"""
        return self._client.call(self._handle.status())

    def cancel(self, reason: str = "") -> None:
        """Cancel it, whether a router is running or not. Its result then says `cancelled`."""
        self._client.call(self._handle.cancel(reason))


class SyncClient:
    """Submits work through a store, from any thread. `with rk.connect_sync("sqlite:state.db") as client:`"""

    def __init__(self, url: str, *, size: int = 1000, nats: Mapping[str, Any] | None = None) -> None:
        """Open the store at this URL. `size` bounds what may wait there for a router; `nats` is as in `open_store`."""
        _refuse_running_loop()
        self._url = url
        self._nats = nats
        self._is_closed = False
        self._lock = threading.Lock()
        """Held while a call is scheduled, and while the client is closed: no call is scheduled afterwards."""
        self._calls: set[Future[Any]] = set()
        self._opened: Future[Client] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(size)), name="reefknot client", daemon=True
        )
        self._thread.start()
        self._client = self._opened.result()

    async def _serve(self, size: int) -> None:
        """Keep the store open until `close`; then nothing waits here any more."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with connect(self._url, size=size, nats=self._nats) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the client's own loop."""
        try:
            _refuse_running_loop()
            with self._lock:
                if self._is_closed:
                    raise self._closed()
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._calls.add(future)
        except BaseException:
            work.close()
            raise
        future.add_done_callback(self._calls.discard)
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        except BaseException:  # Ctrl-C, or what the work raised: then it has ended
            future.cancel()
            raise

    def _closed(self) -> StoreUnavailableError:
        return StoreUnavailableError(self._url, "the client is closed", "connect again")

    def submit(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> SyncHandle:
        """Submit one step; the options are those of `Client.submit`."""
        return SyncHandle(self, self.call(self._client.submit(job_type, inputs, **options)))

    def hand_in(self, assignment: ExecAssignment | Mapping[str, Any], **options: Any) -> SyncHandle:
        """Submit an assignment as it is; the options are those of `Client.hand_in`."""
        return SyncHandle(self, self.call(self._client.hand_in(assignment, **options)))

    def run(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> ExecResult:
        """Submit one step, and wait for its result."""
        return self.call(self._client.run(job_type, inputs, **options))

    def cancel(self, assignment_id: str, reason: str = "", *, tenant_id: str | None = None) -> bool:
        """Cancel an assignment, wherever it is. True when that is done, False when a router was asked to do it."""
        return self.call(self._client.cancel(assignment_id, reason, tenant_id=tenant_id))

    def close(self) -> None:
        """Close the store. Calls of other threads that still wait end with `StoreUnavailableError`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for future in tuple(self._calls):
            future.cancel()
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise EventLoopRunningError


def connect_sync(url: str, *, size: int = 1000, nats: Mapping[str, Any] | None = None) -> SyncClient:
    """
    A client of the system whose store this is, for code without an event loop: `with rk.connect_sync(url) as client:`.

    It works from any thread, and from several at once. `size` bounds what may wait there for a router; `nats` is
    as in `open_store`.
    """
    return SyncClient(url, size=size, nats=nats)
