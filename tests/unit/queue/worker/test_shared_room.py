"""The room of a worker for the shared subject: what it pulls has places, and what has none is given back."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from reefknot.queue.model.admission import OverloadStatus, RejectionPolicy, Rules, Thresholds
from reefknot.queue.model.messages import ACK, ASSIGN, AckStatus, ExecAssignment, encode
from reefknot.queue.port.transport import Delivery
from reefknot.queue.worker.admission import LOOKS_PER_S, MOST_BACK_S, RAREST, UNBOUNDED
from reefknot.queue.worker.service import Worker
from tests.workshop import NO_BREAKER, REFUSED, Shop, Step, work

LONG = 10_000.0


async def room_of(shop: Shop, *steps: Step, **changes: Any) -> Worker:
    """A worker with one slot in `cpu`, whose steps last."""
    changes = {"rules": Rules(size=5), "concurrency": {"cpu": 1}, **changes}
    worker = await shop.worker("w1", *(steps or (Step(seconds=LONG),)), **changes)
    worker.intake.shared_room.watch()
    await asyncio.sleep(0.01)
    return worker


def of_class(name: str, resource_class: str = "cpu", **options: Any) -> ExecAssignment:
    return structs.replace(work(name, **options), resource_class=resource_class)


class Kept:
    """Messages of a transport that keeps them: what was acknowledged, and what was given back for how long."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.back: dict[str, float] = {}

    async def give(self, worker: Worker, *assignments: ExecAssignment) -> None:
        async def deliveries() -> AsyncIterator[Delivery]:
            for one in assignments:
                yield self._delivery(one)

        await worker.intake.listen(deliveries())
        await asyncio.sleep(0.01)

    def _delivery(self, assignment: ExecAssignment) -> Delivery:
        name = assignment.assignment_id

        async def done() -> None:
            self.done.append(name)

        async def back(seconds: float) -> None:
            self.back[name] = seconds

        return Delivery(ASSIGN, encode(assignment), {}, done, back)


@pytest.mark.parametrize("waiting", [0, 1, 3])
@pytest.mark.parametrize(
    "rules",
    [
        Rules(size=5),
        Rules(size=5, preempt=False),
        Rules(size=10, reject_at=OverloadStatus.OVERLOADED),
        Rules(size=10, thresholds=Thresholds(0.3, 0.55, 0.75)),
        Rules(size=7, policy=RejectionPolicy.DEFER),
        Rules(size=7, policy=RejectionPolicy.DEGRADE),
    ],
    ids=["plain", "no preemption", "from overloaded", "low thresholds", "defer", "degrade"],
)
async def test_as_many_as_there_is_room_for_are_accepted_and_one_more_is_not(
    shop: Shop, rules: Rules, waiting: int
) -> None:
    worker = await room_of(shop, rules=rules, concurrency={"cpu": 2})
    await shop.send(*(work(f"w{n}") for n in range(waiting)))
    free = worker.intake.shared_room.free()
    assert free > 0
    kept = Kept()
    await kept.give(worker, *(of_class(f"a{n}") for n in range(free)))
    assert (len(kept.done), kept.back) == (free, {})
    assert {one.status for one in shop.acks} == {AckStatus.ACCEPTED}
    await kept.give(worker, of_class("late"))
    assert list(kept.back) == ["late"]
    assert len(shop.acks) == waiting + free, "what goes back is not answered"


async def test_a_message_whose_ack_could_not_be_sent_is_not_acknowledged(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again, and is then answered as a duplicate."""
    worker, publish = await room_of(shop), shop.transport.publish

    async def refusing(subject: str, body: bytes, **named: Any) -> None:
        if subject == ACK and b'"b"' in body:
            raise ConnectionError("not now")
        await publish(subject, body, **named)

    monkeypatch.setattr(shop.transport, "publish", refusing)
    kept = Kept()
    await kept.give(worker, *(of_class(name) for name in "abc"))
    assert (kept.done, [one.assignment_id for one in shop.acks]) == (["a", "c"], ["a", "c"])
    monkeypatch.undo()
    await kept.give(worker, of_class("b"))
    assert (kept.done, shop.ack("b").status) == (["a", "c", "b"], AckStatus.ACCEPTED)


async def test_places_of_retries_that_wait_are_no_room(shop: Shop) -> None:
    worker = await room_of(shop, Step(REFUSED, seconds=0), breaker=NO_BREAKER)
    await shop.send(*(work(f"w{n}") for n in range(5)))
    await asyncio.sleep(0.05)
    pool = worker.pools["cpu"]
    assert (pool.queue.later, pool.active) == (5, 0)
    assert worker.intake.shared_room.free() == 0


async def test_the_class_with_the_fewest_places_bounds_what_is_pulled(shop: Shop) -> None:
    worker = await room_of(shop, rules=Rules(size=10), concurrency={"cpu": 3, "io": 1})
    assert worker.intake.shared_room.free() == 11
    await shop.send(*(of_class(f"c{n}") for n in range(6)))
    assert worker.intake.shared_room.free() == 7


@pytest.mark.parametrize("changes", [{"rules": Rules(size=5, policy=RejectionPolicy.DROP_OLDEST)}, {"queue_v2": False}])
async def test_without_a_bound_nothing_holds_back(shop: Shop, changes: dict[str, Any]) -> None:
    worker = await room_of(shop, **changes)
    await shop.send(*(work(f"w{n}") for n in range(20)))
    assert worker.intake.shared_room.free() == UNBOUNDED


async def test_drop_oldest_refuses_what_it_may_make_no_room_for(shop: Shop) -> None:
    worker = await room_of(shop, rules=Rules(size=2, policy=RejectionPolicy.DROP_OLDEST, max_drop_age_ms=1000))
    await shop.send(*(work(f"w{n}") for n in range(3)))
    await asyncio.sleep(2)
    kept = Kept()
    await kept.give(worker, of_class("a"))
    assert (kept.done, kept.back, shop.ack("a").reason) == (["a"], {}, "queue_full")


async def test_what_is_sent_to_the_worker_itself_is_refused_as_documented(shop: Shop) -> None:
    await room_of(shop)
    await shop.send(*(of_class(f"w{n}") for n in range(7)))
    assert shop.ack("w6").reason == "queue_full"


async def test_what_comes_back_waits_as_long_as_a_refusal_would_say_and_not_for_ever(shop: Shop) -> None:
    worker = await room_of(shop, Step(seconds=1))
    await shop.send(*(work(f"w{n}") for n in range(6)))
    kept = Kept()
    await kept.give(worker, of_class("unknown"))
    await shop.send(work("refused"))
    assert kept.back["unknown"] * 1000 == shop.ack("refused").retry_after_ms == 1000
    for n in range(25):
        await asyncio.sleep(1)
        await shop.send(work(f"more{n}"))
    await kept.give(worker, of_class("known"))
    await shop.send(work("refused again"))
    assert kept.back["known"] * 1000 == shop.ack("refused again").retry_after_ms == 2500
    slow = await shop.worker("slow", Step(seconds=60), rules=Rules(size=5), concurrency={"cpu": 1})
    slow.pools["cpu"]._service_times, slow.pools["cpu"]._mean_ms = 20, 60_000.0
    await shop.send(*(work(f"s{n}") for n in range(6)), to="slow")
    await kept.give(slow, of_class("of slow"))
    assert kept.back["of slow"] == MOST_BACK_S


async def test_a_worker_that_is_paused_gives_back_at_once_and_says_that_it_is_closed(shop: Shop) -> None:
    worker = await room_of(shop)
    room, heard = worker.intake.shared_room, list[tuple[bool, int]]()
    room.changed = lambda: heard.append((room.is_open, room.free()))
    worker.pause()
    assert heard[-1] == (False, 0)
    kept = Kept()
    await kept.give(worker, of_class("a"))
    assert (kept.back, shop.acks) == ({"a": 0.0}, [])
    worker.resume()
    await asyncio.sleep(0.01)
    assert heard[-1] == (True, 6)


async def test_what_no_other_worker_could_take_either_is_answered(shop: Shop) -> None:
    worker = await room_of(shop)
    kept = Kept()
    await kept.give(worker, work("a", job="no.such"))
    assert (kept.done, kept.back, shop.ack("a").reason) == (["a"], {}, "unknown_job_type")


async def test_a_place_that_becomes_free_is_announced_at_once(shop: Shop) -> None:
    worker = await room_of(shop, Step(seconds=10))
    await shop.send(*(work(f"w{n}") for n in range(6)))
    room, heard = worker.intake.shared_room, list[tuple[float, int]]()
    loop = asyncio.get_running_loop()
    began = loop.time()
    room.changed = lambda: heard.append((round(loop.time() - began), room.free()))
    await asyncio.sleep(10.5)
    assert (10, 1) in heard


async def test_arrivals_that_are_not_decided_yet_have_their_room_already(shop: Shop) -> None:
    worker = await room_of(shop)
    given = asyncio.create_task(Kept().give(worker, *(of_class(f"a{n}") for n in range(4))))
    await asyncio.sleep(0)
    assert worker.intake.shared_room.free() == 2
    await given
    assert worker.intake.shared_room.free() == 2


class TestLooksPastTheHead:
    """One class is full, and another one has places."""

    @staticmethod
    async def full(shop: Shop) -> Worker:
        worker = await room_of(shop, rules=Rules(size=500), concurrency={"cpu": 1, "io": 1})
        await shop.send(*(of_class(f"w{n}") for n in range(501)))
        return worker

    async def test_they_are_saved_up_while_it_is_full_for_a_second_at_most(self, shop: Shop) -> None:
        room = (await self.full(shop)).intake.shared_room
        assert room.free() < LOOKS_PER_S / 10
        await asyncio.sleep(0.5)
        assert abs(room.free() - LOOKS_PER_S / 2) < LOOKS_PER_S / 10
        await asyncio.sleep(10)
        assert room.free() == LOOKS_PER_S

    async def test_what_is_given_back_spends_them_and_what_is_taken_does_not(self, shop: Shop) -> None:
        worker = await self.full(shop)
        await asyncio.sleep(10)
        kept = Kept()
        await kept.give(worker, *(of_class(f"io{n}", "io") for n in range(150)))
        assert (len(kept.done), worker.intake.shared_room.free()) == (150, LOOKS_PER_S)
        await kept.give(worker, *(of_class(f"cpu{n}") for n in range(150)))
        assert len(kept.back) == 150
        assert worker.intake.shared_room.free() <= LOOKS_PER_S - 150 + 5

    async def test_they_become_rarer_while_they_find_nothing_for_another_class(self, shop: Shop) -> None:
        worker = await self.full(shop)
        room, kept, saved = worker.intake.shared_room, Kept(), list[int]()
        await asyncio.sleep(RAREST)
        for turn in range(100):
            saved.append(room.free())
            await kept.give(worker, *(of_class(f"{turn}-{n}") for n in range(saved[-1])))
            await asyncio.sleep(1)
        assert all(later <= earlier + 1 for earlier, later in pairwise(saved))
        assert saved[0] == LOOKS_PER_S
        assert 0 < saved[-1] <= LOOKS_PER_S / RAREST + 1
        await kept.give(worker, of_class("io", "io"))
        await asyncio.sleep(1)
        assert room.free() == LOOKS_PER_S

    async def test_none_is_left_when_every_class_is_full(self, shop: Shop) -> None:
        worker = await self.full(shop)
        await shop.send(*(of_class(f"io{n}", "io") for n in range(501)))
        await asyncio.sleep(10)
        assert worker.intake.shared_room.free() == 0
