"""The language of searches: words, phrases, fields and dates, and what is refused with what is accepted instead."""

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reefknot.errors import ParameterError
from reefknot.ingest.model import FIELDS, LONGEST_SEARCH, MOST_TERMS, SearchQuery, SearchTerm, parse_search

WORDS = ("12:30", "C:\\x", "std::vector", "https://x.org", "Note:", "für:a")
"""Words with a colon that are no fields."""
PARTS = ("knot", "reef*", '"two words"', "from:anna", "source:s", "before:2026-02")


def at(*day: int) -> int:
    return int(datetime(*day, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("typed", "terms"),
    [
        ("reef knot", (SearchTerm("reef"), SearchTerm("knot"))),
        ('"reef knot" tie*', (SearchTerm("reef knot"), SearchTerm("tie", is_prefix=True))),
        ('"reef knot', (SearchTerm("reef knot"),)),
        ("from:anna", (SearchTerm("anna", field="from"),)),
        ('Title:"reef knot"x', (SearchTerm("reef knot", field="title"), SearchTerm("x"))),
        ("tag:wor*", (SearchTerm("wor", is_prefix=True, field="tag"),)),
        ("🙂 a", (SearchTerm("a"),)),
        ("a\0b", (SearchTerm("a"), SearchTerm("b"))),
        (" ".join(WORDS), tuple(map(SearchTerm, WORDS))),
        ('"from:anna"', (SearchTerm("from:anna"),)),
    ],
)
def test_words_phrases_and_fields(typed: str, terms: tuple[SearchTerm, ...]) -> None:
    assert parse_search(typed) == SearchQuery(terms)


@pytest.mark.parametrize(
    ("typed", "query"),
    [
        ("source:mail", SearchQuery(sources=("mail",))),
        ('source:"my notes" source:mail', SearchQuery(sources=("my notes", "mail"))),
        ("after:2026", SearchQuery(since=at(2026, 1, 1))),
        ("before:2026-03", SearchQuery(until=at(2026, 3, 1))),
        ("after:2026-03-15 after:2025", SearchQuery(since=at(2026, 3, 15))),
        ("before:2026-03-15 before:2025", SearchQuery(until=at(2025, 1, 1))),
        ("before:2026-03-15T12:00Z", SearchQuery(until=at(2026, 3, 15, 12))),
        ("before:2026-03-15T12:00+02:00", SearchQuery(until=at(2026, 3, 15, 10))),
        ("before:2026-03-15T12:00", SearchQuery(until=at(2026, 3, 15, 12))),
        ("before:1969", SearchQuery(until=at(1969, 1, 1))),
    ],
)
def test_sources_and_dates(typed: str, query: SearchQuery) -> None:
    assert parse_search(typed) == query


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("form:anna", r"one of title, text, .*after; did you mean 'from'\?; in quotes"),
        ("zzz:a", "a field is one of title"),
        ("from:🙂", "behind from: comes a word"),
        *((typed, "a date such as 2026") for typed in ("before:soon", "after:2026-13", "after:0000")),
        ("x" * (LONGEST_SEARCH + 1), "at most 1000 characters"),
        ("a " * (MOST_TERMS + 1), "at most 32 words, phrases and fields; these are 33"),
        ("source:a " * 20 + "before:2026 " * 13, "these are 33"),
        ("", "words to look for"),
        ('"" * 🙂', "words to look for"),
    ],
)
def test_what_is_not_accepted_is_refused_with_what_is(typed: str, text: str) -> None:
    with pytest.raises(ParameterError, match=text) as caught:
        parse_search(typed)
    assert caught.value.parameter == "words"


@given(st.text(max_size=40) | st.text(alphabet='ab:"*-/ 2🙂\0', max_size=60))
@example("\ud800")
def test_whatever_is_typed_is_a_search_or_refused(typed: str) -> None:
    try:
        query = parse_search(typed)
    except ParameterError:
        return
    assert query != SearchQuery()
    for term in query.terms:
        assert '"' not in term.text, "it would end the quotes of the index's own language"
        assert any(letter.isalnum() or letter >= "\ue000" for letter in term.text)
        assert term.field in ("", *FIELDS)


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=MOST_TERMS))
def test_a_search_is_the_sum_of_its_parts(parts: list[str]) -> None:
    whole, each = parse_search(" ".join(parts)), [parse_search(part) for part in parts]
    assert whole.terms == tuple(term for one in each for term in one.terms)
    assert whole.sources == tuple(name for one in each for name in one.sources)
    assert whole.until == min((one.until for one in each if one.until), default=None)
