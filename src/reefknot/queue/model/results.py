"""
Results: what a caller receives about an assignment that has ended.

A worker's result is stored with the assignment. An assignment that ended without a result (cancelled, dropped, expired,
crashed too often) gets one made from the stored reason: the same result for every caller, every time.
"""

from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from reefknot.core.canonical import record_fingerprint
from reefknot.core.failure import ErrorCode
from reefknot.queue.model.admission import RejectReason
from reefknot.queue.model.messages import Correlation, ExecAssignment, ExecResult, Job, ResultJob, ResultStatus
from reefknot.queue.model.submission import EXPIRED, OVERDUE
from reefknot.queue.model.work import WorkItem, WorkState, assignment_and_tenant, is_over, is_workers

EXPIRED_MESSAGE = "the deadline passed while the assignment was queued; it was not run"
OVERDUE_MESSAGE = "the deadline passed, and the worker that was running the assignment did not answer"
UNKNOWN_OUTCOME = "the outcome of a guarded key is unknown"
"""This and the following are reasons of quarantine. After a colon the first three name the key or the problem."""
UNREADABLE_WORK = "the stored assignment cannot be read"
UNREADABLE_SUBMISSION = "the submission cannot be read"
WORKER_FAILED = "the worker failed inside"
UNKNOWN_TYPE = "no worker knows its type"
DOWN = "waiting: destination is down"
"""The beginning of the reason of an item that waits, without spending attempts, until its destination answers."""
DROPPED = RejectReason.DROPPED_OLDEST.value
DROPPED_MESSAGE = "Assignment dropped from a full queue to make room for newer work"

_results = msgspec.json.Decoder(ExecResult)
_assignments = msgspec.json.Decoder(ExecAssignment)


def cancel_reason(given: str | None) -> str:
    """A caller's reason to cancel, bounded; never one of the reasons that mean another end."""
    reason = (given or "").strip()[:300] or "cancelled"
    return f"cancelled: {reason}" if reason in (DROPPED, EXPIRED, OVERDUE) else reason


def overdue_reason(item: WorkItem) -> str:
    """The reason to end an assignment whose deadline has passed; it depends on whether a worker runs it."""
    return OVERDUE if item.state is WorkState.RUNNING and is_workers(item) else EXPIRED


class WaitsFor(Struct, frozen=True):
    """The destination that an item waits for, since when, and when it is called next. Times are milliseconds UTC."""

    destination: str
    since: int
    next_probe_at: int


def down_reason(destination: str, since: int) -> str:
    """The reason of an item that has waited for this destination since then: see `waits_for`."""
    return (
        f"{DOWN} ({destination}) since {datetime.fromtimestamp(since / 1000, UTC).isoformat(timespec='milliseconds')}"
    )


def waits_for(item: WorkItem) -> WaitsFor | None:
    """The destination that is down and for which an open item waits, or waited until it was claimed."""
    if not item.reason.startswith(DOWN) or is_over(item):
        return None
    named, _, since = item.reason.rpartition(") since ")
    try:
        began = round(datetime.fromisoformat(since).timestamp() * 1000)
    except ValueError:  # cut off, or written by a person
        return None
    return WaitsFor(named[len(DOWN) + 2 :], began, item.due_at)


def assignment_of(item: WorkItem) -> ExecAssignment:
    """The assignment in an item; of a damaged one, the part that is stored apart from its payload."""
    try:
        return _assignments.decode(item.payload)
    except msgspec.DecodeError:
        correlation = None if item.trace_id is None else Correlation(item.trace_id)
        request = item.correlation_id or ""
        return ExecAssignment(
            item.assignment_id, request, Job(item.kind), tenant_id=item.tenant_id, correlation=correlation
        )


def item_of(assignment: ExecAssignment, body: bytes, resource_class: str, *, begins_at: int, due_at: int) -> WorkItem:
    """The item of an assignment, whose deadline counts from `begins_at`; the inverse of `assignment_of`."""
    deadline = assignment.options.deadline_ms
    return WorkItem(
        id=assignment.record_id,
        kind=assignment.job.type,
        resource_class=resource_class,
        tenant_id=assignment.tenant_id,
        correlation_id=assignment.request_id,
        trace_id=assignment.trace_id,
        priority=assignment.priority,
        due_at=due_at,
        deadline_at=None if deadline is None else begins_at + deadline,
        payload=body,
    )


def is_same_job(item: WorkItem, assignment: ExecAssignment) -> bool:
    """
    Whether the item under the assignment's id is the same job: 1, 1.0 and true are three payloads.

    A damaged item counts as the same job; its result reports the damage.
    """
    try:
        return record_fingerprint(_assignments.decode(item.payload).job) == record_fingerprint(assignment.job)
    except msgspec.ValidationError:  # something else than an assignment
        return False
    except msgspec.DecodeError:
        return True


def answer_of(item: WorkItem | None) -> ExecResult | None:
    """The result of an item that has ended; None while it has not, and of no item."""
    if item is None or not is_over(item):
        return None
    if item.result is not None:
        return _results.decode(item.result)
    status, code, message = _end_of(item)
    _, _, worker_id = item.resource_class.partition("@")
    result = unrun_result(assignment_of(item), status, code, message, provider=worker_id or "router")
    ran_ms, retries = item.history[-1].ran_ms if item.history else 0, max(0, item.attempts - 1)
    return msgspec.structs.replace(result, latency_ms=ran_ms, retries_used=retries, timestamp=item.updated_at)


def result_or_gone(item: WorkItem | None, record: str) -> ExecResult:
    """The result of work that is over; of work whose record is kept no longer, an error that says so."""
    found = answer_of(item)
    if found is not None:
        return found
    name, tenant = assignment_and_tenant(record)
    gone = ExecAssignment(name, name, Job("" if item is None else item.kind), tenant_id=tenant)
    message = "it is not over: it was retried" if item is not None else "its record is not kept any longer"
    return unrun_result(gone, ResultStatus.ERROR, ErrorCode.internal_error, message)


def _end_of(item: WorkItem) -> tuple[ResultStatus, ErrorCode, str]:
    is_aside = item.state is WorkState.QUARANTINED or item.state is WorkState.DISCARDED
    if item.reason == EXPIRED and not is_aside:
        return ResultStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, EXPIRED_MESSAGE
    if item.reason == OVERDUE and not is_aside:
        return ResultStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, OVERDUE_MESSAGE
    if item.state is WorkState.CANCELLED:
        if item.reason == DROPPED:
            return ResultStatus.ERROR, ErrorCode.system_overload, DROPPED_MESSAGE
        return ResultStatus.CANCELLED, ErrorCode.cancelled_by_user, item.reason
    return ResultStatus.ERROR, ErrorCode.internal_error, f"quarantined: {item.reason}" if is_aside else item.reason


def unrun_result(
    assignment: ExecAssignment, status: ResultStatus, code: ErrorCode, message: str, *, provider: str = "router"
) -> ExecResult:
    """The result of an assignment that no step ended."""
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=status,
        provider_id=(assignment.executor and assignment.executor.provider_id) or provider,
        job=ResultJob(assignment.job.type),
        latency_ms=0,
        cost=0,
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        retries_used=0,
        error_code=code.wire,
        error_message=message or None,
    )
