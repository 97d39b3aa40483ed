"""What a worker on NATS does not hear of its own queue, because it mirrors nothing, is right all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, worker_class
from reefknot.queue.port.work_queue import WorkClaim
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.work import JetStreamWorkQueue
from reefknot.stores.opening import open_store
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

OWN, OTHERS = worker_class("cpu", "worker-1"), worker_class("cpu", "worker-2")
ROUTING = WorkClaim("router-1#test", classes=(ROUTER,))


def submitted(name: str) -> WorkItem:
    return WorkItem(name, "own.step", resource_class=ROUTER, pool="cpu", payload=b"p")


def sent(name: str, to: str = OWN) -> WorkItem:
    return WorkItem(name, "own.step", resource_class=to, pool="cpu", payload=b"p")


class Stores:
    def __init__(self, router: JetStreamStore, worker: JetStreamStore) -> None:
        self.router = router.work
        self.worker = worker.work
        self.mirrors = worker.state._mirrors

    async def route(self, *names: str) -> None:
        await self.router.enqueue([submitted(name) for name in names])
        assert {one.id for one in await self.router.claim(len(names), ROUTING)} == {*names}


@pytest.fixture
def stores(nats_server: NatsServer) -> InLoop:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Stores]:
        address = f"{nats_server.url}/queue-{uuid4().hex[:8]}"
        async with open_store(address) as router, open_store(address) as worker:
            assert isinstance(router, JetStreamStore)
            assert isinstance(worker, JetStreamStore)
            yield Stores(router, worker)

    return InLoop(opened)


@pytest.mark.parametrize("is_control", [False, True])
async def test_what_was_taken_from_a_silent_worker_is_accepted_when_it_is_sent_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    if is_control:
        monkeypatch.setattr(JetStreamWorkQueue, "_seems_taken", lambda self, work_id: False)
    await stores.route("a")
    assert await stores.worker.assign([sent("a")]) != [None]
    async with asyncio.timeout(10):
        while not await stores.router.recall([OWN]):  # noqa: ASYNC110 - its mirror hears of the assignment in a moment
            await asyncio.sleep(0.01)
    (held,) = await stores.router.claim(1, ROUTING)
    assert held.id == "a"
    (again,) = await stores.worker.assign([sent("a")])
    assert (again is None) is is_control
    assert not stores.mirrors


async def test_what_another_worker_has_is_refused(stores: Stores) -> None:
    await stores.route("a")
    assert await stores.router.assign([sent("a", OTHERS)]) != [None]
    assert await stores.worker.assign([sent("a")]) == [None]
    assert await stores.worker.assign([sent("a")]) == [None]


async def test_a_worker_notices_each_time_that_the_lease_of_another_ran_out(stores: Stores) -> None:
    """It reads the record that it asks about, and not the queue that it has read before."""
    for name in ("a", "b"):
        await stores.route(name)
        await stores.router.assign([sent(name, OTHERS)], start=[name], owner="worker-2#test", lease=0.01)
        await asyncio.sleep(0.05)
        assert await stores.worker.claim(0, WorkClaim("worker-1#test", classes=(OTHERS,), only=(name,))) == []
        item = await stores.worker.get(name)
        assert item is not None
        assert item.state is WorkState.PENDING
        assert await stores.worker.transfer(name, OWN)
    assert not stores.mirrors


async def test_what_was_cancelled_is_not_begun(stores: Stores) -> None:
    await stores.route("a", "b")
    await stores.worker.assign([sent("a"), sent("b")])
    assert await stores.router.cancel("a", reason="not wanted", who="test")
    claimed = await stores.worker.claim(2, WorkClaim("worker-1#test", classes=(OWN,)))
    assert [one.id for one in claimed] == ["b"]
