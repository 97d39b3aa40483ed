"""A full queue that drops gives up the oldest of all, and says whose it was."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.audit.model.event import Dropped
from reefknot.queue.model.admission import Oldest, RejectionPolicy, Rules
from reefknot.queue.worker.pool import BoundedQueue
from tests.unit.queue.shops import ran, sent, told
from tests.workshop import REFUSED, Shop, Step, work

ONE = {"cpu": 1}
RETRY = {"max_attempts": 3, "backoff_ms": 20_000}


async def a_retry_and_younger_work(shop: Shop, **rules: Any) -> None:
    """`old` failed once and waits for its retry; `a` and `b` came after it; the queue is full."""
    chosen = Rules(size=3, policy=RejectionPolicy.DROP_OLDEST, **rules)
    await ran(shop, Step(REFUSED), work("old", retry=RETRY, timeout_ms=100_000), wait=1, concurrency=ONE, rules=chosen)
    await shop.send(work("running", {"seconds": 60}, timeout_ms=100_000))
    await sent(shop, work("a"), work("b"), wait=1)


async def test_work_that_waits_for_its_retry_is_dropped_before_younger_work_with_its_event(shop: Shop) -> None:
    await a_retry_and_younger_work(shop)
    await shop.send(work("new"))
    assert [ack.assignment_id for ack in shop.acks if ack.reason == "dropped_oldest"] == ["old"]
    assert shop.result("old").error_code == "SYSTEM_OVERLOAD"
    (event,) = await told(shop, Dropped)
    assert (event.work_id, event.correlation_id, event.resource_class) == ("old", "r-old", "cpu")


async def test_a_queue_that_looks_at_its_line_alone_is_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the first in the line is younger than the one that waits for its retry."""

    def first_in_line(self: BoundedQueue, now: float) -> Oldest | None:
        first = next(iter(self._ready.values()), None)
        return None if first is None else Oldest(first.id, first.priority, int((now - first.since) * 1000))

    monkeypatch.setattr(BoundedQueue, "oldest", first_in_line)
    await a_retry_and_younger_work(shop)
    await shop.send(work("new"))
    assert [ack.assignment_id for ack in shop.acks if ack.reason == "dropped_oldest"] == ["a"]


async def test_the_oldest_is_protected_by_its_age_wherever_it_waits(shop: Shop) -> None:
    await a_retry_and_younger_work(shop, max_drop_age_ms=1500)
    await shop.send(work("new"))
    assert (shop.ack("new").status, shop.ack("new").reason) == ("rejected", "queue_full")
    assert not [ack for ack in shop.acks if ack.reason == "dropped_oldest"]
