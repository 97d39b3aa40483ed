"""What a process holds is free when it is gone, and no shutdown and no caller waits longer than it was told."""

import asyncio
import signal
import subprocess
import time

import apsw
import pytest

import reefknot as rk
from tests.acceptance.folder import Folder, until

STEPS = """\
import asyncio
import os
import time
import reefknot as rk

def begun(name):
    with open("begun.txt", "a") as file:
        file.write(name + "\\n")

async def charged(order, **more):
    begun(order)
    while not os.path.exists("go"):
        await asyncio.sleep(0.05)
    return {"charged": order}

charge = {mode: rk.idempotent(key=lambda order: order, mode=mode, name=mode)(charged) for mode in ("retry", "guard")}

@rk.idempotent(key=lambda order: order, mode="dedup", name="dedup")
async def dedup(order, idempotency_key):
    return await charged(order)

charge["dedup"] = dedup

@rk.block("own.charge")
async def charge_once(inputs, context):
    return await charge[inputs["mode"]](inputs["name"])

@rk.block("own.plain")
def plain(inputs, context):
    begun(inputs["name"])
    ends = time.monotonic() + inputs["seconds"]
    while time.monotonic() < ends:
        time.sleep(0.05)
    return {}
"""


def up(folder: Folder, *words: str) -> subprocess.Popen[str]:
    """A system with the steps of this file, as soon as it says that it is up."""
    folder.write("held.py", STEPS)
    return folder.up("--module", "held", *words)


def submit(folder: Folder, kind: str, name: str, *words: str, **inputs: object) -> None:
    folder.submit(kind, name, *words, name=name, **inputs)
    until(lambda: name in folder.begun())


def test_a_shutdown_ends_with_its_drain_although_a_plain_function_goes_on(folder: Folder) -> None:
    process = up(folder, "--drain", "1")
    submit(folder, "own.plain", "endless", seconds=25)
    began = time.monotonic()
    code, _, err = folder.stop(process)
    took = time.monotonic() - began

    assert code == 143
    assert 1.0 <= took < 8.0, "one second of drain, and then the end"
    assert "1 plain functions run on although their attempts have ended" in err
    shown = folder.job("endless")
    assert (shown["state"], shown["reason"], shown["interruptions"]) == ("pending", "shutdown", 1)
    assert shown["attempts"] == 0, "handed back, and nothing was spent"


DEADLINE_S = 3.0
SOON_S = 1.0 + 1.5
"""The promised second, and what starting a thread or a loop takes on a busy machine."""


def is_locked(folder: Folder) -> bool:
    """Whether a process holds the write lock of the store, and keeps it. Only a file has one."""
    if not folder.engine.startswith("sqlite:"):
        return False
    connection = apsw.Connection(f"{folder.path}/.reefknot/state.db")
    connection.set_busy_timeout(500)
    try:
        connection.execute("BEGIN IMMEDIATE; ROLLBACK")
    except apsw.BusyError:
        return True
    finally:
        connection.close()
    return False


async def _answered(folder: Folder, kill: list[subprocess.Popen[str]], how: signal.Signals) -> tuple[str, float]:
    """The status that a client hears of a step whose processes are killed or frozen, and after how long."""
    async with rk.connect(folder.engine) as client:
        began = time.monotonic()
        inputs = {"name": "late", "seconds": 60}
        handle = await client.submit("own.nap", inputs, deadline=DEADLINE_S, assignment_id="late")
        while "late" not in folder.begun():  # noqa: ASYNC110 - another process begins it
            await asyncio.sleep(0.02)
        for process in kill:
            process.send_signal(how)
            while how is signal.SIGSTOP and is_locked(folder):  # frozen in a transaction: nobody can write then
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.02)
                process.send_signal(how)
        result = await handle.result(30)
        return result.status.value, time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", ["worker", "router", "both"])
def test_a_deadline_is_answered_within_a_second_whoever_died(folder: Folder, who: str, how: signal.Signals) -> None:
    router = folder.part("router")
    worker = folder.part("worker", "--worker-id", "w1", "--module", "naps")
    dies = {"worker": [worker], "router": [router], "both": [worker, router]}[who]
    status, took = asyncio.run(_answered(folder, dies, how))
    assert status == "timeout"
    assert DEADLINE_S - 0.1 <= took <= DEADLINE_S + SOON_S


def test_keys_of_a_killed_process_are_free_as_soon_as_its_work_is(folder: Folder) -> None:
    """Key lease 60 s, time of the step 30 s, both by default: nothing waits for either."""
    modes = ("retry", "dedup", "guard")
    first = up(folder)
    for mode in modes:
        submit(folder, "own.charge", mode, mode=mode)
    folder.kill(first)
    folder.go()
    began = time.monotonic()
    up(folder)
    until(lambda: not {folder.state(mode) for mode in modes} & {"pending", "running"})
    assert time.monotonic() - began < 15
    for mode in ("retry", "dedup"):
        assert (folder.state(mode), folder.begun().count(mode)) == ("succeeded", 2)
        assert folder.json("idempotency", "show", f"{mode}:{mode}")["result"] == {"charged": mode}
    shown = folder.job("guard")
    assert (shown["state"], "guard:guard" in shown["reason"]) == ("quarantined", True)
    assert folder.begun().count("guard") == 1, "at most once"
    assert folder.json("idempotency", "show", "guard:guard")["state"] == "unknown"


def test_a_key_of_a_killed_process_can_be_forgotten_at_once(folder: Folder) -> None:
    process = up(folder)
    submit(folder, "own.charge", "order-8", mode="retry")
    assert folder("idempotency", "forget", "retry:order-8").code == 75, "it is held"
    folder.kill(process)
    assert folder("idempotency", "forget", "retry:order-8").code == 0
