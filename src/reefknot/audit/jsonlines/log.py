"""
`JsonLinesLog`: the audit log over JSON-lines files.

File work is done in a thread of its own, everything else in the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import TypeVar

from reefknot.audit.jsonlines.writer import Fsync, LineWriter, LogSnapshot, files_of, lines_of, opening_head, translated
from reefknot.audit.model.chain import (
    Head,
    LogLine,
    Mismatch,
    RetentionInForce,
    index_of,
    read_line,
    time_of,
    verify_lines,
)
from reefknot.audit.port import EVERYTHING, AuditEntry, AuditQuery, KeptEntry
from reefknot.core.checks import choice
from reefknot.core.clock import Clock
from reefknot.errors import ParameterError, StoreUnavailableError
from reefknot.runtime.changes import Waiters
from reefknot.runtime.forks import FORKS, opened_before_fork

LARGEST_FILE = 64 << 20
SMALLEST_LIMIT = 4096
R = TypeVar("R")


class JsonLinesLog:
    """An audit log in files, opened with `await JsonLinesLog.open(…)`."""

    def __init__(self, writer: LineWriter, pool: ThreadPoolExecutor | None) -> None:
        self._writer = writer
        self._pool = pool
        self._waiters = Waiters()
        self._closed = False
        self._generation = FORKS.generation

    @classmethod
    async def open(
        cls,
        path: str | PathLike[str],
        clock: Clock,
        *,
        largest: int = LARGEST_FILE,
        keep: int | None = None,
        fsync: Fsync | str = Fsync.ALWAYS,
        inline: bool = False,
    ) -> "JsonLinesLog":
        """
        Open or create a log as its one writer.

        `largest` is how many bytes a file may have before the next one begins (a batch is never split), `keep` how many
        files there may be (None: any number). `inline` works without a thread, for virtual time.
        """
        if largest < SMALLEST_LIMIT:
            raise ParameterError("largest", largest, f"a number of bytes, {SMALLEST_LIMIT} or more")
        if keep is not None and keep < 1:
            raise ParameterError("keep", keep, "a number of files, 1 or more, or None")
        writer = LineWriter(
            Path(path),
            lambda: int(clock.wall() * 1000),
            largest=largest,
            keep=keep,
            fsync=choice("fsync", fsync, Fsync),
        )
        log = cls(writer, None if inline else ThreadPoolExecutor(1, thread_name_prefix="reefknot-lines"))
        try:
            await log._run(writer.open)
        except BaseException:
            await log.close()
            raise
        return log

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        head = await self._run(lambda: self._writer.append(entries))
        self._waiters.wake_all()
        return head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        return asyncio.ensure_future(self.append(entries))

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        return await self._run(lambda: _page(files_of(self._writer.path), query))

    async def head(self) -> Head:
        return await self._run(lambda: self._writer.head)

    async def verify(
        self,
        head: Head | None = None,
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Mismatch]:
        """Verify the chain, in another thread: appending goes on while a long log is read."""
        snapshot = await self._run(lambda: LogSnapshot(files_of(self._writer.path), self._writer.head))
        walk = partial(_verified, snapshot, head, in_force, progress)
        return walk() if self._pool is None else await asyncio.to_thread(walk)

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        gone = await self._run(lambda: self._writer.trim(before, rule))
        self._waiters.wake_all()
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        head = await self._waiters.watch(
            self.head, "", pause=lambda head: inf if head.sequence <= after else 0.0, timeout=timeout
        )
        return head.sequence > after

    async def close(self) -> None:
        """Close the file and release its lock. A second call does nothing."""
        if self._closed or self._generation != FORKS.generation:  # in a fork it is the parent's
            return
        await self._run(self._writer.close)
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._waiters.wake_all()

    async def _run(self, work: Callable[[], R]) -> R:
        if self._generation != FORKS.generation:
            raise opened_before_fork(f"jsonlines:{self._writer.path}")
        if self._closed:
            raise StoreUnavailableError(f"jsonlines:{self._writer.path}", "it is closed", "open it again")
        try:
            if self._pool is None:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except OSError as error:
            raise translated(error, self._writer.path) from error


def _verified(
    snapshot: LogSnapshot,
    head: Head | None,
    in_force: RetentionInForce | None,
    progress: Callable[[int], None] | None,
) -> list[Mismatch]:
    with snapshot:
        found = verify_lines(snapshot.lines(progress), snapshot.head, in_force=in_force)
        if head is not None and head != snapshot.head:
            found += [one for one in verify_lines(snapshot.lines(), head) if one not in found]
    return found


def _page(files: list[Path], query: AuditQuery) -> list[KeptEntry]:
    """Events that meet the query, read from the first file that can hold one."""
    first = 0
    for number, file in enumerate(files):
        if opening_head(file).sequence <= query.after:
            first = number
    found: deque[KeptEntry] = deque(maxlen=query.limit)
    for text in lines_of(files[first:]):
        if len(found) >= query.limit and not query.newest_first:
            break
        line = read_line(text)
        if isinstance(line, LogLine) and query.after < line.sequence < (query.before or inf):
            entry = _entry(line)
            if query.matches(entry):
                found.append(KeptEntry(line.sequence, line.hash, entry))
    return list(reversed(found) if query.newest_first else found)


def _entry(line: LogLine) -> AuditEntry:
    filed = line.filed or index_of(line.body)
    at = time_of(line)
    return AuditEntry(
        line.body, filed.event_type, 0 if at is None else at, filed.correlation_id, filed.trace_id, filed.work_id
    )
