"""Somebody sets the wall clock by a day, at any moment: leases, order and keys do not notice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import LeaseLostError
from reefknot.idempotency.model import Busy, Claim, Claimed, Done, Hit
from reefknot.queue.model.work import Snooze, TryAgain, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Held, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore

DAY = 86_400.0
STEPS = 14


class SetClock(VirtualClock):
    """The wall clock is set by `jump` before step number `at` of a story."""

    def __init__(self, at: int = -1, jump: float = 0.0) -> None:
        super().__init__()
        self.at = at
        self.jump = jump
        self.step = 0

    def wall(self) -> float:
        return self.true_wall() + (self.jump if 0 <= self.at <= self.step else 0.0)

    def true_wall(self) -> float:
        return super().wall()


class WallClock(SetClock):
    """The broken variant: durations are measured with the wall clock."""

    def now(self) -> float:
        return self.wall() - VirtualClock().wall() + 1_000_000.0


class Story:
    """Everything that leases, order and keys decide, as a list of answers without any wall time in it."""

    def __init__(self, path: Path, clock: SetClock, *, reopens: bool) -> None:
        self._path = path
        self._clock = clock
        self._reopens = reopens
        self._stores: list[SqliteStore] = []
        self.trace: list[Any] = []

    async def _open(self) -> SqliteStore:
        if self._stores and not self._reopens:
            return self._stores[-1]
        # Opened a thousand times: power cuts are not the question here.
        store = SqliteStore(self._path, self._clock, inline=True, synchronous="OFF")
        self._stores.append(await store.start())
        return self._stores[-1]

    async def _ask(self, owner: str) -> Claim | None:
        store = await self._open()
        answer = await store.idempotency.claim("key", owner=owner, lease=60)
        match answer:
            case Busy():
                self.trace.append(("busy", answer.record.owner, answer.remaining_ms))
            case Claimed():
                self.trace.append(("claimed", owner, answer.taken_over))
                return answer.claim
            case Hit():
                self.trace.append(("hit", answer.record.result))
            case _:
                self.trace.append(type(answer).__name__)
        return None

    async def _take(self, owner: str, n: int = 9) -> list[WorkItem]:
        store = await self._open()
        items = await store.work.claim(n, WorkClaim(owner=owner, lease=60))
        seen = [(item.id, item.fence, item.crashes) for item in items]
        # Due times are wall time: a process that starts with another idea of the time may sort by it.
        self.trace.append(sorted(seen) if self._reopens else seen)
        return items

    async def tell(self) -> list[Any]:
        clock = self._clock
        store = await self._open()
        due = round(clock.true_wall() * 1000)

        async def step(seconds: float = 0.0) -> SqliteStore:
            clock.step += 1
            clock.advance(seconds)
            return await self._open()

        mine = await self._ask("me")
        await step()
        names = ("a", "b", "c", "d", "e")
        await store.work.enqueue([WorkItem(name, "t", priority=int(name == "c")) for name in names])
        await step()
        (first,) = await self._take("me", 1)
        await step()
        await self._ask("you")
        store = await step(1)
        held = [Held(first.id, "me", first.fence)]
        self.trace.append(await store.work.renew(held, lease=60))
        await step()
        second, third = await self._take("you", 2)
        store = await step()
        again = TryAgain(due_at=due + 5_000, delay_ms=4_000)
        later = Snooze(due_at=due + 4_000)
        reports = [Settlement(second.id, "you", second.fence, again), Settlement(third.id, "you", third.fence, later)]
        self.trace.append(await self._stores[0].work.settle(reports))
        await step()
        self.trace.append([item.id for item in await self._stores[0].work.claim(1, WorkClaim(owner="you", lease=60))])
        await step(5)
        self.trace.append([item.id for item in await self._stores[0].work.claim(9, WorkClaim(owner="you", lease=60))])
        await step(53)
        await self._ask("you")
        await step(2)
        yours = await self._ask("you")
        store = await step()
        assert mine is not None
        await self._finish(store, mine, '"late"')
        if yours is not None:
            await self._finish(store, yours, '"paid"')
        await step(1)
        await self._ask("anybody")
        store = await step()
        self.trace.append(await store.work.settle([Settlement(first.id, "me", first.fence, WorkDone())]))
        await step(600)
        await self._take("heir")
        for one in self._stores:
            await one.close()
        return self.trace

    async def _finish(self, store: SqliteStore, claim: Claim, result: str) -> None:
        try:
            await store.idempotency.finish(claim, Done(result))
            self.trace.append(("finished", claim.owner))
        except LeaseLostError:
            self.trace.append(("refused", claim.owner))


def told(path: Path, clock: SetClock, *, reopens: bool = False) -> list[Any]:
    return asyncio.run(Story(path, clock, reopens=reopens).tell())


@pytest.mark.parametrize("reopens", [False, True], ids=["running", "new processes after the jump"])
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_wall_clock_set_by_a_day_at_any_step_changes_no_answer(tmp_path: Path, jump: float, reopens: bool) -> None:
    """With new processes, every step opens the store anew, as a process that starts after the jump does: the order of
    what is due is then left out, everything else holds."""
    expected = told(tmp_path / "still.db", SetClock(), reopens=reopens)
    assert {"busy", "claimed", "finished", "refused", "hit"} <= {one[0] for one in expected if isinstance(one, tuple)}
    for at in range(1, STEPS + 1):
        clock = SetClock(at, jump)
        assert told(tmp_path / f"{at}.db", clock, reopens=reopens) == expected, at
        assert clock.step == STEPS


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_the_story_catches_leases_that_are_measured_with_the_wall_clock(tmp_path: Path, jump: float) -> None:
    expected = told(tmp_path / "still.db", WallClock())
    assert expected == told(tmp_path / "steady.db", SetClock()), "without a jump there is no difference"
    differing = [at for at in range(1, STEPS + 1) if told(tmp_path / f"{at}.db", WallClock(at, jump)) != expected]
    assert len(differing) > STEPS / 2


@pytest.mark.real_time
async def test_retention_is_wall_time_of_the_process_that_looks(tmp_path: Path) -> None:
    """As documented: a process that starts with a clock a day ahead knows the key, one past retention does not."""

    async def ask(ahead: float) -> type:
        clock = SetClock(0, ahead)
        store = await SqliteStore(tmp_path / "state.db", clock, inline=True, retention=7 * DAY).start()
        answer = await store.idempotency.claim("key", owner=f"{ahead}")
        if isinstance(answer, Claimed):
            await store.idempotency.finish(answer.claim, Done('"paid"'))
        await store.close()
        return type(answer)

    assert await ask(0) is Claimed
    assert await ask(DAY) is Hit
    assert await ask(-DAY) is Hit
    assert await ask(8 * DAY) is Claimed
