"""
A file of assignments, one per line, read as it is needed.

Pretty-printed JSON is read too: objects over several lines, and an array of objects. An unusable line becomes an
`InvalidLine` with its number and never ends the reading; a field that no assignment has, and a key that stands twice,
make a line unusable. Missing ids are generated, or made from the file's content and the line's number, so that the same
file run again means the same work. No more of an assignment is kept in memory than it may have, and no more ids than
`MOST_IDS`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from fcntl import F_GETFL, fcntl
from hashlib import file_digest
from io import UnsupportedOperation
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from reefknot.console.cli.app import CommandError, Exit, UnknownOptionError
from reefknot.core.redaction import Redactor
from reefknot.queue.model.message_schema import UNKNOWN_FIELD, written_assignment
from reefknot.queue.model.messages import LARGEST_MESSAGE, ExecAssignment, InvalidMessage
from reefknot.runtime.seeds import new_id

STDIN = "-"
LONGEST_LINE = 64 * LARGEST_MESSAGE
"""Bytes of a line after which a pipe is not read further: an endless line, such as /dev/zero, has no next one."""
MOST_IDS = 100_000
_POLL_S = 0.02
_PUT_S = 0.5


class InvalidLine(Struct, frozen=True):
    """A line that is no assignment, and why. `name` is that of a field that may not be there, whatever its value."""

    line: int
    message: str
    name: str = ""

    def text(self, redact: Redactor) -> str:
        """The message without secrets. After a name, no word of the message is taken for the value of a `password`."""
        if not self.name:
            return redact(self.message)
        return f"{redact(self.name)}: {redact(self.message.removeprefix(f'{self.name}: '))}"


class AssignmentLine(Struct, frozen=True):
    """An assignment, and the number of its line."""

    line: int
    assignment: ExecAssignment
    has_id: bool = True
    """Whether the line itself names the assignment's id."""


NumberedText = tuple[int, bytes]
"""The number of a line, and its text; or the first line of an object, and the text of its lines."""


def require_file(name: str, *, flag: str = "", holds: str = "one assignment per line") -> None:
    """Refuse an unreadable file, or a stdin that is closed, before anything is started. `flag` is the one it is of."""
    before = f"{flag}: " if flag else ""
    accepted = f"accepted: a file with {holds}, or - for stdin"
    if name == STDIN:
        if not _stdin_is_open():
            raise CommandError(f"{before or '-: '}stdin is closed; accepted: {holds}, on stdin or in a file")
        return
    if not name:
        raise CommandError(f"{before}the name of the file is empty; {accepted}")
    if name.startswith("-"):
        if flag:
            raise CommandError(f"{before}{name!r} begins like an option; {accepted}; a file of that name is ./{name}")
        raise UnknownOptionError(name)
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            raise CommandError(f"{before}{name}: is a folder; {accepted}")
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _may_end(name)):
            raise CommandError(f"{before}{name}: is a device; {accepted}")
        if stat.S_ISREG(mode):
            with open(name, "rb"):
                return
    except FileNotFoundError:
        raise CommandError(f"{before}{name}: there is no such file", Exit.NO_INPUT) from None
    except PermissionError:
        raise CommandError(f"{before}{name}: cannot be read: permission denied", Exit.FORBIDDEN) from None
    except ValueError:
        raise CommandError(f"{before}{name!r}: is not a possible file name") from None


def _stdin_is_open() -> bool:
    """False for a stdin that was closed before the start, or is open for writing only."""
    try:
        flags = os.O_WRONLY if sys.stdin is None else fcntl(sys.stdin.fileno(), F_GETFL)
    except UnsupportedOperation:  # a stream in memory has no descriptor
        return True
    except (OSError, ValueError):
        flags = os.O_WRONLY
    return flags & os.O_ACCMODE != os.O_WRONLY


def _may_end(name: str) -> bool:
    """Whether a device is a terminal or empty, and not endless."""
    if os.path.samefile(name, os.devnull):
        return True
    with open(name, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as device:
        return device.isatty()


def display_name(name: str) -> str:
    """The file's name in messages."""
    return "<stdin>" if name == STDIN else name


def survey(name: str) -> tuple[int, str]:
    """The number of lines, for a progress bar, and a digest of the content; 0 and empty when they cannot be known."""
    if not _is_plain(name):
        return 0, ""
    with open(name, "rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        file.seek(0)
        return sum(1 for _, text in _texts(_lines(file, name)) if text.strip()), digest[:24]


async def assignments(name: str, content: str = "") -> AsyncIterator[AssignmentLine | InvalidLine]:
    """
    Every assignment. An id that was in one of the last `MOST_IDS` lines, for the same tenant, is invalid.

    With the digest of its `content`, ids that the file leaves out are the same whenever it is read.
    """
    seen: dict[str, int] = {}
    last, beside = 0, 0
    async for number, text in _read(name):
        if not text.strip():
            continue
        beside = beside + 1 if number == last else 0
        last = number
        place = f"{number}.{beside}" if beside else str(number)
        found = read_text(number, text, f"{content}-{place}" if content else new_id())
        if isinstance(found, InvalidLine):
            yield found
            continue
        assignment = found.assignment
        earlier = seen.get(assignment.record_id)
        if earlier is not None:
            message = f"{assignment.assignment_id!r} is in line {earlier} already; an id identifies one job"
            yield InvalidLine(number, f"assignment_id: {message}")
            continue
        seen[assignment.record_id] = number
        if len(seen) > MOST_IDS:  # an older one is recognised by the store, without its line
            del seen[next(iter(seen))]
        yield found


# ---- objects ---------------------------------------------------------------------------------------------------------


def read_text(number: int, text: bytes, assignment_id: str) -> AssignmentLine | InvalidLine:
    """The assignment of a text that begins in this line, with this id if it has none; or what is wrong, and where."""
    if text == _UNCLOSED:
        return InvalidLine(number, "the array is not closed: the file was cut off here, or a ] is missing")
    if len(text) > LARGEST_MESSAGE:
        return InvalidLine(number, f"the assignment is longer than {LARGEST_MESSAGE} bytes")
    try:
        value = msgspec.json.decode(text.decode())
        # Each key has a colon: with as many colons as keys, none was lost.
        repeated = None if text.count(b":") == _number_of_keys(value) else repeated_key(text)
    except UnicodeDecodeError as error:
        below, column = _place(text, error.start)
        message = f"byte {column} of the line, 0x{text[error.start]:02x}, is not UTF-8; save the file as UTF-8"
        return InvalidLine(number + below, f"{message} (it may be in Latin-1 or Windows-1252)")
    except (msgspec.DecodeError, RecursionError) as error:
        return _malformed(number, text, str(error))
    if not isinstance(value, dict):
        return InvalidLine(number, 'not an object; accepted: {"job": {"type": …, "payload": {…}}, …}')
    if repeated is not None:
        path, below = repeated
        return InvalidLine(number + below, f"{path}: the key stands twice in one object; keep one of them", path)
    found = written_assignment(value, assignment_id, new_id())
    if isinstance(found, InvalidMessage):
        below = next((line for path, line in _keys(text) if path == found.field), 0) if b"\n" in text else 0
        is_unknown = found.message.startswith(f"{found.field}: {UNKNOWN_FIELD}")
        return InvalidLine(number + below, found.message, found.field if is_unknown else "")
    return AssignmentLine(number, found, has_id=found.assignment_id != assignment_id)


def _malformed(number: int, text: bytes, error: str) -> InvalidLine:
    """The refusal of a text that is not JSON, in the line where the reading ended."""
    where = re.search(r"\(byte (\d+)\)", error)
    if where is None or b"\n" not in text:
        return InvalidLine(number, f"not JSON: {error}")
    below, column = _place(text, int(where[1]))
    return InvalidLine(number + below, f"not JSON: {error.replace(where[0], f'(byte {column} of the line)')}")


def _place(text: bytes, offset: int) -> tuple[int, int]:
    """Lines before an offset, and its distance from the beginning of its line."""
    return text.count(b"\n", 0, offset), offset - (text.rfind(b"\n", 0, offset) + 1)


def _number_of_keys(value: Any) -> int:
    """The number of keys at all depths."""
    if isinstance(value, dict):
        return len(value) + sum(map(_number_of_keys, value.values()))
    return sum(map(_number_of_keys, value)) if isinstance(value, list) else 0


def repeated_key(text: bytes) -> tuple[str, int] | None:
    """The path and the line of the first key that its object has already."""

    def checked(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            raise _RepeatedKeyError

    try:
        json.loads(text, object_pairs_hook=checked, parse_int=str, parse_float=str)
    except _RepeatedKeyError:
        seen: set[str] = set()
        for path, line in _keys(text):
            if path in seen:
                return path, line
            seen.add(path)
    return None


class _RepeatedKeyError(Exception):
    """An object has a key twice."""


def _keys(text: bytes) -> Iterator[tuple[str, int]]:
    """The path of every key of a JSON text, such as `job.payload.rows[0].name`, and the lines before it."""
    path: list[str] = []
    index: list[int | None] = []
    """Of each open object None, of each open array the number of its current element."""
    expects_key = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in _OPENING:
            index.append(0 if mark == b"[" else None)
            path.append("[0]" if mark == b"[" else "")
            expects_key = mark == b"{"
        elif mark in _CLOSING:
            index.pop()
            path.pop()
            expects_key = False
        elif mark == b",":
            number = index[-1]
            expects_key = number is None
            if number is not None:
                index[-1] = number + 1
                path[-1] = f"[{number + 1}]"
        elif expects_key:
            expects_key = False
            path[-1] = f".{json.loads(mark)}"
            yield "".join(path).lstrip("."), text.count(b"\n", 0, token.start())


# ---- texts -----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.?)*+(?:"|\Z)|[\[\]{},]', re.DOTALL)
"""A text, or a bracket or comma outside of texts. A text without an end goes to the end: nothing is read twice."""
_UNCLOSED = b"["
"""Stands for the end of an array that was cut off."""
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")
_BREAKS = (b"{", b"[", b",", b":")
"""A line of a pretty-printed object that does not end it ends like this; a line that was cut off rarely does."""


def _texts(lines: Iterator[NumberedText]) -> Iterator[NumberedText]:
    """The text of each assignment: a line, or the lines of an object, or an element of an array."""
    opened: _OpenText | None = None
    number = 0
    for number, line in lines:
        if opened is not None and opened.is_cut_off_by(line):
            yield opened.rest()
            opened = None
        if opened is None:
            bare = line.strip()
            if not bare.startswith(b"[") and not (bare.startswith(b"{") and bare.endswith(_BREAKS)):
                yield number, line
                continue
            opened = _OpenText(is_array=bare.startswith(b"["))
        yield from opened.add(number, line)
        if opened.ended:
            opened = None
    if opened is not None:
        yield opened.rest()
        if opened.is_array:
            yield number, _UNCLOSED


class _OpenText:
    """An object or an array that goes over several lines, while it is read."""

    def __init__(self, *, is_array: bool) -> None:
        self.ended = False
        self.is_array = is_array
        self._depth = 0
        self._first = 0
        self._lines: list[bytes] = []
        self._size = 0

    def add(self, number: int, line: bytes) -> Iterator[NumberedText]:
        """Take one more line. Yields what it completes."""
        at = 0
        for token in _TOKEN.finditer(line):
            if token[0] in _OPENING:
                self._depth += 1
                if self.is_array and self._depth == 1:
                    at = token.end()
            elif token[0] in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    self._keep(number, line[at : token.start()] if self.is_array else line)
                    yield self.rest()
                    if self.is_array:
                        yield number, line[token.end() :]
                    return
            elif token[0] == b"," and self.is_array and self._depth == 1:
                self._keep(number, line[at : token.start()])
                yield self.rest()
                at = token.end()
        self._keep(number, line[at:])

    def is_cut_off_by(self, line: bytes) -> bool:
        """Whether a line is an object by itself, so that the one before it was never completed."""
        return not self.is_array and line.startswith(b'{"') and line.rstrip().endswith(b"}")

    def rest(self) -> NumberedText:
        """The lines that were kept since the last call."""
        taken = self._first, b"\n".join(self._lines)
        self._first, self._lines, self._size = 0, [], 0
        return taken

    def _keep(self, number: int, text: bytes) -> None:
        """Keep a line of the current object, no more than an assignment may have and a byte."""
        if not self._lines and not text.strip():
            return
        self._first = self._first or number
        if self._size <= LARGEST_MESSAGE:
            self._lines.append(text)
            self._size += len(text) + 1


# ---- lines -----------------------------------------------------------------------------------------------------------


_BOM = codecs.BOM_UTF8
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _lines(file: BinaryIO, name: str, *, longest: int | None = None) -> Iterator[NumberedText]:
    """Lines with their numbers; of a line that is too long, one byte more than is accepted. `longest` ends it all."""
    number = 0
    while line := file.readline(LARGEST_MESSAGE + 2):
        number += 1
        if number == 1 and line.startswith(_UTF_16):
            raise CommandError(f"{display_name(name)}: is in UTF-16; accepted: UTF-8; save the file as UTF-8")
        rest, size = line, len(line)
        while not rest.endswith(b"\n") and len(rest) == LARGEST_MESSAGE + 2:
            rest = file.readline(LARGEST_MESSAGE + 2)
            size += len(rest)
            if longest is not None and size > longest:
                raise CommandError(
                    f"line {number} has no end within {longest} bytes; accepted: one assignment per line"
                )
        yield number, line.removeprefix(_BOM).rstrip(b"\r\n")


async def _read(name: str) -> AsyncIterator[NumberedText]:
    if not _is_plain(name):
        async for line in _from_pipe(name):
            yield line
        return
    with open(name, "rb") as file:  # noqa: ASYNC230 - a line of a plain file is there at once
        for line in _texts(_lines(file, name)):
            yield line


def _is_plain(name: str) -> bool:
    return name != STDIN and Path(name).is_file()


async def _from_pipe(name: str) -> AsyncIterator[NumberedText]:
    """Lines of a pipe, read by a daemon thread, so that a blocked read holds nothing up."""
    lines: Queue[NumberedText | CommandError | None] = Queue(2)
    stopped = False

    def enqueue(line: NumberedText | CommandError | None) -> bool:
        while not stopped:
            with suppress(Full):
                lines.put(line, timeout=_PUT_S)
                return True
        return False

    def read() -> None:
        try:
            file = sys.stdin.buffer if name == STDIN else open(name, "rb")  # noqa: SIM115 - it ends with the process
            for line in _texts(_lines(file, name, longest=LONGEST_LINE)):
                if not enqueue(line):
                    return
            enqueue(None)
        except CommandError as error:
            enqueue(error)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            enqueue(CommandError(f"{display_name(name)}: cannot be read: {reason.lower()}", Exit.UNREACHABLE))

    Thread(target=read, daemon=True, name="lines").start()
    try:
        while True:
            try:
                line = lines.get_nowait()
            except Empty:
                await asyncio.sleep(_POLL_S)
                continue
            if line is None:
                return
            if isinstance(line, CommandError):
                raise line
            yield line
    finally:
        stopped = True
