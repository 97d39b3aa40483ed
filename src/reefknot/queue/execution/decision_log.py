"""
The log lines of decisions about stored work: one line for each, with the same fields wherever it was made.

    retry       another attempt was granted            warning, of a job of a source: info
    give up     no further attempt: spent, or put into quarantine            error
                its time was over                                            warning
                not retryable, no action needed                              info
    recovered   it succeeded after failures                                  info
    put off     it waits without spending an attempt                         debug
    overdue     its step goes on after its time; ended late: and has ended   warning
    breaker     a destination is down, or answers again                      warning, info

A success at the first try has no line. Each kind of line is bounded (ten at once, then one a second) and says how many
were left out. Texts are redacted and without control characters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reefknot.core.breaker import BreakerState
from reefknot.core.clock import Clock
from reefknot.core.decide import DECIDING_FIELD, Again, Decision, Reason
from reefknot.core.failure import Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.policy.model.book import ResolvedPolicy
from reefknot.queue.model.destination_health import DestinationHealth
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.model.work import WorkItem
from reefknot.retrying.call import WHY
from reefknot.runtime.log import LogBudget, logger, printable, seconds
from reefknot.runtime.tracing import current_trace_id

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
LONGEST = 600
_OF_STEPS = ("overdue", "ended_late")
"""Lines that are about a step, and not about a decision, which a live feed tells by its event."""
_MAY_BE_BUGS = (FailureType.UNKNOWN, FailureType.PERMANENT)


class DecisionLog:
    """The lines of one worker or orchestrator. `name` begins each of them; an empty one is left out."""

    def __init__(self, name: str, redactor: Callable[[str], str], clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._redactor = redactor
        self._lines: dict[str, LogBudget] = {}

    def decided(
        self,
        work: ExecAssignment | WorkItem,
        decision: Decision,
        policy: RetryPolicy,
        failure: Failure,
        *,
        attempts: int,
        traceback: str = "",
        quarantined: bool = False,
        named: tuple[str, dict[str, Any]] | None = None,
        level: int | None = None,
    ) -> None:
        """
        Log the decision about a failed attempt, at its usual level or at `level`. `attempts` is how many there were.

        The end of a step that raised, other than by an outage, may be a bug: its traceback follows. `named` is another
        message and more fields, for a reader who looks for these: then the sentence is the field `detail`.
        """
        wait, reason = (decision.delay, None) if isinstance(decision, Again) else (None, decision.reason)
        if traceback and reason is not None and failure.failure_type in _MAY_BE_BUGS:
            self._raised(work, traceback)
        kind, usual = ("retry", WARNING) if reason is None else ("give_up", ERROR)
        if reason is Reason.NOT_RETRYABLE and not quarantined:
            usual = INFO
        what = f"trying again in {seconds(wait or 0.0)} s" if reason is None else WHY[reason]
        # A `named` line has `max_attempts` as a field, which counts retries.
        allowed = "1 retry" if policy.retries == 1 else f"{policy.retries} retries"
        of = f" of {policy.max_attempts}" if named is None else f" ({allowed} allowed)"
        sentence = f"attempt {attempts}{of} failed with {failure}; {what}"
        fields = {
            "attempt": attempts,
            "max_attempts": policy.max_attempts,
            "error_code": failure.code.wire,
            "failure_type": failure.failure_type.value,
            "retryable": policy.retryable,
            "wait_s": wait,
            "reason": None if reason is None else reason.value,
            "quarantined": quarantined,
            **_provenance(policy, reason),
        }
        self._write(kind, usual if level is None else level, work, sentence, fields, named)

    def recovered(self, work: ExecAssignment | WorkItem, *, attempts: int, elapsed: float) -> None:
        """Log a success that came after failures."""
        sentence = f"succeeded at attempt {attempts}, after {seconds(elapsed)} s"
        self._write("recovered", INFO, work, sentence, {"attempt": attempts, "elapsed_s": round(elapsed, 3)})

    def ended(self, work: ExecAssignment | WorkItem, reason: str, *, attempts: int, level: int = WARNING) -> None:
        """Log an end that no attempt led to: its time was over, or it cannot be run at all."""
        self._write("give_up", level, work, reason, {"attempt": attempts, "reason": reason[:100]})

    def overdue(self, work: ExecAssignment | WorkItem, place: str, allowed: float) -> None:
        """Log that a step goes on although its time is over: it has ignored its cancellation."""
        at = f"at {place}" if place else "at an unknown place"
        sentence = (
            f"its step goes on after its {seconds(allowed)} s, {at}: it ignores asyncio.CancelledError. The attempt is "
            "timed out; its slot stays taken until the step ends"
        )
        self._write("overdue", WARNING, work, sentence, {"place": place, "allowed_s": allowed})

    def ended_late(self, work: ExecAssignment | WorkItem, place: str, late: float) -> None:
        """Log the end of a step whose attempt was timed out before."""
        at = f" ({place})" if place else ""
        sentence = f"its step{at} ended {seconds(late)} s after its time was over; its result is not kept"
        self._write("ended_late", WARNING, work, sentence, {"place": place, "late_s": round(late, 3)})

    def put_off(self, work: ExecAssignment | WorkItem, reason: str, wait: float) -> None:
        """Log that it waits without spending an attempt."""
        sentence = f"put off for {seconds(wait)} s: {reason}"
        self._write("put_off", DEBUG, work, sentence, {"wait_s": wait, "reason": reason[:100]})

    def breaker(self, name: str, health: DestinationHealth, now: float) -> None:
        """Log that a destination went down, is still down, or answers again; `name` has no secrets in it."""
        state = health.state(now)
        left_out = self._lines.setdefault("breaker", LogBudget()).take(now)
        if left_out is None:
            return
        what = "answers again"
        if state is BreakerState.OPEN:
            what = f"is down; jobs for it wait, and the next probe is in {seconds(health.rests_until - now)} s"
        level = WARNING if state is BreakerState.OPEN else INFO
        rest = f" ({left_out} such lines left out)" if left_out else ""
        line = printable(f"{self._name}: destination {name} {what}{rest}", most=LONGEST)
        logger().log(level, "%s", line, extra={"decision": "breaker", "destination": name, "state": state.value})

    def _write(
        self,
        kind: str,
        level: int,
        work: ExecAssignment | WorkItem,
        sentence: str,
        fields: dict[str, Any],
        named: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        log = logger()
        if not log.isEnabledFor(level):
            return
        left_out = self._lines.setdefault(kind, LogBudget()).take(self._clock.now())
        if left_out is None:
            return
        rest = f" ({left_out} such lines left out)" if left_out else ""
        line = self._sentence(work, f"{sentence}{rest}", LONGEST)
        message, more = named or (line, {})
        about = _about(work) if kind in _OF_STEPS else {"decision": kind, **_about(work)}
        extra = {**about, **fields, **more} | ({"detail": line} if named else {})
        log.log(level, "%s", message, extra={name: self._clean(value) for name, value in extra.items()})

    def _sentence(self, work: ExecAssignment | WorkItem, text: str, most: int) -> str:
        about = _about(work)
        line = f"{about['job_type']} {about['work_id']}: {text}"
        return printable(self._redactor(f"{self._name}: {line}" if self._name else line), most=most)

    def _clean(self, value: Any) -> Any:
        return printable(self._redactor(value)) if isinstance(value, str) else value

    def _raised(self, work: ExecAssignment | WorkItem, traceback: str) -> None:
        """Log a traceback, indented, so that no line of it reads like one of the log's own."""
        if self._lines.setdefault("traceback", LogBudget()).take(self._clock.now()) is None:
            return
        head = self._sentence(work, "its step raised", 200)
        text = "\n    ".join([head, *map(printable, traceback.splitlines())])
        about = {name: self._clean(value) for name, value in _about(work).items()}
        logger().warning("%s", text, extra={**about, "is_traceback": True})


def _about(work: ExecAssignment | WorkItem) -> dict[str, str | None]:
    return {
        "work_id": work.assignment_id,
        "tenant_id": work.tenant_id,
        "job_type": work.kind if isinstance(work, WorkItem) else work.job.type,
        "trace_id": work.trace_id or current_trace_id(),
    }


def _provenance(policy: RetryPolicy, reason: Reason | None) -> dict[str, str | None]:
    """The target that the policy was resolved for, and the layer that decided."""
    if not isinstance(policy, ResolvedPolicy):
        return {"target": None, "layer": None}
    field = DECIDING_FIELD.get("again" if reason is None else reason, "")
    origin = policy.provenance.get(field)
    return {"target": policy.target, "layer": None if origin is None else origin.layer.value}
