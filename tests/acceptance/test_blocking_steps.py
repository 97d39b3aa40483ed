"""An `async def` step that blocks its event loop: its own work, its neighbours, its keys, and the types it knows."""

from __future__ import annotations

import subprocess

import pytest

from tests.acceptance.folder import CONFIG, Folder, throughout, until

STEPS = """\
import os
import time
import reefknot as rk

@rk.block("own.blocking")
async def blocking(inputs, context):
    with open("effects.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    number = len(open("effects.txt").read().split())
    if number == 1:
        time.sleep(11)
    return {}
"""


def effects(folder: Folder) -> list[str]:
    file = folder.path / "effects.txt"
    return file.read_text().split() if file.exists() else []


def started(folder: Folder, protection: str) -> list[subprocess.Popen[str]]:
    """A router and two workers with leases of three seconds, and a step that blocks one of them for eleven."""
    folder.write("blocks.py", STEPS)
    program = ("-m", "tests.acceptance.weakened", protection)
    folder.part("router")
    workers = []
    for name in ("one", "two"):
        process = folder.start("worker", "start", "--worker-id", name, "--module", "blocks", program=program)
        assert process.stderr is not None
        assert " is ready" in process.stderr.readline()
        workers.append(process)
    assert folder("submit", "--type", "own.blocking", "--id", "slow").code == 0
    until(lambda: len(effects(folder)) == 1)
    return workers


def logged(workers: list[subprocess.Popen[str]]) -> str:
    for process in workers:
        process.terminate()
    return "".join(process.communicate()[1] for process in workers)


def test_a_step_that_blocks_its_loop_past_the_lease_runs_once_and_is_named(folder: Folder) -> None:
    workers = started(folder, "long-leases")
    until(lambda: folder.state("slow") == "succeeded")
    assert len(effects(folder)) == 1
    assert folder.job("slow")["crashes"] == 0
    lines = [line for line in logged(workers).splitlines() if "the event loop is blocked" in line]
    assert len(lines) == 1, "one line for one block"
    assert "own.blocking (slow), at blocks.py:11" in lines[0]
    assert "belongs in a plain function" in lines[0]


def test_when_the_loop_alone_renews_leases_its_effect_happens_twice(folder: Folder) -> None:
    """The control."""
    workers = started(folder, "loop-watch")
    until(lambda: len(effects(folder)) == 2)
    assert "the event loop is blocked" not in logged(workers)


NEIGHBOURS = """\
import os
import time
import reefknot as rk

def begun(context):
    with open("begun.txt", "a") as file:
        file.write(context.assignment_id + "\\n")

@rk.block("own.plain")
def plain(inputs, context):
    begun(context)
    while not os.path.exists("blocked"):
        time.sleep(0.02)
    return {"done": True}

@rk.block("own.blocking")
async def blocking(inputs, context):
    begun(context)
    open("blocked", "w").close()
    time.sleep(7)
    return {}

@rk.block("own.waiting")
async def waiting(inputs, context):
    begun(context)
    while not os.path.exists("go"):
        time.sleep(0.02)
    return {}

@rk.idempotent(key=lambda order: order, lease=3, name="charge")
async def charge(order):
    while not os.path.exists("go"):
        time.sleep(0.02)
    return "charged"

@rk.block("own.charge")
async def charge_once(inputs, context):
    begun(context)
    return {"charge": await charge("order-7")}

@rk.block("own.only")
async def only(inputs, context):
    return {}
"""


def weakened(protection: str) -> tuple[str, ...]:
    return ("-m", "tests.acceptance.weakened", protection) if protection else ("-m", "reefknot")


def started_by(folder: Folder, kind: str, *words: str) -> None:
    assert folder("submit", "--type", f"own.{kind}", "--id", kind, *words).code == 0
    until(lambda: kind in folder.begun())


@pytest.mark.parametrize(("protection", "end"), [("", "succeeded"), ("return-times", "quarantined")])
def test_a_neighbour_that_returned_in_time_is_answered_by_its_result(folder: Folder, protection: str, end: str) -> None:
    """It has six seconds, and returns as soon as the loop is blocked, for seven; the second case is the control."""
    folder.write("neighbours.py", NEIGHBOURS)
    folder.start("up", "--module", "neighbours", program=weakened(protection))
    started_by(folder, "plain", "--timeout-ms", "6000")
    started_by(folder, "blocking")
    until(lambda: folder.state("plain") not in ("pending", "running"))
    assert folder.state("plain") == end


def test_a_key_is_held_for_as_long_as_its_loop_is_blocked(folder: Folder) -> None:
    folder.write("neighbours.py", NEIGHBOURS)
    folder.start("up", "--module", "neighbours")
    started_by(folder, "charge")
    # Its lease of three seconds is renewed.
    throughout(6, lambda: folder("idempotency", "forget", "charge:order-7").code == 75)
    folder.go()
    until(lambda: folder.state("charge") == "succeeded")


def test_when_the_loop_alone_renews_keys_another_caller_gets_it(folder: Folder) -> None:
    """The control."""
    folder.write("neighbours.py", NEIGHBOURS)
    folder.start("up", "--module", "neighbours", program=weakened("held-keys"))
    started_by(folder, "charge")
    until(lambda: folder("idempotency", "forget", "charge:order-7").code == 0)


def blocked_alone(folder: Folder, protection: str) -> None:
    """A router that waits a second for those who know a step, and a silent worker that is the only one who does."""
    folder.write("neighbours.py", NEIGHBOURS)
    folder.write("reefknot.yaml", CONFIG + "router: {patience_seconds: 1}\n")
    folder.start("router", "start", program=weakened(protection))
    folder.part("worker", "--worker-id", "plain")
    folder.part("worker", "--worker-id", "knows", "--module", "neighbours")
    started_by(folder, "waiting", "--timeout-ms", "60000")
    until(lambda: "knows" in gone_workers(folder))
    assert folder("submit", "--type", "own.only", "--id", "only").code == 0


def gone_workers(folder: Folder) -> list[str]:
    (router,) = folder.json("router", "status")["routers"]
    return [name for name, one in router["workers"].get("cpu", {}).items() if one["state"] == "gone"]


def test_work_of_a_type_that_only_a_blocked_worker_knows_waits_for_it(folder: Folder) -> None:
    blocked_alone(folder, "")
    throughout(4, lambda: folder.state("only") == "pending")
    folder.go()
    until(lambda: folder.state("only") == "succeeded")


def test_when_a_silent_worker_counts_as_gone_such_work_is_quarantined(folder: Folder) -> None:
    """The control."""
    blocked_alone(folder, "living-processes")
    until(lambda: folder.state("only") == "quarantined")
