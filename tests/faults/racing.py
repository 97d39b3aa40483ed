"""
Callers of the same keys in several processes: a plan is their numbers, and whether the door is open.

Every caller asks for every key, in an order of its own. Now and then one claims a key and falls asleep past its lease;
it reports when everybody is done, as if nothing had happened. Each process believes in another day. With an open door
claims are granted to everybody, and nobody looks at the fence.
"""

import asyncio
import random
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from reefknot.audit.port import AuditEntry
from reefknot.core.canonical import canonical
from reefknot.errors import LeaseLostError
from reefknot.idempotency import model as idempotency
from reefknot.idempotency.decorator import idempotent
from reefknot.idempotency.model import Claim, Claimed, Done
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import open_store
from reefknot.stores.sqlite import SqliteStore
from tests.faults.carrying_out import LONGEST, Fork, Life, Plan, Say, carry_out_plans
from tests.faults.dying import take_the_fences_down

AT_ONCE = 8
SLEEPY = 0.05
DAY = 86_400.0


class AnotherDay(SystemClock):
    """A wall clock that is wrong by whole days."""

    def __init__(self, days: int) -> None:
        self._wrong = days * DAY

    def wall(self) -> float:
        return super().wall() + self._wrong


class Race:
    """The callers of one process."""

    def __init__(self, store: SqliteStore, seed: int) -> None:
        self._store = store
        self._dice = random.Random(seed)
        self._seed = seed
        self.answers: list[tuple[str, str]] = []
        self.asleep: list[Claim] = []
        self.refused = 0

        @idempotent(key=lambda key: key, lease=20, wait=120, store=store, name="charge")
        async def charge(key: str) -> str:
            await asyncio.sleep(0)
            return f"{seed}-{self._dice.random()}"

        self._charge = charge

    async def call(self, key: str) -> None:
        if self._dice.random() < SLEEPY:
            owner = f"sleepy-{self._seed}-{self._dice.random()}"
            answer = await self._store.idempotency.claim(f"charge:{key}", owner=owner, lease=0.05)
            if isinstance(answer, Claimed):
                self.asleep.append(answer.claim)
        self.answers.append((key, await self._charge(key)))

    async def caller(self, keys: list[str]) -> None:
        mine = list(keys)
        self._dice.shuffle(mine)
        for begin in range(0, len(mine), AT_ONCE):
            await asyncio.gather(*(self.call(key) for key in mine[begin : begin + AT_ONCE]))

    async def wake_up(self) -> None:
        for claim in self.asleep:
            body = canonical({"action": "record", "idempotency_key": claim.key})
            try:
                event = AuditEntry(body, "idempotency", 0)
                await self._store.idempotency.finish(claim, Done('"the zombie"'), events=[event])
            except LeaseLostError:
                self.refused += 1


def _open_the_door() -> None:
    """The broken variant: everybody may, and whoever records last wins."""

    def claim(record: Any, request: Any, *, fence: int, now: Any, retention_ms: int) -> Claimed:
        return Claimed(idempotency._held(request, fence, now, retention_ms))

    take_the_fences_down()
    idempotency.claim = claim


async def race(path: Path, plan: Plan, everybody: Barrier, seed: int, _: Say) -> dict[str, Any]:
    """The answers that the callers of one process got, by key."""
    if plan["open"]:
        _open_the_door()
    # Neither deaths nor power cuts are the question here.
    store = await SqliteStore(path, AnotherDay(seed % 3 - 1), synchronous="OFF", patience=60).start()
    callers = Race(store, seed)
    everybody.wait(LONGEST)  # all callers start together
    names = [f"{number}" for number in range(plan["keys"])]
    await asyncio.gather(*(callers.caller(names) for _ in range(plan["callers"])))
    everybody.wait(LONGEST)  # the last caller has its last answer
    await callers.wake_up()
    await store.close()
    return {"answers": callers.answers, "asleep": len(callers.asleep), "refused": callers.refused}


async def make(path: Path) -> None:
    async with open_store(f"sqlite:{path}"):
        pass


def one(folder: Path, plan: Plan) -> Life:
    path, everybody = Path(plan["file"]), get_context("fork").Barrier(plan["processes"])
    asyncio.run(make(path))
    forks = [Fork(partial(race, path, plan, everybody, seed)) for seed in range(plan["processes"])]
    return {"reports": [word for fork in forks for word in fork.heard()], "ended": [fork.ended() for fork in forks]}


if __name__ == "__main__":
    carry_out_plans(one)
