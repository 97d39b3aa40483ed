"""
What happens in a running system, as it happens, in words.

Read from the record, so nothing is told that is not on it. At most so many lines a second; what is more is counted by
kind, and the counts are told instead.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.cli.audit_source import PAGE
from reefknot.cli.stores import places
from reefknot.core.audit import event as told
from reefknot.core.audit.analysis import epoch_seconds
from reefknot.core.messages import AckStatus
from reefknot.ports.audit_log import AuditQuery, KeptEntry

if TYPE_CHECKING:
    from reefknot.core.audit.event import AnyEvent
    from reefknot.ports.audit_log import AuditLog

LINES_A_SECOND = 20
LONGEST_WAIT_S = 0.25
LONGEST_TEXT = 160

Say = Callable[[str, str], None]
"""A kind, and the line."""


def in_words(event: AnyEvent) -> tuple[str, str] | None:
    """Kind and sentence of an event that a person wants to see, None of one that is only for the record."""
    match event:
        case told.RetryAttempt():
            failure = _failure(event.exception_type, event.exception_message)
            return "retry", f"attempt {event.attempt_number} failed: {failure}; again in {event.delay_seconds:.2f} s"
        case told.RetryRecovered():
            return "recovered", f"after {event.total_attempts} attempts in {event.elapsed_seconds:.2f} s"
        case told.RetryExhausted() | told.RetryRefused():
            failure = _failure(event.final_exception_type, event.final_exception_message)
            attempts = "1 attempt" if event.total_attempts == 1 else f"{event.total_attempts} attempts"
            return "given up", f"after {attempts} ({event.reason.value}): {failure}"
        case told.Admission():
            return _admission(event)
        case told.Routing():
            return None if event.worker_id is not None else ("rejected", f"nobody takes it: {event.reason}")
        case told.Dropped():
            return "dropped", f"{event.reason} ({event.resource_class})"
        case told.Quarantined():
            return "quarantined", f"{event.reason}; a person decides: reefknot quarantine list"
        case told.Requeued():
            return "requeued", event.reason
        case told.TimeoutOccurred():
            return ("timed out", f"{event.timeout_seconds:g} s are over") if event.whole else None
        case told.BreakerEvent():
            waits = "" if event.wait_seconds is None else f"; it waits {event.wait_seconds:.3g} s"
            return "breaker", f"{event.name} is {event.state}{waits}"
        case told.OperatorAction():
            return "operator", f"{event.actor}: {event.action} {event.subject or ''}".rstrip()
        case _:
            return None


def _admission(event: told.Admission) -> tuple[str, str] | None:
    inputs = event.inputs or {}
    if event.status == AckStatus.ACCEPTED.value:
        message = str(inputs.get("message", ""))
        kind = next((word for word in ("deferred", "degraded") if word in message), None)
        return None if kind is None else (kind, message)
    place = f" ({event.resource_class}, {event.queue_depth} waiting)" if event.queue_depth is not None else ""
    return "rejected", f"{event.reason or event.status}{place}"


def _failure(kind: str, message: str) -> str:
    text = f"{kind}: {message}" if message else kind
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def line_of(event: AnyEvent, kind: str, words: str) -> str:
    """`12:00:01  retry        a1 (http.request): attempt 1 failed: …`"""
    seconds = epoch_seconds(event.timestamp)
    clock = event.timestamp if seconds is None else f"{datetime.fromtimestamp(seconds, UTC).astimezone():%H:%M:%S}"
    subject = event.work_id or ""
    operation = getattr(event, "operation", None)
    if operation:
        subject = f"{subject} ({operation})".lstrip()
    return f"{clock}  {kind:<12} {subject + ': ' if subject else ''}{words}"


class Watcher:
    """Follows a log and tells it."""

    def __init__(self, log: AuditLog, say: Say, *, after: int, as_json: bool = False) -> None:
        self.kinds: Counter[str] = Counter()
        """How many of each kind there were, told or not."""
        self._log = log
        self._say = say
        self._after = after
        self._as_json = as_json
        self._second = 0.0
        self._lines = 0
        self._untold: Counter[str] = Counter()

    async def follow(self) -> None:
        """For as long as somebody wants it. Every wait is bounded."""
        while True:
            await self._log.wait(self._after, LONGEST_WAIT_S)
            await self.catch_up()

    async def catch_up(self) -> None:
        """Everything there is by now."""
        while entries := await self._log.read(AuditQuery(after=self._after, limit=PAGE)):
            for kept in entries:
                self._tell(kept)
            self._after = entries[-1].sequence
        self._tell_untold()
        sys.stdout.flush()

    def _tell(self, kept: KeptEntry) -> None:
        try:
            event = told.decode(kept.entry.body)
        except msgspec.DecodeError:  # of another version; `audit verify` is for that
            return
        found = in_words(event)
        if found is None:
            return
        kind, words = found
        self.kinds[kind] += 1
        if self._has_room():
            self._say(kind, kept.entry.body.decode() if self._as_json else line_of(event, kind, words))
        else:
            self._untold[kind] += 1

    def _has_room(self) -> bool:
        now = monotonic()
        if now - self._second >= 1.0:
            self._tell_untold(now)
            self._second, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES_A_SECOND or self._as_json

    def _tell_untold(self, now: float | None = None) -> None:
        """What was left out of a second that is over."""
        if self._untold and (now or monotonic()) - self._second >= 1.0:
            counts = ", ".join(f"{number} {kind}" for kind, number in self._untold.most_common())
            self._say("more", f"{'':8}  {'more':<12} {counts}")
            self._untold.clear()

    def end(self) -> None:
        """Tell what is still left out."""
        self._second = 0.0
        self._tell_untold()


class Levels:
    """Tells when a worker's class becomes busier or calmer."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last: dict[tuple[str, str], str] = {}

    def look(self, snapshot: dict[str, Any]) -> None:
        for worker in snapshot["workers"]:
            for name, state in worker["classes"].items():
                key, status = (worker["worker_id"], name), str(state["status"])
                before = self._last.get(key, "healthy")
                if status != before:
                    self._last[key] = status
                    clock = f"{datetime.now(UTC).astimezone():%H:%M:%S}"
                    taken = f"places taken: {places(state['depth'], state['size'])}; {state['active']} running"
                    self._say(status, f"{clock}  {'overload':<12} {key[0]} {name}: {before} → {status}; {taken}")
