"""
The annotated type of a step's inputs: read into it before the step runs, and its outputs turned back into JSON.

A pydantic model is read by pydantic, which is then loaded already; a dataclass, a `msgspec.Struct`, an attrs class or a
`TypedDict` by msgspec. Plain mappings are passed as they are. Any other annotation is refused when the step is
decorated.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, Protocol

import msgspec

from reefknot.core.canonical import is_pydantic, json_value, pydantic_to_json
from reefknot.errors import ParameterTypeError

ACCEPTED = (
    "a mapping (dict[str, Any]), or the inputs' own type: a pydantic model, a dataclass, a msgspec.Struct, an attrs "
    "class or a TypedDict"
)
MOST_MISMATCHES = 5
"""Fields that the message of one failure names."""
_PASSED = (Any, object, dict, Mapping, MutableMapping)
"""Annotations of inputs that are passed as they are."""
_PLAIN_NAME = re.compile(r"(?:\w+\.)*(?:dict|Dict|Mapping|MutableMapping|Any|object)(?:\[.*\])?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")

InputReader = Callable[[Mapping[str, Any]], Any]


class InputMismatchError(Exception):
    """Inputs that do not fit the step's type; the message names the fields."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _Attrs(Protocol):
    __attrs_attrs__: ClassVar[Any]


class _Pydantic(Protocol):
    __pydantic_fields__: ClassVar[Any]


Model = _Dataclass | _Attrs | _Pydantic | msgspec.Struct
"""A model of outputs, by its shape."""


def caller_names(depth: int) -> dict[str, Any]:
    """The local names that annotations may use at a caller, `frames` above the function that asks."""
    frame = sys._getframe(depth + 1)
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def input_reader(function: Any, names: Mapping[str, Any] | None = None) -> InputReader | None:
    """The function that makes a step's first argument from its inputs; None when they are passed as they are."""
    annotation = _annotation(function, names or {})
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    kind = typing.get_origin(annotation) or annotation
    if annotation is None or kind in _PASSED:
        return None
    if is_pydantic(kind):
        return _pydantic_reader(annotation)
    if typing.is_typeddict(kind) or (isinstance(kind, type) and _is_record(kind)):
        _check_fields(annotation)
        return _msgspec_reader(annotation)
    raise _refused(annotation)


def _annotation(function: Any, names: Mapping[str, Any]) -> Any:
    """The annotation of the first parameter, evaluated; None without one."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin that does not say what it takes
        return None
    given = parameters[0].annotation if parameters else inspect.Parameter.empty
    if given is inspect.Parameter.empty:
        return None
    if not isinstance(given, str):
        return given
    scope = getattr(inspect.unwrap(called), "__globals__", {})
    try:
        hints = typing.get_type_hints(_Hint(given), dict(scope), dict(names), include_extras=True)
    except Exception as error:  # a name that only type checkers know, or no type at all
        if _PLAIN_NAME.fullmatch(given.strip()):
            return None
        raise ParameterTypeError("inputs", given, f"{ACCEPTED}; {type(error).__name__}: {error}") from None
    return hints["inputs"]


class _Hint:
    """Carrier of one annotation, as `get_type_hints` takes it."""

    def __init__(self, annotation: str) -> None:
        self.__annotations__ = {"inputs": annotation}


def _is_record(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")


def _refused(annotation: Any, *, field: str = "") -> ParameterTypeError:
    name = getattr(annotation, "__qualname__", None) or str(annotation)
    if field:
        return ParameterTypeError(f"inputs.{field}", name, "a type that JSON can be read into")
    return ParameterTypeError("inputs", name, ACCEPTED)


# ---- msgspec ---------------------------------------------------------------------------------------------------------


def _check_fields(annotation: Any) -> None:
    """Refuse a record with a field that no JSON value can be read into, by the field's name."""
    try:
        found = msgspec.inspect.type_info(annotation)
    except Exception as error:
        raise ParameterTypeError("inputs", str(annotation), f"{ACCEPTED}; {error}") from None
    for field in getattr(found, "fields", ()):
        if isinstance(field.type, msgspec.inspect.CustomType):
            raise _refused(field.type.cls, field=field.name)


def _msgspec_reader(annotation: Any) -> InputReader:
    def read(inputs: Mapping[str, Any]) -> Any:
        try:
            return msgspec.convert(inputs, annotation)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            missing = _MISSING.fullmatch(text)
            name = f"inputs{path.rstrip('`')}{f'.{missing[1]}' if missing else ''}"
            raise InputMismatchError(f"{name}: {'missing' if missing else text}") from None

    return read


# ---- pydantic --------------------------------------------------------------------------------------------------------


def _pydantic_reader(annotation: Any) -> InputReader:
    from pydantic import TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(annotation)
    except Exception as error:  # a field of a type that pydantic does not know
        raise ParameterTypeError("inputs", str(annotation), f"{ACCEPTED}; {error}") from None

    def read(inputs: Mapping[str, Any]) -> Any:
        try:
            return adapter.validate_python(dict(inputs))
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            fields = [f"{'.'.join(('inputs', *map(str, one['loc'])))}: {one['msg']}" for one in found]
            more = f"; and {len(fields) - MOST_MISMATCHES} more" if len(fields) > MOST_MISMATCHES else ""
            raise InputMismatchError(f"{'; '.join(fields[:MOST_MISMATCHES])}{more}") from None

    return read


# ---- outputs ---------------------------------------------------------------------------------------------------------


def outputs_of(answer: object) -> object:
    """The outputs of a model as JSON has them, `NotJsonError` where it has none; any other value as it is."""
    kind = type(answer)
    if is_pydantic(kind):
        return pydantic_to_json(answer)
    return json_value(answer) if _is_record(kind) else answer
