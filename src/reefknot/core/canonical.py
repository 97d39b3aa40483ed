"""
One text for one value.

Canonical JSON: keys sorted at every depth, no spaces, UTF-8, no NaN and no infinity. Keys are text only, because
`{1: …}` and `{"1": …}` would otherwise read alike. What is not JSON is refused with its place, never turned into its
`repr`.

A result, as it is recorded and as it is given back.

Every caller of a key gets what the record gives back, the first one too: as JSON has it, or as the type that was asked
for. What JSON cannot say is refused, never turned into its `repr`.
"""

from __future__ import annotations

from hashlib import sha256
from json import JSONEncoder
from math import isfinite
from typing import Any

import msgspec

from reefknot.errors import NotJsonError, ParameterTypeError

DEEPEST = 64

_encode = JSONEncoder(
    sort_keys=True, allow_nan=False, ensure_ascii=False, check_circular=False, separators=(",", ":")
).encode
_records = msgspec.json.Encoder(order="sorted")


def canonical(value: object, name: str = "") -> bytes:
    """
    The canonical JSON of a value made of None, booleans, numbers, text, lists, tuples and dictionaries.

    `name` is what the value is called when it is refused.
    """
    _check(value, name, DEEPEST)
    try:
        return _encode(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotJsonError(name, "half a surrogate pair is not text") from error


def canonical_record(record: msgspec.Struct) -> bytes:
    """The canonical JSON of one of our own records. An infinite number is `null`, which is how records say "none"."""
    return _records.encode(record)


def record_fingerprint(record: msgspec.Struct) -> str:
    """SHA-256 of a record's canonical form, in hexadecimal."""
    return sha256(canonical_record(record)).hexdigest()


def fingerprint(value: object) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return sha256(canonical(value)).hexdigest()


def _check(value: object, path: str, depth: int) -> None:
    if isinstance(value, str) or value is None or isinstance(value, int):
        return
    if isinstance(value, float):
        if not isfinite(value):
            raise NotJsonError(path, f"{value!r} has no JSON form")
        return
    if depth == 0:
        raise NotJsonError(path, f"nested deeper than {DEEPEST}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise NotJsonError(path, f"a key is text, not {type(key).__name__}")
            _check(inner, f"{path}.{key}" if path else key, depth - 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]", depth - 1)
    else:
        raise NotJsonError(path, f"{type(value).__name__} has no JSON form")


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
