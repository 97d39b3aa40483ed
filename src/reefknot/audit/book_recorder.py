"""
`BookRecorder`: stores the policy book in the audit log, once, so that decisions can be replayed.

Decisions refer to their book by its hash. The recorder puts the content behind the hash into the same log: the policies
as they were written, nothing else of the configuration, and no secrets. Retention may remove the event; then it is
written again. A book without written policies is the built-in one and is not stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reefknot import clock
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import BookStored
from reefknot.audit.port import AuditQuery
from reefknot.runtime.log import logger, printable

if TYPE_CHECKING:
    from reefknot.audit.journal import AuditSink
    from reefknot.audit.port import AuditLog
    from reefknot.policy.model.book import Book

LOOK_AGAIN_S = 3600.0
PAGE = 100


class BookRecorder:
    """Stores books in one log. In a log that cannot be read back, a book is stored once per recorder."""

    def __init__(self, log: AuditLog | AuditSink | None, journal: Journal) -> None:
        self._log: AuditLog | None = log if hasattr(log, "read") else None  # type: ignore[assignment]
        self._journal = journal
        self._sequences: dict[str, int] = {}
        self._looked_at: dict[str, float] = {}

    async def put(self, book: Book) -> bool:
        """Store the book unless the log has it. True when it was written just now."""
        if book.content is None or not self._may_be_missing(book.hash):
            return False
        # Before the first await: of two callers at once, one looks.
        self._looked_at[book.hash] = clock.now()
        try:
            if await self._is_stored(book.hash):
                return False
        except BaseException as error:
            del self._looked_at[book.hash]
            if not isinstance(error, Exception):
                raise
            logger().warning("cannot search the audit log for the policy book (%s)", printable(str(error), most=300))
            return False
        stored = BookStored(**envelope(wall=clock.wall()), book_hash=book.hash, content=dict(book.content))
        await self._journal.write(stored)
        return True

    def _may_be_missing(self, book_hash: str) -> bool:
        looked_at = self._looked_at.get(book_hash)
        if looked_at is None:
            return True
        return self._log is not None and clock.now() - looked_at >= LOOK_AGAIN_S

    async def _is_stored(self, book_hash: str) -> bool:
        if self._log is None:
            return False
        sequence = self._sequences.get(book_hash)
        if sequence is not None:
            found = await self._log.read(AuditQuery(after=sequence - 1, limit=1))
            if found and found[0].sequence == sequence:
                return True
        after = 0
        while page := await self._log.read(AuditQuery(after=after, event_type="book_stored", limit=PAGE)):
            for kept in page:
                if f'"book_hash":"{book_hash}"'.encode() in kept.entry.body:
                    self._sequences[book_hash] = kept.sequence
                    return True
            after = page[-1].sequence
        return False
