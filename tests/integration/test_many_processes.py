"""Eight processes on one file: nothing claimed twice at once, nothing lost, none starved."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reefknot.audit.port import AuditQuery
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.stores.opening import open_store
from tests.pace import slowness

PROCESSES = 8
ITEMS = 200
RACED_KEYS = 20

WORKER = """
import asyncio, json, sys, time
from reefknot.stores.opening import open_store
from reefknot.core.canonical import canonical
from reefknot.idempotency.model import Claimed, Done
from reefknot.queue.model.work import WorkDone
from reefknot.audit.port import AuditEntry
from reefknot.queue.port.work_queue import Settlement, WorkClaim

async def look_then_take(store, n, owner):
    # The broken variant: a select, and later an update that trusts it.
    seen = await store.work.find(state="pending", limit=n)
    await asyncio.sleep(0)
    mine = await asyncio.gather(*(store.work.cancel(item.id, who=owner) for item in seen))
    return seen

async def main(path, me, keys, broken):
    runs, won, slowest = [], [], 0.0
    async with open_store(f"sqlite:{path}") as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for key in range(keys):
            answer = await store.idempotency.claim(f"k{key}", owner=me, lease=600)
            if isinstance(answer, Claimed):
                won.append(key)
                await store.idempotency.finish(answer.claim, Done(json.dumps(me)))
        idle = 0
        while idle < 3:
            asked = time.monotonic()
            if broken:
                items = await look_then_take(store, 5, me)
            else:
                items = await store.work.claim(5, WorkClaim(me, lease=600))
            slowest = max(slowest, time.monotonic() - asked)
            if not runs and not broken:
                print("claimed", flush=True)  # whoever is slow to start gets a share before the fast have it all
                sys.stdin.readline()
            if not items:
                idle += 1
                await store.work.wait(0.05)
                continue
            idle = 0
            runs += [[item.id, item.fence] for item in items]
            if broken:
                continue
            reports = []
            for item in items:
                event = AuditEntry(canonical({"event_type": "done", "by": me}), "done", 0, work_id=item.id)
                reports.append(Settlement(item.id, me, item.fence, WorkDone(json.dumps(me)), (event,)))
            assert all(await store.work.settle(reports))
    print(json.dumps({"runs": runs, "won": won, "slowest": slowest}), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "broken"))
"""


async def _fill(path: Path) -> None:
    async with open_store(f"sqlite:{path}") as store:
        await store.work.enqueue([WorkItem(f"{number:04}", "t", payload=b"p") for number in range(ITEMS)])


async def _inspect(path: Path) -> None:
    async with open_store(f"sqlite:{path}") as store:
        counts = (await store.work.snapshot()).counts
        assert [state for one in counts.values() for state in one] == [WorkState.SUCCEEDED]
        assert sum(one[WorkState.SUCCEEDED] for one in counts.values()) == ITEMS
        events = await store.audit.read(AuditQuery(event_type="done", limit=2 * ITEMS))
        assert Counter(one.entry.work_id for one in events) == {f"{number:04}": 1 for number in range(ITEMS)}
        assert await store.audit.verify() == []


def _race(path: Path, variant: str) -> list[dict[str, Any]]:
    """Eight processes start together and run until nothing is left. What each of them did."""
    asyncio.run(_fill(path))
    lines = [[sys.executable, "-c", WORKER, str(path), f"w{n}", str(RACED_KEYS), variant] for n in range(PROCESSES)]
    processes = [subprocess.Popen(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for one in lines]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        reports = []
        _go(processes)
        if variant == "sound":
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "claimed\n"
            _go(processes)
        for process in processes:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0
            reports.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def _go(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


@pytest.mark.slow
def test_eight_processes_share_the_work_without_running_any_of_it_twice_or_losing_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    reports = _race(path, "sound")
    runs = [work_id for report in reports for work_id, _ in report["runs"]]
    assert sorted(runs) == [f"{number:04}" for number in range(ITEMS)]
    assert all(fence == 1 for report in reports for _, fence in report["runs"])
    won = [key for report in reports for key in report["won"]]
    assert sorted(won) == list(range(RACED_KEYS))
    assert all(report["runs"] for report in reports), "a process got nothing"
    assert max(report["slowest"] for report in reports) < 10 * slowness()
    asyncio.run(_inspect(path))


@pytest.mark.slow
def test_the_race_catches_claimers_that_look_first_and_take_later(tmp_path: Path) -> None:
    reports = _race(tmp_path / "state.db", "broken")
    runs = Counter(work_id for report in reports for work_id, _ in report["runs"])
    assert max(runs.values()) > 1
