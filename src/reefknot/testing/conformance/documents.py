"""
Conformance suite of a store of documents.

Stories have one store; a story that needs two writers takes two positions. What is promised: a page and its cursor are
kept together, a writer that was overtaken is refused, and whatever a document holds comes back or is named as a
problem.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import wraps
from inspect import signature
from typing import Concatenate

import pytest

from reefknot.errors import ParameterError, SourceError, StalePositionError
from reefknot.ingest.port import Document, DocumentStore, Page, Position, SearchHit, SourceCounts
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing.conformance.harness import LONGEST_STORY, P, S, wall_ms

SEARCHES = (
    *('"', '""', '"a', "AND", "a OR", "NOT a", "NEAR(a b)", "a NEAR/2 b", "(", "a)", "*", "a*", "**a", "^a", "a^b"),
    *(
        "title:a",
        "{title}: a",
        "a + b",
        "-a",
        "a\0b",
        "\ud800",
        "🙂",
        "🙂 a",
        "'",
        "a; DROP TABLE words",
        "%_",
        "a" * 999,
    ),
)
"""Things that people type, none of which may be a mistake of syntax."""


class DocumentHarness:
    """Runs a story on a store of documents of its own. `factory` opens it in the time of a clock."""

    def __init__(self, factory: Callable[[VirtualClock], AbstractAsyncContextManager[DocumentStore]]) -> None:
        self._factory = factory

    def run(self, story: Callable[[DocumentStore, VirtualClock], Awaitable[None]]) -> None:
        async def main() -> None:
            clock = VirtualClock()
            async with asyncio.timeout(LONGEST_STORY), self._factory(clock) as documents:
                await story(documents, clock)

        asyncio.run(main())


def document_story(
    method: Callable[Concatenate[S, DocumentStore, P], Awaitable[None]],
) -> Callable[[S, DocumentHarness], None]:
    """A decorator that makes a story a test: pytest gives it `documents`, which opens the store."""
    run: Callable[..., Awaitable[None]] = method
    wants_clock = "clock" in signature(method).parameters

    @wraps(method)
    def test(self: S, documents: DocumentHarness) -> None:
        documents.run(lambda store, clock: run(self, store, *[clock][:wants_clock]))

    vars(test).pop("__wrapped__")  # pytest asks for the fixtures of the test, not of the story
    return test


def document(key: str, location: str = "", text: str = "", **fields: object) -> Document:
    """A document at this location, or at one named after its id."""
    values = {"version": "1", **fields}
    return Document(id=key, location=location or f"{key}.md", text=text or f"text of {key}", **values)  # type: ignore[arg-type]


def page(cursor: str, *documents: Document, deleted: tuple[str, ...] = ()) -> Page:
    return Page(cursor, documents, deleted)


async def places(store: DocumentStore, source: str = "s") -> dict[str, str]:
    """The location of every document, by id; each of them is at its location alone."""
    found = await store.known(source).after("", 1000)
    assert len({item.location for item in found}) == len(found)
    return {item.id: item.location for item in found}


async def found(store: DocumentStore, words: str, **options: object) -> set[str]:
    hits: list[SearchHit] = await store.search(words, **options)  # type: ignore[arg-type]
    return {hit.id for hit in hits}


class DocumentsContract:
    """Subclass it, and give it a `documents`."""

    # ---- pages and positions ---------------------------------------------------------------------------------------

    @document_story
    async def test_a_new_source_is_at_the_beginning_and_has_nothing(self, store: DocumentStore) -> None:
        assert await store.position("s") == Position("", 0)
        assert (await store.counts(), await store.page("s"), await store.get("s", "a")) == ({}, [], None)
        assert (await store.known("s").after("", 10), await store.known("s").at(["a.md"])) == ([], {})

    @document_story
    async def test_a_page_is_kept_with_its_cursor(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("c1", document("a"), document("b")), after=Position())
        assert first == Position("c1", 1) == await store.position("s")
        second = await store.keep("s", page("c2", document("c"), deleted=("a", "never there")), after=first)
        assert second == Position("c2", 2) == await store.position("s")
        assert await places(store) == {"b": "b.md", "c": "c.md"}
        assert await store.position("other") == Position("", 0)

    @document_story
    async def test_a_writer_that_was_overtaken_is_refused_and_keeps_nothing(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("c1", document("a")), after=Position())
        for stale in (Position(), Position("c1", 2), Position("c0", 1)):
            with pytest.raises(StalePositionError):
                await store.keep("s", page("x", document("late"), deleted=("a",)), after=stale)
        assert (await places(store), await store.position("s")) == ({"a": "a.md"}, first)

    @document_story
    async def test_of_writers_at_once_one_is_kept_whole_and_the_others_not_at_all(self, store: DocumentStore) -> None:
        def one(number: int) -> Page:
            return page(f"c{number}", *(document(f"{number}-{other}") for other in range(20)))

        results = await asyncio.gather(
            *(store.keep("s", one(number), after=Position()) for number in range(4)), return_exceptions=True
        )
        kept = [result for result in results if isinstance(result, Position)]
        assert len(kept) == 1
        assert sum(isinstance(result, StalePositionError) for result in results) == 3
        winner = results.index(kept[0])
        assert await store.position("s") == kept[0] == Position(f"c{winner}", 1)
        assert set(await places(store)) == {f"{winner}-{other}" for other in range(20)}

    @document_story
    async def test_a_document_that_is_kept_again_replaces_the_earlier_one(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("1", document("a", text="early words")), after=Position())
        again = document("a", "moved.md", "late words", version="2", fingerprint="f", title="T", modified_at=5)
        await store.keep("s", page("2", document("a", text="between"), again), after=first)
        assert await store.get("s", "a") == again
        assert (await store.counts())["s"].documents == 1
        assert (await found(store, "early"), await found(store, "between"), await found(store, "late")) == (
            set(),
            set(),
            {"a"},
        )

    @document_story
    async def test_two_documents_change_places_in_one_page(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("1", document("x", "a.md"), document("y", "b.md")), after=Position())
        await store.keep("s", page("2", document("x", "b.md"), document("y", "a.md")), after=first)
        assert await places(store) == {"x": "b.md", "y": "a.md"}
        assert await found(store, "b.md") == {"x"}

    @document_story
    async def test_who_takes_a_location_replaces_who_was_there(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("1", document("x", "a.md"), document("y", "b.md")), after=Position())
        await store.keep("s", page("2", document("x", "b.md")), after=first)
        assert (await places(store), await found(store, "text")) == ({"x": "b.md"}, {"x"})
        await store.put("s", [document("p", "c.md"), document("q", "c.md")])
        assert await places(store) == {"x": "b.md", "q": "c.md"}

    @document_story
    async def test_a_document_that_a_page_has_is_not_deleted_by_it(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("1", document("a")), after=Position())
        await store.keep("s", page("2", document("a", text="newer"), deleted=("a",)), after=first)
        assert await found(store, "newer") == {"a"}

    @document_story
    async def test_documents_fetched_by_themselves_leave_the_position(self, store: DocumentStore) -> None:
        first = await store.keep("s", page("1", document("a"), document("b")), after=Position())
        await store.put("s", [document("c")], deleted=["a"])
        assert (await places(store), await store.position("s")) == ({"b": "b.md", "c": "c.md"}, first)
        await store.keep("s", page("2"), after=first)

    @document_story
    async def test_sources_do_not_know_each_other(self, store: DocumentStore) -> None:
        await store.keep("s", page("1", document("a", text="ours")), after=Position())
        await store.keep("t", page("1", document("a", text="theirs"), deleted=("b",)), after=Position())
        await store.put("t", [], deleted=["a"])
        assert (await places(store, "s"), await places(store, "t")) == ({"a": "a.md"}, {})

    @document_story
    async def test_a_forgotten_cursor_begins_anew_and_refuses_the_sync_that_was_under_way(
        self, store: DocumentStore
    ) -> None:
        first = await store.keep("s", page("1", document("a")), after=Position())
        assert await store.forget("s") == 0
        fresh = await store.position("s")
        assert (fresh.cursor, await places(store)) == ("", {"a": "a.md"})
        with pytest.raises(StalePositionError):
            await store.keep("s", page("2"), after=first)
        await store.keep("s", page("1", document("a"), document("b")), after=fresh)
        assert await store.forget("s", documents=True) == 2
        assert (await store.counts(), await store.page("s"), await found(store, "text")) == ({}, [], set())

    # ---- what a connector asks -------------------------------------------------------------------------------------

    @document_story
    async def test_known_items_are_found_by_location_content_and_order(self, store: DocumentStore) -> None:
        kept = [document(f"{number}", f"d/{number:02}.md", fingerprint=f"f{number % 2}") for number in range(10)]
        await store.keep("s", page("1", *kept, document("z", "e/z.md"), document("e", "d")), after=Position())
        known = store.known("s")
        at = await known.at(["d/03.md", "nowhere", "e/z.md"])
        assert {place: (item.id, item.version) for place, item in at.items()} == {
            "d/03.md": ("3", "1"),
            "e/z.md": ("z", "1"),
        }
        assert [item.id for item in await known.like("f1")] == ["1", "3", "5", "7", "9"]
        assert (await known.like("never"), await known.like("")) == ([], [])
        assert [item.location for item in await known.after("d/07.md", 3)] == ["d/08.md", "d/09.md", "e/z.md"]
        assert [item.location for item in await known.after("", 3, prefix="d/")] == ["d/00.md", "d/01.md", "d/02.md"]
        assert [item.location for item in await known.after("d/08.md", 9, prefix="d/")] == ["d/09.md"]

    @document_story
    async def test_many_locations_are_asked_for_at_once(self, store: DocumentStore) -> None:
        await store.put("s", [document(f"{number}") for number in range(50)])
        assert len(await store.known("s").at([f"{number}.md" for number in range(25_000)])) == 50

    # ---- what documents hold ---------------------------------------------------------------------------------------

    @document_story
    async def test_every_field_comes_back(self, store: DocumentStore) -> None:
        kept = Document(
            *("a", "dir/naïve 🪢.md", "v", "title", "text\nof it", "print", "text/markdown", 1_700_000_000_123),
            metadata={"tags": ["a", "b"], "n": 1.5, "none": None, "deep": {"ü": True}},
            problem="page 3 is empty",
        )
        await store.keep("s", page("c", kept), after=Position())
        assert await store.get("s", "a") == kept
        (listed,) = await store.problems("s")
        assert (listed.id, listed.text, listed.problem) == ("a", "", "page 3 is empty")

    @document_story
    async def test_names_with_bytes_that_are_no_text_come_back_as_they_were(self, store: DocumentStore) -> None:
        names = ["caf\udce9.md", "a\0b", "\x10dce9", "\x10", "\udcff\udcfe"]
        await store.keep("s", page("\udc80", *(document(name, name, version=name) for name in names)), after=Position())
        assert await places(store) == {name: name for name in names}
        assert (await store.position("s")).cursor == "\udc80"
        for name in names:
            assert (await store.known("s").at([name]))[name].version == name
            assert (await store.get("s", name)) is not None
        await store.put("s", [], deleted=names)
        assert await places(store) == {}

    @document_story
    async def test_text_that_is_no_unicode_is_kept_as_far_as_it_is(self, store: DocumentStore) -> None:
        odd = document("a", text="left\0right \ud800 end", title="\udcff", metadata={"subject": "\udce9", "at": object})
        await store.keep("s", page("1", odd), after=Position())
        kept = await store.get("s", "a")
        assert kept is not None
        assert kept.text == "left\ufffdright \ufffd end"
        assert kept.metadata["subject"] == "\udce9"
        assert await found(store, "end") == {"a"}

    @document_story
    async def test_content_without_measure_is_cut_and_named_as_a_problem(self, store: DocumentStore) -> None:
        large = document("large", text="wörd " * 4_000_000)
        loaded = document("loaded", metadata={"header": "x" * 300_000}, problem="no title")
        await store.keep("s", page("1", large, loaded, document("fine")), after=Position())
        cut, without = await store.get("s", "large"), await store.get("s", "loaded")
        assert cut is not None
        assert without is not None
        assert 15 << 20 < len(cut.text.encode()) <= 16 << 20
        assert "16 MiB" in cut.problem
        assert without.metadata == {}
        assert without.problem.startswith("no title; ")
        assert "256 kB" in without.problem
        assert (await store.counts())["s"] == SourceCounts(3, 2, (await store.counts())["s"].kept_at)

    @document_story
    async def test_a_name_without_measure_is_refused_and_nothing_is_kept(self, store: DocumentStore) -> None:
        for wrong in (page("1", document("a"), document("x" * 100_000)), page("c" * 1_000_000, document("a"))):
            with pytest.raises((ParameterError, SourceError)):
                await store.keep("s", wrong, after=Position())
        assert (await store.counts(), await store.position("s")) == ({}, Position())

    # ---- reading ---------------------------------------------------------------------------------------------------

    @document_story
    async def test_an_export_has_every_document_once(self, store: DocumentStore) -> None:
        names = [f"{number:03}" for number in range(25)]
        await store.put("s", [document(name) for name in reversed(names)])
        seen: list[str] = []
        while part := await store.page("s", after=seen[-1] if seen else "", limit=10):
            seen += [one.id for one in part]
        assert seen == names

    @document_story
    async def test_counts_follow_every_change(self, store: DocumentStore, clock: VirtualClock) -> None:
        bad = document("bad", problem="half of it")
        first = await store.keep("s", page("1", bad, document("a")), after=Position())
        assert await store.counts() == {"s": SourceCounts(2, 1, wall_ms(clock))}
        await store.put("t", [document("b", problem="p")])
        assert (await store.counts())["t"] == SourceCounts(1, 1, None), "a page has never been kept of it"
        clock.advance(5)
        await store.keep("s", page("2", document("bad"), deleted=("a",)), after=first)
        assert (await store.counts())["s"] == SourceCounts(1, 0, wall_ms(clock))
        assert await store.problems("s") == []

    @document_story
    async def test_a_search_wants_all_words_and_marks_them(self, store: DocumentStore) -> None:
        await store.put("s", [document("a", "notes/plan.md", "Der Wirbelsturm über São Paulo", title="Wetter")])
        await store.put("t", [document("b", "b.md", "Sturm im Wasserglas"), document("c", "c.md", "Paulo allein")])
        (hit,) = await store.search("paulo sao")
        assert (hit.source, hit.id, hit.location, hit.title) == ("s", "a", "notes/plan.md", "Wetter")
        assert hit.excerpt == "Der Wirbelsturm über ⟦São⟧ ⟦Paulo⟧"
        assert await found(store, "paulo") == {"a", "c"}
        assert await found(store, '"sao paulo"') == {"a"}
        assert await found(store, '"paulo sao"') == set()
        assert await found(store, "wirbel*") == {"a"}
        assert await found(store, "wirbel") == set()
        assert await found(store, "wetter plan") == {"a"}, "title and location are searched as well"
        assert await found(store, "paulo", source="t") == {"c"}
        assert await found(store, "paulo", source="u") == set()
        assert len(await store.search("paulo", limit=1)) == 1

    @document_story
    async def test_the_title_weighs_more_than_the_text(self, store: DocumentStore) -> None:
        await store.put("s", [document(f"{n}", text=f"knot and {n} other words") for n in range(5)])
        await store.put("s", [document("best", title="Knot", text="about something else")])
        assert (await store.search("knot"))[0].id == "best"

    @document_story
    async def test_nothing_that_is_typed_is_a_mistake_of_syntax(self, store: DocumentStore) -> None:
        await store.put("s", [document("a", text="a b near and or not title")])
        for words in SEARCHES:
            try:
                await store.search(words)
            except ParameterError:
                assert not any(letter.isalnum() for letter in words), words
        for nothing in ("", " ", "🙂", '"', "*", "x" * 1001):
            with pytest.raises(ParameterError):
                await store.search(nothing)
        with pytest.raises(ParameterError):
            await store.search("a", limit=0)

    @document_story
    async def test_senders_recipients_attachments_tags_and_aliases_are_found_as_words_and_as_fields(
        self, store: DocumentStore
    ) -> None:
        mail = {
            "from": ["Anna Smith <anna@reef.example>"],
            "to": ["bert@reef.example"],
            "cc": ["Çelik <c@x>"],
            "attachments": [{"name": "plan 2026.pdf", "size": 3}, {"size": 4}],
        }
        note = {"tags": ["work/plan", "boat"], "aliases": ["Nodus"], "from": 7}
        issue = {"author": "anna", "labels": ["bug"], "to": None, "tags": {"a": 1}}
        await store.put("mail", [document("m", metadata=mail, title="Budget")])
        await store.put("notes", [document("n", metadata=note), document("i", metadata=issue)])
        for words, expected in {
            "anna": {"m", "i"},
            "from:anna": {"m", "i"},
            'from:"anna smith"': {"m"},
            "from:bert": set(),
            "to:bert": {"m"},
            "to:celik": {"m"},
            "budget anna bert": {"m"},
            "file:plan": {"m"},
            "file:m.md": {"m"},
            "plan*": {"m", "n"},
            "tag:plan": {"n"},
            "tag:work/plan": {"n"},
            "tag:bug from:anna": {"i"},
            'tag:"plan boat"': set(),
            "alias:nodus": {"n"},
            "title:budget": {"m"},
            "text:budget": set(),
            "from:7": {"n"},
            "TAG:boa*": {"n"},
        }.items():
            assert await found(store, words) == expected, words
        for unknown in ("form:anna", "sender:anna", "tag:🙂"):
            with pytest.raises(ParameterError):
                await store.search(unknown)
        await store.put("notes", [document("n", metadata={"tags": ["other"]})])
        assert (await found(store, "tag:boat"), await found(store, "tag:other")) == (set(), {"n"})

    @document_story
    async def test_sources_and_dates_narrow_a_search_and_are_one_by_themselves(self, store: DocumentStore) -> None:
        day = 86_400_000
        first = 1_767_225_600_000  # 2026-01-01
        kept = [document(f"{n}", text=f"knot {n}", modified_at=first + n * day) for n in range(40)]
        await store.put("s", [*kept, document("undated", text="knot")])
        await store.put("t", [document("other", text="knot", modified_at=first + day)])
        assert await found(store, "knot before:2026-01-03", limit=99) == {"0", "1", "other"}
        assert await found(store, "knot after:2026-02-09 source:s", limit=99) == {"39"}
        assert await found(store, "source:s source:t knot after:2026-01-02 before:2026-01-03") == {"1", "other"}
        assert await found(store, "source:s knot", source="t") == set()
        newest = [hit.id for hit in await store.search("source:s after:2026-02-08")]
        assert newest == ["39", "38"], "the newest ones first"
        hit, *_ = await store.search("source:t before:2027")
        assert (hit.id, hit.excerpt) == ("other", "knot")
        assert len(await store.search("source:s", limit=100)) == 41

    @document_story
    async def test_more_than_32_words_and_fields_are_refused_with_what_is_accepted(self, store: DocumentStore) -> None:
        await store.put("s", [document("a", text="a b")])
        assert await found(store, "a* " * 31 + "source:s") == {"a"}
        with pytest.raises(ParameterError, match="at most 32 words, phrases and fields; these are 33"):
            await store.search("a* " * 32 + "source:s")
        with pytest.raises(ParameterError, match="at most 32"):
            await store.search("a* " * 300)

    @document_story
    async def test_closing_twice_is_closing_once(self, store: DocumentStore) -> None:
        await store.close()
        await store.close()
