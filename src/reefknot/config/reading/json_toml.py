"""
JSON, with the position of every key.

The standard reader forgets positions and accepts NaN and repeated keys, so the walk is ours and only the decoding of
one string is its. Nothing beyond JSON is accepted: no comments, no trailing commas, no single quotes.

TOML, read by the standard library, with positions of our own.

The scan over the text finds where keys stand and holds the limits before the real reader is let at it. It is lenient:
what it does not understand it leaves to the reader, whose errors are better than a guess. Dates become text.
"""

import re
from contextlib import suppress
from typing import Any, NoReturn

from reefknot.config.reading.session import KeyPath, LineIndex, Mark, Reading, shortened
from reefknot.config.reading.yaml import LONGEST_NUMBER

_BLANK = re.compile(r"[ \t\r\n]*+")
_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][-+]?[0-9]++)?(?![0-9A-Za-z_.+-])")
_WORD = re.compile(r"[-+A-Za-z0-9_.]++")
_WORDS = {"true": True, "false": False, "null": None}


class _JsonText:
    """One text and how far it has been read."""

    __slots__ = ("at", "mark_of", "reading", "text")

    def __init__(self, text: str, reading: Reading) -> None:
        self.text = text
        self.reading = reading
        self.at = 0
        self.mark_of = LineIndex(text)

    def mark(self) -> Mark:
        return self.reading.at(*self.mark_of(self.at))

    def refuse(self, path: KeyPath, expected: str) -> NoReturn:
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        self.reading.refuse(self.mark(), path, f"is not JSON: {found} where {expected} is expected")

    def next(self) -> str:
        """The next character that is not blank, '' at the end."""
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def take(self, char: str, path: KeyPath, expected: str) -> None:
        if self.next() != char:
            self.refuse(path, expected)
        self.at += 1

    def value(self, path: KeyPath, level: int) -> Any:
        char = self.next()
        mark = self.mark()
        self.reading.count_node(mark, path)
        if char == "{":
            self.reading.check_level(level, mark)
            return self.object(path, level)
        if char == "[":
            self.reading.check_level(level, mark)
            return self.array(path, level)
        value = self.string(path) if char == '"' else self.bare(path)
        self.reading.check_scalar(value, mark, path)
        return value

    def object(self, path: KeyPath, level: int) -> dict[str, Any]:
        built: dict[str, Any] = {}
        self.at += 1
        if self.next() == "}":
            self.at += 1
            return built
        while True:
            if self.next() != '"':
                self.refuse(path, "a key in double quotes")
            mark = self.mark()
            key = self.string(path)
            self.reading.check_scalar(key, mark, path)
            self.take(":", (*path, key), "a colon")
            inner = (*path, key)
            if key in built:
                first = self.reading.marks[inner]
                self.reading.wrong(mark, inner, f"the key is already given at line {first.line}, column {first.column}")
            else:
                self.reading.marks[inner] = mark
            value = self.value(inner, level + 1)
            built.setdefault(key, value)
            if self.next() == "}":
                self.at += 1
                return built
            self.take(",", path, "a comma or the closing brace")

    def array(self, path: KeyPath, level: int) -> list[Any]:
        built: list[Any] = []
        self.at += 1
        if self.next() == "]":
            self.at += 1
            return built
        while True:
            inner = (*path, len(built))
            self.next()
            self.reading.marks[inner] = self.mark()
            built.append(self.value(inner, level + 1))
            if self.next() == "]":
                self.at += 1
                return built
            self.take(",", path, "a comma or the closing bracket")

    def string(self, path: KeyPath) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:
            self.reading.refuse(self.mark(), path, "is not JSON: the text that begins here has no end on its line")
        if "\\" not in found[0]:
            self.at = found.end()
            return found[0][1:-1]

        import json

        try:
            text: str = json.loads(found[0])
        except json.JSONDecodeError as error:
            self.at += error.pos
            self.reading.refuse(self.mark(), path, f"is not JSON: {error.msg.lower()}")
        self.at = found.end()
        return text

    def bare(self, path: KeyPath) -> int | float | bool | None:
        """A number, true, false or null."""
        if found := _NUMBER.match(self.text, self.at):
            if len(found[0]) > LONGEST_NUMBER:
                self.reading.refuse(self.mark(), path, f"a number has at most {LONGEST_NUMBER} digits")
            self.at = found.end()
            is_whole = found[1] is None and found[2] is None
            return int(found[0]) if is_whole else float(found[0])
        word = _WORD.match(self.text, self.at)
        if word is None or word[0] not in _WORDS:
            self.refuse_word(word, path)
        self.at = word.end()
        return _WORDS[word[0]]

    def refuse_word(self, word: re.Match[str] | None, path: KeyPath) -> NoReturn:
        if word is not None and word[0].lstrip("-+") in ("NaN", "Infinity"):
            self.reading.refuse(self.mark(), path, "a number is finite: neither infinite nor NaN")
        # The word itself is not shown: it may be a secret without its quotes.
        self.refuse(path, "a value (text stands in double quotes)")


def read_json(text: str, reading: Reading) -> Any:
    """The plain value of a JSON document, an empty mapping when it says nothing."""
    document = _JsonText(text, reading)
    if not document.next():
        return {}
    reading.marks[()] = document.mark()
    value = document.value((), 1)
    if document.next():
        document.refuse((), "the end of the document")
    return value


_TOML_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_SPACE = re.compile(r"[ \t]*+")
_KEY = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'""")
_LONG_STRING = re.compile(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+""""{0,2}'''
    r"""|'''(?:[^']++|'(?!''))*+''''{0,2}""",
    re.DOTALL,
)
_TOML_STRING = re.compile(r""""(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'""")
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
        self.arrays: dict[KeyPath, int] = {}
        """The index of the newest table in each array of tables."""
        self.given: dict[KeyPath, Mark] = {}
        self.tables: dict[KeyPath, Mark] = {}

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
        table: KeyPath = ()
        while char := self.skip(_TOML_BLANK):
            if char == "[":
                table = self.header()
            else:
                self.pair(table)

    def header(self) -> KeyPath:
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

    def newest(self, path: KeyPath) -> KeyPath:
        return (*path, self.arrays[path]) if path in self.arrays else path

    def enter(self, path: KeyPath, keys: list[tuple[str, Mark]]) -> KeyPath:
        """Go down the keys, marking what is named here for the first time."""
        for name, mark in keys:
            path = (*path, name)
            if path not in self.reading.marks:
                self.reading.marks[path] = mark
                self.reading.count_node(mark, path)
            path = self.newest(path)
        return path

    def once(self, path: KeyPath, mark: Mark, seen: dict[KeyPath, Mark]) -> None:
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

    def pair(self, table: KeyPath) -> None:
        keys = self.keys()
        path = (*self.enter(table, keys[:-1]), keys[-1][0])
        mark = keys[-1][1]
        self.reading.check_level(len(path), mark)
        self.once(path, mark, self.given)
        self.reading.marks.setdefault(path, mark)
        self.take("=")
        self.value(path)

    def value(self, path: KeyPath) -> None:
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
                or _TOML_STRING.match(self.text, self.at)
                or _BARE.match(self.text, self.at)
            )
            if token is None:
                raise _LostError
            self.at = token.end()

    def array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while self.skip(_TOML_BLANK) not in ("]", ""):
            self.reading.marks[*path, index] = self.mark()
            self.value((*path, index))
            index += 1
            if self.skip(_TOML_BLANK) == ",":
                self.at += 1
        self.take("]")

    def inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while self.skip(_TOML_BLANK) not in ("}", ""):
            self.pair(path)
            if self.skip(_TOML_BLANK) == ",":
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


def _plain(value: Any, path: KeyPath, reading: Reading) -> Any:
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
