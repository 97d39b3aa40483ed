"""
Layers of configuration: a file and environment variables over it, merged into one `Tree`.

The file is the one that was named, the one of `REEFKNOT_CONFIG`, the nearest `reefknot.yaml` (or `.yml`, `.json`,
`.toml`) upwards, or that of the user's configuration folder, in this order. Two candidates in one folder are a mistake,
not a choice, and another user's file that was not named is refused. `REEFKNOT__WORKER__QUEUE__V2__ENABLED=true` sets
`worker.queue.v2.enabled`; a value is a word as in YAML, one that begins with a quote, a bracket or a brace is YAML in
one piece, and an empty variable sets nothing.

Nothing here knows what a setting means: names, kinds and bounds are the schema's. Nothing is cached either: the caller
says when to read again.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NoReturn

from msgspec import Struct

from reefknot.errors import ConfigurationError, ConfigurationMissingError
from reefknot.policy.reading.session import (
    MOST_BYTES,
    MOST_LEVELS,
    MOST_NODES,
    KeyPath,
    Mark,
    ParseSession,
    Problem,
    UnreadableError,
    dotted,
    read_small,
    shortened,
)

Format = Literal["yaml", "json", "toml"]

SUFFIXES: Mapping[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

MarkOf = Callable[[KeyPath], Mark | None]


class Tree(Struct, frozen=True):
    """A document as plain values, with the mark of every key and every list item."""

    value: dict[str, Any]
    marks: Mapping[KeyPath, Mark]

    def mark(self, path: KeyPath) -> Mark:
        """The mark of the path, or of the nearest path above it that has one."""
        for length in range(len(path), 0, -1):
            mark = self.marks.get(path[:length])
            if mark is not None:
                return mark
        return self.marks[()]

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A mistake in the setting at this path."""
        return Problem(self.mark(path), dotted(path), message)


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The path of a value, and those of all values in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def overlay(
    over: Mapping[str, Any], onto: dict[str, Any], *, marks: dict[KeyPath, Mark], mark_of: MarkOf, at: KeyPath = ()
) -> None:
    """Lay one mapping over another in place, and its marks over the other's. Nothing of `over` is shared afterwards."""
    for key, item in over.items():
        path = (*at, key)
        below = onto.get(key)
        if isinstance(item, dict) and isinstance(below, dict):
            # The mapping keeps its earlier mark: the file's line says more than the variable that changed one field.
            overlay(item, below, marks=marks, mark_of=mark_of, at=path)
            continue
        for replaced in _paths(below, path):
            marks.pop(replaced, None)
        onto[key] = deepcopy(item)
        marks |= {one: mark for one in _paths(item, path) if (mark := mark_of(one)) is not None}


def merge(*trees: Tree) -> Tree:
    """
    The trees as one, later over earlier, field by field; layers meet nowhere else.

    A key that is not given is inherited, null is a value, lists replace. The marks follow the values. Null over a
    mapping forgets the mapping, so there, and only there, it matters which pair is merged first.
    """
    value: dict[str, Any] = {}
    marks: dict[KeyPath, Mark] = {(): trees[0].marks[()] if trees else Mark("nothing configured")}
    for tree in trees:
        overlay(tree.value, value, marks=marks, mark_of=tree.marks.get)
    return Tree(value, marks)


def _reader(written_in: Format) -> Callable[[str, ParseSession], Any]:
    if written_in == "yaml":
        from reefknot.policy.reading.yaml import read_yaml

        return read_yaml
    from reefknot.policy.reading.json_toml import read_json, read_toml

    return read_json if written_in == "json" else read_toml


def read_text(text: str, *, name: str = "<text>", format: Format = "yaml") -> Tree:  # noqa: A002 - what it is called everywhere
    """The tree of a document; an empty one is an empty mapping. All mistakes are raised together."""
    session = ParseSession(name)
    text = text.removeprefix("\ufeff")
    session.check_text(text)
    value = _reader(format)(text, session)
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        session.wrong(session.marks[()], (), f"a configuration is a mapping of names to settings, not {kind}")
    session.settle()
    return Tree(value, session.marks)


def _decoded(data: bytes, session: ParseSession) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_bytes(data, error.start, session)


def _refuse_bytes(data: bytes, start: int, session: ParseSession) -> NoReturn:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        session.refuse(session.at(1, 1), (), "is not UTF-8; it looks like UTF-16: save it as UTF-8")
    line = data.count(b"\n", 0, start) + 1
    column = len(data[data.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")) + 1
    session.refuse(session.at(line, column), (), f"is not UTF-8: byte 0x{data[start]:02x} at offset {start}")


def read_file(path: str | os.PathLike[str]) -> Tree:
    """The tree of a file, read by its suffix."""
    name = os.fspath(path)
    session = ParseSession(name)
    try:
        data = read_small(name, MOST_BYTES)
    except UnreadableError as error:
        problem = Problem(Mark(name), "", str(error))
        raise (ConfigurationMissingError if error.is_missing else ConfigurationError)([problem]) from None
    written_in = SUFFIXES.get(os.path.splitext(name)[1].lower())
    if written_in is None:
        accepted = ", ".join(SUFFIXES)
        session.refuse(Mark(name), (), f"the file's name does not say its format; accepted: {accepted}")
    return read_text(_decoded(data, session), name=name, format=written_in)


PREFIX = "REEFKNOT__"

_QUOTED_OR_FLOW = ('"', "'", "[", "{")


class _SingleSettings(ParseSession):
    """Settings given one by one, each with its path, collected into a tree."""

    __slots__ = ("given",)

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.given: dict[KeyPath, tuple[Mark, Any]] = {}

    def add(self, path: KeyPath, value: Any, mark: Mark) -> None:
        if len(path) > MOST_LEVELS:
            self.wrong(mark, (), f"is nested deeper than the limit of {MOST_LEVELS} levels")
        elif path in self.given:
            self.wrong(mark, path, f"is also given by {self.given[path][0]}")
        else:
            self.given[path] = mark, value

    def tree(self) -> Tree:
        """All settings as a tree, short paths first, so that the more exact setting wins."""
        value: dict[str, Any] = {}
        for path in sorted(self.given, key=lambda path: (len(path), path)):
            mark, whole = self.given[path]
            if self.is_blocked(path, mark):
                continue
            for name in reversed(path):
                whole = {name: whole}
            overlay(whole, value, marks=self.marks, mark_of=dict.fromkeys(_paths(whole, ()), mark).get)
        self.settle()
        return Tree(value, self.marks)

    def is_blocked(self, path: KeyPath, mark: Mark) -> bool:
        """Whether a shorter path has a value that holds no further settings; notes it as a mistake."""
        for length in range(1, len(path)):
            above = self.given.get(path[:length])
            if above is not None and not isinstance(above[1], dict):
                holder = dotted(path[:length])
                self.wrong(mark, path, f"{above[0]} gives {holder} a value that holds no further settings")
                return True
        return False


def word_or_flow(text: str, session: ParseSession) -> Any:
    """The value of one setting: a word as in YAML, or, behind a quote, a bracket or a brace, YAML in one piece."""
    from reefknot.policy.reading.yaml import WordError, plain_word, read_yaml

    text = text.strip()
    if text.startswith(_QUOTED_OR_FLOW):
        return read_yaml(text, session)
    mark = session.marks[()]
    session.count_node(mark)
    value: Any = None
    try:
        value = plain_word(text)
    except WordError as error:
        session.wrong(mark, (), str(error))
    session.check_scalar(value, mark, ())
    return value


def environment(environ: Mapping[str, str]) -> Tree:
    """The tree of the variables: `REEFKNOT__A__B` sets `a.b`. Names are read in lower case."""
    collected = _SingleSettings("environment")
    nodes = size = 0
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if not environ[name].strip():
            continue
        mark = Mark(f"environment {shortened(name, 200)}")
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if not all(path):
            collected.wrong(mark, (), f"a name is missing between the underscores; written as {PREFIX}A__B")
            continue
        session = ParseSession(mark.source)
        session.nodes = nodes
        size += len(environ[name])
        try:
            session.check_text(environ[name])
            if size > MOST_BYTES:
                message = f"the variables together are larger than the limit of {MOST_BYTES // 1024} kB"
                session.refuse(mark, path, message)
            value = word_or_flow(environ[name], session)
            session.settle()
        except ConfigurationError as error:
            collected.problems.extend(problem for problem in error.problems if isinstance(problem, Problem))
            if size > MOST_BYTES or session.nodes > MOST_NODES:
                break
            continue
        nodes = session.nodes
        collected.add(path, value, mark)
    return collected.tree()


VARIABLE = "REEFKNOT_CONFIG"
NAMES = tuple(f"reefknot{suffix}" for suffix in SUFFIXES)


def _named(name: str, source: str, cwd: Path) -> Path:
    path = cwd / name
    if not os.path.lexists(path):
        raise ConfigurationMissingError([Problem(Mark(name), "", f"there is no such file, named by {source}")])
    return path


def _in_folder(folder: Path) -> Path | None:
    """The folder's one configuration, of this user. A broken link counts: reading it says what is wrong."""
    found = [path for name in NAMES if os.path.lexists(path := folder / name) and not os.path.isdir(path)]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        message = f"holds {names}: keep one, or name one with --config"
        raise ConfigurationError([Problem(Mark(str(folder)), "", message)])
    if found:
        _check_owner(found[0])
    return found[0] if found else None


def _check_owner(path: Path) -> None:
    """
    Refuse a file that was found, not named, and that neither this user nor root owns, as git does with repositories.

    Otherwise anyone who can write to a folder above, such as /tmp, would choose the settings of every user below it.
    """
    if not hasattr(os, "geteuid"):
        return
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))  # the person behind sudo, who is trusted with this command anyway
    for look in (os.lstat, os.stat):
        try:
            owner = look(path).st_uid
        except OSError:  # reading it says what is wrong
            return
        if owner not in trusted:
            message = (
                f"belongs to user {owner}, not to user {os.geteuid()} who runs this, so it is not read; if you trust "
                f"it, name it: --config {path} (or REEFKNOT_CONFIG); else write a reefknot.yaml of your own nearer"
            )
            raise ConfigurationError([Problem(Mark(str(path)), "", message)])


def _home_config(environ: Mapping[str, str]) -> Path | None:
    """The user's folder for configuration; None when neither XDG_CONFIG_HOME nor HOME is set."""
    for variable, below in (("XDG_CONFIG_HOME", ""), ("APPDATA", ""), ("HOME", ".config")):
        folder = environ.get(variable, "")
        if os.path.isabs(folder):
            return Path(folder, below, "reefknot")
    return None


def find(explicit: str | None, *, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The configuration file to read, or None. A file that was named has to exist."""
    if explicit is not None:
        return _named(explicit, "--config", cwd)
    if environ.get(VARIABLE):
        return _named(environ[VARIABLE], f"environment {VARIABLE}", cwd)
    start = Path(os.path.abspath(cwd))
    for folder in (start, *start.parents):
        if found := _in_folder(folder):
            return found
    folder_of_user = _home_config(environ)
    return _in_folder(folder_of_user) if folder_of_user is not None else None


def load_tree(explicit: str | None = None, *, environ: Mapping[str, str], cwd: Path) -> tuple[Tree, Path | None]:
    """The file with the environment over it, and the file's path. Mistakes in both are raised together."""
    path = find(explicit, environ=environ, cwd=cwd)
    trees: list[Tree] = []
    errors: list[ConfigurationError] = []
    for read in (None if path is None else lambda: read_file(path), lambda: environment(environ)):
        try:
            trees += [] if read is None else [read()]
        except ConfigurationError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigurationError([problem for error in errors for problem in error.problems])
    return merge(*trees), path


RETRIES = "WORKER_RETRIES_V2_ENABLED"
QUEUE = "WORKER_QUEUE_V2_ENABLED"

_SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Gate(Struct, frozen=True):
    """Whether v2 is in force, and the place that decided it."""

    on: bool
    origin: str

    def __bool__(self) -> bool:
        return self.on


def gate(variable: str, environ: Mapping[str, str], configured: bool | None, *, where: str = "the file") -> Gate:
    """The state of one gate: the environment wins both ways, then the file, and without either it is off."""
    given = gate_from_environment(variable, environ)
    if given is not None:
        return Gate(given, f"environment {variable}")
    if configured is not None:
        return Gate(configured, where)
    return Gate(False, "default")


def gate_from_environment(variable: str, environ: Mapping[str, str]) -> bool | None:
    """The environment's answer; None when the variable is unset or empty."""
    written = environ.get(variable, "").strip().lower()
    if not written:
        return None
    if written in _SWITCHES:
        return _SWITCHES[written]
    message = f"{environ[variable]!r} is not accepted; accepted: {', '.join(_SWITCHES)}, or nothing"
    raise ConfigurationError((Problem(Mark(f"environment {variable}"), "", message),))
