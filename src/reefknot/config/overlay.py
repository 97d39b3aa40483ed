"""
Settings that are said one by one: environment variables and flags.

`REEFKNOT__WORKER__QUEUE__V2__ENABLED=true` says `worker.queue.v2.enabled`. A value is a word, as in YAML; one that
begins with a quote, a bracket or a brace is read as YAML in one piece. An empty variable says nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

from reefknot.config.formats.scalars import WordError, plain_word
from reefknot.config.limits import MOST_BYTES, MOST_LEVELS, MOST_NODES, Reading
from reefknot.config.positions import Mark, Path, Problem, dotted, shortened
from reefknot.config.tree import MarkOf, Tree, lay
from reefknot.errors import ConfigurationError

PREFIX = "REEFKNOT__"

_SEGMENT = re.compile(r'"([^"]+)"|([^."\[\]]+)')
_QUOTED_OR_FLOW = ('"', "'", "[", "{")


def _everywhere(mark: Mark) -> MarkOf:
    return lambda path: mark


class _Sayings:
    """Settings as they come, each with its path; a tree when all are there."""

    __slots__ = ("problems", "said", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.said: dict[Path, tuple[Mark, Any]] = {}
        self.problems: list[Problem] = []

    def wrong(self, mark: Mark, path: Path, message: str) -> None:
        self.problems.append(Problem(mark, dotted(path), message))

    def say(self, path: Path, value: Any, mark: Mark) -> None:
        if len(path) > MOST_LEVELS:
            self.wrong(mark, (), f"is nested deeper than the limit of {MOST_LEVELS} levels")
        elif path in self.said:
            self.wrong(mark, path, f"is also given by {self.said[path][0]}")
        else:
            self.said[path] = mark, value

    def tree(self) -> Tree:
        """All of it, short paths first, so that the more exact setting wins."""
        value: dict[str, Any] = {}
        marks: dict[Path, Mark] = {(): Mark(self.source)}
        for path in sorted(self.said, key=lambda path: (len(path), path)):
            mark, whole = self.said[path]
            if self.is_blocked(path, mark):
                continue
            for name in reversed(path):
                whole = {name: whole}
            lay(whole, value, marks=marks, mark_of=_everywhere(mark))
        if self.problems:
            raise ConfigurationError(self.problems)
        return Tree(value, marks)

    def is_blocked(self, path: Path, mark: Mark) -> bool:
        """Whether a shorter path was given a value that nothing can stand under."""
        for length in range(1, len(path)):
            above = self.said.get(path[:length])
            if above is not None and not isinstance(above[1], dict):
                self.wrong(
                    mark, path, f"{above[0]} gives {dotted(path[:length])} a value that holds no further settings"
                )
                return True
        return False


def _word_or_flow(text: str, reading: Reading) -> Any:
    text = text.strip()
    if text.startswith(_QUOTED_OR_FLOW):
        from reefknot.config.formats.yaml_text import read_yaml

        return read_yaml(text, reading)
    mark = reading.marks[()]
    reading.count_node(mark)
    value: Any = None
    try:
        value = plain_word(text)
    except WordError as error:
        reading.wrong(mark, (), str(error))
    reading.check_scalar(value, mark, ())
    return value


def environment(environ: Mapping[str, str]) -> Tree:
    """What the variables `REEFKNOT__A__B` say about `a.b`. Their names are read in lower case."""
    sayings = _Sayings("environment")
    nodes = size = 0
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if not environ[name].strip():
            continue
        mark = Mark(f"environment {shortened(name, 200)}")
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if not all(path):
            sayings.wrong(mark, (), f"a name is missing between the underscores; written as {PREFIX}A__B")
            continue
        reading = Reading(mark.source)
        reading.nodes = nodes
        size += len(environ[name])
        try:
            reading.check_text(environ[name])
            if size > MOST_BYTES:
                reading.refuse(
                    mark, path, f"the variables together are larger than the limit of {MOST_BYTES // 1024} kB"
                )
            value = _word_or_flow(environ[name], reading)
            reading.settle()
        except ConfigurationError as error:
            sayings.problems.extend(problem for problem in error.problems if isinstance(problem, Problem))
            if size > MOST_BYTES or reading.nodes > MOST_NODES:
                break
            continue
        nodes = reading.nodes
        sayings.say(path, value, mark)
    return sayings.tree()


def _flag_path(name: str) -> Path | None:
    """The path of a dotted name, quotes around what has dots in it; None when it is none."""
    path: list[str | int] = []
    at = 0
    while found := _SEGMENT.match(name, at):
        path.append(found[1] or found[2])
        at = found.end()
        if at == len(name):
            return tuple(path)
        if name[at] != ".":
            return None
        at += 1
    return None


def flags(settings: Mapping[str, Any]) -> Tree:
    """What flags say: a dotted path, as `dotted` shows it, and a plain value each."""
    sayings = _Sayings("flags")
    for name, value in settings.items():
        mark = Mark(f"flag --{shortened(name, 200)}")
        path = _flag_path(name)
        if path is None:
            sayings.wrong(mark, (), "is not a path of names with dots between them")
            continue
        sayings.say(path, value, mark)
    return sayings.tree()
