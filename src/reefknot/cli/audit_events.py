"""
Audited events on the command line: the filter that chooses them, and their forms as text, JSON lines and CSV.

What a store has an index for is asked of the store; the rest is looked up in the events that it returns.
"""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli.app import CommandError
from reefknot.cli.options import arg, time_arg, time_ms, unknown
from reefknot.cli.output import put
from reefknot.core.audit.analysis import canonical_category
from reefknot.core.audit.chain import UNREADABLE, Head, event_line
from reefknot.core.audit.event import BRIEF_DEFAULTS, EVENT_CODES, EVENT_TYPES, timestamp_ms
from reefknot.errors import NotJsonError
from reefknot.ports.audit_log import AuditQuery, KeptEntry

# ---- filter ----------------------------------------------------------------------------------------------------------

_TIME = "a time such as 2026-01-25T21:15:00Z, or an age: 90s, 15m, 2h, 7d."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FilterFlags:
    """Options that choose events. All that are given must match."""

    type_: Annotated[str | None, arg("Only this event type, such as retry_attempt.", "--type")] = None
    category: Annotated[str | None, arg("Only this retry category, in any of its spellings.")] = None
    work: Annotated[str | None, arg("Only the events of this assignment, by its id.")] = None
    key: Annotated[str | None, arg("Only this idempotency key.")] = None
    tenant: Annotated[str | None, arg("Only the events of this tenant.")] = None
    by_actor: Annotated[str | None, arg("Only what this actor did: a name given with --as, or a user.", "--actor")] = (
        None
    )
    correlation: Annotated[str | None, arg("Only this correlation id.")] = None
    trace: Annotated[str | None, arg("Only this trace id.")] = None
    since: Annotated[str | None, time_arg(f"Only events since {_TIME}")] = None
    until: Annotated[str | None, time_arg(f"Only events before {_TIME}")] = None


FILTER = FilterFlags()


class EventFilter(Struct, frozen=True):
    """The events that a command is asked for: by what a store has an index for, and by fields of the event."""

    query: AuditQuery = AuditQuery()
    category: str | None = None
    key: str | None = None
    tenant: str | None = None
    actor: str | None = None

    @classmethod
    def of(cls, flags: FilterFlags) -> EventFilter:
        known = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
        if flags.type_ is not None and flags.type_ not in known:
            raise unknown("--type", flags.type_, known)
        since, until = time_ms("--since", flags.since), time_ms("--until", flags.until)
        if since is not None and until is not None and since >= until:
            raise CommandError(f"--until: {flags.until} is not after --since {flags.since}; accepted: a later time")
        query = AuditQuery(
            event_type=flags.type_,
            correlation_id=flags.correlation,
            trace_id=flags.trace,
            work_id=flags.work,
            since=since,
            until=until,
        )
        category = None if flags.category is None else canonical_category(flags.category)
        return cls(query, category, flags.key, flags.tenant, flags.by_actor)

    @property
    def is_everything(self) -> bool:
        """True when no event is left out."""
        return self == EventFilter()

    @property
    def by_index(self) -> bool:
        """True when a store's own indexes find exactly these events."""
        return (self.category, self.key, self.tenant, self.actor) == (None, None, None, None)

    def matches(self, kept: KeptEntry) -> bool:
        """Whether an event that the store returned for the query is one of these."""
        return self.by_index or self._has_fields(event_fields(kept.entry.body))

    def accepts(self, body: bytes) -> bool:
        """Whether an event is one of these, by its body alone."""
        if self.is_everything:
            return True
        fields, query = event_fields(body), self.query
        at = timestamp_ms(str(fields.get("timestamp")))
        return (
            all(
                getattr(query, name) in (None, fields.get(name))
                for name in ("event_type", "correlation_id", "trace_id", "work_id")
            )
            and (query.since is None or (at is not None and at >= query.since))
            and (query.until is None or (at is not None and at < query.until))
            and self._has_fields(fields)
        )

    def _has_fields(self, fields: dict[str, Any]) -> bool:
        return (
            (self.category is None or canonical_category(fields.get("retry_category")) == self.category)
            and self.key in (None, fields.get("idempotency_key"))
            and self.tenant in (None, fields.get("tenant_id"))
            and self.actor in (None, fields.get("actor"), fields.get("os_user"))
        )


def event_fields(body: bytes) -> dict[str, Any]:
    """The fields of an event, with the defaults that it leaves out; none when the body is no event."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    return BRIEF_DEFAULTS.get(str(found.get("event_type")), {}) | found if isinstance(found, dict) else {}


# ---- text and JSON ---------------------------------------------------------------------------------------------------

_DETAILS = (
    "operation",
    "action",
    "attempt_number",
    "total_attempts",
    "attempts",
    "duration_ms",
    "delay_seconds",
    "exception_message",
    "final_exception_message",
    "reason",
    "status",
    "state",
    "name",
    "worker_id",
    "actor",
    "os_user",
    "host",
    "process",
    "subject",
    "idempotency_key",
    "owner",
    "fence",
    "previous_owner",
    "previous_fence",
    "correlation_id",
    "work_id",
    "tenant_id",
)
"""The fields of an event that its line shows, in this order."""


def put_events(events: list[KeptEntry], *, json: bool) -> None:
    """Print a line per event, and flush."""
    for one in events:
        if json:
            print(safe_json_line(one))
        else:
            put(text_line(one))
    sys.stdout.flush()


def json_line(one: KeptEntry) -> bytes:
    """The line of an event outside of its chain's file; a body that was changed is shown as text."""
    head = Head("", one.sequence, one.hash)
    try:
        return event_line(head, one.entry.body)
    except NotJsonError:
        return event_line(head, msgspec.json.encode(one.entry.body.decode("utf-8", "replace")))


def safe_json_line(one: KeptEntry) -> str:
    """The line of an event for a terminal: characters that cannot be printed are escapes."""
    from json import dumps

    text = json_line(one).decode("utf-8", "replace").rstrip("\n")
    return "".join(char if char.isprintable() else dumps(char)[1:-1] for char in text)


def text_line(kept: KeptEntry) -> str:
    """Sequence number, time, type, category, and the details of an event."""
    fields = event_fields(kept.entry.body)
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


# ---- CSV -------------------------------------------------------------------------------------------------------------

CSV_COLUMNS = (
    *("sequence", "timestamp", "event_type", "event_code", "tenant_id", "work_id", "correlation_id", "trace_id"),
    *("actor", "os_user", "host", "process", "operation", "action", "status", "reason", "attempts", "duration_ms"),
    *("worker_id", "idempotency_key", "hash", "event"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_rows(events: list[KeptEntry], *, heading: bool = False) -> bytes:
    """The events as rows, the whole event as JSON in the last column."""
    text = io.StringIO()
    writer = csv.writer(text)
    if heading:
        writer.writerow(CSV_COLUMNS)
    for one in events:
        fields = event_fields(one.entry.body)
        fields = {"event_code": EVENT_CODES.get(one.entry.event_type), "event_type": one.entry.event_type} | fields
        fields["attempts"] = next(
            (fields[name] for name in ("attempts", "total_attempts", "attempt_number") if name in fields), None
        )
        fields |= {"sequence": one.sequence, "hash": one.hash, "event": one.entry.body.decode("utf-8", "replace")}
        writer.writerow([_cell(fields.get(name)) for name in CSV_COLUMNS])
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> str | int | float:
    """A value as a spreadsheet may have it: text that would be read as a formula begins with an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
