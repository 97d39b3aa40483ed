"""
Audit events: one closed set of records, and their JSON form.

Flat JSON with the documented keys at the top level. An event of a decision carries every input of that decision,
redacted before it was taken, so that a replay is arithmetic. Pure: nothing is written.
"""

from datetime import UTC, datetime
from functools import cache, lru_cache
from hashlib import sha256
from math import inf
from typing import Any, TypeAlias, get_args

import msgspec
from msgspec import NODEFAULT, UNSET, Struct, UnsetType
from msgspec.structs import astuple, fields, replace

from reefknot.core.decide import DECIDER_VERSION, Again, Decision, History, Reason, ThrottleView
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import FIELDS, RetryPolicy


class PolicyRecord(Struct, frozen=True):
    """The stored form of a policy: seconds, and null for "no limit"."""

    strategy: str
    max_attempts: int
    base_delay: float
    max_delay: float
    multiplier: float
    jitter: str
    jitter_factor: float
    time_budget: float | None
    attempt_timeout: float | None
    max_retry_after: float
    retryable: bool
    whole_seconds: bool = False
    retryable_exceptions: tuple[str, ...] = ()
    non_retryable_exceptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, policy: RetryPolicy) -> "PolicyRecord":
        return cls(**{name: _stored(getattr(policy, name)) for name in FIELDS})

    def policy(self) -> RetryPolicy:
        return RetryPolicy(**{name: getattr(self, name) for name in FIELDS})


def _stored(value: Any) -> Any:
    if value == inf:
        return None
    return str(value) if isinstance(value, str) else value


class FailureRecord(Struct, frozen=True):
    """The stored form of a failure, with the code by its name."""

    code: str
    failure_type: FailureType
    message: str = ""
    http_status: int | None = None
    retry_after: float | None = None
    exceptions: tuple[str, ...] = ()
    exhausted: bool = False

    @classmethod
    def of(cls, failure: Failure) -> "FailureRecord":
        return cls(failure.code.wire, *astuple(failure)[1:])  # the other fields are the same, in the same order

    @property
    def exception_type(self) -> str | None:
        """The class of the exception, without its module; None when none was raised."""
        return self.exceptions[0].rpartition(".")[2] if self.exceptions else None

    def failure(self) -> Failure:
        return Failure(ErrorCode[self.code.lower()], *astuple(self)[1:])


class DecisionRecord(Struct, frozen=True):
    """Every input of one decision, and its answer."""

    policy: PolicyRecord
    history: History
    failure: FailureRecord
    draw: float
    verdict: bool | None = None
    throttle: ThrottleView | None = None
    breaker_open: bool = False
    decider_version: int = DECIDER_VERSION
    book_hash: str | None = None
    answer: str = ""
    """`again`, or the reason to stop."""
    delay: float | None = None
    set_by_step: dict[str, Any] | UnsetType = UNSET
    """The fields of the policy that the step itself sets, each with the file and line of its `@rk.block`."""

    @classmethod
    def of(
        cls,
        decision: Decision,
        policy: RetryPolicy,
        history: History,
        failure: Failure,
        draw: float,
        *,
        verdict: bool | None = None,
        throttle: ThrottleView | None = None,
        breaker_open: bool = False,
    ) -> "DecisionRecord":
        given = PolicyRecord.of(policy), history, FailureRecord.of(failure), draw, verdict, throttle, breaker_open
        book, step = getattr(policy, "book_hash", None), getattr(policy, "set_by_step", None)
        return cls(*given, DECIDER_VERSION, book, *answer_of(decision), step or UNSET)


def answer_of(decision: Decision) -> tuple[str, float | None]:
    """The stored form of a decision: `again` and its delay, or the reason to stop and None."""
    if isinstance(decision, Again):
        return "again", decision.delay
    return decision.reason.value, None


class Event(Struct, frozen=True, gc=False, tag_field="event_type", kw_only=True):
    """The fields of every event: when it happened, and what it belongs to."""

    timestamp: str
    event_code: str = ""
    """A stable code, for dashboards and alerts."""
    event_id: str = ""
    tenant_id: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None

    @property
    def event_type(self) -> str:
        return _tag_of(type(self))


@cache
def _tag_of(kind: type[Event]) -> str:
    return str(kind.__struct_config__.tag)


class _OfOperation(Event, frozen=True, kw_only=True):
    retry_category: str | None = None
    operation: str | None = None
    additional_context: dict[str, Any] | None = None


class RetryAttempt(_OfOperation, frozen=True, tag="retry_attempt", kw_only=True):
    """An execution failed and will be retried."""

    event_code: str = "RK-101"
    attempt_number: int
    max_attempts: int
    delay_seconds: float
    exception_type: str | None = None
    """The class of the exception; None when none was raised, as by a time limit."""
    exception_message: str
    decision: DecisionRecord
    attempt_seconds: float | None = None
    """Duration of the execution that failed."""


class _GivenUp(_OfOperation, frozen=True, kw_only=True):
    total_attempts: int
    final_exception_type: str | None = None
    """The class of the last exception; None when none was raised."""
    final_exception_message: str
    reason: Reason
    decision: DecisionRecord
    attempt_seconds: float | None = None
    """Duration of the last execution; None when the work was given up without another one."""


class RetryExhausted(_GivenUp, frozen=True, tag="retry_exhausted", kw_only=True):
    """The last execution failed: the attempts or the time budget are spent, or the server asks for too long a wait."""

    event_code: str = "RK-102"


class RetryRefused(_GivenUp, frozen=True, tag="retry_refused", kw_only=True):
    """A failure is not retryable, or the throttle or a breaker refused the retry."""

    event_code: str = "RK-103"


class RetryRecovered(_OfOperation, frozen=True, tag="retry_recovered", kw_only=True):
    """A retry succeeded."""

    event_code: str = "RK-104"
    total_attempts: int
    elapsed_seconds: float
    history: History | None = None
    """The executions before the one that succeeded."""


class IdempotencyEvent(_OfOperation, frozen=True, tag="idempotency", kw_only=True):
    """
    An idempotency key was written or found.

    Written: `record`, `release`, `unknown` (the outcome cannot be known), `forget`. Found: `hit`, `in_progress`,
    `unknown`, `conflict` (another payload). `unrecorded`: the effect happened, and its record could not be written yet.
    """

    event_code: str = "RK-201"
    idempotency_key: str
    action: str


class TakenOver(_OfOperation, frozen=True, tag="taken_over", kw_only=True):
    """
    A caller took an idempotency key over from an owner whose lease had run out. The effect may have happened already.

    A write of the owner before is refused from then on: its fence is lower.
    """

    event_code: str = "RK-202"
    idempotency_key: str
    owner: str
    fence: int
    previous_owner: str
    previous_fence: int


class TimeoutOccurred(_OfOperation, frozen=True, tag="timeout_occurred", kw_only=True):
    """An attempt, or the whole piece of work, exceeded its time limit."""

    event_code: str = "RK-105"
    attempt_number: int
    timeout_seconds: float
    whole: bool = False


class _OfEveryAssignment(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An event that every assignment has. It is written without the fields that have their default, to be small."""


class Submitted(_OfEveryAssignment, frozen=True, tag="submitted", kw_only=True):
    """An assignment was submitted and kept, by `actor` in a `process` of `host`; it follows its `parent`, if any."""

    event_code: str = "RK-305"
    actor: str
    host: str = ""
    process: int = 0
    parent: str | None = None


class Admission(_OfEveryAssignment, frozen=True, tag="admission", kw_only=True):
    """
    An assignment was accepted, deferred, degraded or rejected, by a worker or where it was submitted.

    `inputs` are those of the decision: the queue as `view` unless it was empty, the arrival as `newcomer` (without its
    tenant), and the rules by their hash, whose content is in a `rules_stored` event, and with it the class of an
    accepted arrival. `message` is there unless it was simply accepted. `isolated`: the worker ran a suspect of a crash
    alone. `held`: the load level from before, which had not fallen yet. `tenant_hash` is there instead of a long
    `tenant_id` when it was accepted: the first 12 digits of the tenant's SHA-256.
    """

    event_code: str = "RK-301"
    tenant_hash: str | None = None
    status: str = "accepted"
    reason: str | None = None
    worker_id: str | None = None
    resource_class: str | None = None
    queue_depth: int | None = 0
    overload_status: str | None = "healthy"
    inputs: dict[str, Any] | None = None


class Routing(_OfEveryAssignment, frozen=True, tag="routing", kw_only=True):
    """
    A worker was chosen, or none could be.

    `inputs` are those of the choice: the best of the `workers` there were, each with its status, the number of
    assignments it has and its capacity; the worker that was chosen before (`after`), and the draw if chance decided.
    A worker that had no rival, and took whatever came, is there by its id alone, and `worker_id` is left out. This one
    follows `together` short ones that went to the same worker. `tenant_hash` is there instead of a long `tenant_id`
    when a worker was chosen: the first 12 digits of the tenant's SHA-256.
    """

    event_code: str = "RK-302"
    tenant_hash: str | None = None
    worker_id: str | None = None
    reason: str | None = "chosen"
    inputs: dict[str, Any] | None = None


class Dropped(Event, frozen=True, tag="dropped", kw_only=True):
    """Queued work was dropped before it ran."""

    event_code: str = "RK-303"
    reason: str
    resource_class: str | None = None


RESULT_DIGITS = 32
"""Hexadecimal digits of a result's SHA-256 that its event has."""


class Completed(_OfEveryAssignment, frozen=True, tag="completed", kw_only=True):
    """
    An assignment ended. `duration_ms` counts from its submission, `attempts` its executions.

    `attempt_seconds` is how long an execution had run that this cut short. `result_hash` is the first half of the
    SHA-256 of the stored result; an end without one (cancelled, dropped, expired) has none.
    """

    event_code: str = "RK-304"
    status: str
    operation: str | None = None
    attempts: int | None = 1
    duration_ms: int | None = None
    worker_id: str | None = None
    result_hash: str = ""
    attempt_seconds: float | None = None


class Quarantined(Event, frozen=True, tag="quarantined", kw_only=True):
    """
    Work went to quarantine; only an operator can release it.

    `inputs` say why, where no decision to stop stands before it: how many `crashes` there were, how many are the
    `limit`, and the `attempts` that had ended; or the guarded `key` whose outcome is unknown.
    """

    event_code: str = "RK-401"
    reason: str
    failure: FailureRecord | None = None
    inputs: dict[str, Any] | None = None


class Requeued(Event, frozen=True, tag="requeued", kw_only=True):
    """
    Work returned to the queue: by an operator, from a lost lease, or from a worker that drains or cannot run it.

    `generation` counts how often it was restarted with all its retries by an operator or a timetable; a lost lease does
    not change it. `attempt_seconds` is there when its first execution was lost with its process: the time from its
    start until that was noticed.
    """

    event_code: str = "RK-402"
    reason: str
    generation: int | None = None
    attempt_seconds: float | None = None


class BreakerEvent(Event, frozen=True, tag="breaker", kw_only=True):
    """
    A circuit breaker changed its state; with `wait_seconds`, work waits for it.

    That of a source is named `source:NAME`, and its states are healthy, cooling, resting, probing and recovering. The
    wait of a job is recorded when it begins, not again for each probe that fails. `inputs` are those of the decision.
    """

    event_code: str = "RK-501"
    name: str
    state: str
    wait_seconds: float | None = None
    probe_seconds: float | None = None
    """Of a destination whose breaker has opened: the time until the next probe."""
    inputs: dict[str, Any] | None = None


class OperatorAction(Event, frozen=True, tag="operator_action", kw_only=True):
    """
    An operator changed something.

    `actor` is the name that they gave with `--as`, else their user's; `os_user`, `host` and `process` are those of the
    command, whatever name was given.
    """

    event_code: str = "RK-601"
    actor: str
    os_user: str | None = None
    host: str | None = None
    process: int | None = None
    action: str
    subject: str | None = None
    details: dict[str, Any] | None = None


class BookStored(Event, frozen=True, tag="book_stored", kw_only=True):
    """The policy book that later decisions refer to by its hash."""

    event_code: str = "RK-701"
    book_hash: str
    content: dict[str, Any]


class RulesStored(Event, frozen=True, tag="rules_stored", kw_only=True):
    """
    The rules of a queue, which later admissions refer to by their hash.

    `version` is that of the admissions: since version 2 they record everything that their load level follows from.
    """

    event_code: str = "RK-704"
    version: int = 1
    rules_hash: str
    resource_class: str | None = None
    content: dict[str, Any]


class Anchor(Event, frozen=True, tag="anchor", kw_only=True):
    """
    Retention removed the events up to this point of the chain. `removed` counts all removed so far.

    `removed_now` of them went with this step, by `rule`. `last` is the body of the last of them and `previous` the hash
    before it: together they give `hash`, so the age of the removed events cannot be forged.
    """

    event_code: str = "RK-702"
    chain: str
    sequence: int
    hash: str
    removed: int
    removed_now: int = 0
    rule: str = ""
    previous: str = ""
    last: str = ""


class LogRepaired(Event, frozen=True, tag="log_repaired", kw_only=True):
    """A log ended in an incomplete write, which was never acknowledged; that end was removed."""

    event_code: str = "RK-703"
    removed_bytes: int


class _OfAlert(Event, frozen=True, kw_only=True):
    alert: str
    value: float
    threshold: float
    since: str
    """When the alert was raised."""
    text: str


class AlertRaised(_OfAlert, frozen=True, tag="alert_raised", kw_only=True):
    """A value that running systems watch has been beyond its threshold for as long as its rule says."""

    event_code: str = "RK-801"


class AlertResolved(_OfAlert, frozen=True, tag="alert_resolved", kw_only=True):
    """The value of an alert is within its limits again, or the rule of the alert was switched off."""

    event_code: str = "RK-802"


class WorkerGone(Event, frozen=True, tag="worker_gone", kw_only=True):
    """
    A worker or a router fell silent without an orderly end: its process died, or cannot reach its store.

    `part` is `worker` or `router`. `last_seen` is its last report, and `held` what it had then: the running jobs by id,
    as far as it named them, and the numbers of those that ran and waited there.
    """

    event_code: str = "RK-901"
    part: str
    worker_id: str
    host: str
    process: int
    last_seen: str
    held: dict[str, Any]


AnyEvent: TypeAlias = (
    RetryAttempt
    | RetryExhausted
    | RetryRefused
    | RetryRecovered
    | IdempotencyEvent
    | TakenOver
    | TimeoutOccurred
    | Submitted
    | Admission
    | Routing
    | Dropped
    | Completed
    | Quarantined
    | Requeued
    | BreakerEvent
    | OperatorAction
    | BookStored
    | RulesStored
    | Anchor
    | LogRepaired
    | AlertRaised
    | AlertResolved
    | WorkerGone
)
EVENT_TYPES: tuple[type[Event], ...] = get_args(AnyEvent)
EVENT_CODES: dict[str, str] = {
    str(kind.__struct_config__.tag): field.default
    for kind in EVENT_TYPES
    for field in fields(kind)
    if field.name == "event_code"
}
BRIEF_DEFAULTS: dict[str, dict[str, Any]] = {
    str(kind.__struct_config__.tag): {
        field.name: field.default for field in fields(kind) if field.default not in (NODEFAULT, None, "")
    }
    for kind in EVENT_TYPES
    if kind.__struct_config__.omit_defaults
}
"""By type: events in which a field that is absent has its default, and these defaults."""

_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(AnyEvent)


FOUND_BY_SUBMISSION = frozenset({"routing", "admission", "completed"})
"""Types of events that leave `IDS_OF_SUBMISSION` to the `submitted` of their work."""
IDS_OF_SUBMISSION = ("correlation_id", "trace_id")


TENANT_DIGITS = 12
"""Hexadecimal digits of a tenant's SHA-256 that the routing and the admission of its assignments have."""
_LONGEST_TENANT = TENANT_DIGITS + len("_hash") - len("_id")
"""Tenants up to this length are not longer in an event than their hash."""


def tenant_hash(tenant: str) -> str:
    """The digits that stand for a tenant in the events that do not name it."""
    return sha256(tenant.encode()).hexdigest()[:TENANT_DIGITS]


def as_written(event: Event) -> Event:
    """The event as its body has it: correlation, trace and a long tenant of an assignment are in its `submitted`."""
    if isinstance(event, Completed):
        is_brief = event.correlation_id is None and event.trace_id is None
        return event if is_brief else replace(event, correlation_id=None, trace_id=None)
    if isinstance(event, Routing):
        is_alone = event.reason == "chosen" and event.worker_id == lone_worker(event.inputs)
        brief = replace(event, correlation_id=None, trace_id=None, worker_id=None if is_alone else event.worker_id)
        return brief if event.worker_id is None else _with_brief_tenant(brief)
    if isinstance(event, Admission) and event.reason is None:
        return _with_brief_tenant(replace(event, correlation_id=None, trace_id=None))
    return event


def _with_brief_tenant(event: Routing | Admission) -> Event:
    tenant = event.tenant_id or ""
    is_short = len(tenant) <= _LONGEST_TENANT
    return event if is_short else replace(event, tenant_id=None, tenant_hash=tenant_hash(tenant))


def lone_worker(inputs: Any) -> str | None:
    """The worker in the inputs of a choice that had no other, and which its event does not repeat; None otherwise."""
    best = inputs.get("best") if isinstance(inputs, dict) and len(inputs) == 1 else None
    if isinstance(best, list | tuple) and len(best) == 1 and isinstance(best[0], list | tuple) and len(best[0]) == 1:
        return best[0][0] if isinstance(best[0][0], str) else None
    return None


def encode(event: Event) -> bytes:
    """Canonical JSON: keys sorted at every depth, the same bytes for the same event."""
    return _encoder.encode(event)


def decode(body: bytes) -> AnyEvent:
    """The event of these bytes; `msgspec.DecodeError` for anything else."""
    try:
        event: AnyEvent = _decoder.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    if isinstance(event, Routing) and event.worker_id is None and event.reason == "chosen":
        return replace(event, worker_id=lone_worker(event.inputs))
    return event


@lru_cache(maxsize=64)  # events of a moment have one time
@lru_cache(maxsize=64)
def timestamp_ms(text: str) -> int | None:
    """Milliseconds UTC of a time in an event; None when the text is no such time."""
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def timestamp(wall: float) -> str:
    """The text of a time in events: UTC, to the millisecond. `wall` is seconds since the epoch."""
    return _text_of(round(wall * 1_000_000) // 1000)


@lru_cache(maxsize=64)
def _text_of(wall_ms: int) -> str:
    seconds, milliseconds = divmod(wall_ms, 1000)
    return f"{_second(seconds)}.{milliseconds:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
