"""
Argument checks: each returns the value, or raises `ParameterError` with the parameter's name and what is accepted.

A value of the wrong type is a `ParameterTypeError`. Arguments are checked where they come in, before anything is opened
or started. Nothing is converted, except that an integer becomes a float where a float is meant, and a `timedelta`
becomes seconds. `RetryPolicy` uses this module, so it imports only the errors.
"""

from __future__ import annotations

from math import inf
from sys import modules

from reefknot.errors import ParameterError, ParameterTypeError

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta
    from enum import StrEnum
    from typing import Any, TypeAlias, TypeGuard, TypeVar

    Seconds: TypeAlias = float | timedelta
    """A duration as callers may give it. Internally, durations are floats."""
    Choice = TypeVar("Choice", bound=StrEnum)

LARGEST_FLOAT = 1.7976931348623157e308
"""The largest number: a larger `int` has no float."""
LONGEST_S = 100 * 365 * 86_400.0
"""A hundred years in seconds: a longer time does not fit into a stored timestamp."""

LONGEST_SUGGESTED = 64

_NUMBER = (int, float)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is an `int` or a `float`. A `bool` does not count, although Python makes it an `int`."""
    return isinstance(value, _NUMBER) and not isinstance(value, bool)


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether the value is an `int` and not a `bool`."""
    return isinstance(value, int) and not isinstance(value, bool)


def in_seconds(given: object) -> object:
    """
    A `timedelta` as seconds; anything else as it is. A caller who has a `timedelta` has imported `datetime` already.
    """
    datetime = modules.get("datetime")
    if datetime is not None and isinstance(given, datetime.timedelta):
        return float(given.total_seconds())
    return given


def number(
    name: str, given: object, *, least: float = 0.0, most: float = LARGEST_FLOAT, above: bool = False, unit: str = ""
) -> float:
    """A number from `least` to `most` as a float; `above` excludes `least`. Infinity only if `most` is infinite."""
    if not is_number(given):
        raise ParameterTypeError(name, given, _accepted(least, most, above, unit))
    if not least <= given <= most or (above and given == least) or LARGEST_FLOAT < given < inf:
        raise ParameterError(name, given, _accepted(least, most, above, unit))
    return float(given)


def seconds(name: str, given: object, *, or_zero: bool = False, most: float = LONGEST_S) -> float:
    """A duration in seconds above 0, or from 0 on with `or_zero`: a number or a `timedelta`."""
    return number(name, in_seconds(given), most=most, above=not or_zero, unit=" of seconds")


def seconds_or_none(name: str, given: object, *, meaning: str) -> float | None:
    """A duration in seconds above 0, or None, whose `meaning` the error explains: "for no limit"."""
    accepted = f"a number of seconds above 0, or None {meaning}"
    given = in_seconds(given)
    if given is None:
        return None
    if not is_number(given):
        raise ParameterTypeError(name, given, accepted)
    if not 0 < given <= LARGEST_FLOAT:
        raise ParameterError(name, given, accepted)
    return float(given)


def whole_number(name: str, given: object, *, least: int = 1, most: int | None = None, note: str = "") -> int:
    """A whole number, at least `least` and at most `most`. The error ends with `note`."""
    accepted = f"a whole number{f', {least} or more' if most is None else f' from {least} to {most}'}{note}"
    if not is_whole_number(given):
        raise ParameterTypeError(name, given, accepted)
    if given < least or (most is not None and given > most):
        raise ParameterError(name, given, accepted)
    return given


def text(name: str, given: object, accepted: str = "text") -> str:
    """A `str`, also an empty one."""
    if not isinstance(given, str):
        raise ParameterTypeError(name, given, accepted)
    return given


def flag(name: str, given: object) -> bool:
    """A `bool`; 0, 1 and words are refused."""
    if not isinstance(given, bool):
        raise ParameterTypeError(name, given, "True or False")
    return given


def choice(name: str, given: Any, choices: type[Choice]) -> Choice:
    """A member of the enumeration, given as such or by its value."""
    try:
        return choices(given)
    except ValueError:
        raise ParameterError(name, given, f"one of {', '.join(choices)}") from None


def suggest(name: str, accepted: Iterable[str]) -> str:
    """`; did you mean 'x'?` when one of the accepted names looks like it, else nothing."""
    from difflib import get_close_matches

    if not 0 < len(name) <= LONGEST_SUGGESTED:
        return ""
    known = {word.lower().replace("-", "_"): str(word) for word in accepted}
    found = get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {known[found[0]]!r}?" if found else ""


def _accepted(least: float, most: float, above: bool, unit: str) -> str:
    if most < LARGEST_FLOAT:
        bounds = f" above {least:g}, at most {most:.0f}" if above else f" from {least:g} to {most:.0f}"
        return f"a number{unit}{bounds}"
    finite = "finite " if most == LARGEST_FLOAT else ""
    return f"a {finite}number{unit}{f' above {least:g}' if above else f', {least:g} or more'}"


HEADER_VALUES = 'ASCII text, or a parameter such as filename="…", which is encoded (RFC 8187)'
_PARAMETER = r"""(;[ \t]*[A-Za-z0-9!#$&+.^_`|~-]+)=("(?:[^"\\]|\\.)*"|[^\s;,"]+)"""
_ATTR_CHARS = "!#$&+-.^_`|~"
"""The signs that RFC 8187 leaves as they are in an encoded value."""


def ascii_header(value: str) -> str | None:
    """The value of an HTTP header as ASCII, parameters encoded (RFC 8187); None when something else is not ASCII."""
    if value.isascii():
        return value
    import re
    from urllib.parse import quote

    def encoded(match: re.Match[str]) -> str:
        name, given = match[1], match[2]
        if given.isascii():
            return match[0]
        if given.startswith('"'):
            given = re.sub(r"\\(.)", r"\1", given[1:-1])
        return f"{name}*=UTF-8''{quote(given, safe=_ATTR_CHARS)}"

    sent = re.sub(_PARAMETER, encoded, value)
    return sent if sent.isascii() else None
