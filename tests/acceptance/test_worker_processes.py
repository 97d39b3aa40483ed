"""`up --processes`: workers as real processes, which end with `up` however it ends, and begin again when they die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.folder import CONFIG, Folder, until

STEPS = """\
import asyncio
import os
import reefknot as rk

VERSION = 1

@rk.block("own.where")
async def where(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)
    return {"pid": os.getpid()}

@rk.block("own.version")
async def version(inputs, context):
    return {"version": VERSION}
"""
UP = ("up", "--processes", "--module", "places")


@pytest.fixture
def places(folder: Folder) -> Folder:
    """A folder with a step that says in which process it runs, and waits there for `go`."""
    folder.write("places.py", STEPS)
    return folder


def started(folder: Folder, *words: str, **given: Any) -> subprocess.Popen[str]:
    """`up --processes`, as soon as all of its workers are ready."""
    process = folder.start(*UP, *words, **given)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("up "), line
    return process


def pids(folder: Folder) -> dict[str, int]:
    """The processes of the workers by their names."""
    return {one["worker_id"]: one["pid"] for one in folder.json("worker", "list")["workers"]}


def submit(folder: Folder, kind: str, *names: str) -> None:
    """Submit jobs that may wait for long: on a busy machine the rest of a story takes its time."""
    waits = {"timeout_ms": 600_000}
    lines = [{"assignment_id": name, "job": {"type": kind, "payload": {}}, "options": waits} for name in names]
    folder.write_lines("work.jsonl", *lines)
    done = folder("submit", "work.jsonl")
    assert done.code == 0, done.err


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path(f"/proc/{pid}").exists() else False


def are_gone(those: Sequence[int]) -> bool:
    return not any(map(is_running, those))


def test_jobs_run_in_as_many_processes_under_the_usual_names_and_one_summary_counts_all(places: Folder) -> None:
    process = started(places, "--workers", "3", "--json")
    workers = pids(places)
    assert sorted(workers) == ["worker-1", "worker-2", "worker-3"]
    assert len({process.pid, *workers.values()}) == 4, "each has a process of its own"
    jobs = [f"job-{number}" for number in range(9)]
    submit(places, "own.where", *jobs)
    until(lambda: len(places.begun()) == len(jobs))
    assert {int(pid) for pid in places.begun()} == set(workers.values())
    places.go()
    until(lambda: places.have_succeeded(*jobs))
    found = places.json("job", "list")["jobs"]
    assert {one["worker"]: places.job(one["id"])["result"]["output"]["pid"] for one in found} == workers
    assert places.json("worker", "drain", "worker-2")["drained"] is True
    code, out, err = places.stop(process)
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert (code, summary["succeeded"], summary["unfinished"]) == (143, 9, 0), err
    assert are_gone([*workers.values()])
    assert places("worker", "list").code == 69, "they said goodbye"


def test_retries_of_all_processes_are_in_the_summary_also_those_of_one_that_was_ended(folder: Folder) -> None:
    process = folder.up("--processes", "--workers", "2", "--json")
    first = [f"first-{number}" for number in range(6)]
    submit(folder, "own.flaky", *first)
    until(lambda: folder.have_succeeded(*first))
    before = pids(folder)
    os.kill(before["worker-1"], signal.SIGTERM)
    until(lambda: pids(folder).get("worker-1", before["worker-1"]) != before["worker-1"])
    submit(folder, "own.flaky", "last")
    until(lambda: folder.state("last") == "succeeded")
    _, out, err = folder.stop(process)
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert (summary["succeeded"], summary["recovered"], summary["retries"]) == (7, 7, 7), err


@pytest.mark.parametrize("to", ["up", "its group", "all processes"])
def test_one_signal_lets_steps_finish_whoever_else_gets_it(places: Folder, to: str) -> None:
    """A terminal sends it to the process group of `up`, a supervisor may send it to every process."""
    process = started(places, "--workers", "2", start_new_session=True)
    workers = [*pids(places).values()]
    submit(places, "own.where", "one")
    until(lambda: len(places.begun()) == 1)
    if to == "up":
        process.send_signal(signal.SIGINT)
    elif to == "its group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        for pid in (process.pid, *workers):
            with suppress(ProcessLookupError):  # `up` may have ended the idle one already
                os.kill(pid, signal.SIGINT)
    until(lambda: [one["state"] for one in places.json("worker", "list")["workers"]] != ["running"] * 2)
    places.go()
    code, out, err = places.ends(process)
    assert (code, places.state("one")) == (130, "succeeded"), err
    assert err.count("shutting down") == 1
    assert "1 succeeded" in out.splitlines()[-1]
    assert are_gone(workers)


def test_a_second_signal_stops_all_at_once_and_steps_return_to_the_queue(places: Folder) -> None:
    process = started(places, "--workers", "2")
    workers = [*pids(places).values()]
    submit(places, "own.where", "one")
    until(lambda: len(places.begun()) == 1)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    until(lambda: process.stderr is not None and "shutting down;" in process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    code, _, err = places.ends(process)
    assert code == 143, err
    assert are_gone(workers)
    shown = places.job("one")
    assert (shown["state"], shown["attempts"], shown["crashes"]) == ("pending", 0, 0), "it was given back"


def test_no_worker_outlives_an_up_that_is_killed(places: Folder) -> None:
    """The control is a worker that `up` has not started: it outlives the process that did."""
    code = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, sys.executable, "-m", "reefknot", "worker", "start", "--worker-id", "other"]
    other = subprocess.Popen(
        words, cwd=places.path, env=places.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert other.stdout is not None
    control = int(other.stdout.readline())
    try:
        until(lambda: places.has_store and "other" in [*pids_so_far(places)])
        process = started(places, "--workers", "2")
        workers = [pid for name, pid in pids(places).items() if name != "other"]
        assert len(workers) == 2
        for one in (process, other):
            one.kill()
        process.wait(30)
        other.wait(30)
        until(lambda: are_gone(workers))
        assert is_running(control)
        assert list(pids(places)) == ["other"], "the others said goodbye"
    finally:
        os.kill(control, signal.SIGKILL)
        other.communicate(timeout=30)


def pids_so_far(folder: Folder) -> dict[str, int]:
    found = folder("worker", "list", "--json")
    return pids(folder) if found.code == 0 else {}


def test_a_worker_that_is_killed_is_replaced_and_its_job_done(places: Folder) -> None:
    process = started(places, "--workers", "2")
    before = pids(places)
    submit(places, "own.where", "one")
    until(lambda: len(places.begun()) == 1)
    killed = int(places.begun()[0])
    name = next(name for name, pid in before.items() if pid == killed)
    os.kill(killed, signal.SIGKILL)
    places.go()
    until(lambda: places.state("one") == "succeeded")
    until(lambda: sorted(pids(places)) == sorted(before))
    after = pids(places)
    assert after[name] != killed
    assert len(set(before.items()) & set(after.items())) == 1, "the other one went on"
    _, _, err = places.stop(process)
    [line] = [line for line in err.splitlines() if "SIGKILL" in line]
    assert f"{name} (pid {killed}) was ended by SIGKILL; it starts again in 1 s" in line
    assert f"{name} (pid {after[name]}) is ready again" in err


def test_a_name_that_another_system_takes_meanwhile_is_left_to_it(places: Folder) -> None:
    process = started(places)
    os.kill(pids(places)["worker-1"], signal.SIGSTOP)
    os.kill(pids(places)["worker-1"], signal.SIGKILL)
    other = places.part("worker", "--worker-id", "worker-1")
    until(lambda: "worker-2" in pids(places))
    assert pids(places)["worker-1"] == other.pid
    places.go()
    submit(places, "own.where", "one")
    until(lambda: places.state("one") == "succeeded")
    code, out, _ = places.stop(process)
    assert (code, "1 succeeded" in out) == (143, True), "its ends are counted under the new name"


def test_a_module_that_cannot_be_loaded_ends_it_with_one_message(places: Folder) -> None:
    places.write("places.py", "import not_here_at_all\n")
    code, out, err = places.ends(places.start(*UP, "--workers", "3"))
    assert (code, out, err.count("not_here_at_all")) == (78, "", 1), err


def test_a_worker_that_refuses_its_configuration_is_not_started_again(places: Folder) -> None:
    """A module that can be loaded in the first process, and in no worker's."""
    places.write("places.py", f"import sys\nif 'start' in sys.argv:\n    import not_here_at_all\n{STEPS}")
    code, _, err = places.ends(places.start(*UP))
    assert (code, err.count("not_here_at_all")) == (78, 1), err
    assert "worker-1 (pid " in err.splitlines()[-1]
    assert "another start would not help" in err.splitlines()[-1]


@pytest.mark.parametrize("way", ["SIGHUP", "worker"])
def test_a_reload_of_the_policies_reaches_every_process(places: Folder, way: str) -> None:
    process = started(places, "--workers", "2")
    places.write("reefknot.yaml", CONFIG.replace("max_attempts: 2", "max_attempts: 4"))
    if way == "SIGHUP":
        process.send_signal(signal.SIGHUP)
    else:
        assert len(places.json("worker", "reload")["systems"]) == 2

    def books() -> list[str]:
        found = [one for one in places.events("operator_action") if one["action"] == "policy.reload"]
        return [
            one["details"]["book_hash"] for one in found if one["details"]["book_hash"] != one["details"]["book_before"]
        ]

    until(lambda: len(books()) == (3 if way == "SIGHUP" else 2))
    assert len(set(books())) == 1
    code, _, err = places.stop(process)
    assert (code, err.count("SIGHUP: policies reloaded")) == (143, int(way == "SIGHUP"))


def test_with_reload_the_workers_begin_again_with_their_new_code(places: Folder) -> None:
    said = places.path / "said.txt"
    with said.open("w") as file:
        process = places.start(*UP, "--reload", "--workers", "2", stderr=file, stdout=subprocess.DEVNULL)
    until(lambda: "steps: " in said.read_text())
    before = [*pids(places).values()]
    places.write("places.py", STEPS.replace("VERSION = 1", "VERSION = 2"))
    until(lambda: said.read_text().count("steps: ") == 2)
    places.submit("own.version", "one")
    until(lambda: places.state("one") == "succeeded")
    assert places.job("one")["result"]["output"] == {"version": 2}
    after = [*pids(places).values()]
    assert (len(after), set(after) & set(before)) == (2, set())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert are_gone(before + after)
