"""
The ports of documents: the sink that ingestion writes to, and the store that an application reads.

A page and the cursor behind it are kept in one step, or not at all: so no cursor is ever ahead of its documents, and a
sync that was interrupted continues behind the last page. Each write names the position that it continues; a writer that
was overtaken is refused, and so two syncs of one source never interleave.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.ingest.port.connector import Document, KnownItems, Page

TOMBSTONE_DAYS = 30
"""Days for which a deleted document stays in the feed of changes."""


class Position(Struct, frozen=True):
    """The end of what is kept of a source: the cursor, and the number of pages so far."""

    cursor: str = ""
    sequence: int = 0


class DocumentSink(Protocol):
    """Keeps the documents of sources."""

    async def identity(self) -> str:
        """
        The name of the place where the documents are: the same for all sinks over one database, and for no other.

        A source belongs to the place of its first sync, because its cursor is there. Empty: any sink may go on. Behind
        a blank a place that is a file has its path: one that was deleted is no place any more.
        """

    async def position(self, source: str) -> Position:
        """The position of a source; that of a new one is the beginning."""

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        """
        Keep documents, deletions and cursor of a page in one step. Returns the new position.

        A document that takes the location of another one replaces it, unless the other moves in the same page.
        Raises `StalePositionError` when the source is not at `after` any more; then nothing was kept.
        """

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        """Keep documents that were fetched by themselves; the position stays."""

    def known(self, source: str) -> KnownItems:
        """The documents that are kept of a source, for its connector."""

    async def close(self) -> None:
        """Finish writes, then close. A second call does nothing."""


class SearchHit(Struct, frozen=True):
    """A document that was found. `excerpt` has the words between ⟦ and ⟧."""

    source: str
    id: str
    location: str
    title: str
    excerpt: str
    modified_at: int | None = None


class DocumentChange(Struct, frozen=True):
    """
    A document that was kept or deleted (`document` is then None), with the sequence of its latest change.

    `cursor` continues behind this change.
    """

    sequence: int
    source: str
    id: str
    location: str
    changed_at: int
    """Milliseconds UTC."""
    cursor: str
    document: Document | None = None


class DocumentChanges(Struct, frozen=True):
    """Changes in their order, none behind the last, and the cursor that continues behind them."""

    changes: list[DocumentChange]
    cursor: str


class SourceCounts(Struct, frozen=True):
    """The number of documents of a source, of those with a problem, and the time of its last page (ms UTC)."""

    documents: int = 0
    problems: int = 0
    kept_at: int | None = None


class DocumentStore(DocumentSink, Protocol):
    """A sink that can be searched."""

    async def search(self, words: str, *, source: str | None = None, limit: int = 20) -> list[SearchHit]:
        """
        The documents that a search finds, the best ones first; without words the newest ones first.

        The language of `words` is that of `core.searches`. Raises `ParameterError` for a search that is not accepted,
        and `StoreUnavailableError` for one that takes too long.
        """

    async def changes(
        self, *, after: str | int = 0, source: str | None = None, limit: int = 1000, text: bool = True
    ) -> DocumentChanges:
        """
        The changes behind a cursor or sequence, each document once with its latest change; `after=0` is the beginning.

        Nothing is missed, however many processes write: a change is visible only when all before it are. Deletions are
        remembered for `TOMBSTONE_DAYS`. Raises `ChangesLostError` for a cursor from before deletions that are forgotten
        by now, or from another file: such a consumer has to start over. Fewer than `limit` come when they are large;
        without `text`, documents come without their content.
        """

    async def get(self, source: str, document_id: str) -> Document | None:
        """A document with its content."""

    async def page(self, source: str, *, after: str = "", limit: int = 100) -> list[Document]:
        """Documents with their content in the order of their ids; fewer when they are large, none behind the last."""

    async def problems(self, source: str, *, limit: int = 100) -> list[Document]:
        """The documents with a problem, without their content."""

    async def counts(self) -> dict[str, SourceCounts]:
        """The counts of every source that has a position or documents."""

    async def forget(self, source: str, *, documents: bool = False) -> int:
        """
        Forget the cursor, so that the next sync reads everything; with `documents` those too. Returns how many.

        The sequence goes on, so a sync that is under way is refused.
        """
