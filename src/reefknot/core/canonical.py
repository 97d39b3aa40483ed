"""
Canonical JSON: one text for one value, for fingerprints, hashes and recorded results.

Keys are sorted at every depth, without spaces, in UTF-8, without NaN and infinity. Keys are text only, because `{1: …}`
and `{"1": …}` would otherwise be written alike. A value without a JSON form is refused with its path, never written as
its `repr`.

Every caller of an idempotency key, including the first, gets the value as it is read back from the record: as plain
JSON, or as the requested type.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from inspect import isabstract
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


MODELS = "a dataclass, a pydantic model, a msgspec.Struct or an attrs class"
_ACCEPTED = f"Any, or a type that JSON can be read as: {MODELS}, a collection, a number, a date …"
_HOW_TO_KEEP = f"return values of JSON, or {MODELS}, which result_type= gives back as it was"


def result_to_json(value: Any) -> str:
    """The canonical JSON of a result: records, dates and the like as msgspec writes them, pydantic models as theirs."""
    try:
        plain = json_value(value, "the result", round_trip=True)
    except NotJsonError as error:
        raise NotJsonError(error.path, f"{error.problem}; {_HOW_TO_KEEP}") from error
    return canonical(plain).decode()


def json_value(value: Any, name: str = "", *, round_trip: bool = False) -> Any:
    """
    The value converted to JSON types; `NotJsonError` with `name` where that is not possible.

    With `round_trip`, a pydantic model is what it can be read from again: its fields, without the computed ones.
    """

    def encode(one: object) -> object:
        if not is_pydantic(type(one)):
            raise TypeError(f"Encoding objects of type {type(one).__qualname__} is unsupported")
        return pydantic_to_json(one, round_trip=round_trip)

    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=encode)
    except Exception as error:  # mostly TypeError; a circular or very deep value is a RecursionError
        raise NotJsonError(name, str(error) or type(error).__name__) from error


def checked_result_type(result_type: Any) -> Any:
    """The type, if results can be decoded as it; `ParameterTypeError` otherwise."""
    try:
        info = msgspec.inspect.type_info(result_type)
    except Exception as error:
        raise ParameterTypeError("result_type", result_type, f"{_ACCEPTED} ({error})") from error
    if isinstance(info, msgspec.inspect.CustomType) and not is_pydantic(info.cls):
        raise ParameterTypeError("result_type", result_type, _ACCEPTED)
    return result_type


def check_returned(function: str, annotation: Any) -> None:
    """Refuse a function by the annotated class of its result, if JSON can hold no instance of that class."""
    if isinstance(annotation, type) and not _may_be_kept(annotation):
        accepted = f"a function whose result JSON can hold: {_HOW_TO_KEEP}"
        raise ParameterTypeError("fn", f"{function}() -> {annotation.__name__}", accepted)


def _may_be_kept(kind: type) -> bool:
    """Whether JSON can hold an instance of the class, or of a class below it."""
    if is_pydantic(kind) or issubclass(kind, dict | list | tuple | set | frozenset):
        return True
    if isabstract(kind) or getattr(kind, "_is_protocol", False):
        return True
    try:
        info = msgspec.inspect.type_info(kind)
    except Exception:  # annotations that cannot be evaluated now
        return True
    return not isinstance(info, msgspec.inspect.CustomType) or any(map(_may_be_kept, type.__subclasses__(kind)))


def result_from_json(text: str, result_type: Any) -> Any:
    """The recorded result, decoded as the type."""
    try:
        return typed_from_json(text, result_type)
    except (msgspec.ValidationError, TypeError) as error:
        raise ParameterTypeError(
            "result_type", result_type, f"a type that the recorded result fits: {error}"
        ) from error


def typed_from_json(text: str, kind: Any) -> Any:
    """The JSON decoded as the type, pydantic models inside of it by pydantic; `msgspec.ValidationError` otherwise."""
    return msgspec.json.decode(text, type=kind, dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    return pydantic_from_json(kind, value) if is_pydantic(kind) else value


# ---- pydantic --------------------------------------------------------------------------------------------------------


def is_pydantic(kind: Any) -> bool:
    """Whether this is a class of pydantic 2, recognised by its shape: pydantic is imported only for those."""
    return isinstance(kind, type) and hasattr(kind, "__pydantic_core_schema__")


def pydantic_to_json(model: object, *, round_trip: bool = False) -> Any:
    """The model in JSON's types as pydantic writes them; with `round_trip`, under the names of its fields."""
    from pydantic import TypeAdapter

    adapter = TypeAdapter(type(model))
    if round_trip:
        return adapter.dump_python(model, mode="json", by_alias=False, round_trip=True)
    return adapter.dump_python(model, mode="json")


def pydantic_from_json(kind: type, value: Any) -> Any:
    """
    The model that was written as this value.

    A value that has names of fields alone is read by them: an alias may be the name of another field. Any other one,
    such as the answer of a server that the function returned as it was, is read by aliases too.
    """
    from pydantic import ConfigDict, TypeAdapter

    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    text = msgspec.json.encode(value)
    if "validate_by_name" not in ConfigDict.__annotations__:  # before pydantic 2.11
        return adapter.validate_json(text)
    if isinstance(value, dict) and value.keys() <= getattr(kind, "__pydantic_fields__", {}).keys():
        with suppress(ValueError):
            return adapter.validate_json(text, by_alias=False, by_name=True)
    return adapter.validate_json(text, by_alias=True, by_name=True)
