"""
An owner that can be frozen: `python -m tests.faults.holding DATABASE VARIANT`.

It takes the work and the key with a short lease, says so, waits for a line, and reports as if nothing had happened.
What became of its report is its second line. VARIANT: `ports` calls the store, `function` runs under `@idempotent`,
`no fence` writes past every check, which is the broken variant.
"""

import asyncio
import json
import sys
from typing import Any

import apsw

from reefknot.errors import LeaseLostError
from reefknot.idempotency.decorator import idempotent
from reefknot.idempotency.model import Claimed, Done
from reefknot.queue.model.work import WorkDone
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store

LEASE = 0.3
ZOMBIE = '"the zombie"'


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def by_ports(store: Store, path: str, *, fenced: bool) -> str:
    answer = await store.idempotency.claim("charge:order", owner="zombie", lease=LEASE)
    assert isinstance(answer, Claimed)
    say(fence=answer.claim.fence)
    sys.stdin.readline()
    if not fenced:
        connection = apsw.Connection(path)
        connection.execute("UPDATE idempotency SET state = 'done', result = ? WHERE key = 'charge:order'", (ZOMBIE,))
        connection.close()
        return "recorded"
    try:
        await store.idempotency.finish(answer.claim, Done(ZOMBIE))
    except LeaseLostError:
        return "LeaseLostError"
    return "recorded"


async def by_function(store: Store) -> str:
    @idempotent(key=lambda order: order, lease=LEASE, store=store, name="charge")
    async def charge(order: str) -> str:
        record = await store.idempotency.get("charge:order")
        assert record is not None
        say(fence=record.fence)
        await asyncio.to_thread(sys.stdin.readline)
        return "the zombie"

    try:
        await charge("order")
    except LeaseLostError:
        return "LeaseLostError"
    return "recorded"


async def main(path: str, variant: str) -> None:
    async with open_store(f"sqlite:{path}") as store:
        (item,) = await store.work.claim(1, WorkClaim(owner="zombie", lease=LEASE))
        if variant == "function":
            record = await by_function(store)
        else:
            record = await by_ports(store, path, fenced=variant != "no fence")
        if variant == "no fence":
            connection = apsw.Connection(path)
            connection.execute("UPDATE work SET state = 'succeeded', result = ? WHERE id = ?", (ZOMBIE, item.id))
            settled = connection.changes() == 1
            connection.close()
        else:
            (settled,) = await store.work.settle([Settlement(item.id, "zombie", item.fence, WorkDone(ZOMBIE))])
        say(record=record, settled=settled)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
