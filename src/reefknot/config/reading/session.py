"""
Where something was written, and what is wrong with it there.

Every text here becomes one printable line, because file names and keys come from outside and end in terminals and logs.

How much one document may ask for.

A `Reading` is the account of one document while it is read: the marks, the mistakes so far, and what is used of the
limits. A mistake that leaves the rest readable is noted; a limit ends the reading at once, because going on is what the
limit forbids.

Small files, read whole and never more than was allowed.

It reads regular files only: a pipe may never end, and a device has no size.

A document as plain values, and one document laid over another.

`merge` is the only place where layers of configuration meet.
"""

import math
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from msgspec import Struct

from reefknot.errors import ConfigurationError

KeyPath = tuple[str | int, ...]
"""The keys and list indexes that lead to a place in a document. `()` is the document itself."""

LONGEST_SEGMENT = 60

_BARE = re.compile(r"[\w/+-]+\Z")


def printable(text: str) -> str:
    """The text as one line that cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str, most: int = LONGEST_SEGMENT) -> str:
    """The text's bounded beginning, on one line."""
    return printable(text if len(text) <= most else text[: most - 1] + "…")


def dotted(path: KeyPath) -> str:
    """A path as people write it: `worker.retries.v2`, `sources[0].name`, `operations."nats.publish"`."""
    shown = ""
    for segment in path:
        if isinstance(segment, int):
            shown += f"[{segment}]"
            continue
        word = shortened(segment)
        if not _BARE.match(word.removesuffix("…")):
            word = '"' + word.replace('"', '\\"') + '"'
        shown += f".{word}" if shown else word
    return shown


class Mark(Struct, frozen=True):
    """A place: a file with line and column, counted from 1, or the name of what else was read."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        shown = printable(self.source)
        if self.line is not None:
            shown += f":{self.line}"
            if self.column is not None:
                shown += f":{self.column}"
        return shown


class Problem(Struct, frozen=True):
    """One mistake: where it stands, the path of the setting, and what is wrong."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.mark}: {self.path}: " if self.path else f"{self.mark}: "
        return printable(where + self.message)


MOST_BYTES = 256 * 1024
MOST_LEVELS = 32
MOST_NODES = 10_000
MOST_ALIASES = 100
MOST_PROBLEMS = 1000
LARGEST_INTEGER = 2**63 - 1

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What an editor does not show, or shows as something else. U+2028 ends a comment in YAML 1.1, and in no editor."""
_UNFIT_DECODED = re.compile("[\x00\ud800-\udfff]")
"""What may not even be written as an escape: no file name, variable or UTF-8 text can hold it."""
_LINE_BREAK = re.compile("\r\n|\r|\n")


def place(text: str, offset: int) -> tuple[int, int]:
    """Line and column of an offset, both counted from 1. It counts from the beginning: for errors only."""
    line, start = 1, 0
    for found in _LINE_BREAK.finditer(text, 0, offset):
        line, start = line + 1, found.end()
    return line, offset - start + 1


class LineIndex:
    """Line and column of many offsets in one text."""

    __slots__ = ("_starts",)

    def __init__(self, text: str) -> None:
        self._starts = [0, *(found.end() for found in _LINE_BREAK.finditer(text))]

    def __call__(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


class Reading:
    """One document's marks, mistakes and use of the limits."""

    __slots__ = ("_noted", "aliases", "marks", "nodes", "problems", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[KeyPath, Mark] = {(): Mark(source)}
        self.problems: list[Problem] = []
        self._noted: set[tuple[Mark, str]] = set()
        self.nodes = 0
        self.aliases = 0

    def at(self, line: int, column: int) -> Mark:
        """The mark of a place in this document."""
        return Mark(self.source, line, column)

    def wrong(self, mark: Mark, path: KeyPath, message: str) -> None:
        """Note a mistake and go on, up to a thousand. What an alias brings to several paths is still one mistake."""
        if (mark, message) not in self._noted:
            self._noted.add((mark, message))
            self.problems.append(Problem(mark, dotted(path), message))
            if len(self.problems) == MOST_PROBLEMS:
                self.settle()

    def refuse(self, mark: Mark, path: KeyPath, message: str) -> NoReturn:
        """Note a mistake that nothing can be read behind."""
        self.wrong(mark, path, message)
        raise ConfigurationError(self.problems)

    def settle(self) -> None:
        """Raise when anything was wrong."""
        if self.problems:
            raise ConfigurationError(self.problems)

    def check_text(self, text: str) -> None:
        """Refuse text that is too long, or that holds characters no configuration needs."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > MOST_BYTES:
            self.refuse(self.marks[()], (), f"is larger than the limit of {MOST_BYTES // 1024} kB")
        for found in _UNFIT.finditer(text):
            mark = self.at(*place(text, found.start()))
            self.wrong(
                mark, (), f"character U+{ord(found[0]):04X} is not accepted; write it as an escape, or leave it out"
            )
            if len(self.problems) == 10:
                break
        self.settle()

    def count_node(self, mark: Mark, path: KeyPath = ()) -> None:
        """One more value, wherever it comes from: an alias counts as all that it stands for."""
        self.nodes += 1
        if self.nodes > MOST_NODES:
            self.refuse(mark, path, f"holds more values than the limit of {MOST_NODES}, aliases expanded")

    def count_alias(self, mark: Mark) -> None:
        """One more alias."""
        self.aliases += 1
        if self.aliases > MOST_ALIASES:
            self.refuse(mark, (), f"holds more aliases than the limit of {MOST_ALIASES}")

    def check_level(self, level: int, mark: Mark) -> None:
        """Refuse a mapping or list inside too many others. The document itself is level 1."""
        if level > MOST_LEVELS:
            self.refuse(mark, (), f"is nested deeper than the limit of {MOST_LEVELS} levels")

    def check_scalar(self, value: object, mark: Mark, path: KeyPath) -> None:
        """Note a value that one of the formats could not carry, so that all of them accept the same."""
        match value:
            case str():
                if found := _UNFIT_DECODED.search(value):
                    self.wrong(mark, path, f"text with the character U+{ord(found[0]):04X} is not accepted")
            case float():
                if not math.isfinite(value):
                    self.wrong(mark, path, "a number is finite: neither infinite nor NaN")
            case int():
                if not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
                    self.wrong(mark, path, "the number does not fit in 64 bits")
            case _:
                pass


class UnreadableError(Exception):
    """A file cannot be read. The text says why and shows nothing of what is in it."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


_REASONS: dict[type[OSError], str] = {
    FileNotFoundError: "there is no such file",
    NotADirectoryError: "there is no such file",
    PermissionError: "may not be read: permission denied",
    IsADirectoryError: "is a directory, not a file",
}


def _reason(error: OSError) -> UnreadableError:
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return UnreadableError(reason, is_missing=reason == _REASONS[FileNotFoundError])
    return UnreadableError(f"cannot be read: {error.strerror or type(error).__name__}")


def _open(path: str | os.PathLike[str]) -> int:
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except IsADirectoryError as error:
        raise _reason(error) from None
    except OSError as error:
        if os.path.isdir(path):  # some systems say "permission denied" of a folder
            raise UnreadableError(_REASONS[IsADirectoryError]) from None
        raise _reason(error) from None
    except ValueError:
        raise UnreadableError("is not a possible file name") from None


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a regular file of at most so many bytes."""
    descriptor = _open(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableError(_REASONS[IsADirectoryError])
        if not stat.S_ISREG(mode):
            raise UnreadableError("is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _reason(error) from None
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise UnreadableError(f"is larger than the limit of {most // 1024} kB")
    return data


MarkOf = Callable[[KeyPath], Mark | None]


class Tree(Struct, frozen=True):
    """A document as plain values, with the mark of every key and every list item."""

    value: dict[str, Any]
    marks: Mapping[KeyPath, Mark]

    def mark(self, path: KeyPath) -> Mark:
        """Where the path is written, or the nearest place above it that is."""
        for length in range(len(path), 0, -1):
            mark = self.marks.get(path[:length])
            if mark is not None:
                return mark
        return self.marks[()]


def _copied(value: Any, path: KeyPath, mark_of: MarkOf, marks: dict[KeyPath, Mark]) -> Any:
    """A copy of a value, and of the marks at and below its path."""
    mark = mark_of(path)
    if mark is not None:
        marks[path] = mark
    match value:
        case dict():
            return {key: _copied(item, (*path, key), mark_of, marks) for key, item in value.items()}
        case list():
            return [_copied(item, (*path, index), mark_of, marks) for index, item in enumerate(value)]
        case _:
            return value


def _forget(value: Any, path: KeyPath, marks: dict[KeyPath, Mark]) -> None:
    """Drop the marks of a value that is being replaced."""
    marks.pop(path, None)
    match value:
        case dict():
            for key, item in value.items():
                _forget(item, (*path, key), marks)
        case list():
            for index, item in enumerate(value):
                _forget(item, (*path, index), marks)
        case _:
            pass


def lay(
    over: Mapping[str, Any], onto: dict[str, Any], *, marks: dict[KeyPath, Mark], mark_of: MarkOf, at: KeyPath = ()
) -> None:
    """Lay one mapping over another in place, and its marks over the other's. Nothing of `over` is shared afterwards."""
    for key, item in over.items():
        path = (*at, key)
        below = onto.get(key)
        if isinstance(item, dict) and isinstance(below, dict):
            # The mapping keeps its earlier mark: the file's line says more than the variable that changed one field.
            lay(item, below, marks=marks, mark_of=mark_of, at=path)
            continue
        if key in onto:
            _forget(below, path, marks)
        onto[key] = _copied(item, path, mark_of, marks)


def merge(*trees: Tree) -> Tree:
    """
    Later over earlier, field by field.

    What is not given is inherited, null given is a value, lists replace. The marks follow the values. Null over a
    mapping forgets the mapping, so there, and only there, it matters which pair is merged first.
    """
    value: dict[str, Any] = {}
    marks: dict[KeyPath, Mark] = {(): trees[0].marks[()] if trees else Mark("nothing configured")}
    for tree in trees:
        lay(tree.value, value, marks=marks, mark_of=tree.marks.get)
    return Tree(value, marks)
