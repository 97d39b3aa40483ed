"""Unique work that is submitted in two processes at once, each with a store of its own: one job for each key."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueued, Outcome, Taken
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.jetstream.remote_submissions import KeysOf
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from reefknot.stores.sqlite import admission
from reefknot.testing.conformance.unique import keyed
from tests.integration.test_jetstream_remote_submissions import kept as kept_for_others
from tests.integration.test_jetstream_remote_submissions import served

pytestmark = pytest.mark.real_time

CALLERS, ROUNDS = 16, 8


@pytest.fixture(params=["sqlite", "nats"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'state.db'}"
    server: NatsServer = request.getfixturevalue("nats_server")
    return f"{server.url}/once-{uuid4().hex[:8]}"


@asynccontextmanager
async def two_stores(address: str) -> AsyncIterator[list[Store]]:
    async with open_store(address) as first, open_store(address) as second:
        yield [first, second]


async def kept(stores: list[Store], key: str) -> int:
    """The number of jobs that are made when all callers submit with one key at once, without admission."""
    items = [keyed(f"{key}-{number}", key, for_s=60) for number in range(CALLERS)]
    answers = await asyncio.gather(*(stores[at % 2].work.enqueue([item]) for at, item in enumerate(items)))
    made = [item.id for item, (answer,) in zip(items, answers, strict=True) if answer is Enqueued.ACCEPTED]
    assert len(made) != 1 or {one.id for (one,) in answers if isinstance(one, Taken)} == set(made)
    return len(made)


async def test_of_callers_at_once_one_makes_the_job_and_all_get_it(address: str) -> None:
    async with two_stores(address) as stores:
        for number in range(ROUNDS):
            clients = [Client(store, SystemClock()) for store in stores]
            calls = (clients[at % 2].submit("a.b", {"n": at}, unique=f"key-{number}") for at in range(CALLERS))
            handles: list[Handle] = await asyncio.gather(*calls)
            assert [one.is_new for one in handles].count(True) == 1
            assert len({one.assignment_id for one in handles}) == 1


async def test_without_admission_it_is_one_too(address: str) -> None:
    async with two_stores(address) as stores:
        assert [await kept(stores, f"key-{number}") for number in range(ROUNDS)] == [1] * ROUNDS


async def test_the_race_catches_an_engine_that_decides_too_early(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite the key is not looked for in the transaction, on NATS its entries may have changed since."""
    monkeypatch.setattr(admission, "with_key", lambda *_: None)
    monkeypatch.setattr(KeysOf, "take", lambda _: None)
    async with two_stores(address) as stores:
        assert max([await kept(stores, f"key-{number}") for number in range(ROUNDS)]) > 1


async def test_a_key_is_free_once_its_job_has_ended_in_the_other_process(address: str) -> None:
    async with two_stores(address) as stores:
        first, second = (Client(store, SystemClock()) for store in stores)
        for _ in range(3):
            made = await first.submit("a.b", unique="key")
            assert made.is_new
            assert (await second.submit("a.b", unique="key")).assignment_id == made.assignment_id
            assert await stores[1].work.cancel(made.assignment_id)


async def test_the_router_that_leads_answers_with_the_job_that_has_the_key(nats_server: NatsServer) -> None:
    async with two_stores(f"{nats_server.url}/once-{uuid4().hex[:8]}") as (leading, other):
        asked: list[int] = []

        async def take(items: Sequence[WorkItem], rules: SubmissionRules, events: Any) -> list[Outcome]:
            asked.append(len(items))
            return await kept_for_others(leading, items, rules, events)

        await served(leading, take)
        client = Client(other, SystemClock())
        first = await client.submit("a.b", unique="key")
        again = await client.submit("a.b", unique="key")
        assert (first.is_new, again.is_new, again.assignment_id) == (True, False, first.assignment_id)
        assert asked == [1, 1], "both were decided by the router"
        await served(leading, None)
