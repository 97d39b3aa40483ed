"""
One text for one value.

Canonical JSON: keys sorted at every depth, no spaces, UTF-8, no NaN and no infinity. Keys are text only, because
`{1: …}` and `{"1": …}` would otherwise read alike. What is not JSON is refused with its place, never turned into its
`repr`.
"""

from hashlib import sha256
from json import JSONEncoder
from math import isfinite

import msgspec

from reefknot.errors import NotJsonError

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
