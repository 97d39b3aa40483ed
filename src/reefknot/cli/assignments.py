"""
A file of assignments, one per line, read as it is needed.

An unusable line becomes an `InvalidLine` with its number and never ends the reading. Missing ids are generated, or made
from the file's content and the line's number, so that the same file run again means the same work. No more of a line is
kept in memory than an assignment may have, and no more ids than `MOST_IDS`.
"""

from __future__ import annotations

import asyncio
import os
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

from reefknot.cli.app import CommandError, Exit
from reefknot.core.messages import LARGEST_MESSAGE, ExecAssignment, InvalidMessage, read_assignment
from reefknot.runtime.seeds import new_id

STDIN = "-"
LONGEST_LINE = 64 * LARGEST_MESSAGE
"""Bytes of a line after which a pipe is not read further: an endless line, such as /dev/zero, has no next one."""
MOST_IDS = 100_000
_POLL_S = 0.02
_PUT_S = 0.5


class InvalidLine(Struct, frozen=True):
    """A line that is no assignment, and why."""

    line: int
    message: str


class AssignmentLine(Struct, frozen=True):
    """An assignment, and the number of its line."""

    line: int
    assignment: ExecAssignment


NumberedText = tuple[int, bytes]


def require_file(name: str) -> None:
    """Refuse an unreadable file, or a stdin that is closed, before anything is started."""
    if name == STDIN:
        _require_stdin()
        return
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            raise CommandError(f"{name}: is a folder; accepted: a file with one assignment per line, or - for stdin")
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _may_end(name)):
            raise CommandError(f"{name}: is a device; accepted: a file with one assignment per line, or - for stdin")
        if stat.S_ISREG(mode):
            with open(name, "rb"):
                return
    except FileNotFoundError:
        raise CommandError(f"{name}: there is no such file", Exit.NO_INPUT) from None
    except PermissionError:
        raise CommandError(f"{name}: cannot be read: permission denied", Exit.FORBIDDEN) from None
    except ValueError:
        raise CommandError(f"{name!r}: is not a possible file name") from None


def _require_stdin() -> None:
    """Refuse a stdin that was closed before the start, or is open for writing only."""
    try:
        flags = os.O_WRONLY if sys.stdin is None else fcntl(sys.stdin.fileno(), F_GETFL)
    except UnsupportedOperation:  # a stream in memory has no descriptor
        return
    except (OSError, ValueError):
        flags = os.O_WRONLY
    if flags & os.O_ACCMODE == os.O_WRONLY:
        raise CommandError("-: stdin is closed; accepted: assignments on stdin, one per line, or the name of a file")


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
        return sum(1 for line in _lines(file) if line[1].strip()), digest[:32]


async def assignments(name: str, content: str = "") -> AsyncIterator[AssignmentLine | InvalidLine]:
    """
    Every line that is not empty. An id that was in one of the last `MOST_IDS` lines, for the same tenant, is invalid.

    With the digest of its `content`, ids that the file leaves out are the same whenever it is read.
    """
    seen: dict[str, int] = {}
    async for number, text in _read(name):
        if not text.strip():
            continue
        found = read_line(text, f"{content}-{number}" if content else new_id())
        if isinstance(found, str):
            yield InvalidLine(number, found)
            continue
        earlier = seen.setdefault(found.record_id, number)
        if len(seen) > MOST_IDS:  # an older one is recognised by the store, without its line
            del seen[next(iter(seen))]
        if earlier != number:
            message = f"{found.assignment_id!r} is in line {earlier} already; an id identifies one job"
            yield InvalidLine(number, f"assignment_id: {message}")
            continue
        yield AssignmentLine(number, found)


def read_line(text: bytes, assignment_id: str) -> ExecAssignment | str:
    """The assignment of a line, with this id if it has none; or what is wrong with it."""
    if len(text) > LARGEST_MESSAGE:
        return f"the line is longer than {LARGEST_MESSAGE} bytes"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return 'not an object; accepted: {"job": {"type": …, "payload": {…}}, …}'
    return read_object(value, assignment_id)


def read_object(value: dict[str, Any], assignment_id: str) -> ExecAssignment | str:
    """The assignment that an object describes, with this id if it has none; or what is wrong with it."""
    request_id = new_id() if "assignment_id" in value else assignment_id
    with_ids = {"assignment_id": assignment_id, "request_id": request_id} | value
    found = read_assignment(msgspec.json.encode(with_ids))
    return found.message if isinstance(found, InvalidMessage) else found


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO, *, longest: int | None = None) -> Iterator[NumberedText]:
    """Lines with their numbers; of a line that is too long, one byte more than is accepted. `longest` ends it all."""
    number = 0
    while line := file.readline(LARGEST_MESSAGE + 2):
        number += 1
        rest, size = line, len(line)
        while not rest.endswith(b"\n") and len(rest) == LARGEST_MESSAGE + 2:
            rest = file.readline(LARGEST_MESSAGE + 2)
            size += len(rest)
            if longest is not None and size > longest:
                raise CommandError(
                    f"line {number} has no end within {longest} bytes; accepted: one assignment per line"
                )
        yield number, line.rstrip(b"\r\n")


async def _read(name: str) -> AsyncIterator[NumberedText]:
    if not _is_plain(name):
        async for line in _from_pipe(name):
            yield line
        return
    with open(name, "rb") as file:  # noqa: ASYNC230 - a line of a plain file is there at once
        for line in _lines(file):
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
            for line in _lines(file, longest=LONGEST_LINE):
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
