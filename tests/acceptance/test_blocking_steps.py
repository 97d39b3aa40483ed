"""An `async def` step that blocks its event loop or ignores its cancellation: its work, its neighbours, its keys."""

import re
import subprocess

import pytest

from tests.acceptance.folder import CONFIG, Folder, throughout, until, without

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
    folder.part("router")
    words = ("--module", "blocks", "--worker-id")
    workers = [folder.part("worker", *words, name, protection=protection) for name in ("one", "two")]
    folder.submit("own.blocking", "slow")
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


def started_by(folder: Folder, kind: str, *words: str) -> None:
    folder.submit(f"own.{kind}", kind, *words)
    until(lambda: kind in folder.begun())


@pytest.mark.parametrize(("protection", "end"), [("", "succeeded"), ("return-times", "quarantined")])
def test_a_neighbour_that_returned_in_time_is_answered_by_its_result(folder: Folder, protection: str, end: str) -> None:
    """It has six seconds, and returns as soon as the loop is blocked, for seven; the second case is the control."""
    folder.write("neighbours.py", NEIGHBOURS)
    folder.start("up", "--module", "neighbours", program=without(protection))
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
    folder.start("up", "--module", "neighbours", program=without("held-keys"))
    started_by(folder, "charge")
    until(lambda: folder("idempotency", "forget", "charge:order-7").code == 0)


def blocked_alone(folder: Folder, protection: str) -> None:
    """A router that waits a second for those who know a step, and a silent worker that is the only one who does."""
    folder.write("neighbours.py", NEIGHBOURS)
    folder.write("reefknot.yaml", CONFIG + "router: {patience_seconds: 1}\n")
    folder.start("router", "start", program=without(protection))
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


DEAF = """\
import asyncio
import reefknot as rk

@rk.block("own.deaf", timeout=1)
async def deaf(inputs, context):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
"""


def test_a_process_with_such_a_step_answers_in_time_and_ends_when_asked(folder: Folder) -> None:
    folder.write("stubborn.py", DEAF)
    folder.configure("dashboard: {enabled: false}\n")
    process = folder.start("up", "--module", "stubborn", "--drain", "1")

    submitted = folder("submit", "--type", "own.deaf", "--id", "a", "--wait")
    assert submitted.code != 0
    assert "the time for all attempts was over after" in submitted.out
    until(lambda: folder.state("a") in ("failed", "quarantined"))
    process.terminate()
    _, log = process.communicate(timeout=60)

    assert process.returncode in (0, 143)
    assert re.search(rf"its step goes on after its [\d.]+ s, at {folder.path / 'stubborn.py'}:8", log)
    assert "a step ignores that it is cancelled" in log
