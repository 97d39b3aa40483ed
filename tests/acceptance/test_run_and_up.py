"""`run`, `up` and the commands beside them, as processes of their own: what a person types, and what signals do."""

import json
import signal

import pytest

from tests.acceptance.folder import Folder, until


def test_a_system_is_worked_with_from_other_processes_and_ends_in_order(folder: Folder) -> None:
    """Submit, look, call off, drain; Ctrl-C waits for the step that runs and gives back the rest."""
    process = folder.up("--workers", "2")
    done = folder("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--wait", "--json")
    assert done.json["results"][0]["output"]["content"] == "ahoy"

    assert [one["worker_id"] for one in folder.json("worker", "list")["workers"]] == ["worker-1", "worker-2"]
    assert folder.json("router", "status")["handed_in"] == {"succeeded": 1}

    folder.nap("long", 60)
    until(lambda: "long" in folder.begun())
    assert folder.json("job", "cancel", "long", "--because", "enough")["state"] == "cancelled"
    shown = folder.job("long")
    assert (shown["state"], shown["reason"]) == ("cancelled", "enough")

    assert folder.json("worker", "drain", "worker-2")["drained"] is True
    folder.nap("short", 1)
    until(lambda: "short" in folder.begun())
    code, out, err = folder.stop(process, signal.SIGINT)
    assert code == 130, err
    assert out.splitlines()[-1].startswith("up for ")
    assert folder.state("short") == "succeeded"
    assert folder("worker", "list").code == 69, "it said goodbye"


def killed_and_run_again(folder: Folder, *words: str) -> int:
    """The number of jobs in the store, after `run` of 40 lines without ids was killed twice and then finished."""
    waiting = {"job": {"type": "own.wait", "payload": {"name": "one"}}}
    folder.write("work.jsonl", f"{json.dumps(waiting)}\n" * 40)
    command = ("run", "work.jsonl", "--module", "naps")
    for expected, more in ((40, ()), (80 if words else 40, words)):
        begun = len(folder.begun())
        process = folder.start(*command, *more)
        until(lambda: len(folder.begun()) > begun and folder.has_store and len(folder.states()) >= expected)  # noqa: B023 - at once
        folder.kill(process)
    folder.go()
    code, out, err = folder.ends(folder.start(*command, "--json"))
    assert code == 0, err
    assert json.loads(out)["succeeded"] == 40
    return len(folder.states())


def test_a_run_of_lines_without_ids_that_was_killed_goes_on_and_submits_none_twice(folder: Folder) -> None:
    assert killed_and_run_again(folder) == 40


def test_with_new_ids_the_same_lines_are_submitted_again(folder: Folder) -> None:
    """The control."""
    assert killed_and_run_again(folder, "--new") == 80


def test_what_a_killed_step_left_half_written_is_gone_when_a_system_starts(folder: Folder) -> None:
    left, other = folder.path / "files" / ".b.txt.0123456789abcdef.part", folder.path / "files" / "mine.part"
    left.touch()
    other.touch()
    folder.up()
    until(lambda: not left.exists())
    assert other.exists()


def test_work_that_was_handed_back_is_counted_and_ended_by_the_next_system(folder: Folder) -> None:
    process = folder.up("--drain", "0")
    folder.nap("later", 1.5)
    until(lambda: "later" in folder.begun())
    code, out, _ = folder.stop(process)
    assert (code, out.splitlines()[-1].endswith(": 1 unfinished")) == (143, True), out
    shown = folder.job("later")
    assert (shown["state"], shown["attempts"]) == ("pending", 0), "handed back, and nothing was spent"
    folder.up()
    until(lambda: folder.state("later") == "succeeded")


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_submission_that_is_ended_prints_accepted_ids(folder: Folder, ending: signal.Signals, code: int) -> None:
    folder.configure("router: {max_queue_size: 2}\n")
    line = {"job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    folder.write("work.jsonl", f"{json.dumps(line)}\n" * 5)
    process = folder.start("submit", "work.jsonl")
    until(lambda: folder.has_store and len(folder.json("job", "list")["jobs"]) == 2)
    ended, out, _ = folder.stop(process, ending)
    assert ended == code
    assert sorted(out.split()) == sorted(one["id"] for one in folder.json("job", "list")["jobs"])
