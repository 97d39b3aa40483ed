"""
The files of one log: their names, the lock of their one writer, and what a crash left behind.

`audit.jsonl` is being written, `audit.jsonl.000000000001` and so on are full; the number is that of the first event the
file had when it was named. A folder entry is made durable before anything relies on it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from msgspec import Struct

from reefknot.core.audit.chain import Head
from reefknot.core.audit.lines import Line, Opening, opening_of, read_line
from reefknot.errors import StoreCorruptError, StoreError, StoreFullError, StoreUnavailableError

LONGEST_LINE = 16 << 20


class Tail(Struct, frozen=True):
    """Where a file ends: the chain there, and how many of its bytes are whole batches."""

    head: Head
    whole: int
    size: int


def files_of(path: Path) -> list[Path]:
    """The files of a log, oldest first, the one being written last."""
    full = [one for one in path.parent.glob(f"{path.name}.*") if one.name.removeprefix(f"{path.name}.").isdigit()]
    return [*sorted(full), *([path] if path.exists() else [])]


def lines_of(files: list[Path]) -> Iterator[bytes]:
    """Every line of these files, each with its line break if it has one."""
    for file in files:
        with file.open("rb") as stream:
            while line := stream.readline(LONGEST_LINE):
                yield line


class Opened:
    """The files of a log as they were at one moment, with its head: what happens to their names changes nothing."""

    def __init__(self, files: list[Path], head: Head) -> None:
        self.head = head
        self._streams: list[tuple[BinaryIO, int]] = []
        for file in files:
            stream = file.open("rb")
            self._streams.append((stream, os.fstat(stream.fileno()).st_size))

    def lines(self, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
        """Every line, from the start."""
        for stream, size in self._streams:
            stream.seek(0)
            while size > 0 and (line := stream.readline(min(LONGEST_LINE, size))):
                size -= len(line)
                if progress is not None:
                    progress(1)
                yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit_info: object) -> None:
        for stream, _ in self._streams:
            stream.close()


def opening_in(file: Path) -> Head:
    """The place in the chain before a file's first event."""
    with file.open("rb") as stream:
        first = read_line(stream.readline(LONGEST_LINE))
    if not isinstance(first, Opening):
        raise StoreCorruptError(f"jsonlines:{file}", "its first line opens no log", "restore it, or move it away")
    return first.head


def tail_of(file: Path) -> Tail:
    """
    Where a file ends.

    A line that cannot be read counts as torn only when no whole batch follows it: damage in the middle is evidence, and
    stays.
    """
    head = opening_in(file)
    whole = position = 0
    for text in lines_of([file]):
        position += len(text)
        found = read_line(text)
        if isinstance(found, Opening):
            whole = position
        elif isinstance(found, Line) and not found.more:
            head, whole = Head(head.chain, found.sequence, found.hash), position
    return Tail(head, whole, position)


def made(path: Path, head: Head, lines: Iterable[bytes] = ()) -> None:
    """A file that opens at `head`, whole or not at all, in place of what was there."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
        stream.write(opening_of(head))
        stream.writelines(lines)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def locked(path: Path) -> int:
    """The lock of the one writer, held until its handle is closed."""
    import fcntl

    handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StoreUnavailableError(
            f"jsonlines:{path}", "another process writes it", "give every process a file of its own"
        ) from error
    return handle


def translated(error: OSError, path: Path, *, unknown: bool = False) -> StoreError:
    """What the system says, in our words and with the way out. `unknown`: the write may or may not have been kept."""
    import errno

    place = f"jsonlines:{path}"
    said = error.strerror or type(error).__name__
    if unknown:
        problem = f"whether the last write was kept is not known ({said})"
        return StoreUnavailableError(place, problem, "check the disk, then open the log again")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(place, "the disk is full", "make room, then try again; nothing of this write was kept")
    return StoreUnavailableError(place, f"it cannot be used ({said})", "check the folder and the rights of this user")
