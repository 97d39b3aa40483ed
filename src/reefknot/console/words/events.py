"""
Audited events in words: a kind and a sentence for each event that people read.

The sentences are the same in the live feed, in the story of a job and on a page.
"""

from __future__ import annotations

from typing import Any

import msgspec

from reefknot.audit.model import event as events
from reefknot.audit.model.chain import UNREADABLE
from reefknot.audit.port import KeptEntry
from reefknot.console.operations.values import plural
from reefknot.console.words.policies import near
from reefknot.core.decide import DECIDING_FIELD
from reefknot.queue.model.messages import AckStatus

LONGEST_TEXT = 160
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


def event_fields(body: bytes) -> dict[str, Any]:
    """The fields of an event, with what it leaves out; none when the body is no event."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    if not isinstance(found, dict):
        return {}
    fields = events.BRIEF_DEFAULTS.get(str(found.get("event_type")), {}) | found
    if fields.get("event_type") == "routing" and "worker_id" not in fields and fields["reason"] == "chosen":
        fields["worker_id"] = events.lone_worker(fields.get("inputs"))
    return fields


def describe(event: events.AnyEvent) -> tuple[str, str] | None:
    """Kind and sentence of an event; None for an event that people need not see live."""
    match event:
        case events.RetryAttempt():
            failure = _failure(event.exception_type, event.exception_message, event.decision.failure.code)
            return "retry", f"attempt {event.attempt_number} failed: {failure}; again in {event.delay_seconds:.2f} s"
        case events.RetryRecovered():
            return "recovered", f"after {event.total_attempts} attempts in {event.elapsed_seconds:.2f} s"
        case events.RetryExhausted() | events.RetryRefused():
            failure = _failure(event.final_exception_type, event.final_exception_message, event.decision.failure.code)
            why = f"({event.reason.value}{_set_by_step(event.decision)})"
            return "given up", f"after {plural(event.total_attempts, 'attempt')} {why}: {failure}"
        case events.Admission():
            return _describe_admission(event)
        case events.Routing():
            return None if event.worker_id is not None else ("rejected", f"no worker accepts it: {event.reason}")
        case events.Dropped():
            return "dropped", f"{event.reason} ({event.resource_class})"
        case events.Quarantined():
            return "quarantined", f"{event.reason}; waits for an operator: reefknot quarantine list"
        case events.Requeued():
            return "requeued", event.reason
        case events.TimeoutOccurred():
            return ("timed out", f"after {event.timeout_seconds:g} s") if event.whole else None
        case events.BreakerEvent():
            waits = "" if event.wait_seconds is None else f" for {event.wait_seconds:.3g} s"
            return "breaker", f"{event.name} is {event.state}{waits}"
        case events.OperatorAction():
            return "operator", _describe_action(event)
        case events.AlertRaised():
            return "alert", f"{event.alert}: {event.text}"
        case events.AlertResolved():
            return "alert over", f"{event.alert}: {event.text}"
        case events.WorkerGone():
            who = f"{part_name(event.part, event.worker_id)} (pid {event.process} on {event.host})"
            return "gone", f"{who}: {last_words(event.held)}"
        case events.TakenOver():
            return "taken over", f"key {event.idempotency_key}: by {event.owner}, from {event.previous_owner}"
        case _:
            return None


def describe_routine(event: events.AnyEvent) -> str:
    """A sentence about an event that people need not see live: a routine step of a job, of a key or of the log itself.
    Empty for the others."""
    match event:
        case events.Submitted():
            return f"by {event.actor} on {event.host}, process {event.process}"
        case events.Routing():
            return f"to {event.worker_id}"
        case events.Admission():
            return f"{event.status} by {event.worker_id}, {event.queue_depth} waiting"
        case events.Completed():
            took = "" if event.duration_ms is None else f" in {event.duration_ms / 1000:.3f} s"
            return f"{event.status} after {plural(event.attempts or 0, 'attempt')}{took}"
        case events.TimeoutOccurred():
            return f"attempt {event.attempt_number} exceeded {event.timeout_seconds:g} s"
        case events.IdempotencyEvent():
            return f"key {event.idempotency_key}: {event.action}"
        case events.BookStored():
            return f"policy book {event.book_hash[:12]} is in force"
        case events.RulesStored():
            return f"admission rules {event.rules_hash[:12]} of {event.resource_class} are in force"
        case events.Anchor():
            return f"retention removed events up to {event.sequence} ({event.rule or 'no rule recorded'})"
        case events.LogRepaired():
            return f"{event.removed_bytes} bytes of an unfinished line were removed"
        case _:
            return ""


def part_name(part: str, name: str) -> str:
    """A worker or a router by its name, with what it is unless the name says that."""
    return name if name.startswith(part) else f"{part} {name}"


def last_words(held: dict[str, Any]) -> str:
    """The jobs that a part which is gone had when it was last heard of, in words."""
    counts = [f"{number} {word}" for word in ("running", "queued", "pending") if (number := held.get(word))]
    names = ", ".join(map(_short, held.get("jobs") or ()))
    return f"it held {', '.join(counts)}{f' ({names})' if names else ''}" if counts else "it held no job"


def _describe_action(event: events.OperatorAction) -> str:
    """The actor, the action, the job or the number of jobs and their filter, and the reason. A cancellation that was
    asked for elsewhere is carried out by a worker, or by a router for its caller."""
    details = event.details or {}
    what, filters, why = event.subject or "", details.get("filter"), details.get("reason")
    if not what and isinstance(details.get("count"), int):
        what = plural(details["count"], "job")
    if isinstance(filters, dict) and filters:
        what += f" of {', '.join(f'{name} {_short(value)}' for name, value in filters.items())}"
    who = event.actor
    if event.action == "cancel":
        who = "carried out for its caller" if who == "caller" else f"carried out by {who}"
    text = f"{who}: {event.action} {what}".rstrip()
    return f"{text}: {_short(why)}" if isinstance(why, str) and why else text


def _describe_admission(event: events.Admission) -> tuple[str, str] | None:
    inputs = event.inputs or {}
    if event.status == AckStatus.ACCEPTED.value:
        message = str(inputs.get("message", ""))
        kind = next((word for word in ("deferred", "degraded") if word in message), None)
        return None if kind is None else (kind, message)
    depth = f" ({event.resource_class}, {event.queue_depth} waiting)" if event.queue_depth is not None else ""
    return "rejected", f"{event.reason or event.status}{depth}"


def _failure(name: str | None, message: str, code: str) -> str:
    """The failure in words: by its class, or by its code where none was raised or the message begins with the class."""
    kind = code if name is None or message == name or message.startswith(f"{name}:") else name
    text = f"{kind}: {message}" if message else kind
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _set_by_step(record: events.DecisionRecord) -> str:
    """The place of the `@rk.block` that sets the decisive field, in words; nothing where it does not."""
    field = DECIDING_FIELD.get(record.answer, "")
    place = record.set_by_step.get(field) if record.set_by_step else None
    return f"; {field} is set at {near(place)}" if place else ""


def in_words(body: bytes) -> tuple[str, str]:
    """Kind and sentence of any event by its body: those of `describe`, else its type and what there is to say."""
    try:
        event = events.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "unreadable", "the event was changed, or is of another version; see `audit verify`"
    return describe(event) or (event.event_type, describe_routine(event) or event.event_type.replace("_", " "))


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
