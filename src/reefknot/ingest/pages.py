"""
The check of a page, where it enters the orchestrator: all that a connector may get wrong is refused here, by its name.

Such a mistake is the connector's. The next attempt would repeat it, so it is a permanent failure that says which field
was given what, and what is accepted. Whatever passes can be kept by every sink.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError, shown
from reefknot.ingest.port import LARGEST_CURSOR, LONGEST_NAME, MOST_DOCUMENTS, Document, ItemFailure, Page

MOST_FAILURES = 10_000
"""Items of one page that could not be read."""
_REPLACED = "characters that are no valid Unicode (lone surrogates) were replaced by \N{REPLACEMENT CHARACTER}"
_JSON = "values that JSON can carry: texts, numbers, true, false, None, lists, mappings of texts, times"
_SURROGATES = re.compile("[\ud800-\udfff]")


def checked_page(page: object, connector: str, limit: int) -> Page:
    """
    The page of a connector that was asked for `limit` documents, ready to be kept.

    A few more documents are accepted, because many sources have pages of a size of their own. Raises `SourceError`.
    """
    if not isinstance(page, Page):
        _refuse(connector, f"{type(page).__name__} instead of a Page", "a Page")
    _check_text(connector, "cursor", page.cursor, LARGEST_CURSOR)
    if not isinstance(page.is_last, bool):
        _refuse_value(connector, "is_last", page.is_last, "True or False")
    for field in ("seen", "checked"):
        number = getattr(page, field)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            _refuse_value(connector, field, number, "a whole number, 0 or more")
    for field in ("documents", "deleted", "failures"):
        values = getattr(page, field)
        if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
            _refuse_value(connector, field, values, "a tuple or a list")
    most = max(limit, MOST_DOCUMENTS)
    if len(page.documents) > most:
        accepted = f"about request.limit, which is {limit}, and at most {most}"
        _refuse(connector, f"{len(page.documents)} documents in one page", accepted)
    if len(page.failures) > MOST_FAILURES:
        _refuse(connector, f"{len(page.failures)} failures in one page", f"at most {MOST_FAILURES}")
    documents = tuple(checked_document(one, connector, f"documents[{at}]") for at, one in enumerate(page.documents))
    _check_differences(connector, documents)
    for at, key in enumerate(page.deleted):
        _check_text(connector, f"deleted[{at}]", key, LONGEST_NAME)
    for at, failure in enumerate(page.failures):
        if not isinstance(failure, ItemFailure):
            _refuse_value(connector, f"failures[{at}]", failure, "an ItemFailure")
        _check_text(connector, f"failures[{at}].location", failure.location, LONGEST_NAME, shortest=1)
        _check_text(connector, f"failures[{at}].version", failure.version, LONGEST_NAME)
    return replace(page, documents=documents, deleted=tuple(page.deleted), failures=tuple(page.failures))


def checked_document(document: object, connector: str, name: str = "document") -> Document:
    """The document of a connector, ready to be kept. Raises `SourceError`."""
    if not isinstance(document, Document):
        _refuse_value(connector, name, document, "a Document")
    for field in ("id", "location"):
        _check_text(connector, f"{name}.{field}", getattr(document, field), LONGEST_NAME, shortest=1)
    for field in ("version", "fingerprint"):
        _check_text(connector, f"{name}.{field}", getattr(document, field), LONGEST_NAME)
    for field in ("title", "text", "media_type", "problem"):
        if not isinstance(getattr(document, field), str):
            _refuse_value(connector, f"{name}.{field}", getattr(document, field), "a text")
    modified_at = document.modified_at
    if modified_at is not None and (isinstance(modified_at, bool) or not isinstance(modified_at, int)):
        _refuse_value(connector, f"{name}.modified_at", modified_at, "a whole number of milliseconds (UTC), or None")
    _check_metadata(connector, f"{name}.metadata", document.metadata)
    return _with_valid_text(document)


def _check_differences(connector: str, documents: Collection[Document]) -> None:
    """Refuse two documents of which only one could be kept."""
    for field in ("id", "location"):
        met: set[str] = set()
        for at, document in enumerate(documents):
            value = getattr(document, field)
            if value in met:
                name = f"documents[{at}].{field}={shown(value)} twice"
                _refuse(connector, name, f"one document of each {field} in a page: the last change of it")
            met.add(value)


def _check_text(connector: str, name: str, value: object, longest: int, *, shortest: int = 0) -> None:
    accepted = (
        f"a text of {shortest} to {longest} characters" if shortest else f"a text of at most {longest} characters"
    )
    if not isinstance(value, str):
        _refuse_value(connector, name, value, accepted)
    if not shortest <= len(value) <= longest:
        _refuse_value(connector, name, value, f"{accepted}; it has {len(value)}")


def _check_metadata(connector: str, name: str, metadata: object) -> None:
    if not isinstance(metadata, Mapping):
        _refuse_value(connector, name, metadata, "a mapping")
    if _is_json(dict(metadata)):
        return
    for key, value in metadata.items():
        if not _is_json({key: value}):
            _refuse_value(connector, f"{name}[{shown(key)}]", value, _JSON)
    _refuse_value(connector, name, metadata, _JSON)


def _is_json(values: dict[Any, Any]) -> bool:
    try:
        msgspec.json.encode(values)
    except UnicodeEncodeError:  # text that is no UTF-8, as in names of files: JSON escapes it
        try:
            json.dumps(msgspec.to_builtins(values, str_keys=True))
        except (TypeError, ValueError, RecursionError):
            return False
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _with_valid_text(document: Document) -> Document:
    """The document without lone surrogates in its texts. A replacement is reported as its problem."""
    fields = ("title", "text", "media_type", "problem")
    changed = {field: valid for field in fields if (valid := _valid(text := getattr(document, field))) is not text}
    if not changed:
        return document
    problem = changed.get("problem", document.problem)
    return replace(document, **changed | {"problem": f"{problem}; {_REPLACED}" if problem else _REPLACED})


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


def _refuse_value(connector: str, name: str, value: object, accepted: str) -> NoReturn:
    _refuse(connector, f"{name}={shown(value)}", accepted)


def _refuse(connector: str, given: str, accepted: str) -> NoReturn:
    text = f"the connector {connector} returned {given}; accepted: {accepted}; correct the connector"
    raise SourceError(text, FailureType.PERMANENT)
