"""
The contracts of ingestion: connectors, the sink that ingestion writes to, and the documents that an application reads.

A connector reads one source page by page, and never retries. It is given where the last page ended (the cursor) and
what is kept of its source (`KnownItems`), and returns the next page: new and changed documents, deletions, items that
could not be read, and the cursor behind them. Raise `SourceError` for a failure of the whole source. A failure of one
item goes into `Page.failures`: it becomes a job of its own, and the sync goes on.

A page and the cursor behind it are kept in one step, or not at all: so no cursor is ever ahead of its documents, and a
sync that was interrupted continues behind the last page. Each write names the position that it continues; a writer that
was overtaken is refused, and so two syncs of one source never interleave.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from reefknot.core.checks import suggest
from reefknot.errors import ParameterError

LONGEST_NAME = 16_384
"""Characters of an id, a location, a version or a fingerprint."""
LARGEST_CURSOR = 256 << 10
"""Characters of a cursor: it says where to go on, and holds no content."""
MOST_DOCUMENTS = 1000
"""Documents of a page that are accepted even if fewer were asked for: many sources have pages of a fixed size."""


class Document(Struct, frozen=True):
    """
    A document of a source.

    `id` is its identity within the source and survives moves; `location` is where it is found now. `version` changes
    whenever the document may have changed, and is cheap to learn; `fingerprint` is a hash of the content.
    """

    id: str
    location: str
    version: str
    title: str = ""
    text: str = ""
    fingerprint: str = ""
    media_type: str = "text/plain"
    modified_at: int | None = None
    """Milliseconds UTC."""
    metadata: Mapping[str, Any] = {}
    """Values that JSON can carry; times are kept as ISO 8601."""
    problem: str = ""
    """The part of the document that could not be read, and what to do; empty when all of it was."""


class KnownItem(Struct, frozen=True):
    """A document that is kept, without its content."""

    id: str
    location: str
    version: str
    fingerprint: str = ""


class KnownItems(Protocol):
    """The documents that are kept of one source."""

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        """The items at these locations, by location."""

    async def like(self, fingerprint: str) -> list[KnownItem]:
        """The items with this content, at most 100."""

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        """The next items behind a location in the order of their locations; with a `prefix` only those beneath it."""


class ItemFailure(Struct, frozen=True):
    """An item of a page that could not be read. Its job's id is made of location and version."""

    location: str
    version: str
    error: Exception

    def __post_init__(self) -> None:
        """Let go of the tracebacks of the error and its causes: their frames hold the content of the item."""
        error: BaseException | None = self.error
        while error is not None and error.__traceback__ is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class Page(Struct, frozen=True):
    """A page of a source, and the cursor behind it."""

    cursor: str
    documents: tuple[Document, ...] = ()
    """New and changed documents, one of each id and location."""
    deleted: tuple[str, ...] = ()
    """The ids of documents that the source does not have any more."""
    failures: tuple[ItemFailure, ...] = ()
    is_last: bool = True
    """Whether the source has nothing more for now. The next sync still begins at the cursor."""
    seen: int = 0
    """The number of items that were looked at, unchanged ones included."""
    checked: int = 0
    """The number of kept documents that were looked for, in a search for deletions."""


class FetchRequest(Struct, frozen=True):
    """A request for the next page."""

    cursor: str
    """The cursor of the last page that was kept; empty at the beginning."""
    known: KnownItems
    limit: int = 100
    """The number of documents that a page should have at most."""
    payload: Mapping[str, Any] = {}
    """What the job asks for instead of a sync; empty for a scheduled one."""


class SourceContext(Struct, frozen=True):
    """The context that a connector is made of: the settings of one source, and access to secrets."""

    name: str
    settings: Mapping[str, Any]
    """The keys of the source that are its connector's own."""
    folder: Path
    """The folder that relative paths are beneath."""
    secret: Callable[[str], str]
    """Resolves a reference, `env:NAME` or `file:PATH`. The value is redacted everywhere from then on."""


class Connector(Protocol):
    """
    A connector of one source. Every method may raise `SourceError`.

    A connector that can watch its source has a method `watch`, too: see `WatchingConnector`.
    """

    async def fetch(self, request: FetchRequest) -> Page:
        """The next page."""

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        """The item at this location again, whatever its version. None: the source does not have it any more."""

    async def test(self) -> str:
        """Reach the source, read nothing of it, and tell in one line what was found."""

    async def close(self) -> None:
        """Close connections."""


class WatchingConnector(Connector, Protocol):
    """A connector that notices changes of its source."""

    def watch(self) -> AsyncIterator[None]:
        """Yields after changes, a burst of them once. Ends when the source cannot be watched any more."""


class UnknownSettingError(ParameterError):
    """A source has a setting that its connector does not know. The value is hidden: it may be a misplaced secret."""

    def __init__(self, setting: str, known: Iterable[str]) -> None:
        self.known = tuple(known)
        accepted = f"a setting of this connector: {', '.join(self.known)}{suggest(setting, self.known)}"
        super().__init__(setting[:60], "***", accepted)


ConnectorFactory = Callable[[SourceContext], Connector]
"""Makes the connector of a source. Raises `ParameterError` for a setting that it does not accept, or does not know."""


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
