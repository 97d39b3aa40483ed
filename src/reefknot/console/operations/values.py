"""
Values as people type them, in a flag, a URL or a form: checked, and refused with what is accepted instead. And values
as people read them: times, durations and counts in words.

A refusal names the parameter, never the flag: the command line puts its flag in that place, the HTTP API its field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import pairwise
from math import isfinite
from typing import Any, TypeVar

import msgspec

from reefknot.core.policy import LONGEST_WAIT
from reefknot.errors import ParameterError
from reefknot.runtime.log import printable
from reefknot.runtime.log import seconds as log_seconds

T = TypeVar("T")

MOST_LISTED = 10_000
"""The most entries of one page."""
_TIME = "a time such as 2026-01-25T21:15:00Z, or an age: 90s, 15m, 2h, 7d"
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SECONDS_IN = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class ParameterUseError(ParameterError):
    """A parameter is given where it is not accepted, or is missing where it is required."""

    def __init__(self, parameter: str, problem: str) -> None:
        Exception.__init__(self, f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem
        named = re.search(r"accepted(?: here)?: (.*?)(?:; did you mean .*)?$", problem)
        self.accepted = named[1] if named else problem


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


_ACCEPTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def typed(name: str, text: str | list[str], kind: Any) -> Any:
    """A parameter of its type. A text stays what it is: `null` and `1` are names like others."""
    members = getattr(kind, "__args__", (kind,))
    if str in members:  # a text, a text or nothing, or texts
        return text
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        plain = next(one for one in _ACCEPTED if one in members)
        raise ParameterError(name, text, _ACCEPTED[plain]) from None


def duration_s(text: str) -> float | None:
    """The seconds of a duration such as 90s, 15m, 2h, 7d; None for another text."""
    found = re.match(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z", text)
    return None if found is None else float(found[1]) * _SECONDS_IN[found[2]]


def time_ms(parameter: str, text: str | None, *, now: datetime | None = None) -> int | None:
    """The time that a text names, absolute or as an age, in milliseconds UTC; None for none."""
    from reefknot.audit.model.analysis import epoch_seconds

    if text is None:
        return None
    ago = duration_s(text)
    if ago is not None:
        try:
            at = (now or datetime.now(UTC)) - timedelta(seconds=ago)
        except OverflowError:
            return 0
        return int(at.timestamp() * 1000)
    seconds = epoch_seconds(text)
    if seconds is None:
        raise ParameterError(parameter, text, _TIME)
    return int(seconds * 1000)


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as ISO 8601 in UTC, to the millisecond."""
    from reefknot.audit.model.event import timestamp

    return None if milliseconds is None else timestamp(milliseconds / 1000)


# ---- durations and counts in words -----------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """A configured duration, as exact as it was written: `100 ms`, `1.5 s`, `1800 s`; `no limit` for none."""
    if value is None or value >= LONGEST_WAIT:
        return "no limit"
    if 0 < value < 1:
        return f"{value * 1000:.4g} ms"
    return f"{log_seconds(value)} s"


def long_seconds(value: float) -> str:
    """A computed duration for a column, in the largest fitting unit: `30 min` for 1800 s, `3.33 min` for 200 s."""
    for size, unit in _UNITS[:-1]:
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return seconds(float(f"{value:.4g}"))


def age(value: float) -> str:
    """`3.2 s`, `4 min`: time since, or time left."""
    return long_seconds(max(0.0, round(value, 1)))


def duration(value: float | None) -> str:
    """A measured duration for a page, in its two largest units: `250 ms`, `4.2 s`, `3 min 20 s`, `3 d 4 h`; nothing for
    none."""
    if value is None:
        return ""
    if not isfinite(value):
        return "without end"
    if value >= 59.95:
        whole = round(value)
        (size, unit), (part, smaller) = next(pair for pair in pairwise(_UNITS) if whole >= pair[0][0])
        rest = whole % size // part
        return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    if value <= 0 or value >= 0.9995:
        return f"{max(0.0, value):.1f}".removesuffix(".0") + " s"
    return f"{value * 1000:.3g} ms"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 retry`, `3 retries`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def queue_depth(depth: int, size: int | None) -> str:
    """
    `3 of 10`: the taken places of a queue.

    A step that is to be retried returns to the queue whether there is room or not: a queue may hold as many more as its
    class has slots, and those are counted apart.
    """
    if size is None:
        return f"{depth}, unbounded"
    return f"{depth} of {size}" if depth <= size else f"{size} of {size} and {depth - size} back for a retry"


def jsonable(value: object) -> Any:
    """The value in JSON's types: enums as text, infinity as null."""
    match value:
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case dict():
            return {str(key): jsonable(one) for key, one in value.items()}
        case list() | tuple():
            return [jsonable(one) for one in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def shown_value(path: tuple[str | int, ...], value: Any) -> Any:
    """The value with secrets hidden; a reference to a secret is shown."""
    from reefknot.core.redaction import HIDDEN, redact
    from reefknot.policy.secrets import is_reference

    if isinstance(value, list):
        return [shown_value(path, item) for item in value]
    if is_reference(value) or value is None or isinstance(value, bool):
        return jsonable(value)
    if path[0] == "secrets":
        return HIDDEN
    named = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    if redact(f"{named}: {value}").endswith(HIDDEN) and not redact(str(value)).endswith(HIDDEN):
        return HIDDEN
    return redact(value) if isinstance(value, str) else jsonable(value)
