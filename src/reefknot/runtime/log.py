"""
The `reefknot` logger: one budget of lines, and text that is safe to print.

A log line never carries control characters, and an outage does not flood the log: a `LogBudget` allows a burst of ten
lines, then one a second, and the next line says how many were left out; `RepeatedErrors` allows one line a minute for
each kind of error. `logging` is loaded with the first line.
"""

from __future__ import annotations

from math import inf

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from logging import Logger

BURST = 10.0
"""Lines that a full `LogBudget` allows at once; it refills by one a second."""
REPEATED_S = 60.0
"""Seconds in which an error of one kind has at most one line."""
MAX_ERROR_TEXT = 300

_logger: Logger | None = None


def logger() -> Logger:
    global _logger
    if _logger is None:
        from logging import getLogger

        _logger = getLogger("reefknot")
    return _logger


class LogBudget:
    """A token bucket of log lines."""

    __slots__ = ("_left", "_left_out", "_quiet_until", "_updated")

    def __init__(self) -> None:
        self._left = BURST
        self._left_out = 0
        self._quiet_until = 0.0
        self._updated = 0.0

    def take(self, now: float) -> int | None:
        """Take one line: returns how many were left out since the last one, or None when this one is left out too."""
        if now < self._quiet_until and now >= self._updated:
            self._left_out += 1
            return None
        if now < self._updated - BURST:  # another clock, such as a virtual one: the bucket is full again
            self._left, self._updated = BURST, now
        left = min(BURST, self._left + max(0.0, now - self._updated)) - 1.0
        self._updated, self._left = now, left
        if left < 1.0:
            self._quiet_until = now + 1.0 - left
        left_out, self._left_out = self._left_out, 0
        return left_out


class RepeatedErrors:
    """
    Log lines of errors that an outage repeats: each kind at once, then at most once a minute with a count.

    A kind is what failed and the class of the error. The kinds are those of the code, so they are few.
    """

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def log(self, what: str, error: BaseException, now: float) -> None:
        """Log `what` with the error, unless a line of this kind was logged within the last minute."""
        kind = what, type(error).__name__
        logged, left_out = self._kinds.get(kind, (-inf, 0))
        if logged <= now < logged + REPEATED_S:
            self._kinds[kind] = logged, left_out + 1
            return
        self._kinds[kind] = now, 0
        more = f"; {left_out} more since the last line" if left_out else ""
        logger().error("%s (%s)%s", what, error_text(error), more)


_budgets: dict[str, LogBudget] = {}
_MAX_BUDGETS = 1000
_rest = LogBudget()


class _NoLines(LogBudget):
    """A budget without a line."""

    __slots__ = ()

    def take(self, now: float) -> None:
        return None


NO_LINES = _NoLines()


def budget_of(name: str) -> LogBudget:
    """
    Budget of all lines under one name, whichever part writes them. Names beyond the first thousand share one budget.
    """
    budget = _budgets.get(name)
    if budget is None:
        if len(_budgets) >= _MAX_BUDGETS:
            return _rest
        budget = _budgets.setdefault(name, LogBudget())
    return budget


def seconds(value: float) -> str:
    """Seconds as text, to the millisecond, without trailing zeros and exponents."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def printable(text: str, *, most: int | None = None, keep: str = "") -> str:
    """`text`, cut to `most` characters, then control characters escaped, except those in `keep`."""
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def error_text(error: BaseException) -> str:
    """`Class: message` of an exception without secrets, for a log line."""
    from reefknot.runtime.redactor import redact

    message = str(error) or ("it took too long" if isinstance(error, TimeoutError) else "")
    return printable(redact(f"{type(error).__name__}{message and ': '}{message}"), most=MAX_ERROR_TEXT)


def log_callback_failure(option: str, error: Exception) -> None:
    """Log that a hook or predicate of the caller raised: it changes nothing, but must not pass unseen."""
    from reefknot.runtime.redactor import redact

    try:
        message = printable(redact(str(error)), most=MAX_ERROR_TEXT)
    except Exception:
        message = "which cannot be shown"
    logger().error("%s= raised %s: %s; the outcome is unchanged", option, type(error).__name__, message)
