"""
Failures of steps: exceptions and time-outs as step results, and step results as classified failures.

An exception group is what its least hopeful leaf is: it is retried only if every leaf would be. `RetryAfter` is
honoured. Whatever is no `Exception` fails the step as well and is never retried: `sys.exit()` in a block ends that
block and nothing else.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import FailureRecord
from reefknot.core.canonical import canonical
from reefknot.core.checks import LARGEST_FLOAT, is_number
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.messages import StepResult, StepStatus
from reefknot.core.retry.classify import classify, status_in
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import WorkItem
from reefknot.errors import OutcomeUnknownError, RejectedError, RetryAfter
from reefknot.idempotency.waiting import HeldKey
from reefknot.retrying.failures import failure_from
from reefknot.retrying.functions import leaves_of


def timeout_result(item: WorkItem, target: str, seconds: float, *, whole: bool) -> StepResult:
    """The result of an attempt that timed out: at its own limit, or (`whole`) at the end of all time for attempts."""
    if not whole:
        code = _timeout_code(target)
        return StepResult(StepStatus.TIMEOUT, code, error_message=f"the attempt did not finish within {seconds:.3g} s")
    last = "" if item.failure is None else f"; before that: {last_error(item)}"
    message = f"the time for all attempts was over after {seconds:.3g} s of attempt {item.attempts + 1}{last}"
    return StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)


def ended_step(step: StepResult, reason: Reason, policy: RetryPolicy, failure: Failure) -> StepResult:
    """The last step's result with the reason why no other one follows, where its own error does not say it."""
    if reason is Reason.BUDGET_SPENT and step.error_code is not ErrorCode.cancelled_by_timeout:
        wait = "" if failure.retry_after is None else f" (the server asked to wait {failure.retry_after:.6g} s)"
        why = f"another attempt would not fit into the time for all of them, {policy.time_budget:.3g} s{wait}"
    elif reason is Reason.HINT_TOO_LONG:
        most = max(policy.max_retry_after, policy.max_delay)
        why = f"the server asked to wait {failure.retry_after or 0:.6g} s, and at most {most:.6g} s are waited"
    else:
        return step
    last = f"{step.error_code.wire}: {step.error_message}" if step.error_message else step.error_code.wire
    return msgspec.structs.replace(step, error_message=f"{why}; the last error: {last}")


def _timeout_code(target: str) -> ErrorCode:
    """The time-out code of the block's family: a network, or a resource that did not answer."""
    family = target.partition(":")[2].partition(".")[0]
    return ErrorCode.resource_unavailable if family in ("fs", "sql") else ErrorCode.connection_timeout


def failure_of_step(step: StepResult) -> Failure:
    """The classified failure of a step."""
    hint = step.metadata.get("retry_after")
    known = is_number(hint) and 0 <= hint <= LARGEST_FLOAT
    return classify(
        step.error_message,
        code=step.error_code,
        http_status=step.http_status if step.http_status is not None else status_in(step.error_message),
        retry_after=float(hint) if known else None,  # type: ignore[arg-type]  # a number: see above
        limit_reached=bool(step.metadata.get("limit_reached")),
    )


def failure_json(failure: Failure) -> str:
    """A failure as a work item keeps it: canonical JSON."""
    return canonical(msgspec.to_builtins(FailureRecord.of(failure))).decode()


def last_error(item: WorkItem) -> str:
    """The last real error of an item, for a message."""
    record = msgspec.json.decode(item.failure or "{}", type=FailureRecord)
    return str(record.failure())


MOST_LEAVES = 100

RetryRank = Callable[[StepResult], tuple[bool, int]]
"""Whether such a failure is retried, and how often it is tried at most: how hopeful it is."""


class TimedOut(Struct, frozen=True):
    """An attempt that took longer than it had. `whole`: than was left for all attempts."""

    seconds: float
    whole: bool


class StepOutcome(Struct, frozen=True):
    """The result of one execution, and what the result cannot say."""

    step: StepResult
    timed_out: TimedOut | None = None
    verdict: bool | None = None
    """False: whatever the policy says, not again."""
    unknown: str = ""
    """A guarded key whose effect may have happened or not."""
    held: HeldKey | None = None
    """A key that somebody else holds, and that the attempt waited for until its time was nearly over."""


def outcome_of(error: BaseException, rank: RetryRank) -> StepOutcome:
    """The outcome of an execution that raised."""
    leaves = list(islice(leaves_of(error), MOST_LEAVES)) or [error]
    steps = [_result_of_error(leaf) for leaf in leaves]
    step = steps[0] if error is leaves[0] else _result_of_group(error, min(steps, key=rank), steps)
    unknown = next((leaf.key for leaf in leaves if _is_a(leaf, OutcomeUnknownError)), "")  # type: ignore[attr-defined]
    control_flow = not all(_is_a(leaf, Exception) for leaf in leaves)
    return StepOutcome(step, verdict=False if control_flow or unknown else None, unknown=unknown)


def _is_a(error: BaseException, *kinds: type[BaseException]) -> bool:
    """`isinstance` by the class alone: it also reads `__class__`, which an odd exception may refuse."""
    return issubclass(type(error), kinds)


def _result_of_error(error: BaseException) -> StepResult:
    failure = failure_from(error)
    metadata: dict[str, Any] = {} if failure.http_status is None else {"http_status_code": failure.http_status}
    code = failure.code if _is_a(error, Exception) else ErrorCode.execution_failed
    if failure.retry_after is not None:
        metadata["retry_after"] = failure.retry_after
        asks = _is_a(error, RetryAfter, RejectedError) or failure.failure_type is FailureType.UNKNOWN
        if asks and code is ErrorCode.execution_failed:  # who names a time to come back means it
            busy = _is_a(error, RejectedError)
            code = ErrorCode.system_overload if busy else ErrorCode.resource_unavailable
    return StepResult(StepStatus.ERROR, code, {}, str(failure), metadata)


def _result_of_group(error: BaseException, chosen: StepResult, steps: list[StepResult]) -> StepResult:
    """The result of the leaf that stands for all, with the longest wait that any of them asks for."""
    hints = [step.metadata["retry_after"] for step in steps if "retry_after" in step.metadata]
    metadata = {**chosen.metadata, "retry_after": max(hints)} if hints else chosen.metadata
    message = f"{failure_from(error)}: {chosen.error_message}"
    return msgspec.structs.replace(chosen, error_message=message, metadata=metadata)
