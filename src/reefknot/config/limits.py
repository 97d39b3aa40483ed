"""
How much one document may ask for.

A `Reading` is the account of one document while it is read: the marks, the mistakes so far, and what is used of the
limits. A mistake that leaves the rest readable is noted; a limit ends the reading at once, because going on is what the
limit forbids.
"""

import math
import re
from bisect import bisect_right
from typing import NoReturn

from reefknot.config.positions import Mark, Path, Problem, dotted
from reefknot.errors import ConfigurationError

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
        self.marks: dict[Path, Mark] = {(): Mark(source)}
        self.problems: list[Problem] = []
        self._noted: set[tuple[Mark, str]] = set()
        self.nodes = 0
        self.aliases = 0

    def at(self, line: int, column: int) -> Mark:
        """The mark of a place in this document."""
        return Mark(self.source, line, column)

    def wrong(self, mark: Mark, path: Path, message: str) -> None:
        """Note a mistake and go on, up to a thousand. What an alias brings to several paths is still one mistake."""
        if (mark, message) not in self._noted:
            self._noted.add((mark, message))
            self.problems.append(Problem(mark, dotted(path), message))
            if len(self.problems) == MOST_PROBLEMS:
                self.settle()

    def refuse(self, mark: Mark, path: Path, message: str) -> NoReturn:
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

    def count_node(self, mark: Mark, path: Path = ()) -> None:
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

    def check_scalar(self, value: object, mark: Mark, path: Path) -> None:
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
