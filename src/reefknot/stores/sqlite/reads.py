"""
`StoreContext`, which every part of a store works through; its reads, concurrent with the writer, and its watch for
changes.

In WAL mode a reader never waits for the writer, nor the writer for a reader. Every read is bounded in time.

Commits of this process wake the waiters of their topic at once. Commits of other processes are noticed by `PRAGMA
data_version`, which costs microseconds: after the kernel reports a write to the file, and rarely otherwise; every 25 ms
where the kernel reports nothing; and only while a task waits.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.errors import StoreError, StoreReplacedError, StoreUnavailableError
from reefknot.runtime.changes import FileChanges, Waiters
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.sqlite_files import close_connection, translated
from reefknot.stores.sqlite.transaction import Handler

R = TypeVar("R")


class Reader:
    """Runs functions over one read-only connection, in a thread. `inline`: no thread, for virtual time."""

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        *,
        path: str,
        patience: float,
        check_file: Callable[[], None] = lambda: None,
        inline: bool = False,
    ) -> None:
        """`check_file` raises when the file is not in place any more."""
        self._connect = connect
        self._check_file = check_file
        self._path = path
        self._patience = patience
        self._pool = None if inline else ThreadPoolExecutor(1, thread_name_prefix="reefknot-reader")
        self._connection: apsw.Connection | None = None
        self._closed = False
        self._generation = FORKS.generation
        self._in_use = FORKS.in_use()

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """The function's result. Each of its statements sees a snapshot."""
        patience = self._patience if patience is None else patience
        if self._generation != FORKS.generation:
            raise opened_before_fork(f"sqlite:{self._path}")
        if self._closed:
            raise StoreUnavailableError(f"sqlite:{self._path}", "it is closed", "open it again")
        if self._pool is None:
            return self._run(function)
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._run, function)
        try:
            async with asyncio.timeout(patience):
                return await running
        except TimeoutError as error:
            if self._connection is not None:
                self._connection.interrupt()
            problem = f"a read has not finished within {patience:g} s"
            raise StoreUnavailableError(f"sqlite:{self._path}", problem, "ask for less, or try again") from error

    def _run(self, function: Callable[[apsw.Connection], R]) -> R:
        try:
            with self._in_use:
                self._check_file()
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.execute("PRAGMA query_only = ON; PRAGMA cache_size = -2000")
                return function(self._connection)
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise translated(error, self._path) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pool is None:
            self._disconnect()
        elif self._generation == FORKS.generation:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._disconnect)
            self._pool.shutdown(wait=False)

    def _disconnect(self) -> None:
        if self._connection is not None:
            close_connection(self._connection)


POLL_S = 0.025
RARE_POLL_S = 0.5
"""Where the kernel reports writes to the file, polling is only a safeguard."""
FAST_POLL_S = 0.002
COMMIT_DUE_S = 5.0
"""How long a commit may take after its write: a slow disk syncs meanwhile."""
BUSY_POLL_S = 0.01
"""While the writer is busy: its thread needs the interpreter's lock, which each check takes from it."""
FAST_POLL_FOR_S = 0.05
"""After a write to the file its commit is near, and after a commit the next one."""
_TRANSACTIONS = "SELECT transactions FROM counter"


class ChangeWatcher(Waiters):
    """
    Wakes tasks that wait for a change of the store. Belongs to the loop that opened the store.

    A commit of this process wakes the waiters of its topics. A commit of another process may be about anything, and
    wakes all waiters. The two are distinguished by counting: the file counts all transactions that touched a topic, and
    the writer its own. A transaction that touched no topic, such as a renewed status, wakes no waiter in any process.
    """

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        path: str,
        *,
        own_transactions: Callable[[], int],
        is_writing: Callable[[], bool],
        check_file: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Watch the file for waiting tasks.

        `own_transactions` counts those of this process; `is_writing`: one is under way, or waits. `check_file` raises
        when the file is not in place any more.
        """
        super().__init__()
        self._connect = connect
        self._check_file = check_file
        self._own_transactions = own_transactions
        self._is_writing = is_writing
        self._own_at_last_write = 0
        self._connection: apsw.Connection | None = None
        self._file = FileChanges(f"{path}-wal", self._written)
        self._version: object = None
        self._foreign: int | None = None
        """The most transactions of other processes that were ever counted."""
        self._commit_due_until = 0.0
        """Until then a commit is expected, because the kernel has reported its write."""
        self._closed = False
        self._in_use = FORKS.in_use()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._poll_fast_until = 0.0

    @contextmanager
    def listening(self, *topics: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change of a topic ("": of any). Read after entering, not before."""
        with super().listening(*topics) as future:
            loop = asyncio.get_running_loop()
            if self._closed:
                future.set_result(None)  # a later read raises that the store is closed
            elif self._timer is None:
                self._loop = loop
                self._look()
                self._timer = loop.call_later(self._pause(loop), self._poll, loop)
            yield future

    def changed(self, topics: set[str]) -> None:
        """Wake the waiters of these topics, in which this process has committed changes, and those of any change."""
        if topics and self._waiting:
            self.wake(*(topics & self._waiting.keys()), "")

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._file.stop()
        self.wake_all()
        if self._connection is not None:
            close_connection(self._connection)
            self._connection = None

    def let_go(self) -> None:
        """In a fork: stop watching. The watch and the connection belong to the parent."""
        self._closed, self._timer = True, None
        self._file.let_go()

    def _written(self) -> None:
        """
        Note that the kernel has reported a write to the file: a commit follows, of another process or of this one.
        """
        loop, own = self._loop, self._own_transactions()
        is_own = self._is_writing() or own != self._own_at_last_write
        self._own_at_last_write = own
        if loop is None or self._timer is None:
            return
        self._commit_due_until = loop.time() + COMMIT_DUE_S
        if loop.time() < self._poll_fast_until:
            return
        if is_own:  # a check is expensive while the writer is busy, and can wait a little
            if self._timer.when() > loop.time() + BUSY_POLL_S:
                self._set_timer(loop, BUSY_POLL_S)
            return
        self._poll_fast_until = loop.time() + FAST_POLL_FOR_S
        self._set_timer(loop, FAST_POLL_S / 4)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._poll, loop)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            self._timer = None
            self._file.stop()
            return
        if self._look():
            self._poll_fast_until = loop.time() + FAST_POLL_FOR_S
            self.wake_all()
        self._timer = loop.call_later(self._pause(loop), self._poll, loop)

    def _pause(self, loop: asyncio.AbstractEventLoop) -> float:
        if loop.time() < self._poll_fast_until:
            return BUSY_POLL_S if self._is_writing() else FAST_POLL_S
        if loop.time() < self._commit_due_until:
            return POLL_S
        return RARE_POLL_S if self._file.start(loop) else POLL_S

    def _look(self) -> bool:
        """Whether another process has committed since the last check, or the file is no longer in place."""
        try:
            self._check_file()
        except StoreReplacedError:
            return True  # a later read raises the error
        try:
            with self._in_use:
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.execute("PRAGMA cache_size = -100")
                version = self._connection.pragma("data_version")
                if version == self._version:
                    return False
                found: Any = self._connection.execute(_TRANSACTIONS).get
        except (apsw.Error, StoreError):
            return False  # the next read or write reports what is wrong
        self._version, self._commit_due_until = version, 0.0
        # Own ones are counted before they commit, so this can only lag; the commit itself then changes the version.
        foreign = found - self._own_transactions()
        before, self._foreign = self._foreign, max(foreign, self._foreign or foreign)
        return before is not None and foreign > before


class Submit(Protocol):
    """`Writer.submit`, as a value."""

    def __call__(
        self, handler: Handler[Any, R], argument: Any, *, within: float = 0.0, awaited: bool = False
    ) -> asyncio.Future[R]: ...


class StoreContext:
    """
    The writer, the reader, the change watcher and the clock of one store.

    A part submits requests to the one writer, reads concurrently with it, waits for changes, and reads the time; it
    opens no connection of its own.
    """

    __slots__ = ("_reader", "listening", "now", "submit", "waiters", "watch")

    def __init__(self, submit: Submit, reader: Reader, watcher: ChangeWatcher, now: Callable[[], Moment]) -> None:
        self._reader = reader
        self.now = now
        self.waiters = watcher
        # Bound once: every request looks them up.
        self.submit = submit
        self.listening = watcher.listening
        self.watch = watcher.watch

    async def write(self, handler: Handler[Any, R], argument: Any) -> R:
        """The answer to a request, when its transaction is on disk."""
        return await self.submit(handler, argument, awaited=True)

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """The function's result over a read-only connection; at most `patience` seconds."""
        return await self._reader.read(function, patience=patience)
