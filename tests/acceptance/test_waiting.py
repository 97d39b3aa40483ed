"""
"Why is my job not running?", asked of real processes: `job show` and `job list` name the cause and the remedy.

Rare causes are staged in `tests/unit/console/operations/test_waits.py`.
"""

import json
import signal
import subprocess
import sys
from typing import Any

from tests.acceptance.folder import CONFIG, MODULE, Folder, until

STEPS = (
    MODULE
    + """
from types import SimpleNamespace

@rk.block("own.fail")
async def fail(inputs, context):
    raise ConnectionError("the printer is away")

@rk.block("own.limited")
async def limited(inputs, context):
    error = ConnectionError("slow down")
    error.response = SimpleNamespace(status_code=429, headers={"retry-after": "60"})
    raise error

@rk.idempotent(key=lambda order: order, mode="retry", name="charge", wait=300)
async def charge(order):
    return await wait({"name": "charged"}, None)

@rk.block("own.charge")
async def charge_once(inputs, context):
    return await charge("order-7")
"""
)
ONE_SLOT = "queue: {v2: {enabled: true, resource_pools: {cpu: {max_concurrency: 1}}}}"
POLICY = (
    CONFIG.replace("max_attempts: 2, base_delay_ms: 20", "max_attempts: 4, base_delay_ms: 30000")
    .replace("queue: {v2: {enabled: true}}", ONE_SLOT)
    .replace("worker:\n", "router: {patience_seconds: 600}\nworker:\n")
)


def prepared(folder: Folder) -> None:
    folder.write("reefknot.yaml", POLICY)
    folder.write("naps.py", STEPS)


def submit(folder: Folder, kind: str, name: str, *words: str) -> None:
    folder.submit(kind, name, "--timeout-ms", "600000", *words, name=name)


def waits(folder: Folder, name: str, *words: str) -> str:
    """The code of the cause, which `job show` says in words, with what to do, and the list too."""
    found: dict[str, Any] | None = folder.json("job", "show", name, *words)["waiting"]
    if found is None:
        return ""
    shown = " ".join(folder("job", "show", name, *words).out.split())
    listed = [one["waiting"] for one in folder.json("job", "list")["jobs"] if one["id"] == name]
    codes = {one["code"] for one in listed if one} | {found["code"]}
    if len(codes) == 1 and found["remedy"] in shown:
        return str(found["code"])
    return f"{codes} of {shown}"  # it changes at this moment: the next look tells


def waits_for(folder: Folder, name: str, code: str, *words: str) -> str:
    """The sentence, once the job waits for this cause."""
    until(lambda: waits(folder, name, *words) == code)
    return str(folder.json("job", "show", name, *words)["waiting"]["text"])


def worker(folder: Folder, *words: str) -> subprocess.Popen[str]:
    return folder.part("worker", "--module", "naps", *words)


def test_a_job_says_which_part_of_the_system_it_waits_for(folder: Folder) -> None:
    prepared(folder)
    submit(folder, "own.wait", "first")
    assert waits(folder, "first") == "no_system"

    alone = worker(folder)
    assert waits_for(folder, "first", "no_router") == "no router is running, so no worker is given this job"
    assert "no router is running" in folder("job", "list").out
    folder.stop(alone)

    folder.part("router")
    waits_for(folder, "first", "no_worker")
    worker(folder)
    until(lambda: "first" in folder.begun())
    submit(folder, "own.unheard", "mistyped")
    line = {"assignment_id": "elsewhere", "job": {"type": "own.wait"}, "resource_class": "tpu"}
    folder.write("tpu.jsonl", json.dumps(line))
    assert folder("submit", "tpu.jsonl").code == 0
    assert "knows the type own.unheard" in waits_for(folder, "mistyped", "no_type")
    assert "the class tpu" in waits_for(folder, "elsewhere", "no_class")


def test_a_job_says_what_holds_it_up_at_a_worker_that_runs(folder: Folder) -> None:
    prepared(folder)
    folder.part("router")
    worker(folder)
    submit(folder, "own.wait", "first")
    until(lambda: "first" in folder.begun())
    for name in ("second", "third"):
        submit(folder, "own.wait", name)
        waits_for(folder, name, "pool_full")
    until(lambda: "and 1 job is ahead of it" in waits_for(folder, "third", "pool_full"))
    submit(folder, "own.wait", "tomorrow", "--in", "24h")
    assert waits_for(folder, "tomorrow", "scheduled") == "it is scheduled for later and is due in 24 h"

    assert folder("worker", "pause").code == 0
    assert waits_for(folder, "second", "paused") == "worker-1 is paused"
    assert folder("worker", "resume").code == 0
    assert folder("worker", "drain", "--seconds", "60").code == 0
    assert "worker-1 is draining" in waits_for(folder, "second", "draining")


def test_a_job_says_which_failure_or_key_it_waits_for(folder: Folder) -> None:
    prepared(folder)
    folder.part("router")
    worker(folder, "--worker-id", "one")
    submit(folder, "own.fail", "failing")
    assert "attempt 2 of 5 begins in" in waits_for(folder, "failing", "retry")
    assert "the printer is away" in waits_for(folder, "failing", "retry")
    submit(folder, "own.limited", "limited")
    assert "asked to wait; attempt 2" in waits_for(folder, "limited", "rate_limited")

    submit(folder, "own.charge", "holder")
    until(lambda: "charged" in folder.begun())
    worker(folder, "--worker-id", "two")
    submit(folder, "own.charge", "other", "--attempt-timeout-ms", "2000")
    assert "the idempotency key charge:order-7 is held by one (pid" in waits_for(folder, "other", "key_held")


def frozen_between_writes(folder: Folder, process: subprocess.Popen[str]) -> bool:
    """Freeze a process, unless it is writing: then the file would stay locked, and that is another story."""
    process.send_signal(signal.SIGSTOP)
    script = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=1).execute('BEGIN IMMEDIATE')"
    command = [sys.executable, "-c", script, str(folder.path / ".reefknot" / "state.db")]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return True
    process.send_signal(signal.SIGCONT)
    return False


def test_a_frozen_worker_holds_its_job_until_its_lease_ends(folder: Folder) -> None:
    prepared(folder)
    folder.part("router")
    frozen = worker(folder)
    submit(folder, "own.wait", "held")
    until(lambda: "held" in folder.begun())
    until(lambda: frozen_between_writes(folder, frozen))
    try:
        text = waits_for(folder, "held", "owner_silent")
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert "worker-1 holds it and has been silent for" in text
