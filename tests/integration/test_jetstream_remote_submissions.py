"""
Submissions that a client hands over to the router that leads, on a real server: each makes one job, and the caller gets
to know whether it was new, whatever becomes of the request.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import reefknot as rk
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.console.nats_servers import NatsServer
from reefknot.errors import QueueFullError, StoreUnavailableError
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueue, Enqueued, Outcome, TakeOver
from reefknot.stores.jetstream import remote_submissions
from reefknot.stores.jetstream.work import JetStreamWorkQueue
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store

pytestmark = pytest.mark.real_time

LIMIT, ADMITTED = 10, 9
"""The places of a queue, and those that work of the default priority may take."""
Answers = list[Outcome]
Keep = Callable[[], Any]


@pytest.fixture
def address(nats_server: NatsServer) -> str:
    return f"{nats_server.url}/hand-{uuid4().hex[:8]}"


async def served(store: Store, take: TakeOver | None) -> None:
    """Let a store take over what is submitted, as the router that leads does; returns when the server knows."""
    assert isinstance(store.work, JetStreamWorkQueue)
    store.work.take_submissions(take)
    async with asyncio.timeout(10):
        while (store.work._remote._subscription is None) is (take is not None):  # noqa: ASYNC110 - a background task
            await asyncio.sleep(0.01)
    await store.work.state.connection.round_trip()


async def kept(
    store: Store, items: Sequence[WorkItem], rules: SubmissionRules, events: Any, owner: str = "router-1#test"
) -> Answers:
    of_item = {item.id: entries for item, entries in zip(items, events, strict=True)}
    terms = Enqueue(rules, owner, accept_events=lambda item: of_item[item.id])
    return await store.work.enqueue(items, terms)


class Fate:
    """What becomes of a request to the router."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self.asked = 0
        self.late: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()

    async def take(
        self, items: Sequence[WorkItem], rules: SubmissionRules, events: Sequence[Sequence[AuditEntry]]
    ) -> Answers:
        self.asked += 1
        keep = partial(kept, self._store, items, rules, events)
        match self._name:
            case "answered":
                return await keep()
            case "left for a claim":
                return await keep(owner="")
            case "lost":
                await asyncio.Event().wait()
            case "late":
                await asyncio.sleep(remote_submissions.ANSWER_S + 1.0)
                self.late.set_result(await keep())
            case "kept, and not answered":
                await keep()
                await asyncio.Event().wait()
            case _:
                await keep()
                raise StoreUnavailableError("nats://here", "the router ends", "start it again")
        return []


async def submitted_events(store: Store, name: str) -> int:
    events = await store.audit.read(AuditQuery(work_id=name, event_type="submitted", limit=10))
    return len(events)


FATES = ["answered", "left for a claim", "lost", "late", "kept, and not answered", "kept, and failed"]


@pytest.mark.parametrize("fate", FATES)
async def test_a_submission_makes_one_job_and_is_new_whatever_becomes_of_its_request(address: str, fate: str) -> None:
    async with open_store(address) as router, rk.connect(address) as client:
        found = Fate(router, fate)
        await served(router, found.take)
        handle = await client.submit("own.step", {"n": 1}, assignment_id="order-7")
        assert found.asked == 1
        assert handle.is_new
        if fate == "late":
            assert await found.late == [Enqueued.DUPLICATE]
        assert await submitted_events(router, "order-7") == 1
        assert await router.work.count() == {"own.step": 1}
        again = await client.submit("own.step", {"n": 1}, assignment_id="order-7")
        assert not again.is_new


@pytest.mark.parametrize("fate", FATES)
async def test_a_repeated_submission_is_none_whatever_becomes_of_its_request(address: str, fate: str) -> None:
    """The control of the test above: a repeat is not taken for the first one."""
    async with open_store(address) as router, rk.connect(address) as first, rk.connect(address) as second:
        assert (await first.submit("own.step", {"n": 1}, assignment_id="order-7")).is_new
        await served(router, Fate(router, fate).take)
        assert not (await second.submit("own.step", {"n": 1}, assignment_id="order-7")).is_new


async def test_while_two_routers_believe_that_they_lead_each_submission_makes_one_job_and_is_new(address: str) -> None:
    number = 200
    async with AsyncExitStack() as opened:
        for _ in range(2):
            router = await opened.enter_async_context(open_store(address))
            await router.work.snapshot()  # it mirrors the open work
            await served(router, Fate(router, "answered").take)
        client = await opened.enter_async_context(rk.connect(address))
        for at in range(0, number, 10):
            names = [f"j{n}" for n in range(at, at + 10)]
            handles = await asyncio.gather(*(client.submit("own.step", {}, assignment_id=name) for name in names))
            assert [one.assignment_id for one in handles if not one.is_new] == []
        assert [await submitted_events(router, f"j{n}") for n in range(number)] == [1] * number


@pytest.mark.parametrize("fate", [*FATES, "no router"])
async def test_many_are_submitted_at_once(address: str, fate: str) -> None:
    number = 500
    async with open_store(address) as router, rk.connect(address, size=2 * number) as client:
        if fate != "no router":
            await served(router, Fate(router, fate).take)
        items: list[Any] = [
            {"job_type": "own.step", "inputs": {"n": n}, "assignment_id": f"j{n}"} for n in range(number)
        ]
        answers = await client.submit_many(items)
        assert Counter(isinstance(one, Handle) and one.is_new for one in answers) == {True: number}
        assert await router.work.count() == {"own.step": number}


@pytest.mark.parametrize("has_router", [True, False])
async def test_a_submission_larger_than_a_message_is_kept_whole(address: str, has_router: bool) -> None:
    async with AsyncExitStack() as opened:
        if has_router:
            await opened.enter_async_context(rk.system(address, workers=0))
        client = await opened.enter_async_context(rk.connect(address))
        text = uuid4().hex * 32_700  # with the event of its submission it is above a megabyte
        handle = await client.submit("own.step", {"text": text})
        assert handle.is_new
        item = await client.store.work.get(handle.assignment_id)
        assert item is not None
        assert text.encode() in item.payload


async def test_what_is_due_later_is_taken_over_and_stays_due_later(address: str) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    async with rk.system(address, workers=0), rk.connect(address) as client:
        handles = [await client.submit("own.step", {}, delay=3600.0), await client.submit("own.step", {}, at=at)]
        for handle in handles:
            item = await client.store.work.get(handle.assignment_id)
            assert item is not None
            assert abs(item.due_at / 1000 - at.timestamp()) < 60
            assert await handle.status() == "pending"
        assert handles[0].is_new
        assert not client.store.work.state._mirrors  # type: ignore[attr-defined]


# ---- admission -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def four_clients(address: str) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as opened:
        yield [await opened.enter_async_context(rk.connect(address, size=LIMIT)) for _ in range(4)]


async def accepted_at_once(address: str, each: int = LIMIT) -> Counter[str]:
    """The answers to four clients that submit at the same time, each one by one and many at once."""

    async def submit(client: Client) -> list[Any]:
        one_by_one = [client.submit("own.step", {"n": n}) for n in range(each)]
        at_once = client.submit_many([("own.step", {"n": n}) for n in range(each)])
        answers: list[Any] = await asyncio.gather(*one_by_one, at_once, return_exceptions=True)
        return [*answers[:-1], *answers[-1]]

    async with four_clients(address) as clients:
        answers = await asyncio.gather(*map(submit, clients))
    return Counter(type(one).__name__ for some in answers for one in some)


@pytest.mark.parametrize("routers", [0, 1, 2])
async def test_the_limit_holds_exactly_for_clients_that_submit_at_once(
    tmp_path: Path, address: str, routers: int
) -> None:
    config = tmp_path / "reefknot.yaml"
    config.write_text(f"worker: {{queue: {{v2: {{enabled: true, max_queue_size: {LIMIT}}}}}}}")
    async with AsyncExitStack() as opened:
        for _ in range(routers):
            await opened.enter_async_context(rk.system(address, workers=0, config=config))
        found = await accepted_at_once(address)
        assert found == {Handle.__name__: ADMITTED, QueueFullError.__name__: 8 * LIMIT - ADMITTED}
        async with open_store(address) as store:
            assert await store.work.count() == {"own.step": ADMITTED}


async def test_control_without_the_comparison_of_arrivals_the_limit_is_exceeded(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reefknot.stores.jetstream.state import State

    monkeypatch.setattr(State, "pool_messages", lambda self: [])
    assert (await accepted_at_once(address))[Handle.__name__] > ADMITTED
