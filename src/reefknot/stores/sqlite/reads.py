"""
`StoreContext`, which every part of a store works through; its reads, concurrent with the writer, and its watch for
changes.

In WAL mode a reader never waits for the writer, nor the writer for a reader. Every read is bounded in time.

Commits of this process wake the waiters of their topic at once, and those of other processes call this one by the table
of waiting processes (`WaitTable`). Where there is none, they are noticed by `PRAGMA data_version`, which costs
microseconds: after the kernel reports a write to the file; every 25 ms where the kernel reports nothing; and only while
a task waits. Every half second it is read in any case.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.errors import StoreError, StoreReplacedError, StoreUnavailableError
from reefknot.runtime.changes import FileChanges, Waiters
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.sqlite_files import busy_handler, close_connection, translated
from reefknot.stores.sqlite.transaction import Handler
from reefknot.stores.sqlite.wait_table import BUCKETS, WaitTable, bucket_of

R = TypeVar("R")

QUICK_S = 0.01
QUICK_IN_A_ROW = 8
"""Number of reads in a row within `QUICK_S` that make a disk a quick one."""


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
        self._quick = 0
        """Quick reads in a row."""
        self._busy_handler = busy_handler(patience)
        self._generation = FORKS.generation
        self._in_use = FORKS.in_use()

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """The function's result. Each of its statements sees a snapshot."""
        patience = self._patience if patience is None else patience
        self._check_open()
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

    async def look(self, function: Callable[[apsw.Connection], R]) -> R:
        """
        The result of a function that reads a few rows.

        It runs in the loop, where a thread would take longer to begin than to read. While the disk is slow, or the
        connection is in use, it runs in the thread as any other.
        """
        self._check_open()
        connection = self._connection
        if self._quick < QUICK_IN_A_ROW or connection is None or not self._in_use.acquire(blocking=False):
            return await self.read(function)
        try:
            connection.set_busy_timeout(0)
            return self._timed(function, connection)
        except apsw.BusyError:
            self._quick = 0
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise translated(error, self._path) from error
        finally:
            connection.set_busy_handler(self._busy_handler)
            self._in_use.release()
        return await self.read(function)

    def _check_open(self) -> None:
        if self._generation != FORKS.generation:
            raise opened_before_fork(f"sqlite:{self._path}")
        if self._closed:
            raise StoreUnavailableError(f"sqlite:{self._path}", "it is closed", "open it again")

    def _run(self, function: Callable[[apsw.Connection], R]) -> R:
        try:
            with self._in_use:
                self._check_file()
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.execute("PRAGMA query_only = ON; PRAGMA cache_size = -2000")
                return self._timed(function, self._connection)
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise translated(error, self._path) from error

    def _timed(self, function: Callable[[apsw.Connection], R], connection: apsw.Connection) -> R:
        began = time.monotonic()
        try:
            return function(connection)
        finally:
            self._quick = self._quick + 1 if time.monotonic() - began < QUICK_S else 0

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

    A commit of this process wakes the waiters of its topics, and so does one of another process that calls this one. A
    commit that is found by a look at the file may be about anything, and wakes all waiters. Own ones are distinguished
    by counting: the file counts all transactions that touched a topic, and the writer its own. A transaction that
    touched no topic, such as a renewed status, wakes no waiter in any process.
    """

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        path: str,
        *,
        own_transactions: Callable[[], int],
        is_writing: Callable[[], bool],
        table: WaitTable,
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
        self._table = table
        self._topics: list[dict[str, int]] = [{} for _ in range(BUCKETS)]
        """By their number in the table: the topics with waiters here, and how many."""
        self._called_by: asyncio.AbstractEventLoop | None = None
        """The loop that is called when another process has touched a topic with waiters here."""
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
            for topic in topics:
                bucket = bucket_of(topic)
                self._topics[bucket][topic] = self._topics[bucket].get(topic, 0) + 1
                self._table.wait_for(bucket)
            try:
                if self._closed:
                    future.set_result(None)  # a later read raises that the store is closed
                elif self._timer is None:
                    self._loop = loop
                    self._look()
                    self._timer = loop.call_later(self._pause(loop), self._poll, loop)
                yield future
            finally:
                for topic in topics:
                    self._unlisten(topic)

    def _unlisten(self, topic: str) -> None:
        bucket = bucket_of(topic)
        known = self._topics[bucket]
        known[topic] -= 1
        if not known[topic]:
            del known[topic]
        self._table.leave(bucket)

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
        self._hang_up()
        self.wake_all()
        if self._connection is not None:
            close_connection(self._connection)
            self._connection = None

    def let_go(self) -> None:
        """In a fork: stop watching. The watch and the connection belong to the parent."""
        self._closed, self._timer, self._called_by = True, None, None
        self._file.let_go()

    def _is_called(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether other processes call this one, as long as it stays so: then the log need not be watched."""
        if self._table.is_lost:
            self._hang_up()
            self._table.open_again()
        if not self._table.is_in_order:
            self._hang_up()
            return False
        if self._called_by is None:
            try:
                loop.add_reader(self._table.descriptor, self._answer)
            except (OSError, RuntimeError, ValueError):  # a loop without readers
                return False
            self._called_by = loop
            self._file.stop()
        return True

    def _hang_up(self) -> None:
        loop, self._called_by = self._called_by, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._table.descriptor)

    def _answer(self) -> None:
        """Wake the waiters of the topics for which this process was called."""
        for bucket in self._table.take():
            self.wake(*self._topics[bucket])

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
        if self._called_by is not None:
            self._answer()  # a call may have been lost
        if self._look():
            self._poll_fast_until = loop.time() + (0.0 if self._called_by else FAST_POLL_FOR_S)
            self.wake_all()
        self._timer = loop.call_later(self._pause(loop), self._poll, loop)

    def _pause(self, loop: asyncio.AbstractEventLoop) -> float:
        if loop.time() < self._poll_fast_until:
            return BUSY_POLL_S if self._is_writing() else FAST_POLL_S
        if loop.time() < self._commit_due_until:
            return POLL_S
        return RARE_POLL_S if self._is_called(loop) or self._file.start(loop) else POLL_S

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

    __slots__ = ("_reader", "listening", "look", "now", "post", "submit", "waiters", "watch")

    def __init__(
        self, submit: Submit, reader: Reader, watcher: ChangeWatcher, now: Callable[[], Moment], table: WaitTable
    ) -> None:
        self._reader = reader
        self.post = table.post
        self.now = now
        self.waiters = watcher
        # Bound once: every request looks them up.
        self.submit = submit
        self.listening = watcher.listening
        self.look = reader.look
        self.watch = watcher.watch

    async def write(self, handler: Handler[Any, R], argument: Any) -> R:
        """The answer to a request, when its transaction is on disk."""
        return await self.submit(handler, argument, awaited=True)

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """The function's result over a read-only connection; at most `patience` seconds."""
        return await self._reader.read(function, patience=patience)
