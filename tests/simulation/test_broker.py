"""The model of the broker behaves like the server: it keeps the engine's contracts, and does as a real one does."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from random import Random
from typing import Any

import pytest

from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueued
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.commits import ConflictError
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
async def test_an_event_that_others_copied_before_its_writer_knew_of_it_is_copied_once(broker: Broker) -> None:
    """The answer to a commit is late; meanwhile another process finds the event in the outbox."""
    clock = VirtualClock()
    store, other = [await opened(clock) for _ in range(2)]
    await store.audit.append([event("first")])
    commits: Any = store._commits
    send = commits._send_until_known

    async def answered_late(messages: Any, commit_id: str, *, is_doubtful: bool) -> int:
        sequence: int = await send(messages, commit_id, is_doubtful=is_doubtful)
        await asyncio.sleep(0.6)  # longer than others leave an outbox alone
        await other._writer.recover()
        await store._writer._chain.missing([])
        return sequence

    commits._send_until_known = answered_late
    await store.audit.append([event("second")])
    assert await event_types(store) == ["first", "second"]
    assert await other.audit.verify() == []
    await store.close()
    await other.close()
