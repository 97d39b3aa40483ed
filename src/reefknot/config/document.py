"""
Text into a checked tree that knows where everything was written.

Files, environment variables and flags become the same `Tree`. Nothing here knows what a setting means: names, kinds and
bounds are the schema's business.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn

from reefknot.config.files import UnreadableError, read_small
from reefknot.config.limits import MOST_BYTES, Reading
from reefknot.config.overlay import environment, flags
from reefknot.config.positions import Mark, Path, Problem, dotted
from reefknot.config.tree import Tree, merge
from reefknot.errors import ConfigurationError, ConfigurationMissingError

__all__ = [
    "SUFFIXES",
    "Format",
    "Mark",
    "Path",
    "Problem",
    "Tree",
    "dotted",
    "environment",
    "flags",
    "merge",
    "read_file",
    "read_text",
    "suggest",
]

Format = Literal["yaml", "json", "toml"]

SUFFIXES: Mapping[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

LONGEST_SUGGESTED = 64
"""Longer names are not compared: likeness costs the product of two lengths."""


def _reader(written_in: Format) -> Callable[[str, Reading], Any]:
    match written_in:
        case "yaml":
            from reefknot.config.formats.yaml_text import read_yaml

            return read_yaml
        case "json":
            from reefknot.config.formats.json_text import read_json

            return read_json
        case "toml":
            from reefknot.config.formats.toml_text import read_toml

            return read_toml


def read_text(text: str, *, name: str = "<text>", format: Format = "yaml") -> Tree:  # noqa: A002 - what it is called everywhere
    """The tree of a document. An empty one is an empty mapping; whatever is wrong with it is raised together."""
    reading = Reading(name)
    text = text.removeprefix("\ufeff")
    reading.check_text(text)
    value = _reader(format)(text, reading)
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        reading.wrong(reading.marks[()], (), f"a configuration is a mapping of names to settings, not {kind}")
    reading.settle()
    return Tree(value, reading.marks)


def _decoded(data: bytes, reading: Reading) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_bytes(data, error.start, reading)


def _refuse_bytes(data: bytes, start: int, reading: Reading) -> NoReturn:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        reading.refuse(reading.at(1, 1), (), "is not UTF-8; it looks like UTF-16: save it as UTF-8")
    line = data.count(b"\n", 0, start) + 1
    column = len(data[data.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")) + 1
    reading.refuse(reading.at(line, column), (), f"is not UTF-8: byte 0x{data[start]:02x} at offset {start}")


def read_file(path: str | os.PathLike[str]) -> Tree:
    """The tree of a file, read by its suffix."""
    name = os.fspath(path)
    reading = Reading(name)
    try:
        data = read_small(name, MOST_BYTES)
    except UnreadableError as error:
        problem = Problem(Mark(name), "", str(error))
        raise (ConfigurationMissingError if error.is_missing else ConfigurationError)([problem]) from None
    written_in = SUFFIXES.get(os.path.splitext(name)[1].lower())
    if written_in is None:
        accepted = ", ".join(SUFFIXES)
        reading.refuse(Mark(name), (), f"the file's name does not say its format; accepted: {accepted}")
    return read_text(_decoded(data, reading), name=name, format=written_in)


def suggest(name: str, accepted: Iterable[str]) -> str:
    """`; did you mean 'x'?` when one of the accepted names looks like it, else nothing."""
    from difflib import get_close_matches

    if not 0 < len(name) <= LONGEST_SUGGESTED:
        return ""
    spelled = {word.lower().replace("-", "_"): word for word in accepted}
    found = get_close_matches(name.lower().replace("-", "_"), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[found[0]]!r}?" if found else ""
