"""
What happened, told: one log line a retry, the note on the final exception, and hooks.

Log lines are bounded per retrier: a burst of ten, then one a second; the next line says how many were left out. Call
arguments never appear. A hook that raises is reported and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from reefknot.core.failure import Failure
from reefknot.core.redaction import redact
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.policy import RetryPolicy
from reefknot.execution.plan import LINES_AT_ONCE, LogBudget

if TYPE_CHECKING:
    from logging import Logger

_logger: Logger | None = None


class RetryEvent(Struct, frozen=True):
    """What a hook is given. `delay` is the wait that follows, None at the end; `reason` is why it ended, if it did."""

    name: str
    attempt: int
    max_attempts: int
    failure: Failure | None
    error: Exception | None
    delay: float | None
    elapsed: float
    reason: Reason | None


Hook = Callable[[RetryEvent], object]


def logger() -> Logger:
    global _logger
    if _logger is None:
        from logging import getLogger

        _logger = getLogger("reefknot")
    return _logger


def retrying(event: RetryEvent, lines: LogBudget, now: float) -> None:
    """The one line a retry logs. It takes from the retrier's budget, and sets the time before which it stays quiet."""
    left = min(LINES_AT_ONCE, lines.left + max(0.0, now - lines.at)) - 1.0
    lines.at, lines.left = now, left
    if left < 1.0:
        lines.quiet_until = now + 1.0 - left
    left_out, lines.left_out = lines.left_out, 0
    logger().warning(
        "%s: attempt %d of %d failed with %s; trying again in %s s%s",
        printable(event.name, most=100),
        event.attempt,
        event.max_attempts,
        printable(str(event.failure), most=300),
        seconds(event.delay or 0.0),
        f" ({left_out} such lines left out)" if left_out else "",
        extra={"retry_attempt": event.attempt, "retry_delay": event.delay},
    )


def call_hook(hook: Hook | None, which: str, event: RetryEvent) -> None:
    if hook is None:
        return
    try:
        hook(event)
    except Exception as broken:
        broken_callback(which, broken)


def broken_callback(which: str, broken: Exception) -> None:
    """A hook or predicate of the caller's failed; the work goes on as if it had not been there."""
    try:
        said = printable(redact(str(broken)), most=300)
    except Exception:
        said = "which cannot be shown"
    logger().error("%s= raised %s: %s; the outcome is unchanged", which, type(broken).__name__, said)


WHY = {
    Reason.NOT_RETRYABLE: "not retried: this failure is not one to retry",
    Reason.INNER_EXHAUSTED: "not retried: an inner retry already gave up on it",
    Reason.ATTEMPTS_SPENT: "gave up: all attempts are spent",
    Reason.BREAKER_OPEN: "gave up: the circuit breaker is open",
    Reason.HINT_TOO_LONG: "gave up: the server asked for a longer wait than max_retry_after",
    Reason.BUDGET_SPENT: "gave up: another attempt would not fit into the deadline",
    Reason.THROTTLED: "gave up: the retry throttle is empty",
}


def annotate(error: Exception, event: RetryEvent, policy: RetryPolicy) -> None:
    """The note on the exception that goes to the caller. A note of the same retrier is replaced, not piled up."""
    assert event.reason is not None
    head = f"reefknot[{event.name}]"
    hint = event.failure.retry_after if event.failure is not None else None
    asked = f"; the server asked for {hint:g} s" if hint is not None and event.reason is not Reason.BREAKER_OPEN else ""
    count = "1 attempt" if event.attempt == 1 else f"{event.attempt} attempts"
    note = f"{head}: {WHY[event.reason]}{asked} ({count}, {seconds(event.elapsed)} s; policy: {policy.describe()})"
    try:
        notes = getattr(error, "__notes__", None)
        if notes:
            notes[:] = [line for line in notes if not line.startswith(head + ":")]
        error.add_note(note)
    except Exception:  # an exception that refuses notes still goes to the caller unharmed
        return


def seconds(value: float) -> str:
    """To the millisecond, without zeros that say nothing and without exponents."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def printable(text: str, *, most: int) -> str:
    """One line, no control characters, not too long."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
