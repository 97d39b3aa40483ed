"""
Bursts: however arrivals come together, the queue keeps to its size and to its policy.

An arrival comes over the shared subject, where the store does not know it yet, or over the worker's own subject, after
a router has kept it. Work that is being written counts as depth, and cannot be dropped before it is written.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reefknot.audit.journal import Journal
from reefknot.audit.model.event import Dropped
from reefknot.queue.model.admission import RejectionPolicy, Rules
from reefknot.queue.model.messages import AckStatus, assign_subject, encode
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.port.work_queue import Enqueue, Enqueued
from reefknot.queue.router.submissions import Submissions
from tests.unit.queue.shops import sent
from tests.workshop import Shop, Step, with_shop, work

WAYS = ("shared", "own")
Burst = list[tuple[int, int]]
"""Priorities, and milliseconds before the next one."""
bursts = st.lists(st.tuples(st.sampled_from([0, 0, 0, -10, 10]), st.sampled_from([0, 0, 0, 1, 3, 30])), max_size=25)


class Slow:
    """A store's queue whose every call takes a moment, as that of a server does; the write of `late` takes longer."""

    def __init__(self, queue: Any, late: str = "") -> None:
        self._queue = queue
        self._late = late

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._queue, name)

        async def slowly(*given: Any, **named: Any) -> Any:
            is_late = name == "assign" and any(item.assignment_id == self._late for item in given[0])
            await asyncio.sleep(0.05 if is_late else 0.004)
            return await found(*given, **named)

        return slowly if name in ("assign", "get", "cancel") else found


class Seen:
    """What a burst has come to."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.accepted: list[str] = []
        self.rejected: list[str] = []
        self.dropped: list[str] = []


def after(burst: Burst, way: str, rules: Rules, *, slots: int = 1, late: str = "") -> Seen:
    """Send a burst to a worker whose slots are all taken, and look at every ack."""
    seen = Seen()

    async def story(shop: Shop) -> None:
        worker = await shop.worker("w1", Step(seconds=3600), rules=rules, concurrency={"cpu": slots})
        pool = worker.pools["cpu"]
        shop.use_queue(worker, Slow(shop.store.work, late))
        await sent(shop, *(work(f"runs-{n}") for n in range(slots)), wait=1)
        assert pool.active == slots
        release = pool.release

        def looked(priority: int) -> None:
            seen.depths.append(pool.depth())
            release(priority)

        pool.release = looked  # type: ignore[method-assign]
        submissions = Submissions(shop.store.work, shop.clock, rules=SubmissionRules(1000), journal=Journal(None))
        for number, (priority, pause) in enumerate(burst):
            one = work(f"a{number}", priority=priority)
            if way == "own":
                item = submissions.item(one, encode(one))
                assert await shop.store.work.enqueue([item], Enqueue(owner="router")) == [Enqueued.ACCEPTED]
            await shop.transport.publish(assign_subject("w1"), encode(one))
            await asyncio.sleep(pause / 1000)
        await asyncio.sleep(2)
        assert pool.reserved == 0
        assert not pool.entering
        acks = [ack for ack in shop.acks if not ack.assignment_id.startswith("runs")]
        seen.depths += [pool.depth(), *(ack.queue_depth for ack in acks if isinstance(ack.queue_depth, int))]
        seen.dropped = [event.work_id or "" for event in await shop.events(Dropped)]
        first: dict[str, Any] = {}
        for ack in acks:
            first.setdefault(ack.assignment_id, ack)
        seen.accepted = [name for name, ack in first.items() if ack.status is AckStatus.ACCEPTED]
        seen.rejected = [name for name, ack in first.items() if ack.status is AckStatus.REJECTED]
        waiting = {*pool.queue._ready, *pool.queue._later}
        assert waiting == set(seen.accepted) - set(seen.dropped)
        assert {one.assignment_id for one in shop.results} == set(seen.dropped)

    with_shop(story)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_ten_at_once_at_a_queue_of_three_that_drops_the_oldest_drop_seven_and_reject_none(way: str) -> None:
    seen = after([(0, 0)] * 10, way, Rules(size=3, policy=RejectionPolicy.DROP_OLDEST))
    assert (len(seen.accepted), seen.rejected, len(seen.dropped)) == (10, [], 7)
    assert seen.dropped == [f"a{n}" for n in range(7)]
    assert max(seen.depths) == 3


def test_an_arrival_is_as_old_as_its_admission_however_long_its_write_takes() -> None:
    seen = after(
        [(0, 15)] * 6 + [(0, 60), (0, 0)], "shared", Rules(size=3, policy=RejectionPolicy.DROP_OLDEST), late="a4"
    )
    assert seen.dropped == [f"a{n}" for n in range(5)], "a4 was admitted before a5, and written after it"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", list(RejectionPolicy))
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(burst=bursts, size=st.integers(1, 4))
def test_the_depth_stays_within_the_size_and_the_policy_holds_for_any_burst(
    way: str, policy: RejectionPolicy, burst: Burst, size: int
) -> None:
    seen = after(burst, way, Rules(size=size, policy=policy))
    assert max(seen.depths) <= size
    assert len(seen.accepted) + len(seen.rejected) == len(burst)
    assert len(seen.accepted) - len(seen.dropped) == min(size, len(burst)), "no place stays empty while one is refused"
    priorities = {f"a{number}": priority for number, (priority, _) in enumerate(burst)}
    kept = [priorities[name] for name in set(seen.accepted) - set(seen.dropped)]
    gone = [priorities[name] for name in [*seen.dropped, *seen.rejected]]
    assert not gone or max(gone) <= min(kept), "what matters more has the place"


def test_control_a_pool_that_does_not_wait_for_what_is_being_written_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.queue.worker.admission._makes_room_later", lambda pool, arrival: False)
    seen = after([(0, 0)] * 10, "shared", Rules(size=3, policy=RejectionPolicy.DROP_OLDEST))
    assert seen.rejected
