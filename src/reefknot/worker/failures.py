"""
A step that failed, in the words of decisions and records.

It reads and words; what follows from a failure is decided elsewhere.

What a block raised, as a step's result.

A group is what its least hopeful leaf is: it is retried only if every one of them would be. Whoever asks to be tried
again is heard. What is no `Exception` is a failure of the step as well, and is never retried: `sys.exit()` in a block
ends that block and nobody else.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import FailureRecord
from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.messages import StepResult, StepStatus
from reefknot.core.retry.classify import classify, status_in
from reefknot.core.work import WorkItem
from reefknot.errors import OutcomeUnknownError, RejectedError, RetryAfter
from reefknot.retrying.failures import failure_from


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


MOST_LEAVES = 100

Hope = Callable[[StepResult], tuple[bool, int]]
"""Whether a failure like this is retried, and how often it is tried at most."""


class CutOff(Struct, frozen=True):
    """It needed longer than it had. `whole`: than was left for all attempts."""

    seconds: float
    whole: bool


class Ran(Struct, frozen=True):
    """What one execution came to, and what its result cannot say."""

    step: StepResult
    cut_off: CutOff | None = None
    verdict: bool | None = None
    """False: whatever the policy says, not again."""
    unknown: str = ""
    """A guarded key whose effect may have happened or not."""


def from_error(error: BaseException, hope: Hope) -> Ran:
    """The failure that this tells of."""
    leaves = list(_leaves(error))[:MOST_LEAVES]
    steps = [_of_one(leaf) for leaf in leaves]
    step = steps[0] if error is leaves[0] else _of_group(error, min(steps, key=hope), steps)
    unknown = next((leaf.key for leaf in leaves if isinstance(leaf, OutcomeUnknownError)), "")
    control_flow = any(not isinstance(leaf, Exception) for leaf in leaves)
    return Ran(step, verdict=False if control_flow or unknown else None, unknown=unknown)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _leaves(inner)


def _of_one(error: BaseException) -> StepResult:
    failure = failure_from(error)
    metadata: dict[str, Any] = {} if failure.http_status is None else {"http_status_code": failure.http_status}
    code = failure.code if isinstance(error, Exception) else ErrorCode.execution_failed
    if failure.retry_after is not None:
        metadata["retry_after"] = failure.retry_after
        asks = isinstance(error, RetryAfter | RejectedError) or failure.failure_type is FailureType.UNKNOWN
        if asks and code is ErrorCode.execution_failed:  # who names a time to come back means it
            busy = isinstance(error, RejectedError)
            code = ErrorCode.system_overload if busy else ErrorCode.resource_unavailable
    return StepResult(StepStatus.ERROR, code, {}, str(failure), metadata)


def _of_group(error: BaseException, chosen: StepResult, steps: list[StepResult]) -> StepResult:
    """One leaf speaks for all; the longest wait that any of them asks for stands."""
    hints = [step.metadata["retry_after"] for step in steps if "retry_after" in step.metadata]
    metadata = {**chosen.metadata, "retry_after": max(hints)} if hints else chosen.metadata
    message = f"{failure_from(error)}: {chosen.error_message}"
    return msgspec.structs.replace(chosen, error_message=message, metadata=metadata)
