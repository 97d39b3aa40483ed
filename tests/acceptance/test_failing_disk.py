"""A disk whose fsync fails for a while: the process ends with 69 in time, and its successor loses nothing."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.folder import Folder, until

ENDS_WITHIN_S = 10.0
UNREACHABLE = 69
NAPS = ("--module", "naps")


def on_a_sick_disk(folder: Folder, *words: str, flag: str = "sick") -> subprocess.Popen[str]:
    """The command over a disk whose fsync fails while the file `flag` exists, as soon as it says that it runs."""
    process = folder.start(*words, program=("-m", "tests.faults.sick_disk", flag))
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(("up ", "worker ", "router ")), line
    return process


def ended_by_the_disk(folder: Folder, process: subprocess.Popen[str], sick: Path) -> tuple[float, int, str]:
    """Seconds from the first failing fsync to the end, the exit code and what was said. The disk mends after 2 s."""
    sick.touch()
    began = time.monotonic()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        sick.unlink()
        process.wait(3 * ENDS_WITHIN_S)
    sick.unlink(missing_ok=True)
    took = time.monotonic() - began
    code, _, err = folder.ends(process)
    return took, code, err


@pytest.mark.parametrize("words", [("up", *NAPS), ("worker", "start", *NAPS), ("router", "start")])
def test_a_process_whose_disk_fails_ends_with_69_within_ten_seconds(folder: Folder, words: tuple[str, ...]) -> None:
    process = on_a_sick_disk(folder, *words)
    took, code, err = ended_by_the_disk(folder, process, folder.path / "sick")
    assert code == UNREACHABLE, err
    assert took < ENDS_WITHIN_S
    assert "the disk reported an error" in err
    assert "check the disk" in err


def test_a_system_that_does_not_watch_its_store_lives_on_and_does_nothing(folder: Folder) -> None:
    """The control: it outlives the time in which the others have ended several times over."""
    process = on_a_sick_disk(folder, "up", *NAPS, flag="deaf")
    (folder.path / "deaf").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.0)
    (folder.path / "deaf").unlink()
    folder.nap("never", 0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3.0)
    assert folder.begun() == []


def test_nothing_accepted_is_lost_when_the_disk_fails_under_a_running_system(folder: Folder) -> None:
    """Steps run, others wait; what finishes while the disk fails is done again, and everything has its one result."""
    process = on_a_sick_disk(folder, "up", *NAPS)
    names = [f"n{number}" for number in range(30)]
    for name in names:
        folder.wait(name)
    until(lambda: len(folder.begun()) >= 2)
    folder.go()
    took, code, err = ended_by_the_disk(folder, process, folder.path / "sick")
    assert (code, took < ENDS_WITHIN_S) == (UNREACHABLE, True), err

    folder.up()
    until(lambda: folder.have_succeeded(*names))
    assert set(folder.begun()) == set(names)
    assert folder("store", "check").code == 0
    assert folder("audit", "verify").code == 0


def test_a_run_whose_disk_fails_ends_with_69_and_the_next_run_finishes_it(folder: Folder) -> None:
    lines = [{"assignment_id": f"r{n}", "job": {"type": "own.wait", "payload": {"name": f"r{n}"}}} for n in range(20)]
    folder.write_lines("work.jsonl", *lines)
    process = folder.start("run", "work.jsonl", *NAPS, program=("-m", "tests.faults.sick_disk", "sick"))
    until(lambda: len(folder.begun()) >= 2)
    took, code, err = ended_by_the_disk(folder, process, folder.path / "sick")
    assert (code, took < ENDS_WITHIN_S) == (UNREACHABLE, True), err

    folder.go()
    again = folder.start("run", "work.jsonl", "--json", *NAPS)
    code, out, err = folder.ends(again)
    assert code == 0, err
    assert json.loads(out)["succeeded"] == len(lines)


STATUS = "status was not written"
EVERY_LINE = "import reefknot.runtime.log as log, runpy; log.REPEATED_S = 0.0"
EVERY_LINE += "; runpy.run_module('tests.faults.full_disk', run_name='__main__')"
"""The system of before: every error has its line."""


@pytest.mark.parametrize("is_bounded", [True, False], ids=["once", "control"])
def test_on_a_full_disk_an_error_of_one_kind_is_logged_once_a_minute(folder: Folder, is_bounded: bool) -> None:
    """The control, without that rule: every second."""
    program = ("-m", "tests.faults.full_disk") if is_bounded else ("-c", EVERY_LINE)
    process = folder.start("up", *NAPS, "--for", "5", "--log-format", "text", program=(*program, "full"))
    assert process.stderr is not None
    assert process.stderr.readline().startswith("up ")
    (folder.path / "full").touch()
    code, _, err = folder.ends(process)
    logged = [line.partition(" ERROR ")[2].partition("(")[0] for line in err.splitlines() if " ERROR " in line]
    statuses = [line for line in logged if STATUS in line]
    assert (len(statuses) == 1) is is_bounded, err
    if is_bounded:
        assert (code, len(logged)) == (0, len(set(logged))), err


GUARDED = """
import asyncio
from pathlib import Path

import reefknot as rk


@rk.idempotent(key=lambda name: name)
async def effect(name):
    with Path("effects").open("a") as file:
        file.write(f"{name}\\n")


@rk.block("own.guarded")
async def guarded(inputs, context):
    Path("begun").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    try:
        await effect(context.assignment_id)
    except rk.StoreFullError:
        Path("refused").touch()
        raise
    return {}
"""


def test_a_step_whose_key_a_full_disk_refused_is_tried_again_and_has_its_effect_once(folder: Folder) -> None:
    here = folder.path
    (here / "guarded.py").write_text(GUARDED)
    system = folder.start("up", "--module", "guarded", program=("-m", "tests.faults.full_disk", "full"))
    assert folder("submit", "--type", "own.guarded", "--id", "pay").code == 0
    until((here / "begun").exists)
    (here / "full").touch()
    (here / "go").touch()
    until((here / "refused").exists)
    (here / "full").unlink()

    until(lambda: folder.state("pay") in ("succeeded", "quarantined"))
    shown = folder.job("pay")
    folder.stop(system)

    assert (shown["state"], (here / "effects").read_text()) == ("succeeded", "pay\n"), shown
