"""The end of a log, and what comes after it."""

from __future__ import annotations

import re
import sys
from collections import deque
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.cli.evidence import PAGE, pages_of, shown_lines
from reefknot.cli.exits import CommandError
from reefknot.cli.output import put
from reefknot.cli.progress import progress
from reefknot.core.audit.analysis import canonical_category, moment
from reefknot.core.audit.chain import Head
from reefknot.core.audit.lines import UNREADABLE, line_of
from reefknot.errors import NotJsonError
from reefknot.ports.audit_log import AuditQuery, KeptEntry

if TYPE_CHECKING:
    from reefknot.ports.audit_log import AuditLog

LONGEST_WAIT = 5.0
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DETAILS = (
    "operation",
    "action",
    "attempt_number",
    "total_attempts",
    "delay_seconds",
    "exception_message",
    "final_exception_message",
    "reason",
    "status",
    "state",
    "name",
    "worker_id",
    "actor",
    "subject",
    "idempotency_key",
    "correlation_id",
    "work_id",
)
"""What a person wants to see of an event, in this order."""


def moment_of(text: str | None, *, now: datetime | None = None, flag: str = "--since") -> int | None:
    """Milliseconds UTC of `--since`, or of another flag that says when."""
    if text is None:
        return None
    ago = _AGO.match(text)
    if ago is not None:
        try:
            at = (now or datetime.now(UTC)) - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
        except OverflowError:
            return 0
        return int(at.timestamp() * 1000)
    seconds = moment(text)
    if seconds is None:
        accepted = "a time such as 2026-01-25T21:15:00Z, or how long ago: 90s, 15m, 2h, 7d"
        raise CommandError(f"{flag}: {text[:60]!r} is not accepted: {accepted}")
    return int(seconds * 1000)


class Wanted(Struct, frozen=True):
    """Which events are meant."""

    query: AuditQuery
    category: str | None

    @classmethod
    def of(
        cls, type_: str | None, category: str | None, correlation: str | None, trace: str | None, since: int | None
    ) -> Wanted:
        from reefknot.cli.asking import unknown
        from reefknot.core.audit.event import EVENT_TYPES

        known = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
        if type_ is not None and type_ not in known:
            raise unknown("--type", type_, known)
        query = AuditQuery(event_type=type_, correlation_id=correlation, trace_id=trace, since=since)
        return cls(query, None if category is None else canonical_category(category))

    def fits(self, kept: KeptEntry) -> bool:
        if self.category is None:
            return True
        return canonical_category(_fields(kept.entry.body).get("retry_category")) == self.category

    async def last(self, log: AuditLog, head: Head, lines: int) -> list[KeptEntry]:
        """The last so many that fit. Only without a filter is it known where they begin."""
        if lines == 0:
            return []
        query = self.query
        if self.category is None and query == AuditQuery():
            query = AuditQuery(after=max(0, head.sequence - lines))
        found: deque[KeptEntry] = deque(maxlen=lines)
        at = query.after
        with progress("looking", head.sequence - at) as advance:
            async for page in pages_of(log, query, until=head.sequence):
                found.extend(filter(self.fits, page))
                advance(page[-1].sequence - at)
                at = page[-1].sequence
        return list(found)


async def follow_log(log: AuditLog, wanted: Wanted, *, after: int, seconds: float | None, json: bool) -> None:
    """Show what comes, for so many seconds or until interrupted. Every wait is bounded."""
    until = None if seconds is None else monotonic() + seconds
    while True:
        left = LONGEST_WAIT if until is None else min(LONGEST_WAIT, until - monotonic())
        if left <= 0:
            return
        if not await log.wait(after, left):
            continue
        query = msgspec.structs.replace(wanted.query, after=after, limit=PAGE)
        head = await log.head()
        async for page in pages_of(log, query, until=head.sequence):
            put_events(list(filter(wanted.fits, page)), json=json)
        after = head.sequence


def put_events(events: list[KeptEntry], *, json: bool) -> None:
    """One line an event, at once."""
    for one in events:
        if json:
            print(next(shown_lines([_line(one)])))
        else:
            put(described(one))
    sys.stdout.flush()


def _line(one: KeptEntry) -> bytes:
    head = Head("", one.sequence, one.hash)
    try:
        return line_of(head, one.entry.body)
    except NotJsonError:  # somebody changed it: shown as text
        return line_of(head, msgspec.json.encode(one.entry.body.decode("utf-8", "replace")))


def described(kept: KeptEntry) -> str:
    """An event for people: number, time, type, category, and what matters most."""
    fields = _fields(kept.entry.body)
    words = [
        str(kept.sequence),
        str(fields.get("timestamp", "")),
        kept.entry.event_type,
        *([str(fields["retry_category"])] if fields.get("retry_category") else []),
        *(f"{name}={_short(fields[name])}" for name in _DETAILS if fields.get(name) is not None),
    ]
    return "  ".join(words)


def _short(value: Any) -> str:
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 120 else text[:119] + "…"


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}
