"""
What a word without quotes means.

The rules are YAML's, with the surprises taken out: `1e3` is a number, `12:30` and `2026-01-01` stay text, and `0123`,
which is eighty-three to one reader and a hundred and twenty-three to another, is refused.
"""

import re
from collections.abc import Callable

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
BOOLEANS = {
    form: meaning
    for words, meaning in ((_TRUE, True), (_FALSE, False))
    for word in words
    for form in (word, word.capitalize(), word.upper())
}

LONGEST_NUMBER = 100

_MAYBE_NUMBER = re.compile(r"[-+.0-9]")
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_OTHER_RADIX = re.compile(r"([-+]?)0([box])([0-9a-fA-F_]+)\Z")
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+\Z")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")
_RADIXES = {"b": 2, "o": 8, "x": 16}


class WordError(Exception):
    """A word that has no one meaning. Its text is the message for people."""


def _number(text: str) -> int | float | None:
    """The number a word stands for, None when it is a word."""
    if len(text) > LONGEST_NUMBER:
        if _DECIMAL.match(text) or _FLOAT.match(text):
            raise WordError(f"a number has at most {LONGEST_NUMBER} digits; put text in quotes")
        return None
    if _DECIMAL.match(text):
        return int(text.replace("_", ""))
    if _AMBIGUOUS.match(text):
        raise WordError("a leading zero has two readings, octal and decimal; leave it out, or put text in quotes")
    if found := _OTHER_RADIX.match(text):
        sign, radix, digits = found.groups()
        try:
            return int(sign + digits.replace("_", ""), _RADIXES[radix])
        except ValueError:
            return None
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.match(text):
        return float(text.replace(".", ""))
    return None


def plain_word(text: str) -> str | int | float | bool | None:
    """The value of a word without quotes."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    number = _number(text) if _MAYBE_NUMBER.match(text) else None
    return text if number is None else number


def _as_null(text: str) -> None:
    if text not in NULLS:
        raise WordError("is not null")


def _as_boolean(text: str) -> bool:
    if text not in BOOLEANS:
        raise WordError("is neither true nor false")
    return BOOLEANS[text]


def _as_integer(text: str) -> int:
    number = _number(text)
    if not isinstance(number, int):
        raise WordError("is not a whole number")
    return number


def _as_float(text: str) -> float:
    number = _number(text)
    if number is None:
        raise WordError("is not a number")
    return float(number)


TAGGED: dict[str, Callable[[str], str | int | float | bool | None]] = {
    "tag:yaml.org,2002:null": _as_null,
    "tag:yaml.org,2002:bool": _as_boolean,
    "tag:yaml.org,2002:int": _as_integer,
    "tag:yaml.org,2002:float": _as_float,
    "tag:yaml.org,2002:str": str,
    "!": str,
}
"""What an explicit tag makes of a scalar's text."""
