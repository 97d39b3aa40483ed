"""
Assignments as people write them, and the JSON Schemas of them, of results as callers get them, and of all messages.

Names and types are those of the records in `messages`; descriptions and bounds are here. An assignment's ids may be
left out, and a field that is not in the schema is refused: `written_assignment` reads one so.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.checks import suggest
from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import (
    HIGHEST_PRIORITY,
    LONGEST_ID,
    LONGEST_MS,
    LONGEST_REFERENCE,
    PRIORITIES,
    VERSION,
    AssignmentOptions,
    Cancel,
    Correlation,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    Executor,
    Fleet,
    Heartbeat,
    InvalidMessage,
    Job,
    ResultJob,
    RetryOptions,
    read_assignment,
)

_ENVELOPE: dict[str, type[Struct]] = {
    "": ExecAssignment,
    "job": Job,
    "options": AssignmentOptions,
    "options.retry": RetryOptions,
    "executor": Executor,
    "correlation": Correlation,
}
"""The parts of an assignment whose fields are known, by their paths; all else holds a caller's own values."""
LONGEST_SHOWN_NAME = 60


def written_assignment(
    value: Mapping[str, Any], assignment_id: str, request_id: str
) -> ExecAssignment | InvalidMessage:
    """
    The assignment that these fields describe, checked.

    Without an id it gets `assignment_id`, which is the id of its request too; with one, its request gets `request_id`.

    A field that no assignment has is refused with the one that may be meant: ignored, as on the wire, a misspelt
    `assignment_id` would do the work twice.
    """
    request = request_id if "assignment_id" in value else assignment_id
    value = {"assignment_id": assignment_id, "request_id": request, **value}
    for prefix, kind in _ENVELOPE.items():
        if prefix.partition(".")[0] not in value and prefix:
            continue
        fields = value_at(value, prefix)
        for name in fields if isinstance(fields, Mapping) else ():
            if name not in kind.__struct_fields__:
                field = f"{prefix}.{_shown_name(name)}".lstrip(".")
                return InvalidMessage(f"{field}: {_unknown_field(str(name), prefix)}", field)
    return read_assignment(msgspec.json.encode(value))


def _shown_name(name: object) -> str:
    """The bounded beginning of a field's name."""
    text = str(name)
    return text if len(text) <= LONGEST_SHOWN_NAME else text[: LONGEST_SHOWN_NAME - 1] + "…"


def value_at(value: Any, path: str) -> Any:
    """The part of a record or mapping at this path of names; None where there is none."""
    for part in path.split(".") if path else ():
        if isinstance(value, Struct):
            value = getattr(value, part, None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


UNKNOWN_FIELD = "unknown field; accepted: "


def _unknown_field(name: str, prefix: str) -> str:
    """The refusal of a field, with the name that may be meant: a similar one, or the same name elsewhere."""
    accepted = _ENVELOPE[prefix].__struct_fields__
    elsewhere = [f"{one}.{name}".lstrip(".") for one, kind in _ENVELOPE.items() if name in kind.__struct_fields__]
    hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else suggest(name, accepted)
    return f"{UNKNOWN_FIELD}{', '.join(accepted)}{hint}"


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MS = {"minimum": 1, "maximum": LONGEST_MS}
_ID = {"minLength": 1, "maxLength": LONGEST_ID}
_TEXT = {"maxLength": LONGEST_ID}
_REFERENCE = {"maxLength": LONGEST_REFERENCE}
_RETRIES = {"minimum": 0, "maximum": 100}

_Field = tuple[str, dict[str, Any]]
"""The description of a field, and its bounds."""

_ASSIGNMENT: dict[type[Struct], dict[str, _Field]] = {
    ExecAssignment: {
        "assignment_id": ("Identifies one job of a tenant: the same id again is the same job. Default: a new id.", _ID),
        "request_id": ("Identifies the request; comes back in the result. Default: a new id.", _ID),
        "job": ("The work to do.", {}),
        "version": ("Version of this format.", {"enum": [VERSION]}),
        "tenant_id": ("The tenant whose job this is. Ids are unique within a tenant.", _TEXT),
        "executor": ("Names for the provider of the result.", {}),
        "options": ("Priority, time limits and retries.", {}),
        "resource_class": ("Slots that run the job: cpu, io, gpu, or one of your own. Default: by the type.", _TEXT),
        "correlation": ("Ties the job to a trace.", {}),
        "decision": ("The caller's own values; not read.", {}),
        "metadata": ("The caller's own values; not read.", {}),
    },
    Job: {
        "type": ("The step to run, such as http.request or invoice.render.", _ID),
        "payload": ("The inputs of the step.", {}),
        "payload_ref": ("A reference to inputs elsewhere. Refused without a resolver.", _REFERENCE),
        "resources": ("Needs of the job. `class` is another place for resource_class.", {}),
    },
    AssignmentOptions: {
        "priority": (f"A whole number, or one of {', '.join(PRIORITIES)}. Higher comes first. Default: 0.", {}),
        "deadline_ms": ("Milliseconds from submission, or from the due time, to the end: waiting included.", _MS),
        "timeout_ms": ("Milliseconds for all executions and the waits between, from the first one on.", _MS),
        "attempt_timeout_ms": ("Milliseconds for one execution.", _MS),
        "retry_count": ("Most retries after the first execution. Default: the policy's.", _RETRIES),
        "skip_circuit_breaker": ("Run even while the breaker of the destination is open.", {}),
        "retry": ("Retries in another spelling; comes before retry_count.", {}),
    },
    RetryOptions: {
        "max_attempts": ("Most retries after the first execution.", _RETRIES),
        "backoff_ms": ("Milliseconds before the first retry.", {"minimum": 0, "maximum": 86_400_000}),
    },
    Executor: {
        "provider_id": ("Comes back as the result's provider_id. Default: the worker.", _TEXT),
        "channel": ("The caller's own value.", _TEXT),
    },
    Correlation: {
        "trace_id": ("Comes back in the result and in every event.", _TEXT),
        "traceparent": ("Span of the caller (W3C Trace Context), which the job's own span continues.", {}),
    },
}

_RESULT: dict[type[Struct], dict[str, _Field]] = {
    ExecResult: {
        "assignment_id": ("The assignment's id.", {}),
        "request_id": ("The assignment's request_id.", {}),
        "status": ("How the job ended.", {}),
        "provider_id": ("executor.provider_id of the assignment, else the worker or router that ended the job.", {}),
        "job": ("The job that ended.", {}),
        "latency_ms": ("Milliseconds of the last execution.", {}),
        "cost": ("The cost that the step reports; 0 if it reports none.", {}),
        "trace_id": ("correlation.trace_id of the assignment.", {}),
        "tenant_id": ("The tenant of the assignment.", {}),
        "timestamp": ("Milliseconds since 1970 UTC at the end.", {}),
        "queue_depth": ("Jobs that waited for the worker when it accepted this one.", {}),
        "overload_status": ("Load of the worker at the end.", {}),
        "worker_id": ("The worker that ran the job.", {}),
        "retries_used": ("Executions after the first one.", {}),
        "error_code": (
            "Why the job did not succeed.",
            {"enum": [*(one.wire for one in ErrorCode if one is not ErrorCode.none), None]},
        ),
        "error_message": ("The same in words, without secrets.", {}),
        "output": ("What the step returned.", {}),
    },
    ResultJob: {"type": ("The type of the step.", {})},
}


def assignment_schema() -> dict[str, Any]:
    """The JSON Schema of one assignment in a file."""
    schema = _schema(ExecAssignment, _ASSIGNMENT, closed=True)
    schema["required"] = ["job"]
    priority = schema["$defs"]["AssignmentOptions"]["properties"]["priority"]
    number = {"type": "integer", "minimum": -HIGHEST_PRIORITY, "maximum": HIGHEST_PRIORITY}
    priority["anyOf"] = [number, {"enum": list(PRIORITIES)}]
    return schema


def result_schema() -> dict[str, Any]:
    """The JSON Schema of one result."""
    return _schema(ExecResult, _RESULT, closed=False)


WIRE = (ExecAssignment, ExecAssignmentAck, ExecResult, Cancel, Heartbeat, Fleet)
"""The messages between routers, workers and peers."""


def wire_schemas(ref_template: str) -> dict[str, Any]:
    """
    The schemas of all messages on the wire and of the records inside them, by name.

    Readers ignore fields that they do not know, so none is closed.
    """
    _, parts = msgspec.json.schema_components(WIRE, ref_template=ref_template)
    for record, described in (_ASSIGNMENT | _RESULT).items():
        _describe(parts[record.__name__], described)
    return parts


def _describe(part: dict[str, Any], described: dict[str, _Field]) -> None:
    for name, (text, bounds) in described.items():
        part["properties"][name] = _bounded(part["properties"][name], bounds) | {"description": text}


def _schema(kind: type[Struct], fields: dict[type[Struct], dict[str, _Field]], *, closed: bool) -> dict[str, Any]:
    """The schema of a record and of those inside it. A `closed` one has no other fields."""
    _, parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for record, described in fields.items():
        _describe(parts[record.__name__], described)
        if closed:
            parts[record.__name__]["additionalProperties"] = False
    return {"$schema": _DIALECT, **parts.pop(kind.__name__), "$defs": parts}


def _bounded(schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field with its bounds, which hold for the number or text among its alternatives."""
    if "enum" in bounds:
        return {"enum": bounds["enum"]}
    if not bounds or "anyOf" not in schema:
        return schema | bounds
    return schema | {"anyOf": [one if one.get("type") == "null" else one | bounds for one in schema["anyOf"]]}
