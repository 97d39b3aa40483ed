"""
The writer: one thread that turns everything submitted to a store into few transactions (group commit).

Whatever was submitted by the time the thread is free becomes one transaction, one fsync and one call back into the
loop. A lone request does not wait for others. A handler takes all requests of its kind at once and answers each with a
value or an error of its own. If a whole batch fails, its requests are done one by one, so that a bad one does not
affect the others. After a disk error nothing more is written, because it is unknown what the disk has kept.

A lone request, or a few, on a disk that has been quick is written by the loop itself, before its caller would wait, if
no other process holds the file's lock or waits for it: two handovers between threads take longer than such a write. A
disk that is slow, and the checkpoints of the write-ahead log, are left to the thread.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.errors import ReefknotError, StoreError, StoreUnavailableError
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.sqlite_files import busy_handler, close_connection, is_fatal, pause, translated
from reefknot.stores.sqlite.gil_yield import MAX_BLOCK_S, GilYield, has_more_to_do
from reefknot.stores.sqlite.transaction import Handler, RecordCaches, Transaction
from reefknot.stores.sqlite.wait_table import WaitTable

A = TypeVar("A")
K = TypeVar("K")
R = TypeVar("R")

_Request = tuple[Handler[Any, Any], Any, asyncio.Future[Any]]
"""Handler, its argument, and the future of the answer. A bare tuple: tens of thousands are made in a second."""

MOST_HERE = 16
"""Most requests that a loop writes itself."""
TURN_S = 0.005
"""How long the thread waits for its turn before it asks for the file's lock again."""
QUICK_S = 0.002
QUICK_IN_A_ROW = 16
"""Number of transactions in a row within `QUICK_S` that make a disk a quick one."""
CHECKPOINT_PAGES = 4000
"""Pages in the write-ahead log after which the thread brings them over to the file."""


class Writer:
    """
    The only part of a store that writes.

    `on_commit` gets the topics that a batch has changed, in each loop that has requests in it; other processes get them
    by the `table`. `check_file` raises when the file is not in place any more.
    `inline`: no thread, for simulations in virtual time.
    """

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        now: Callable[[], Moment],
        *,
        path: str,
        patience: float,
        on_commit: Callable[[set[str]], None],
        table: WaitTable,
        check_file: Callable[[], None] = lambda: None,
        inline: bool = False,
    ) -> None:
        self._connect = connect
        self._now = now
        self._path = path
        self._patience = patience
        self._on_commit = on_commit
        self._turns = table
        self._post = table.post
        self._check_file = check_file
        self._inline = inline
        self._generation = FORKS.generation
        self._submitted: deque[_Request] = deque()
        self._unhurried: deque[tuple[float, _Request]] = deque()
        """Requests that wait for another one to share its transaction, and until when."""
        self._hurrying: tuple[asyncio.AbstractEventLoop | None, float] = (None, inf)
        """The loop that writes them without another one, and when."""
        self._batch: list[_Request] = []
        self._batch_began = 0.0
        self._gil = GilYield()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._waking: asyncio.AbstractEventLoop | None = None
        self._held_up: asyncio.AbstractEventLoop | None = None
        """The loop that has written lone requests, and has had no turn since."""
        self._held_up_since = 0.0
        self._is_watched = False
        self._cache = RecordCaches()
        self._closing = False
        self.failure: ReefknotError | None = None
        """The error after which nothing more is written."""
        self._connection: apsw.Connection | None = None
        self._in_use = FORKS.in_use()
        """Held by the user of the connection: the thread, or a loop with a lone request."""
        self._busy_handler = busy_handler(patience)
        self._quick = 0
        """Quick transactions in a row."""
        self._log_pages = self._checkpointed = 0
        self._thread: threading.Thread | None = None
        self.transactions = 0
        """Transactions committed so far that touched a topic: those the file counts."""

    @property
    def batches(self) -> int:
        """Batches written so far."""
        return self._gil.batches

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being written, or waits."""
        return not self._gil.idle

    async def start(self) -> None:
        """Open the file, in the thread that will write it."""
        if self._inline:
            try:
                self._connection = self._connect()
            except (apsw.Error, OSError) as error:
                raise translated(error, self._path) from error
            return
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="reefknot-writer", daemon=True)
        self._thread.start()
        await opened

    def submit(
        self, handler: Handler[A, R], argument: A, *, within: float = 0.0, awaited: bool = False
    ) -> asyncio.Future[R]:
        """
        Queue a request. Its future is answered when the transaction is on disk.

        A request that is not urgent joins the next transaction of this process, and starts one of its own only when
        none came `within` this many seconds. `awaited`: the caller submits nothing else before it waits for the answer.
        """
        if self._closing or self.failure is not None or self._generation != FORKS.generation:
            raise self._refusal()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        request = (handler, argument, future)
        if self._inline:
            answers, touched = self._execute([request])
            self._deliver([future], answers, touched)
            return future
        if within:
            due = loop.time() + within
            self._unhurried.append((due, request))
            if self._hurrying[0] is not loop or due < self._hurrying[1]:
                self._hurry_at(loop, due)
            return future
        self._submitted.append(request)
        if self._gil.idle and self._waking is not loop:
            if awaited and self._write_here(loop):
                return future
            self._waking = loop
            loop.call_soon(self._wake)
        if not self._is_watched:
            self._is_watched = True
            loop.call_later(self._patience, self._watch, loop)
        return future

    async def close(self) -> None:
        """Write what was submitted, then close the file."""
        self._closing = True
        if self._inline:
            if self._connection is not None:
                close_connection(self._connection)
            return
        self._hurry()
        thread, self._thread = self._thread, None
        if thread is not None and self._generation == FORKS.generation:
            self._wakeups.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join, self._patience)

    def _refusal(self) -> ReefknotError:
        if self.failure is not None:
            return self.failure
        if self._closing:
            return StoreUnavailableError(f"sqlite:{self._path}", "it is closed", "open it again")
        return opened_before_fork(f"sqlite:{self._path}")

    def _hurry_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        self._hurrying = loop, when
        loop.call_at(when, self._hurry_due, loop)

    def _hurry_due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write the waiting requests, if the time of one has come."""
        self._hurrying = None, inf
        soonest = min((due for due, _ in self._unhurried.copy()), default=inf)
        if soonest <= loop.time():
            self._hurry()
        elif soonest < inf:
            self._hurry_at(loop, soonest)

    def _hurry(self) -> None:
        """Write the requests that no transaction has taken along."""
        waiting: list[_Request] = []
        self._take_unhurried(waiting)
        if waiting:
            self._submitted.extend(waiting)
            self._wake()

    def _take_unhurried(self, batch: list[_Request]) -> None:
        """Move them into a batch. The loop and the thread may both try: each request goes to one of them."""
        while self._unhurried:
            try:
                batch.append(self._unhurried.popleft()[1])
            except IndexError:
                return

    def _wake(self) -> None:
        """Wake the thread. Runs after every task of this turn of the loop has submitted: they share a transaction."""
        self._waking = None
        loop = asyncio.get_running_loop()
        if self._gil.idle and self._submitted and not self._write_here(loop):
            self._gil.wake(loop, self._wakeups)

    def _write_here(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Write a lone request in this loop. False when that could make the loop wait for long, or more is waiting."""
        began, is_held_up = time.monotonic(), self._held_up is loop
        if self._quick < QUICK_IN_A_ROW or len(self._submitted) > MOST_HERE or has_more_to_do(loop, but=is_held_up):
            return False
        if is_held_up and began - self._held_up_since > MAX_BLOCK_S:
            return False
        if self.failure is not None or self._log_pages >= CHECKPOINT_PAGES or not self._in_use.acquire(blocking=False):
            return False
        try:
            is_written = self._write_lone(loop)
        finally:
            self._in_use.release()
        if is_written and not is_held_up:
            self._held_up, self._held_up_since = loop, began
            loop.call_soon(setattr, self, "_held_up", None)
        return is_written

    def _write_lone(self, loop: asyncio.AbstractEventLoop) -> bool:
        connection, gil = self._connection, self._gil
        assert connection is not None
        if self._turns.is_wanted:
            return False
        connection.set_busy_timeout(0)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.Error:  # another process has the lock, or the thread meets the same error
            return False
        finally:
            connection.set_busy_handler(self._busy_handler)
        gil.idle = False
        self._batch_began = time.monotonic()
        self._take_submitted()
        written = self._write_out()
        self._answer(*written, here=loop)
        self._post(written[2])
        gil.idle = True
        if self._submitted or self._log_pages >= CHECKPOINT_PAGES:  # of another loop, or work for the thread
            gil.wake(loop, self._wakeups)
        return True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the requests of this loop when the disk does not answer: no caller waits for ever."""
        stuck = self._batch and time.monotonic() - self._batch_began > self._patience * 2
        if stuck and self.failure is None:
            problem = f"a write has not finished for {self._patience * 2:g} s; whether it was kept is not known"
            self.failure = StoreUnavailableError(f"sqlite:{self._path}", problem, "check the disk, then open it again")
            for _, _, future in [*self._batch, *self._submitted]:
                if future.get_loop() is loop and not future.done():
                    future.set_exception(self.failure)
        self._is_watched = bool(self._batch or self._submitted)
        if self._is_watched:
            loop.call_later(self._patience, self._watch, loop)

    def _run(self, opened: asyncio.Future[None]) -> None:
        """The thread: open the file, then write batches until the store is closed."""
        loop = opened.get_loop()
        try:
            with self._in_use:
                self._connection = self._connect()
        except BaseException as error:
            _call(loop, self._deliver, [opened], [translated(error, self._path)], set())
            return
        self._connection.set_wal_hook(self._logged)
        _call(loop, self._deliver, [opened], [None], set())
        while True:
            self._wakeups.get()
            while self._write_batch():
                continue
            self._checkpoint()
            if self._closing:
                with self._in_use:
                    close_connection(self._connection)
                return

    def _write_batch(self) -> bool:
        """Write everything submitted so far and answer it. True when more has come meanwhile."""
        submitted, gil = self._submitted, self._gil
        self._take_submitted()
        if not self._batch:
            gil.idle = True
            # A request may have come between the last look and the flag.
            return bool(submitted) and not self.failure
        gil.idle = False
        self._batch_began = time.monotonic()
        with self._in_use:
            written = self._write_out()
        gil.idle = not submitted
        more = bool(submitted)  # a request may have come between the look and the flag
        if more:
            gil.idle = False
        self._answer(*written)
        self._post(written[2])
        if self._log_pages >= 2 * CHECKPOINT_PAGES:  # under constant load the thread never rests
            self._checkpoint()
        return more

    def _take_submitted(self) -> None:
        while self._submitted:
            self._batch.append(self._submitted.popleft())

    def _write_out(self) -> tuple[list[_Request], list[Any], set[str]]:
        """The batch, joined by the requests that waited for one, its answers, and the topics it has changed."""
        self._take_unhurried(self._batch)
        batch = self._batch
        answers, touched = self._execute(batch)
        self._batch = []
        self._gil.batches += 1
        return batch, answers, touched

    def _answer(
        self,
        batch: list[_Request],
        answers: list[Any],
        touched: set[str],
        *,
        here: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Answer every loop that has requests in the batch: `here` at once, the others by a call into them."""
        if len(batch) == 1 and batch[0][2].get_loop() is here:
            self._deliver([batch[0][2]], answers, touched)
            return
        for loop, places in _indexes_by_kind([future.get_loop() for _, _, future in batch]).items():
            arguments = [batch[at][2] for at in places], [answers[at] for at in places], touched
            if loop is here:
                self._deliver(*arguments)
            else:
                _call(loop, self._deliver, *arguments)

    def _logged(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        """
        Note the length of the write-ahead log, in place of SQLite's own checkpoint, for which a caller waits.

        What was checkpointed counts until the log restarts, which readers may put off.
        """
        if pages < self._checkpointed:
            self._checkpointed = 0
        self._log_pages = pages - self._checkpointed
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        """Bring the pages of a long write-ahead log over to the file, as far as no reader needs them."""
        if self._log_pages < CHECKPOINT_PAGES or self.failure is not None:
            return
        self._log_pages = 0
        assert self._connection is not None
        try:
            with self._in_use:
                _, self._checkpointed = self._connection.wal_checkpoint()
        except apsw.Error as error:
            if is_fatal(error):
                self.failure = translated(error, self._path)

    def _execute(self, batch: list[_Request]) -> tuple[list[Any], set[str]]:
        """The answers of a batch and the topics it has changed. A batch that fails is split into single requests."""
        if self.failure is not None:
            return [self.failure] * len(batch), set()
        assert self._connection is not None
        try:
            return self._transact(self._connection, batch)
        except Exception as error:
            ours = translated(error, self._path)
            ours.__cause__ = error if ours is not error else error.__cause__
            if is_fatal(error):
                self.failure = ours
            if len(batch) == 1 or (isinstance(ours, StoreError) and type(ours) is not StoreError):
                return [ours] * len(batch), set()
        answers: list[Any] = []
        touched: set[str] = set()
        for request in batch:
            answer, topics = self._execute([request])
            answers += answer
            touched |= topics
        return answers, touched

    def _begin(self, connection: apsw.Connection) -> None:
        """
        Begin a transaction, in turn with other processes.

        Only SQLite's own lock decides, which other programs know as well. But asking for it again and again would cost
        more than the transactions do, so the process that has just released it wakes the next one that waits.
        """
        turns, until = self._turns, time.monotonic() + self._patience
        connection.set_busy_timeout(0)
        try:
            while True:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    return
                except apsw.BusyError:
                    if time.monotonic() > until:
                        raise
                if not turns.wait_for_turn(TURN_S):
                    pause()
        finally:
            connection.set_busy_handler(self._busy_handler)

    def _transact(self, connection: apsw.Connection, batch: list[_Request]) -> tuple[list[Any], set[str]]:
        answers: list[Any] = [None] * len(batch)
        is_counted = False
        if connection.get_autocommit():
            self._begin(connection)
            if batch is self._batch:  # what came while this waited for the lock
                self._take_submitted()
                answers = [None] * len(batch)
        began = time.monotonic()
        self._gil.working = True
        try:
            self._check_file()
            self._cache.check(connection)
            # The time is read after the lock was granted: the order of times is then the order of transactions.
            transaction = Transaction(connection, self._now(), self._cache)
            for handler, places in _indexes_by_kind([handler for handler, _, _ in batch]).items():
                results = handler(transaction, [batch[place][1] for place in places])
                for place, result in zip(places, results, strict=True):
                    answers[place] = result
            transaction.flush()
            self._gil.release()
            is_counted = bool(transaction.touched)
            self.transactions += is_counted  # before others see it, lest it counts as theirs
            connection.execute("COMMIT")
            self._turns.pass_on()
            self._cache.committed()
            self._quick = self._quick + 1 if time.monotonic() - began < QUICK_S else 0
        except BaseException:
            self.transactions -= is_counted
            self._gil.release()
            self._cache.clear()
            if not connection.get_autocommit():
                with suppress(apsw.Error):  # the error that led here is the one to report
                    connection.execute("ROLLBACK")
            raise
        return answers, transaction.touched

    def _deliver(self, futures: list[asyncio.Future[Any]], answers: list[Any], touched: set[str]) -> None:
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, ReefknotError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._on_commit(touched)


def _indexes_by_kind(kinds: Sequence[K]) -> dict[K, list[int]]:
    """The indexes of each kind, in the order in which the kinds first occur."""
    found: dict[K, list[int]] = {}
    latest: K | None = None
    places: list[int] = []
    for place, kind in enumerate(kinds):
        if kind is not latest:
            latest = kind
            places = found.setdefault(kind, [])
        places.append(place)
    return found


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: no caller is left
        loop.call_soon_threadsafe(function, *arguments)
