"""An owner that sleeps past its lease and wakes up believing that nothing has happened."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reefknot.idempotency.model import Busy, Claimed, Done
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.faults.carrying_out import Plan, carried_out, plan
from tests.faults.freezing import FENCELESS
from tests.faults.holding import LEASE, ZOMBIE
from tests.faults.judging import judge_frozen
from tests.faults.points import spread

ROOT = Path(__file__).parents[2]
HEIR = '"the heir"'


@contextmanager
def owner(path: Path, variant: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.faults.holding", str(path), variant]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


async def take_over(store: Store) -> int:
    """Wait for the leases to end, finish what the frozen one began. Answers the new fence."""
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        answer = await store.idempotency.claim("charge:order", owner="heir", lease=60)
        if isinstance(answer, Claimed):
            break
        assert isinstance(answer, Busy)
        assert asyncio.get_running_loop().time() < deadline
        await store.idempotency.wait("charge:order", 2 * LEASE)
    while not (items := await store.work.claim(1, WorkClaim(owner="heir", lease=60))):
        assert asyncio.get_running_loop().time() < deadline
        await store.work.wait(2 * LEASE)
    await store.idempotency.finish(answer.claim, Done(HEIR))
    assert await store.work.settle([Settlement("order", "heir", items[0].fence, WorkDone(HEIR))]) == [True]
    return answer.claim.fence


def awakened(path: Path, variant: str) -> tuple[dict[str, Any], str | None, str | None]:
    """Freeze the owner past its lease, take over, wake it up: what it was told, and both results at the end."""

    async def main() -> tuple[dict[str, Any], str | None, str | None]:
        async with open_store(f"sqlite:{path}") as store:
            await store.work.enqueue([WorkItem("order", "charge")])
            with owner(path, variant) as process:
                fence = (await asyncio.to_thread(line, process))["fence"]
                os.kill(process.pid, signal.SIGSTOP)
                assert await take_over(store) > fence
                os.kill(process.pid, signal.SIGCONT)
                assert process.stdin is not None
                process.stdin.write("wake up\n")
                process.stdin.flush()
                told = await asyncio.to_thread(line, process)
            record = await store.idempotency.get("charge:order")
            item = await store.work.get("order")
            assert record is not None
            assert item is not None
            return told, record.result, item.result

    return asyncio.run(main())


@pytest.mark.parametrize("variant", ["ports", "function"])
def test_a_frozen_owner_that_wakes_up_is_refused(tmp_path: Path, variant: str) -> None:
    told, record, result = awakened(tmp_path / "state.db", variant)
    assert told == {"record": "LeaseLostError", "settled": False}
    assert (record, result) == (HEIR, HEIR)


def test_without_the_fence_the_zombie_overwrites_what_its_heir_recorded(tmp_path: Path) -> None:
    told, record, result = awakened(tmp_path / "state.db", "no fence")
    assert told == {"record": "recorded", "settled": True}
    assert (record, result) == (ZOMBIE, ZOMBIE)


def points(flaw: str = "", modes: tuple[str, ...] = ("retry", "guard", "dedup")) -> list[Plan]:
    return [plan("used", mode, at, flaw=flaw) for mode in modes for at in range(1, 150)]


@pytest.mark.slow
def test_an_owner_frozen_at_any_storage_call_never_gives_a_key_a_second_result(tmp_path: Path) -> None:
    tried = spread(points(), 90)
    lives = carried_out(tmp_path, tried, program="tests.faults.freezing")
    assert [(one, life["plan"]) for life in lives for one in judge_frozen(life)] == []
    assert all(life["stopped"] for life in lives)
    kept_out = sum("kept out" in life["between"] for life in lives)
    refused = sum(said[:2] == ["error", "LeaseLostError"] for life in lives for said in life["said"])
    assert kept_out > 0
    assert refused > 0
    print(f"{len(lives)} freezes, {kept_out} with the lock in hand, {refused} refused on waking")


def test_the_judge_catches_a_store_that_does_not_look_at_the_fence(tmp_path: Path) -> None:
    lives = carried_out(tmp_path, points(FENCELESS, ("retry",))[30:140:3], program="tests.faults.freezing")
    said = [one for life in lives for one in judge_frozen(life)]
    assert any(one.startswith("differing:") for one in said)
    assert any(one.startswith("twice:") for one in said)
