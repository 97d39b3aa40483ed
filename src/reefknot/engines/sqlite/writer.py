"""
One thread writes, for everybody.

Callers hand in requests; whatever has gathered by the time the thread is free becomes one transaction, one fsync and
one call back into the loop. A lone caller does not wait for company. A request is handled by a function that takes all
requests of its kind at once and answers each with a value or an error of its own; if a whole batch fails, its requests
are done one by one, so that a bad one harms nobody else. After an error of the disk nothing more is written.

A loop that has more to do gives way to the thread it wakes, for a millisecond at most, until that goes to the disk:
what the thread does until then needs the interpreter's lock, and two that want the lock are slower than one after the
other. After that the loop stands still for moments, ever rarer, until the thread has had the lock again and is done.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.engines.sqlite.connection import LIFE, is_fatal, translated
from reefknot.engines.sqlite.transaction import Memory, Transaction
from reefknot.errors import ReefknotError, StoreError, StoreUnavailableError

A = TypeVar("A")
K = TypeVar("K")
R = TypeVar("R")

Handler = Callable[[Transaction, list[A]], Sequence[R | ReefknotError]]
"""All requests of one kind in, one answer for each out."""

_Request = tuple[Handler[Any, Any], Any, asyncio.Future[Any]]
"""Who handles it, what is asked, and where the answer goes. A bare tuple: tens of thousands are made in a second."""

LONGEST_WAY = 0.001
"""Seconds a loop gives way for one transaction."""
UNTIL_THE_NEXT_WAY = 0.02
"""Seconds without it, once it was in vain: the file is locked by others."""
MOMENT = 0.00015
"""Seconds a loop stands still so that the thread gets the interpreter's lock."""
FIRST_GAP = 0.0003
LONGEST_GAP = 0.004
"""Seconds of its own a loop has between two such moments; doubled as long as the thread does not get on."""


class Writer:
    """The only one that writes through this store. `inline`: no thread, for simulations in virtual time."""

    def __init__(
        self,
        open_it: Callable[[], apsw.Connection],
        now: Callable[[], Moment],
        *,
        path: str,
        patience: float,
        committed: Callable[[set[str]], None],
        inline: bool = False,
    ) -> None:
        self._open_it = open_it
        self._now = now
        self._path = path
        self._patience = patience
        self._committed = committed
        self._inline = inline
        self._life = LIFE.number
        self._waiting: deque[_Request] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._idle = True
        self._rousing: asyncio.AbstractEventLoop | None = None
        self._way = threading.Lock()
        self._way.acquire()
        self._giving_way = False
        self._no_way_until = 0.0
        self._attended_by: asyncio.AbstractEventLoop | None = None
        self._at_work = False
        """Has the file's lock, and is not on the disk: what the thread waits for is the interpreter's."""
        self._current: list[_Request] = []
        self._busy_since = 0.0
        self._watched = False
        self._memory = Memory()
        self._closing = False
        self._dead: ReefknotError | None = None
        self._connection: apsw.Connection | None = None
        self._thread: threading.Thread | None = None
        self.batches = 0

    async def start(self) -> None:
        """Open the file, in the thread that will write it."""
        if self._inline:
            try:
                self._connection = self._open_it()
            except (apsw.Error, OSError) as error:
                raise translated(error, self._path) from error
            return
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="reefknot-writer", daemon=True)
        self._thread.start()
        await opened

    def submit(self, handler: Handler[A, R], argument: A, *, within: float = 0.0) -> asyncio.Future[R]:
        """
        Submit a request. Its future is answered when the transaction is on disk.

        A request that is not urgent goes with the next transaction of this process, and starts one of its own only
        when none came `within` so many seconds.
        """
        if self._closing or self._dead is not None or self._life != LIFE.number:
            raise self._refusal()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        request = (handler, argument, future)
        if self._inline:
            answers, touched = self._execute([request])
            self._deliver([future], answers, touched)
            return future
        self._waiting.append(request)
        if within:
            loop.call_later(within, self._rouse)
        elif self._idle and self._rousing is not loop:
            self._rousing = loop
            loop.call_soon(self._rouse)
        if not self._watched:
            self._watched = True
            loop.call_later(self._patience, self._watch, loop)
        return future

    def _rouse(self) -> None:
        """Wake the thread, after all whose turn it was have handed in, and give way until it goes to the disk."""
        self._rousing = None
        if not self._idle or not self._waiting:
            return
        self._idle = False
        loop = asyncio.get_running_loop()
        self._giving_way = _has_more_to_do(loop) and time.monotonic() >= self._no_way_until
        self._wake.put(None)
        if self._giving_way and not self._way.acquire(timeout=LONGEST_WAY):
            self._giving_way = False
            if not self._at_work:
                self._no_way_until = time.monotonic() + UNTIL_THE_NEXT_WAY
        if self._attended_by is not loop:
            self._attended_by = loop
            loop.call_later(FIRST_GAP, self._attend, loop, FIRST_GAP, self.batches)

    def _attend(self, loop: asyncio.AbstractEventLoop, gap: float, batches: int) -> None:
        """
        Let the thread have the interpreter's lock for a moment, again and again until it rests.

        A thread that comes back from the disk has to ask for the lock. A busy loop frees it at every turn and takes it
        back before the thread is awake, and so it may ask for seconds.
        """
        if self._attended_by is not loop:
            return
        if self._idle:
            self._attended_by = None
            return
        if _has_more_to_do(loop):
            time.sleep(MOMENT)
        gets_on = self._at_work or self.batches != batches
        gap = FIRST_GAP if gets_on else min(2 * gap, LONGEST_GAP)
        loop.call_later(gap, self._attend, loop, gap, self.batches)

    def _free_the_way(self) -> None:
        """The thread goes to the disk: the loop may go on."""
        self._at_work = False
        if self._giving_way:
            self._giving_way = False
            if self._way.locked():
                self._way.release()

    def _refusal(self) -> ReefknotError:
        if self._dead is not None:
            return self._dead
        if self._closing:
            return StoreUnavailableError(f"sqlite:{self._path}", "it is closed", "open it again")
        problem = "it was opened before a fork"
        return StoreUnavailableError(f"sqlite:{self._path}", problem, "open it again in the child process")

    async def close(self) -> None:
        """Write what was handed in, then let go of the file."""
        self._closing = True
        if self._inline:
            if self._connection is not None:
                self._connection.close()
            return
        thread, self._thread = self._thread, None
        if thread is not None and self._life == LIFE.number:
            self._wake.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join, self._patience)

    def _run(self, opened: asyncio.Future[None]) -> None:
        loop = opened.get_loop()
        try:
            self._connection = self._open_it()
        except BaseException as error:
            _call(loop, _fail, opened, translated(error, self._path))
            return
        _call(loop, _succeed, opened)
        while True:
            self._wake.get()
            while self._drain():
                continue
            if self._closing:
                self._connection.close()
                return

    def _drain(self) -> bool:
        """One batch. False when there was none."""
        batch = self._current
        waiting = self._waiting
        while waiting:
            batch.append(waiting.popleft())
        if not batch:
            self._idle = True
            # Somebody may have come between the last look and the flag.
            return bool(waiting) and not self._dead
        self._idle = False
        self._busy_since = time.monotonic()
        answers, touched = self._execute(batch)
        self._current = []
        self.batches += 1
        self._idle = not waiting
        more = bool(waiting)  # somebody may have come between the look and the flag
        if more:
            self._idle = False
        for loop, places in _grouped([future.get_loop() for _, _, future in batch]).items():
            _call(loop, self._deliver, [batch[at][2] for at in places], [answers[at] for at in places], touched)
        return more

    def _execute(self, batch: list[_Request]) -> tuple[list[Any], set[str]]:
        if self._dead is not None:
            return [self._dead] * len(batch), set()
        assert self._connection is not None
        try:
            return self._transact(self._connection, batch)
        except Exception as error:
            ours = translated(error, self._path)
            ours.__cause__ = error if ours is not error else error.__cause__
            if is_fatal(error):
                self._dead = ours
            if len(batch) == 1 or (isinstance(ours, StoreError) and type(ours) is not StoreError):
                return [ours] * len(batch), set()
        answers: list[Any] = []
        touched: set[str] = set()
        for request in batch:
            answer, topics = self._execute([request])
            answers += answer
            touched |= topics
        return answers, touched

    def _transact(self, connection: apsw.Connection, batch: list[_Request]) -> tuple[list[Any], set[str]]:
        answers: list[Any] = [None] * len(batch)
        connection.execute("BEGIN IMMEDIATE")
        self._at_work = True
        try:
            # Read after the lock was granted: the order of times is then the order of transactions.
            self._memory.check(connection)
            transaction = Transaction(connection, self._now(), self._memory)
            for handler, places in _grouped([handler for handler, _, _ in batch]).items():
                results = handler(transaction, [batch[place][1] for place in places])
                for place, result in zip(places, results, strict=True):
                    answers[place] = result
            transaction.flush()
            self._free_the_way()
            connection.execute("COMMIT")
            self._memory.committed()
        except BaseException:
            self._free_the_way()
            self._memory.clear()
            if not connection.get_autocommit():
                _quietly(connection, "ROLLBACK")
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
        self._committed(touched)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """A disk that never answers must not make callers wait for ever."""
        stuck = self._current and time.monotonic() - self._busy_since > self._patience * 2
        if stuck and self._dead is None:
            problem = f"a write has not finished for {self._patience * 2:g} s; whether it was kept is not known"
            self._dead = StoreUnavailableError(f"sqlite:{self._path}", problem, "check the disk, then open it again")
            for _, _, future in [*self._current, *self._waiting]:
                if future.get_loop() is loop and not future.done():
                    future.set_exception(self._dead)
        self._watched = bool(self._current or self._waiting)
        if self._watched:
            loop.call_later(self._patience, self._watch, loop)


def _grouped(kinds: Sequence[K]) -> dict[K, list[int]]:
    """The places of each kind, in the order in which the kinds came."""
    found: dict[K, list[int]] = {}
    latest: K | None = None
    places: list[int] = []
    for place, kind in enumerate(kinds):
        if kind is not latest:
            latest = kind
            places = found.setdefault(kind, [])
        places.append(place)
    return found


def _has_more_to_do(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop goes on at once instead of waiting. A hint: a loop that does not tell counts as busy."""
    return bool(getattr(loop, "_ready", True))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return  # the loop is closed: nobody is left to be told


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _quietly(connection: apsw.Connection, statement: str) -> None:
    try:
        connection.execute(statement)
    except apsw.Error:
        return  # the error that led here is the one to report
