"""
Events on their way to the log.

A journal turns an event into bytes, takes out configured secrets once more, and hands it to the log under a time limit.
A log that fails is tried again and buffered for, with a bound; journals of one log share the buffer. After that it is a
setting: work stops, or a loud counter and log line stand in. Never silent. An append whose answer was lost is repeated:
the event's id tells a repeat.

One journal, several sinks.

Every sink gets every event. One that fails or is slow holds back neither the others nor the work: what it missed waits
for it, with a bound, and what goes beyond is counted and told. Only when no sink keeps the events is that the caller's
failure. A sink may see an event twice after a time-out; its `event_id` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from reefknot import clock as timing
from reefknot.core.audit.event import Event, encode, timestamp
from reefknot.core.redaction import Redactor
from reefknot.errors import AuditUnavailableError, ParameterError, ReefknotError
from reefknot.ports.audit_log import AuditEntry
from reefknot.runtime import seeds as chance
from reefknot.runtime.log import logger, printable
from reefknot.runtime.tasks import start as keep

if TYPE_CHECKING:
    from reefknot.core.audit.chain import Head
    from reefknot.ports.audit_log import AuditEntry

TRIES = 3
SECONDS_A_TRY = 10.0
MOST_BUFFERED = 1000
LEFT_ALONE = 1.0
"""Seconds that a log is not asked again after it failed, so that its outage does not slow the work."""

_OURS = frozenset({"event_type", "event_code", "event_id", "timestamp"})
"""What is never anybody's text."""

_next_number = count(1).__next__


class AuditSink(Protocol):
    """The part of a log that a journal needs."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head: ...


class OnFailure(StrEnum):
    """What happens to work when its events cannot be kept."""

    FAIL_OPEN = "fail_open"
    FAIL_CLOSED = "fail_closed"


def on_failure_named(given: OnFailure | str) -> OnFailure:
    """The setting of this name."""
    try:
        return OnFailure(given)
    except ValueError:
        raise ParameterError("on_audit_failure", given, f"one of {', '.join(OnFailure)}") from None


class _Backlog:
    """What waits for one log."""

    def __init__(self) -> None:
        self.on_failure = OnFailure.FAIL_OPEN
        self.most_buffered = MOST_BUFFERED
        self.waiting: list[AuditEntry] = []
        self.lost = 0
        self.again_at = 0.0
        self.quiet_until = 0.0


_backlogs: WeakKeyDictionary[AuditSink, _Backlog] = WeakKeyDictionary()


def govern(sink: AuditSink, *, on_failure: OnFailure | str, most_buffered: int) -> None:
    """What holds for journals of this log that are made from now on and say nothing else."""
    backlog = _backlogs.setdefault(sink, _Backlog())
    backlog.on_failure, backlog.most_buffered = on_failure_named(on_failure), most_buffered


def event_id() -> str:
    """Unique for this process and seed; sorts by nothing."""
    return f"{chance.process_seed:016x}-{_next_number():x}"


def envelope(
    *,
    wall: float,
    work_id: str | None = None,
    tenant_id: str | None = None,
    trace_id: str | None = None,
    correlation_id: str | None = None,
) -> dict[str, Any]:
    """Fields that every event has: its time (`wall`, seconds since the epoch), a new id, and the ids of its work."""
    return {
        "timestamp": timestamp(wall),
        "event_id": event_id(),
        "tenant_id": tenant_id,
        "correlation_id": correlation_id,
        "trace_id": trace_id,
        "work_id": work_id,
    }


def now_text() -> str:
    """This moment, as events write it."""
    return timestamp(timing.wall())


class Journal:
    """Writes events for one part of the system."""

    def __init__(
        self,
        sink: AuditSink | None,
        *,
        on_failure: OnFailure | str | None = None,
        redactor: Redactor | None = None,
        most_buffered: int | None = None,
    ) -> None:
        self._sink = sink
        self._redactor = redactor or Redactor()
        self._backlog = _Backlog() if sink is None else _backlogs.setdefault(sink, _Backlog())
        chosen = self._backlog.on_failure if on_failure is None else on_failure_named(on_failure)
        self._closed = chosen is OnFailure.FAIL_CLOSED
        self._most = self._backlog.most_buffered if most_buffered is None else most_buffered

    @property
    def buffered(self) -> int:
        """Events that wait for the log to come back."""
        return len(self._backlog.waiting)

    @property
    def lost(self) -> int:
        """Events that are on no record. Anything but 0 is an incident."""
        return self._backlog.lost

    def safe(self, text: str) -> str:
        """The text as it may be kept or shown beside the events."""
        return self._redactor(text)

    def entries(self, events: Sequence[Event]) -> list[AuditEntry]:
        """Events as the log keeps them."""
        return [self._entry(event) for event in events]

    def _entry(self, event: Event) -> AuditEntry:
        at = int(timing.wall() * 1000)
        if not self._redactor.knows_values:
            ids = event.correlation_id, event.trace_id, event.work_id
            return AuditEntry(encode(event), event.event_type, at, *ids)
        told = msgspec.to_builtins(event)
        safe = {key: one if key in _OURS else self._without_secrets(one) for key, one in told.items()}
        body = msgspec.json.encode(safe, order="sorted")
        return AuditEntry(body, event.event_type, at, safe["correlation_id"], safe["trace_id"], safe["work_id"])

    def _without_secrets(self, value: Any) -> Any:
        """The values, text by text: a secret of digits must not be looked for inside of numbers."""
        if isinstance(value, str):
            return self._redactor.values_out_of(value)
        if isinstance(value, dict):
            return {self._redactor.values_out_of(key): self._without_secrets(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_secrets(one) for one in value]
        return value

    async def ready(self) -> None:
        """With `fail_closed`: no work begins while events of earlier work are on no record."""
        if self._closed and self._backlog.waiting:
            await self.write()

    async def write(self, *events: Event) -> None:
        """
        Put events on record. With `fail_closed`, `AuditUnavailableError` when that cannot be done.

        Without any, only what waits is written.
        """
        backlog = self._backlog
        if self._sink is None or not (events or backlog.waiting):
            return
        # Taken out before the first await: of two writers at once, only one hands in what waited.
        pending, backlog.waiting = [*backlog.waiting, *self.entries(events)], []
        trouble: Exception | None = None
        left_alone = timing.now() < backlog.again_at
        if not left_alone:
            try:
                trouble = await self._append(self._sink, pending)
            except BaseException:
                self._keep_back(pending)
                raise
            if trouble is None:
                return
            backlog.again_at = timing.now() + LEFT_ALONE
        self._keep_back(pending)
        self._say(trouble)
        if self._closed:
            raise AuditUnavailableError(events=len(events) or len(pending)) from trouble

    def write_soon(self, event: Event) -> None:
        """Put an event on record that goes with no other change, in the log's next write. It never raises."""
        append_soon = getattr(self._sink, "append_soon", None)
        if append_soon is None or self._backlog.waiting:
            keep(self.write(event), "writing an event")
            return
        entries = self.entries([event])
        try:
            future = append_soon(entries)
        except ReefknotError as error:
            self._keep_back(entries)
            self._say(error)
            return
        future.add_done_callback(partial(self._after_soon, entries))

    def _after_soon(self, entries: list[AuditEntry], future: asyncio.Future[Head]) -> None:
        trouble = None if future.cancelled() else future.exception()
        if trouble is not None or future.cancelled():
            self._keep_back(entries)
            self._say(trouble if isinstance(trouble, Exception) else None)

    async def _append(self, sink: AuditSink, entries: Sequence[AuditEntry]) -> Exception | None:
        trouble: Exception | None = None
        for attempt in range(TRIES):
            if attempt:
                await timing.asleep(0.05 * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(SECONDS_A_TRY):
                    await sink.append(entries)
            except TimeoutError as error:  # a log that hangs would hang again
                return error
            except Exception as error:
                trouble = error
            else:
                return None
        return trouble

    def _keep_back(self, pending: list[AuditEntry]) -> None:
        """In their order, and the oldest go when there are too many."""
        waiting = [*pending, *self._backlog.waiting]
        overflow = max(0, len(waiting) - self._most)
        self._backlog.lost += overflow
        self._backlog.waiting = waiting[overflow:]

    def _say(self, trouble: Exception | None) -> None:
        backlog, now = self._backlog, timing.now()
        if now < backlog.quiet_until:
            return
        backlog.quiet_until = now + LEFT_ALONE
        reason = "it failed a moment ago" if trouble is None else f"{type(trouble).__name__}: {trouble}"
        logger().error(
            "the audit log cannot be written (%s); %d events wait, %d are lost in all",
            printable(self._redactor(reason), most=300),
            len(backlog.waiting),
            backlog.lost,
        )


SECONDS_A_SINK = 5.0
"""Less than a journal waits for the whole."""


class FanOut:
    """Several sinks as one. Its head is that of the first sink that kept the events."""

    def __init__(self, *sinks: AuditSink, most_buffered: int = MOST_BUFFERED, seconds: float = SECONDS_A_SINK) -> None:
        if not sinks:
            raise ParameterError("sinks", sinks, "one sink or more")
        self._branches = [_Branch(sink, most_buffered, seconds) for sink in sinks]
        self._turn = asyncio.Lock()

    @property
    def lost(self) -> int:
        """Events that some sink will never get, counted once for each such sink."""
        return sum(branch.lost for branch in self._branches)

    @property
    def buffered(self) -> int:
        """Events that wait for a sink to come back, counted once for each such sink."""
        return sum(len(branch.waiting) for branch in self._branches)

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Keep these in every sink that can; the error of the first when none can."""
        async with self._turn:  # in one order everywhere
            answers = await asyncio.gather(*(branch.append(entries) for branch in self._branches))
        heads = [answer for answer in answers if not isinstance(answer, Exception)]
        if not heads:
            assert isinstance(answers[0], Exception)
            raise answers[0]  # nobody has them: whoever called still does
        for branch, answer in zip(self._branches, answers, strict=True):
            if isinstance(answer, Exception):
                branch.keep_back(entries, answer)
        return heads[0]


class _Branch:
    """One sink, and what it has missed."""

    def __init__(self, sink: AuditSink, most: int, seconds: float) -> None:
        self._sink = sink
        self._most = most
        self._seconds = seconds
        self.waiting: list[AuditEntry] = []
        self.lost = 0

    async def append(self, entries: Sequence[AuditEntry]) -> Head | Exception:
        try:
            async with asyncio.timeout(self._seconds):
                head = await self._sink.append([*self.waiting, *entries])
        except Exception as error:
            return error
        self.waiting.clear()
        return head

    def keep_back(self, entries: Sequence[AuditEntry], trouble: Exception) -> None:
        pending = [*self.waiting, *entries]
        overflow = max(0, len(pending) - self._most)
        self.lost += overflow
        self.waiting = pending[overflow:]
        logger().error(
            "an audit sink (%s) cannot be written (%s: %s); %d events wait for it, %d are lost in all",
            type(self._sink).__name__,
            type(trouble).__name__,
            printable(str(trouble), most=300),
            len(self.waiting),
            self.lost,
        )
