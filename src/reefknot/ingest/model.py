"""
The language of document searches: `parse_search` turns what a person typed into words, fields and filters.

    budget "annual report" plan*            all of these, anywhere in a document; plan* begins so
    from:anna tag:work title:"reef knot"    in one field only
    source:mail after:2026-03 before:2026-04-15

Every surface uses this parser, so a search means the same on the command line, in Python, in the HTTP API and on the
page. Apart from fields, nothing that is typed is an operator.
"""

import re
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from reefknot.core.checks import suggest
from reefknot.errors import ParameterError

LONGEST_SEARCH = 1000
MOST_TERMS = 32
"""Words, phrases and fields of one search. Each word that ends in * costs as much as all the words that begin so."""

TEXT_FIELDS: Mapping[str, str] = {
    "title": "the title",
    "text": "the text",
    "file": "the location, and the names of attachments",
    "from": "senders and authors",
    "to": "recipients, copies included",
    "tag": "tags and labels",
    "alias": "other names of a note",
}
"""The fields whose words are searched, and what each of them holds."""
FILTERS: Mapping[str, str] = {
    "source": "the name of the source",
    "before": "modified before a date",
    "after": "modified on or after a date",
}
"""The fields that narrow a search."""
FIELDS = (*TEXT_FIELDS, *FILTERS)

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# A field is letters, a colon and its value. `12:30`, `C:\\x`, `std::vector`, `https://…` and `Note:` are words.
_TERM = re.compile(r'(?:([A-Za-z]{2,}):(?=[^\s:/]))?(?:"([^"]*)(?:"|$)|([^\s"]+))')
_DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ACCEPTED_DATE = "a date such as 2026, 2026-03, 2026-03-15, or a time such as 2026-03-15T12:00Z; without an offset, UTC"


class SearchTerm(Struct, frozen=True):
    """A word or phrase, in one text field or anywhere; with `is_prefix`, its last word only begins so."""

    text: str
    is_prefix: bool = False
    field: str = ""


class SearchQuery(Struct, frozen=True):
    """A parsed search. All terms and filters must hold; of several sources, one must. Times are milliseconds UTC."""

    terms: tuple[SearchTerm, ...] = ()
    sources: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None


def parse_search(words: str) -> SearchQuery:
    """The search that a person typed. Raises `ParameterError` with what is accepted instead."""
    if len(words) > LONGEST_SEARCH:
        raise ParameterError("words", words, f"at most {LONGEST_SEARCH} characters")
    terms: list[SearchTerm] = []
    sources: list[str] = []
    times: dict[str, list[int]] = {"after": [], "before": []}
    for found in _TERM.finditer(_UNSTORABLE.sub(" ", words)):
        field, phrase, word = (found[1] or "").lower(), found[2], found[3]
        value = word.rstrip("*") if word else phrase
        if field == "source":
            sources.append(phrase or word or "")
        elif field in times:
            times[field].append(_milliseconds(field, value))
        elif field and field not in TEXT_FIELDS:
            accepted = f"a field is one of {', '.join(FIELDS)}{suggest(field, FIELDS)}"
            words_instead = "; in quotes it is searched for as words"
            raise ParameterError("words", found[0], accepted + words_instead)
        elif any(map(is_searched, value)):
            terms.append(SearchTerm(value, bool(word and word.endswith("*")), field))
        elif field:
            raise ParameterError("words", found[0], f"behind {field}: comes a word of letters or digits")
    number = len(terms) + len(sources) + sum(map(len, times.values()))
    if number > MOST_TERMS:
        accepted = f"at most {MOST_TERMS} words, phrases and fields; these are {number}"
        raise ParameterError("words", words, accepted)
    if not number:
        accepted = "words to look for, of letters or digits; the last one may end in *"
        raise ParameterError("words", words, f"{accepted}; or a field: {', '.join(FIELDS)}")
    since, until = max(times["after"], default=None), min(times["before"], default=None)
    return SearchQuery(tuple(terms), tuple(sources), since, until)


def _milliseconds(field: str, value: str) -> int:
    """The first moment of a year, month or day, or a time."""
    try:
        if found := _DATE.fullmatch(value):
            year, month, day = (int(part or 1) for part in found.groups())
            when = datetime(year, month, day, tzinfo=UTC)
        else:
            when = datetime.fromisoformat(value)
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return (when - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        raise ParameterError("words", f"{field}:{value}", _ACCEPTED_DATE) from None


def is_searched(character: str) -> bool:
    """Whether a character is part of words, by the rules of FTS5's `unicode61`."""
    category = unicodedata.category(character)
    return category[0] in "LN" or category == "Co"
