"""
Events on their way to the log.

A journal turns an event into bytes, takes out configured secrets once more, and hands it to the log under a time limit.
A log that fails is tried again and buffered for, with a bound. After that it is a setting: work stops, or a loud
counter and log line stand in. Never silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Protocol

from reefknot.core.audit.event import Event, encode, timestamp
from reefknot.core.redaction import Redactor
from reefknot.errors import AuditUnavailableError
from reefknot.execution import chance, report, timing
from reefknot.ports.audit_log import AuditEntry

if TYPE_CHECKING:
    from reefknot.core.audit.chain import Head

TRIES = 3
SECONDS_A_TRY = 10.0
MOST_BUFFERED = 1000

_next_number = count(1).__next__


class AuditSink(Protocol):
    """The part of a log that a journal needs."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head: ...


class OnFailure(StrEnum):
    """What happens to work when its events cannot be kept."""

    FAIL_OPEN = "fail_open"
    FAIL_CLOSED = "fail_closed"


def event_id() -> str:
    """Unique for this process and seed; sorts by nothing."""
    return f"{chance.process_seed:016x}-{_next_number():x}"


def now_text() -> str:
    """This moment, as events write it."""
    return timestamp(timing.wall())


class Journal:
    """Writes events for one part of the system."""

    def __init__(
        self,
        sink: AuditSink | None,
        *,
        on_failure: OnFailure | str = OnFailure.FAIL_OPEN,
        redactor: Redactor | None = None,
        most_buffered: int = MOST_BUFFERED,
    ) -> None:
        self._sink = sink
        self._on_failure = OnFailure(on_failure)
        self._redactor = redactor or Redactor()
        self._most = most_buffered
        self._waiting: list[AuditEntry] = []
        self.lost = 0
        """Events that are on no record. Anything but 0 is an incident."""

    @property
    def buffered(self) -> int:
        """Events that wait for the log to come back."""
        return len(self._waiting)

    def entries(self, events: Sequence[Event]) -> list[AuditEntry]:
        """Events as the log keeps them."""
        return [self._entry(event) for event in events]

    def _entry(self, event: Event) -> AuditEntry:
        body = self._redactor.values_out_of(encode(event).decode()).encode()
        return AuditEntry(
            body, event.event_type, int(timing.wall() * 1000), event.correlation_id, event.trace_id, event.work_id
        )

    async def write(self, *events: Event) -> None:
        """Put events on record. With `fail_closed`, `AuditUnavailableError` when that cannot be done."""
        if self._sink is None or not (events or self._waiting):
            return
        pending = [*self._waiting, *self.entries(events)]
        trouble = await self._append(pending)
        if trouble is None:
            self._waiting.clear()
            return
        if self._on_failure is OnFailure.FAIL_CLOSED:
            raise AuditUnavailableError(events=len(events)) from trouble
        self._keep_back(pending, trouble)

    async def _append(self, entries: Sequence[AuditEntry]) -> Exception | None:
        import asyncio

        assert self._sink is not None
        trouble: Exception | None = None
        for attempt in range(TRIES):
            try:
                async with asyncio.timeout(SECONDS_A_TRY):
                    await self._sink.append(entries)
            except Exception as error:
                trouble = error
                await timing.asleep(0.05 * 2**attempt)
            else:
                return None
        return trouble

    def _keep_back(self, pending: list[AuditEntry], trouble: Exception) -> None:
        overflow = max(0, len(pending) - self._most)
        self.lost += overflow
        self._waiting = pending[overflow:]
        report.logger().error(
            "the audit log cannot be written (%s: %s); %d events wait, %d are lost in all",
            type(trouble).__name__,
            report.printable(str(trouble), most=300),
            len(self._waiting),
            self.lost,
        )
