"""A step that kills its process next to others: it alone is to blame, and the others succeed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from tests.acceptance.folder import PATIENCE_S, Folder

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


def submit_all(folder: Folder) -> None:
    (folder.path / "deaths.py").write_text(MODULE)
    for name in ALL:
        kind = "own.deadly" if name == "deadly" else "own.calm"
        inputs = ("--inputs", json.dumps({"timeout_ms": 60_000}))
        assert folder("submit", "--type", kind, "--id", name, *inputs).code == 0


def dies(folder: Folder, program: Sequence[str] = ("-m", "reefknot")) -> None:
    """A system that runs until a step ends its process."""
    process = folder.start("up", "--module", "deaths", program=program)
    assert process.wait(PATIENCE_S) == 9, process.communicate()
    process.communicate()


def ends_of(folder: Folder) -> dict[str, str]:
    return {name: folder.json("job", "show", name)["state"] for name in ALL}


def test_of_all_that_ran_when_a_process_died_only_the_culprit_is_quarantined(folder: Folder) -> None:
    submit_all(folder)
    for _ in range(3):
        dies(folder)
    process = folder.start("up", "--module", "deaths", "--workers", "2")
    for name in CALM:
        assert folder("job", "show", name).code == 0
    wait_for_ends(folder, process)
    assert ends_of(folder) == {**dict.fromkeys(CALM, "succeeded"), "deadly": "quarantined"}
    told = (folder.path / "story.txt").read_text().split("\n")[:-1]
    assert sum(line.startswith("begin deadly ") for line in told) == 3
    for name in CALM:
        assert sum(line.startswith(f"begin {name} ") for line in told) == 2, told
        assert folder.json("job", "show", name)["crashes"] == 1

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
        dies(folder, ("-m", "tests.acceptance.weakened", "isolation"))
    process = folder.start("up", "--module", "deaths")
    wait_for_ends(folder, process)
    assert ends_of(folder) == dict.fromkeys(ALL, "quarantined")


def wait_for_ends(folder: Folder, process: subprocess.Popen[str]) -> None:
    for name in ALL:
        kind = "own.deadly" if name == "deadly" else "own.calm"
        words = ("submit", "--type", kind, "--id", name, "--inputs", json.dumps({"timeout_ms": 60_000}))
        folder(*words, "--wait")
    process.terminate()
    assert process.wait(PATIENCE_S) in (0, 143), process.communicate()
