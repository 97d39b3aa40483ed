"""
Values as people type them, in a flag, a URL or a form: checked, and refused with what is accepted instead.

A refusal names the parameter, never the flag: the command line puts its flag in that place, the HTTP API its field.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from reefknot.errors import ParameterError
from reefknot.runtime.log import printable

T = TypeVar("T")

MOST_LISTED = 10_000
"""The most entries of one page."""
_TIME = "a time such as 2026-01-25T21:15:00Z, or an age: 90s, 15m, 2h, 7d"
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class ParameterUseError(ParameterError):
    """A parameter is given where it is not accepted, or is missing where it is required."""

    def __init__(self, parameter: str, problem: str) -> None:
        Exception.__init__(self, f"{parameter}: {problem}")
        self.parameter = parameter
        self.accepted = problem


def one_of(parameter: str, given: str, accepted: dict[str, T]) -> T:
    """The value that a word stands for; an unknown word is refused with the accepted ones."""
    found = accepted.get(given.lower().replace("-", "_"))
    if found is None:
        raise ParameterUseError(parameter, unknown_word(given, accepted))
    return found


def unknown_word(given: str, accepted: Iterable[str], *, also: str = "", prefix: str = "") -> str:
    """The sentence about an unknown word, with a suggestion. A `prefix` that all accepted words share is no
    likeness."""
    from reefknot.core.checks import suggest

    words = list(accepted)
    shown = given if len(given) <= 60 else given[:59] + "…"
    hint = suggest(given.removeprefix(prefix), [word.removeprefix(prefix) for word in words])
    hint = hint.replace("did you mean '", f"did you mean '{prefix}", 1)
    listed = ", ".join(words) or "none is configured"
    return f"{printable(shown)!r} is unknown; accepted: {listed}{also}{hint}"


def check_texts(**given: str | None) -> None:
    """Refuse the text of a filter that is empty or blank: nothing has it, and every text contains it."""
    for name, text in given.items():
        if text is not None and not text.strip():
            raise ParameterError(name, text, "a text to select by; leave it out for all")


def check_limit(limit: int, most: int = MOST_LISTED) -> None:
    """Refuse a number of entries outside of 1 … `most`."""
    if not 1 <= limit <= most:
        raise ParameterError("limit", limit, f"a whole number from 1 to {most}")


def time_ms(parameter: str, text: str | None, *, now: datetime | None = None) -> int | None:
    """The time that a text names, absolute or as an age, in milliseconds UTC; None for none."""
    import re

    from reefknot.core.audit.analysis import epoch_seconds

    if text is None:
        return None
    ago = re.match(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z", text)
    if ago is not None:
        try:
            at = (now or datetime.now(UTC)) - timedelta(seconds=float(ago[1]) * _AGE_UNITS[ago[2]])
        except OverflowError:
            return 0
        return int(at.timestamp() * 1000)
    seconds = epoch_seconds(text)
    if seconds is None:
        raise ParameterError(parameter, text, _TIME)
    return int(seconds * 1000)


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as ISO 8601 in UTC, to the millisecond."""
    from reefknot.core.audit.event import timestamp

    return None if milliseconds is None else timestamp(milliseconds / 1000)
