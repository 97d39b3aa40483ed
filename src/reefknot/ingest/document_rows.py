"""
Documents as rows of SQLite: the tables, what a connector returned as values of their columns, and what is written.

A value of a wrong type is the connector's mistake. It is refused here by the name of its field, before SQLite refuses
it as if the store were at fault.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import apsw
import msgspec

from reefknot.core.failure import FailureType
from reefknot.errors import ChangesLostError, ParameterError, ParameterTypeError, SourceError, shown
from reefknot.ingest.model import SearchQuery
from reefknot.ingest.port import (
    LARGEST_CURSOR,
    LONGEST_NAME,
    TOMBSTONE_DAYS,
    Document,
    DocumentChange,
    DocumentChanges,
    SearchHit,
)

LARGEST_TEXT = 16 << 20
LARGEST_METADATA = 256 << 10
LONGEST_TITLE = 4096
LARGEST_ANSWER = 16 << 20
"""Characters of content after which a page of documents or changes ends."""
EXCERPT = 200
"""Characters of the text that stand for an excerpt, when a search has no words."""
LARGEST_FIELD = 64 << 10
MOST_VALUES = 1000
"""Values of one field of a document that are indexed, such as its recipients."""
BETWEEN = " \ue000 "
"""Stands between two values of a field: a word of its own, so that no phrase reaches from one value into the next."""
PURGED_AT_ONCE = 500
_TEXTS = ("id", "location", "version", "title", "text", "fingerprint", "media_type", "problem")


# ---- tables ----------------------------------------------------------------------------------------------------------

# `text` is the last column: what is read without it never touches its pages. Parts of the index of words are merged
# later than by default (4): every page makes one, and merging is most of the work. Sequences begin at the time of day
# in milliseconds, so that those of a new file are above all that a file which it replaces ever had, and a consumer of
# the old one is recognised. `purged` is the last deletion that is forgotten.
_TABLES = """
CREATE TABLE documents (
    number INTEGER PRIMARY KEY, source TEXT NOT NULL, id TEXT NOT NULL, location TEXT NOT NULL, version TEXT NOT NULL,
    fingerprint TEXT NOT NULL, media_type TEXT NOT NULL, modified_at INTEGER, kept_at INTEGER NOT NULL,
    problem TEXT NOT NULL, sequence INTEGER NOT NULL, title TEXT NOT NULL, metadata TEXT NOT NULL,
    senders TEXT NOT NULL, recipients TEXT NOT NULL, attachments TEXT NOT NULL, tags TEXT NOT NULL,
    aliases TEXT NOT NULL, text TEXT NOT NULL, UNIQUE (source, id)
) STRICT;
CREATE INDEX documents_location ON documents (source, location);
CREATE INDEX documents_fingerprint ON documents (source, fingerprint) WHERE fingerprint <> '';
CREATE INDEX documents_problem ON documents (source, id) WHERE problem <> '';
CREATE UNIQUE INDEX documents_sequence ON documents (sequence);
CREATE INDEX documents_modified ON documents (modified_at, source);

CREATE TABLE feed (sequence INTEGER NOT NULL, purged INTEGER NOT NULL) STRICT;
INSERT INTO feed SELECT began, began FROM (SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER) AS began);
CREATE TABLE tombstones (
    sequence INTEGER PRIMARY KEY, source TEXT NOT NULL, id TEXT NOT NULL, location TEXT NOT NULL,
    deleted_at INTEGER NOT NULL, UNIQUE (source, id)
) STRICT;

CREATE TABLE place (identity TEXT NOT NULL) STRICT; INSERT INTO place VALUES (lower(hex(randomblob(8))));
CREATE TABLE positions (
    source TEXT PRIMARY KEY, cursor TEXT NOT NULL DEFAULT '', sequence INTEGER NOT NULL DEFAULT 0, kept_at INTEGER,
    documents INTEGER NOT NULL DEFAULT 0, problems INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TRIGGER documents_counted AFTER INSERT ON documents BEGIN
    INSERT INTO positions (source, documents, problems) VALUES (new.source, 1, new.problem <> '')
    ON CONFLICT DO UPDATE SET documents = documents + 1, problems = problems + (new.problem <> '');
END;
CREATE TRIGGER documents_recounted AFTER UPDATE OF problem ON documents WHEN (old.problem <> '') <> (new.problem <> '')
BEGIN
    UPDATE positions SET problems = problems + iif(new.problem <> '', 1, -1) WHERE source = new.source;
END;
CREATE TRIGGER documents_uncounted AFTER DELETE ON documents BEGIN
    UPDATE positions SET documents = documents - 1, problems = problems - (old.problem <> '')
    WHERE source = old.source;
END;

CREATE VIRTUAL TABLE words USING fts5 (title, text, location, senders, recipients, attachments, tags, aliases,
    content = 'documents', content_rowid = 'number', tokenize = 'unicode61 remove_diacritics 2');
INSERT INTO words (words, rank) VALUES ('rank', 'bm25(4.0, 1.0, 2.0, 2.0, 1.0, 2.0, 3.0, 4.0)');
INSERT INTO words (words, rank) VALUES ('automerge', 16);
"""
MIGRATIONS = (_TABLES,)


# ---- documents as rows -----------------------------------------------------------------------------------------------


class DocumentRow(NamedTuple):
    """A document as values of its columns."""

    id: str
    location: str
    version: str
    title: str
    text: str
    fingerprint: str
    media_type: str
    modified_at: int | None
    metadata: str
    problem: str
    senders: str
    recipients: str
    attachments: str
    tags: str
    aliases: str

    @property
    def words(self) -> tuple[str, ...]:
        """The values that are indexed, in the order of `WORDS`."""
        return (self.title, self.text, self.location, *self[10:])

    @property
    def content(self) -> tuple[Any, ...]:
        """The rest of what a reader sees. Another `version` alone is no change."""
        return self[5:10]


COLUMNS = ", ".join(DocumentRow._fields[:10])
"""The columns of a `Document`, in its order."""
WORDS = "title, text, location, senders, recipients, attachments, tags, aliases"


def rows_of(documents: Sequence[Document], deleted: Sequence[str]) -> tuple[list[DocumentRow], list[str]]:
    """The documents as rows, the last one of each id and location, and the ids that are deleted."""
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


def _row(document: Document) -> DocumentRow:
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
    return DocumentRow(
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
        *field_texts(document.metadata),
    )


_FIELD_KEYS = (("from", "sender", "author"), ("to", "cc", "bcc"), ("attachments",), ("tags", "labels"), ("aliases",))


def field_texts(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Senders, recipients, names of attachments, tags and aliases, by the names that connectors give them."""
    return tuple([_field(metadata, keys) for keys in _FIELD_KEYS])


def _field(metadata: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    given = [value for key in keys if (value := metadata.get(key))]
    if not given:
        return ""
    values = list(islice((one for value in given for one in _values(value) if one), MOST_VALUES))
    return clean_text(BETWEEN.join(values)[:LARGEST_FIELD])


def _values(value: Any) -> Iterator[str]:
    """The texts in a value: one, a list of them, or a list of things that have a name."""
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield str(one.get("name") or "")
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield str(one)


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


# ---- writes ----------------------------------------------------------------------------------------------------------

_INSERTED = f"source, kept_at, sequence, {', '.join(DocumentRow._fields)}"
_INSERT = f"INSERT INTO documents ({_INSERTED}) VALUES ({', '.join('?' * (3 + len(DocumentRow._fields)))})"  # noqa: S608
_UPDATE = f"UPDATE documents SET kept_at = ?, sequence = ?, {' = ?, '.join(DocumentRow._fields)} = ? WHERE number = ?"  # noqa: S608
_OLD = f"SELECT number, {WORDS}, id, version, fingerprint, media_type, modified_at, metadata, problem FROM documents"  # noqa: S608
OLD_OF_SOURCE = f"{_OLD} WHERE source = ?"
_INDEX = f"INSERT INTO words (rowid, {WORDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_UNINDEX = f"INSERT INTO words (words, rowid, {WORDS}) VALUES ('delete', ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608

_PURGE = """
DELETE FROM tombstones WHERE sequence IN (SELECT sequence FROM tombstones ORDER BY sequence LIMIT ?) AND deleted_at < ?
RETURNING sequence
"""


def write(
    connection: apsw.Connection, source: str, rows: Sequence[DocumentRow], *, gone: Sequence[str], now: int
) -> None:
    """
    Write the rows, delete those that are `gone` or replaced, and index what has changed. Each change has its sequence.

    The index comes last: FTS5 writes out what it has gathered before each statement on another table with triggers.
    """
    sequence: Any = connection.execute("SELECT sequence FROM feed").get
    ids = {row.id for row in rows}
    deleted = _found(connection, f"{OLD_OF_SOURCE} AND id = ?", [(source, one) for one in gone if one not in ids])
    earlier = {old[9]: old for old in _found(connection, f"{OLD_OF_SOURCE} AND id = ?", [(source, one) for one in ids])}
    new: list[tuple[Any, ...]] = []
    changed: list[tuple[Any, ...]] = []
    for row in rows:
        old = earlier.get(row.id)
        if old is not None and (old[1:9], old[11:]) == (row.words, row.content):
            if old[10] != row.version:
                connection.execute("UPDATE documents SET version = ? WHERE number = ?", (row.version, old[0]))
            continue
        sequence += 1
        if old is None:
            connection.execute(_INSERT, (source, now, sequence, *row))
            new.append((connection.last_insert_rowid(), *row.words))
        else:
            connection.execute(_UPDATE, (now, sequence, *row, old[0]))
            if old[1:9] != row.words:
                changed.append(old[:9])
                new.append((old[0], *row.words))
    back = [(source, one) for one in ids if one not in earlier]
    connection.executemany("DELETE FROM tombstones WHERE source = ? AND id = ?", back)
    # Only now, when all have moved: two documents may have changed places.
    places = [(source, row.location, row.id) for row in rows]
    deleted += _found(connection, f"{OLD_OF_SOURCE} AND location = ? AND id <> ?", places)
    connection.execute("UPDATE feed SET sequence = ?", (sequence,))
    delete(connection, source, deleted, now=now)
    connection.executemany(_UNINDEX, changed)
    connection.executemany(_INDEX, new)


def _found(connection: apsw.Connection, statement: str, values: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(connection.executemany(statement, values))


def delete(connection: apsw.Connection, source: str, rows: Sequence[tuple[Any, ...]], *, now: int) -> None:
    """Delete documents that were read by `OLD_OF_SOURCE`, and leave a tombstone for each."""
    if rows:
        last: Any = connection.execute("UPDATE feed SET sequence = sequence + ? RETURNING sequence", (len(rows),)).get
        connection.executemany("DELETE FROM documents WHERE number = ?", [(row[0],) for row in rows])
        connection.executemany(
            "INSERT OR REPLACE INTO tombstones (sequence, source, id, location, deleted_at) VALUES (?, ?, ?, ?, ?)",
            [(last - len(rows) + place, source, row[9], row[3], now) for place, row in enumerate(rows, 1)],
        )
    _purge(connection, before=now - TOMBSTONE_DAYS * 86_400_000)
    connection.executemany(_UNINDEX, [row[:9] for row in rows])


def _purge(connection: apsw.Connection, *, before: int) -> None:
    """
    Forget the oldest deletions, in their order: a reader that has not seen the last one of them has to start over.
    """
    oldest: Any = connection.execute("SELECT deleted_at FROM tombstones ORDER BY sequence LIMIT 1").get
    if oldest is None or oldest >= before:
        return
    purged: Any = connection.execute(_PURGE, (PURGED_AT_ONCE, before)).fetchall()
    connection.execute("UPDATE feed SET purged = max(purged, ?)", (max(purged)[0],))


# ---- searches and changes --------------------------------------------------------------------------------------------

_FIELD_COLUMNS = {
    "title": "title",
    "text": "text",
    "file": "location attachments",
    "from": "senders",
    "to": "recipients",
    "tag": "tags",
    "alias": "aliases",
}
_FILTER = """(?2 IS NULL OR source IN (SELECT value FROM json_each(?2))) AND (?3 IS NULL OR modified_at >= ?3)
AND (?4 IS NULL OR modified_at < ?4)"""
_SEARCH = f"""
SELECT source, id, documents.location, documents.title, snippet(words, -1, '⟦', '⟧', '…', 24), modified_at
FROM words JOIN documents ON number = words.rowid
WHERE words MATCH ?1 AND {_FILTER} ORDER BY words.rank, number LIMIT ?5
"""  # noqa: S608 - our own words
_NEWEST = f"""
SELECT source, id, location, title, substr(text, 1, {EXCERPT}), modified_at FROM documents
WHERE ?1 IS NULL AND {_FILTER} ORDER BY modified_at DESC, number LIMIT ?5
"""  # noqa: S608
_CHANGES = f"""
SELECT sequence, source, kept_at, {COLUMNS} FROM documents WHERE sequence > ?1 AND ifnull(source = ?2, true)
UNION ALL
SELECT sequence, source, deleted_at, id, location, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM tombstones
WHERE sequence > ?1 AND ifnull(source = ?2, true)
ORDER BY sequence LIMIT ?3
"""  # noqa: S608


def search_expression(query: SearchQuery) -> str:
    """The expression of FTS5 for the terms of a search: every one is quoted, so that none is an operator."""
    return " ".join(
        f'{f"{{{_FIELD_COLUMNS[term.field]}}} : " if term.field else ""}"{term.text}"{"*" if term.is_prefix else ""}'
        for term in query.terms
    )


def _excerpt(text: str) -> str:
    return " ".join(text.replace(BETWEEN, ", ").split())


def found_by(connection: apsw.Connection, query: SearchQuery, limit: int) -> list[SearchHit]:
    """The documents that a search finds."""
    statement, expression = (_SEARCH, search_expression(query)) if query.terms else (_NEWEST, None)
    sources = json.dumps([stored(one) for one in query.sources]) if query.sources else None
    found: Any = connection.execute(statement, (expression, sources, query.since, query.until, limit))
    return [
        SearchHit(given(name), given(key), given(place), title, _excerpt(excerpt), modified_at)
        for name, key, place, title, excerpt, modified_at in found
    ]


def read_changes(
    connection: apsw.Connection, after: str | int, *, source: str | None, limit: int, text: bool
) -> DocumentChanges:
    """The changes behind a cursor, and the cursor behind them."""
    behind, began = _read_feed_cursor(after)
    statement = _CHANGES if text else _CHANGES.replace(" text,", " '',", 1)
    found: list[DocumentChange] = []
    size = 0
    with _snapshot(connection):
        row: Any = connection.execute("SELECT sequence, purged FROM feed").fetchone()
        head, purged = row
        _check_feed_cursor(after, behind, began, head=head, purged=purged)
        pass_began = began if behind else head
        rows: Any = connection.execute(statement, (behind, source, limit))
        for sequence, name, changed_at, key, location, *others in rows:
            document = None if others[0] is None else document_of(key, location, *others)
            names = (given(name), given(key), given(location))
            cursor = _feed_cursor(sequence, pass_began)
            found.append(DocumentChange(sequence, *names, changed_at, cursor, document))
            size += len(others[2] or "")
            if size > LARGEST_ANSWER:
                break
        rows.close()
    is_all = len(found) < limit and size <= LARGEST_ANSWER
    return DocumentChanges(found, str(head) if is_all else found[-1].cursor)


@contextmanager
def _snapshot(connection: apsw.Connection) -> Iterator[None]:
    """A transaction in which all statements read one state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def document_of(
    key: str,
    location: str,
    version: str,
    title: str,
    text: str,
    fingerprint: str,
    media_type: str,
    modified_at: int | None,
    metadata: str,
    problem: str,
) -> Document:
    names = (given(key), given(location), given(version), title, text, given(fingerprint))
    return Document(*names, media_type, modified_at, json.loads(metadata), problem)


_FEED_CURSOR = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def _read_feed_cursor(after: str | int) -> tuple[int, int]:
    """The sequence that a consumer has read up to, and the newest one when its first reading began."""
    found = _FEED_CURSOR.fullmatch(str(after))
    if found is None or isinstance(after, bool):
        raise ParameterError("after", after, "0 for the beginning, or the cursor of a change or of an earlier answer")
    return int(found[1]), int(found[2] or found[1])


def _feed_cursor(sequence: int, began: int) -> str:
    """
    The cursor behind a change. During a first reading it also says where the feed ended when that began.

    What was deleted before then, such a consumer never got; so it misses nothing when that deletion is forgotten.
    """
    return f"{sequence}-{began}" if sequence < began else str(sequence)


def _check_feed_cursor(after: object, behind: int, began: int, *, head: int, purged: int) -> None:
    if behind and max(behind, began) < purged:
        days = f"documents that were deleted more than {TOMBSTONE_DAYS} days ago are forgotten"
        raise ChangesLostError(after, f"{days}, or the file of the documents is a new one")
    if max(behind, began) > head:
        raise ChangesLostError(after, "the file of the documents is another one, or an earlier copy was restored")
