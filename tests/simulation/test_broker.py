"""The model of the broker behaves like the server: it keeps the engine's contracts, and does as a real one does."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from random import Random
from typing import Any

import pytest

from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueued
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.commits import ConflictError
from reefknot.stores.jetstream.requests import UnansweredError
from reefknot.testing import conformance
from reefknot.testing.conformance.harness import event, event_types
from tests.conformance.ends import harness_of, two_ends
from tests.simulation.broker import Broker

URL = "nats://model:4222"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(Random(1), wall=time.time).clients() as model:
        yield model


def opened(clock: VirtualClock, **options: Any) -> Awaitable[JetStreamStore]:
    return JetStreamStore.open(URL, clock, has_server_time=False, **options)


@pytest.fixture
def harness(broker: Broker) -> conformance.Harness:
    return harness_of(opened)


TestModelIdempotency = conformance.IdempotencyContract
TestModelAuditLog = conformance.AuditLogContract
TestModelWorkQueue = conformance.WorkQueueContract
TestModelNotes = conformance.SharedNoteContract
TestModelQuarantine = conformance.QuarantineContract
TestModelControl = conformance.ControlContract
TestModelValues = conformance.SharedValueContract


class TestModelTransport(conformance.TransportContract):
    @pytest.fixture
    def transports(self, broker: Broker) -> conformance.TransportHarness:
        return two_ends(opened, 2)


@pytest.mark.real_time
async def test_a_batch_that_is_refused_is_undone_although_somebody_reads_meanwhile(broker: Broker) -> None:
    """What was read is taken over after the batch: otherwise its changes would stay here, and be stored nowhere."""
    store = await opened(VirtualClock())
    commits: Any = store._commits
    send = commits._send_until_known
    reading: list[asyncio.Task[Any]] = []

    async def refused(messages: Any, commit_id: str, *, is_doubtful: bool) -> int:
        commits._send_until_known = send
        reading.append(asyncio.create_task(store.work.cancel("nobody")))
        await asyncio.sleep(0.1)  # the other's read is answered by now
        raise ConflictError(0)

    commits._send_until_known = refused
    assert await store.work.enqueue([WorkItem("a", "t")]) == [Enqueued.ACCEPTED]
    await asyncio.gather(*reading)
    stored, _, _ = await store.state.read_work("a")
    await store.close()
    assert stored is not None


@pytest.mark.real_time
async def test_events_of_a_batch_that_is_sent_again_are_stored_once_and_stay_in_their_place(broker: Broker) -> None:
    """The answer is lost, and the batch was stored: a reader may have seen its events where they are."""
    clock = VirtualClock()
    store, other = [await opened(clock) for _ in range(2)]
    await store.audit.append([event("first")])
    store_batch: Any = store.connection.store
    seen: list[Any] = []

    async def unanswered(messages: Any) -> int:
        await store_batch(messages)
        seen.extend(await other.audit.read())
        store.connection.store = store_batch  # type: ignore[method-assign]
        raise UnansweredError("nats", "no answer", "wait")

    store.connection.store = unanswered  # type: ignore[method-assign]
    await store.audit.append([event("second"), event("third")])
    assert await event_types(store) == ["first", "second", "third"]
    assert await other.audit.read() == seen
    await store.audit.append([event("fourth")])
    assert await other.audit.verify() == []
    await store.close()
    await other.close()


@pytest.mark.real_time
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_batch_of_unknown_outcome_ends_its_chain(broker: Broker, is_stored: bool) -> None:
    """Whether it was stored or not: its numbers are not given twice, and none is left out."""
    store = await opened(VirtualClock())
    head = await store.audit.append([event("first")])
    commits: Any = store._commits
    send = commits._send_until_known

    async def gives_up(messages: Any, commit_id: str, *, is_doubtful: bool) -> int:
        commits._send_until_known = send
        if is_stored:
            await send(messages, commit_id, is_doubtful=False)
        raise StoreUnavailableError("nats", "refused", "try again")

    commits._send_until_known = gives_up
    with pytest.raises(StoreUnavailableError):
        await store.audit.append([event("doubtful")])
    again = await store.audit.append([event("next")])
    assert again.chain != head.chain
    assert await event_types(store) == ["first", *["doubtful"][:is_stored], "next"]
    assert await store.audit.verify() == []
    await store.close()
