"""The check of a page: what a connector got wrong is refused by its name, for good, and all that is right passes."""

import asyncio
from datetime import UTC, date, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.jobs import item_job_id
from reefknot.ingest.pages import checked_document, checked_page
from reefknot.ingest.port import LARGEST_CURSOR, LONGEST_NAME, MOST_DOCUMENTS, Document, FetchRequest, ItemFailure, Page
from reefknot.queue.model.work import WorkState
from tests.unit.ingest.world import World, document

GOOD = Document("1", "a.md", "1", "A", "text", "f", metadata={"tags": ["x"], "size": 3})
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def of_document(**wrong: Any) -> Page:
    return Page("c", (replace(GOOD, **wrong),))


MISTAKES: dict[str, tuple[Any, str]] = {
    "no page": (None, "NoneType instead of a Page"),
    "cursor": (Page(5), "cursor=5; accepted: a text of at most 262144 characters"),  # type: ignore[arg-type]
    "long cursor": (Page("c" * (LARGEST_CURSOR + 1)), "it has 262145"),
    "is_last": (Page("c", is_last=None), "is_last=None; accepted: True or False"),  # type: ignore[arg-type]
    "seen": (Page("c", seen=-1), "seen=-1; accepted: a whole number, 0 or more"),
    "documents": (Page("c", documents=None), "documents=None; accepted: a tuple or a list"),  # type: ignore[arg-type]
    "generator": (Page("c", documents=(one for one in [GOOD])), "documents=<generator"),  # type: ignore[arg-type]
    "no document": (Page("c", ({"id": "1"},)), "documents[0]={'id': '1'}; accepted: a Document"),  # type: ignore[arg-type]
    "deleted text": (Page("c", deleted="abc"), "deleted='abc'; accepted: a tuple or a list"),  # type: ignore[arg-type]
    "deleted": (Page("c", deleted=(7,)), "deleted[0]=7; accepted: a text"),  # type: ignore[arg-type]
    "failures": (Page("c", failures=("a.md",)), "failures[0]='a.md'; accepted: an ItemFailure"),  # type: ignore[arg-type]
    "empty id": (of_document(id=""), "documents[0].id=''; accepted: a text of 1 to 16384 characters"),
    "id": (of_document(id=1), "documents[0].id=1; accepted: a text"),
    "long id": (of_document(id="i" * (LONGEST_NAME + 1)), "it has 16385"),
    "empty location": (of_document(location=""), "documents[0].location=''"),
    "version": (of_document(version=None), "documents[0].version=None; accepted: a text of at most"),
    "text": (of_document(text=5), "documents[0].text=5; accepted: a text"),
    "modified_at": (of_document(modified_at=datetime(2026, 1, 1, tzinfo=UTC)), "accepted: a whole number of millisec"),
    "metadata": (of_document(metadata=["x"]), "documents[0].metadata=['x']; accepted: a mapping"),
    "object": (of_document(metadata={"x": 1, "y": object()}), "documents[0].metadata['y']=<object object"),
    "key": (of_document(metadata={(1, 2): 3}), "metadata[(1, 2)]=3; accepted: values that JSON can carry"),
    "cycle": (of_document(metadata={"y": CYCLE}), "metadata['y']=[[...]]"),
    "id twice": (Page("c", (GOOD, replace(GOOD, location="b.md"))), "documents[1].id='1' twice"),
    "location twice": (Page("c", (GOOD, replace(GOOD, id="2"))), "documents[1].location='a.md' twice"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_connector_is_permanent_and_names_connector_field_and_what_is_accepted(name: str) -> None:
    page, told = MISTAKES[name]
    with pytest.raises(SourceError) as caught:
        checked_page(page, "team_wiki", 100)
    assert caught.value.failure_type is FailureType.PERMANENT
    text = str(caught.value)
    assert text.startswith("the connector team_wiki returned ")
    assert told in text
    assert text.endswith("; correct the connector")
    assert len(text) < 400, "what was given is cut"


def test_a_page_without_a_mistake_passes_as_it_is() -> None:
    """The control: nothing of it is refused or changed."""
    odd = replace(GOOD, id="2", location="\udcff.md", metadata={"name": "\udcff", "on": date(2026, 1, 1), 1: None})
    page = Page("c", (GOOD, odd), ("3", "1"), is_last=False, seen=9)
    assert checked_page(page, "team_wiki", 100) == page


@pytest.mark.parametrize(("limit", "number", "accepted"), [(1, 1000, True), (1, 1001, False), (2000, 2000, True)])
def test_a_page_may_be_as_large_as_that_of_many_sources_but_not_larger(limit: int, number: int, accepted: bool) -> None:
    assert MOST_DOCUMENTS == 1000
    page = Page("c", tuple(document(f"a{at}") for at in range(number)))
    if accepted:
        assert len(checked_page(page, "team_wiki", limit).documents) == number
        return
    with pytest.raises(
        SourceError, match=r"1001 documents in one page; accepted: about request\.limit, which is 1, and"
    ):
        checked_page(page, "team_wiki", limit)


def test_half_surrogate_pairs_are_replaced_and_told_as_the_problem_of_the_document() -> None:
    made = checked_document(replace(GOOD, text="a\ud800b", title="\udc00", problem="cut"), "team_wiki")
    assert (made.title, made.text) == ("\N{REPLACEMENT CHARACTER}", "a\N{REPLACEMENT CHARACTER}b")
    assert made.problem.startswith("cut; characters that are no valid Unicode")
    assert checked_document(replace(GOOD, text="a\N{REPLACEMENT CHARACTER}b"), "team_wiki").problem == ""


async def test_a_sync_or_an_item_with_a_mistake_is_quarantined_at_once_and_keeps_nothing(world: World) -> None:
    async def fetch(request: FetchRequest) -> Page:
        return of_document(text=5)

    async def failing(request: FetchRequest) -> Page:
        return Page("c", failures=(ItemFailure("b.md", "1", ValueError("odd")),))

    async def item(location: str) -> Document | None:
        return replace(GOOD, id="")

    whole = world.source(fetch, connector="team_wiki")
    await world.start(whole, world.source(failing, "parts", "team_wiki", item=item))
    await world.job("sync", connector="team_wiki")
    await world.job("parts", "parts", "team_wiki")
    await asyncio.sleep(1)
    found = await world.item("sync")
    assert (found.state, found.attempts) == (WorkState.QUARANTINED, 1)
    assert "the connector team_wiki returned documents[0].text=5; accepted: a text" in found.reason
    part = await world.item(item_job_id("parts", "b.md", "1"))
    assert (part.state, part.attempts) == (WorkState.QUARANTINED, 1)
    assert "the connector team_wiki returned document.id=''; accepted: a text of 1 to" in part.reason
    assert world.sink.documents == {}
