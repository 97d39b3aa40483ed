"""
Arguments of a submission, as a caller gives them: checked, and written as an assignment.

`Client.submit` and `then` take the same ones, and refuse the same mistakes with the same words.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, Required, TypedDict

from reefknot.core import checks
from reefknot.core.canonical import canonical
from reefknot.errors import NotJsonError, ParameterError, ParameterTypeError
from reefknot.queue.model.message_schema import value_at
from reefknot.queue.model.messages import (
    AssignmentOptions,
    Correlation,
    ExecAssignment,
    InvalidMessage,
    Job,
    encode,
    read_assignment,
)

LONGEST_DEADLINE_S = 1e9
LONGEST_DELAY_S = 10 * 365 * 86_400.0

SUBMIT_ARGUMENTS = {
    "job.type": "job_type",
    "job.payload": "inputs",
    "options.deadline_ms": "deadline",
    "options.timeout_ms": "timeout",
    "options.attempt_timeout_ms": "attempt_timeout",
    "job.payload.timeout_ms": "inputs.timeout_ms",
    "options.retry_count": "retries",
    "options.priority": "priority",
    "correlation.trace_id": "trace_id",
}
"""Fields of the wire, by their names in `Client.submit`."""
_FREE_FIELDS = ("job.payload", "job.resources", "metadata", "decision")
"""Fields that hold a caller's own values."""
_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


class NamedJob(Protocol):
    """A job by its id and tenant, such as a handle."""

    assignment_id: str
    tenant_id: str | None


class SubmitOptions(TypedDict, total=False):
    """
    The options of `submit`. Durations are seconds, or a `timedelta`; None is as if the option were left out.

    With `delay`, or `at` (a time; without a zone it is local), the job is due then, and not before. `deadline` counts
    from there, waiting included; `timeout` is the time of all executions, from the first one on, `attempt_timeout` that
    of one. The same `assignment_id` twice is one job, for each tenant its own. With `after`, ids or handles of other
    jobs, it runs when all of these have succeeded.

    With `unique`, a key, a tenant has one job at a time: while the job that has the key is pending, running or in
    quarantine, and until `for_` after its creation, further submissions make no job and get that one.
    """

    deadline: float | timedelta | None
    timeout: float | timedelta | None
    attempt_timeout: float | timedelta | None
    retries: int | None
    priority: int | str
    resource_class: str | None
    assignment_id: str | None
    tenant_id: str | None
    trace_id: str | None
    delay: float | timedelta | None
    at: datetime | None
    after: Sequence[str | NamedJob] | None
    unique: str | None
    for_: float | timedelta | None


class SubmitItem(SubmitOptions, total=False):
    """Arguments of `submit` by their names: one job of `submit_many`."""

    job_type: Required[str]
    inputs: Mapping[str, Any] | None


OPTIONS = tuple(SubmitOptions.__annotations__)
ITEM_FIELDS = ("job_type", "inputs", *OPTIONS)
_MEANT = {
    "chain": "after",
    "countdown": "delay",
    "depends_on": "after",
    "eta": "at",
    "expires": "deadline",
    "id": "assignment_id",
    "job_id": "assignment_id",
    "max_retries": "retries",
    "queue": "resource_class",
    "task_id": "assignment_id",
}
"""Options of other libraries, and the one that does the same."""


def _as_mapping(inputs: object) -> str:
    """The call that makes inputs of a model, as the end of an error; nothing for other values."""
    ways = {
        "model_dump": ("a pydantic model", 'model.model_dump(mode="json")'),
        "__dataclass_fields__": ("a dataclass", "dataclasses.asdict(value)"),
        "__struct_fields__": ("a msgspec.Struct", "msgspec.to_builtins(value)"),
        "__attrs_attrs__": ("an attrs class", "attrs.asdict(value)"),
    }
    kinds = () if isinstance(inputs, type) else (ways[name] for name in ways if hasattr(inputs, name))
    return next((f"; for {kind} pass {call}" for kind, call in kinds), "")


def check_names(given: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Refuse an option that does not exist, with the one that may be meant."""
    for name in given:
        if name not in accepted:
            meant = f"; did you mean {_MEANT[name]!r}?" if name in _MEANT else checks.suggest(str(name), accepted)
            raise ParameterTypeError(str(name), given[name], f"no such option{meant}; accepted: {', '.join(accepted)}")


def validated(assignment: ExecAssignment, names: Mapping[str, str] | None = None) -> tuple[ExecAssignment, bytes]:
    """
    The assignment as it will travel, and its bytes. What JSON cannot say is refused with its place, never changed.

    `names` are the caller's names of the fields, for the error.
    """
    called = names or {}
    try:
        body = encode(assignment)
    except _UNWRITABLE as error:
        _refuse_non_json(assignment, called)
        raise NotJsonError("the assignment", str(error) or type(error).__name__) from error
    read = read_assignment(body)
    if isinstance(read, InvalidMessage):
        raise _mistake(assignment, read, called)
    if read.job != assignment.job or read.metadata != assignment.metadata or read.decision != assignment.decision:
        _refuse_non_json(assignment, called)  # a tuple has become a list, which is fine; much else is not
    return read, body


def _refuse_non_json(assignment: ExecAssignment, called: Mapping[str, str]) -> None:
    for field in _FREE_FIELDS:
        canonical(value_at(assignment, field), called.get(field, field))


def _mistake(assignment: ExecAssignment, found: InvalidMessage, called: Mapping[str, str]) -> ParameterError:
    field = found.field or "job.payload"
    text = found.message.removeprefix(f"{found.field or 'the message'}: ")
    accepted = text.partition("accepted: ")[2] or text
    kind = ParameterTypeError if text.startswith("Expected") else ParameterError
    return kind(called.get(field, field), value_at(assignment, field), accepted)


def written(job_type: str, inputs: Mapping[str, Any] | None, options: Mapping[str, Any], own_id: str) -> ExecAssignment:
    """The assignment of a caller's arguments, checked. Without an id it gets `own_id`, which its request has too."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ParameterTypeError("inputs", inputs, f"a mapping of names to JSON values, or None{_as_mapping(inputs)}")
    given_id, trace_id = options.get("assignment_id"), options.get("trace_id")
    assignment = ExecAssignment(
        assignment_id=own_id if given_id is None else given_id,
        request_id=own_id,
        job=Job(job_type, dict(inputs or {})),
        tenant_id=options.get("tenant_id"),
        resource_class=options.get("resource_class"),
        correlation=None if trace_id is None else Correlation(trace_id),
        options=AssignmentOptions(
            priority=options.get("priority", 0),
            deadline_ms=_milliseconds("deadline", options.get("deadline")),
            timeout_ms=_milliseconds("timeout", options.get("timeout")),
            attempt_timeout_ms=_milliseconds("attempt_timeout", options.get("attempt_timeout")),
            retry_count=options.get("retries"),
        ),
    )
    return validated(assignment, SUBMIT_ARGUMENTS)[0]


def due_time(delay: float | timedelta | None, at: datetime | None, wall: float) -> int:
    """The due time that a caller asks for, in milliseconds UTC; 0 for now."""
    if delay is not None and at is not None:
        raise ParameterError("at", at, "not together with delay; give one of them")
    if at is not None and not isinstance(at, datetime):
        raise ParameterTypeError("at", at, "a datetime; without a zone it is local")
    if at is not None:
        if at.timestamp() - wall > LONGEST_DELAY_S:
            raise ParameterError("at", at, "a time within the next ten years")
        return int(at.timestamp() * 1000)
    if delay is None:
        return 0
    seconds = checks.seconds("delay", delay, or_zero=True, most=LONGEST_DELAY_S)
    return int((wall + seconds) * 1000) if seconds else 0


def _milliseconds(name: str, given: float | timedelta | None) -> int | None:
    return None if given is None else max(1, round(checks.seconds(name, given, most=LONGEST_DEADLINE_S) * 1000))
