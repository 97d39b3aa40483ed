"""
Failures of steps: exceptions and time-outs as step results, and step results as classified failures.

An exception group is what its least hopeful leaf is: it is retried only if every leaf would be. `RetryAfter` is
honoured. Whatever is no `Exception` fails the step as well and is never retried: `sys.exit()` in a block ends that
block and nothing else. The traceback of what a step raised is kept with the job as text, without secrets and bounded.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from traceback import extract_tb, format_list
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.model.event import FailureRecord
from reefknot.core.canonical import canonical
from reefknot.core.checks import LARGEST_FLOAT, is_number
from reefknot.core.classify import classify, kind_of_class, status_in
from reefknot.core.clock import Clock
from reefknot.core.decide import Reason
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.core.redaction import LONGEST_TEXT, Redactor
from reefknot.errors import (
    KeyInProgressError,
    OutcomeUnknownError,
    ReefknotError,
    RejectedError,
    RetryAfter,
    StoreError,
    shown,
)
from reefknot.idempotency.waiting import HeldKey
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.model.messages import ExecAssignment, StepResult, StepStatus
from reefknot.queue.model.work import WorkItem
from reefknot.retrying.failures import failure_from
from reefknot.retrying.functions import ALWAYS_RETRIED, UNREADABLE, is_group, leaves_of
from reefknot.runtime.redactor import redact
from reefknot.steps.port import Block, StepRule


def timeout_result(item: WorkItem, target: str, seconds: float, *, whole: bool) -> StepResult:
    """The result of an attempt that timed out: at its own limit, or (`whole`) at the end of all time for attempts."""
    if not whole:
        family = target.partition(":")[2].partition(".")[0]  # of a network, or of a resource that did not answer
        code = ErrorCode.resource_unavailable if family in ("fs", "sql") else ErrorCode.connection_timeout
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
    elif reason is Reason.THROTTLED:
        why = "its retry was throttled: too many calls to its destination fail"
    else:
        return step
    last = f"{step.error_code.wire}: {step.error_message}" if step.error_message else step.error_code.wire
    return msgspec.structs.replace(step, error_message=f"{why}; the last error: {last}")


def failure_of_step(step: StepResult, exceptions: tuple[str, ...] = ()) -> Failure:
    """The classified failure of a step, with the class names of what it raised: its code says more than they do."""
    hint = step.metadata.get("retry_after")
    known = is_number(hint) and 0 <= hint <= LARGEST_FLOAT
    failure = classify(
        step.error_message,
        code=step.error_code,
        http_status=step.http_status if step.http_status is not None else status_in(step.error_message),
        retry_after=float(hint) if known else None,  # type: ignore[arg-type]  # a number: see above
        limit_reached=bool(step.metadata.get("limit_reached")),
    )
    return msgspec.structs.replace(failure, exceptions=exceptions) if exceptions else failure


def failure_json(failure: Failure, traceback: str = "") -> str:
    """A failure as a work item keeps it: canonical JSON, with the traceback if there is one."""
    record = msgspec.to_builtins(FailureRecord.of(failure))
    return canonical({**record, "traceback": traceback} if traceback else record).decode()


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
    """The answer of the step's `on=` about what was raised. False prevents a retry, whatever the policy says."""
    unknown: str = ""
    """A guarded key whose effect may or may not have happened."""
    held: HeldKey | None = None
    """A key with another owner, for which the attempt waited until its time was nearly over."""
    exceptions: tuple[str, ...] = ()
    """The qualified class names of what the step raised, most specific first."""
    traceback: str = ""
    follow_ups: tuple[WorkItem, ...] = ()
    """The work that follows, if it was successful."""


def failure_of_outcome(ran: StepOutcome) -> Failure:
    """The classified failure of an execution. One of unknown type that the step's `on=` accepts is transient."""
    failure = failure_of_step(ran.step, ran.exceptions)
    if ran.verdict and failure.failure_type is FailureType.UNKNOWN:
        return msgspec.structs.replace(failure, failure_type=FailureType.TRANSIENT)
    return failure


NOT_REFUSED = (*ALWAYS_RETRIED, KeyInProgressError, StoreError)
"""Errors that `on=` may accept and cannot refuse: wishes for a retry, and what reefknot itself waits for in a step."""


async def asked_rule(rule: StepRule, error: Exception) -> bool | float | None:
    """The answer of the step's `on=` to what it raised: yes, no, or seconds; None where the policies decide."""
    answer = rule(error, failure_from(error))
    if hasattr(answer, "__await__"):
        answer = await answer
    found: bool | float = answer
    return None if found is False and _is_a(error, *NOT_REFUSED) else found


def outcome_of(error: BaseException, rank: RetryRank, answer: bool | float | None = None) -> StepOutcome:
    """The outcome of an execution that raised; `answer` is that of the step's `on=`."""
    leaves = list(islice(leaves_of(error), MOST_LEAVES)) or [error]
    steps = [_result_of_error(leaf) for leaf in leaves]
    step = steps[0] if error is leaves[0] else _result_of_group(error, min(steps, key=rank), steps)
    unknown = next((leaf.key for leaf in leaves if _is_a(leaf, OutcomeUnknownError)), "")  # type: ignore[attr-defined]
    control_flow = not all(_is_a(leaf, Exception) for leaf in leaves)
    if isinstance(answer, float):
        hint = max(answer, step.metadata.get("retry_after", 0.0))
        step = msgspec.structs.replace(step, metadata={**step.metadata, "retry_after": hint})
    verdict = None if answer is None else answer is not False
    return StepOutcome(
        step,
        verdict=False if control_flow or unknown else verdict,
        unknown=unknown,
        exceptions=failure_from(error).exceptions,
        traceback=traceback_text(error),
    )


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


# ---- exceptions of other people's code ------------------------------------------------------------------------------


def failure_with_place(error: BaseException) -> Failure:
    """
    The failure of an exception whose message is read without its class, such as that of a source's job.

    The text of a `KeyError` is the key alone, that of an `AssertionError` often empty. So what is neither an error of
    reefknot's nor one of a connection has its class and the line that raised it in its message.
    """
    failure = failure_from(error)
    is_plain = _is_a(error, ReefknotError) or kind_of_class(failure.exceptions) or failure.http_status is not None
    if is_plain:
        return failure if failure.message else msgspec.structs.replace(failure, message=str(failure))
    leaf = next(leaves_of(error), error) if is_group(error) else error
    text = str(failure) if leaf is error else f"{failure}: {failure_from(leaf)}"
    at = raised_at(leaf) or raised_at(error)
    place = redact(f" (in {at})") if at else ""
    return msgspec.structs.replace(failure, message=f"{text[: LONGEST_TEXT - len(place)]}{place}")


def raised_at(error: BaseException) -> str:
    """
    The file and line that raised an exception; empty when it was not raised.

    It is the innermost frame of a user's module, because the frames of a library below it say less. An error inside
    reefknot has no such frame.
    """
    frames: list[tuple[str, str]] = []
    below = error.__traceback__
    while below is not None:
        module = str(below.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        frames.append((module, f"{below.tb_frame.f_code.co_filename}:{below.tb_lineno}"))
        below = below.tb_next
    foreign = [place for module, place in frames if module != "reefknot" and module not in sys.stdlib_module_names]
    own = [place for place in foreign if os.path.dirname(place) == os.path.dirname(foreign[0])]
    inside = [place for module, place in frames if module == "reefknot"]
    return next((places[-1] for places in (own, inside) if places), frames[-1][1] if frames else "")


def suspended_at(task: asyncio.Task[Any] | None) -> str:
    """The file and line of the step's own code at which a task waits; empty when it is in no such code."""
    below: Any = None if task is None else task.get_coro()
    while below is not None:
        frame = getattr(below, "cr_frame", None) or getattr(below, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        below = getattr(below, "cr_await", None) or getattr(below, "gi_yieldfrom", None)
    return ""


# ---- tracebacks -----------------------------------------------------------------------------------------------------

LONGEST_TRACEBACK = 3500
LONGEST_PART = 1000
MOST_FRAMES = 20
MOST_RELATED = 3
"""Causes of an exception, and exceptions of a group, that are shown with it."""
_PACKAGE = str(Path(__file__).parents[2])
_HEAD = "Traceback (most recent call last):\n"
_CAUSE = "\nThe above exception was the cause of the following one:\n\n"
_IN_GROUP = "\nAn exception of the group:\n\n"
_LEFT_OUT = "  … earlier frames are left out\n"


def traceback_text(error: BaseException) -> str:
    """
    The traceback of what a step raised: its last frames and its message, redacted, at most `LONGEST_TRACEBACK` long.

    The frames of the worker, which called the step, are left out. The exception is rid of its frames: an object that is
    raised again and again would collect them, with all their values.
    """
    try:
        parts: list[str] = []
        for cause in reversed(_causes(error)):
            parts += [*_parts(cause), _CAUSE]
        parts += _parts(error)
        for leaf in islice(leaves_of(error), MOST_RELATED) if is_group(error) else ():
            parts += [_IN_GROUP, *_parts(leaf)]
        error.__traceback__ = None
    except UNREADABLE:  # an odd exception
        return ""
    kept: list[str] = []
    room = LONGEST_TRACEBACK - len(_LEFT_OUT)
    for part in reversed(parts):
        room -= len(part)
        if room < 0:
            kept.append(_LEFT_OUT)
            break
        kept.append(part)
    return "".join(reversed(kept)).encode("utf-8", "replace").decode().rstrip("\n")


def _parts(error: BaseException) -> list[str]:
    """The lines of one exception: a part for each frame, and one for its class and message."""
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    message = failure_from(error).message
    frames = format_list(extract_tb(_last_frames(error.__traceback__)))
    head = [_HEAD] if frames else []
    return [*head, *(redact(one)[:LONGEST_PART] for one in frames), f"{name}: {message}"[:LONGEST_PART] + "\n"]


def _causes(error: BaseException) -> list[BaseException]:
    """The exceptions that led to this one, the last one first."""
    found: list[BaseException] = []
    while len(found) < MOST_RELATED:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            break
        found.append(cause)
        error = cause
    return found


def _last_frames(frames: TracebackType | None) -> TracebackType | None:
    """The last frames, of those below the worker's own; of all, where there are no others."""
    below = frames
    while below is not None and below.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        below = below.tb_next
    last = below = below or frames
    for _ in range(MOST_FRAMES):
        below = below and below.tb_next
    while below is not None and last is not None:
        below, last = below.tb_next, last.tb_next
    return last


def is_ctrl_c(error: BaseException) -> bool:
    """
    Whether a signal raised this `KeyboardInterrupt`, and not the step itself.

    Signals reach the main thread alone. There asyncio's own handler leaves its frame; Python's leaves none, and then
    the user comes first.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_name == "_on_sigint"


def is_stopped(kind: type[BaseException], slot: asyncio.Task[Any] | None) -> bool:
    """Whether the slot is being cancelled, or closed from outside. A block may raise the same: then its step failed."""
    try:
        running = asyncio.current_task()
    except RuntimeError:  # no loop is left
        return True
    if running is None or running is not slot:
        return True
    return running.cancelling() > 0 and issubclass(kind, asyncio.CancelledError)


def unknown_key(ran: StepOutcome, keys: list[str]) -> str:
    """The guarded key that a failed attempt left behind without an answer."""
    return ran.unknown or (keys[0] if keys else "")


def redacted(ran: StepOutcome, unknown: str, latency: float, redactor: Redactor) -> StepOutcome:
    """The outcome with its latency, without secrets, and with the guarded key that a person has to resolve."""
    step = ran.step
    message = redactor(_as_text(step.error_message)) if step.error_message else ""
    if not unknown:
        step = msgspec.structs.replace(step, latency_ms=latency, error_message=message)
        return msgspec.structs.replace(ran, step=step, unknown="", traceback=redactor(ran.traceback))
    unknown = redactor(unknown)
    step = msgspec.structs.replace(
        step,
        status=StepStatus.ERROR,
        error_code=ErrorCode.execution_failed,
        error_message=f"it is unknown whether the effect of the guarded key {unknown} happened: {message}",
        latency_ms=latency,
    )
    traceback = redactor(ran.traceback)
    return StepOutcome(
        step, ran.timed_out, verdict=False, unknown=unknown, exceptions=ran.exceptions, traceback=traceback
    )


def _as_text(message: object) -> str:
    """A message as text that UTF-8 can carry, whatever a block gave as one."""
    if not isinstance(message, str):
        message = shown(message, 300)
    return message if message.isascii() else message.encode("utf-8", "replace").decode()


CLEANUP_S = 0.1
"""Time to clean up after a time-out, before the attempt is reported without its step."""


class OverdueWatch:
    """The watch over one execution, from its time-out, which has cancelled the step, to its end."""

    def __init__(
        self,
        log: DecisionLog,
        clock: Clock,
        assignment: ExecAssignment,
        block: Block,
        allowed: float,
        began: float,
        task: asyncio.Task[Any] | None,
        report: Callable[[], None],
    ) -> None:
        """`report` is called when the step, which `began` then, goes on after the time that it is `allowed`."""
        self._log = log
        self._clock = clock
        self._assignment = assignment
        self._place = str(getattr(block, "place", ""))
        self._allowed = allowed
        self._report = report
        self._task = task
        self._began = began
        self.is_reported = False
        """Whether the attempt was reported without its step."""
        self._timer = asyncio.get_running_loop().call_later(CLEANUP_S, self._goes_on)

    def _goes_on(self) -> None:
        self.is_reported = True
        self._place = suspended_at(self._task) or self._place
        self._log.overdue(self._assignment, self._place, self._allowed)
        self._report()

    def ended(self) -> None:
        """End the watch: the step has ended, whenever that is."""
        self._timer.cancel()
        if self.is_reported:
            late = self._clock.now() - self._began - self._allowed
            self._log.ended_late(self._assignment, self._place, late)
