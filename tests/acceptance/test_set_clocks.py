"""A wall clock that is set under running processes, or that two of them disagree about, fails no deadline."""

import json
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.folder import PATIENCE_S, Folder

SCRIPT = Path(__file__).parent / "set_clock.py"
MODULE = """\
import reefknot as rk

@rk.block("own.step")
async def step(inputs, context):
    return {}
"""
MINUTE, DAY = 60.0, 86_400.0


class Machine:
    """A folder on a machine whose wall clock can be set; all its commands are processes."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._clock = folder.path / "wrong-by"
        self.set(0)
        folder.write("own.py", MODULE)

    def set(self, seconds: float) -> None:
        """Set the wall clock, for all processes, to so many seconds from the truth."""
        fresh = self._folder.write("wrong-by.new", str(seconds))
        fresh.replace(self._clock)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return self._folder.start(*words, program=(str(SCRIPT), str(self._clock)))

    def up(self) -> subprocess.Popen[str]:
        process = self.start("up", "--module", "own")
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("up "), line
        return process

    def json(self, *words: str) -> Any:
        out, err = self.start(*words, "--json").communicate(timeout=PATIENCE_S)
        assert out, err
        return json.loads(out)

    def submit(self, name: str, deadline: float) -> None:
        submit = self.start("submit", "--type", "own.step", "--id", name, "--deadline", str(deadline))
        assert submit.wait(PATIENCE_S) == 0

    def status(self, name: str, deadline: float = 5.0) -> str:
        """The status of a step with a deadline, submitted by another process. An id that is there is not run again."""
        words = ("submit", "--type", "own.step", "--id", name, "--deadline", str(deadline), "--wait")
        (result,) = self.json(*words)["results"]
        return str(result["status"])


@pytest.fixture
def machine(folder: Folder) -> Machine:
    return Machine(folder)


@pytest.mark.parametrize("jump", [-MINUTE, -DAY, DAY])
def test_deadlines_hold_when_the_clock_is_set_under_a_running_system(machine: Machine, jump: float) -> None:
    machine.up()
    assert machine.status("before") == "success"
    machine.set(jump)
    assert machine.status("after") == "success"
    assert len(machine.json("worker", "list")["workers"]) == 1, "it is still heard of"
    assert machine.json("router", "status")["handed_in"] == {"succeeded": 2}


def test_work_that_was_submitted_before_the_clock_was_set_keeps_its_deadline(machine: Machine) -> None:
    machine.submit("long", 60)
    machine.submit("short", 0.001)
    machine.set(DAY)
    machine.up()
    assert machine.status("long", 60) == "success"
    assert machine.status("short", 0.001) == "timeout"


def test_a_system_that_starts_with_a_right_clock_again_goes_by_it_once_nothing_is_open(machine: Machine) -> None:
    machine.set(DAY)
    wrong = machine.up()
    assert machine.status("one") == "success"
    wrong.terminate()
    wrong.communicate(timeout=PATIENCE_S)
    machine.set(0)
    machine.up()
    assert machine.status("two") == "success"
    at = datetime.fromisoformat(machine.json("job", "show", "two")["created_at"])
    assert abs(at.timestamp() - time.time()) < MINUTE


def test_a_short_command_with_a_clock_that_is_a_month_ahead_removes_nothing(machine: Machine) -> None:
    system = machine.up()
    assert machine.status("kept") == "success"
    system.terminate()
    system.communicate(timeout=PATIENCE_S)
    machine.set(30 * DAY)
    assert machine.json("job", "list")
    assert machine.start("submit", "--type", "own.step").wait(PATIENCE_S) == 0
    machine.set(0)
    assert machine.json("job", "show", "kept")["state"] == "succeeded"
