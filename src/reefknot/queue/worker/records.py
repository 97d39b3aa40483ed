"""
Records of an assignment by its worker: stored form, wire result, events and counters.

Counters are plain numbers of this process: events are the record, and no decision looks at either.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from reefknot.audit.assignments import briefly_about
from reefknot.audit.journal import envelope
from reefknot.audit.model.event import Admission as AdmissionEvent
from reefknot.audit.model.event import Event
from reefknot.core.canonical import canonical
from reefknot.core.checks import LARGEST_FLOAT, is_number
from reefknot.core.decide import History
from reefknot.core.failure import ErrorCode
from reefknot.errors import ParameterError
from reefknot.policy.model.book import Book
from reefknot.queue.execution.failures import StepOutcome
from reefknot.queue.execution.tracing import WorkTrace
from reefknot.queue.model.admission import (
    Accept,
    Admission,
    Arrival,
    Defer,
    Degradation,
    Degrade,
    OverloadStatus,
    QueueView,
    RejectReason,
)
from reefknot.queue.model.follow_ups import Origin, items_of
from reefknot.queue.model.messages import (
    LARGEST_MESSAGE,
    AckStatus,
    ExecAssignment,
    ExecResult,
    ResultJob,
    ResultStatus,
    StepRequest,
    StepResult,
    StepStatus,
    encode,
    named_class,
    resource_class,
)
from reefknot.queue.model.results import assignment_of, item_of
from reefknot.queue.model.work import Settled, WorkItem, attempts_since_progress, step_key
from reefknot.queue.worker.notes import AttemptNotes
from reefknot.steps.port import AwaitedPages, Block, BlockContext

_ROOM = 64 * 1024
"""Bytes of a result that are not its outputs, at most."""

_KINDS: dict[str, type] = {"status": StepStatus, "error_code": ErrorCode, "outputs": dict, "metadata": dict}
"""The fields of a step result that a block sets; its message is made a text in any case."""
_LONG_NUMBER = re.compile(rb"[0-9]{19}")

_RESULT_OF = {
    StepStatus.OK: ResultStatus.SUCCESS,
    StepStatus.ERROR: ResultStatus.ERROR,
    StepStatus.TIMEOUT: ResultStatus.TIMEOUT,
    StepStatus.CANCELLED: ResultStatus.CANCELLED,
}


class AdmittedAs(Struct, frozen=True, gc=False, omit_defaults=True):
    """The changes that admission made to an assignment, and the queue that it met. Stored with the assignment."""

    skip_retries: bool = False
    timeout_factor: float = 1.0
    skip_circuit_breaker: bool = False
    queue_depth: int = 0
    overload_status: OverloadStatus = OverloadStatus.HEALTHY
    limited: bool = False
    """Whether each of its attempts needs a start that its router grants."""

    @property
    def met(self) -> tuple[int, OverloadStatus]:
        """The depth and the status of the queue."""
        return self.queue_depth, self.overload_status

    @classmethod
    def by(cls, answer: Admission, assignment: ExecAssignment, met: tuple[int, OverloadStatus]) -> "AdmittedAs":
        """The changes by this decision; `met` is the depth and the status of the queue."""
        change = answer.change if isinstance(answer, Degrade) else Degradation()
        skips = assignment.options.skip_circuit_breaker or change.skip_circuit_breaker
        return cls(change.skip_retries, change.timeout_factor, skips, *met)


class AcceptedWork(Struct, frozen=True, gc=False):
    """An accepted assignment, and how it was admitted."""

    assignment: ExecAssignment
    admitted: AdmittedAs = AdmittedAs()
    sender: str = ""
    """The router's end, if this process has the assignment from a message: its ack and its result concern it alone."""

    @classmethod
    def read(cls, item: WorkItem) -> "AcceptedWork":
        """The stored form; `msgspec.DecodeError` when it is damaged."""
        return cls(_assignments.decode(item.payload), _admitted.decode(item.admission or "{}"))

    @classmethod
    def stand_in(cls, item: WorkItem) -> "AcceptedWork":
        """The assignment of a record with a damaged payload, from its columns: enough for a result and an event."""
        return cls(assignment_of(item))

    def as_item(self, body: bytes, queue_name: str, answer: Admission, wall_ms: int) -> WorkItem:
        """The stored form, which `read` reads. Without the original `body`, the assignment is encoded again."""
        delay_ms = answer.milliseconds if isinstance(answer, Defer) else 0
        body = body or encode(self.assignment)
        item = item_of(self.assignment, body, queue_name, begins_at=wall_ms, due_at=wall_ms + delay_ms)
        if self.admitted == AdmittedAs():
            return item
        return structs.replace(item, admission=encode(self.admitted).decode())


_assignments = msgspec.json.Decoder(ExecAssignment)
_admitted = msgspec.json.Decoder(AdmittedAs)


def result_of(
    assignment: ExecAssignment, step: StepResult, *, worker_id: str, v2: bool, wall: float, retries_used: int
) -> ExecResult:
    """The wire result of a step. Error codes travel by their names; the baseline does not say who worked."""
    failed = step.error_code is not ErrorCode.none
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=_RESULT_OF[step.status],
        provider_id=(assignment.executor and assignment.executor.provider_id) or worker_id,
        job=ResultJob(assignment.job.type),
        latency_ms=round(step.latency_ms, 3),
        cost=_cost(step.metadata.get("cost")),
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        timestamp=int(wall * 1000),
        worker_id=worker_id if v2 else None,
        retries_used=retries_used,
        error_code=step.error_code.wire if failed else None,
        error_message=step.error_message or None,
        output=step.outputs or None,
    )


def _cost(given: object) -> int | float:
    return given if given is not None and is_number(given) and -LARGEST_FLOAT <= given <= LARGEST_FLOAT else 0


def sendable(given: Any) -> StepResult:
    """The step result if it can be sent; else the failure of one that is no result, no JSON, or too large."""
    if not issubclass(type(given), StepResult):
        return _broken(f"the block gave a {type(given).__name__}, not a StepResult")
    step: StepResult = given
    for name, kind in _KINDS.items() if not _has_plain_fields(step) else ():
        if not issubclass(type(getattr(step, name)), kind):
            found = type(getattr(step, name)).__name__
            return _broken(f"the block's StepResult has a {found} as its {name}; accepted: {kind.__name__}")
    try:
        written = msgspec.json.encode((step.outputs, step.metadata))
        if b"null" in written:  # which is also how "not a number" is written
            canonical(step.outputs, "outputs")
        if _LONG_NUMBER.search(written):  # not all that can be written can be read
            msgspec.json.decode(written)
        size = len(written)
    except (TypeError, ValueError, RecursionError, OverflowError, UnicodeError, msgspec.DecodeError) as error:
        return _broken(f"the block's outputs cannot be written as JSON: {error}")
    if size > LARGEST_MESSAGE - _ROOM:
        return _broken(f"the block's outputs have {size} bytes; accepted: at most {LARGEST_MESSAGE - _ROOM}")
    if step.ok:  # whatever it says about an error: a success has none
        is_plain = step.error_code is ErrorCode.none and not step.error_message
        return step if is_plain else msgspec.structs.replace(step, error_code=ErrorCode.none, error_message="")
    if step.error_code is ErrorCode.none:
        return msgspec.structs.replace(step, error_code=_CODE_OF_STATUS.get(step.status, ErrorCode.execution_failed))
    return step


def _has_plain_fields(step: StepResult) -> bool:
    """Whether the fields that a block sets are of the very types that they should be, as they mostly are."""
    is_coded = type(step.status) is StepStatus and type(step.error_code) is ErrorCode
    return is_coded and type(step.outputs) is dict and type(step.metadata) is dict


_CODE_OF_STATUS = {
    StepStatus.CANCELLED: ErrorCode.cancelled_by_user,
    StepStatus.TIMEOUT: ErrorCode.cancelled_by_timeout,
}


def _broken(message: str) -> StepResult:
    return StepResult(StepStatus.ERROR, ErrorCode.execution_failed, error_message=message)


def admission_event(
    assignment: ExecAssignment | str,
    wall: float,
    *,
    status: AckStatus,
    reason: RejectReason | None,
    worker_id: str,
    resource_class: str | None,
    met: tuple[int, OverloadStatus] | None,
    inputs: dict[str, Any],
    message: str,
) -> AdmissionEvent:
    """The event of an admission, or of a message that is no assignment, by its id. Inputs of no consequence go."""
    arrival = inputs.get("newcomer")
    if isinstance(arrival, Arrival):
        recorded = msgspec.structs.replace(arrival, tenant="")  # the event names it already
        inputs = {**inputs, "newcomer": recorded if recorded != Arrival() else None}
        if reason is None:
            inputs["view"] = _consequential(inputs["view"], arrival)
            resource_class = None  # the rules name it
    if message != Accept().message:
        inputs = {**inputs, "message": message[:300]}
    if isinstance(assignment, str):
        about = envelope(wall=wall, work_id=assignment)
    else:
        about = briefly_about(assignment, wall)
    return AdmissionEvent(
        **about,
        status=status.value,
        reason=None if reason is None else reason.value,
        worker_id=worker_id,
        resource_class=resource_class,
        queue_depth=None if met is None else met[0],
        overload_status=None if met is None else met[1].value,
        inputs={name: value for name, value in inputs.items() if value is not None} or None,
    )


def _consequential(view: QueueView, arrival: Arrival) -> QueueView | None:
    """The queue as far as an accepted arrival depends on it; None for an empty one. Waits count with a deadline."""
    if arrival.deadline_ms is None:
        view = msgspec.structs.replace(view, concurrency=1, service_times_known=0, mean_service_ms=0.0)
    return None if view == QueueView() else view


class RetryCounts(Struct, frozen=True):
    """Retries of one worker since it started."""

    executions: int
    succeeded: int
    """Assignments that ended well, the first try included."""
    failed: int
    retries: int
    retries_by_code: dict[str, int]
    """By the error code of the failure that is retried."""
    retries_by_block: dict[str, int]
    recovered: int
    """Assignments that succeeded after at least one retry."""
    given_up: int
    """Assignments that failed although they were retried."""
    mean_backoff_s: float
    budget_exhaustions: int
    throttled: int
    expired: int
    retry_success_rate: float | None
    """Of the assignments that were retried and have ended, how many succeeded. None while there is none."""


class AttemptInputs(Struct, frozen=True):
    """The inputs of one attempt. `began` is wall time; `elapsed` counts from the first attempt's beginning."""

    item: WorkItem
    assignment: ExecAssignment
    request: StepRequest
    """What the assignment asks for, and what degradation left of it."""
    target: str
    began: float
    book: Book
    notes: AttemptNotes
    queue_depth: int = 0
    overload_status: OverloadStatus = OverloadStatus.HEALTHY
    """The queue as it was at admission."""
    trace: WorkTrace | None = None

    @property
    def number(self) -> int:
        return self.item.attempts + 1

    @property
    def counted(self) -> int:
        """The attempts that count by now, with this one: none of those before its latest checkpoint."""
        return attempts_since_progress(self.item, self.notes.checkpoints) + 1

    def history(self, wall: float) -> History:
        """The history of a failure of this attempt, as the retry decision takes it."""
        last_delay = self.item.budget.last_delay if self.counted > 1 else 0.0
        return History(self.counted, self.elapsed(wall), last_delay)

    def context(self, seconds: float, awaited: AwaitedPages) -> BlockContext:
        """The context that the step is given, with this time for its attempt."""
        assignment, trace = self.assignment, self.trace
        return BlockContext(
            assignment.assignment_id,
            self.number,
            step_key(assignment.record_id, self.item.generation),
            seconds,
            assignment.tenant_id,
            assignment.trace_id,
            assignment.traceparent if trace is None else trace.traceparent,
            self.notes.last_checkpoint,
            self.notes,
            awaited=awaited,
        )

    @property
    def spent(self) -> float:
        """Seconds of earlier attempts that led to a checkpoint."""
        return 0.0 if self.item.extra.notes is None else self.item.extra.notes.spent_ms / 1000

    def elapsed(self, wall: float) -> float:
        first = self.item.budget.first_attempt_at
        return max(0.0, wall - (self.began if first is None else first / 1000))


def with_follow_ups(
    attempt: AttemptInputs, step: StepResult, context: BlockContext, blocks: Mapping[str, Block], wall: float
) -> StepOutcome:
    """
    The outcome of a step, with the work that follows a success. Too much of it is a failure for good.

    Their resource classes are those of the worker's own steps; a router knows those of all.
    """

    def class_of(assignment: ExecAssignment) -> str:
        own = getattr(blocks.get(assignment.job.type), "resource_class", "")
        return named_class(assignment) or own or resource_class(assignment)

    if not context.follow_ups or not step.ok:
        return StepOutcome(step)
    origin = Origin(attempt.item, wall, context.traceparent, class_of)
    try:
        return StepOutcome(step, follow_ups=items_of(origin, context.follow_ups))
    except ParameterError as error:
        wrong = StepResult(StepStatus.ERROR, ErrorCode.invalid_input, error_message=str(error))
        return StepOutcome(wrong, verdict=False)


class AttemptReport(Struct, frozen=True):
    """The outcome of one attempt: how the item settles, its events, and the result if this was the end."""

    settled: Settled
    events: tuple[Event, ...] = ()
    result: ExecResult | None = None
    """There only when the assignment has ended."""
    took_ms: float | None = None
    """The service time of the attempt, if it was made and not cut short by its own deadline."""
    follow_ups: tuple[WorkItem, ...] = ()
    """The work that is stored with it."""

    def after(self, ran: StepOutcome, took_ms: float | None) -> "AttemptReport":
        """The report of this execution."""
        return structs.replace(self, took_ms=took_ms, follow_ups=ran.follow_ups)


class RunningStep(Struct, frozen=True):
    """An attempt whose block is being run: what it is, the task that runs it, and when its time is over."""

    assignment: ExecAssignment
    task: asyncio.Task[Any] | None
    ends: float
    """By the worker's clock."""


class Counters(Struct):
    """The retry counters of one worker; `RetryCounts` tells of the fields."""

    executions: int = 0
    succeeded: int = 0
    failed: int = 0
    recovered: int = 0
    given_up: int = 0
    budget_exhaustions: int = 0
    throttled: int = 0
    expired: int = 0
    backoff_s: float = 0.0
    retries_by_code: dict[str, int] = {}
    retries_by_block: dict[str, int] = {}

    def retry(self, code: str, block: str, delay: float) -> None:
        """Another attempt was granted, after `delay` seconds."""
        self.retries_by_code[code] = self.retries_by_code.get(code, 0) + 1
        self.retries_by_block[block] = self.retries_by_block.get(block, 0) + 1
        self.backoff_s += delay

    def ended(self, *, ok: bool, retried: bool) -> None:
        """An assignment ended."""
        if ok:
            self.succeeded += 1
            self.recovered += retried
        else:
            self.failed += 1
            self.given_up += retried

    def snapshot(self) -> RetryCounts:
        retries, ended = sum(self.retries_by_code.values()), self.recovered + self.given_up
        counts = structs.asdict(self)
        counts["mean_backoff_s"] = counts.pop("backoff_s") / max(1, retries)
        counts |= {name: dict(counts[name]) for name in ("retries_by_code", "retries_by_block")}
        return RetryCounts(**counts, retries=retries, retry_success_rate=self.recovered / ended if ended else None)
