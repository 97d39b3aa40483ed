"""The `reefknot` logger, bounded log lines, and text that is safe to print."""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from logging import Logger

LINES_AT_ONCE = 10.0
"""Log lines a retrier may write in one go; after that, one a second."""


class LogBudget:
    """The log lines a retrier may still write. A plan made from another one shares it, or it would bound nothing."""

    __slots__ = ("at", "left", "left_out", "quiet_until")

    def __init__(self) -> None:
        self.at = 0.0
        self.left = LINES_AT_ONCE
        self.left_out = 0
        self.quiet_until = 0.0


_logger: Logger | None = None


def logger() -> Logger:
    global _logger
    if _logger is None:
        from logging import getLogger

        _logger = getLogger("reefknot")
    return _logger


def seconds(value: float) -> str:
    """To the millisecond, without zeros that say nothing and without exponents."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def printable(text: str, *, most: int) -> str:
    """One line, no control characters, not too long."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
