"""A step that kills its process, also after its time is over: it alone is to blame, and the others succeed."""

import json
import signal
import subprocess
import time
from contextlib import suppress

import apsw

from reefknot.queue.execution.slots import RUNS_ALONE
from tests.acceptance.folder import PATIENCE_S, Folder, until, without

MODULE = """\
import asyncio
import os
import reefknot as rk

BESIDE = os.path.exists("beside")  # every run of the calm ones lasts until somebody kills it

def lines():
    with open("story.txt") as file:
        return file.read().split("\\n")

def tell(what, name):
    with open("story.txt", "a") as file:
        file.write(f"{what} {name} {os.getpid()}\\n")

def begun(name):
    return sum(line.startswith(f"begin {name} ") for line in lines())

@rk.block("own.calm")
async def calm(inputs, context):
    tell("begin", context.assignment_id)
    await asyncio.sleep(60 if BESIDE or begun(context.assignment_id) == 1 else 0.2)
    tell("end", context.assignment_id)
    return {}

@rk.block("own.deadly")
async def deadly(inputs, context):
    tell("begin", context.assignment_id)
    number = begun(context.assignment_id)
    while (number == 1 or BESIDE) and any(begun(name) < number for name in ("calm-1", "calm-2", "calm-3")):
        await asyncio.sleep(0.02)
    os._exit(9)
"""
CALM = ("calm-1", "calm-2", "calm-3")
ALL = ("calm-1", "deadly", "calm-2", "calm-3")


def submission(name: str) -> tuple[str, ...]:
    kind = "own.deadly" if name == "deadly" else "own.calm"
    return ("submit", "--type", kind, "--id", name, "--inputs", json.dumps({"timeout_ms": 60_000}))


def submit_all(folder: Folder) -> None:
    folder.write("deaths.py", MODULE)
    assert [folder(*submission(name)).code for name in ALL] == [0] * len(ALL)


def dies(folder: Folder, protection: str = "") -> None:
    """A system that runs until a step ends its process."""
    process = folder.start("up", "--module", "deaths", program=without(protection))
    assert process.wait(PATIENCE_S) == 9, process.communicate()


def test_of_all_that_ran_when_a_process_died_only_the_culprit_is_quarantined(folder: Folder) -> None:
    submit_all(folder)
    for _ in range(3):
        dies(folder)
    process = folder.start("up", "--module", "deaths", "--workers", "2")
    for name in CALM:
        assert folder("job", "show", name).code == 0
    wait_for_ends(folder, process)
    assert folder.states() == {**dict.fromkeys(CALM, "succeeded"), "deadly": "quarantined"}
    told = (folder.path / "story.txt").read_text().split("\n")[:-1]
    assert sum(line.startswith("begin deadly ") for line in told) == 3
    for name in CALM:
        assert sum(line.startswith(f"begin {name} ") for line in told) == 2, told
        assert folder.job(name)["crashes"] == 1

    first = told[0].split()[2]
    later = [line.split() for line in told if line.split()[2] != first]
    for at, (what, name, process_id) in enumerate(later):
        if what == "end":
            assert later[at - 1] == ["begin", name, process_id], "suspects run alone, one at a time"
    assert folder.json("quarantine", "show", "deadly")["reason"] == "its owner vanished 3 times"


def test_without_isolation_its_neighbours_go_to_quarantine_with_it(folder: Folder) -> None:
    """The control: everything that ran beside it three times is counted three times."""
    (folder.path / "beside").touch()
    submit_all(folder)
    for _ in range(3):
        dies(folder, "isolation")
    process = folder.start("up", "--module", "deaths")
    wait_for_ends(folder, process)
    assert folder.states() == dict.fromkeys(ALL, "quarantined")


def wait_for_ends(folder: Folder, process: subprocess.Popen[str]) -> None:
    for name in ALL:
        folder(*submission(name), "--wait")
    process.terminate()
    assert process.wait(PATIENCE_S) in (0, 143), process.communicate()


CALM_STEP = """\
import asyncio
from pathlib import Path
import reefknot as rk

@rk.block("own.calm")
async def calm(inputs, context):
    with open("begun.txt", "a") as file:
        file.write("calm\\n")
    number = len(Path("begun.txt").read_text().split())
    await asyncio.sleep(60 if number == 1 else 0.5)
"""
LATE_STEP = """\
import os
import time
from pathlib import Path
import reefknot as rk
import calm

@rk.block("own.late")
def late(inputs, context):
    while not os.path.exists("die") and len(Path("begun.txt").read_text().split()) == 1:
        time.sleep(0.02)
    os._exit(9)
"""


def abandoned(folder: Folder, protection: str) -> subprocess.Popen[str]:
    """A worker in which a function runs on, and to which the suspect of a killed worker comes."""
    folder.write("calm.py", CALM_STEP)
    folder.write("late.py", LATE_STEP)
    folder.part("router")
    killed = folder.part("worker", "--worker-id", "one", "--module", "calm")
    folder.submit("own.calm", "calm", "--timeout-ms", "60000")
    until(lambda: folder.begun() == ["calm"])
    process = folder.part("worker", "--worker-id", "two", "--module", "late", protection=protection)
    late = ("submit", "--type", "own.late", "--id", "late", "--timeout-ms", "300", "--wait", "--json")
    assert folder(*late).json["results"][0]["status"] == "timeout", "its time is over, and it runs on"
    folder.kill(killed)
    return process


def test_a_suspect_is_not_begun_beside_a_function_that_runs_on_and_not_blamed_for_it(folder: Folder) -> None:
    process = abandoned(folder, "")
    until(lambda: bool(folder.job("calm")["reason"] == RUNS_ALONE))
    (folder.path / "die").touch()
    assert process.wait(PATIENCE_S) == 9
    assert folder.begun() == ["calm"]
    assert folder.job("calm")["crashes"] == 1, "of the worker that was killed while it ran"
    folder.part("worker", "--worker-id", "three", "--module", "calm")
    until(lambda: folder.state("calm") == "succeeded")


def test_when_such_a_function_counts_as_ended_the_suspect_is_blamed_for_it(folder: Folder) -> None:
    """The control."""
    process = abandoned(folder, "overdue-functions")
    assert process.wait(PATIENCE_S) == 9
    folder.part("worker", "--worker-id", "three", "--module", "calm")
    until(lambda: folder.job("calm")["crashes"] == 2)


HELD = """\
import asyncio
import time
import reefknot as rk

def begun(context):
    with open("begun.txt", "a") as file:
        file.write(context.assignment_id + "\\n")

@rk.block("own.awaits")
async def awaits(inputs, context):
    begun(context)
    await asyncio.sleep(60)

@rk.block("own.plain")
def plain(inputs, context):
    begun(context)
    time.sleep(60)

@rk.block("own.blocks")
async def blocks(inputs, context):
    begun(context)
    for _ in range(600):
        time.sleep(0.1)
"""


def holding(folder: Folder, *kinds: str, protection: str = "") -> subprocess.Popen[str]:
    """A system that runs a step of each kind."""
    folder.write("held.py", HELD)
    before = len(folder.begun())
    process = folder.start("up", "--module", "held", program=without(protection))
    for kind in kinds:
        folder.submit(f"own.{kind}", kind, "--timeout-ms", "60000")
        until(lambda: kind in folder.begun()[before:])  # noqa: B023 - at once
    return process


def stop_twice(process: subprocess.Popen[str], how: signal.Signals, *, is_blocked: bool = False) -> float:
    """Send a second signal when the first was heard, or until one is. Returns how long the process took to end."""
    assert process.stderr is not None
    process.send_signal(how)
    while not is_blocked and not process.stderr.readline().startswith("shutting down"):
        assert process.poll() is None
    began = time.monotonic()
    while process.poll() is None:  # two signals at once are one
        assert time.monotonic() < began + PATIENCE_S
        process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5 if is_blocked else PATIENCE_S)
    assert process.returncode == 128 + how
    return time.monotonic() - began


def test_a_second_signal_gives_running_steps_back_however_often(folder: Folder) -> None:
    for number, how in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 1):
        stop_twice(holding(folder, "awaits", "plain"), how)
        for name in ("awaits", "plain"):
            shown = folder.job(name)
            assert (shown["state"], shown["reason"]) == ("pending", "shutdown")
            assert (shown["interruptions"], shown["crashes"]) == (number, 0)


def test_a_second_signal_is_heard_while_a_step_blocks_the_event_loop(folder: Folder) -> None:
    stop_twice(holding(folder, "awaits", "blocks"), signal.SIGINT, is_blocked=True)
    shown = [folder.job(name) for name in ("awaits", "blocks")]
    assert [(one["state"], one["interruptions"], one["crashes"]) for one in shown] == [("pending", 1, 0)] * 2


def test_a_second_signal_never_waits_for_a_store_that_is_locked(folder: Folder) -> None:
    process = holding(folder, "awaits")
    connection = apsw.Connection(f"{folder.path}/.reefknot/state.db")
    connection.execute("BEGIN IMMEDIATE")
    try:
        assert stop_twice(process, signal.SIGTERM) < 10, "a second, on a machine that is not busy"
    finally:
        connection.close()
    holding(folder)
    until(lambda: folder.job("awaits")["crashes"] == 1)


def test_without_giving_back_three_second_signals_quarantine_what_was_running(folder: Folder) -> None:
    """The control."""
    for _ in range(3):
        stop_twice(holding(folder, "awaits", protection="giving-back"), signal.SIGTERM)
    holding(folder)
    until(lambda: folder.state("awaits") == "quarantined")
