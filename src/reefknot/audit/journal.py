"""
`Journal`: writes events to an audit log, and buffers them with a bound while the log is down.

A journal encodes an event, takes configured secrets out once more, and appends it under a time limit. A log that fails
is tried again, then paused; its events are buffered meanwhile, in one buffer for all journals of that log. What happens
then is a setting: `fail_closed` stops work, `fail_open` goes on, with a counter of lost events and an error in the log.
An append whose answer was lost is repeated, so a log may hold an event twice; its `event_id` tells.

`FanOut` is several sinks as one. A sink that fails or hangs holds back neither the others nor the work: it has its own
bounded buffer. Only when no sink takes the events does the append fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from reefknot import clock
from reefknot.audit.model.event import Event, as_written, encode, timestamp, timestamp_ms
from reefknot.audit.port import AuditEntry, AuditLog
from reefknot.core import checks
from reefknot.core.checks import choice
from reefknot.core.redaction import Redactor
from reefknot.errors import AuditUnavailableError, ParameterError, ReefknotError
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.redactor import process_redactor
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import run_in_background

if TYPE_CHECKING:
    from reefknot.audit.model.chain import Head
    from reefknot.queue.model.messages import ExecAssignment
    from reefknot.queue.model.work import WorkItem

APPEND_TRIES = 3
APPEND_TIMEOUT_S = 10.0
SINK_TIMEOUT_S = 5.0
"""Timeout of one sink of several, shorter than a journal's for all of them."""
MOST_BUFFERED = 1000
RETRY_PAUSE_S = 1.0
"""Seconds without another append after one failed, so that an outage of the log does not slow the work."""

_NEVER_REDACTED = frozenset({"event_type", "event_code", "event_id", "timestamp"})


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
        "event_id": new_id(),
        "tenant_id": tenant_id,
        "correlation_id": correlation_id,
        "trace_id": trace_id,
        "work_id": work_id,
    }


def about_assignment(assignment: ExecAssignment, wall: float) -> dict[str, Any]:
    """The envelope of an event about an assignment."""
    return _about(assignment, wall, work_id=assignment.assignment_id, correlation_id=assignment.request_id)


def about_item(item: WorkItem, wall: float) -> dict[str, Any]:
    """The envelope of an event about a stored item: with the assignment's own id, and its tenant."""
    return _about(item, wall, work_id=item.assignment_id, correlation_id=item.correlation_id)


def _about(work: ExecAssignment | WorkItem, wall: float, **ids: str | None) -> dict[str, Any]:
    return envelope(wall=wall, tenant_id=work.tenant_id, trace_id=work.trace_id, **ids)


class AuditSink(Protocol):
    """The part of an audit log that a journal needs; copies of a log have only this part."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head: ...


class OnFailure(StrEnum):
    """Setting for work whose events cannot be written: it continues, or it stops."""

    FAIL_OPEN = "fail_open"
    FAIL_CLOSED = "fail_closed"


Observer = Callable[[Event], None]
"""Counts or traces the events of a log. It is called in the thread that writes them, and does not wait."""


class _Backlog:
    """Entries that wait for one sink. Beyond the bound the oldest are dropped and counted."""

    def __init__(self) -> None:
        self.waiting: list[AuditEntry] = []
        self.lost = 0

    def hold(self, entries: list[AuditEntry], most: int) -> None:
        """Wait with these, oldest first, instead of what was waiting."""
        overflow = max(0, len(entries) - most)
        self.lost += overflow
        self.waiting = entries[overflow:]


class _LogState(_Backlog):
    """Backlog, settings and pauses that all journals of one log share."""

    def __init__(self) -> None:
        super().__init__()
        self.on_failure = OnFailure.FAIL_OPEN
        self.most_buffered = MOST_BUFFERED
        self.paused_until = 0.0
        self.quiet_until = 0.0
        self.observers: list[Observer] = []


_states: WeakKeyDictionary[AuditSink, _LogState] = WeakKeyDictionary()


def configure(sink: AuditSink, *, on_failure: OnFailure | str, most_buffered: int) -> None:
    """Set the defaults of journals that are made for this log from now on."""
    state = _states.setdefault(sink, _LogState())
    state.on_failure, state.most_buffered = choice("on_audit_failure", on_failure, OnFailure), most_buffered


@contextmanager
def observed(sink: AuditSink, observer: Observer) -> Iterator[None]:
    """Show every event for this log to an observer, in this process and for as long as the block lasts."""
    observers = _states.setdefault(sink, _LogState()).observers
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


class Journal:
    """Writes the events of one part of the system. Without a sink it writes nothing."""

    def __init__(
        self,
        sink: AuditSink | None,
        *,
        on_failure: OnFailure | str | None = None,
        redactor: Redactor | None = None,
        most_buffered: int | None = None,
    ) -> None:
        self._sink = sink
        self._log = sink if isinstance(sink, AuditLog) else None
        """The sink, if it is a whole log; others have no `append_soon`."""
        self._redactor = redactor or Redactor()
        self._state = _LogState() if sink is None else _states.setdefault(sink, _LogState())
        chosen = self._state.on_failure if on_failure is None else choice("on_audit_failure", on_failure, OnFailure)
        self._fail_closed = chosen is OnFailure.FAIL_CLOSED
        self._most_buffered = self._state.most_buffered if most_buffered is None else most_buffered
        self._soon: list[AuditEntry] = []

    @property
    def buffered(self) -> int:
        """Events that wait for the log to come back."""
        return len(self._state.waiting)

    @property
    def lost(self) -> int:
        """Events that were dropped and are in no log. Anything but 0 is an incident."""
        return self._state.lost

    def safe(self, text: str) -> str:
        """The text without secrets, as it may be stored or shown."""
        return process_redactor(self._redactor)(text)

    def entries(self, events: Sequence[Event]) -> list[AuditEntry]:
        """Events encoded and without secrets, ready for a log to keep."""
        entries, redactor = [], process_redactor(self._redactor)
        for event in events:
            for observe in self._state.observers:
                try:
                    observe(event)
                except Exception as error:  # a mistake in counting must not reach the work
                    logger().error("an event was not observed (%s)", error_text(error))
            at = timestamp_ms(event.timestamp)
            at = int(clock.wall() * 1000) if at is None else at
            if redactor.knows_values:
                entries.append(_redacted_entry(event, at, redactor))
                continue
            ids = event.correlation_id, event.trace_id, event.work_id
            entries.append(AuditEntry(encode(as_written(event)), event.event_type, at, *ids))
        return entries

    async def flush_backlog(self) -> None:
        """With `fail_closed`, write buffered events before new work begins, or raise. With `fail_open`, do nothing."""
        if self._fail_closed and self._state.waiting:
            await self.write()

    async def write(self, *events: Event) -> None:
        """
        Append these events, after the buffered ones. Without events, only the buffered ones.

        With `fail_closed`, `AuditUnavailableError` when the log does not take them; they stay buffered.
        """
        state = self._state
        if self._sink is None or not (events or state.waiting):
            return
        # Taken out before the first await: of two writers at once, only one appends the backlog.
        pending, state.waiting = [*state.waiting, *self.entries(events)], []
        trouble: Exception | None = None
        if clock.now() >= state.paused_until:
            try:
                trouble = await self._append(self._sink, pending)
            except BaseException:
                self._buffer(pending)
                raise
            if trouble is None:
                return
            state.paused_until = clock.now() + RETRY_PAUSE_S
        self._buffer(pending)
        self._log_outage(trouble)
        if self._fail_closed:
            raise AuditUnavailableError(events=len(events) or len(pending)) from trouble

    def write_soon(self, event: Event) -> None:
        """
        Append an event that belongs to no other change, with the log's next write; after a failure it is buffered.
        """
        if self._sink is None:
            return
        self._soon += self.entries([event])
        if len(self._soon) == 1:  # what else comes in this turn of the loop goes with it
            asyncio.get_running_loop().call_soon(self._append_soon)

    def _append_soon(self) -> None:
        entries, self._soon = self._soon, []
        if self._log is None or self._state.waiting:
            self._state.hold([*self._state.waiting, *entries], self._most_buffered)
            run_in_background(self.write(), "writing events")
            return
        try:
            future = self._log.append_soon(entries)
        except ReefknotError as error:
            self._buffer(entries)
            self._log_outage(error)
            return
        future.add_done_callback(partial(self._after_soon, entries))

    def _after_soon(self, entries: list[AuditEntry], future: asyncio.Future[Head]) -> None:
        trouble = None if future.cancelled() else future.exception()
        if trouble is not None or future.cancelled():
            self._buffer(entries)
            self._log_outage(trouble if isinstance(trouble, Exception) else None)

    async def _append(self, sink: AuditSink, entries: Sequence[AuditEntry]) -> Exception | None:
        trouble: Exception | None = None
        for attempt in range(APPEND_TRIES):
            if attempt:
                await clock.asleep(0.05 * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(APPEND_TIMEOUT_S):
                    await sink.append(entries)
            except TimeoutError as error:  # a log that hangs would hang again
                return error
            except Exception as error:
                trouble = error
            else:
                return None
        return trouble

    def _buffer(self, pending: list[AuditEntry]) -> None:
        self._state.hold([*pending, *self._state.waiting], self._most_buffered)

    def _log_outage(self, trouble: Exception | None) -> None:
        state, now = self._state, clock.now()
        if now < state.quiet_until:
            return
        state.quiet_until = now + RETRY_PAUSE_S
        reason = "it failed a moment ago" if trouble is None else f"{type(trouble).__name__}: {trouble}"
        text = "the audit log cannot be written (%s); %d events are buffered, %d are lost in all"
        logger().error(text, printable(self.safe(reason), most=300), len(state.waiting), state.lost)


def _redacted_entry(event: Event, at: int, redactor: Redactor) -> AuditEntry:
    """The entry of an event without the configured secrets."""
    known = msgspec.structs.replace(event, tenant_id=_without(redactor, event.tenant_id))  # before it is hashed
    fields = msgspec.to_builtins(as_written(known))
    safe = {key: one if key in _NEVER_REDACTED else _without(redactor, one) for key, one in fields.items()}
    body = msgspec.json.encode(safe, order="sorted")
    found_by = (_without(redactor, one) for one in (event.correlation_id, event.trace_id, event.work_id))
    return AuditEntry(body, event.event_type, at, *found_by)


def _without(redactor: Redactor, value: Any) -> Any:
    """Redact text by text, never the encoded event: a secret of digits must not match inside numbers."""
    if isinstance(value, str):
        return redactor.values_out_of(value)
    if isinstance(value, dict):
        return {redactor.values_out_of(key): _without(redactor, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without(redactor, one) for one in value]
    return value


class FanOut:
    """Several sinks as one. `append` returns the head of the first sink that took the events."""

    def __init__(
        self, *sinks: AuditSink, most_buffered: int = MOST_BUFFERED, seconds: checks.Seconds = SINK_TIMEOUT_S
    ) -> None:
        if not sinks:
            raise ParameterError("sinks", sinks, "one sink or more")
        self._branches = [(sink, _Backlog()) for sink in sinks]
        self._most_buffered = most_buffered
        self._seconds = checks.seconds("seconds", seconds)
        self._one_at_a_time = asyncio.Lock()

    @property
    def lost(self) -> int:
        """Events that some sink will never get, counted once for each such sink."""
        return sum(missed.lost for _, missed in self._branches)

    @property
    def buffered(self) -> int:
        """Events that wait for a sink to come back, counted once for each such sink."""
        return sum(len(missed.waiting) for _, missed in self._branches)

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Append to every sink. A sink that fails gets the entries later; when all fail, the first one's error."""
        async with self._one_at_a_time:  # the same order in every sink
            answers = await asyncio.gather(*(self._append(*branch, entries) for branch in self._branches))
        heads = [answer for answer in answers if not isinstance(answer, Exception)]
        if not heads:
            assert isinstance(answers[0], Exception)
            raise answers[0]  # not buffered here: the caller still has them
        for (sink, missed), answer in zip(self._branches, answers, strict=True):
            if isinstance(answer, Exception):
                missed.hold([*missed.waiting, *entries], self._most_buffered)
                text = "the audit sink %s cannot be written (%s); %d events are buffered for it, %d are lost in all"
                name = type(sink).__name__
                logger().error(text, name, error_text(answer), len(missed.waiting), missed.lost)
        return heads[0]

    async def _append(self, sink: AuditSink, missed: _Backlog, entries: Sequence[AuditEntry]) -> Head | Exception:
        try:
            async with asyncio.timeout(self._seconds):
                head = await sink.append([*missed.waiting, *entries])
        except Exception as error:
            return error
        missed.waiting.clear()
        return head
