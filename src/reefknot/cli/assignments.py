"""
A file of assignments, a line each, read as it is needed.

A line that cannot be used becomes a `Mistake` with its number; it never ends the reading. What has no ids gets them. No
more of a line is kept than an assignment may have.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from reefknot.audit.journal import event_id
from reefknot.cli.app import CommandError, Exit
from reefknot.core.messages import LARGEST_MESSAGE, ExecAssignment, InvalidMessage, read_assignment

STDIN = "-"
_LOOK_S = 0.02
_PUT_S = 0.5


class Mistake(Struct, frozen=True):
    """A line that is no assignment."""

    line: int
    message: str


class Numbered(Struct, frozen=True):
    """An assignment, and the line it came from."""

    line: int
    assignment: ExecAssignment


Line = tuple[int, bytes]


def existing_file(name: str) -> None:
    """Refuse what cannot be read, before anything is started."""
    if name == STDIN:
        return
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            raise CommandError(f"{name}: is a folder; accepted: a file with one assignment a line, or - for stdin")
        if stat.S_ISREG(mode):
            with open(name, "rb"):
                return
    except FileNotFoundError:
        raise CommandError(f"{name}: there is no such file", Exit.UNREACHABLE) from None
    except PermissionError:
        raise CommandError(f"{name}: may not be read: permission denied", Exit.FORBIDDEN) from None
    except ValueError:
        raise CommandError(f"{name!r}: is not a possible file name") from None


def count_lines(name: str) -> int:
    """How many lines there are, for a bar; 0 when that cannot be known beforehand."""
    if not _is_plain(name):
        return 0
    with open(name, "rb") as file:
        return sum(1 for line in _lines(file) if line[1].strip())


async def assignments(name: str) -> AsyncIterator[Numbered | Mistake]:
    """Every line that is not empty, as it is asked for. An id that came before is a mistake."""
    seen: dict[str, int] = {}
    async for number, text in _read(name):
        if not text.strip():
            continue
        found = read_line(text)
        if isinstance(found, str):
            yield Mistake(number, found)
            continue
        earlier = seen.setdefault(found.assignment_id, number)
        if earlier != number:
            message = f"{found.assignment_id!r} is in line {earlier} already; the same id is the same work"
            yield Mistake(number, f"assignment_id: {message}")
            continue
        yield Numbered(number, found)


def read_line(text: bytes) -> ExecAssignment | str:
    """The assignment of a line, or what is wrong with it."""
    if len(text) > LARGEST_MESSAGE:
        return f"the line is longer than {LARGEST_MESSAGE} bytes"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return 'not an object; accepted: {"job": {"type": …, "payload": {…}}, …}'
    return read_object(value)


def read_object(value: dict[str, Any]) -> ExecAssignment | str:
    """The assignment that this object is, with ids if it has none."""
    named = {"assignment_id": event_id(), "request_id": event_id()} | value
    found = read_assignment(msgspec.json.encode(named))
    return found.message if isinstance(found, InvalidMessage) else found


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO) -> Iterator[Line]:
    """Lines with their numbers; of one that is too long, one byte more than is accepted."""
    number = 0
    while line := file.readline(LARGEST_MESSAGE + 2):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and len(rest) == LARGEST_MESSAGE + 2:
            rest = file.readline(LARGEST_MESSAGE + 2)
        yield number, line.rstrip(b"\r\n")


async def _read(name: str) -> AsyncIterator[Line]:
    if not _is_plain(name):
        async for line in _from_pipe(name):
            yield line
        return
    with open(name, "rb") as file:  # noqa: ASYNC230 - a line of a plain file is there at once
        for line in _lines(file):
            yield line


def _is_plain(name: str) -> bool:
    return name != STDIN and Path(name).is_file()


async def _from_pipe(name: str) -> AsyncIterator[Line]:
    """What comes slowly is read in a thread that nobody has to wait for."""
    batches: Queue[list[Line] | None] = Queue(2)
    stopped = False

    def hand_over(batch: list[Line] | None) -> bool:
        while not stopped:
            with suppress(Full):
                batches.put(batch, timeout=_PUT_S)
                return True
        return False

    def read() -> None:
        file = sys.stdin.buffer if name == STDIN else open(name, "rb")  # noqa: SIM115 - it ends with the process
        with suppress(OSError, ValueError):
            for line in _lines(file):
                if not hand_over([line]):
                    return
        hand_over(None)

    Thread(target=read, daemon=True, name="lines").start()
    try:
        while True:
            try:
                batch = batches.get_nowait()
            except Empty:
                await asyncio.sleep(_LOOK_S)
                continue
            if batch is None:
                return
            for line in batch:
                yield line
    finally:
        stopped = True
