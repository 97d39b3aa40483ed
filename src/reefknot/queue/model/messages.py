"""
Messages between routers and workers: version 1 of the wire, frozen.

New fields are optional, unknown ones are ignored, numbers are never text. A message that cannot be read or used becomes
an `InvalidMessage` that names the field, never an exception in a worker. An assignment that a person wrote, in a file
or a program, is read by `written_assignment`, to which an unknown field is a mistake.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from reefknot.core.checks import HEADER_VALUES, ascii_header, is_whole_number
from reefknot.core.failure import ErrorCode
from reefknot.errors import shown
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.work import record_id

VERSION = "1"
ASSIGN = "caf.exec.assign.v1"
ACK = "caf.exec.assign.v1.ack"
RESULT = "caf.exec.result.v1"
CANCEL = "caf.exec.cancel.v1"
HEARTBEAT = "caf.worker.heartbeat.v1"
FLEET = "caf.worker.fleet.v1"
LARGEST_MESSAGE = 1024 * 1024
LONGEST_ID = 256
LONGEST_REFERENCE = 4096
"""The longest `payload_ref`, which may be a URL."""
LONGEST_MS = 10 * 365 * 86_400_000
"""Ten years: a longer time is a mistake, and would not fit into a stored timestamp."""
HIGHEST_PRIORITY = 1_000_000
DEFAULT_TIMEOUT_MS = 30_000
SHORT_NAMES = {"http": "http.request", "fs_blob_put": "fs.blob_put", "fs_blob_get": "fs.blob_get", "sql": "sql.query"}
"""Other names of job types."""
PRIORITIES = {"low": -10, "normal": 0, "high": 10, "critical": 20}
PART_NAME = "printable text without blanks and without . * > @ # /"


def can_name_a_part(name: str) -> bool:
    """Whether a worker or router may have this name: names become parts of subjects and of queues."""
    return bool(name) and name.isprintable() and not set(name) & set(" .*>@#/")


def assign_subject(worker_id: str) -> str:
    """The subject of assignments to one worker."""
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


class Job(Struct, frozen=True, gc=False, omit_defaults=True):
    """The work to do: the block's type, and its inputs."""

    type: str
    payload: dict[str, Any] = {}
    payload_ref: str | None = None
    resources: dict[str, Any] | None = None


class Executor(Struct, frozen=True, gc=False, omit_defaults=True):
    provider_id: str | None = None
    channel: str | None = None


class RetryOptions(Struct, frozen=True, gc=False, omit_defaults=True):
    """The retry options of a request: how many retries, and how long the first wait is."""

    max_attempts: int | None = None
    backoff_ms: int | None = None


class AssignmentOptions(Struct, frozen=True, gc=False, omit_defaults=True):
    priority: int | str = 0
    deadline_ms: int | None = None
    timeout_ms: int | None = None
    retry_count: int | None = None
    skip_circuit_breaker: bool = False
    retry: RetryOptions | None = None
    attempt_timeout_ms: int | None = None


class Correlation(Struct, frozen=True, gc=False, omit_defaults=True):
    trace_id: str | None = None
    traceparent: str | None = None
    """The span that the assignment was submitted in, by W3C Trace Context. One that is not valid is ignored."""


class ExecAssignment(Struct, frozen=True, gc=False, omit_defaults=True):
    """A router's request that a worker runs a job."""

    assignment_id: str
    request_id: str
    job: Job
    version: str = msgspec.field(default_factory=lambda: VERSION)
    """Made by a factory, so that it is written although it is the default: peers may ask for it."""
    tenant_id: str | None = None
    executor: Executor | None = None
    options: AssignmentOptions = AssignmentOptions()
    resource_class: str | None = None
    correlation: Correlation | None = None
    decision: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def record_id(self) -> str:
        name = self.assignment_id
        return record_id(name, self.tenant_id) if self.tenant_id or "|" in name else name

    @property
    def trace_id(self) -> str | None:
        """The trace id that was given, else that of `traceparent`."""
        if self.correlation is None:
            return None
        return self.correlation.trace_id or trace_of(self.correlation.traceparent)

    @property
    def traceparent(self) -> str | None:
        """The span that the assignment was submitted in; None without a valid one."""
        given = None if self.correlation is None else self.correlation.traceparent
        return given if trace_of(given) else None

    @property
    def priority(self) -> int:
        given = self.options.priority
        return given if isinstance(given, int) else PRIORITIES[given]

    @property
    def retries(self) -> int | None:
        """The retries that the request asks for, under either of their two names; None leaves it to the policy."""
        options = self.options
        if options.retry is not None and options.retry.max_attempts is not None:
            return options.retry.max_attempts
        return options.retry_count

    @property
    def timeout_ms(self) -> int:
        """Time for all executions, from the first one on, where no policy says otherwise."""
        given = self.given_timeout_ms
        return DEFAULT_TIMEOUT_MS if given is None else given

    @property
    def given_timeout_ms(self) -> int | None:
        """Time for all executions that the assignment asks for; None leaves it to the block's policy."""
        given = self.options.timeout_ms
        if given is None:
            inside = self.job.payload.get("timeout_ms")
            given = inside if inside is not None and is_whole_number(inside) else None
        return given


class ExecAssignmentAck(Struct, frozen=True, gc=False, omit_defaults=True):
    """A worker's acknowledgement of an assignment. The baseline omits the fields after `message`."""

    assignment_id: str
    status: AckStatus
    message: str | None = None
    overload_status: OverloadStatus | None = None
    queue_depth: int | UnsetType = UNSET
    worker_id: str | None = None
    reason: str | None = None
    retry_after_ms: int | UnsetType = UNSET


class ResultJob(Struct, frozen=True, gc=False):
    """The job of a result."""

    type: str


class ExecResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """The result of an assignment."""

    assignment_id: str
    request_id: str
    status: ResultStatus
    provider_id: str
    job: ResultJob
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

    @property
    def record_id(self) -> str:
        return record_id(self.assignment_id, self.tenant_id)


class ClassHealth(Struct, frozen=True):
    """The state of one resource class of a worker."""

    status: OverloadStatus
    queue_depth: int
    active: int
    capacity: int


class Heartbeat(Struct, frozen=True):
    """A worker's state, sent at intervals."""

    worker_id: str
    timestamp: int
    classes: dict[str, ClassHealth]
    draining: bool = False
    incarnation: str = ""
    """A new value each time the worker starts: assignments of the previous one may only be in its store."""
    store: str = ""
    """The store that keeps what the worker accepts. A router on the same store need not store its results again."""
    leaving: bool = False
    """Draining for good: work queued for this worker goes to other workers."""


class Cancel(Struct, frozen=True, omit_defaults=True):
    """A request to cancel an assignment. Without a `tenant_id` it means an assignment without a tenant."""

    assignment_id: str
    reason: str | None = None
    tenant_id: str | None = None

    @property
    def record_id(self) -> str:
        return record_id(self.assignment_id, self.tenant_id)


class Fleet(Struct, frozen=True):
    """The number of live workers, sent by a router: they share the retry tokens of every destination."""

    workers: int


class StepRequest(Struct, frozen=True, gc=False):
    """A step for a block to run."""

    type: str
    inputs: dict[str, Any] = {}
    resources: dict[str, Any] = {}
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """Time for all executions, from the first one on."""
    retry_count: int | None = None
    """The retries that the request asks for; None leaves it to the policy."""

    @classmethod
    def of(cls, assignment: ExecAssignment, default_ms: int = DEFAULT_TIMEOUT_MS) -> "StepRequest":
        """The step that an assignment asks for. `default_ms` is the time for all executions if it sets none."""
        job, given = assignment.job, assignment.given_timeout_ms
        timeout = default_ms if given is None else given
        return cls(job.type, job.payload, job.resources or {}, timeout, assignment.retries)

    def degraded(self, *, skip_retries: bool, timeout_factor: float) -> "StepRequest":
        """A degraded copy of the step: less time, and no retries if they are skipped."""
        retries = 0 if skip_retries else self.retry_count
        timeout = max(1, int(self.timeout_ms * timeout_factor))
        return StepRequest(self.type, self.inputs, self.resources, timeout, retries)


class StepResult(Struct, frozen=True):
    """The result of a step."""

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
        """The HTTP status in the metadata, else in the outputs: a number of three digits, or a text of them."""
        for value in (self.metadata.get("http_status_code"), self.outputs.get("status_code")):
            if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():
                value = int(value)
            if is_whole_number(value) and 100 <= value <= 999:
                return value
        return None


class InvalidMessage(Struct, frozen=True):
    """A message that cannot be used. `readable`: it is JSON that may hold the id of an assignment."""

    message: str
    field: str = ""
    assignment_id: str = ""
    readable: bool = True

    @property
    def ack_status(self) -> AckStatus:
        return AckStatus.REJECTED if self.readable else AckStatus.ERROR


class _Named(Struct):
    """The part of a message that is needed to answer it."""

    assignment_id: str


_assignments = msgspec.json.Decoder(ExecAssignment)
_named = msgspec.json.Decoder(_Named)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_encoder = msgspec.json.Encoder()
_NO_OPTIONS = AssignmentOptions()
_NOBODY = Executor()


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


DEADLINE_AT = "deadline_at"
LIMITED = "limited"
"""The header of an assignment that may begin once: its router counts the start, and the next one needs another."""
STARTED = "Assignment started"
NOT_STARTED = "Assignment not started"
BETWEEN_ATTEMPTS = "Assignment waits for its next attempt"
"""Messages of further acks of an assignment that came with the header `LIMITED`."""
"""The header of an assignment with its deadline by its worker's clock, in milliseconds UTC."""


def read_assignment(
    body: bytes, headers: Mapping[str, str] | None = None, wall_ms: int | None = None
) -> ExecAssignment | InvalidMessage:
    """
    The assignment of these bytes, checked. Headers override the payload.

    At `wall_ms` it has no more of its deadline than is left by the header `DEADLINE_AT`.
    """
    if len(body) > LARGEST_MESSAGE:
        text = f"the message: it has {len(body)} bytes; accepted: at most {LARGEST_MESSAGE}"
        return _refused(body, "", text)
    try:
        assignment = _assignments.decode(body)
    except msgspec.ValidationError as error:
        return _invalid(body, error)
    except _UNREADABLE as error:
        return InvalidMessage(f"the message: not JSON: {error}", readable=False)
    return checked(_with_headers(assignment, headers, wall_ms) if headers else assignment)


def _with_headers(assignment: ExecAssignment, headers: Mapping[str, str], wall_ms: int | None) -> ExecAssignment:
    changes: dict[str, Any] = {}
    deadline_ms, ends = assignment.options.deadline_ms, headers.get(DEADLINE_AT, "")
    if wall_ms is not None and deadline_ms is not None and deadline_ms > 0 and ends.isdecimal() and len(ends) < 16:
        left = max(1, min(deadline_ms, int(ends) - wall_ms))
        changes["options"] = msgspec.structs.replace(assignment.options, deadline_ms=left)
    if headers.get("version"):
        changes["version"] = headers["version"]
    if headers.get("tenant_id"):
        changes["tenant_id"] = headers["tenant_id"]
    parent = headers.get("traceparent") if trace_of(headers.get("traceparent")) else None
    trace = headers.get("trace_id") or trace_of(parent)
    if trace:
        changes["correlation"] = Correlation(trace, parent or assignment.traceparent)
    return msgspec.structs.replace(assignment, **changes) if changes else assignment


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_of(traceparent: str | None) -> str | None:
    """The trace id of a W3C `traceparent` (version, trace, span, flags); None of one that is not valid."""
    if traceparent is None or len(traceparent) > LONGEST_ID:
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[2] and traceparent.startswith("00")):  # only a later version may say more
        return None
    return found[1]


def _invalid(body: bytes, error: msgspec.ValidationError) -> InvalidMessage:
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    for missing in ("assignment_id", "request_id", "job", "type"):
        if text == f"Object missing required field `{missing}`":
            field = f"{field}.{missing}".lstrip(".")
            text = "missing"
    return _refused(body, field, f"{field or 'the message'}: {text}")


def _refused(body: bytes, field: str, message: str) -> InvalidMessage:
    """An invalid message with the id of its assignment, if that can be read, for the acknowledgement."""
    try:
        name = _named.decode(body).assignment_id
    except msgspec.ValidationError:
        return InvalidMessage(message, field)
    except _UNREADABLE:
        return InvalidMessage(message, field, readable=False)
    return InvalidMessage(message, field, _shown_id(name))


def _shown_id(name: str) -> str:
    """The part of an id that an acknowledgement may carry; nothing of one that is not printable."""
    return name[:LONGEST_ID] if name.isprintable() else ""


def checked(assignment: ExecAssignment) -> ExecAssignment | InvalidMessage:
    """The assignment, if all of its fields are valid; otherwise an `InvalidMessage` with the first mistake."""
    found = None if _is_plain(assignment) else _first_mistake(assignment)
    if found is None:
        return assignment
    field, accepted = found
    return InvalidMessage(f"{field}: {accepted}", field, _shown_id(assignment.assignment_id))


def _first_mistake(assignment: ExecAssignment) -> tuple[str, str] | None:
    options = assignment.options
    if assignment.version != VERSION:
        return "version", f"{shown(assignment.version)} is not accepted; accepted: {VERSION!r}"
    for field, text in (
        ("assignment_id", assignment.assignment_id),
        ("request_id", assignment.request_id),
        ("job.type", assignment.job.type),
    ):
        if not 0 < len(text) <= LONGEST_ID or not text.isprintable():
            return field, f"accepted: printable text of 1 to {LONGEST_ID} characters"
    for field, given, longest in _optional_texts(assignment):
        if given is not None and not (len(given) <= longest and given.isprintable()):
            return field, f"accepted: printable text of at most {longest} characters"
    if (headers := assignment.job.payload.get("headers")) and (mistake := _unsendable(assignment.job, headers)):
        return mistake
    timeout = "options.timeout_ms" if options.timeout_ms is not None else "job.payload.timeout_ms"
    retry = options.retry or RetryOptions()
    priority = options.priority if isinstance(options.priority, int) else None
    for field, number, least, most in (
        ("options.deadline_ms", options.deadline_ms, 1, LONGEST_MS),
        (timeout, assignment.given_timeout_ms, 1, LONGEST_MS),
        ("options.attempt_timeout_ms", options.attempt_timeout_ms, 1, LONGEST_MS),
        ("options.retry_count", options.retry_count, 0, 100),
        ("options.retry.max_attempts", retry.max_attempts, 0, 100),
        ("options.retry.backoff_ms", retry.backoff_ms, 0, 86_400_000),
        ("options.priority", priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY),
    ):
        if number is not None and not least <= number <= most:
            return field, f"{number} is not accepted; accepted: a whole number from {least} to {most}"
    if isinstance(options.priority, str) and options.priority not in PRIORITIES:
        accepted = f"a whole number, or one of {', '.join(PRIORITIES)}"
        return "options.priority", f"{shown(options.priority)} is not accepted; accepted: {accepted}"
    return None


def _unsendable(job: Job, headers: object) -> tuple[str, str] | None:
    """The first header of an `http.request` that no attempt could send, and what would be accepted."""
    if SHORT_NAMES.get(job.type, job.type) == "http.request" and isinstance(headers, dict):
        for name, value in headers.items():
            if isinstance(value, str) and ascii_header(value) is None:
                return f"job.payload.headers.{name[:60]}", f"{shown(value)} is not accepted; accepted: {HEADER_VALUES}"
    return None


def _is_plain(assignment: ExecAssignment) -> bool:
    """Whether the assignment is valid and has no options, as most do: its texts are checked together."""
    job, correlation, payload = assignment.job, assignment.correlation, assignment.job.payload
    if assignment.executor is not None or job.resources is not None or job.payload_ref is not None:
        return False
    if assignment.options != _NO_OPTIONS or "timeout_ms" in payload or "headers" in payload:
        return False
    trace = "" if correlation is None else correlation.trace_id
    name, request, kind = assignment.assignment_id, assignment.request_id, job.type
    texts = f"{name}{request}{kind}{assignment.tenant_id or ''}{trace or ''}{assignment.resource_class or ''}"
    is_short = len(texts) <= LONGEST_ID
    return is_short and assignment.version == VERSION and bool(name and request and kind) and texts.isprintable()


def _optional_texts(assignment: ExecAssignment) -> tuple[tuple[str, str | None, int], ...]:
    """Texts that are copied into events, columns and acknowledgements: all are bounded and printable."""
    executor, job = assignment.executor or _NOBODY, assignment.job
    inside = None if job.resources is None else job.resources.get("class")
    return (
        ("tenant_id", assignment.tenant_id, LONGEST_ID),
        ("correlation.trace_id", assignment.trace_id, LONGEST_ID),
        ("resource_class", assignment.resource_class, LONGEST_ID),
        ("executor.provider_id", executor.provider_id, LONGEST_ID),
        ("executor.channel", executor.channel, LONGEST_ID),
        ("job.resources.class", inside if isinstance(inside, str) else None, LONGEST_ID),
        ("job.payload_ref", job.payload_ref, LONGEST_REFERENCE),
    )


def named_class(assignment: ExecAssignment) -> str:
    """The resource class that an assignment names; empty when it leaves that to its step."""
    if assignment.resource_class or assignment.job.resources is None:
        return assignment.resource_class or ""
    given = assignment.job.resources.get("class")
    return given if isinstance(given, str) else ""


def resource_class(assignment: ExecAssignment) -> str:
    """The resource class of an assignment: the one it names, else by its job type."""
    return named_class(assignment) or _class_of_type(assignment.job.type)


@lru_cache(maxsize=256)
def _class_of_type(job_type: str) -> str:
    family = SHORT_NAMES.get(job_type, job_type).partition(".")[0]
    if family in ("http", "fs"):
        return "io"
    return "gpu" if family in ("ai", "media") else "cpu"
