"""`reefknot submit`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from reefknot.cli import submit
from tests.unit.cli import work_items
from tests.unit.cli.running import Commands
from tests.unit.cli.steps import get, lines, prepared, up_until_ended


def test_what_is_submitted_is_kept_before_any_system_runs(rk: Commands) -> None:
    own = prepared(rk)
    ended = rk("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id", "x")

    assert (ended.code, ended.out) == (0, "x\n")
    assert up_until_ended(rk, "x", module=own.module).code == 0
    assert rk("job", "show", "x", "--json").json["result"]["output"]["content"] == "ahoy"


def test_the_same_id_twice_is_one_piece_of_work(rk: Commands) -> None:
    prepared(rk)
    for _ in range(2):
        assert rk("submit", "--type", "fs.blob_get", "--id", "x").code == 0

    assert len(rk("job", "list", "--json").json["jobs"]) == 1


def test_a_file_with_a_bad_line_hands_in_the_good_ones_and_ends_with_1(rk: Commands) -> None:
    prepared(rk)
    ended = rk("submit", lines(rk, get("a.txt", "one"), "not json", get("a.txt", "two")), "--json")

    assert (ended.code, ended.json["handed_in"], ended.json["mistakes"]) == (1, ["one", "two"], 1)
    assert "work.jsonl:2: not JSON" in ended.err


def test_waiting_without_a_system_ends_with_75_and_the_work_is_kept(rk: Commands) -> None:
    prepared(rk)
    ended = rk("submit", "--type", "fs.blob_get", "--id", "x", "--wait", "--timeout", "0.1", "--json")

    assert (ended.code, ended.json["results"]) == (75, [])
    assert "Is a system running?" in ended.err


def test_results_that_are_there_are_shown_and_a_failure_is_1(rk: Commands) -> None:
    prepared(rk)
    file = lines(rk, get("a.txt", "good"), get("gone.txt", "bad"))
    rk("run", file)
    ended = rk("submit", file, "--wait")

    assert ended.code == 1
    assert "ahoy" in ended.out
    assert "EXECUTION_FAILED: path: not found: gone.txt" in ended.out


def test_a_queue_that_stays_full_is_reported_with_75(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(rk, size=1)
    monkeypatch.setattr(submit, "GIVE_UP_S", 0.0)
    ended = rk("submit", lines(rk, get("a.txt", "one"), get("a.txt", "two")))

    assert (ended.code, "queue is full: 1 of 1" in ended.err) == (75, True)
    assert work_items.item(rk.folder / ".reefknot" / "state.db", "two") is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give either a FILE of assignments or one step with --type"),
        (["work.jsonl", "--type", "x"], "give either a FILE"),
        (["--type", "x", "--inputs", "{"], "--inputs: not JSON"),
        (["--type", "x", "--inputs", "[]"], "--inputs: accepted: a JSON object"),
        (["--type", ""], "--type: accepted"),
        (["--type", "x", "--deadline", "0"], "--deadline: 0"),
        (["--type", "x", "--timeout", "0"], "--timeout: 0"),
        (["--type", "x", "--engine", "memory:"], "memory: ends with the process"),
    ],
)
def test_unusable_words_are_refused(rk: Commands, words: list[str], told: str) -> None:
    ended = rk("submit", *words)

    assert (ended.code, told in ended.err) == (2, True)


def test_an_id_that_was_used_for_another_job_is_a_mistake_and_the_rest_is_submitted(rk: Commands) -> None:
    prepared(rk)
    assert rk("submit", lines(rk, get("a.txt", "one"))).code == 0
    ended = rk("submit", lines(rk, get("b.txt", "one"), get("a.txt", "two")), "--json")

    assert (ended.code, ended.json["handed_in"], ended.json["mistakes"]) == (1, ["two"], 1)
    assert "work.jsonl:1: assignment_id: key 'one' was used with another payload" in ended.err
    alone = rk("submit", "--type", "fs.blob_get", "--id", "one", "--inputs", '{"path": "c"}')
    assert (alone.code, "was used with another payload" in alone.err) == (1, True)


# ---- work for later -------------------------------------------------------------------------------------------------


def test_work_for_later_is_listed_as_scheduled_with_its_due_time(rk: Commands) -> None:
    prepared(rk)
    ended = rk("submit", "--type", "fs.blob_get", "--id", "x", "--in", "10m")
    assert (ended.code, ended.out, ", due at 20" in ended.err) == (0, "x\n", True)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    assert rk("submit", lines(rk, get("a.txt", "y")), "--at", tomorrow.isoformat()).code == 0

    jobs = {one["id"]: one for one in rk("job", "list", "--json").json["jobs"]}
    assert (jobs["x"]["state"], jobs["x"]["reason"]) == ("pending", "scheduled")
    assert 590 < jobs["x"]["due_in_s"] <= 600
    assert jobs["y"]["due_at"] == f"{tomorrow:%Y-%m-%dT%H:%M:%S}.000Z"
    listed = rk("job", "list").out
    assert ("scheduled" in listed, "in 10 min" in listed or "in 9" in listed) == (True, True)
    assert rk("job", "show", "y").out.count("scheduled") >= 1


def test_work_for_later_runs_when_it_is_due_and_not_before(rk: Commands) -> None:
    own = prepared(rk)
    assert rk("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id", "x", "--in", "1s").code == 0
    assert up_until_ended(rk, "x", module=own.module).code == 0
    shown = rk("job", "show", "x", "--json").json

    assert shown["state"] == "succeeded"
    assert shown["updated_at"] >= shown["history"][0]["at"], "the history has its due time"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--in", "soon"], "--in: 'soon' is not accepted: a duration such as 90s, 15m, 2h, 7d"),
        (["--in", "99999d"], "--in: '99999d'"),
        (["--at", "tomorrow"], "--at: 'tomorrow' is not accepted: a time such as"),
        (["--at", "2020-01-01T00:00:00Z"], "is over; leave --at out to submit for now"),
        (["--at", "2100-01-01", "--in", "1s"], "--at: not together with --in"),
        (["--at", "2100-01-01"], "is more than ten years ahead"),
    ],
)
def test_a_due_time_that_cannot_be_read_is_refused(rk: Commands, words: list[str], told: str) -> None:
    ended = rk("submit", "--type", "x", *words)

    assert (ended.code, told in ended.err) == (2, True), ended.err
