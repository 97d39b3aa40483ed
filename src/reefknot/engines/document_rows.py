"""
Documents as rows of SQLite: what a connector returned is checked, cut to its bounds, and made storable.

A value of a wrong type is the connector's mistake. It is refused here by the name of its field, before SQLite refuses
it as if the store were at fault.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, ParameterTypeError, SourceError, shown
from reefknot.ports.connector import LARGEST_CURSOR, LONGEST_NAME, Document

LARGEST_TEXT = 16 << 20
LARGEST_METADATA = 256 << 10
LONGEST_TITLE = 4096
_TEXTS = ("id", "location", "version", "title", "text", "fingerprint", "media_type", "problem")


def rows_of(documents: Sequence[Document], deleted: Sequence[str]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The documents as values of `_COLUMNS`, the last one of each id and location, and the ids that are deleted."""
    for document in documents:
        _check_types(document)
    for key in deleted:
        if not isinstance(key, str):
            raise ParameterTypeError("deleted", key, "ids of documents, which are texts; correct the connector")
    by_id = {document.id: document for document in documents}
    by_location = {document.location: document for document in by_id.values()}
    replaced = [key for key, document in by_id.items() if by_location[document.location] is not document]
    return [_row(document) for document in by_location.values()], [stored(key) for key in (*deleted, *replaced)]


def _check_types(document: Document) -> None:
    """Refuse what SQLite would refuse later, and then as if the store were at fault."""
    if not isinstance(document, Document):
        raise ParameterTypeError("documents", document, "values of the type Document; correct the connector")
    for field in _TEXTS:
        if not isinstance(getattr(document, field), str):
            raise _wrong_type(document, field, "a text")
    modified_at = document.modified_at
    if modified_at is not None and (isinstance(modified_at, bool) or not isinstance(modified_at, int)):
        raise _wrong_type(document, "modified_at", "a whole number of milliseconds, or None")
    if not isinstance(document.metadata, Mapping):
        raise _wrong_type(document, "metadata", "a mapping")


def _wrong_type(document: Document, field: str, accepted: str) -> ParameterTypeError:
    where = f"of the document at {shown(document.location)}; correct the connector"
    return ParameterTypeError(field, getattr(document, field), f"{accepted} {where}")


def _row(document: Document) -> tuple[Any, ...]:
    problems = [document.problem] if document.problem else []
    text = clean_text(document.text)
    if len(text) * 4 > LARGEST_TEXT and len(encoded := text.encode()) > LARGEST_TEXT:
        text = encoded[:LARGEST_TEXT].decode(errors="ignore")
        problems.append(f"only the first {LARGEST_TEXT >> 20} MiB of its text are kept, of {len(encoded) >> 20} MiB")
    metadata = _metadata(document.metadata)
    if len(metadata) > LARGEST_METADATA:
        size = f"{len(metadata) >> 10} kB, and {LARGEST_METADATA >> 10} kB may be kept"
        metadata = "{}"
        problems.append(f"its metadata was left out: it has {size}")
    modified_at = document.modified_at
    return (
        _name("id", document.id),
        _name("location", document.location),
        _name("version", document.version),
        clean_text(document.title)[:LONGEST_TITLE],
        text,
        _name("fingerprint", document.fingerprint),
        clean_text(document.media_type)[:LONGEST_TITLE],
        modified_at if modified_at is not None and abs(modified_at) < 1 << 63 else None,
        metadata,
        clean_text("; ".join(problems))[:LONGEST_TITLE],
    )


def _metadata(values: Mapping[str, Any]) -> str:
    try:
        return msgspec.json.encode(values).decode()
    except (TypeError, ValueError, RecursionError):
        # Text that is no UTF-8, or values that JSON does not have: escaped, or as their `str`.
        return json.dumps({str(key): value for key, value in values.items()}, default=str)


UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_ESCAPED = re.compile("[\0\x10\ud800-\udfff]")
_ESCAPE = re.compile("\x10([0-9a-f]{4})")


def clean_text(text: str) -> str:
    """The text with a replacement character for each NUL and each half of a surrogate pair."""
    if text.isascii() and "\0" not in text:  # ten times as fast as the search
        return text
    return UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def stored(name: str) -> str:
    """A name as it is stored. Names of files may have bytes that are no text, and must come back as they were."""
    return _ESCAPED.sub(lambda found: f"\x10{ord(found[0]):04x}", name)


def given(stored: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), stored) if "\x10" in stored else stored


def _name(what: str, name: str, longest: int = LONGEST_NAME) -> str:
    if len(name) > longest:
        raise ParameterError(what, name, f"at most {longest} characters; it has {len(name)}")
    return stored(name)


def stored_cursor(source: str, cursor: str) -> str:
    """A cursor as it is stored. One that is too long would be as long the next time: nothing is gained by waiting."""
    if not isinstance(cursor, str):
        raise ParameterTypeError("cursor", cursor, f"a text; correct the connector of {source}")
    if len(cursor) > LARGEST_CURSOR:
        problem = f"a cursor of {len(cursor)} characters, and {LARGEST_CURSOR} may be kept"
        raise SourceError(
            f"the connector of {source} returned {problem}; correct the connector: a cursor says where to go on, and "
            "holds no content",
            FailureType.PERMANENT,
        )
    return stored(cursor)
