"""
What travels between routers and workers: version 1 of the wire, frozen.

Records with checks. New fields are optional, unknown ones are ignored, numbers are numbers. What cannot be read or used
becomes an `InvalidMessage` that names the field; it never becomes an exception in a worker.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from reefknot.core.failure import ErrorCode
from reefknot.core.overload.level import OverloadStatus

VERSION = "1"
ASSIGN = "caf.exec.assign.v1"
ACK = "caf.exec.assign.v1.ack"
RESULT = "caf.exec.result.v1"
CANCEL = "caf.exec.cancel.v1"
HEARTBEAT = "caf.worker.heartbeat.v1"
LARGEST_MESSAGE = 1024 * 1024
LONGEST_ID = 256
DEFAULT_TIMEOUT_MS = 30_000
PRIORITIES = {"low": -10, "normal": 0, "high": 10, "critical": 20}


def assign_subject(worker_id: str) -> str:
    """Where one worker alone is spoken to."""
    return f"{ASSIGN}.w.{worker_id}"


class AckStatus(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ERROR = "error"


class ResultStatus(StrEnum):
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class StepStatus(StrEnum):
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Job(Struct, frozen=True, omit_defaults=True):
    """What to do: the block's type, and its inputs."""

    type: str
    payload: dict[str, Any] = {}
    payload_ref: str | None = None
    resources: dict[str, Any] | None = None


class Executor(Struct, frozen=True, omit_defaults=True):
    provider_id: str | None = None
    channel: str | None = None


class RetryOptions(Struct, frozen=True, omit_defaults=True):
    """What a request says about its retries: how many, and how long the first wait is."""

    max_attempts: int | None = None
    backoff_ms: int | None = None


class Options(Struct, frozen=True, omit_defaults=True):
    priority: int | str = 0
    deadline_ms: int | None = None
    timeout_ms: int | None = None
    retry_count: int | None = None
    skip_circuit_breaker: bool = False
    retry: RetryOptions | None = None


class Correlation(Struct, frozen=True, omit_defaults=True):
    trace_id: str | None = None


class ExecAssignment(Struct, frozen=True, omit_defaults=True):
    """A router asks a worker to do something."""

    assignment_id: str
    request_id: str
    job: Job
    version: str = VERSION
    tenant_id: str | None = None
    executor: Executor | None = None
    options: Options = Options()
    resource_class: str | None = None
    correlation: Correlation | None = None
    decision: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def trace_id(self) -> str | None:
        return None if self.correlation is None else self.correlation.trace_id

    @property
    def priority(self) -> int:
        given = self.options.priority
        return given if isinstance(given, int) else PRIORITIES[given]

    @property
    def retries(self) -> int | None:
        """Retries asked for, by either of their two names."""
        options = self.options
        if options.retry is not None and options.retry.max_attempts is not None:
            return options.retry.max_attempts
        return options.retry_count

    @property
    def timeout_ms(self) -> int:
        """Time for all executions, from the first one on."""
        given = self.options.timeout_ms
        if given is None:
            inside = self.job.payload.get("timeout_ms")
            given = inside if isinstance(inside, int) and not isinstance(inside, bool) else None
        return DEFAULT_TIMEOUT_MS if given is None else given


class ExecAssignmentAck(Struct, frozen=True, omit_defaults=True):
    """A worker says whether it took it. The fields after `message` are version 2's and are left out by the baseline."""

    assignment_id: str
    status: AckStatus
    message: str | None = None
    overload_status: OverloadStatus | None = None
    queue_depth: int | UnsetType = UNSET
    worker_id: str | None = None
    reason: str | None = None
    retry_after_ms: int | UnsetType = UNSET


class JobType(Struct, frozen=True):
    type: str


class ExecResult(Struct, frozen=True, omit_defaults=True):
    """What came of it."""

    assignment_id: str
    request_id: str
    status: ResultStatus
    provider_id: str
    job: JobType
    latency_ms: int | float | UnsetType = UNSET
    cost: int | float | UnsetType = UNSET
    trace_id: str | None = None
    tenant_id: str | None = None
    timestamp: int | None = None
    queue_depth: int | UnsetType = UNSET
    overload_status: OverloadStatus | None = None
    worker_id: str | None = None
    retries_used: int | UnsetType = UNSET
    error_code: str | None = None
    error_message: str | None = None
    output: dict[str, Any] | None = None


class ClassHealth(Struct, frozen=True):
    """One resource class of a worker, as its heartbeat tells."""

    status: OverloadStatus
    queue_depth: int
    active: int
    capacity: int


class Heartbeat(Struct, frozen=True):
    worker_id: str
    timestamp: int
    classes: dict[str, ClassHealth]
    draining: bool = False


class Cancel(Struct, frozen=True, omit_defaults=True):
    assignment_id: str
    reason: str | None = None


class StepRequest(Struct, frozen=True):
    """One step, as a block is asked for it."""

    type: str
    inputs: dict[str, Any] = {}
    resources: dict[str, Any] = {}
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    retry_count: int | None = None


class StepResult(Struct, frozen=True):
    """What a step gave."""

    status: StepStatus = StepStatus.OK
    error_code: ErrorCode = ErrorCode.none
    outputs: dict[str, Any] = {}
    error_message: str = ""
    metadata: dict[str, Any] = {}
    latency_ms: float = 0.0
    retries_used: int = 0
    queue_depth_at_queue: int = 0
    overload_status_at_queue: OverloadStatus = OverloadStatus.HEALTHY

    @property
    def ok(self) -> bool:
        return self.status is StepStatus.OK

    @property
    def http_status(self) -> int | None:
        """Where a status is read: the metadata, then the outputs."""
        for value in (self.metadata.get("http_status_code"), self.outputs.get("status_code")):
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if isinstance(value, str) and value.isdigit():
                return int(value)
        return None


class InvalidMessage(Struct, frozen=True):
    """A message that cannot be used. `readable` says whether it could at least be read as JSON with an id in it."""

    message: str
    field: str = ""
    assignment_id: str = ""
    readable: bool = True

    @property
    def ack_status(self) -> AckStatus:
        return AckStatus.REJECTED if self.readable else AckStatus.ERROR


_assignments = msgspec.json.Decoder(ExecAssignment)
_anything = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def read_assignment(body: bytes, headers: Mapping[str, str] | None = None) -> ExecAssignment | InvalidMessage:
    """An assignment from its bytes, checked. Headers beat the payload."""
    if len(body) > LARGEST_MESSAGE:
        text = f"the message has {len(body)} bytes; accepted: at most {LARGEST_MESSAGE}"
        return InvalidMessage(text, readable=False)
    try:
        assignment = _assignments.decode(body)
    except msgspec.ValidationError as error:
        return _invalid(body, error)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return InvalidMessage(f"not JSON: {error}", readable=False)
    return _checked(_with_headers(assignment, headers or {}))


def _with_headers(assignment: ExecAssignment, headers: Mapping[str, str]) -> ExecAssignment:
    changes: dict[str, Any] = {}
    if headers.get("version"):
        changes["version"] = headers["version"]
    if headers.get("tenant_id"):
        changes["tenant_id"] = headers["tenant_id"]
    trace = headers.get("trace_id") or _trace_of(headers.get("traceparent"))
    if trace:
        changes["correlation"] = Correlation(trace)
    return msgspec.structs.replace(assignment, **changes) if changes else assignment


def _trace_of(traceparent: str | None) -> str | None:
    """The trace id of a W3C traceparent: version, trace, span, flags."""
    parts = (traceparent or "").split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else None


def _invalid(body: bytes, error: msgspec.ValidationError) -> InvalidMessage:
    text, _, place = str(error).partition(" - at `$")
    field = place.rstrip("`").lstrip(".")
    for missing in ("assignment_id", "request_id", "job", "type"):
        if text == f"Object missing required field `{missing}`":
            field = f"{field}.{missing}".lstrip(".")
            text = "missing"
    raw = _anything.decode(body)
    known = raw.get("assignment_id") if isinstance(raw, dict) else None
    return InvalidMessage(f"{field or 'the message'}: {text}", field, known if isinstance(known, str) else "")


def _checked(assignment: ExecAssignment) -> ExecAssignment | InvalidMessage:
    found = _first_mistake(assignment)
    if found is None:
        return assignment
    field, accepted = found
    return InvalidMessage(f"{field}: {accepted}", field, assignment.assignment_id)


def _first_mistake(assignment: ExecAssignment) -> tuple[str, str] | None:
    options = assignment.options
    if assignment.version != VERSION:
        return "version", f"{assignment.version!r} is not accepted; accepted: {VERSION!r}"
    for field, text in (
        ("assignment_id", assignment.assignment_id),
        ("request_id", assignment.request_id),
        ("job.type", assignment.job.type),
    ):
        if not 0 < len(text) <= LONGEST_ID or not text.isprintable():
            return field, f"accepted: printable text of 1 to {LONGEST_ID} characters"
    for field, number, least, most in (
        ("options.deadline_ms", options.deadline_ms, 1, None),
        ("options.timeout_ms", assignment.timeout_ms, 1, None),
        ("options.retry_count", options.retry_count, 0, 100),
        ("options.retry.max_attempts", options.retry and options.retry.max_attempts, 0, 100),
        ("options.retry.backoff_ms", options.retry and options.retry.backoff_ms, 0, 86_400_000),
    ):
        if isinstance(number, int) and (number < least or (most is not None and number > most)):
            return field, f"{number} is not accepted; accepted: {least} or more" + (f", at most {most}" if most else "")
    if isinstance(options.priority, str) and options.priority not in PRIORITIES:
        return "options.priority", f"accepted: a whole number, or one of {', '.join(PRIORITIES)}"
    return None


def resource_class(assignment: ExecAssignment) -> str:
    """The pool that runs it: as said, else by its type."""
    said = assignment.resource_class or (assignment.job.resources or {}).get("class")
    if isinstance(said, str) and said:
        return said
    family = assignment.job.type.partition(".")[0]
    if family in ("http", "fs"):
        return "io"
    return "gpu" if family in ("ai", "media") else "cpu"
