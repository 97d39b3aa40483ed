"""
`kept_events`: what a running process does for the configuration's `audit` section.

The store keeps every event, together with the change it belongs to. In addition, the policy book is stored, every event
is copied to a file of JSON lines, to the log, or to both, and heads of the chain are written to a second place. A copy
never delays the work: it follows the store, resumes where it stopped, and catches up after an outage. Events that
retention removed before they were copied are counted and logged.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec
from msgspec import Struct

from reefknot import clock
from reefknot.audit.book_recorder import LOOK_AGAIN_S, BookRecorder
from reefknot.audit.journal import AuditSink, Journal, OnFailure, configure
from reefknot.audit.jsonlines import open_audit_log
from reefknot.audit.log_sink import LogSink
from reefknot.audit.model.chain import UNREADABLE, Head, KeptHead
from reefknot.audit.model.event import timestamp
from reefknot.audit.port import AuditLog, AuditQuery, MultiChainLog, end_of
from reefknot.core.redaction import Redactor
from reefknot.errors import AuditUnavailableError, StoreError
from reefknot.policy.model.book import MOST_BOOKS, Book
from reefknot.policy.schema import HeadsFile, JsonLinesFile
from reefknot.policy.settings import Settings
from reefknot.runtime.clocks import in_virtual_loop
from reefknot.runtime.event_loops import first_of
from reefknot.runtime.files import private_opener, whole_file
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import Services
from reefknot.stores.port import Store

PAGE = 500
LONGEST_WAIT_S = 5.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Pauses after successive failures of a sink; the last one repeats."""
CATCH_UP_S = 2.0
"""Seconds that closing waits for a copy to be complete."""
MOST_CURSOR_BYTES = 4096
MOST_HEADS_BYTES = 16 * 1024 * 1024
HEAD_S = 5.0
"""Timeout of writing one head."""
BOOK_S = 2.0
"""Seconds that the start waits for the policy book to be stored; searching a long log for it may take longer."""


class CopyCursor(Struct, frozen=True):
    """The last sequence number of a log that was copied; a log of one chain has the chain's name."""

    chain: str
    sequence: int


def cursor_of(copy: Path) -> Path:
    """The file next to a copy that holds its position."""
    return copy.with_name(f"{copy.name}.copied")


def read_cursor(cursor: Path) -> CopyCursor | None:
    """The position that such a file holds; None when nothing was copied, or it cannot be read."""
    try:
        with cursor.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_CURSOR_BYTES), type=CopyCursor)
    except (OSError, msgspec.DecodeError):
        return None


class Copier:
    """Follows a log and appends every event to one sink. With a `cursor` file it resumes after a restart."""

    def __init__(self, log: AuditLog, sink: AuditSink, *, cursor: Path | None = None, after: int = 0) -> None:
        self._log = log
        self._sink = sink
        self._cursor = cursor
        self._after = after
        self._is_first = True
        self.lost = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Copy until `ending` is set and everything is copied. Every wait is bounded."""
        failures = 0
        await self._read_cursor()
        while True:
            is_last = ending.is_set()  # before the read: what was written during it is copied by another one
            try:
                if await self.step():
                    failures = 0
                elif is_last:
                    return
                else:
                    await first_of(self._log.wait(self._after, LONGEST_WAIT_S), ending.wait())
            except Exception as error:
                if ending.is_set():
                    return
                await _pause(error, failures, ending)
                failures += 1

    async def step(self) -> int:
        """Copy the next page, and return how many events it had."""
        page = await self._log.read(AuditQuery(after=self._after, limit=PAGE))
        if not page:
            return 0
        if not self._is_first:
            await self._report_removed(page[0].sequence)
        await self._sink.append([kept.entry for kept in page])
        self._is_first, self._after = False, page[-1].sequence
        await self._write_cursor()
        return len(page)

    async def _report_removed(self, first: int) -> None:
        """Log that events are missing before this one. In a log with several chains they cannot be counted."""
        if isinstance(self._log, MultiChainLog):
            if self._after < await self._log.removed_up_to():
                logger().error("retention removed events before they were copied")
        elif missed := first - self._after - 1:
            self.lost += missed
            logger().error("retention removed %d events before they were copied, %d in all", missed, self.lost)

    async def _read_cursor(self) -> None:
        cursor = None if self._cursor is None else read_cursor(self._cursor)
        if cursor is None:
            return
        end = await end_of(self._log)
        if cursor.chain == end.log and cursor.sequence <= end.sequence:  # else it is another store
            self._after, self._is_first = cursor.sequence, False

    async def _write_cursor(self) -> None:
        """Save the cursor after the copy: a crash in between copies a page twice, which the events' ids reveal."""
        if self._cursor is not None:
            chain = (await end_of(self._log)).log
            fresh = self._cursor.with_name(f"{self._cursor.name}.new")
            with open(fresh, "wb", opener=private_opener) as file:  # noqa: ASYNC230 - a few bytes
                file.write(msgspec.json.encode(CopyCursor(chain, self._after)))
            os.replace(fresh, self._cursor)


async def _pause(error: Exception, failures: int, ending: asyncio.Event) -> None:
    if failures < len(PAUSES_S):  # further failures are not logged again
        text = error_text(error)
        logger().error("events cannot be copied (%s); the store has them, and they are copied later", text)
    await first_of(asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)]), ending.wait())


class HeadsWriter:
    """
    Writes the head of a log to a file of JSON lines, in a second place, when it has moved.

    Several processes may write one file: each appends whole lines, and leaves out a head that is there. A file that is
    full loses its older half.

    The second place may hang, as a mount does whose server is gone. So the file is only touched in a daemon thread, of
    which there is one at a time: nothing waits for it longer than the time limit, the end of the process included.
    """

    def __init__(self, log: AuditLog, path: Path, wanted: HeadsFile) -> None:
        self._log = log
        self._path = path
        self._wanted = wanted
        self._writing: Future[bool] | None = None

    async def run(self, ending: asyncio.Event) -> None:
        """Write a head now, on schedule, and at the end. A failure is logged and tried again at the next time."""
        while True:
            is_last = ending.is_set()
            if not self._is_writing:  # a write that still hangs was reported
                await self._write_or_report()
            if is_last:
                return
            await first_of(asyncio.sleep(self._wanted.every_seconds), ending.wait())

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _write_or_report(self) -> None:
        try:
            async with asyncio.timeout(HEAD_S) as limit:
                await self.write()
        except asyncio.CancelledError:
            if self._is_writing:
                self._report("not done when the process ended")
            raise
        except Exception as error:
            self._report(f"not done within {HEAD_S:g} s" if limit.expired() else error_text(error))

    def _report(self, problem: str) -> None:
        logger().error("the head of the audit log cannot be written to %s (%s)", self._path, problem)

    async def write(self) -> bool:
        """Append the head, unless the file ends with it. True when a line was written."""
        head = await self._log.head()
        if not head.sequence:
            return False
        kept = KeptHead(head.chain, head.sequence, head.hash, timestamp(clock.wall()))
        if in_virtual_loop():
            return self._append(kept)
        result = Future[bool]()
        result.set_running_or_notify_cancel()  # a time limit ends the wait for it, not the write
        Thread(target=self._append_into, args=(result, kept), name="reefknot-heads", daemon=True).start()
        self._writing = result
        return await asyncio.wrap_future(result)

    def _append_into(self, result: Future[bool], head: KeptHead) -> None:
        try:
            result.set_result(self._append(head))
        except BaseException as error:
            result.set_exception(error)

    def _append(self, head: KeptHead) -> bool:
        lines = self._lines()
        last = _head_in(lines[-1]) if lines else None
        if last is not None and (last.chain, last.sequence) == (head.chain, head.sequence):
            return False
        line = msgspec.json.encode(head, order="sorted") + b"\n"
        is_cut = bool(lines) and not lines[-1].endswith(b"\n")  # by a crash
        if is_cut or len(lines) >= self._wanted.max_heads:
            whole = lines[:-1] if is_cut else lines[-(self._wanted.max_heads // 2) :]
            with whole_file(self._path) as fresh:
                fresh.writelines([*whole, line])
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0, opener=private_opener) as file:
            file.write(line)
            os.fsync(file.fileno())
        return True

    def _lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                return file.readlines(MOST_HEADS_BYTES)
        except FileNotFoundError:
            return []


def _head_in(line: bytes) -> Head | None:
    try:
        return msgspec.json.decode(line, type=KeptHead)
    except UNREADABLE:
        return None


class StoredBooks:
    """The policy books of this process, kept in the audit log: retention may remove what decisions still refer to."""

    def __init__(self, recorder: BookRecorder) -> None:
        self._recorder = recorder
        self._books: dict[str, Book] = {}

    async def add(self, book: Book) -> None:
        """Store a book before the first decision that refers to it. A log that is slow is not waited for."""
        self._books[book.hash] = book
        while len(self._books) > MOST_BOOKS:
            del self._books[next(iter(self._books))]
        with suppress(TimeoutError):
            async with asyncio.timeout(BOOK_S):
                await self._recorder.put(book)

    async def keep(self) -> None:
        """Check periodically that the books are still in the log; runs until cancelled."""
        while True:
            for book in list(self._books.values()):
                with suppress(AuditUnavailableError):  # the journal has logged it
                    await self._recorder.put(book)
            await asyncio.sleep(LOOK_AGAIN_S)


@asynccontextmanager
async def kept_events(store: Store, settings: Settings, *, secrets: tuple[str, ...] = ()) -> AsyncIterator[StoredBooks]:
    """
    Do what `audit` asks for, for as long as the block lasts, and keep books stored. Enter it before journals are made.

    With `fail_closed`, a file that cannot be written is an error here, before any work begins.
    """
    audit = settings.configuration.audit
    configure(store.audit, on_failure=audit.on_failure, most_buffered=audit.max_buffered)
    if audit.jsonl is not None and OnFailure(audit.on_failure) is OnFailure.FAIL_CLOSED:
        async with _open_file(settings.folder / audit.jsonl.path, audit.jsonl):
            pass
    books = StoredBooks(BookRecorder(store.audit, Journal(store.audit, redactor=Redactor(secrets))))
    await books.add(settings.book)
    end = await end_of(store.audit)
    ending = asyncio.Event()
    copying, keeping = Services("copy of events"), Services("policy")
    if audit.jsonl is not None:
        path = settings.folder / audit.jsonl.path
        copying.keep("to a file", partial(_copy_to_file, store.audit, path, audit.jsonl, ending))
    if audit.heads is not None and store.durable:
        writer = HeadsWriter(store.audit, settings.folder / audit.heads.path, audit.heads)
        copying.keep("(heads)", partial(writer.run, ending))
    if audit.log:
        copying.keep("to the log", partial(Copier(store.audit, LogSink(), after=end.sequence).run, ending))
    keeping.keep("book", books.keep)
    try:
        yield books
    finally:
        ending.set()
        await copying.finish(CATCH_UP_S)
        await keeping.stop()


async def _copy_to_file(log: AuditLog, path: Path, wanted: JsonLinesFile, ending: asyncio.Event) -> None:
    """Copy to the file. One process of a host writes it; another one takes over when that process is gone."""
    failures = 0
    while not (ending.is_set() and failures):
        try:
            async with _open_file(path, wanted) as sink:
                await Copier(log, sink, cursor=cursor_of(path)).run(ending)
            return
        except StoreError as error:
            await _pause(error, failures, ending)
            failures += 1


def _open_file(path: Path, wanted: JsonLinesFile) -> AbstractAsyncContextManager[AuditLog]:
    return open_audit_log(str(path), largest=wanted.max_file_bytes, keep=wanted.max_files, fsync=wanted.fsync)
