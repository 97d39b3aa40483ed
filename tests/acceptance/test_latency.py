"""What a person feels: a result comes at once, and a system that has nothing to do leaves the disk alone."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import apsw
import pytest

from reefknot.app.activity import WRITE_EVERY_S
from tests.acceptance.folder import Folder
from tests.pace import slowness
from tests.warm_commands import run_cold

AT_ONCE_S = 0.1
IDLE_S = 4.0
CALLER = """
import asyncio, json, sys, time
import reefknot as rk

async def main():
    times = []
    async with rk.connect(sys.argv[1]) as client:
        for _ in range(6):
            began = time.monotonic()
            result = await client.run("own.nap", {"seconds": 0})
            times.append(time.monotonic() - began)
            assert result.status == "success", result
            await asyncio.sleep(0.2)  # whoever only looks now and then is asleep again
    print(json.dumps(times[1:]))

asyncio.run(main())
"""


def caller(folder: Folder) -> list[float]:
    """How long another process waited for each of five results."""
    done = run_cold(sys.executable, "-c", CALLER, folder.engine, cwd=folder.path)
    assert done.returncode == 0, done.stderr
    times: list[float] = json.loads(done.stdout)
    return times


@pytest.mark.alone
def test_another_process_has_the_result_of_an_empty_step_at_once(folder: Folder) -> None:
    folder.up()
    times: list[float] = []
    for _ in range(3):
        times = caller(folder)
        if median(times) < AT_ONCE_S:
            break
    assert median(times) < AT_ONCE_S * slowness(), times


def writes(path: Path, until: Callable[[float], bool]) -> tuple[int, float, int]:
    """Write transactions of other processes, seen every 5 ms; in which time, and how often the file was looked at."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    began = time.monotonic()
    seen: set[Any] = set()
    looks = 0
    while not until(time.monotonic() - began):
        seen.add(connection.pragma("data_version"))
        looks += 1
        time.sleep(0.005)
    connection.close()
    return len(seen) - 1, time.monotonic() - began, looks


def test_a_system_that_has_nothing_to_do_writes_at_most_once_a_second(folder: Folder) -> None:
    folder.up()
    done = folder("submit", "--type", "own.nap", "--inputs", '{"seconds": 0}', "--wait", "--json")
    assert done.code == 0, done.err
    time.sleep(WRITE_EVERY_S + 1)  # what it counted of this job is written until then, and its first look at the alerts
    number, seconds, looks = writes(folder.store, lambda seconds: seconds >= IDLE_S)
    assert looks > 50
    assert number <= seconds + 1, "a status each second, and nothing else"


def test_a_system_that_works_is_seen_to_write_more_often(folder: Folder) -> None:
    """The control: the same count of a system that gets six pieces of work in the meantime."""
    folder.up()
    process = subprocess.Popen([sys.executable, "-c", CALLER, folder.engine], stdout=subprocess.DEVNULL)
    number, seconds, _ = writes(folder.store, lambda _: process.poll() is not None)
    assert process.returncode == 0
    assert number > seconds + 1
