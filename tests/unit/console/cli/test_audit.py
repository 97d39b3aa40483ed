"""`reefknot audit`."""

import asyncio
import csv
import io
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest

from reefknot.audit.model import event
from reefknot.audit.model.chain import EventIndex
from reefknot.audit.port import AuditEntry, KeptEntry
from reefknot.console.cli import audit, audit_files
from reefknot.policy.model.book import content_hash
from reefknot.stores import opening, port
from tests.pace import slowness
from tests.unit.console.cli.audit_events import NOON, STORY, at, attempt, change, decision, entry, in_store, recorded
from tests.unit.console.cli.running import Commands


@pytest.fixture
def store(rk: Commands) -> Path:
    """The usual story, in the store that the configuration names."""
    return recorded(rk.folder / "state.db")


@pytest.fixture(autouse=True)
def configured(rk: Commands) -> None:
    rk.write("engine: sqlite:state.db\n")


def sequences(rk: Commands, *words: str) -> list[int]:
    return [json.loads(line)["sequence"] for line in rk("audit", *words).out.splitlines()]


def kept_head(rk: Commands, name: str = "kept.json") -> str:
    """The head of the store's log as it is now, kept in a file."""
    head = rk("audit", "head").out
    rk.write(head, name)
    return head


@pytest.mark.real_time
async def test_following_shows_what_comes_and_ends_by_itself(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with opening.open_store(f"sqlite:{store}") as opened:
        wanted = audit.FilterFlags(type_="retry_attempt").chosen()
        following = asyncio.create_task(audit.follow_log(opened.audit, wanted, after=6, seconds=1.0, json=True))
        await asyncio.sleep(0)
        await opened.audit.append([entry(STORY[4]), entry(attempt(20))])
        await following
    assert [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()] == [8]


TRAIL: list[event.AnyEvent] = [
    event.Submitted(timestamp=at(0), work_id="a", tenant_id="acme", actor="ann", host="h", process=7),
    event.Submitted(timestamp=at(1), work_id="b", tenant_id="blue", actor="bob", host="h", process=8),
    event.Completed(timestamp=at(2), work_id="a", tenant_id="acme", status="success", attempts=1),
    event.IdempotencyEvent(timestamp=at(3), idempotency_key="=order-7", action="record"),
    event.OperatorAction(timestamp=at(4), actor="ann", os_user="root", action="job.cancel", subject="b"),
]


def test_the_same_filters_choose_what_is_shown_exported_and_analysed(rk: Commands) -> None:
    recorded(rk.folder / "state.db", [*STORY, *TRAIL])
    rk("audit", "export", "log.jsonl")
    table = {
        "--type retry_attempt": [1, 2, 4],
        "--category nats.publish": [4, 5],
        "--category RETRY_KV_GET": [1, 2, 3],
        "--correlation c2": [2],
        "--trace t1": [1, 4],
        "--since 1s": [],
        "--work a": [7, 9],
        "--tenant acme": [7, 9],
        "--key =order-7": [10],
        "--actor ann": [7, 11],
        "--actor root": [11],
        "--until 2026-01-25T12:00:02Z": [1, 2, 7, 8],
        "--since 2026-01-25T12:00:01Z --until 2026-01-25T12:00:04Z": [2, 3, 8, 9, 10],
        "--tenant acme --type completed": [9],
        "--tenant nobody": [],
    }
    for filters, numbers in table.items():
        words = filters.split()
        assert sequences(rk, "tail", "--json", *words) == numbers, filters
        assert rk("audit", "export", "-", *words).out == rk("audit", "tail", "--json", *words).out, "the same lines"
        for analysed in ((), ("log.jsonl",)):
            assert rk("audit", "analyse", *analysed, "--json", *words).json["events"] == len(numbers), filters
    newest = "-n 1 --type retry_attempt", "-n 0"
    assert [sequences(rk, "tail", "--json", *words.split()) for words in newest] == [[4], []]


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_message_cannot_steer_the_terminal(rk: Commands, words: list[str]) -> None:
    recorded(rk.folder / "state.db", [attempt(0, message="\x1b[31mred\x9b2J\u202egone\r\nnext")])
    assert rk("audit", "tail", *words).out.removesuffix("\n").isprintable()


@pytest.mark.usefixtures("store")
def test_a_whole_export_to_stdout_verifies_against_a_head_that_was_printed(rk: Commands) -> None:
    rk.write(rk("audit", "export", "-").out, "log.jsonl")
    head = kept_head(rk)
    ended = rk("audit", "verify", "log.jsonl", "--head", "kept.json", "--json")
    assert (ended.code, ended.json["proven_up_to"], ended.json["sequence"]) == (0, 6, 6)
    assert rk("audit", "head", "log.jsonl").out == head
    assert not list(rk.folder.glob("-*")), "no file of that name"


def test_csv_has_a_row_per_event_and_no_cell_that_a_spreadsheet_would_compute(rk: Commands) -> None:
    recorded(rk.folder / "state.db", TRAIL)
    ended = rk("audit", "export", "log.csv", "--format", "csv", "--json")
    rows = list(csv.DictReader(io.StringIO((rk.folder / "log.csv").read_bytes().decode(), newline="")))
    assert (ended.code, ended.json["events"], ended.json["head_file"]) == (0, 5, None)
    assert [row["sequence"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["event_code"] for row in rows] == ["RK-305", "RK-305", "RK-304", "RK-201", "RK-601"]
    assert (rows[0]["actor"], rows[2]["status"], rows[2]["attempts"]) == ("ann", "success", "1")
    assert rows[3]["idempotency_key"] == "'=order-7"
    assert json.loads(rows[3]["event"])["idempotency_key"] == "=order-7"
    assert not (rk.folder / "log.csv.head.json").exists()


def test_events_after_the_head_are_kept_apart_and_every_head_of_a_file_is_compared(rk: Commands, store: Path) -> None:
    first = kept_head(rk)
    recorded(store, [attempt(30)])
    ended = rk("audit", "verify", "--head", "kept.json")
    assert "nothing up to event 6 was changed" in ended.out
    assert "Events 7 to 7 are newer than the head" in ended.err
    newest = rk("audit", "head").out
    forged = first.replace(json.loads(first)["hash"], "f" * 64)
    for heads, code in ((first, 0), (forged, 65)):
        rk.write(heads + newest, "heads.jsonl")
        assert rk("audit", "verify", "--head", "heads.jsonl").code == code, "the newest one fits"
        rk("audit", "export", "log.jsonl", "--force")
        assert rk("audit", "verify", "log.jsonl", "--head", "heads.jsonl").code == code


@pytest.mark.usefixtures("store")
def test_of_a_file_of_heads_only_a_last_line_that_a_crash_has_cut_is_left_out(rk: Commands) -> None:
    head = kept_head(rk)
    for fits in (head.rstrip(), *(head + head[:left] for left in (1, 20, 100))):
        rk.write(fits, "heads.jsonl")
        ended = rk("audit", "verify", "--head", "heads.jsonl", "--json")
        assert (ended.code, ended.json["proven_up_to"]) == (0, 6)
    table = {
        head[:1]: "--head: heads.jsonl contains no head",
        head[:100]: "--head: heads.jsonl contains no head",
        f"{head}{head[:20]}\n{head}": "--head: heads.jsonl:2: this line is no head",
        "nonsense": "--head: heads.jsonl",
        "{}": "--head: heads.jsonl",
        json.dumps(json.loads(head) | {"hash": "0" * 64}) + f"\n{head}": "event 6: the hash is not the one of the head",
    }
    for text, said in table.items():
        rk.write(text, "heads.jsonl")
        ended = rk("audit", "verify", "--head", "heads.jsonl")
        assert (ended.code, said in ended.out + ended.err) == (65, True), text


@pytest.mark.usefixtures("store")
def test_of_a_configured_file_the_heads_of_the_logs_own_chain_count(rk: Commands) -> None:
    rk.write("engine: sqlite:state.db\naudit: {heads: {path: heads.jsonl}}\n")
    assert "audit.heads: heads.jsonl: there is no such file" in rk("audit", "verify").err
    ours = rk("audit", "head").out
    rk.write(ours + ours.replace(json.loads(ours)["chain"], "another"), "heads.jsonl")
    ended = rk("audit", "verify", "--json")
    assert (ended.code, ended.json["proven_up_to"]) == (0, 6)
    assert "also has heads of 1 other chain" in ended.err
    assert rk("audit", "verify", "state.db", "--json").json["proven_up_to"] == 6, "a store that is named as a file"
    assert rk("audit", "verify", "--head", "heads.jsonl").code == 65, "a head that was named is of this log, or is not"


@pytest.mark.parametrize("body", ["'nonsense'", "CAST(x'7b22ff227d' AS TEXT)"])
def test_an_event_that_is_no_json_any_more_stops_no_command_but_an_export(rk: Commands, store: Path, body: str) -> None:
    change(store, f"UPDATE audit SET body = {body} WHERE sequence = 2")
    assert [rk("audit", *words.split()).code for words in ("verify", "replay", "export log.jsonl")] == [65] * 3
    assert not (rk.folder / "log.jsonl").exists()
    if body == "'nonsense'":
        assert json.loads(rk("audit", "tail", "--json").out.splitlines()[1])["event"] == "nonsense"
        assert "2  " in rk("audit", "tail").out
        analysed = rk("audit", "analyse", "--json")
        assert (analysed.code, analysed.json["unreadable"]) == (65, 1)
        assert "1 events could not be read" in analysed.err


@pytest.mark.parametrize("verb", ["verify", "replay", "analyse"])
def test_a_store_may_be_named_by_its_file(rk: Commands, store: Path, verb: str) -> None:
    by_engine = rk("audit", verb, "--engine", "sqlite:state.db", "--json").json
    (rk.folder / "other.db").write_bytes(b"SQLite format 3\x00" + b"x" * 4000)
    assert rk("audit", verb, "other.db").code in (65, 78), "a database that is no store is not read as lines"
    for named in ("state.db", "sqlite:state.db"):
        by_name = rk("audit", verb, named, "--json")
        assert (by_name.code, by_name.json) == (0, by_engine)
    change(store, "UPDATE audit SET body = 'nonsense' WHERE sequence = 2")
    assert [rk("audit", verb, named).code for named in ("state.db", "sqlite:state.db")] == [65, 65]


@pytest.mark.usefixtures("store")
def test_the_head_of_another_store_is_a_mismatch_and_another_programs_database_is_refused(rk: Commands) -> None:
    recorded(rk.folder / "other.db")
    rk("audit", "export", "other.jsonl", "--engine", "sqlite:other.db")
    assert rk("audit", "verify", "--head", "other.jsonl.head.json").code == 65
    change(rk.folder / "foreign.db", "CREATE TABLE theirs (x)")
    assert rk("audit", "verify", "--engine", "sqlite:foreign.db").code == 78
    (rk.folder / "deep").mkdir()
    rk.environment.chdir(rk.folder / "deep")
    assert rk("audit", "verify").code == 0, "the configured engine is found beside the configuration"


def test_a_decision_that_comes_out_differently_is_listed_and_the_exit_code_says_so(rk: Commands, store: Path) -> None:
    change(store, """UPDATE audit SET body = replace(body, '"delay":1.0', '"delay":9.0') WHERE sequence = 1""")
    ended = rk("audit", "replay", "--json")
    recorded_and_decided = {"recorded": "again after 9.0 s", "decided": "again after 1.0 s"}
    assert ended.code == 65
    assert ended.json["differences"] == [{"sequence": 1, "event_type": "retry_attempt"} | recorded_and_decided]
    assert "1 difference" in rk("audit", "replay").out


@pytest.mark.usefixtures("store")
def test_a_line_of_a_file_that_cannot_be_read_or_is_nested_too_deeply_is_a_mismatch(rk: Commands) -> None:
    rk("audit", "export", "log.jsonl")
    assert rk("audit", "replay", "log.jsonl", "--json").json["decisions"] == 4
    whole = (rk.folder / "log.jsonl").read_bytes()
    (rk.folder / "log.jsonl").write_bytes(whole + b"nonsense\n")
    ended = rk("audit", "replay", "log.jsonl", "--json")
    assert (ended.code, ended.json["differences"][0]["event_type"]) == (65, "unreadable")
    (rk.folder / "log.jsonl").write_bytes(whole + b'{"event":' + b"[" * 50_000 + b"\n")
    for verb in ("verify", "replay", "analyse", "head"):
        ended = rk("audit", verb, "log.jsonl")
        assert (ended.code, "internal error" in ended.err) == (65, False), ended.err


def test_a_replay_says_what_could_not_be_decided_again_and_missing_inputs_are_a_difference(rk: Commands) -> None:
    refused = event.Admission(timestamp=at(0), work_id="a", status="rejected", reason="invalid")
    store = recorded(rk.folder / "state.db", [refused])
    ended = rk("audit", "replay")
    assert (ended.code, "1 could not be decided again" in ended.out) == (0, True)
    assert "admission refused as invalid: 1" in ended.err
    assert rk("audit", "replay", "--json").json["undecided_by"] == {"admission refused as invalid": 1}
    recorded(store, [event.Routing(timestamp=at(0), work_id="a", worker_id="w1", reason="chosen")])
    ended = rk("audit", "replay")
    assert (ended.code, "worker_id 'w1' with no inputs" in ended.out) == (65, True)


def test_a_replay_over_retention_is_fine(rk: Commands, store: Path) -> None:
    """The control: an anchor is an event like the others, and a replay can read it."""

    async def trim(opened: port.Store) -> None:
        await opened.audit.append([entry(attempt(20))])
        assert await opened.audit.trim(int((NOON + 61) * 1000)) == 7
        await opened.audit.append([entry(attempt(30))])

    in_store(store, trim)
    rk("audit", "export", "log.jsonl")
    for words in ([], ["log.jsonl"]):
        assert rk("audit", "replay", *words, "--json").json["events"] == 2
        assert rk("audit", "verify", *words).code == 0


def test_ten_thousand_events_are_replayed_in_seconds(rk: Commands) -> None:
    recorded(rk.folder / "state.db", [attempt(number, number=1 + number % 2) for number in range(10_000)])
    began = perf_counter()
    assert rk("audit", "replay", "--json").json["decisions"] == 10_000
    assert perf_counter() - began < 5.0 * slowness()


@pytest.mark.parametrize("words", [[], ["--force"], ["--format", "csv", "--force"]])
@pytest.mark.usefixtures("store")
def test_a_pipe_is_written_as_it_is_and_never_replaced(rk: Commands, words: list[str]) -> None:
    pipe = rk.folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ended = rk("audit", "export", "pipe", *words)
        text = os.read(reader, 65_536)
    finally:
        os.close(reader)
    assert (ended.code, text.count(b"\n")) == (0, 7), ended.err
    assert pipe.is_fifo()
    assert not (rk.folder / "pipe.head.json").exists(), "no head beside a device"


def test_an_empty_log_is_exported_too_and_a_link_to_a_file_stays_a_link(rk: Commands) -> None:
    recorded(rk.folder / "state.db", [])
    (rk.folder / "link.jsonl").symlink_to("log.jsonl")
    assert rk("audit", "export", "link.jsonl", "--json").json["events"] == 0
    assert (rk.folder / "link.jsonl").is_symlink()
    assert rk("audit", "verify", "log.jsonl").code == 0


def test_a_file_that_is_no_log_is_named_with_what_was_expected(rk: Commands) -> None:
    for text in ("", "hello\n", '{"a": 1}\n', "\x1b[2J\n", '{"event":{},"hash":"x","sequence":1}\n'):
        rk.write(text, "notes.txt")
        for verb in ("replay", "analyse"):
            ended = rk("audit", verb, "notes.txt")
            assert (ended.code, ended.out) == (65, "")
            assert "notes.txt:1: this is not an audit log: expected" in ended.err
            assert ended.err.replace("\n", "").isprintable()


def test_a_replay_reports_which_books_are_not_in_the_log_and_a_changed_one_is_a_difference(rk: Commands) -> None:
    told = event.BookStored(timestamp="", book_hash=content_hash(CONTENT), content=CONTENT)
    with_books = [
        msgspec.structs.replace(STORY[0], decision=msgspec.structs.replace(decision(1), book_hash=one))
        for one in (content_hash(CONTENT), "0123456789abcdef")
    ]
    store = recorded(rk.folder / "state.db", [*with_books, told])
    ended = rk("audit", "replay")
    assert ended.code == 0
    assert "Missing from the log: 1 of the policy books that were in force (0123456789ab)" in ended.err
    assert rk("audit", "replay", "--json").json["books"] == 1
    recorded(store, [event.BookStored(timestamp="", book_hash="f" * 64, content=CONTENT)])
    ended = rk("audit", "replay")
    assert (ended.code, "event 4 (book_stored): recorded: book ffffffffffff" in ended.out) == (65, True)


CONTENT: dict[str, Any] = {"operations": {"KV_GET": {"max_attempts": 9}}}


def body_of(kind: str, work: str = "w", **fields: str) -> bytes:
    return msgspec.json.encode({"event_type": kind, "work_id": work, **fields}, order="sorted")


def test_events_in_an_export_have_the_ids_of_the_submission_of_their_own_tenant() -> None:
    known, long, other = audit_files.SubmittedIds(), "tenant-of-many-letters", "another-tenant-of-letters"
    known.index_of(body_of("submitted", tenant_id=long, correlation_id="c", trace_id="t"))
    known.index_of(body_of("submitted", tenant_id=other, correlation_id="d", trace_id="u"))
    assert known.index_of(body_of("completed", tenant_id=long)) == EventIndex("completed", "c", "t", "w")
    hashed = event.tenant_hash(other)
    assert known.index_of(body_of("routing", tenant_hash=hashed)) == EventIndex("routing", "d", "u", "w")
    assert known.index_of(body_of("completed")) == EventIndex("completed", None, None, "w")
    assert known.index_of(body_of("requeued", tenant_id=long)) == EventIndex("requeued", None, None, "w")
    filed = EventIndex("completed", "x", None, "w")
    assert known.index_of(body_of("completed", tenant_id=long), filed) == filed
    assert known.index_of(b"[") == EventIndex()


def test_an_export_says_the_ids_of_work_whose_submission_it_does_not_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_files, "MOST_SUBMISSIONS", 2)
    known = audit_files.SubmittedIds()
    for work in ("a", "b", "c"):
        known.index_of(body_of("submitted", work, correlation_id=f"of {work}"))
    found = [known.index_of(body_of("completed", work)).correlation_id for work in ("a", "b", "c")]
    assert found == [None, "of b", "of c"]
    line = audit_files._exported_line("0" * 16, kept_as("a", "of a"), known)
    assert b'"filed":{"event_type":"completed","correlation_id":"of a"' in line
    assert b'"filed"' not in audit_files._exported_line("0" * 16, kept_as("b", "of b"), known)


def kept_as(work: str, correlation: str) -> KeptEntry:
    return KeptEntry(1, "0" * 64, AuditEntry(body_of("completed", work), "completed", 0, correlation, None, work))
