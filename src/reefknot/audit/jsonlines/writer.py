"""
`LineWriter`: the one writer of a log, which appends whole batches, in order, to files of bounded size.

`audit.jsonl` is being written, `audit.jsonl.000000000001` and so on are full; the number is that of the first event the
file had when it was named. A folder entry is made durable before anything relies on it. Half a batch that a crash left
behind is cut off when the log is opened, and an event says so.

A write that fails is taken back. When that fails too, or an fsync does, nothing more is written, because it is unknown
what the disk has kept.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from secrets import token_hex

from msgspec import Struct

from reefknot.audit.model.chain import (
    ANCHOR,
    LOG_FORMAT,
    EventIndex,
    Head,
    LogHeader,
    LogLine,
    Removal,
    anchor_body,
    anchor_in,
    event_line,
    file_rule,
    header_line,
    link,
    read_line,
    time_of,
)
from reefknot.audit.model.event import LogRepaired, encode, timestamp
from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreCorruptError, StoreError, StoreFullError, StoreUnavailableError
from reefknot.runtime.files import private_opener

LONGEST_LINE = 16 << 20


class Fsync(StrEnum):
    """Policy of flushing files to the disk: after every batch, when a file is full, or by the system alone."""

    ALWAYS = "always"
    ROTATE = "rotate"
    NEVER = "never"


class LineWriter:
    """The one writer of a log, used by one thread at a time. `keep` bounds the number of files, None for any."""

    def __init__(self, path: Path, wall_ms: Callable[[], int], *, largest: int, keep: int | None, fsync: Fsync) -> None:
        self.path = path.absolute()
        self.head = Head("")
        self.start = Head("")
        self._wall_ms = wall_ms
        self._largest = largest
        self._keep = keep
        self._fsync = fsync
        self._lock: int | None = None
        self._file: int | None = None
        self._size = 0
        self._format = LOG_FORMAT
        """The format of the file being written; that of an export, when it goes on from one."""

    def open(self) -> None:
        """Take the lock, find the end, and cut off half a batch that a crash left, with an event that says so."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = acquire_lock(self.path)
        self.path.with_name(f"{self.path.name}.new").unlink(missing_ok=True)
        files = files_of(self.path)
        if not files:
            write_file(self.path, Head(token_hex(8)))
        elif files[-1] != self.path:  # a crash came between two files
            write_file(self.path, end_of(files[-1]).head)
        torn = self._open_file()
        self.start = opening_head(files_of(self.path)[0])
        if torn:
            now = self._wall_ms()
            event = LogRepaired(timestamp=timestamp(now / 1000), removed_bytes=torn)
            self._append_body(encode(event), event.event_type, now)

    def _open_file(self) -> int:
        end = end_of(self.path)
        self._file = private_opener(str(self.path), os.O_WRONLY | os.O_APPEND)
        if end.whole < end.size:
            os.ftruncate(self._file, end.whole)
            os.fsync(self._file)
        self.head, self._size, self._format = end.head, end.whole, header_of(self.path).format
        return end.size - end.whole

    def close(self) -> None:
        for handle in (self._file, self._lock):
            if handle is not None:
                os.close(handle)
        self._file = self._lock = None

    def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Append these events, all or none. Returns the head of the chain."""
        if not entries:
            return self.head
        head, data = self._lines(entries)
        if self._size + len(data) > self._largest and self.head.sequence > opening_head(self.path).sequence:
            self._rotate()
            self._drop_oldest()
            head, data = self._lines(entries)  # an anchor event may have come before them
        self._write(data)
        self.head = head
        return head

    def _lines(self, entries: Sequence[AuditEntry]) -> tuple[Head, bytes]:
        head, lines = self.head, []
        for more, entry in zip(range(len(entries) - 1, -1, -1), entries, strict=True):
            head, _ = link(head, entry.body)
            filed = EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)
            lines.append(event_line(head, entry.body, at=entry.at, filed=filed, more=more, form=self._format))
        return head, b"".join(lines)

    def _write(self, data: bytes) -> None:
        file = self._usable()
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        except OSError as error:
            try:
                os.ftruncate(file, self._size)
            except OSError:
                self._give_up()
                raise translated(error, self.path, unknown=True) from error
            raise translated(error, self.path) from error
        if self._fsync is Fsync.ALWAYS:
            self._flush(file)
        self._size += len(data)

    def _flush(self, file: int) -> None:
        try:
            os.fsync(file)
        except OSError as error:  # the system may have dropped the pages: a second fsync proves nothing
            self._give_up()
            raise translated(error, self.path, unknown=True) from error

    def _usable(self) -> int:
        if self._file is None:
            raise StoreUnavailableError(f"jsonlines:{self.path}", "it is closed, or was given up", "open it again")
        return self._file

    def _give_up(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
        self._file = None

    def _rotate(self) -> None:
        file = self._usable()
        if self._fsync is not Fsync.NEVER:
            self._flush(file)
        try:
            first = opening_head(self.path).sequence + 1
            os.rename(self.path, self.path.with_name(f"{self.path.name}.{first:012d}"))
            self._give_up()
            write_file(self.path, self.head)
            self._open_file()
        except OSError as error:
            self._give_up()
            raise translated(error, self.path, unknown=True) from error

    def _drop_oldest(self) -> None:
        """Remove the oldest files beyond the bound, each after its anchor event was written."""
        if self._keep is not None:
            for file in files_of(self.path)[: -self._keep]:
                self._drop(file, file_rule(self._keep))

    def _drop(self, file: Path, rule: str) -> None:
        anchor = end_of(file).head
        self._anchor(anchor, self._removal(file, anchor, rule))
        file.unlink()
        sync_folder(self.path.parent)
        self.start = anchor

    def _removal(self, file: Path, anchor: Head, rule: str) -> Removal:
        """Removal of everything up to `anchor`, which is in this file. One that ends in an anchor does not show it."""
        previous, last = opening_head(file).hash, b""
        for text in lines_of([file]):
            line = read_line(text)
            if isinstance(line, LogLine):
                if line.sequence == anchor.sequence:
                    last = line.body
                    break
                previous = line.hash
        return Removal(rule, anchor.sequence - self.start.sequence, previous, b"" if anchor_in(last) else last)

    def _anchor(self, anchor: Head, removal: Removal) -> None:
        now = self._wall_ms()
        self._append_body(anchor_body(anchor, now, removal), ANCHOR, now)
        if self._fsync is not Fsync.NEVER:
            self._flush(self._usable())

    def _append_body(self, body: bytes, event_type: str, now: int) -> None:
        head, data = self._lines([AuditEntry(body, event_type, now)])
        self._write(data)
        self.head = head

    def trim(self, before: int, rule: str) -> int:
        """Remove events before this time (ms UTC) from the start. Whole files go first; the next is rewritten."""
        gone, anchor, rewritten = self._old(before)
        files = files_of(self.path)
        for file in files[: files.index(rewritten)]:
            self._drop(file, rule)
        if anchor != opening_head(rewritten):
            self._anchor(anchor, self._removal(rewritten, anchor, rule))
            form = header_of(rewritten).format
            write_file(rewritten, anchor, _after(rewritten, anchor.sequence), form=form)
            self.start = anchor
            if rewritten == self.path:
                self._give_up()
                self._open_file()
        return gone

    def _old(self, before: int) -> tuple[int, Head, Path]:
        """Number of events that are too old, the last of them, and the file with the first event that stays."""
        gone, anchor = 0, self.start
        files = files_of(self.path)
        for file in files:
            for text in lines_of([file]):
                line = read_line(text)
                if not isinstance(line, LogLine):
                    continue
                at = time_of(line)
                if at is None or at >= before:
                    return gone, anchor, file
                gone, anchor = gone + 1, Head(anchor.chain, line.sequence, line.hash)
        return gone, anchor, files[-1]


class FileEnd(Struct, frozen=True):
    """The end of a file: the head of its chain, and how many of its bytes are whole batches."""

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


class LogSnapshot(ExitStack):
    """The files of a log, held open, and its head, both as of one moment: rotation and removal change nothing."""

    def __init__(self, files: list[Path], head: Head) -> None:
        super().__init__()
        self.head = head
        self._streams = [self.enter_context(file.open("rb")) for file in files]
        self._sizes = [os.fstat(stream.fileno()).st_size for stream in self._streams]

    def lines(self, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
        """Every line of the snapshot, from the start."""
        for stream, size in zip(self._streams, self._sizes, strict=True):
            stream.seek(0)
            while size > 0 and (line := stream.readline(min(LONGEST_LINE, size))):
                size -= len(line)
                if progress is not None:
                    progress(1)
                yield line


def opening_head(file: Path) -> Head:
    """The head of the chain before a file's first event."""
    return header_of(file).head


def header_of(file: Path) -> LogHeader:
    """The first line of a file."""
    with file.open("rb") as stream:
        first = read_line(stream.readline(LONGEST_LINE))
    if not isinstance(first, LogHeader):
        raise StoreCorruptError(f"jsonlines:{file}", "its first line opens no log", "restore it, or move it away")
    return first


def end_of(file: Path) -> FileEnd:
    """
    The end of a file.

    An unreadable line counts as torn only when no whole batch follows: damage in the middle is evidence, and stays.
    """
    head = opening_head(file)
    whole = position = 0
    for text in lines_of([file]):
        position += len(text)
        found = read_line(text)
        if isinstance(found, LogHeader):
            whole = position
        elif isinstance(found, LogLine) and not found.more:
            head, whole = Head(head.chain, found.sequence, found.hash), position
    return FileEnd(head, whole, position)


def write_file(path: Path, head: Head, lines: Iterable[bytes] = (), *, form: int = LOG_FORMAT) -> None:
    """Write a file that opens at `head`, whole or not at all, in place of the one that is there."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb", opener=private_opener) as stream:
        stream.write(header_line(head, form))
        stream.writelines(lines)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def acquire_lock(path: Path) -> int:
    """The lock of the one writer, held until its handle is closed."""
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
    """The error as one of reefknot's, with what to do. `unknown`: the write may or may not have been kept."""
    store = f"jsonlines:{path}"
    reason = error.strerror or type(error).__name__
    if unknown:
        problem = f"whether the last write was kept is not known ({reason})"
        return StoreUnavailableError(store, problem, "check the disk, then open the log again")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(store, "the disk is full", "make room, then try again; nothing of this write was kept")
    return StoreUnavailableError(store, f"it cannot be used ({reason})", "check the folder and the rights of this user")


def _after(file: Path, sequence: int) -> Iterator[bytes]:
    """The lines after this event; unreadable ones between them stay."""
    keeping = False
    for text in lines_of([file]):
        line = read_line(text)
        if isinstance(line, LogHeader) or (isinstance(line, LogLine) and line.sequence <= sequence):
            continue
        keeping = keeping or isinstance(line, LogLine)
        if keeping:
            yield text
