"""Callers of other processes hear of lines that are too long for them, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from reefknot.core.audit.event import Admission
from reefknot.errors import QueueFullError
from reefknot.ports.store import Store
from reefknot.router.client import Client
from tests.workshop import Shop, Step, with_shop

ONE = {"cpu": 1}


class Told:
    """What routers say, and how often they were asked."""

    def __init__(self, *routers: Any) -> None:
        self.routers = routers
        self.asked = 0

    async def __call__(self, store: Store) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        return [msgspec.to_builtins(router.snapshot()) for router in self.routers]


async def busy_router(shop: Shop, *, line: int) -> Any:
    """One step a second, and so many in the line."""
    router = await shop.router(router_id=f"r{line}")
    client = Client(shop.store, shop.clock)
    if not [one for one in shop.members if hasattr(one, "pools")]:
        await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    for number in range(30 + line):
        await client.submit("test.step", assignment_id=f"{line}-{number}")
    await asyncio.sleep(31)
    return router


def test_who_would_miss_its_deadline_is_refused_on_record_and_hears_when_to_come_back() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        client = Client(shop.store, shop.clock, snapshots=Told(router))
        with pytest.raises(QueueFullError, match="would miss deadline") as told:
            await client.submit("test.step", deadline=10, assignment_id="hopeless")
        assert 5 < told.value.retry_after < 15
        assert await shop.store.work.get("hopeless") is None
        (event,) = [one for one in await shop.events(Admission) if one.work_id == "hopeless"]
        assert isinstance(event, Admission)
        assert (event.status, event.reason) == ("rejected", "would_miss_deadline")

    with_shop(story)


def test_who_has_time_or_no_deadline_or_is_there_already_comes_in() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        client = Client(shop.store, shop.clock, snapshots=Told(router))
        await client.submit("test.step", deadline=500)
        await client.submit("test.step")
        await client.submit("test.step", deadline=10, assignment_id="20-0")
        await client.submit("test.step", deadline=10, resource_class="io")

    with_shop(story)


def test_without_word_from_a_router_nobody_is_refused_for_time() -> None:
    async def story(shop: Shop) -> None:
        await busy_router(shop, line=20)
        for told in (None, Told()):
            await Client(shop.store, shop.clock, snapshots=told).submit("test.step", deadline=10)

    with_shop(story)


def test_one_router_that_could_make_it_is_enough() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        idle = await shop.router(router_id="idle")
        client = Client(shop.store, shop.clock, snapshots=Told(router, idle))
        await client.submit("test.step", deadline=10)

    with_shop(story)


def test_routers_are_asked_once_a_second_and_only_for_who_has_a_deadline() -> None:
    async def story(shop: Shop) -> None:
        told = Told(await shop.router())
        client = Client(shop.store, shop.clock, snapshots=told)
        await client.submit("test.step")
        assert told.asked == 0
        for _ in range(5):
            await client.submit("test.step", deadline=10)
        assert told.asked == 1
        await asyncio.sleep(1)
        await client.submit("test.step", deadline=10)
        assert told.asked == 2

    with_shop(story)
