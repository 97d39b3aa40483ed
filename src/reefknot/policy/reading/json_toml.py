"""
JSON and TOML: values by the standard library, positions by one locator.

`json` and `tomllib` forget where a key stands, recurse without a bound, and one of them takes repeated keys. So a
`_Locator` first walks over the text: it marks keys and list items, finds repeated keys and holds the limits. Then the
library makes the values.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

from reefknot.policy.reading.session import LONGEST_NUMBER, KeyPath, LineIndex, Mark, ParseSession, shortened


class _Locator:
    """
    A pass over JSON text that marks its keys and list items. `_TomlLocator` adds what TOML has beyond that.

    It is strict, and `json` reads only what has passed: the library's own errors have no path, stand one character late
    for `01` and `1.`, and differ between versions for a comma too many.
    """

    __slots__ = ("at", "position", "session", "text")

    BLANK: ClassVar = re.compile(r"[ \t\r\n]*+")
    SPACE: ClassVar = BLANK
    """The blank around an assignment."""
    SCALAR: ClassVar = re.compile(
        r"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?|true|false|null|NaN|-?Infinity)"
        r"(?![0-9A-Za-z_.+-])"
    )
    """The library reads NaN and infinity too; they are refused with the other numbers that are not finite."""
    STRING: ClassVar = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"')
    ASSIGNMENT = ":"
    TRAILING_COMMA = False

    def __init__(self, text: str, session: ParseSession) -> None:
        self.text = text
        self.session = session
        self.at = 0
        self.position = LineIndex(text)

    def mark(self) -> Mark:
        return self.session.at(*self.position(self.at))

    def next(self, blank: re.Pattern[str] | None = None) -> str:
        """The next character that is not blank, '' at the end."""
        if found := (blank or self.BLANK).match(self.text, self.at):
            self.at = found.end()
        return self.text[self.at : self.at + 1]

    def take(self, token: str, path: KeyPath, expected: str) -> None:
        if not self.text.startswith(token, self.at):
            self.unexpected(path, expected)
        self.at += len(token)

    def unexpected(self, path: KeyPath, expected: str) -> NoReturn:
        """Refuse what stands here. Of the text only one character is shown: it may be a secret without its quotes."""
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        self.session.refuse(self.mark(), path, f"is not JSON: {found} where {expected} is expected")

    def value(self, path: KeyPath) -> None:
        char = self.next(self.SPACE)
        mark = self.mark()
        self.session.count_node(mark, path)
        if char == "[":
            self.session.check_level(len(path) + 1, mark)
            for index in self.elements("]", path, "a comma or the closing bracket"):
                self.session.marks[*path, index] = self.mark()
                self.value((*path, index))
        elif char == "{":
            self.session.check_level(len(path) + 1, mark)
            given: dict[KeyPath, Mark] = {}
            for _ in self.elements("}", path, "a comma or the closing brace"):
                self.pair(path, given)
        else:
            self.scalar(path, mark)

    def elements(self, closing: str, path: KeyPath, expected: str) -> Iterator[int]:
        """The index of each element between two brackets, while the position is at its beginning."""
        self.at += 1
        index = 0
        while self.next() != closing or (index and not self.TRAILING_COMMA):
            yield index
            index += 1
            if self.next() == closing:
                break
            self.take(",", path, expected)
            self.next()
        self.at += 1

    def pair(self, table: KeyPath, given: dict[KeyPath, Mark]) -> None:
        path, mark = self.key(table)
        self.next(self.SPACE)
        self.take(self.ASSIGNMENT, path, "a colon")
        self.once(path, mark, given)
        self.value(path)

    def once(self, path: KeyPath, mark: Mark, given: dict[KeyPath, Mark]) -> None:
        """Mark a key; note it as a mistake when it is among those given already."""
        self.session.marks.setdefault(path, mark)
        first = given.setdefault(path, mark)
        if first is not mark:
            self.session.repeated(mark, path, first)

    def key(self, table: KeyPath) -> tuple[KeyPath, Mark]:
        if self.next() != '"':
            self.unexpected(table, "a key in double quotes")
        mark = self.mark()
        name = self.string(table)
        self.session.check_scalar(name, mark, table)
        return (*table, name), mark

    def scalar(self, path: KeyPath, mark: Mark) -> None:
        """Pass by a number, a text, true, false or null, and check it while its position is known."""
        if self.text.startswith('"', self.at):
            self.session.check_scalar(self.string(path), mark, path)
            return
        found = self.SCALAR.match(self.text, self.at)
        if found is None:
            self.unexpected(path, "a value (text stands in double quotes)")
        if len(found[0]) > LONGEST_NUMBER:
            self.session.refuse(mark, path, f"a number has at most {LONGEST_NUMBER} digits")
        self.session.check_scalar(json.loads(found[0]), mark, path)
        self.at = found.end()

    def string(self, path: KeyPath) -> str:
        found = self.STRING.match(self.text, self.at)
        if found is None:
            self.session.refuse(self.mark(), path, "is not JSON: the text that begins here has no end on its line")
        if "\\" not in found[0]:
            self.at = found.end()
            return found[0][1:-1]
        try:
            text: str = json.loads(found[0])
        except json.JSONDecodeError as error:
            self.at += error.pos
            self.session.refuse(self.mark(), path, f"is not JSON: {error.msg.lower()}")
        self.at = found.end()
        return text


class _LostError(Exception):
    """The locator met something it does not know; `tomllib` reports the error."""


class _TomlLocator(_Locator):
    """
    A pass over TOML text: headers, dotted keys, comments, and values in brackets as in JSON.

    It is lenient: where it does not understand the text it ends, and `tomllib` says what is wrong, better than a guess.
    """

    __slots__ = ("arrays", "given", "tables")

    BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
    SPACE = re.compile(r"[ \t]*+")
    KEY = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'""")
    SCALAR = re.compile(
        r'''"""(?:[^"\\]++|\\.|"(?!""))*+""""{0,2}'''
        r"""|'''(?:[^']++|'(?!''))*+''''{0,2}"""
        r"""|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'|[^,\]}#\r\n]++""",
        re.DOTALL,
    )
    ASSIGNMENT = "="
    TRAILING_COMMA = True

    def __init__(self, text: str, session: ParseSession) -> None:
        super().__init__(text, session)
        self.arrays: dict[KeyPath, int] = {}
        """The index of the newest table in each array of tables."""
        self.given: dict[KeyPath, Mark] = {}
        self.tables: dict[KeyPath, Mark] = {}

    def unexpected(self, path: KeyPath, expected: str) -> NoReturn:
        raise _LostError

    def document(self) -> None:
        table: KeyPath = ()
        while char := self.next():
            if char == "[":
                table = self.header()
            else:
                self.pair(table, self.given)

    def header(self) -> KeyPath:
        """The path of the table that a header opens."""
        closing = "]]" if self.text.startswith("[[", self.at) else "]"
        self.at += len(closing)
        start = self.mark()
        *parents, (name, mark) = self.names()
        self.take(closing, (), closing)
        path = (*self.enter((), parents), name)
        if closing == "]":
            self.once(path, mark, self.tables)
            self.session.count_node(mark, path)
            return self.newest(path)
        self.session.marks.setdefault(path, mark)
        index = self.arrays[path] = self.arrays.get(path, -1) + 1
        path = (*path, index)
        self.session.marks[path] = start
        self.session.count_node(start, path)
        self.session.check_level(len(path) + 1, start)
        return path

    def key(self, table: KeyPath) -> tuple[KeyPath, Mark]:
        *parents, (name, mark) = self.names()
        path = (*self.enter(table, parents), name)
        self.session.check_level(len(path), mark)
        return path, mark

    def names(self) -> list[tuple[str, Mark]]:
        """The parts of the dotted key that stands here, each with its mark."""
        found: list[tuple[str, Mark]] = []
        while True:
            self.next(self.SPACE)
            token = self.KEY.match(self.text, self.at)
            if token is None:
                raise _LostError
            found.append((_toml_key(token[0]), self.mark()))
            self.session.check_level(len(found), self.mark())
            self.at = token.end()
            if self.next(self.SPACE) != ".":
                return found
            self.at += 1

    def enter(self, path: KeyPath, names: list[tuple[str, Mark]]) -> KeyPath:
        """The path below these names. Tables that are named here for the first time get their marks."""
        for name, mark in names:
            path = (*path, name)
            if path not in self.session.marks:
                self.session.marks[path] = mark
                self.session.count_node(mark, path)
            path = self.newest(path)
        return path

    def newest(self, path: KeyPath) -> KeyPath:
        return (*path, self.arrays[path]) if path in self.arrays else path

    def scalar(self, path: KeyPath, mark: Mark) -> None:
        token = self.SCALAR.match(self.text, self.at)
        if token is None:
            raise _LostError
        self.at = token.end()


def _toml_key(token: str) -> str:
    if token[0] == '"' and "\\" in token:
        try:
            return next(iter(tomllib.loads(f"{token} = 0")))
        except tomllib.TOMLDecodeError:
            raise _LostError from None
    return token[1:-1] if token[0] in "\"'" else token


def read_json(text: str, session: ParseSession) -> Any:
    """The plain value of a JSON document, an empty mapping for blank text."""
    locator = _Locator(text, session)
    if not locator.next():
        return {}
    session.marks[()] = locator.mark()
    locator.value(())
    if locator.next():
        locator.unexpected((), "the end of the document")
    session.settle()
    return json.loads(text)


_REPORTED = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def read_toml(text: str, session: ParseSession) -> Any:
    """The plain value of a TOML document."""
    locator = _TomlLocator(text, session)
    with suppress(_LostError):
        locator.document()
    session.settle()
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _REPORTED.search(message)
        mark = session.at(*locator.position(len(text)))
        if found is not None and found[1] is not None:
            mark = session.at(int(found[1]), int(found[2]))
        session.refuse(mark, (), f"is not TOML: {shortened(_REPORTED.sub('', message), 300)}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; what the locator could not follow
        session.refuse(session.marks[()], (), f"is not TOML that can be read: {shortened(str(error), 300)}")
    session.nodes = 0
    return _plain(value, (), session)


def _plain(value: Any, path: KeyPath, session: ParseSession) -> Any:
    """The value without TOML's own kinds. Limits are held again, for what the locator could not follow."""
    mark = session.marks.get(path) or session.marks[()]
    session.count_node(mark, path)
    if isinstance(value, dict | list):
        session.check_level(len(path) + 1, mark)
    match value:
        case dict():
            for key in value:
                session.check_scalar(key, session.marks.get((*path, key), mark), path)
            return {key: _plain(item, (*path, key), session) for key, item in value.items()}
        case list():
            return [_plain(item, (*path, index), session) for index, item in enumerate(value)]
        case str() | bool() | int() | float():
            session.check_scalar(value, mark, path)
            return value
        case _:  # a date, a time or both
            return value.isoformat()
