"""
An owner that is frozen past its lease: it takes the work and the key, stops, and reports as if nothing had happened.

A plan is a variant: `ports` calls the store, `function` runs under `@idempotent`, `no fence` writes past every check,
which is the broken one. The leases are short, and really waited for.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import apsw

from reefknot.errors import LeaseLostError
from reefknot.idempotency.decorator import idempotent
from reefknot.idempotency.model import Busy, Claimed, Done
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.faults.carrying_out import Fork, Life, Plan, carry_out_plans

LEASE = 0.3
ZOMBIE, HEIR = '"the zombie"', '"the heir"'
KEY = "charge:order"


def sleep_in() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def write(path: str, statement: str, name: str) -> bool:
    """Past every check. Whether it wrote something."""
    connection = apsw.Connection(path)
    connection.execute(statement, (ZOMBIE, name))
    changed = connection.changes() == 1
    connection.close()
    return changed


async def by_ports(store: Store, path: str, *, fenced: bool) -> str:
    answer = await store.idempotency.claim(KEY, owner="zombie", lease=LEASE)
    assert isinstance(answer, Claimed)
    sleep_in()
    if not fenced:
        write(path, "UPDATE idempotency SET state = 'done', result = ? WHERE key = ?", KEY)
        return "recorded"
    try:
        await store.idempotency.finish(answer.claim, Done(ZOMBIE))
    except LeaseLostError:
        return "LeaseLostError"
    return "recorded"


async def by_function(store: Store) -> str:
    @idempotent(key=lambda order: order, lease=LEASE, store=store, name="charge")
    async def charge(order: str) -> str:
        sleep_in()
        return "the zombie"

    try:
        await charge("order")
    except LeaseLostError:
        return "LeaseLostError"
    return "recorded"


async def hold(path: str, variant: str) -> dict[str, Any]:
    """What became of its reports."""
    async with open_store(f"sqlite:{path}") as store:
        (item,) = await store.work.claim(1, WorkClaim(owner="zombie", lease=LEASE))
        if variant == "function":
            record = await by_function(store)
        else:
            record = await by_ports(store, path, fenced=variant != "no fence")
        if variant == "no fence":
            settled = write(path, "UPDATE work SET state = 'succeeded', result = ? WHERE id = ?", item.id)
        else:
            (settled,) = await store.work.settle([Settlement(item.id, "zombie", item.fence, WorkDone(ZOMBIE))])
        return {"record": record, "settled": settled}


async def prepare(path: str) -> None:
    async with open_store(f"sqlite:{path}") as store:
        await store.work.enqueue([WorkItem("order", "charge")])


async def take_over(path: str) -> list[int]:
    """Wait for the leases to end, and finish what the frozen one began. Answers both fences of the key."""
    async with open_store(f"sqlite:{path}") as store, asyncio.timeout(20):
        before = await store.idempotency.get(KEY)
        assert before is not None
        while not isinstance(answer := await store.idempotency.claim(KEY, owner="heir", lease=60), Claimed):
            assert isinstance(answer, Busy)
            await store.idempotency.wait(KEY, 2 * LEASE)
        while not (items := await store.work.claim(1, WorkClaim(owner="heir", lease=60))):
            await store.work.wait(2 * LEASE)
        await store.idempotency.finish(answer.claim, Done(HEIR))
        assert await store.work.settle([Settlement("order", "heir", items[0].fence, WorkDone(HEIR))]) == [True]
        return [before.fence, answer.claim.fence]


async def results(path: str) -> list[str | None]:
    async with open_store(f"sqlite:{path}") as store:
        record, item = await store.idempotency.get(KEY), await store.work.get("order")
        assert record is not None
        assert item is not None
        return [record.result, item.result]


def one(folder: Path, plan: Plan) -> Life:
    path = str(folder / "state.db")
    asyncio.run(prepare(path))
    zombie = Fork(lambda _: hold(path, plan["variant"]))
    os.waitpid(zombie.pid, os.WUNTRACED)
    fences = asyncio.run(take_over(path))
    os.kill(zombie.pid, signal.SIGCONT)
    said, ended = zombie.heard(), zombie.ended()
    return {"fences": fences, "said": said, "ended": ended, "results": asyncio.run(results(path))}


if __name__ == "__main__":
    carry_out_plans(one)
