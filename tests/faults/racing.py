"""
Callers of the same keys, in one of several processes.

    python -m tests.faults.racing DATABASE SEED CALLERS KEYS VARIANT

Every caller asks for every key, in an order of its own. Now and then one claims a key and falls asleep past its lease;
it reports when everybody is done, as if nothing had happened. Each process believes in another day. VARIANT is `sound`,
or `open door`: claims are granted to everybody and nobody looks at the fence. Prints the answers, by key.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from reefknot.audit.port import AuditEntry
from reefknot.core.canonical import canonical
from reefknot.errors import LeaseLostError
from reefknot.idempotency import model as idempotency
from reefknot.idempotency.decorator import idempotent
from reefknot.idempotency.model import Claim, Claimed, Done
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from tests.faults.freezing import take_the_fences_down

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
        self.late = 0

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
                self.late += 1
            except LeaseLostError:
                self.refused += 1


def _open_the_door() -> None:
    """The broken variant: everybody may, and whoever records last wins."""

    def claim(record: Any, request: Any, *, fence: int, now: Any, retention_ms: int) -> Claimed:
        return Claimed(idempotency._held(request, fence, now, retention_ms))

    take_the_fences_down()
    idempotency.claim = claim


async def main(path: Path, seed: int, callers: int, keys: int) -> None:
    # Neither deaths nor power cuts are the question here.
    store = await SqliteStore(path, AnotherDay(seed % 3 - 1), synchronous="OFF", patience=60).start()
    race = Race(store, seed)
    print("ready", flush=True)
    sys.stdin.readline()
    names = [f"{number}" for number in range(keys)]
    await asyncio.gather(*(race.caller(names) for _ in range(callers)))
    print("done", flush=True)
    sys.stdin.readline()
    await race.wake_up()
    await store.close()
    found = {"answers": race.answers, "asleep": len(race.asleep), "refused": race.refused, "late": race.late}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[5] == "open door":
        _open_the_door()
    asyncio.run(main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5])))
