"""
Canonical JSON: one text for one value, for fingerprints, hashes and recorded results.

Keys are sorted at every depth, without spaces, in UTF-8, without NaN and infinity. Keys are text only, because `{1: …}`
and `{"1": …}` would otherwise be written alike. A value without a JSON form is refused with its path, never written as
its `repr`.

Every caller of an idempotency key gets what the record gives back, the first one too: as plain JSON, or as the type
that was asked for.
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
    """The canonical JSON of a value of JSON's types, tuples included. `name` stands for the value in the error."""
    _check(value, name, DEEPEST)
    try:
        return _encode(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotJsonError(name, "half a surrogate pair is not text") from error


def canonical_record(record: msgspec.Struct) -> bytes:
    """The canonical JSON of a record. An infinite number is `null`, which stands for "none" in records."""
    return _records.encode(record)


def record_fingerprint(record: msgspec.Struct) -> str:
    """SHA-256 of a record's canonical form, in hexadecimal."""
    return sha256(canonical_record(record)).hexdigest()


def fingerprint(value: object) -> str:
    """SHA-256 of a value's canonical form, in hexadecimal."""
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


_ACCEPTED = "Any, or a type that JSON can be read as: a record, a dataclass, a collection, a number, a date …"


def result_to_json(value: Any) -> str:
    """The canonical JSON of a result; records, dates and the like as msgspec writes them."""
    return canonical(json_value(value, "the result")).decode()


def json_value(value: Any, name: str = "") -> Any:
    """The value converted to JSON types; `NotJsonError` with `name` where that is not possible."""
    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic")
    except Exception as error:  # mostly TypeError; a circular or very deep value is a RecursionError
        raise NotJsonError(name, str(error) or type(error).__name__) from error


def checked_result_type(result_type: Any) -> Any:
    """The type, if results can be decoded as it; `ParameterTypeError` otherwise."""
    try:
        info = msgspec.inspect.type_info(result_type)
    except Exception as error:
        raise ParameterTypeError("result_type", result_type, f"{_ACCEPTED} ({error})") from error
    if isinstance(info, msgspec.inspect.CustomType):
        raise ParameterTypeError("result_type", result_type, _ACCEPTED)
    return result_type


def result_from_json(text: str, result_type: Any) -> Any:
    """The recorded result, decoded as the type."""
    try:
        return msgspec.json.decode(text, type=result_type)
    except (msgspec.ValidationError, TypeError) as error:
        raise ParameterTypeError(
            "result_type", result_type, f"a type that the recorded result fits: {error}"
        ) from error
