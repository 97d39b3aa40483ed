"""
Clients of a store: `connect`, and `connect_sync` for code without an event loop, from any thread and in any fork.

The calls of a sync client run on one event loop, in a thread of the client's own: there the store is open, and results
arrive as they do for `connect`. A call blocks its thread, so it is refused where an event loop runs.

A fork has no such thread: the first call in a child opens the store again, in a thread of the child's own. What belongs
to the parent is never touched: its sockets and its loop are still in use by the parent.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from msgspec import Struct

from reefknot.core import checks
from reefknot.errors import (
    EventLoopRunningError,
    ParameterError,
    ParameterTypeError,
    StoreMissingError,
    StoreUnavailableError,
)
from reefknot.idempotency.decorator import in_scope
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.forks import FORKS
from reefknot.runtime.log import logger
from reefknot.stores.opening import open_store, options_of, shown_url, store_url
from reefknot.stores.port.engines import accepted_urls, file_of, is_shared

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Unpack

    from reefknot.core.clock import Clock
    from reefknot.errors import KeyConflictError, QueueFullError
    from reefknot.queue.client import Client, Handle
    from reefknot.queue.model.arguments import SubmitItem, SubmitOptions
    from reefknot.queue.model.messages import ExecAssignment, ExecResult
    from reefknot.stores.port import Store

T = TypeVar("T")
CLOSE_S = 10.0
QUEUE_SIZE = 1000
"""Limit of waiting jobs in a store, for each resource class, until a router sets its own."""

# ---- the store of a client -------------------------------------------------------------------------------------------


def client_of(store: Store, clock: Clock, size: int = 1000) -> Client:
    """A client over an open store."""
    from reefknot.queue import presence
    from reefknot.queue.client import Client

    return Client(store, clock, size=size, has_router=presence.has_router)


class ClientAddress(Struct, frozen=True):
    """A store that a client connects to: its URL with an absolute path, and how it is opened."""

    url: str
    create: bool = True
    size: int = QUEUE_SIZE
    nats: Mapping[str, Any] = {}

    @property
    def is_shared(self) -> bool:
        """Whether other processes can open the store."""
        return is_shared(self.url)

    @property
    def shown(self) -> str:
        """The URL for messages: without user, password or token."""
        return shown_url(self.url)


def client_address(
    url: str | None,
    *,
    config: str | os.PathLike[str] | None,
    create: bool,
    size: int | None,
    nats: Mapping[str, Any] | None,
) -> ClientAddress:
    """The store that the parameters of `connect` name, and the configuration where they leave that to it."""
    checks.flag("create", create)
    if url is not None:
        checks.text("url", url, accepted_urls())
    if size is not None:
        checks.whole_number("size", size)
    if config is not None and not isinstance(config, str | os.PathLike):
        raise ParameterTypeError("config", config, "the path of a configuration file, or None for the nearest one")
    settings = None
    if url is None or config is not None:
        from reefknot.policy.settings import load_settings

        named = None if config is None else os.fspath(config)
        settings = load_settings(named, environ=os.environ, cwd=Path.cwd())
        size = settings.queue_size if size is None else size
        nats = options_of(settings)["nats"] if nats is None else nats
    address = ClientAddress(store_url(settings, url), create, QUEUE_SIZE if size is None else size, nats or {})
    if not address.is_shared and not create:
        raise ParameterError("create", create, "True for a store in memory: it is new in every process")
    return address


class SystemScope:
    """The system that runs the code of a context: a step, or the block of `rk.system`. Its client is open there."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self._generation = FORKS.generation

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the system's loop. Virtual time, which stands still for a thread, passes meanwhile."""
        begin: Callable[..., Future[T]] = getattr(self.loop, "run_from_thread", None) or (
            lambda work: asyncio.run_coroutine_threadsafe(work, self.loop)
        )
        return begin(work)

    def close(self) -> None:
        """Do nothing: a system continues when one of its clients is closed."""

    def is_reached(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether code on this loop, or on None, can use the client. Elsewhere a store in memory cannot be had."""
        if self._generation == FORKS.generation and loop in (None, self.loop):
            return True
        if not is_shared(self.client.store.identity):
            problem = (
                "it is in the memory of the system that runs this code, on another event loop or in another process"
            )
            raise StoreUnavailableError(
                "memory:", problem, "call rk.connect() in an async step, rk.connect_sync() in a plain one"
            )
        return False


_system: ContextVar[SystemScope | None] = ContextVar("reefknot_system", default=None)


@contextmanager
def system_scope(client: Client) -> Iterator[None]:
    """A scope in which `connect()` and `connect_sync()` without a store give this client, in tasks and threads too."""
    token = _system.set(SystemScope(client))
    try:
        yield
    finally:
        with suppress(ValueError):  # exited in another context than it was entered in, which never saw the system
            _system.reset(token)


@asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    size: int | None = None,
    nats: Mapping[str, Any] | None = None,
) -> AsyncIterator[Client]:
    """
    A client of the system whose store this is: `async with rk.connect("sqlite:state.db") as client:`.

    Without a URL it is the store that the commands use: `engine` of the nearest `reefknot.yaml`, or of the file
    `config`, else `.reefknot/state.db` here. A missing store is created, with a warning that names it, because no
    system might ever serve it; with `create=False` it is an error. In a step, and in the block of `rk.system`, it is
    the open store of the running system, or of the system under test.

    `size` bounds what may wait there until a router says how much may (default: the configured number, else 1000);
    `nats` is as in `open_store` (default: the configured section). A store of an older version is refused
    (`StoreVersionError`): a client that migrated it would lock out the system that runs on it.
    """
    require_asyncio("connect")
    scope = None if url is not None or config is not None else _system.get()
    if scope is not None and scope.is_reached(asyncio.get_running_loop()):
        yield scope.client
        return
    async with connected(client_address(url, config=config, create=create, size=size, nats=nats)) as client:
        yield client


@asynccontextmanager
async def connected(address: ClientAddress) -> AsyncIterator[Client]:
    """A client of the store at this address while the block runs. Creating a store logs a warning."""
    path = file_of(address.url)
    if path is not None and _is_missing(path) and not address.create:
        start = f"start a system there (reefknot up --engine {address.shown})"
        way_out = f"{start}, name another store, or leave out create=False"
        raise StoreMissingError(address.shown, "there is no store there, and create=False", way_out)
    async with opened_or_made(address.url, address.nats, creates=address.create) as (store, is_new):
        if is_new:
            logger().warning(
                "there was no store at %s: a new one was made. What is submitted there waits until a system serves it: "
                "reefknot up --engine %s",
                *(address.shown,) * 2,
            )
        yield client_of(store, store.clock, address.size)


@asynccontextmanager
async def opened_or_made(
    url: str, nats: Mapping[str, Any], *, creates: bool = True, **how: Any
) -> AsyncIterator[tuple[Store, bool]]:
    """The store at this address, and whether it was made now: a slip in its name looks like a store without work."""
    path = file_of(url)
    is_new = path is not None and _is_missing(path)
    async with AsyncExitStack() as stack:
        how = {"migrate": False, **how}
        try:
            store = await stack.enter_async_context(open_store(url, **how, nats={**nats, "creates": False}))
        except StoreMissingError:
            if not creates:
                raise
            store = await stack.enter_async_context(open_store(url, **how, nats={**nats, "creates": True}))
            is_new = True
        yield store, is_new


def _is_missing(path: str) -> bool:
    try:
        return os.path.getsize(path) == 0
    except OSError:
        return not os.path.lexists(path)


# ---- without an event loop -------------------------------------------------------------------------------------------


class SyncHandle:
    """A job by its id: its state, its result once there is one, and ways to cancel it and to run it again."""

    def __init__(
        self, client: SyncClient, assignment_id: str, tenant_id: str | None = None, *, is_new: bool = False
    ) -> None:
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id
        self.is_new = is_new
        """Whether this submission created the job. If not, a job with this id existed and was left unchanged."""
        self._client = client

    def result(self, timeout: float | timedelta | None = None) -> ExecResult:
        """The result, waited for at most `timeout` seconds; see `reefknot.queue.client.Handle.result`."""
        return self._call(lambda job: job.result(timeout))

    def wait(self, timeout: float | timedelta | None = None) -> str:
        """The state at the job's end, waited for as `result` does. A job that failed is no error here."""
        return self._call(lambda job: job.wait(timeout))

    def latest(self) -> SyncHandle:
        """The job that runs in place of this one, after a requeue with an edited payload; else itself."""
        return self._client._handle(self._call(lambda job: job.latest()))

    def status(self) -> str:
        """The state: `pending`, `running`, `succeeded`, `failed`, `cancelled`, …; `unknown` for no such job."""
        return self._call(lambda job: job.status())

    def cancel(self, reason: str = "", *, tree: bool = False) -> None:
        """Cancel it, with `tree` what follows it or waits for it too. Its result then says `cancelled`."""
        self._call(lambda job: job.cancel(reason, tree=tree))

    def retry(self, reason: str = "") -> None:
        """Run it again, as `reefknot job retry` does: under its own id, with a fresh budget."""
        self._call(lambda job: job.retry(reason))

    def _call(self, work: Callable[[Handle], Coroutine[Any, Any, T]]) -> T:
        """The result of a call of this job, through the client that is open in this process."""
        return self._client._call(lambda client: work(client.job(self.assignment_id, self.tenant_id)))


class ClientThread:
    """An open store and its client, on an event loop in a thread of their own. Belongs to one process."""

    def __init__(self, opening: AbstractAsyncContextManager[Client], closes_in: float) -> None:
        self._closes_in = closes_in
        self._opened: Future[Client] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(opening)), name="reefknot client", daemon=True
        )
        self._thread.start()
        self.client = self._opened.result()

    async def _serve(self, opening: AbstractAsyncContextManager[Client]) -> None:
        """Keep the store open until `close`."""
        self.loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with opening as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self._opened.done():
                self._failure = error
            else:
                self._opened.set_exception(error)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(self._closes_in)
        if self._failure is not None:
            raise self._failure


class SyncClient:
    """Submits work through a store, from any thread. `with rk.connect_sync("sqlite:state.db") as client:`"""

    def __init__(
        self,
        url: str | None = None,
        *,
        config: str | os.PathLike[str] | None = None,
        create: bool = True,
        size: int | None = None,
        nats: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the store; the parameters are those of `connect`."""
        _refuse_running_loop()
        self._address = client_address(url, config=config, create=create, size=size, nats=nats)
        self._is_closed = False
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()
        """Held while a call is scheduled, and while the client is closed: no call is scheduled afterwards."""
        self._link = self._opened_link(None if url is not None or config is not None else _system.get())
        self._generation = FORKS.generation

    def _opened_link(self, scope: SystemScope | None) -> ClientThread | SystemScope:
        """The system in whose scope this is, or the store, opened in a thread of this process."""
        if scope is not None and scope.is_reached(None):
            return scope
        return ClientThread(connected(self._address), CLOSE_S)

    def _call(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine on the client's own loop, which is given the client that is open there."""
        _refuse_running_loop()
        if self._generation != FORKS.generation:
            self._connect_again()
        link = self._link
        with self._lock:
            if self._is_closed:
                raise self._closed()
            running = work(link.client)
            try:
                future = link.begin(running)
            except BaseException:
                running.close()
                raise
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        except BaseException:  # Ctrl-C, or what the work raised: then it has ended
            future.cancel()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the client's own loop, such as a call of its `store`."""
        begun: list[Client] = []

        def begin(client: Client) -> Coroutine[Any, Any, T]:
            begun.append(client)
            return work

        try:
            return self._call(begin)
        finally:
            if not begun:
                work.close()

    @property
    def store(self) -> Store:
        """The store that this client has open, in this process."""
        if self._generation != FORKS.generation:
            self._connect_again()
        return self._link.client.store

    def _connect_again(self) -> None:
        """In a fork: open the store in a thread of this process."""
        with FORKS.lock:
            if self._generation == FORKS.generation:
                return  # another thread of this process has
            if self._is_closed:
                raise self._closed()
            if not self._address.is_shared:
                problem = "it is in the memory of the process that made it, and this one is a fork of that"
                raise StoreUnavailableError(self._address.shown, problem, "use sqlite:PATH or nats://HOST:PORT")
            FORKS.keep(self._link)
            self._lock = threading.Lock()  # a thread of the parent may have held the other one
            self._calls = set()
            self._link = ClientThread(connected(self._address), CLOSE_S)
            self._generation = FORKS.generation

    def _closed(self) -> StoreUnavailableError:
        return StoreUnavailableError(self._address.shown, "the client is closed", "connect again")

    def _handle(self, handle: Handle) -> SyncHandle:
        return SyncHandle(self, handle.assignment_id, handle.tenant_id, is_new=handle.is_new)

    def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> SyncHandle:
        """Submit one step. An accepted step is stored; a full queue raises `QueueFullError` with `retry_after`."""
        return self._handle(self._call(lambda client: client.submit(job_type, inputs, **options)))

    def submit_many(
        self, items: Iterable[SubmitItem | tuple[str, Mapping[str, Any] | None]]
    ) -> list[SyncHandle | QueueFullError | KeyConflictError]:
        """Submit many steps in one transaction, with an answer for each; see `Client.submit_many`."""
        answers = self._call(lambda client: client.submit_many(items))
        return [one if isinstance(one, Exception) else self._handle(one) for one in answers]

    def hand_in(
        self,
        assignment: ExecAssignment | Mapping[str, Any],
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        unique: str | None = None,
        for_: float | timedelta | None = None,
    ) -> SyncHandle:
        """Submit an assignment as it is: a record, or its fields as a mapping; see `Client.hand_in`."""
        kept = self._call(lambda client: client.hand_in(assignment, delay=delay, at=at, unique=unique, for_=for_))
        return self._handle(kept)

    def job(self, assignment_id: str, tenant_id: str | None = None) -> SyncHandle:
        """
        The job with this id, from whatever process. Nothing is read yet: an unknown id shows in the handle's calls.
        """
        return self._handle(self._link.client.job(assignment_id, tenant_id))

    def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult:
        """Submit one step, with the options of `submit`, and wait for its result."""
        return self._call(lambda client: client.run(job_type, inputs, **options))

    def cancel(self, assignment_id: str, reason: str = "", *, tenant_id: str | None = None) -> bool:
        """Cancel an assignment, wherever it is. True when that is done, False when a router was asked to do it."""
        return self._call(lambda client: client.cancel(assignment_id, reason, tenant_id=tenant_id))

    def close(self) -> None:
        """Close the store. Calls of other threads that still wait end with `StoreUnavailableError`."""
        if self._generation != FORKS.generation:  # a fork that never used it: the parent keeps its own
            self._is_closed = True
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for future in tuple(self._calls):
            future.cancel()
        self._link.close()

    def __enter__(self) -> Self:
        self._scope = in_scope(self.store, self)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, frames)
        self.close()


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise EventLoopRunningError


def connect_sync(
    url: str | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    size: int | None = None,
    nats: Mapping[str, Any] | None = None,
) -> SyncClient:
    """
    A client for code without an event loop: `with rk.connect_sync("sqlite:state.db") as client:`.

    It works from any thread, from several at once, and in a fork. The parameters are those of `connect`.
    """
    return SyncClient(url, config=config, create=create, size=size, nats=nats)


# ---- for annotations -------------------------------------------------------------------------------------------------


class SyncHandleLike(Protocol):
    """A job by its id, of a sync client or of a system under test."""

    assignment_id: str
    tenant_id: str | None
    is_new: bool

    def result(self, timeout: float | timedelta | None = None) -> ExecResult: ...
    def wait(self, timeout: float | timedelta | None = None) -> str: ...
    def latest(self) -> SyncHandleLike: ...
    def status(self) -> str: ...
    def cancel(self, reason: str = "", *, tree: bool = False) -> None: ...
    def retry(self, reason: str = "") -> None: ...


class SyncClientLike(Protocol):
    """A sync client, or a system under test in its place: the type for code that submits work."""

    def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> SyncHandleLike: ...
    def submit_many(
        self, items: Iterable[SubmitItem | tuple[str, Mapping[str, Any] | None]]
    ) -> Sequence[SyncHandleLike | QueueFullError | KeyConflictError]: ...
    def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult: ...
    def job(self, assignment_id: str, tenant_id: str | None = None) -> SyncHandleLike: ...
