"""`reefknot submit`."""

from __future__ import annotations

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
