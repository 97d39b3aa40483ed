"""
TOML, read by the standard library, with positions of our own.

The scan over the text finds where keys stand and holds the limits before the real reader is let at it. It is lenient:
what it does not understand it leaves to the reader, whose errors are better than a guess. Dates become text.
"""

import re
from contextlib import suppress
from typing import Any

from reefknot.config.limits import LineIndex, Reading
from reefknot.config.positions import Mark, Path, shortened

_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_SPACE = re.compile(r"[ \t]*+")
_KEY = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'""")
_LONG_STRING = re.compile(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+""""{0,2}'''
    r"""|'''(?:[^']++|'(?!''))*+''''{0,2}""",
    re.DOTALL,
)
_STRING = re.compile(r""""(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'""")
_BARE = re.compile(r"[^,\]}#\r\n]++")
_REPORTED = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


class _LostError(Exception):
    """The scan met something it does not know; the reader has the word."""


class _TomlScan:
    """One pass over the text: marks, duplicates and limits. It makes no values."""

    __slots__ = ("arrays", "at", "given", "mark_of", "reading", "tables", "text")

    def __init__(self, text: str, reading: Reading) -> None:
        self.text = text
        self.reading = reading
        self.at = 0
        self.mark_of = LineIndex(text)
        self.arrays: dict[Path, int] = {}
        """The index of the newest table in each array of tables."""
        self.given: dict[Path, Mark] = {}
        self.tables: dict[Path, Mark] = {}

    def mark(self) -> Mark:
        return self.reading.at(*self.mark_of(self.at))

    def skip(self, blank: re.Pattern[str]) -> str:
        """The next character that counts, '' at the end."""
        found = blank.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def take(self, token: str) -> None:
        if not self.text.startswith(token, self.at):
            raise _LostError
        self.at += len(token)

    def document(self) -> None:
        table: Path = ()
        while char := self.skip(_BLANK):
            if char == "[":
                table = self.header()
            else:
                self.pair(table)

    def header(self) -> Path:
        is_array = self.text.startswith("[[", self.at)
        self.take("[[" if is_array else "[")
        start = self.mark()
        keys = self.keys()
        self.take("]]" if is_array else "]")
        path = self.enter((), keys[:-1])
        name, mark = keys[-1]
        path = (*path, name)
        if is_array:
            self.reading.marks.setdefault(path, mark)
            index = self.arrays[path] = self.arrays.get(path, -1) + 1
            path = (*path, index)
            self.reading.marks[path] = start
            self.reading.count_node(start, path)
            self.reading.check_level(len(path) + 1, start)
            return path
        self.once(path, mark, self.tables)
        self.reading.marks.setdefault(path, mark)
        self.reading.count_node(mark, path)
        return self.newest(path)

    def newest(self, path: Path) -> Path:
        return (*path, self.arrays[path]) if path in self.arrays else path

    def enter(self, path: Path, keys: list[tuple[str, Mark]]) -> Path:
        """Go down the keys, marking what is named here for the first time."""
        for name, mark in keys:
            path = (*path, name)
            if path not in self.reading.marks:
                self.reading.marks[path] = mark
                self.reading.count_node(mark, path)
            path = self.newest(path)
        return path

    def once(self, path: Path, mark: Mark, seen: dict[Path, Mark]) -> None:
        first = seen.setdefault(path, mark)
        if first is not mark:
            self.reading.wrong(mark, path, f"the key is already given at line {first.line}, column {first.column}")

    def keys(self) -> list[tuple[str, Mark]]:
        """A dotted key's parts, each with its mark."""
        found: list[tuple[str, Mark]] = []
        while True:
            self.skip(_SPACE)
            token = _KEY.match(self.text, self.at)
            if token is None:
                raise _LostError
            mark = self.mark()
            found.append((_key_text(token[0]), mark))
            self.reading.check_level(len(found), mark)
            self.at = token.end()
            if self.skip(_SPACE) != ".":
                return found
            self.at += 1

    def pair(self, table: Path) -> None:
        keys = self.keys()
        path = (*self.enter(table, keys[:-1]), keys[-1][0])
        mark = keys[-1][1]
        self.reading.check_level(len(path), mark)
        self.once(path, mark, self.given)
        self.reading.marks.setdefault(path, mark)
        self.take("=")
        self.value(path)

    def value(self, path: Path) -> None:
        char = self.skip(_SPACE)
        mark = self.mark()
        self.reading.count_node(mark, path)
        if char == "[":
            self.reading.check_level(len(path) + 1, mark)
            self.array(path)
        elif char == "{":
            self.reading.check_level(len(path) + 1, mark)
            self.inline_table(path)
        else:
            token = (
                _LONG_STRING.match(self.text, self.at)
                or _STRING.match(self.text, self.at)
                or _BARE.match(self.text, self.at)
            )
            if token is None:
                raise _LostError
            self.at = token.end()

    def array(self, path: Path) -> None:
        self.at += 1
        index = 0
        while self.skip(_BLANK) not in ("]", ""):
            self.reading.marks[*path, index] = self.mark()
            self.value((*path, index))
            index += 1
            if self.skip(_BLANK) == ",":
                self.at += 1
        self.take("]")

    def inline_table(self, path: Path) -> None:
        self.at += 1
        while self.skip(_BLANK) not in ("}", ""):
            self.pair(path)
            if self.skip(_BLANK) == ",":
                self.at += 1
        self.take("}")


def _key_text(token: str) -> str:
    if token[0] == '"' and "\\" in token:
        import tomllib

        try:
            return next(iter(tomllib.loads(f"{token} = 0")))
        except tomllib.TOMLDecodeError:
            raise _LostError from None
    return token[1:-1] if token[0] in "\"'" else token


def _plain(value: Any, path: Path, reading: Reading) -> Any:
    """The value without TOML's own kinds. It counts again, for what the scan could not follow."""
    mark = reading.marks.get(path) or reading.marks[()]
    reading.count_node(mark, path)
    if isinstance(value, dict | list):
        reading.check_level(len(path) + 1, mark)
    match value:
        case dict():
            for key in value:
                reading.check_scalar(key, reading.marks.get((*path, key), mark), path)
            return {key: _plain(item, (*path, key), reading) for key, item in value.items()}
        case list():
            return [_plain(item, (*path, index), reading) for index, item in enumerate(value)]
        case str() | bool() | int() | float():
            reading.check_scalar(value, mark, path)
            return value
        case _:  # a date, a time or both
            return value.isoformat()


def read_toml(text: str, reading: Reading) -> Any:
    """The plain value of a TOML document. Marks and mistakes go to the reading."""
    import tomllib

    scan = _TomlScan(text, reading)
    with suppress(_LostError):
        scan.document()
    reading.settle()
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _REPORTED.search(message)
        mark = reading.at(*scan.mark_of(len(text)))
        if found is not None and found[1] is not None:
            mark = reading.at(int(found[1]), int(found[2]))
        message = _REPORTED.sub("", message)
        reading.refuse(mark, (), f"is not TOML: {shortened(message, 300)}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; what the scan could not follow
        reading.refuse(reading.marks[()], (), f"is not TOML that can be read: {shortened(str(error), 300)}")
    reading.nodes = 0
    return _plain(value, (), reading)
