"""
`ParseSession`: the positions, the mistakes and the limits of one document while it is read.

A mistake that leaves the rest readable is noted; a limit ends the parsing at once, because going on is what the limit
forbids. All text in a message becomes one printable line: file names and keys come from outside and end in terminals
and logs. Files are read whole, never beyond the limit, and only regular ones: a pipe may never end, and a device has no
size.
"""

import math
import os
import re
import stat
from bisect import bisect_right
from itertools import islice
from typing import NoReturn

from msgspec import Struct

from reefknot.errors import ConfigurationError
from reefknot.runtime.log import printable

KeyPath = tuple[str | int, ...]
"""The keys and list indexes that lead to a value of a document. `()` is the document itself."""

MOST_BYTES = 256 * 1024
MOST_LEVELS = 32
MOST_NODES = 10_000
MOST_ALIASES = 100
MOST_PROBLEMS = 1000
LARGEST_INTEGER = 2**63 - 1
LONGEST_NUMBER = 100
LONGEST_SEGMENT = 60

_BARE = re.compile(r"[\w/+-]+\Z")
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that an editor hides or shows as another. U+2028 ends a comment in YAML 1.1, and in no editor."""
UNFIT_DECODED = re.compile("[\x00\ud800-\udfff]")
"""Characters refused even as an escape: no file name, variable or UTF-8 text can hold them."""
_LINE_BREAK = re.compile("\r\n|\r|\n")


def shortened(text: str, most: int = LONGEST_SEGMENT) -> str:
    """The text's bounded beginning, on one line."""
    return printable(text, most=most)


def dotted(path: KeyPath) -> str:
    """The path as people write it: `worker.retries.v2`, `sources[0].name`, `operations."nats.publish"`."""
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
    """A position: a file with line and column, counted from 1, or the name of another source."""

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
    """A mistake: its position, the path of the setting, and what is wrong."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        line = f"{self.mark}: {self.path}: {self.message}" if self.path else f"{self.mark}: {self.message}"
        return printable(line)


class LineIndex:
    """Line and column, both counted from 1, of any offset in one text."""

    __slots__ = ("_starts",)

    def __init__(self, text: str) -> None:
        self._starts = [0, *(found.end() for found in _LINE_BREAK.finditer(text))]

    def __call__(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


class ParseSession:
    """Marks, mistakes and used limits of one document. A reader of a format fills it and obeys it."""

    __slots__ = ("_noted", "aliases", "marks", "nodes", "problems", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[KeyPath, Mark] = {(): Mark(source)}
        self.problems: list[Problem] = []
        self._noted: set[tuple[Mark, str]] = set()
        self.nodes = 0
        self.aliases = 0

    def at(self, line: int, column: int) -> Mark:
        """The mark of a position in this document."""
        return Mark(self.source, line, column)

    def wrong(self, mark: Mark, path: KeyPath, message: str) -> None:
        """Note a mistake and go on, up to a thousand. A mistake that an alias repeats at several paths counts once."""
        if (mark, message) not in self._noted:
            self._noted.add((mark, message))
            self.problems.append(Problem(mark, dotted(path), message))
            if len(self.problems) == MOST_PROBLEMS:
                self.settle()

    def repeated(self, mark: Mark, path: KeyPath, first: Mark) -> None:
        """Note a key that stands at `first` already."""
        self.wrong(mark, path, f"the key is already given at line {first.line}, column {first.column}")

    def refuse(self, mark: Mark, path: KeyPath, message: str) -> NoReturn:
        """Raise all mistakes so far and this one, behind which nothing can be read."""
        self.wrong(mark, path, message)
        raise ConfigurationError(self.problems)

    def settle(self) -> None:
        """Raise `ConfigurationError` if anything was wrong."""
        if self.problems:
            raise ConfigurationError(self.problems)

    def check_text(self, text: str) -> None:
        """Refuse text that is too long, or that holds characters no configuration needs."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > MOST_BYTES:
            self.refuse(self.marks[()], (), f"is larger than the limit of {MOST_BYTES // 1024} kB")
        if unfit := list(islice(_UNFIT.finditer(text), 10)):
            position = LineIndex(text)
            for found in unfit:
                message = f"character U+{ord(found[0]):04X} is not accepted; write it as an escape, or leave it out"
                self.wrong(self.at(*position(found.start())), (), message)
        self.settle()

    def count_node(self, mark: Mark, path: KeyPath = ()) -> None:
        """Count a value. An alias counts as all that it stands for."""
        self.nodes += 1
        if self.nodes > MOST_NODES:
            self.refuse(mark, path, f"holds more values than the limit of {MOST_NODES}, aliases expanded")

    def count_alias(self, mark: Mark) -> None:
        """Count an alias."""
        self.aliases += 1
        if self.aliases > MOST_ALIASES:
            self.refuse(mark, (), f"holds more aliases than the limit of {MOST_ALIASES}")

    def check_level(self, level: int, mark: Mark) -> None:
        """Refuse a mapping or list that is nested too deeply. The document itself is level 1."""
        if level > MOST_LEVELS:
            self.refuse(mark, (), f"is nested deeper than the limit of {MOST_LEVELS} levels")

    def check_scalar(self, value: object, mark: Mark, path: KeyPath) -> None:
        """Note a value that one of the formats could not carry, so that all of them accept the same."""
        match value:
            case str():
                if found := UNFIT_DECODED.search(value):
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
    """A file cannot be read. The text says why and shows nothing of its content."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


_DIRECTORY = "is a directory, not a file"


def _reason(error: OSError) -> UnreadableError:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return UnreadableError("there is no such file", is_missing=True)
        case PermissionError():
            return UnreadableError("may not be read: permission denied")
        case _:
            return UnreadableError(f"cannot be read: {error.strerror or type(error).__name__}")


def _open(path: str | os.PathLike[str]) -> int:
    # Without O_NONBLOCK, opening a pipe without a writer would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if os.path.isdir(path):  # some systems say "permission denied" of a folder
            raise UnreadableError(_DIRECTORY) from None
        raise _reason(error) from None
    except ValueError:
        raise UnreadableError("is not a possible file name") from None


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a regular file that has at most `most` of them."""
    descriptor = _open(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableError(_DIRECTORY)
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
