"""
Plain functions under a key: the store is awaited on its own loop, the work runs in the calling thread.

    start the key's coroutine on the store's loop → wait for its end, or for the turn of this thread → run the work here

The work stays in its thread because it may depend on it: a connection, a transaction or a `threading.local` belongs to
one. It cannot be interrupted: when the lease is lost meanwhile, the work runs to its end and the caller gets
`LeaseLostError`. A thread in which an event loop runs is refused, since waiting here would block that loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from reefknot.errors import EventLoopRunningError, StoreUnavailableError

if TYPE_CHECKING:
    from reefknot.stores.port import Store

T = TypeVar("T")


class SyncStore(Protocol):
    """A store that plain code reaches, such as a client of `connect_sync`."""

    @property
    def store(self) -> Store: ...

    def call(self, work: Coroutine[Any, Any, T]) -> T: ...


home_of_store: ContextVar[asyncio.AbstractEventLoop | SyncStore | None] = ContextVar("reefknot_home", default=None)
"""Where the store in scope is open: an event loop, or a client with a loop of its own, which a fork may replace."""


def refuse_running_loop(name: str) -> None:
    """Refuse a call in a thread in which an event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    instead = f"write it as an async function, or call it in a thread: `await asyncio.to_thread({name}, …)`"
    raise EventLoopRunningError(f"{name} is a plain function under a key, and would block it", instead)


def loop_of(home: asyncio.AbstractEventLoop | SyncStore) -> asyncio.AbstractEventLoop:
    """The event loop of a store's home. A client is asked for it each time: after a fork it has another one."""
    return home if isinstance(home, asyncio.AbstractEventLoop) else home.call(_running_loop())


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


class CallersWork:
    """Work that a coroutine awaits on another thread's loop, and that runs in the thread of the caller."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._turns: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]] | None] = SimpleQueue()

    async def run(self) -> Any:
        """Ask the caller's thread to run the work, and wait for its result. Awaited on the store's loop."""
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._turns.put((loop, result))
        return await result

    def serve(self, ending: Future[T]) -> None:
        """Run the work when it is asked for, until `ending` is done."""
        ending.add_done_callback(lambda _: self._turns.put(None))
        try:
            while (turn := self._turns.get()) is not None:
                self._take(*turn)
        except BaseException:  # Ctrl-C, or SystemExit in the work: the key is given back, or its outcome is unknown
            ending.cancel()
            raise

    def _take(self, loop: asyncio.AbstractEventLoop, result: asyncio.Future[Any]) -> None:
        try:
            value = self._work()
        except StopIteration as stop:  # a future cannot carry it
            _settle(loop, result, result.set_exception, RuntimeError(f"the function raised {stop!r}"))
        except Exception as error:
            _settle(loop, result, result.set_exception, error)
        else:
            _settle(loop, result, result.set_result, value)


def _settle(
    loop: asyncio.AbstractEventLoop, result: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any
) -> None:
    """Settle a future of another thread's loop, unless the coroutine has stopped waiting for it."""
    with suppress(RuntimeError):  # the loop is closed: the end of the call says so
        loop.call_soon_threadsafe(lambda: None if result.done() else settle(outcome))


def run_on(loop: asyncio.AbstractEventLoop, store: Store, work: CallersWork, key: Coroutine[Any, Any, T]) -> T:
    """The result of the key's coroutine, run on the store's loop while this thread does the work."""
    try:
        ending = asyncio.run_coroutine_threadsafe(key, loop)
    except RuntimeError:
        key.close()
        raise _closed(store) from None
    work.serve(ending)
    if ending.cancelled():
        raise _closed(store)
    return ending.result()


def _closed(store: Store) -> StoreUnavailableError:
    return StoreUnavailableError(store.identity, "the store is closed", "keep it open for as long as its keys are used")
