"""Stores that are moved between files and servers: all of it arrives, is worked on once, and only there."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import reefknot as rk
from reefknot.console.nats_servers import NatsServer
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import WorkClaim
from reefknot.runtime.processes import marked_owner
from tests.faults import moving, points
from tests.warm_commands import run_cold

pytestmark = pytest.mark.real_time

RUNS: Counter[str] = Counter()
LOCK = threading.Lock()
LARGE = "x" * 700_000
MEASURED = """
import resource, sys
from reefknot.console.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF), file=sys.stderr)
sys.exit(code)
"""


@rk.block("moved.note")
def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    with LOCK:
        RUNS[inputs["name"]] += 1
    if inputs.get("fails"):
        raise ValueError("it is broken")
    return {"name": inputs["name"], "size": len(inputs.get("text", ""))}


def served(server: NatsServer) -> str:
    return f"{server.url}/moved-{uuid4().hex[:12]}"


def command(folder: Path, *words: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REEFKNOT")}
    environment = {**kept, "XDG_CONFIG_HOME": str(folder), "COLUMNS": "200"}
    return run_cold(sys.executable, "-m", "reefknot", *words, cwd=folder, env=environment)


async def test_everything_survives_a_journey_through_all_engines(nats_server: NatsServer, tmp_path: Path) -> None:
    way = [f"sqlite:{tmp_path / 'a.db'}", served(nats_server), served(nats_server)]
    way += [f"sqlite:{tmp_path / 'b.db'}", f"sqlite:{tmp_path / 'c.db'}"]
    await moving.fill(way[0], more=points.either(300, 3000), has_large=True)
    before = await moving.inventory(way[0])
    for number, (old, new) in enumerate(pairwise(way)):
        archive = tmp_path / f"{number}.jsonl"
        done = await asyncio.to_thread(
            command, tmp_path, "store", "move", "--from", old, "--to", new, "--archive", str(archive), "--json"
        )
        assert done.returncode == 0, done.stderr
        assert await moving.inventory(new) == before
        verified = await asyncio.to_thread(command, tmp_path, "audit", "verify", str(archive))
        assert verified.returncode == 0, verified.stdout
        assert await moving.can_be_worked_on(old) is False
    report = json.loads(done.stdout)
    assert report["values"] == len(moving.VALUES)
    assert sum(report["keys"].values()) == len(before[1])


async def left_behind(url: str) -> None:
    """Work of every kind that a system which was killed has left in a store."""
    async with rk.system(url, modules=[note]) as client:
        ended = await client.submit("moved.note", {"name": "ended"}, assignment_id="ended")
        aside = await client.submit("moved.note", {"name": "aside", "fails": True}, assignment_id="aside")
        await asyncio.gather(ended.result(timeout=20), aside.result(timeout=20), return_exceptions=True)
    async with rk.connect(url) as client:
        await client.submit("moved.note", {"name": "waiting", "text": LARGE}, assignment_id="waiting")
        await client.submit("moved.note", {"name": "tenant"}, assignment_id="wäiting", tenant_id="acme")
        await client.submit("moved.note", {"name": "later"}, assignment_id="later", delay=1.5)
        await client.submit("moved.note", {"name": "taken"}, assignment_id="taken")
    async with rk.open_store(url) as store:
        dead = "w@" + marked_owner("").removeprefix("@").replace(".", ".999", 1)
        (taken,) = await store.work.claim(1, WorkClaim(dead, ["router"], lease=600, only=["taken"]))
        assert taken.state is WorkState.RUNNING


@pytest.mark.parametrize("way", ["to a server", "to a file"])
async def test_a_system_on_the_target_does_the_moved_work_once_and_none_that_had_ended(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    RUNS.clear()
    ends = [f"sqlite:{tmp_path / 'a.db'}", served(nats_server)]
    old, new = ends if way == "to a server" else reversed(ends)
    await left_behind(old)
    earlier = RUNS.copy()
    async with rk.system(old, modules=[note], router=False):
        refused = await asyncio.to_thread(command, tmp_path, "store", "move", "--from", old, "--to", new)
        assert (refused.returncode, f"pid {os.getpid()} on " in refused.stderr) == (75, True), refused.stderr
    done = await asyncio.to_thread(command, tmp_path, "store", "move", "--from", old, "--to", new)
    assert done.returncode == 0, done.stderr
    with pytest.raises(rk.StoreMovedError):
        async with rk.system(old, modules=[note]):
            pass
    async with rk.system(new, modules=[note]) as client:
        names = [("waiting", None), ("wäiting", "acme"), ("later", None), ("taken", None), ("ended", None)]
        handles = [client.job(name, tenant) for name, tenant in names]
        results = await asyncio.gather(*(one.result(timeout=30) for one in handles))
        again = await client.submit("moved.note", {"name": "ended"}, assignment_id="ended")
        assert not again.is_new
    outputs = [one.output or {} for one in results]
    assert [one["name"] for one in outputs] == ["waiting", "tenant", "later", "taken", "ended"]
    assert outputs[0]["size"] == len(LARGE)
    ran = RUNS - earlier
    assert ran == {"waiting": 1, "tenant": 1, "later": 1, "taken": 1}
    async with rk.open_store(new) as store:
        aside, taken = [await store.work.get(name) for name in ("aside", "taken")]
    assert aside is not None
    assert taken is not None
    assert aside.state in (WorkState.FAILED, WorkState.QUARANTINED)
    assert [one.what for one in taken.history] == ["crashed"], "its router had vanished"


@pytest.mark.parametrize("way", ["to a server", "to a file"])
async def test_a_client_that_was_connected_all_the_time_submits_nothing_to_the_old_store(
    nats_server: NatsServer, tmp_path: Path, way: str
) -> None:
    ends = [f"sqlite:{tmp_path / 'a.db'}", served(nats_server)]
    old, new = ends if way == "to a server" else reversed(ends)
    async with rk.connect(old) as client, rk.open_store(old) as store:
        await client.submit("moved.note", {"name": "a"})
        done = await asyncio.to_thread(command, tmp_path, "store", "move", "--from", old, "--to", new)
        assert done.returncode == 0, done.stderr
        for _ in range(2):
            with pytest.raises(rk.StoreMovedError, match="it was moved to"):
                await client.submit("moved.note", {"name": "b"})
        assert len((await store.work.search(limit=5)).items) == 1
        if way == "to a server":
            with pytest.raises(rk.StoreMovedError):
                await store.idempotency.claim("key", owner="me")


@pytest.mark.parametrize("way", ["to a server", "to a file"])
def test_a_store_of_many_jobs_and_keys(nats_server: NatsServer, tmp_path: Path, way: str) -> None:
    """A hundred thousand of each in `make faults`."""
    ends = [f"sqlite:{tmp_path / 'a.db'}", served(nats_server)]
    old, new = ends if way == "to a server" else reversed(ends)
    asyncio.run(moving.fill(old, more=points.either(500, 100_000)))
    before = asyncio.run(moving.inventory(old))
    began, words = time.monotonic(), ("store", "move", "--from", old, "--to", new, "--archive", "events.jsonl")
    measured = [sys.executable, "-c", MEASURED, *words]
    done = subprocess.run(measured, cwd=tmp_path, capture_output=True, text=True, check=False)
    print(f"{way}: {time.monotonic() - began:.1f} s, {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert asyncio.run(moving.inventory(new)) == before
