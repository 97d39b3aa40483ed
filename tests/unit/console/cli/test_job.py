"""`reefknot job` on a store without a running system."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import Quarantined
from reefknot.console.cli.store import StoreAddress
from reefknot.console.cli.top import _put_view
from reefknot.console.operations import jobs, operator
from reefknot.core.redaction import Redactor
from reefknot.ingest.jobs import IngestionJob
from reefknot.policy.settings import load_settings
from reefknot.queue.model.notes import CHECKPOINT, LINES, Notes, StepLine, StepLog, StepProgress
from reefknot.queue.model.work import TryAgain, WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held
from reefknot.stores.sqlite import work_rows
from tests.unit.console.cli import work_items
from tests.unit.console.cli.audit_events import change, in_store
from tests.unit.console.cli.running import Commands
from tests.unit.console.cli.steps import lines, prepared


def test_a_list_narrows_by_its_filters_and_goes_on_where_it_ended(rk: Commands, store: Path) -> None:
    work_items.submitted(store, "a")
    work_items.accepted(store, "b", WorkFailed('{"code": "HTTP_ERROR", "message": "it answered 503"}', None, "spent"))
    work_items.failed_job(store, IngestionJob("notes/1", "local_files", "notes"))
    work_items.accepted(store, "acme|c", WorkDone(), kind="local_files")
    table = {
        "": ["c", "notes/1", "b", "a"],
        "--state succeeded": ["c"],
        "--tenant acme": ["c"],
        "--type fs.blob_get": ["b", "a"],
        "--source notes": ["notes/1"],
        "--connector local_files": ["notes/1"],
        "--error answered": ["b"],
        "--error spent": ["b"],
        "--before 1h": [],
        "--since 1m --sort oldest": ["a", "b", "notes/1", "c"],
        "--since 1h --before 2999-01-01T00:00:00Z --type fs.blob_get": ["b", "a"],
    }
    assert {words: work_items.ids(rk, "job", *words.split()) for words in table} == table
    first = rk("job", "list", "--json", "--limit", "2").json
    assert [one["id"] for one in first["jobs"]] == ["c", "notes/1"]
    assert (first["states"]["succeeded"], first["waiting_for_router"]) == (1, 1)
    assert "total: 1 pending, 1 succeeded, 1 failed, 1 quarantined" in rk("job", "list", "--sort", "oldest").err
    filtered = rk("job", "list", "--state", "succeeded").err
    assert ("all jobs: 1 pending, 1 succeeded" in filtered, "total" in filtered) == (True, False)
    assert work_items.ids(rk, "job", "--after", first["next"]) == ["b", "a"]
    assert "hunter2" not in "".join(rk("job", "show", "b", *form).out for form in ((), ("--json",)))


def test_a_list_that_ends_at_the_bound_of_its_search_says_so_and_goes_on(rk: Commands, store: Path) -> None:
    work_items.accepted(store, "old", WorkFailed(None, None, "rare"))
    work_items.submitted(store, "a", "b", "c")
    rk.environment.setattr(work_rows, "SCANNED", (2,))
    rk.environment.setattr(work_rows, "_LEAST_SHARE", 1)
    first = rk("job", "list", "--error", "rare")
    assert "search limit reached; continue with --after b" in first.err
    assert "old" in rk("job", "list", "--error", "rare", "--after", "b").out


def test_a_waiting_retry_says_when_it_is_due_and_a_running_attempt_that_it_runs(rk: Commands, store: Path) -> None:
    work_items.accepted(store, "later", TryAgain(4_000_000_000_000, "{}", "transient", 1000, "HTTP_ERROR"))
    (one,) = rk("job", "list", "--json").json["jobs"]
    assert (one["state"], one["attempts"], one["worker"]) == ("pending", 1, "worker-1")
    assert one["due_in_s"] > 1000
    assert "in " in rk("job", "list").out
    item = WorkItem("x", "fs.blob_get", "cpu@worker-1", payload=b"{}")
    in_store(store, lambda one: one.work.assign([item], start={"x"}, owner="worker-1#1"))
    assert re.search(r"attempts +1 \(running\)", rk("job", "show", "x").out)
    assert rk("job", "show", "x", "--json").json["attempts"] == 0, "those that have ended"
    assert re.search(r"\bx +fs\.blob_get +running +1\b", rk("job", "list").out)


def test_what_a_step_says_is_shown_with_its_job_and_its_lines_by_job_logs(rk: Commands, store: Path) -> None:
    item = WorkItem("acme|x", "own.step", "cpu@worker-1", tenant_id="acme", payload=b"{}")
    in_store(store, lambda one: one.work.assign([item], start={item.id}, owner="worker-1#1"))
    log = StepLog((StepLine(0, 1, "begins"), StepLine(1500, 2, "password=hunter2 and on")), dropped=3)
    parts = {CHECKPOINT: b'{"page":3,"token":"hunter2"}', LINES: json.encode(log)}
    notes = Notes(2, StepProgress(3, 10, "page 3"), parts)
    assert in_store(store, lambda one: one.work.note(Held(item.id, "worker-1#1", 1), notes))

    shown = rk("job", "show", "x", "--tenant", "acme").out
    assert re.search(r"progress +3 of 10 \(30 %\), page 3\n", shown)
    assert re.search(r'checkpoint +\{"at": .*"number": 2, "value": \{"page": 3, "token": "\[redacted\]"\}\}', shown)
    told = rk("job", "show", "x", "--json").json
    assert told["progress"] == {"done": 3, "of": 10, "percent": 30, "text": "page 3"}
    assert rk("job", "list", "--json").json["jobs"][0]["progress"] == told["progress"]

    logs = rk("job", "logs", "x")
    assert logs.out.splitlines() == [
        "1970-01-01T00:00:00.000Z  attempt 1  begins",
        "1970-01-01T00:00:01.500Z  attempt 2  password=[redacted] and on",
    ]
    assert "3 earlier lines not kept: a job has its last 200, or 32 kB" in logs.err
    one, two = map(json.decode, rk("job", "logs", "x", "--tenant", "acme", "--json").out.splitlines())
    assert one == {"number": 4, "at": "1970-01-01T00:00:00.000Z", "attempt": 1, "text": "begins"}
    assert (two["number"], two["attempt"]) == (5, 2)
    assert "x of acme   own.step   worker-1   3 of 10 (30 %), page 3" in rk("top", "--once").out

    cancelled = rk("job", "cancel", "x", "--tenant", "acme")
    assert cancelled.code == 0, cancelled.err
    assert rk("job", "logs", "x", "--follow").out == logs.out, "it ends with the job"
    assert "x of acme" not in rk("top", "--once").out.split("ended")[0]


def test_a_job_whose_step_said_nothing_has_no_lines_and_an_unknown_one_is_refused(rk: Commands, store: Path) -> None:
    work_items.submitted(store, "x")
    found = rk("job", "logs", "x")
    assert (found.code, found.out) == (0, "")
    assert "no step of x has logged a line" in found.err
    assert rk("job", "logs", "x", "--json").err == ""
    unknown = rk("job", "logs", "y")
    assert (unknown.code, unknown.out) == (1, "")
    assert "there is no job 'y'" in unknown.err


def test_the_history_of_a_job_has_no_line_twice(rk: Commands, store: Path) -> None:
    """What an event tells is not told again; without its event, it is told."""
    work_items.quarantined(store, "x")
    assert rk("job", "show", "x").out.count("Z  quarantined: attempts_spent") == 1
    event = Quarantined(**envelope(wall=1.0, work_id="x"), reason="attempts_spent")
    in_store(store, lambda one: Journal(one.audit).write(event))
    assert rk("job", "show", "x").out.count("Z  quarantined: attempts_spent") == 1


@pytest.mark.parametrize("body", ["'nonsense'", "'[]'"])
def test_a_damaged_event_of_a_job_is_shown_as_unreadable_among_the_others(rk: Commands, store: Path, body: str) -> None:
    work_items.submitted(store, "x")
    assert rk("job", "cancel", "x", "--as", "ann").code == 0
    whole = rk("job", "show", "x", "--json").json["events"]
    newest = "SELECT max(sequence) FROM audit WHERE work_id = 'x'"
    change(store, f"UPDATE audit SET body = {body} WHERE sequence = ({newest})")
    events = rk("job", "show", "x", "--json").json["events"]
    assert events[:-1] == whole[:-1]
    assert (events[-1]["unreadable"], events[-1]["event_type"]) == (True, whole[-1]["event_type"])
    plain = rk("job", "show", "x")
    assert (plain.code, "is unreadable; see `audit verify`" in plain.out) == (0, True)


def test_the_story_of_a_job_that_ran_has_its_attempts_and_the_layer_that_decided(rk: Commands, store: Path) -> None:
    own = prepared(rk)
    assert rk("run", lines(rk, own.flaky("a", 2)), "--module", own.module).code == 0
    settings = load_settings(str(rk.folder / "reefknot.yaml"), environ={}, cwd=rk.folder)
    found = in_store(store, lambda one: jobs.job_story(operator.Operator(one, Redactor(), None, settings), "a"))
    told = [(one["number"], one["outcome"], one["decision"], one["layer"]) for one in found["attempts"]]
    assert told == [(1, "retried", "again", "global"), (2, "retried", "again", "global"), (3, "succeeded", None, None)]
    first, second, last = found["attempts"]
    named = first["classification"], first["failure_type"], first["wait_from"]
    assert named == ("execution", "transient", "own backoff")
    assert (first["worker_id"], found["worker"], found["state"]) == ("worker-1", "worker-1", "succeeded")
    assert first["started_at"] <= first["ended_at"] <= second["ended_at"] <= last["ended_at"]
    assert second["due_at"] >= first["ended_at"]
    assert all(one["started_at"] and one["duration_s"] >= 0 for one in found["attempts"])


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_line_of_top_is_wider_than_the_terminal(rk: Commands, columns: int) -> None:
    unserved = {"text": "no router is running, and 123456 jobs wait for one", "remedy": "start one: reefknot up"}
    view: dict[str, Any] = dict.fromkeys(("workers", "gone", "breakers", "last_ends"), ())
    view |= {"states": {state.value: 123_456 for state in WorkState}, "quarantine": {"size": 123_456}}
    view |= {"oldest_due_s": 86_399.0, "window_s": 60, "ended_per_s": 12_345.6, "retries_per_s": 12_345.6}
    progress = {"done": 123_456, "of": 1_234_567, "percent": 10, "text": "a long sentence about a page " * 4}
    step = {"id": "a-long-id" * 5, "tenant_id": "acme", "type": "own.step", "worker": "worker-1", "progress": progress}
    view |= {"routers": 12, "unserved": [unserved], "under_way": [step]}
    address = StoreAddress(f"sqlite:{'/a/long/path' * 12}/state.db", None, Redactor(()))
    rk.environment.setenv("COLUMNS", str(columns))
    rk.taken()
    _put_view(view, address, ["problem: " + "a long sentence about the configuration " * 4])
    out, _ = rk.taken()
    assert max(map(len, out.splitlines())) <= max(columns, 72), out


def test_a_full_disk_is_a_problem_of_the_doctor(rk: Commands, store: Path) -> None:
    real = shutil.disk_usage(rk.folder)
    for free, level, code in ((1 << 20, "problem", 1), (500 << 20, "warning", 0), (2 << 30, "ok", 0)):
        rk.environment.setattr(shutil, "disk_usage", lambda _, free=free: real._replace(free=free))
        done = rk("doctor", "--json")
        (disk,) = [one for one in done.json["findings"] if one["check"] == "disk"]
        assert (disk["level"], done.code) == (level, code)
