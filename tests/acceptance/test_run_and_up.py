"""`run`, `up` and the commands beside them, as processes of their own: what a person types, and what signals do."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from tests.acceptance.folder import PATIENCE_S, Folder, until


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
    shown = folder.json("job", "show", "long")
    assert (shown["state"], shown["reason"]) == ("cancelled", "enough")

    assert folder.json("worker", "drain", "worker-2")["drained"] is True
    folder.nap("short", 1)
    until(lambda: "short" in folder.begun())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert out.splitlines()[-1].startswith("up for ")
    assert folder.json("job", "show", "short")["state"] == "succeeded"
    assert folder("worker", "list").code == 69, "it said goodbye"


def test_sigterm_ends_with_143_and_a_second_signal_at_once(folder: Folder) -> None:
    process = folder.up()
    folder.nap("long", 60)
    until(lambda: "long" in folder.begun())
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    until(lambda: process.stderr is not None and "shutting down;" in process.stderr.readline())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 143
    assert time.monotonic() - began < 20
    assert folder.json("job", "show", "long")["state"] in ("pending", "running"), "it is kept"


def killed_and_run_again(folder: Folder, *words: str) -> int:
    """The number of jobs in the store, after `run` of 40 lines without ids was killed twice and then finished."""
    waiting = {"job": {"type": "own.wait", "payload": {"name": "one"}}}
    (folder.path / "work.jsonl").write_text(f"{json.dumps(waiting)}\n" * 40)
    command = ("run", "work.jsonl", "--module", "naps")
    for expected, more in ((40, ()), (80 if words else 40, words)):
        begun = len(folder.begun())
        process = folder.start(*command, *more)
        until(lambda: len(folder.begun()) > begun and sum(_states(folder).values()) >= expected)  # noqa: B023 - at once
        process.kill()
        process.wait()
    folder.go()
    code, out, err = folder.ends(folder.start(*command, "--json"))
    assert code == 0, err
    assert json.loads(out)["succeeded"] == 40
    return sum(_states(folder).values())


def _states(folder: Folder) -> dict[str, int]:
    """Jobs in the store by state, once there is a store."""
    if not folder.has_store:
        return {}
    states: dict[str, int] = folder.json("job", "list")["states"]
    return states


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


def test_work_that_was_handed_back_is_ended_by_the_next_system(folder: Folder) -> None:
    process = folder.up("--drain", "0")
    folder.nap("later", 1.5)
    until(lambda: "later" in folder.begun())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    shown = folder.json("job", "show", "later")
    assert (shown["state"], shown["attempts"]) == ("pending", 0), "handed back, and nothing was spent"

    folder.up()
    until(lambda: bool(folder.json("job", "show", "later")["state"] == "succeeded"))


def test_a_run_that_is_interrupted_ends_with_130_and_goes_on_where_it_was(folder: Folder) -> None:
    naps = [{"assignment_id": f"n{n}", "request_id": "r", "job": _nap(f"n{n}", 0.2)} for n in range(40)]
    (folder.path / "naps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in naps))
    process = folder.start("run", "naps.jsonl", "--module", "naps", "--json")
    until(lambda: len(folder.begun()) >= 8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert 0 < json.loads(out)["total"] < 40

    again, err = folder.start("run", "naps.jsonl", "--module", "naps", "--json").communicate(timeout=PATIENCE_S)
    assert json.loads(again)["succeeded"] == 40, err
    assert len(folder.begun()) < 40 + 15, "what had ended was not run again"


def _nap(name: str, seconds: float) -> dict[str, Any]:
    return {"type": "own.nap", "payload": {"name": name, "seconds": seconds}}


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_submission_that_is_ended_while_it_waits_for_room_prints_the_ids_that_were_accepted(
    folder: Folder, ending: signal.Signals, code: int
) -> None:
    with (folder.path / "reefknot.yaml").open("a") as file:
        file.write("router: {max_queue_size: 2}\n")
    line = {"job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    (folder.path / "work.jsonl").write_text(f"{json.dumps(line)}\n" * 5)
    process = folder.start("submit", "work.jsonl")
    until(lambda: folder.has_store and len(folder.json("job", "list")["jobs"]) == 2)
    process.send_signal(ending)

    ended, out, _ = folder.ends(process)
    assert ended == code
    assert sorted(out.split()) == sorted(one["id"] for one in folder.json("job", "list")["jobs"])
