"""
The policy book on record.

Decisions refer to their book by its hash. What the hash stands for is put into the same log, once: the policies as they
were written, nothing else of the configuration, and no secrets. Retention may let go of it; then it is written again.
A book in which nothing was written is the built-in one, and is not on record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reefknot import clock as timing
from reefknot.audit.journal import Journal, event_id, now_text
from reefknot.core.audit.event import BookStored
from reefknot.ports.audit_log import AuditQuery
from reefknot.runtime.log import logger, printable

if TYPE_CHECKING:
    from reefknot.core.retry.book import Book

LOOK_AGAIN_S = 3600.0
PAGE = 100


class Shelf:
    """The books of one log. `log` is asked whether a book is there, if it is one that can be."""

    def __init__(self, log: object, journal: Journal) -> None:
        self._log: Any = log if hasattr(log, "read") else None
        self._journal = journal
        self._places: dict[str, int] = {}
        self._looked_at: dict[str, float] = {}

    async def put(self, book: Book) -> bool:
        """See to it that this book is on record. True when it was written just now."""
        if book.content is None or not self._may_be_missing(book.hash):
            return False
        # Before the first await: of two callers at once, one looks.
        self._looked_at[book.hash] = timing.now()
        try:
            if await self._is_there(book.hash):
                return False
        except BaseException as error:
            del self._looked_at[book.hash]
            if not isinstance(error, Exception):
                raise
            logger().warning("the policy book could not be looked for (%s)", printable(str(error), most=300))
            return False
        stored = BookStored(timestamp=now_text(), event_id=event_id(), book_hash=book.hash, content=dict(book.content))
        await self._journal.write(stored)
        return True

    def _may_be_missing(self, hashed: str) -> bool:
        """Unless it was looked for lately; where nothing can be read back, it is written once."""
        looked_at = self._looked_at.get(hashed)
        if looked_at is None:
            return True
        return self._log is not None and timing.now() - looked_at >= LOOK_AGAIN_S

    async def _is_there(self, hashed: str) -> bool:
        if self._log is None:
            return False
        place = self._places.get(hashed)
        if place is not None:
            kept = await self._log.read(AuditQuery(after=place - 1, limit=1))
            if kept and kept[0].sequence == place:
                return True
        after = 0
        while page := await self._log.read(AuditQuery(after=after, event_type="book_stored", limit=PAGE)):
            for kept in page:
                if f'"book_hash":"{hashed}"'.encode() in kept.entry.body:
                    self._places[hashed] = kept.sequence
                    return True
            after = page[-1].sequence
        return False
