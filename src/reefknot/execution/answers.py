"""
A result, as it is recorded and as it is given back.

Every caller of a key gets what the record gives back, the first one too: as JSON has it, or as the type that was asked
for. What JSON cannot say is refused, never turned into its `repr`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from reefknot.core.canonical import canonical
from reefknot.errors import NotJsonError, ParameterTypeError

_FITTING = "Any, or a type that JSON can be read as: a record, a dataclass, a collection, a number, a date …"


def text_of(value: Any) -> str:
    """The value as canonical JSON; records, dates and the like as msgspec writes them."""
    return canonical(plain(value, "the result")).decode()


def plain(value: Any, name: str = "") -> Any:
    """The value in terms of JSON; `NotJsonError`, with the name of what it is, where there is no such thing."""
    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic")
    except Exception as error:  # TypeError mostly; a circular or very deep value is a RecursionError
        raise NotJsonError(name, str(error) or type(error).__name__) from error


def checked_type(result_type: Any) -> Any:
    """The type, if answers can be read as it."""
    try:
        info = msgspec.inspect.type_info(result_type)
    except Exception as error:
        raise ParameterTypeError("result_type", result_type, f"{_FITTING} ({error})") from error
    if isinstance(info, msgspec.inspect.CustomType):
        raise ParameterTypeError("result_type", result_type, _FITTING)
    return result_type


def read_as(text: str, result_type: Any) -> Any:
    """What was recorded, as the type that was asked for."""
    try:
        return msgspec.json.decode(text, type=result_type)
    except (msgspec.ValidationError, TypeError) as error:
        raise ParameterTypeError(
            "result_type", result_type, f"a type that the recorded result fits: {error}"
        ) from error
