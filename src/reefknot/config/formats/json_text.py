"""
JSON, with the position of every key.

The standard reader forgets positions and accepts NaN and repeated keys, so the walk is ours and only the decoding of
one string is its. Nothing beyond JSON is accepted: no comments, no trailing commas, no single quotes.
"""

import re
from typing import Any, NoReturn

from reefknot.config.formats.scalars import LONGEST_NUMBER
from reefknot.config.limits import LineIndex, Reading
from reefknot.config.positions import Mark, Path

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

    def refuse(self, path: Path, expected: str) -> NoReturn:
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        self.reading.refuse(self.mark(), path, f"is not JSON: {found} where {expected} is expected")

    def next(self) -> str:
        """The next character that is not blank, '' at the end."""
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def take(self, char: str, path: Path, expected: str) -> None:
        if self.next() != char:
            self.refuse(path, expected)
        self.at += 1

    def value(self, path: Path, level: int) -> Any:
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

    def object(self, path: Path, level: int) -> dict[str, Any]:
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

    def array(self, path: Path, level: int) -> list[Any]:
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

    def string(self, path: Path) -> str:
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

    def bare(self, path: Path) -> int | float | bool | None:
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

    def refuse_word(self, word: re.Match[str] | None, path: Path) -> NoReturn:
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
