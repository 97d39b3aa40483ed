"""An `async def` step that blocks its event loop for longer than its lease, while another worker waits for work."""

from __future__ import annotations

import subprocess

from tests.acceptance.folder import Folder, until

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


def state(folder: Folder) -> str:
    return str(folder.json("job", "show", "slow")["state"])


def started(folder: Folder, protection: str) -> list[subprocess.Popen[str]]:
    """A router and two workers with leases of three seconds, and a step that blocks one of them for eleven."""
    (folder.path / "blocks.py").write_text(STEPS)
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
    until(lambda: state(folder) == "succeeded")
    assert len(effects(folder)) == 1
    assert folder.json("job", "show", "slow")["crashes"] == 0
    lines = [line for line in logged(workers).splitlines() if "the event loop is blocked" in line]
    assert len(lines) == 1, "one line for one block"
    assert "own.blocking (slow), at blocks.py:11" in lines[0]
    assert "belongs in a plain function" in lines[0]


def test_when_the_loop_alone_renews_leases_its_effect_happens_twice(folder: Folder) -> None:
    """The control."""
    workers = started(folder, "loop-watch")
    until(lambda: len(effects(folder)) == 2)
    assert "the event loop is blocked" not in logged(workers)
