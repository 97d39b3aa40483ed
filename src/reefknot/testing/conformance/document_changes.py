"""
Conformance suite of the feed of changes of a store of documents.

What is promised: each change once and in order, nothing missed however slowly a consumer reads, and an error for one
that would miss a deletion.
"""

import pytest

from reefknot.errors import ChangesLostError, ParameterError
from reefknot.ingest.port import Document, DocumentStore, Position
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing.conformance.documents import document, document_story, page


class Consumer:
    """A consumer of changes, with a mirror of the documents: what is kept is put there, what is deleted taken out."""

    def __init__(self, store: DocumentStore, *, limit: int = 1000, source: str | None = None) -> None:
        self.cursor = "0"
        self._store = store
        self._limit = limit
        self._source = source
        self._mirror: dict[tuple[str, str], Document] = {}
        self._last = 0

    async def read(self, *, pages: int = 10_000) -> list[str]:
        """The changes up to the end, or of some pages, as `+id` and `-id`."""
        read: list[str] = []
        for _ in range(pages):
            found = await self._store.changes(after=self.cursor, limit=self._limit, source=self._source)
            self.cursor = found.cursor
            if not found.changes:
                break
            for one in found.changes:
                assert one.sequence > self._last
                self._last = one.sequence
                read.append(f"{'-' if one.document is None else '+'}{one.id}")
                if one.document is None:
                    self._mirror.pop((one.source, one.id), None)
                else:
                    self._mirror[one.source, one.id] = one.document
        return read

    async def mirror_is_exact(self) -> bool:
        """Whether the mirror has what the store has."""
        kept = {(name, one.id): one for name in await self._store.counts() for one in await self._store.page(name)}
        return kept == self._mirror


class DocumentChangesContract:
    """Subclass it together with `DocumentsContract`, which has the stories of what is kept."""

    @document_story
    async def test_a_consumer_gets_each_change_once_and_in_order(self, store: DocumentStore) -> None:
        feed = Consumer(store)
        assert await feed.read() == []
        position = await store.keep("s", page("1", document("a"), document("b")), after=Position())
        assert await feed.read() == ["+a", "+b"]
        assert await feed.read() == []
        await store.keep("s", page("2", document("a", "moved.md"), deleted=("b", "never")), after=position)
        await store.put("t", [document("a", "other.md")])
        assert await feed.read() == ["+a", "-b", "+a"]
        await store.put("s", [document("b"), document("c")])
        await store.put("s", [document("b", text="newer")], deleted=["c"])
        assert await feed.read() == ["+b", "-c"], "the latest change of each"
        await store.put("s", [document("x", "moved.md")])
        assert await feed.read() == ["+x", "-a"], "who takes a location replaces who was there"
        assert await feed.mirror_is_exact()

    @document_story
    async def test_a_document_that_is_kept_as_it_was_is_no_change(self, store: DocumentStore) -> None:
        feed = Consumer(store)
        await store.put("s", [document("a"), document("b", metadata={"n": 1})])
        await feed.read()
        await store.put("s", [document("a", version="2"), document("b", version="2", metadata={"n": 1})])
        assert await feed.read() == []
        assert (await store.known("s").at(["a.md"]))["a.md"].version == "2"
        await store.put("s", [document("a", problem="cut"), document("b", metadata={"n": 2})])
        assert await feed.read() == ["+a", "+b"]

    @document_story
    async def test_every_consumer_reads_at_its_own_pace_and_none_misses_a_change(self, store: DocumentStore) -> None:
        slow, quick = Consumer(store, limit=3), Consumer(store)
        for number in range(40):
            await store.put("s", [document(f"{number % 13}", text=f"{number}")], deleted=[f"{(number * 7) % 13}"])
            await quick.read()
            if number % 3 == 0:
                await slow.read(pages=1)
        await slow.read()
        assert await slow.mirror_is_exact()
        assert await quick.mirror_is_exact()

    @document_story
    async def test_a_forgotten_source_is_a_deletion_of_each_of_its_documents(self, store: DocumentStore) -> None:
        feed = Consumer(store)
        await store.put("s", [document(f"{number}") for number in range(1200)])
        await store.put("t", [document("t")])
        await feed.read()
        await store.forget("s")
        assert await feed.read() == [], "the cursor alone was forgotten"
        await store.forget("s", documents=True)
        assert sorted(await feed.read()) == sorted(f"-{number}" for number in range(1200))
        assert await feed.mirror_is_exact()

    @document_story
    async def test_changes_of_one_source_go_on_behind_those_of_others(self, store: DocumentStore) -> None:
        await store.put("s", [document("a")])
        await store.put("t", [document(f"{number}") for number in range(30)])
        ours = Consumer(store, source="s", limit=10)
        assert await ours.read() == ["+a"]
        assert ours.cursor == (await store.changes(limit=100)).cursor, "the others are not read again"
        await store.put("s", [], deleted=["a"])
        assert await ours.read() == ["-a"]

    @document_story
    async def test_a_change_has_the_document_and_without_text_all_but_that(self, store: DocumentStore) -> None:
        kept = document("a\udce9", "dir/a\udce9.md", "words", title="T", metadata={"n": [1]}, modified_at=5)
        await store.put("s", [kept, document("b")])
        (one, other) = (await store.changes()).changes
        assert (one.document, one.id, one.location, one.source) == (kept, kept.id, kept.location, "s")
        assert one.sequence < other.sequence
        bare = (await store.changes(text=False)).changes[0].document
        assert bare is not None
        assert (bare.text, bare.title, bare.metadata) == ("", "T", {"n": [1]})
        await store.put("s", [], deleted=[kept.id])
        gone = (await store.changes(after=other.sequence)).changes
        assert [(item.id, item.location, item.document) for item in gone] == [(kept.id, kept.location, None)]

    @document_story
    async def test_a_consumer_that_was_away_for_longer_than_deletions_are_kept_has_to_start_over(
        self, store: DocumentStore, clock: VirtualClock
    ) -> None:
        away, there = Consumer(store), Consumer(store)
        await store.put("s", [document("a"), document("b"), document("c")])
        await away.read()
        await store.put("s", [], deleted=["a"])
        await there.read()
        clock.advance(29 * 86_400)
        await store.put("s", [document("d")])
        assert (await store.changes(after=away.cursor)).changes[0].document is None, "kept for 30 days"
        clock.advance(2 * 86_400)
        await store.put("s", [document("e")])
        with pytest.raises(ChangesLostError, match="start over"):
            await store.changes(after=away.cursor)
        assert await there.read() == ["+d", "+e"], "a consumer that has read the deletion goes on"
        fresh = Consumer(store, limit=1)
        assert await fresh.read() == ["+b", "+c", "+d", "+e"], "one that begins now missed none of them"
        assert await fresh.mirror_is_exact()

    @document_story
    async def test_a_cursor_from_the_future_or_of_no_form_is_refused(self, store: DocumentStore) -> None:
        await store.put("s", [document("a")])
        head = int((await store.changes()).cursor)
        with pytest.raises(ChangesLostError, match="start over"):
            await store.changes(after=head + 1)
        with pytest.raises(ChangesLostError):
            await store.changes(after=1)
        for odd in ("", "x", "-1", "1-", "1-2-3", "1.5", "9" * 40, True, None):
            with pytest.raises(ParameterError):
                await store.changes(after=odd)  # type: ignore[arg-type]
        for limit in (0, 10_001):
            with pytest.raises(ParameterError):
                await store.changes(limit=limit)
