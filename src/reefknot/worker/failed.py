"""
A step that failed, in the words of decisions and records.

It reads and words; what follows from a failure is decided elsewhere.
"""

import msgspec

from reefknot.core.audit.event import FailureRecord
from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCode, Failure
from reefknot.core.messages import StepResult, StepStatus
from reefknot.core.retry.classify import classify, status_in
from reefknot.core.work import WorkItem


def cut_off(item: WorkItem, target: str, seconds: float, *, whole: bool) -> StepResult:
    """One attempt's own limit can be retried; the end of all time cannot, and names the error before it."""
    if not whole:
        code = _timeout_code(target)
        return StepResult(StepStatus.TIMEOUT, code, error_message=f"the attempt did not finish within {seconds:.3g} s")
    last = "" if item.failure is None else f"; before that: {last_error(item)}"
    message = f"the time for all attempts was over after {seconds:.3g} s of attempt {item.attempts + 1}{last}"
    return StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)


def _timeout_code(target: str) -> ErrorCode:
    """The network's, or a resource that did not answer."""
    family = target.partition(":")[2].partition(".")[0]
    return ErrorCode.resource_unavailable if family in ("fs", "sql") else ErrorCode.connection_timeout


def failure_of(step: StepResult) -> Failure:
    """What went wrong, classified."""
    hint = step.metadata.get("retry_after")
    known = isinstance(hint, int | float) and not isinstance(hint, bool)
    return classify(
        step.error_message,
        code=step.error_code,
        http_status=step.http_status if step.http_status is not None else status_in(step.error_message),
        retry_after=float(hint) if known else None,  # type: ignore[arg-type]
        limit_reached=bool(step.metadata.get("limit_reached")),
    )


def failure_text(failure: Failure) -> str:
    """As a work item keeps it."""
    return canonical(msgspec.to_builtins(FailureRecord.of(failure))).decode()


def last_error(item: WorkItem) -> str:
    """The last real error, for a message."""
    record = msgspec.json.decode(item.failure or "{}", type=FailureRecord)
    return str(record.failure())
