"""
What a block is told about its key, and what it says in the end.

A result is JSON. It is written down the moment it is set, so that the first caller reads what every later one will:
a tuple comes back as a list, a record as a dictionary, or as the type that `result_as` is asked for.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from reefknot.core.canonical import canonical
from reefknot.errors import IdempotencyError, NotJsonError, ResultTooLargeError, shown

LARGEST_RESULT = 256 * 1024

T = TypeVar("T")


class LedgerClaim:
    """One key, inside its block. `done`: the effect has happened, `result` is what came of it."""

    __slots__ = ("_done", "_key", "_text")

    def __init__(self, key: str, *, recorded: str | None) -> None:
        self._key = key
        self._done = recorded is not None
        self._text = "null" if recorded is None else recorded

    @property
    def key(self) -> str:
        return self._key

    @property
    def done(self) -> bool:
        """Is it on record already? Then the block has nothing to do, and nothing that it writes is kept."""
        return self._done

    @property
    def result(self) -> Any:
        """The recorded result, or the one that was set. None until then."""
        return msgspec.json.decode(self._text)

    @result.setter
    def result(self, value: Any) -> None:
        if self._done:
            raise IdempotencyError(
                f"key {shown(self._key)} has its result already, and nothing of this block is kept; "
                "ask `if claim.done:` before the effect"
            )
        self._text = _text(value)

    def result_as(self, kind: type[T]) -> T:
        """The result as this type; a result that does not fit it is an error of msgspec's."""
        return msgspec.json.decode(self._text, type=kind)

    @property
    def text(self) -> str:
        """The result as it is recorded."""
        return self._text

    def __repr__(self) -> str:
        return f"<LedgerClaim {shown(self._key)} {'done' if self._done else 'to do'}>"


def _text(value: object) -> str:
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except TypeError as error:
        raise NotJsonError("", str(error)) from error
    text = canonical(plain)
    if len(text) > LARGEST_RESULT:
        raise ResultTooLargeError(size=len(text), limit=LARGEST_RESULT)
    return text.decode()
