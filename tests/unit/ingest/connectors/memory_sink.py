"""A document sink in memory, as strict as a real one, and a sync that runs to its last page."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError, StalePositionError
from reefknot.ingest.port import (
    Connector,
    Document,
    DocumentSink,
    FetchRequest,
    KnownItem,
    Page,
    Position,
    SourceContext,
)

MOST_PAGES = 100_000


class MemorySink:
    """Documents by id, and their locations in order. A location has one document: who takes it replaces the other."""

    def __init__(self, *, keeps_text: bool = True) -> None:
        self.documents: dict[str, Document] = {}
        self.place = Position()
        self._keeps_text = keeps_text
        self._ids: dict[str, str] = {}
        self._locations: list[str] = []
        self._alike: dict[str, set[str]] = {}

    async def identity(self) -> str:
        return ""

    async def position(self, source: str) -> Position:
        return self.place

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        if after != self.place:
            raise StalePositionError(source)
        ids = [document.id for document in page.documents]
        assert len(set(ids)) == len(ids), "an id twice in one page"
        assert not set(ids) & set(page.deleted), "a document that is deleted in its own page"
        await self.put(source, page.documents, deleted=page.deleted)
        self.place = Position(page.cursor, after.sequence + 1)
        return self.place

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        for document_id in (*deleted, *(document.id for document in documents)):
            self._remove(document_id)
        for document in documents:
            self._remove(self._ids.get(document.location, ""))
            if not self._keeps_text:
                document = Document(document.id, document.location, document.version, fingerprint=document.fingerprint)
            self.documents[document.id] = document
            self._ids[document.location] = document.id
            insort(self._locations, document.location)
            self._alike.setdefault(document.fingerprint, set()).add(document.id)

    def _remove(self, document_id: str) -> None:
        document = self.documents.pop(document_id, None)
        if document is not None:
            del self._ids[document.location]
            del self._locations[bisect_left(self._locations, document.location)]
            self._alike[document.fingerprint].discard(document_id)

    def known(self, source: str) -> MemorySink:
        return self

    async def close(self) -> None:
        """Nothing is open."""

    @property
    def cursor(self) -> str:
        return self.place.cursor

    # ---- what is known ----

    def _item(self, document_id: str) -> KnownItem:
        document = self.documents[document_id]
        return KnownItem(document.id, document.location, document.version, document.fingerprint)

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        return {place: self._item(self._ids[place]) for place in locations if place in self._ids}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        assert fingerprint, "a document without a fingerprint is like no other"
        return [self._item(one) for one in sorted(self._alike.get(fingerprint, ()))][:100]

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        first = bisect_right(self._locations, location)
        beneath = (place for place in self._locations[first:] if place.startswith(prefix))
        return [self._item(self._ids[place]) for place, _ in zip(beneath, range(limit), strict=False)]

    # ---- for tests ----

    def by_location(self) -> dict[str, Document]:
        return {document.location: document for document in self.documents.values()}

    def ids(self) -> dict[str, str]:
        return dict(self._ids)

    def texts(self) -> dict[str, str]:
        return {location: document.text for location, document in sorted(self.by_location().items())}


class StrictSink(MemorySink):
    """Refuses what the other one mends: two documents in one place, a deletion of what is not kept."""

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        assert set(page.deleted) <= set(self.documents), "a deletion of nothing"
        expected = set(self.documents) | {document.id for document in page.documents}
        position = await super().keep(source, page, after=after)
        assert set(self.documents) == expected - set(page.deleted), "two documents in one place"
        return position


class Synced(list[Page]):
    """The pages of a sync."""

    @property
    def documents(self) -> list[Document]:
        return [document for page in self for document in page.documents]

    @property
    def locations(self) -> list[str]:
        return [document.location for document in self.documents]

    @property
    def deleted(self) -> list[str]:
        return [one for page in self for one in page.deleted]

    @property
    def failures(self) -> dict[str, Exception]:
        return {failure.location: failure.error for page in self for failure in page.failures}

    @property
    def seen(self) -> int:
        return sum(page.seen for page in self)


async def one_page(connector: Connector, sink: DocumentSink, limit: int = 100) -> Page:
    """Fetch and keep a page."""
    position = await sink.position("s")
    page = await connector.fetch(FetchRequest(position.cursor, sink.known("s"), limit))
    assert len(page.documents) <= limit
    await sink.keep("s", page, after=position)
    return page


async def sync(
    connector: Connector, sink: DocumentSink, *, limit: int = 100, between: Callable[[], object] = lambda: None
) -> Synced:
    """Fetch and keep pages until the last one; `between` is called after each page but the last."""
    pages = Synced()
    while len(pages) < MOST_PAGES:
        pages.append(await one_page(connector, sink, limit))
        if pages[-1].is_last:
            return pages
        between()
    raise AssertionError(f"no last page after {MOST_PAGES}")


@contextmanager
def failing(
    words: str | None = None, kind: FailureType = FailureType.PERMANENT
) -> Iterator[pytest.ExceptionInfo[SourceError]]:
    """A failure of the source of this kind, whose text has these words (a regular expression)."""
    with pytest.raises(SourceError, match=words) as caught:
        yield caught
    assert caught.value.failure_type is kind, caught.value


def context(folder: Path, **settings: Any) -> SourceContext:
    """A source of this folder."""
    return SourceContext("s", {"path": os.fspath(folder), **settings}, folder.parent, lambda reference: reference)


def put(root: Path, location: str, content: str | bytes) -> Path:
    """Write a file, and the folders on the way to it."""
    file = root / location
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


class Folder:
    """A folder, the sink in which its documents are kept, and its syncs."""

    def __init__(self, root: Path, connector: Callable[[SourceContext], Connector]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.sink = MemorySink()
        self._connector = connector

    def __truediv__(self, location: str) -> Path:
        return self.root / location

    def put(self, location: str, content: str | bytes | None = None) -> Path:
        """Write a file, with its location as its text unless something else is given."""
        return put(self.root, location, location if content is None else content)

    def source(self, **settings: Any) -> Connector:
        return self._connector(context(self.root, **settings))

    def sync(self, *, limit: int = 100, between: Callable[[], object] = lambda: None, **settings: Any) -> Synced:
        return asyncio.run(sync(self.source(**settings), self.sink, limit=limit, between=between))

    def synced(self, *locations: str) -> dict[str, str]:
        """Write these files, sync, and return the ids of all."""
        for location in locations:
            self.put(location)
        self.sync()
        return self.ids()

    async def in_processes(self, limit: int = 100, **settings: Any) -> Synced:
        """A sync whose every page is fetched by a connector of its own."""
        pages = Synced()
        while not pages or not pages[-1].is_last:
            pages.append(await one_page(self.source(**settings), self.sink, limit))
            assert len(pages) < 100
        return pages

    def item(self, location: str, **settings: Any) -> Document | None:
        return asyncio.run(self.source(**settings).fetch_item(location, self.sink))

    def test(self) -> str:
        return asyncio.run(self.source().test())

    def ids(self) -> dict[str, str]:
        return self.sink.ids()

    def texts(self) -> dict[str, str]:
        return self.sink.texts()

    def document(self, location: str) -> Document:
        return self.sink.by_location()[location]


class ForgettingSink(MemorySink):
    """Keeps the cursor, and no document."""

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        """Keep nothing."""


def peak_of(connector: Connector, files: int) -> int:
    """The largest memory of a first sync, which has to see so many files, without what a sink keeps of them."""

    async def seen(sink: ForgettingSink) -> int:
        number = 0
        while True:
            page = await connector.fetch(FetchRequest(sink.place.cursor, sink))
            await sink.keep("s", page, after=sink.place)
            number += page.seen
            if page.is_last:
                return number

    tracemalloc.start()
    try:
        assert asyncio.run(seen(ForgettingSink())) == files
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
