"""
Ids that sort by the time they were made.

48 bits of milliseconds, then 80 bits of chance, as 26 letters of Crockford's alphabet (the form known as ULID). Time
and chance are arguments. Ids of one maker go on rising when its clock stands still or goes back.
"""

from reefknot.errors import ParameterError

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: number for number, letter in enumerate(_ALPHABET)}
LENGTH = 26
CHANCE_BITS = 80
_LARGEST = (1 << 128) - 1


def sortable_id(at_ms: int, chance: int) -> str:
    """The id of this moment. `chance` is taken modulo 2^80."""
    if not 0 <= at_ms < 1 << 48:
        raise ParameterError("at_ms", at_ms, "milliseconds since 1970, below 2^48")
    return _written((at_ms << CHANCE_BITS) | (chance & ((1 << CHANCE_BITS) - 1)))


def next_id(previous: str | None, *, at_ms: int, chance: int) -> str:
    """The id of this moment, or the one right after `previous` when that would not be larger."""
    fresh = sortable_id(at_ms, chance)
    if previous is None or fresh > previous:
        return fresh
    following = _read(previous) + 1
    if following > _LARGEST:
        raise ParameterError("previous", previous, "an id that is not the last of all")
    return _written(following)


def time_of(text: str) -> int:
    """The milliseconds an id was made at."""
    return _read(text) >> CHANCE_BITS


def _written(number: int) -> str:
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def _read(text: str) -> int:
    if len(text) != LENGTH or any(letter not in _VALUES for letter in text) or _VALUES[text[0]] > 7:
        raise ParameterError("id", text, f"{LENGTH} letters of {_ALPHABET}, as sortable_id makes them")
    number = 0
    for letter in text:
        number = number << 5 | _VALUES[letter]
    return number
