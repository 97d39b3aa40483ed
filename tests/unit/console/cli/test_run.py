"""`reefknot run`: results, the summary, and how every assignment ends exactly once."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli.assignments import assignments
from reefknot.console.cli.run import BatchRun, Tally
from reefknot.queue.model.messages import LARGEST_MESSAGE, ExecResult, ResultJob, ResultStatus
from reefknot.queue.model.work import Quarantine, WorkFailed, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.unit.console.cli.running import Commands
from tests.unit.console.cli.steps import get, lines, prepared, results

ENDS = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")
KEYS = ["total", *ENDS, "recovered", "quarantined", "retries", "unfinished", "elapsed_s"]


def summary(rk: Commands, *words: str, code: int) -> dict[str, Any]:
    ended = rk("run", *words, "--json")
    assert ended.code == code, ended.err
    (line,) = ended.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["total"] == sum(found[end] for end in ENDS)
    return found


def test_a_file_that_succeeds_ends_with_0_and_exactly_the_promised_summary(rk: Commands) -> None:
    prepared(rk)
    found = summary(rk, lines(rk, get("a.txt"), get("a.txt")), code=0)

    assert list(found) == KEYS
    assert (found["total"], found["succeeded"], found["retries"]) == (2, 2, 0)
    assert (rk.folder / ".reefknot" / "state.db").exists(), "the default store is beside the configuration"


def test_a_retried_success_is_recovered_and_a_spent_one_failed(rk: Commands) -> None:
    own = prepared(rk)
    file = lines(rk, own.flaky("lucky", 1), own.flaky("unlucky", 9))
    found = summary(rk, file, "--module", own.module, "--results", "out.jsonl", code=1)

    assert (found["succeeded"], found["recovered"], found["failed"], found["quarantined"]) == (1, 1, 1, 0)
    assert found["retries"] == 3
    ended = results(rk.folder / "out.jsonl")
    assert ended["lucky"]["output"] == {"attempt": 2}
    assert (ended["unlucky"]["error_code"], ended["unlucky"]["retries_used"]) == ("RESOURCE_UNAVAILABLE", 2)


def test_quarantined_work_is_among_the_failed(rk: Commands) -> None:
    own = prepared(rk, quarantine=True)
    found = summary(rk, lines(rk, own.flaky("unlucky", 9)), "--module", own.module, code=1)

    assert (found["failed"], found["quarantined"]) == (1, 1)
    assert rk("quarantine", "stats", "--json").json["total"] == 1


def test_time_that_runs_out_is_counted_as_such(rk: Commands) -> None:
    own = prepared(rk)
    late = own.nap("late", 30, options={"timeout_ms": 50})
    found = summary(rk, lines(rk, late), "--module", own.module, code=1)

    assert found["timed_out"] == 1


def test_bad_lines_are_reported_with_their_numbers_and_the_good_ones_run(rk: Commands) -> None:
    prepared(rk)
    file = lines(
        rk,
        get("a.txt", "one"),
        "{not json",
        "",
        "[1]",
        '{"job": {"payload": {}}}',
        get("a.txt", "one"),
        get("a.txt", options={"deadline_ms": 0}),
        get("a.txt", version="7"),
        get("a.txt", resource_class="tpu"),
        json.dumps(get("a" * LARGEST_MESSAGE)),
        get("a.txt", "two"),
    )
    ended = rk("run", file, "--json")
    told = [line.removeprefix("work.jsonl:") for line in ended.err.splitlines() if line.startswith("work.jsonl:")]

    assert ended.code == 1
    assert (ended.json["succeeded"], ended.json["rejected"], ended.json["total"]) == (2, 8, 10)
    assert sorted(int(line.partition(":")[0]) for line in told) == [2, 4, 5, 6, 7, 8, 9, 10]
    words = {2: "not JSON", 4: "not an object", 5: "job.type: missing", 6: "is in line 1 already"}
    words |= {7: "options.deadline_ms", 8: "version", 9: "resource_class: 'tpu'", 10: "longer than"}
    for number, word in words.items():
        assert any(line.startswith(f"{number}: ") and word in line for line in told), (number, told)


def test_a_full_queue_makes_it_wait_and_not_fail(rk: Commands) -> None:
    """Forty naps, a queue of one place at the router and at the worker."""
    own = prepared(rk, size=1)
    file = lines(rk, *(own.nap(f"n{number}", 0.01) for number in range(40)))
    found = summary(rk, file, "--module", own.module, code=0)

    assert found["succeeded"] == 40


def test_the_same_ids_again_are_answered_from_the_record(rk: Commands) -> None:
    own = prepared(rk)
    file = lines(rk, own.flaky("once", 1))
    summary(rk, file, "--module", own.module, code=0)
    ended = rk("run", file, "--module", own.module, "--results", "out.jsonl", "--json")

    assert (ended.code, ended.json["succeeded"]) == (0, 1)
    assert results(rk.folder / "out.jsonl")["once"]["output"] == {"attempt": 2}, "it did not run a third time"
    assert "had finished in an earlier run" in ended.err


def test_a_file_without_ids_is_the_same_work_when_it_is_run_again(rk: Commands) -> None:
    prepared(rk)
    file = lines(rk, get("a.txt"), get("a.txt"))
    summary(rk, file, "--results", "1.jsonl", code=0)
    ended = rk("run", file, "--results", "2.jsonl")
    first, again = results(rk.folder / "1.jsonl"), results(rk.folder / "2.jsonl")

    assert first == again
    assert len(first) == 2, "equal lines are two assignments"
    assert "2 had finished in an earlier run" in ended.err
    assert "--new runs lines without an id again" in ended.err


def test_ids_that_failed_in_an_earlier_run_are_told_with_the_command_that_runs_them_again(rk: Commands) -> None:
    prepared(rk)
    bad = [get("gone.txt", "bad"), get("gone.txt", "worse"), get("gone.txt", "theirs", tenant_id="acme")]
    file = lines(rk, *bad, get("a.txt", "good"))
    assert "job retry" not in rk("run", file, "--config", "reefknot.yaml").err, "they failed in this run"
    again = rk("run", file, "--config", "reefknot.yaml")

    assert "4 had finished in an earlier run" in again.err
    assert "--new" not in again.err, "it does nothing for lines with ids"
    assert "reefknot job retry --config reefknot.yaml bad worse\n" in again.err
    assert "reefknot job retry --config reefknot.yaml --tenant acme theirs\n" in again.err
    (rk.folder / "files" / "gone.txt").write_text("back")
    assert rk("job", "retry", "--config", "reefknot.yaml", "bad", "worse").code == 0
    assert rk("job", "retry", "--config", "reefknot.yaml", "--tenant", "acme", "theirs").code == 0
    assert rk("run", file).code == 0


def test_new_ids_or_another_content_are_other_work(rk: Commands) -> None:
    prepared(rk)
    file = lines(rk, get("a.txt"))
    ids: set[str] = set()
    for number, words in enumerate(([], ["--new"], ["--new"])):
        summary(rk, file, "--results", f"{number}.jsonl", *words, code=0)
        ids |= results(rk.folder / f"{number}.jsonl").keys()
    assert len(ids) == 3
    summary(rk, lines(rk, get("a.txt"), get("a.txt")), "--results", "more.jsonl", code=0)
    assert ids.isdisjoint(results(rk.folder / "more.jsonl"))


def test_no_more_ids_are_kept_than_are_compared(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition that is too far away is answered from the record; another job under the id is refused by it."""
    monkeypatch.setattr("reefknot.console.cli.assignments.MOST_IDS", 3)
    prepared(rk)
    named = [{"assignment_id": name, "request_id": "r"} | get("a.txt") for name in "abcdec"]
    found = rk("run", lines(rk, *named, named[0]), "--json", "--in-flight", "1")
    assert (found.json["succeeded"], found.json["rejected"]) == (6, 1)
    assert ":6: assignment_id: 'c' is in line 3 already" in found.err


async def largest_memory() -> int:
    """Bytes that reading many ids takes."""
    tracemalloc.start()
    async for _ in assignments("ids.jsonl"):
        pass
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return largest


def test_reading_takes_no_more_memory_however_many_ids_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.jsonl").write_text(
        "".join(json.dumps({"assignment_id": f"{n}", "job": {"type": "a"}}) + "\n" for n in range(8_000))
    )
    monkeypatch.setattr("reefknot.console.cli.assignments.MOST_IDS", 100)
    bounded = asyncio.run(largest_memory())
    monkeypatch.setattr("reefknot.console.cli.assignments.MOST_IDS", 1 << 30)
    unbounded = asyncio.run(largest_memory())  # the control
    assert bounded < 400_000 < unbounded


# ---- gates -----------------------------------------------------------------------------------------------------------


def test_a_named_file_that_is_missing_is_78_unless_the_environment_opened_the_gate(rk: Commands) -> None:
    prepared(rk)
    file = lines(rk)
    assert rk("run", file, "--config", "gone.yaml").code == 78

    rk.environment.setenv("WORKER_RETRIES_V2_ENABLED", "true")
    ended = rk("run", file, "--config", "gone.yaml")
    assert (ended.code, "gone.yaml is missing, so the baseline is in force" in ended.err) == (0, True)
    (told,) = [line for line in ended.err.splitlines() if "baseline" in line]
    assert told.endswith("; create the file, or do not name it"), "the variable is set already"

    rk.environment.setenv("WORKER_RETRIES_V2_ENABLED", "false")
    (told,) = [line for line in rk("run", file).err.splitlines() if "worker.retries.v2 is off" in line]
    assert told.endswith("To switch it on: WORKER_RETRIES_V2_ENABLED=true; the environment overrides the file")


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["work.jsonl", "./work.jsonl", "hard.jsonl", "soft.jsonl"])
@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_results_never_replace_the_input_whatever_name_it_has(rk: Commands, name: str, flags: tuple[str, ...]) -> None:
    prepared(rk)
    file = rk.folder / lines(rk, get("a.txt"))
    before = file.read_bytes()
    (rk.folder / "hard.jsonl").hardlink_to(file)
    (rk.folder / "soft.jsonl").symlink_to(file)
    ended = rk("run", "work.jsonl", "--results", name, *flags)

    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"reefknot: --results: {name}: is the file that is read; name another one\n"
    assert file.read_bytes() == before


def test_an_existing_results_file_is_replaced_with_force_alone(rk: Commands) -> None:
    prepared(rk)
    file, out = lines(rk, get("a.txt")), rk.folder / "out.jsonl"
    out.write_text("precious\n")
    refused = rk("run", file, "--results", "out.jsonl")

    assert (refused.code, out.read_text()) == (2, "precious\n")
    assert "out.jsonl: exists already; name another file, or replace it with --force" in refused.err
    assert not (rk.folder / ".reefknot").exists(), "nothing was started"

    assert rk("run", file, "--results", "out.jsonl", "--force").code == 0
    assert len(out.read_text().splitlines()) == 1
    assert [one.name for one in rk.folder.glob(".out*")] == []


def test_a_run_that_breaks_off_leaves_the_old_results(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(rk)
    file, out = lines(rk, get("a.txt")), rk.folder / "out.jsonl"
    out.write_text("precious\n")

    async def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BatchRun, "run", broken)

    assert rk("run", file, "--results", "out.jsonl", "--force").code == 1
    assert out.read_text() == "precious\n"
    assert [one.name for one in rk.folder.glob(".out*")] == []


def test_results_go_to_a_device_as_it_is(rk: Commands) -> None:
    prepared(rk)

    assert rk("run", lines(rk, get("a.txt")), "--results", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("names", [("ok", "route/ok"), ("route/ok", "ok")])
def test_an_id_that_reads_like_another_ones_submission_is_an_id_like_any_other(
    rk: Commands, names: tuple[str, str]
) -> None:
    prepared(rk, size=1)
    file = lines(rk, *(get("a.txt", name) for name in names))

    assert summary(rk, file, code=0)["succeeded"] == 2
    assert [rk("job", "show", name, "--json").json["state"] for name in names] == ["succeeded"] * 2
    listed = rk("job", "list", "--json").json["jobs"]
    assert sorted(one["id"] for one in listed) == sorted(names)


def test_an_id_that_was_used_for_another_job_is_rejected_with_its_line_and_the_same_job_is_answered(
    rk: Commands,
) -> None:
    prepared(rk)
    summary(rk, lines(rk, get("a.txt", "one"), get("a.txt", "two")), code=0)
    file = lines(rk, get("a.txt", "one"), get("b.txt", "two"))
    ended = rk("run", file, "--json")

    assert (ended.code, ended.json["succeeded"], ended.json["rejected"]) == (1, 1, 1)
    assert "work.jsonl:2: assignment_id: id 'two' was used with another job (fingerprint " in ended.err


def exec_result(status: ResultStatus, retries: int = 0) -> ExecResult:
    return ExecResult("x", "r", status, "worker-1", ResultJob("t"), retries_used=retries)


async def failed(store: Store) -> None:
    await settled(store, WorkFailed(None, None, "attempts_spent"))


async def quarantined(store: Store) -> None:
    await settled(store, Quarantine("attempts_spent"))


async def settled(store: Store, what: WorkFailed | Quarantine) -> None:
    await store.work.enqueue([WorkItem("x", "t", "cpu@w")])
    (item,) = await store.work.claim(1, WorkClaim(owner="me"))
    await store.work.settle([Settlement(item.id, item.owner, item.fence, what)])


async def dropped(store: Store) -> None:
    await store.work.enqueue([WorkItem("x", "t", "cpu@w")])
    await store.work.cancel("x", reason="dropped_oldest")


async def never_taken(store: Store) -> None:
    """No worker has a record of it."""


@pytest.mark.parametrize(
    ("status", "before", "end"),
    [
        (ResultStatus.SUCCESS, never_taken, "succeeded"),
        (ResultStatus.TIMEOUT, failed, "timed_out"),
        (ResultStatus.CANCELLED, never_taken, "cancelled"),
        (ResultStatus.ERROR, failed, "failed"),
        (ResultStatus.ERROR, quarantined, "failed"),
        (ResultStatus.ERROR, dropped, "dropped"),
        (ResultStatus.ERROR, never_taken, "rejected"),
    ],
)
@pytest.mark.real_time
async def test_every_result_has_one_end(status: ResultStatus, before: object, end: str) -> None:
    tally = Tally()
    async with open_store("memory:") as store:
        assert callable(before)
        await before(store)
        assert await tally.count(exec_result(status, 2), store) == end
    assert (tally.total, tally.ends[end], tally.retries) == (1, 1, 2)
    assert tally.recovered == (end == "succeeded")
    assert tally.quarantined == (before is quarantined)
    assert tally.all_succeeded == (end == "succeeded")


def test_the_sentence_leaves_out_what_did_not_happen() -> None:
    tally = Tally()
    tally.ends |= {"succeeded": 3, "failed": 1}
    tally.recovered, tally.quarantined, tally.retries = 2, 1, 1

    assert tally.sentence(1.26) == (
        "4 assignments in 1.3 s: 3 succeeded (2 after retries), 1 failed (1 in quarantine); 1 retry"
    )
