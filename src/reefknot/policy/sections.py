"""
`Section`: a part of a configuration file, declared by its keys and their kinds; `SectionReader` reads one.

A value that is refused is left out, and the rest is read all the same, so that one mistake hides no other. A list is
refused as a whole, and so is a mapping that lacks a key it must have.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct

from reefknot.core.checks import suggest
from reefknot.core.redaction import redact
from reefknot.policy.layers import Tree
from reefknot.policy.reading.session import KeyPath, Problem, shortened
from reefknot.policy.secrets import SECRET_KEYS


class NotAcceptedError(Exception):
    """A value that the check of its kind refuses, with what is accepted instead, and why it is not."""

    def __init__(self, accepted: str, why: str = "") -> None:
        super().__init__(accepted)
        self.accepted = accepted
        self.why = f"{why}; " if why else ""


class Spelling(NamedTuple):
    """Another way to write a value: `meant` returns the value itself, or what it does not know as it is."""

    meant: Callable[[object], object]


class Section(Struct, frozen=True, kw_only=True):
    """A part of the file: unknown keys and wrong kinds are mistakes."""

    written: frozenset[str] = frozenset()
    """The keys that the file, the environment or a flag gives; the others have their default."""


def takes_own(section: type[Section]) -> bool:
    """Whether keys that are not the section's are kept in its field `own`."""
    return "own" in section.__struct_fields__


@cache
def keys_of(section: type[Section]) -> dict[str, Any]:
    """The keys of a section with their kinds, those of the sections that it extends first."""
    kinds: dict[str, Any] = {}
    for one in reversed(section.__mro__):
        kinds |= get_annotations(one)
    return {name: kinds[name] for name in section.__struct_fields__ if name not in ("written", "own")}


def required(section: type[Section]) -> tuple[str, ...]:
    """The keys that a section must have."""
    pairs = zip(reversed(section.__struct_fields__), reversed(section.__struct_defaults__), strict=False)
    return tuple(name for name, default in pairs if default is NODEFAULT)


def plain(value: Any) -> Any:
    """A section as a mapping of plain values, its defaults included; anything else as it is."""
    match value:
        case Section():
            return {name: plain(getattr(value, name)) for name in keys_of(type(value))} | getattr(value, "own", {})
        case dict():
            return {name: plain(item) for name, item in value.items()}
        case list():
            return [plain(item) for item in value]
        case _:
            return value


REFUSED: Final = object()
"""In place of a value that is not accepted; the mistake is noted."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class SectionReader:
    """
    Values checked against the kinds of their keys; `problems` collects the mistakes.

    `accepted` has the words for keys, by name, whose accepted values only the caller knows.
    """

    def __init__(self, tree: Tree, accepted: Mapping[str, Callable[[], str]] = {}) -> None:
        self.tree = tree
        self.accepted = accepted
        self.problems: list[Problem] = []

    def section(self, kind: type[Section], given: dict[str, Any], path: KeyPath) -> Any:
        """A section with the keys that are accepted; `REFUSED` without a key that must be given."""
        kinds, fields = keys_of(kind), dict[str, Any]()
        for name, wanted in kinds.items():
            if name in given and (value := self.value(wanted, given[name], (*path, name))) is not REFUSED:
                fields[name] = value
        for name in required(kind):
            if name not in given:
                self.wrong((*path, name), "missing; it must be given")
        complete, written = fields.keys() >= set(required(kind)), frozenset(fields)
        others = {name: one for name, one in given.items() if name not in kinds}
        if takes_own(kind):
            fields["own"] = others
            others = {}
        for name in others:
            self.wrong((*path, name), f"unknown key; accepted: {_listed(kinds)}{suggest(str(name), sorted(kinds))}")
        return kind(written=written, **fields) if complete else REFUSED

    def value(self, kind: Any, given: Any, path: KeyPath, limits: tuple[Any, ...] = ()) -> Any:
        """The value of one key, or `REFUSED`; `limits` are bounds and checks around its kind."""
        origin = get_origin(kind)
        if origin is Annotated:
            for one in kind.__metadata__:
                given = one.meant(given) if isinstance(one, Spelling) else given
            return self.value(kind.__origin__, given, path, (*limits, *kind.__metadata__))
        if origin in (Union, UnionType):
            kinds = [one for one in get_args(kind) if one is not NoneType]
            if given is None and len(kinds) < len(get_args(kind)):
                return None
            # A text, or a mapping of the same: the only union of two kinds.
            return self.value(kinds[0] if len(kinds) == 1 or isinstance(given, str) else kinds[1], given, path, limits)
        if kind is Any:
            return given
        if origin is Literal:
            accepted = get_args(kind)
            near = suggest(given, accepted) if isinstance(given, str) else ""
            return given if given in accepted else self._not(given, path, f"{_choices(accepted)}{near}")
        if origin is list:
            return self._list(get_args(kind)[0], given, path)
        if origin is dict:
            return self._mapping(kind, given, path)
        if isinstance(kind, type) and issubclass(kind, Section):
            wanted = f"a mapping of {_listed(keys_of(kind))}, or no such key at all"
            return self.section(kind, given, path) if isinstance(given, dict) else self._not(given, path, wanted)
        return self._scalar(kind, given, path, limits)

    def _list(self, kind: Any, given: Any, path: KeyPath) -> Any:
        if not isinstance(given, list):
            return self._not(given, path, "a list")
        values = [self.value(kind, item, (*path, index)) for index, item in enumerate(given)]
        return REFUSED if REFUSED in values else values

    def _mapping(self, kind: Any, given: Any, path: KeyPath) -> Any:
        if not isinstance(given, dict):
            return self._not(given, path, "a mapping, or no such key at all")
        values: dict[str, Any] = {}
        accepted, wanted = get_args(get_args(kind)[0]), get_args(kind)[1]
        for name, item in given.items():
            if accepted and name not in accepted:
                self.wrong((*path, name), f"unknown key; accepted: {_choices(accepted)}{suggest(name, accepted)}")
            elif (value := self.value(wanted, item, (*path, name))) is not REFUSED:
                values[name] = value
        return values

    def _scalar(self, kind: type, given: Any, path: KeyPath, limits: tuple[Any, ...]) -> Any:
        metas = [one for one in limits if isinstance(one, Meta)]
        is_kind = type(given) is kind or (kind is float and type(given) is int)
        if not is_kind:
            return self._not(given, path, self._wanted(kind, path, metas))
        if kind is str and (wanted := _text_wanted(given, metas)):
            return self._not(given, path, wanted)
        if kind is not str and not all(_is_within(given, one) for one in metas):
            return self.wrong(path, f"{shown(given)} is out of bounds; accepted: {_bounds(metas)}")
        try:
            for check in filter(callable, limits):
                check(given)
        except NotAcceptedError as error:
            return self._not(redact(given), path, error.accepted, error.why)
        return float(given) if kind is float else given

    def _not(self, given: Any, path: KeyPath, accepted: str, why: str = "") -> object:
        return self.wrong(path, f"{shown(given)} is not accepted; {why}accepted: {accepted}")

    def _wanted(self, kind: type, path: KeyPath, metas: list[Meta]) -> str:
        name = path[-1]
        if isinstance(name, str) and name in self.accepted:
            return self.accepted[name]()
        return next((one.extra["accepted"] for one in metas if one.extra), _KINDS[kind])

    def wrong(self, path: KeyPath, message: str) -> object:
        """Note a mistake, without the value where it may be a secret that is written out."""
        if len(path) > 1 and (path[0] == "secrets" or path in SECRET_KEYS):
            message = "what is written here is not accepted; accepted: a reference, env:NAME or file:PATH"
        self.problems.append(self.tree.problem(path, message))
        return REFUSED


def shown(value: object) -> str:
    """The beginning of a value, in the spelling of the file's formats."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return shortened(repr(value))


def _text_wanted(given: str, metas: Iterable[Meta]) -> str:
    """The words for a text that would be accepted; "" for one that is."""
    for one in metas:
        if one.pattern is not None and re.search(one.pattern, given) is None:
            return str((one.extra or {}).get("accepted", f"text like {one.pattern}"))
        if one.min_length is not None and len(given) < one.min_length:
            return "text that is not empty"
        if one.max_length is not None and len(given) > one.max_length:
            return f"text of at most {one.max_length} characters"
    return ""


def _is_within(given: float, limit: Meta) -> bool:
    return (
        (limit.ge is None or given >= limit.ge)
        and (limit.gt is None or given > limit.gt)
        and (limit.le is None or given <= limit.le)
        and (limit.lt is None or given < limit.lt)
    )


def _bounds(metas: list[Meta]) -> str:
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    stated = {name: limit for name in words for one in metas if (limit := getattr(one, name)) is not None}
    return " ".join(f"{words[name]} {limit}" for name, limit in stated.items())


def _choices(accepted: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(map(repr, accepted[:-1])), repr(accepted[-1]))))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
