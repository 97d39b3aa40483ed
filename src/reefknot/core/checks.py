"""
Numbers and texts that callers give, checked where they come in.

Each is refused by its name, with what is accepted, before anything is opened or begun. Nothing is converted.
"""

from math import inf

from reefknot.errors import ParameterError, ParameterTypeError

LONGEST_S = 100 * 365 * 86_400.0
"""A hundred years: what is longer does not fit where times are kept."""


def seconds(name: str, given: object, *, or_zero: bool = False, most: float = LONGEST_S) -> float:
    """A span of time; nothing at all only when that means something."""
    end = "" if most == inf else f" and at most {most:g}"
    accepted = f"a number of seconds, {'0 or more' if or_zero else 'above 0'}{end}"
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ParameterTypeError(name, given, accepted)
    if not 0 <= given <= most or (given == 0 and not or_zero):
        raise ParameterError(name, given, accepted)
    return float(given)


def whole(name: str, given: object, *, least: int = 1) -> int:
    """A whole number, `least` or more."""
    accepted = f"a whole number, {least} or more"
    if isinstance(given, bool) or not isinstance(given, int):
        raise ParameterTypeError(name, given, accepted)
    if given < least:
        raise ParameterError(name, given, accepted)
    return given


def text(name: str, given: object, accepted: str) -> str:
    if not isinstance(given, str):
        raise ParameterTypeError(name, given, accepted)
    return given
