"""
What a worker's log says about its retries: one line for each decision after a failure.

Retried, not one to retry, or given up, with the wait or the reason; warnings, except that a failure which is not one to
retry is information. Bounded: ten lines at once, then one a second, and the next line says how many were left out.
Secrets are taken out of the whole line. Events are the record; this is for whoever watches.
"""

from reefknot.core.failure import Failure
from reefknot.core.messages import ExecAssignment
from reefknot.core.redaction import Redactor
from reefknot.core.retry.decide import Again, Decision, Reason
from reefknot.core.retry.policy import RetryPolicy
from reefknot.execution import report
from reefknot.execution.plan import LINES_AT_ONCE, LogBudget

INFO, WARNING = 20, 30
LONGEST = 600


class StepLog:
    """The lines of one worker."""

    def __init__(self, worker_id: str, redactor: Redactor) -> None:
        self._worker_id = worker_id
        self._redactor = redactor
        self._lines = LogBudget()

    def decided(
        self,
        assignment: ExecAssignment,
        decision: Decision,
        policy: RetryPolicy,
        failure: Failure,
        *,
        attempts: int,
        now: float,
    ) -> None:
        """One decision. `attempts` is how many there were."""
        delay, reason = (decision.delay, None) if isinstance(decision, Again) else (None, decision.reason)
        level = INFO if reason is Reason.NOT_RETRYABLE else WARNING
        logger = report.logger()
        if not logger.isEnabledFor(level):
            return
        left_out = self._taken(now)
        if left_out is None:
            return
        what = f"trying again in {report.seconds(delay or 0.0)} s" if reason is None else report.WHY[reason]
        rest = f" ({left_out} such lines left out)" if left_out else ""
        line = (
            f"{self._worker_id}: {assignment.job.type} {assignment.assignment_id}: "
            f"attempt {attempts} of {policy.max_attempts} failed with {failure}; {what}{rest}"
        )
        logger.log(
            level,
            "%s",
            report.printable(self._redactor(line), most=LONGEST),
            extra={
                "assignment_id": self._redactor(assignment.assignment_id),
                "job_type": self._redactor(assignment.job.type),
                "error_code": failure.code.wire,
                "retryable": policy.retryable,
                "retry_attempt": attempts,
                "retry_delay": delay,
                "reason": None if reason is None else reason.value,
            },
        )

    def _taken(self, now: float) -> int | None:
        """How many lines were left out before this one; None when this one is left out, too."""
        lines = self._lines
        if lines.at <= now < lines.quiet_until:
            lines.left_out += 1
            return None
        left = min(LINES_AT_ONCE, lines.left + max(0.0, now - lines.at)) - 1.0
        lines.at, lines.left = now, left
        if left < 1.0:
            lines.quiet_until = now + 1.0 - left
        left_out, lines.left_out = lines.left_out, 0
        return left_out
