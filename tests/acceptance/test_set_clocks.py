"""A wall clock that is set under running processes, or that two of them disagree about, fails no deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.folder import CONFIG, PATIENCE_S

SCRIPT = Path(__file__).parent / "set_clock.py"
MODULE = """\
import reefknot as rk

@rk.block("own.step")
async def step(inputs, context):
    return {}
"""
MINUTE, DAY = 60.0, 86_400.0


class Machine:
    """A folder on a machine whose wall clock can be set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clock = path / "wrong-by"
        self.set(0)
        (path / "files").mkdir()
        (path / "reefknot.yaml").write_text(CONFIG)
        (path / "own.py").write_text(MODULE)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        self._environment = kept | {
            "PYTHONWARNINGS": "error",
            "REEFKNOT_LOG_FORMAT": "text",
            "PYTHONUTF8": "1",
            "COLUMNS": "200",
        }
        self.started: list[subprocess.Popen[str]] = []

    def set(self, seconds: float) -> None:
        """Set the wall clock, for all processes, to so many seconds from the truth."""
        fresh = self.path / "wrong-by.new"
        fresh.write_text(str(seconds))
        fresh.replace(self._clock)

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self._clock), *words],
            cwd=self.path,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

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

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.end()


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
