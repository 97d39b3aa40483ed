"""The store of documents beyond its contract: its file, its locks, its errors, its bounds."""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from reefknot import errors
from reefknot.core.failure import FailureType
from reefknot.ingest import document_rows
from reefknot.ingest import documents as module
from reefknot.ingest.document_rows import search_expression
from reefknot.ingest.documents import APPLICATION_ID, VERSION, SqliteDocuments
from reefknot.ingest.model import parse_search
from reefknot.ingest.port import LARGEST_CURSOR, Document, Page, Position
from reefknot.runtime.clocks import SystemClock, VirtualClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import run_virtual
from tests.faults.vfs import Failing, FaultyDisk, Hook, disk_error, disk_full
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

ONE = Page("1", (Document("a", "a.md", "1", text="some words"),))


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[SqliteDocuments]:
    documents = await SqliteDocuments(path, SystemClock(), **options).start()
    try:
        yield documents
    finally:
        await documents.close()


@pytest.fixture
def documents(tmp_path: Path) -> InLoop:
    return InLoop(lambda: opened(tmp_path / "d.db"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_the_file_is_wal_fully_synchronous_and_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "documents.db"
    async with opened(path) as documents:
        await documents.keep("s", ONE, after=Position())
        found = await documents._run(lambda one: (one.pragma("journal_mode"), one.pragma("synchronous")))
        assert found == ("wal", 2)
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


async def test_what_was_kept_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db") as documents:
        position = await documents.keep("s", ONE, after=Position())
    async with opened(tmp_path / "d.db") as documents:
        assert await documents.position("s") == position
        assert [hit.id for hit in await documents.search("words")] == ["a"]


async def test_a_newer_file_and_another_programs_file_are_refused_and_left_alone(tmp_path: Path) -> None:
    newer = apsw.Connection(str(tmp_path / "newer.db"))
    newer.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION + 1}")
    newer.execute("CREATE TABLE later (a); PRAGMA journal_mode = WAL")
    newer.close()
    await (await SqliteStore(tmp_path / "state.db", VirtualClock()).start()).close()
    (tmp_path / "notes.db").write_text("these are notes, and no database at all " * 30)
    said = {"state.db": "a database of another program", "notes.db": "no database"}
    for name, words in {"newer.db": f"it has version {VERSION + 1}", **said}.items():
        before = (tmp_path / name).read_bytes()
        with pytest.raises((errors.StoreVersionError, errors.StoreCorruptError), match=words):
            async with opened(tmp_path / name):
                pass
        assert (tmp_path / name).read_bytes() == before


async def test_a_file_that_is_missing_is_made_only_when_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreUnavailableError):
        async with opened(tmp_path / "d.db", create=False):
            pass
    assert os.listdir(tmp_path) == []


async def test_a_file_that_others_keep_locked_is_waited_for_and_then_named_locked(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db", patience=0.05) as documents:
        other = apsw.Connection(str(tmp_path / "d.db"))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.StoreLockedError):
            await documents.keep("s", ONE, after=Position())
        assert await documents.position("s") == Position(), "reads do not wait for writers"
        other.execute("ROLLBACK")
        other.close()
        await documents.keep("s", ONE, after=Position())


async def test_a_file_that_was_replaced_is_not_written_any_more(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db") as documents:
        position = await documents.keep("s", ONE, after=Position())
        (tmp_path / "d.db").rename(tmp_path / "elsewhere.db")
        with pytest.raises(errors.StoreReplacedError, match=r"the file of the documents was deleted.*remove .*-wal"):
            await documents.keep("s", ONE, after=position)
    for left in ("d.db-wal", "d.db-shm"):
        (tmp_path / left).unlink(missing_ok=True)
    async with opened(tmp_path / "d.db") as documents:  # after a restart
        assert await documents.position("s") == Position()
        await documents.keep("s", ONE, after=Position())
        assert await documents.get("s", "a") is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("id", 5), ("location", 5), ("version", None), ("title", None), ("text", b"bytes"), ("fingerprint", b"")),
        *(("media_type", 5), ("modified_at", 1.5), ("modified_at", True), ("metadata", [1]), ("problem", None)),
    ],
)
async def test_a_value_of_a_wrong_type_is_the_connectors_mistake_and_not_the_stores(
    field: str, value: Any, documents: SqliteDocuments
) -> None:
    wrong = replace(ONE.documents[0], **{field: value})
    for writing in (documents.keep("notes", Page("1", (wrong,)), after=Position()), documents.put("notes", [wrong])):
        with pytest.raises(errors.ParameterError, match=rf"^{field}=.* at .*{wrong.location}.*correct the connector"):
            await writing
    await documents.keep("notes", ONE, after=Position())


async def test_a_page_of_something_else_is_the_connectors_mistake(documents: SqliteDocuments) -> None:
    pages: list[Any] = [Page("1", (5,)), Page("1", deleted=(5,)), Page(5)]  # type: ignore[arg-type]
    for page in pages:
        with pytest.raises(errors.ParameterError, match="correct the connector"):
            await documents.keep("notes", page, after=Position())


async def test_values_that_only_sqlite_refuses_are_no_outage(
    monkeypatch: pytest.MonkeyPatch, documents: SqliteDocuments
) -> None:
    monkeypatch.setattr(document_rows, "_check_types", lambda document: None)
    wrong = replace(ONE.documents[0], modified_at=1.5)
    with pytest.raises(errors.ParameterError, match="cannot store REAL value in INTEGER column"):
        await documents.keep("notes", Page("1", (wrong,)), after=Position())
    await documents.keep("notes", ONE, after=Position())


async def test_a_cursor_that_is_too_long_is_permanent_and_names_the_source(documents: SqliteDocuments) -> None:
    with pytest.raises(errors.SourceError, match="the connector of notes returned a cursor of 262145") as caught:
        await documents.keep("notes", Page("c" * (LARGEST_CURSOR + 1)), after=Position())
    assert caught.value.failure_type is FailureType.PERMANENT


async def test_a_page_that_a_full_disk_refuses_is_kept_by_the_next_try(tmp_path: Path) -> None:
    disk = FaultyDisk(Hook(), name="full-documents")
    async with opened(tmp_path / "d.db", opener=disk.opener()) as documents:
        disk.hook = Failing(["write"], 1, disk_full, lasts=1)
        with pytest.raises(errors.StoreFullError):
            await documents.keep("s", ONE, after=Position())
        assert (await documents.position("s"), await documents.search("words")) == (Position(), [])
        assert (await documents.keep("s", ONE, after=Position())).sequence == 1


async def test_after_an_error_of_the_disk_the_file_is_opened_anew(tmp_path: Path) -> None:
    """A failed fsync must not be tried again on the same connection: its pages may be lost, and look written."""
    disk = FaultyDisk(Hook(), name="sick-documents")
    async with opened(tmp_path / "d.db", opener=disk.opener()) as documents:
        first = await documents._run(id)
        disk.hook = Failing(["sync"], 1, disk_error, lasts=1)
        with pytest.raises(errors.StoreUnavailableError, match="the disk reported an error"):
            await documents.keep("s", ONE, after=Position())
        assert await documents._run(lambda connection: connection.in_transaction) is False
        position = await documents.position("s")
        assert position.sequence in (0, 1), "whether it was kept was not known"
        assert (await documents.keep("s", ONE, after=position)).sequence == position.sequence + 1
        assert first is not None


async def test_a_statement_that_takes_too_long_is_ended_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n) SELECT max(v) FROM n"
    async with opened(tmp_path / "d.db", inline=True) as documents:
        monkeypatch.setattr(module, "STORE_S", 0.05)
        with pytest.raises(errors.StoreUnavailableError, match=r"more than 0\.05 s"):
            await documents._run(lambda connection: connection.execute(endless).fetchall())
        monkeypatch.undo()
        await documents.keep("s", ONE, after=Position())


async def test_a_disk_that_does_not_answer_does_not_hold_the_caller(
    monkeypatch: pytest.MonkeyPatch, documents: SqliteDocuments
) -> None:
    monkeypatch.setattr(module, "STORE_S", 0.02)
    answers = threading.Event()
    with pytest.raises(errors.StoreUnavailableError, match="the disk has not answered"):
        await documents._run(lambda connection: answers.wait(60))
    monkeypatch.undo()
    answers.set()


async def test_closed_documents_say_so(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db") as documents:
        pass
    with pytest.raises(errors.StoreUnavailableError, match="it is closed"):
        await documents.counts()


def test_inline_documents_work_in_virtual_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "d.db", inline=True) as documents:
            await asyncio.sleep(86_400)
            assert await documents.keep("s", ONE, after=Position()) == Position("1", 1)

    run_virtual(main())


async def test_a_large_page_of_an_export_ends_early(
    monkeypatch: pytest.MonkeyPatch, documents: SqliteDocuments
) -> None:
    monkeypatch.setattr(module, "LARGEST_ANSWER", 1000)
    await documents.put("s", [Document(f"{n}", f"{n}", "", text="x" * 400) for n in range(7)])
    sizes, after = [], ""
    while part := await documents.page("s", after=after, limit=100):
        sizes.append(len(part))
        after = part[-1].id
    assert sizes == [3, 3, 1]


async def test_many_documents_are_forgotten_in_steps_and_a_sync_in_between_is_refused(
    monkeypatch: pytest.MonkeyPatch, documents: SqliteDocuments
) -> None:
    monkeypatch.setattr(module, "FORGOTTEN_AT_ONCE", 10)
    await documents.put("s", [Document(f"{n}", f"{n}", "", text="words") for n in range(35)])
    assert await documents.forget("s", documents=True) == 35
    position = await documents.position("s")
    assert (position.cursor, position.sequence) == ("", 5)
    assert (await documents.counts(), await documents.search("words")) == ({}, [])


STATEMENTS = {
    "counts": "SELECT source, documents, problems, kept_at FROM positions",
    "after": f"{module._KNOWN} AND location > ? AND location >= ? AND location < ? ORDER BY location LIMIT ?",
    "like": f"{module._KNOWN} AND fingerprint = ? AND fingerprint <> '' ORDER BY location LIMIT ?",
    "at": f"{module._KNOWN} AND location IN (SELECT value FROM json_each(?))",
    "problems": "SELECT id FROM documents WHERE source = ? AND problem <> '' ORDER BY id LIMIT ?",
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_what_every_sync_asks_for_never_walks_through_the_documents(
    name: str, documents: SqliteDocuments
) -> None:
    statement = STATEMENTS[name]

    def plan(connection: apsw.Connection) -> list[str]:
        rows: Any = connection.execute(f"EXPLAIN QUERY PLAN {statement}", [None] * statement.count("?"))
        return [row[3] for row in rows]

    steps = await documents._run(plan)
    assert not any("SCAN documents" in step for step in steps), steps


@pytest.mark.parametrize(
    ("typed", "expression"),
    [
        ("reef knot", '"reef" "knot"'),
        ('"reef knot" tie*', '"reef knot" "tie"*'),
        ('unclosed "reef knot', '"unclosed" "reef knot"'),
        ("a AND NOT b", '"a" "AND" "NOT" "b"'),
        ("& 🙂 x", '"x"'),
    ],
)
def test_words_become_an_expression_in_which_everything_is_quoted(typed: str, expression: str) -> None:
    assert search_expression(parse_search(typed)) == expression


async def test_items_of_one_content_are_found_by_an_index(documents: SqliteDocuments) -> None:
    """A connector asks for every new item: reading the whole source each time would make a first sync quadratic."""
    asked: list[tuple[str, Any]] = []
    plans: list[str] = []

    def trace(cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        asked.append((sql, bindings))
        return True

    def watch(connection: apsw.Connection) -> None:
        connection.exec_trace = trace

    def explain(connection: apsw.Connection) -> None:
        connection.exec_trace = None
        (sql, bindings), *_ = [one for one in asked if "fingerprint = ?" in one[0]]
        plans.extend(str(row) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", bindings))

    await documents._run(watch)
    await documents.known("s").like("abc")
    await documents._run(explain)
    assert "documents_fingerprint" in plans[0]


# ---- files that may not be written ----------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


async def test_documents_that_are_open_for_reading_are_read_make_no_file_and_refuse_a_page(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db") as documents:
        await documents.keep("notes", ONE, after=Position())
    before = files(tmp_path)
    async with opened(tmp_path / "d.db", create=False, read_only=True) as documents:
        assert [hit.id for hit in await documents.search("words")] == ["a"]
        assert (await documents.position("notes")).cursor == "1"
        with pytest.raises(errors.StorePermissionError, match="open for reading only"):
            await documents.keep("notes", ONE, after=Position("1", 1))
        assert files(tmp_path) == before


async def test_a_file_that_was_written_while_it_was_read_without_locks_is_told_and_read_anew(tmp_path: Path) -> None:
    async with opened(tmp_path / "d.db") as documents:
        await documents.keep("notes", ONE, after=Position())
    async with opened(tmp_path / "d.db", create=False, read_only=True) as reading:
        async with opened(tmp_path / "d.db") as documents:
            await documents.forget("notes", documents=True)
        with pytest.raises(errors.StoreReplacedError, match=r"was written, closed or replaced .*; try again"):
            await reading.counts()
        assert await reading.search("words") == []


async def test_a_file_without_the_tables_cannot_be_read_where_it_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "d.db").touch()
    with pytest.raises(errors.StoreVersionError, match=r"it has version 0, .* it may not be written"):
        async with opened(tmp_path / "d.db", create=False, read_only=True):
            pass


# ---- searches that take long -----------------------------------------------------------------------------------------

PREFIXES = " ".join(["w*"] * 32)


async def with_many_words(path: Path) -> None:
    """A file in which a search for `PREFIXES` takes seconds: each of its words stands for 100,000 others."""
    async with opened(path) as documents:
        await documents.put("s", [Document("a", "a.md", "1", text=" ".join(f"w{n:x}" for n in range(100_000)))])


def is_busy(documents: SqliteDocuments) -> bool:
    assert documents._thread is not None
    return documents._thread._running is not None


@pytest.mark.parametrize("is_interrupted", [True, False], ids=["interrupted", "control"])
async def test_a_search_that_takes_too_long_ends_in_time_and_holds_up_neither_close_nor_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool, documents: SqliteDocuments
) -> None:
    """The progress handler alone, as in the control, is not asked within one step over the index of words."""
    monkeypatch.setattr(module, "SEARCH_S", 0.05)
    await with_many_words(tmp_path / "d.db")
    with monkeypatch.context() as patched:
        if not is_interrupted:
            patched.setattr(SqliteDocuments, "_interrupt", lambda self: None)
        with pytest.raises(errors.StoreUnavailableError, match=r"more than 0\.05 s, and was ended.*fewer words"):
            await documents.search(PREFIXES)
    if not is_interrupted:
        await asyncio.sleep(0.3)
        assert is_busy(documents)
        documents._interrupt()
    while is_busy(documents):  # noqa: ASYNC110 - the thread has nobody to wake
        await asyncio.sleep(0.001)
    thread = next(one for one in threading.enumerate() if one.name == "documents")
    assert thread.daemon, "the exit of the process does not wait for it"
    monkeypatch.setattr(module, "SEARCH_S", 10.0)
    assert await documents.search("w1") != [], "the file can be searched at once"


async def test_a_search_that_is_cancelled_is_ended(tmp_path: Path, documents: SqliteDocuments) -> None:
    await with_many_words(tmp_path / "d.db")
    search = asyncio.create_task(documents.search(PREFIXES))
    await asyncio.sleep(0.05)
    search.cancel()
    await asyncio.wait([search])
    assert search.cancelled()
    assert await documents.search("w1") != []


async def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "d.db").write_text("no database at all, but notes " * 30)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(errors.StoreCorruptError):
            async with opened(tmp_path / "d.db"):
                pass
    for one in threading.enumerate():
        if one.name == "documents":
            one.join(10)
    assert threading.active_count() <= before


async def test_a_consumer_of_a_file_that_was_deleted_and_made_again_has_to_start_over(tmp_path: Path) -> None:
    cursor = "0"
    for number in (3, 300):
        async with opened(tmp_path / "d.db") as documents:
            await documents.put("s", [Document(f"{one}", f"{one}.md", "1") for one in range(number)])
            if number == 3:
                cursor = (await documents.changes(after=cursor, limit=10_000)).cursor
            else:
                with pytest.raises(errors.ChangesLostError, match="start over"):
                    await documents.changes(after=cursor, limit=10_000)
        (tmp_path / "d.db").unlink()


async def test_a_consumer_of_a_file_that_is_replaced_meanwhile_is_not_left_waiting(
    tmp_path: Path, documents: SqliteDocuments
) -> None:
    await documents.keep("s", ONE, after=Position())
    cursor = (await documents.changes()).cursor
    (tmp_path / "d.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(errors.StoreReplacedError):
        await documents.changes(after=cursor)
