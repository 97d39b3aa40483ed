"""
Commits: the changes that callers ask for, made in the mirror and stored at the server, many in one atomic batch.

A change is a function on the state of this process. All waiting changes run one after the other; the records they
touched go to the server as one batch, each with the revision that it was changed from. The server stores all of them or
none. If another process changed one of them first, everything is undone here, the mirror catches up, and the changes
run again. A change is answered when its batch is stored; under `result-dedup` a claim or a renewal is answered at once.

A batch ends with the packs of its events, else with a marker of this process. Its last message shows whether a batch
without an answer was stored: it names the batch. Until that is known the batch is sent again, and the revisions ensure
that it counts once. A single record without events needs neither batch nor marker, and names its change itself. If
another process has changed it before the answer came, the change runs again on the new record. Records outside of the
mirror, which are those of idempotency keys, can be stored alone: many are on their way at a time, besides the batch,
each with its own revision.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.errors import (
    ReefknotError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
)
from reefknot.idempotency.model import KeyRecord
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import AWAY_S
from reefknot.stores.jetstream.connection import RESULT_DEDUP, Connection, NatsOptions
from reefknot.stores.jetstream.events import AuditWriter
from reefknot.stores.jetstream.reads import last_message
from reefknot.stores.jetstream.requests import NotOfThisRoleError, RefusedError, UnansweredError
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.wire import PASSING, WRONG_LAST

R = TypeVar("R")
MOST_WAITING = 20_000
MOST_AT_ONCE = 128
MOST_ALONE = 256
"""Most records that are on their way without a batch."""
MOST_MESSAGES = 900
"""Messages of a batch; the server takes a thousand."""
MOST_TRIES = 200
SOON_S = 0.5
MOST_REFUSALS = 8
"""Most refusals of one batch for other reasons than a conflict: a changing leader may refuse a few."""
CATCH_UP_S = 0.25
LONGEST_PAUSE_S = 0.05
PATIENCE_S = 10.0
SAY_EVERY_S = 10.0
COMMIT_HEADER = "Reefknot-Commit"
MARKER_S = 86_400
"""How long the marker of a process's last batch is kept."""


class Batch:
    """The messages and events of the changes that go together."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.stored: list[tuple[int, Callable[[int], None]]] = []
        self.events: list[AuditEntry] = []
        self.keys: dict[str, tuple[int, KeyRecord | None]] = {}
        """The records of idempotency keys after the earlier changes, and their places in the batch."""

    def put_key(self, key: str, message: Message, record: KeyRecord | None, stored: Callable[[int], None]) -> None:
        """Store the record of a key; the last change of a batch counts."""
        if key in self.keys:
            place = self.keys[key][0]
            message.expected = self.messages[place].expected
            self.messages[place] = message
            self.stored = [one for one in self.stored if one[0] != place]
            self.stored.append((place, stored))
        else:
            place = len(self.messages)
            self.add(message, stored)
        self.keys[key] = place, record

    def add(self, message: Message, stored: Callable[[int], None] | None = None) -> None:
        """Add a message to the batch; `stored` is called with its sequence."""
        if stored is not None:
            self.stored.append((len(self.messages), stored))
        self.messages.append(message)


class Change(Generic[R]):
    """A caller's change: `run` makes it, `prepare` reads what it needs, again after every conflict."""

    def __init__(
        self,
        run: Callable[[Batch, Moment], R],
        prepare: Callable[[], Awaitable[None]] | None,
        future: asyncio.Future[R],
        is_soft: bool,
    ) -> None:
        self.run = run
        self.prepare = prepare
        self.future = future
        self.is_soft = is_soft


class ConflictError(Exception):
    """A record was changed by another process or caller. `sequence` is that of the newer message."""

    def __init__(self, sequence: int) -> None:
        super().__init__(sequence)
        self.sequence = sequence
        self.ids: list[str] = []
        """The items whose records were to be changed."""


class Commits:
    """The one writer of a store in this process."""

    def __init__(self, connection: Connection, state: State, audit: AuditWriter) -> None:
        self._connection = connection
        self._state = state
        self._audit = audit
        self._is_fast = connection.options.guarantee == RESULT_DEDUP
        self._waiting: deque[Change[Any]] = deque()
        self._reads: list[Callable[[], None]] = []
        self._is_busy = False
        self._more = asyncio.Event()
        self._services = Services("store")
        self._alone = 0
        self._places = asyncio.Semaphore(MOST_ALONE)
        self._closed = False
        self._logged_at = -inf
        self._has_stored = False

    def start(self) -> None:
        self._services.keep("commits", self._work)

    async def change(
        self,
        run: Callable[[Batch, Moment], R],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
        is_soft: bool = False,
    ) -> R:
        """Make a change and wait until it is stored. `run` raises before it changes anything, or not at all."""
        future = self._add(run, prepare, is_soft)
        self._more.set()
        return await future

    async def store_alone(self, message: Message) -> int:
        """
        Store one record at once, while batches and other records are on their way; returns its sequence.

        A `ConflictError` says that the record was changed by another caller. A caller who is cancelled cannot know
        whether the record is stored.
        """
        self._check_open()
        if self._alone >= MOST_WAITING:
            raise self._unavailable(f"{MOST_WAITING} changes are waiting for the server")
        self._alone += 1
        try:
            async with self._places:
                return await self._send_until_known([message], new_id(), is_doubtful=False)
        finally:
            self._alone -= 1
            if self._closed:
                self._more.set()

    def change_soon(self, run: Callable[[Batch, Moment], R]) -> asyncio.Future[R]:
        """Make a change with the next batch, or shortly after."""
        future = self._add(run, None, False)
        asyncio.get_running_loop().call_later(SOON_S, self._more.set)
        return future

    def _add(
        self, run: Callable[[Batch, Moment], R], prepare: Callable[[], Awaitable[None]] | None, is_soft: bool
    ) -> asyncio.Future[R]:
        self._check_open()
        if len(self._waiting) >= MOST_WAITING:
            raise self._unavailable(f"{MOST_WAITING} changes are waiting for the server")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(Change(run, prepare, future, is_soft and self._is_fast))
        return future

    async def read(self, look: Callable[[Moment], R]) -> R:
        """Read the state when nothing in it is unstored."""
        self._check_open()
        if not self._is_busy:
            return look(self._state.now())
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def answer() -> None:
            if not future.done():
                try:
                    future.set_result(look(self._state.now()))
                except ReefknotError as error:
                    future.set_exception(error)

        self._reads.append(answer)
        return await future

    async def close(self) -> None:
        """Store the waiting changes, for a bounded time, then stop."""
        self._closed = True
        self._more.set()
        await self._services.finish(PATIENCE_S if self._connection.is_up else AWAY_S)
        for change in self._waiting:
            if not change.future.done():
                change.future.set_exception(self._unavailable("it was closed"))

    async def _work(self) -> None:
        while not (self._closed and not self._waiting and not self._alone):
            if not self._waiting:
                self._more.clear()
                await self._more.wait()
            while self._waiting:
                number = min(MOST_AT_ONCE, len(self._waiting))
                taken = [self._waiting.popleft() for _ in range(number)]
                await self._commit_all([one for one in taken if not one.future.done()])

    async def _commit_all(self, changes: list[Change[Any]]) -> None:
        """Store these changes; what cannot be stored fails for its own caller."""
        try:
            await self._commit(changes)
        except StoreFullError as error:
            left = [one for one in changes if not one.future.done()]
            if len(changes) > 1:
                middle = (len(left) + 1) // 2
                await self._commit_all(left[:middle])
                await self._commit_all(left[middle:])
            else:
                _fail(left, error)
        except asyncio.CancelledError:  # by a step, before anything was sent
            _fail(changes, self._unavailable("a change was cancelled from outside"))
            raise
        except Exception as error:
            text, shown = error_text(error), self._connection.options.shown
            logger().error("%s: %d changes were not stored and fail (%s)", shown, len(changes), text)
            _fail(changes, error)

    async def _commit(self, changes: list[Change[Any]]) -> None:
        """Store these changes, repeated after each conflict with another process."""
        for number in range(MOST_TRIES):
            if number == MOST_TRIES // 2:
                self._audit.begin()  # something else may have written what this chain goes on with
            if number:
                preparing = [one.prepare() for one in changes if one.prepare is not None]
                await asyncio.gather(*preparing)
                await pause_after(number)
            try:
                await self._try(changes)
                return
            except ConflictError as lost:
                changes = [one for one in changes if not one.future.done()]
                await self._state.catch_up(lost.sequence - 1, lost.ids, CATCH_UP_S)
        raise self.overtaken()

    async def _try(self, changes: Sequence[Change[Any]]) -> None:
        state, batch = self._state, Batch()
        self._begin()
        try:
            now = state.now()
            answers = [_run(change, batch, now) for change in changes]
            first = len(batch.messages)
            work, records = state.work_messages()
            messages = [*batch.messages, *work, *state.pool_messages()]
            events = [*state.table.events, *batch.events]
            if len(messages) > MOST_MESSAGES:
                raise StoreFullError(
                    self._connection.options.shown, f"a change has {len(messages)} records", "make it in smaller parts"
                )
            for change, (answer, error) in zip(changes, answers, strict=True):
                if change.is_soft and error is None and not change.future.done():
                    change.future.set_result(answer)
            if messages or events:
                start = await self._store(messages, events)
                for place, stored in batch.stored:
                    stored(start + place)
                for work_id, place, kept in records:
                    state.keep(work_id, start + first + place, kept)
            over = [work_id for work_id, _, (subject, *_) in records if not state.names.is_open(subject)]
            state.took()
        except ConflictError as lost:
            lost.ids = list(state.table.before)
            state.table.roll_back()
            raise
        except BaseException:
            state.table.roll_back()
            raise
        finally:
            self._end()
        for change, (answer, error) in zip(changes, answers, strict=True):
            if not change.future.done():
                if error is not None:
                    change.future.set_exception(error)
                else:
                    change.future.set_result(answer)
        if over:
            await self._announce_ends(over)

    async def _announce_ends(self, over: Sequence[str]) -> None:
        """Wake the callers in other processes that wait for these ends; they look by themselves a second later."""
        with suppress(StoreError):
            await self._connection.publish_each([self._state.names.over(work_id) for work_id in over])

    def _begin(self) -> None:
        self._is_busy = True
        self._state.hold()

    def _end(self) -> None:
        self._state.release()
        self._is_busy = False
        reads, self._reads = self._reads, []
        for answer in reads:
            answer()

    async def _store(self, messages: list[Message], events: Sequence[AuditEntry]) -> int:
        """Store a batch; returns the sequence of its first message."""
        if len(messages) == 1 and not events:
            return await self._send_whatever_is_cancelled(messages, new_id())
        sealed = self._audit.seal(events)
        marker = Message(self._state.names.writer(self._audit.head.chain), ttl=MARKER_S)
        whole = [*messages, *(sealed.packs or [marker])]
        try:
            last = await self._send_whatever_is_cancelled(whole, new_id())
        except ConflictError:
            raise
        except BaseException:
            self._audit.begin()  # the batch may be stored: the chain is not continued on a guess
            raise
        self._audit.stored(sealed, last)
        return last - len(whole) + 1

    async def _send_whatever_is_cancelled(self, messages: list[Message], commit_id: str) -> int:
        """Send a batch; a cancellation by a step does not end that, for the batch may be stored."""
        is_doubtful = False
        while True:
            try:
                return await self._send_until_known(messages, commit_id, is_doubtful=is_doubtful)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed or task is None:
                    raise
                task.uncancel()
                is_doubtful = True

    async def _send_until_known(self, messages: list[Message], commit_id: str, *, is_doubtful: bool) -> int:
        """Send a batch until it is known to be stored, or not to be; returns the sequence of its last message."""
        number = 0
        while True:
            number += 1
            try:
                stored_at = await self._send(messages, commit_id)
                self._has_stored = True
                return stored_at
            except RefusedError as error:
                if error.number not in WRONG_LAST:
                    if number >= MOST_REFUSALS and error.number not in PASSING:
                        raise self._unavailable(f"the server refuses a batch ({error.text})") from error
                    self._say_waiting(number, error)
                    await asyncio.sleep(0.05 * min(number, 20))
                    continue
                found_at = await self._found(messages[-1], commit_id) if is_doubtful else None
                if found_at is not None:
                    return found_at
                raise ConflictError(_sequence_in(error.text)) from error
            except StoreReplacedError:
                raise
            except UnansweredError as error:
                is_doubtful = True
                self._say_waiting(number, error)
            except StoreUnavailableError as error:
                is_denied = isinstance(error, StorePermissionError) and not self._has_stored
                if is_denied or isinstance(error, NotOfThisRoleError):
                    raise  # not a passing refusal: this process may write nothing, or not this
                self._say_waiting(number, error)
                if self._closed and number > 3:
                    raise
            await self._connection.wait_until_up(1.0)
            await asyncio.sleep(min(1.0, 0.02 * 2 ** min(number, 6)))

    async def _found(self, message: Message, commit_id: str) -> int | None:
        """The sequence of the message if it is the last one on its subject, and is of this batch."""
        while True:
            try:
                subject = message.over or message.subject
                last = await last_message(self._connection, self._state.names.state, subject)
                return last.sequence if last is not None and last.headers.get(COMMIT_HEADER) == commit_id else None
            except StoreUnavailableError as error:
                if self._connection.is_closed:
                    raise self._connection.failure or error from None
                self._say_waiting(1, error)
                await self._connection.wait_until_up(1.0)
                await asyncio.sleep(0.1)

    async def _send(self, messages: list[Message], commit_id: str) -> int:
        batch = [(one.subject, one.body, one.headers()) for one in messages]
        batch[-1][2][COMMIT_HEADER] = commit_id
        return await self._connection.store(batch)

    def _say_waiting(self, number: int, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if number % 10 == 1 and now - self._logged_at >= SAY_EVERY_S:  # once for all that wait
            self._logged_at = now
            logger().warning("changes wait until %s answers (%s)", self._connection.options.shown, error_text(error))

    def overtaken(self) -> StoreUnavailableError:
        """The error of a change that never came first."""
        return self._unavailable(f"other processes changed the same records first, {MOST_TRIES} times")

    def _check_open(self) -> None:
        if self._closed or self._connection.is_closed:
            _ = self._connection.client  # raises, after a fork with what to do
            raise self._unavailable("it is closed", "open a new one")

    def _unavailable(self, problem: str, way_out: str = "check the server, and try again") -> StoreUnavailableError:
        return StoreUnavailableError(self._connection.options.shown, problem, way_out)


def run_apart(options: NatsOptions, work: Callable[[Connection], Awaitable[None]]) -> None:
    """Run `work` over a connection and loop of its own, from any thread: the loop of a store may be blocked."""

    async def main() -> None:
        connection = Connection(options)
        await connection.open()
        try:
            await work(connection)
        finally:
            await connection.close()

    try:
        asyncio.run(main())
    except (StoreError, TimeoutError) as error:
        logger().warning("%s: leases were not changed (%s)", options.shown, error_text(error))


async def pause_after(conflicts: int) -> None:
    """Wait a moment after more than two conflicts, so that one of the callers gets ahead."""
    if conflicts > 2:
        await asyncio.sleep(random.uniform(0, min(LONGEST_PAUSE_S, 0.001 * 2**conflicts)))


def _run(change: Change[R], batch: Batch, now: Moment) -> tuple[R | None, Exception | None]:
    try:
        return change.run(batch, now), None
    except Exception as error:  # the caller's own error: the rest of the batch continues
        return None, error


def _fail(changes: Sequence[Change[Any]], error: Exception) -> None:
    for change in changes:
        if not change.future.done():
            change.future.set_exception(error)


def _sequence_in(text: str) -> int:
    """The number in JetStream's `wrong last sequence: 12`."""
    digits = "".join(one for one in text.rpartition("sequence: ")[2] if one.isdecimal())
    return int(digits or 0)
