"""`reefknot run`: results, the summary, and how every assignment ends exactly once."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli import assignments as reading
from reefknot.console.cli.run import BatchRun, Tally
from reefknot.queue.model.messages import LARGEST_MESSAGE, ExecResult, ResultJob, ResultStatus
from reefknot.queue.model.work import Quarantine, WorkFailed, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores import opening, port
from tests.unit.console.cli.running import Commands
from tests.unit.console.cli.steps import Folder, get, lines, prepared, results

pytestmark = pytest.mark.usefixtures("own")
ENDS = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")


def summary(rk: Commands, *words: str, code: int) -> dict[str, Any]:
    ended = rk("run", *words, "--json")
    assert ended.code == code, ended.err
    (line,) = ended.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["total"] == sum(found[end] for end in ENDS)
    return found


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_retried_success_is_recovered_and_a_spent_one_failed_in_quarantine(rk: Commands, quarantine: bool) -> None:
    own = prepared(rk, quarantine=quarantine)
    late = own.nap("late", 30, options={"timeout_ms": 50})
    file = lines(rk, own.flaky("lucky", 1), own.flaky("unlucky", 9), late)
    found = summary(rk, file, "--module", own.module, "--results", "out.jsonl", code=1)
    assert (found["succeeded"], found["recovered"], found["failed"], found["timed_out"]) == (1, 1, 1, 1)
    assert (found["retries"], found["quarantined"]) == (3, int(quarantine)), "of those that failed"
    ended = results(rk.folder / "out.jsonl")
    assert ended["lucky"]["output"] == {"attempt": 2}
    assert (ended["unlucky"]["error_code"], ended["unlucky"]["retries_used"]) == ("RESOURCE_UNAVAILABLE", 2)
    assert rk("quarantine", "stats", "--json").json["total"] == 2 * quarantine, "and the one that was late"


def test_bad_lines_are_reported_with_their_numbers_and_the_good_ones_run(rk: Commands) -> None:
    good, bad = get("a.txt", "one"), ["{not json", "", "[1]", '{"job": {"payload": {}}}']
    odd = [get("a.txt", options={"deadline_ms": 0}), get("a.txt", version="7"), get("a.txt", resource_class="tpu")]
    file = lines(rk, good, *bad, good, *odd, json.dumps(get("a" * LARGEST_MESSAGE)), get("a.txt", "two"))
    ended = rk("run", file, "--json")
    told = [line.removeprefix("work.jsonl:") for line in ended.err.splitlines() if line.startswith("work.jsonl:")]
    assert (ended.code, ended.json["succeeded"], ended.json["rejected"], ended.json["total"]) == (1, 2, 8, 10)
    assert sorted(int(line.partition(":")[0]) for line in told) == [2, 4, 5, 6, 7, 8, 9, 10]
    words = {2: "not JSON", 4: "not an object", 5: "job.type: missing", 6: "is in line 1 already"}
    words |= {7: "options.deadline_ms", 8: "version", 9: "resource_class: 'tpu'", 10: "longer than"}
    for number, word in words.items():
        assert any(line.startswith(f"{number}: ") and word in line for line in told), (number, told)


def test_a_full_queue_makes_it_wait_and_not_fail(rk: Commands) -> None:
    """Forty naps, a queue of one place at the router and at the worker."""
    own = prepared(rk, size=1)
    file = lines(rk, *(own.nap(f"n{number}", 0.01) for number in range(40)))
    assert summary(rk, file, "--module", own.module, code=0)["succeeded"] == 40


def test_the_same_ids_again_are_answered_from_the_record_and_another_job_is_rejected(rk: Commands, own: Folder) -> None:
    file = lines(rk, own.flaky("once", 1), get("a.txt", "two"))
    summary(rk, file, "--module", own.module, code=0)
    file = lines(rk, own.flaky("once", 1), get("b.txt", "two"))
    ended = rk("run", file, "--module", own.module, "--results", "out.jsonl", "--json")
    assert (ended.code, ended.json["succeeded"], ended.json["rejected"]) == (1, 1, 1)
    assert results(rk.folder / "out.jsonl")["once"]["output"] == {"attempt": 2}, "it did not run a third time"
    assert "had finished in an earlier run" in ended.err
    assert "work.jsonl:2: assignment_id: id 'two' was used with another job (fingerprint " in ended.err


def test_a_file_without_ids_is_the_same_work_again_unless_it_is_new_or_has_another_content(rk: Commands) -> None:
    def ids(file: str, *words: str) -> set[str]:
        summary(rk, file, "--results", "out.jsonl", "--force", *words, code=0)
        return set(results(rk.folder / "out.jsonl"))

    file = lines(rk, get("a.txt"), get("a.txt"))
    first = ids(file)
    assert len(first) == 2, "equal lines are two assignments"
    assert ids(file) == first
    ended = rk("run", file)
    assert "2 had finished in an earlier run" in ended.err
    assert "--new runs lines without an id again" in ended.err
    others = [ids(file, "--new"), ids(file, "--new"), ids(lines(rk, *[get("a.txt")] * 3))]
    assert len(first.union(*others)) == 2 + 2 + 2 + 3


def test_ids_that_failed_in_an_earlier_run_are_told_with_the_command_that_runs_them_again(rk: Commands) -> None:
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


def test_no_more_ids_are_kept_than_are_compared(rk: Commands) -> None:
    """A repetition that is too far away is answered from the record; another job under the id is refused by it."""
    rk.environment.setattr(reading, "MOST_IDS", 3)
    named = [get("a.txt", name) for name in "abcdec"]
    found = rk("run", lines(rk, *named, named[0]), "--json", "--in-flight", "1")
    assert (found.json["succeeded"], found.json["rejected"]) == (6, 1)
    assert ":6: assignment_id: 'c' is in line 3 already" in found.err


async def largest_memory(path: Path) -> int:
    tracemalloc.start()
    async for _ in reading.assignments(str(path)):
        pass
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return largest


@pytest.mark.real_time
async def test_reading_many_ids_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("".join(f'{{"assignment_id": "{n}", "job": {{"type": "a"}}}}\n' for n in range(8_000)))
    monkeypatch.setattr(reading, "MOST_IDS", 100)
    bounded = await largest_memory(file)
    monkeypatch.setattr(reading, "MOST_IDS", 1 << 30)
    assert bounded < 400_000 < await largest_memory(file), "the second is the control"


@pytest.mark.parametrize("name", ["work.jsonl", "./work.jsonl", "hard.jsonl", "soft.jsonl"])
@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_results_never_replace_the_input_whatever_name_it_has(rk: Commands, name: str, flags: tuple[str, ...]) -> None:
    file = rk.folder / lines(rk, get("a.txt"))
    before = file.read_bytes()
    (rk.folder / "hard.jsonl").hardlink_to(file)
    (rk.folder / "soft.jsonl").symlink_to(file)
    ended = rk("run", "work.jsonl", "--results", name, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"reefknot: --results: {name}: is the file that is read; name another one\n"
    assert file.read_bytes() == before


def test_an_existing_results_file_is_replaced_with_force_alone_and_not_by_a_run_that_breaks_off(rk: Commands) -> None:
    file, out = lines(rk, get("a.txt")), rk.folder / "out.jsonl"
    out.write_text("precious\n")
    refused = rk("run", file, "--results", "out.jsonl")
    assert (refused.code, out.read_text()) == (2, "precious\n")
    assert "out.jsonl: exists already; name another file, or replace it with --force" in refused.err
    assert not (rk.folder / ".reefknot").exists(), "nothing was started"

    async def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    with rk.environment.context() as patched:
        patched.setattr(BatchRun, "run", broken)
        assert rk("run", file, "--results", "out.jsonl", "--force").code == 1
    assert out.read_text() == "precious\n"

    assert (rk("run", file, "--results", "out.jsonl", "--force").code, len(out.read_text().splitlines())) == (0, 1)
    assert [one.name for one in rk.folder.glob(".out*")] == []
    assert rk("run", file, "--results", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device(), "a device stays one"


@pytest.mark.parametrize("names", [("ok", "route/ok"), ("route/ok", "ok")])
def test_an_id_that_reads_like_a_submission_of_another_is_like_any_other(rk: Commands, names: tuple[str, str]) -> None:
    prepared(rk, size=1)
    assert summary(rk, lines(rk, *(get("a.txt", name) for name in names)), code=0)["succeeded"] == 2
    listed = rk("job", "list", "--json").json["jobs"]
    assert sorted((one["id"], one["state"]) for one in listed) == [(name, "succeeded") for name in sorted(names)]


FAILED = WorkFailed(None, None, "attempts_spent")
ASIDE = Quarantine("attempts_spent")


async def ended(store: port.Store, how: WorkFailed | Quarantine | str) -> None:
    """The record of a worker: a job that it settled, or that was dropped."""
    await store.work.enqueue([WorkItem("x", "t", "cpu@w")])
    if isinstance(how, str):
        await store.work.cancel("x", reason=how)
        return
    (item,) = await store.work.claim(1, WorkClaim(owner="me"))
    await store.work.settle([Settlement(item.id, item.owner, item.fence, how)])


@pytest.mark.parametrize(
    ("status", "before", "end"),
    [
        (ResultStatus.SUCCESS, None, "succeeded"),
        (ResultStatus.TIMEOUT, FAILED, "timed_out"),
        (ResultStatus.CANCELLED, None, "cancelled"),
        (ResultStatus.ERROR, FAILED, "failed"),
        (ResultStatus.ERROR, ASIDE, "failed"),
        (ResultStatus.ERROR, "dropped_oldest", "dropped"),
        (ResultStatus.ERROR, None, "rejected"),
    ],
)
@pytest.mark.real_time
async def test_every_result_has_one_end(status: ResultStatus, before: Any, end: str) -> None:
    tally = Tally()
    async with opening.open_store("memory:") as store:
        if before is not None:
            await ended(store, before)
        result = ExecResult("x", "r", status, "worker-1", ResultJob("t"), retries_used=2)
        assert await tally.count(result, store) == end
    assert (tally.total, tally.ends[end], tally.retries) == (1, 1, 2)
    assert tally.recovered == (end == "succeeded")
    assert tally.quarantined == (before is ASIDE)
    assert tally.all_succeeded == (end == "succeeded")


def test_the_sentence_leaves_out_what_did_not_happen() -> None:
    tally = Tally()
    tally.ends |= {"succeeded": 3, "failed": 1}
    tally.recovered, tally.quarantined, tally.retries = 2, 1, 1
    ends = "3 succeeded (2 after retries), 1 failed (1 in quarantine); 1 retry"
    assert tally.sentence(1.26) == f"4 assignments in 1.3 s: {ends}"
