"""
The public names, as text: what can be imported from `reefknot`, and how it is called.

Where a class is defined, and whether an annotation is kept as text or as an object, is not part of it; nor is what a
class inherits from other packages.
"""

import inspect
import re
from enum import Enum
from types import ModuleType
from typing import Any

import reefknot as rk

_PREFIX = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Plain:
    """An annotation or a default that is shown as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def surface() -> str:
    """All public names with what they are, a block each."""
    blocks = [_described(name, getattr(rk, name)) for name in sorted(dir(rk)) if not name.startswith("_")]
    module = rk.testing
    blocks += [_described(f"testing.{name}", getattr(module, name)) for name in sorted(module.__all__)]
    return "\n".join(blocks)


def _described(name: str, thing: object) -> str:
    if inspect.isclass(thing):
        return _class(name, thing)
    if isinstance(thing, ModuleType):
        return f"module {name}\n"
    if callable(thing):
        kind = "async def" if inspect.iscoroutinefunction(thing) else "def"
        return f"{kind} {name}{_signature(thing)}\n"
    return f"{name}: {type(thing).__name__}\n"


def _class(name: str, thing: type[Any]) -> str:
    public = {getattr(rk, one) for one in dir(rk) if inspect.isclass(getattr(rk, one))}
    bases = [one.__name__ for one in thing.__mro__[1:-1] if one in public or one.__module__ in ("builtins", "enum")]
    lines = [f"class {name}({', '.join(bases)})"]
    if issubclass(thing, Enum):
        lines += [f"    {one.name} = {one.value!r}" for one in thing]
    else:
        lines.append(f"    {name}{_signature(thing)}")
    inherited = {one for base in thing.__mro__ if not base.__module__.startswith("reefknot") for one in vars(base)}
    members = {one.name for one in thing} if issubclass(thing, Enum) else set()
    for one in sorted(set(dir(thing)) - inherited - members):
        if not one.startswith("_"):
            lines.append(f"    .{one}{_member(thing, one)}")
    return "\n".join(lines) + "\n"


def _member(owner: type[Any], name: str) -> str:
    found = inspect.getattr_static(owner, name)
    if isinstance(found, (staticmethod, classmethod)) or inspect.isfunction(found):
        kind = " async" if inspect.iscoroutinefunction(getattr(owner, name)) else ""
        return f"{_signature(getattr(owner, name))}{kind}"
    return ""


def _signature(thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except ValueError:  # a class that takes what its builtin base takes
        return "(...)"
    parameters = [
        one.replace(annotation=_plain(one.annotation), default=_default(one.default))
        for one in found.parameters.values()
    ]
    plain = found.replace(parameters=parameters, return_annotation=_plain(found.return_annotation))
    return str(plain)


def _plain(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\*<class '(.*?)'>", r"Unpack[\1]", text)
    text = _PREFIX.sub("", text).replace("~", "").replace("'", "").replace('"', "")
    return _Plain(text)


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    return _Plain(
        _ADDRESS.sub("", _PREFIX.sub("", repr(value))) if not isinstance(value, (str, float)) else repr(value)
    )
