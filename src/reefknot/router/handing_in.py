"""
What a caller hands in, as it will travel.

Whoever builds an assignment in Python may put anything into it. What JSON cannot say is refused here with its place,
never changed on the way; a value that is not accepted is named by what the caller calls it.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from reefknot.core.canonical import canonical
from reefknot.core.messages import ExecAssignment, InvalidMessage, encode, read_assignment
from reefknot.errors import NotJsonError, ParameterError, ParameterTypeError

ARGUMENTS = {
    "job.type": "job_type",
    "job.payload": "inputs",
    "options.deadline_ms": "deadline",
    "options.timeout_ms": "timeout",
    "job.payload.timeout_ms": "inputs.timeout_ms",
    "options.retry_count": "retries",
    "options.priority": "priority",
    "correlation.trace_id": "trace_id",
}
"""Fields of the wire, as `Client.submit` calls them."""

_FREE = ("job.payload", "job.resources", "metadata", "decision")
"""Where a caller's own values stand."""
_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


def as_it_travels(assignment: ExecAssignment, names: Mapping[str, str] | None = None) -> tuple[ExecAssignment, bytes]:
    """The assignment, checked, and its bytes. `names` are what the caller calls the fields."""
    called = names or {}
    try:
        body = encode(assignment)
    except _UNWRITABLE as error:
        _refuse_what_is_not_json(assignment, called)
        raise NotJsonError("the assignment", str(error) or type(error).__name__) from error
    read = read_assignment(body)
    if isinstance(read, InvalidMessage):
        raise _mistake(assignment, read, called)
    if read.job != assignment.job or read.metadata != assignment.metadata or read.decision != assignment.decision:
        _refuse_what_is_not_json(assignment, called)  # a tuple has become a list, which is fine; much else is not
    return read, body


def _refuse_what_is_not_json(assignment: ExecAssignment, called: Mapping[str, str]) -> None:
    for field in _FREE:
        canonical(_at(assignment, field), called.get(field, field))


def _mistake(assignment: ExecAssignment, found: InvalidMessage, called: Mapping[str, str]) -> ParameterError:
    field = found.field or "job.payload"
    text = found.message.removeprefix(f"{found.field or 'the message'}: ")
    accepted = text.partition("accepted: ")[2] or text
    kind = ParameterTypeError if text.startswith("Expected") else ParameterError
    return kind(called.get(field, field), _at(assignment, field), accepted)


def _at(value: Any, field: str) -> Any:
    """The value of a field, by its place on the wire."""
    for part in field.split("."):
        if isinstance(value, Struct):
            value = getattr(value, part, None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
