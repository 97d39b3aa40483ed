"""
The whole system on a model of a NATS server: every process has its own connection, mirror and chain of events.

Half of the runs send their messages over the model too, assignments through its shared stream; the others over the
`Sea`, which loses and delays more than NATS does. Besides the promises of every engine, the records in the stream hold
to rules of their own: `StreamRules` looks at each message as it is stored.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec

from reefknot.core.clock import Clock
from reefknot.errors import QueueFullError, StoreError
from reefknot.queue.model.messages import ACK, ASSIGN, AckStatus, ExecAssignment, ExecAssignmentAck
from reefknot.queue.model.work import ENDED, WorkState, is_unassigned
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.connection import options_from_url
from reefknot.stores.jetstream.state import StoredItem
from reefknot.stores.jetstream.streams import OPEN
from reefknot.stores.jetstream.transport import JetStreamTransport
from tests.simulation.broker import NO_FAULTS, Broker, Faults
from tests.simulation.broker_client import PROCESS
from tests.simulation.broker_streams import Stored
from tests.simulation.sea import JumpingClock, Process
from tests.simulation.world import TROUBLES, Story, World, record_of, simulated

URL = "nats://model:4222"
ACKED_S = 5.0
ACK_WAIT_S = 3.0
BROKEN_BROKER = ("disconnect", "disconnect", "restart", "leaderless", "vanish")


class StreamRules:
    """What must hold of the records in the state stream, whoever writes them."""

    def __init__(self, broker: Broker, story: Story) -> None:
        self._broker = broker
        self._story = story
        self._known: dict[str, StoredItem] = {}
        broker.stored = self._stored

    def _stored(self, message: Stored) -> None:
        tokens = message.subject.split(".")
        if tokens[1] != "work" or not message.body:
            return
        new = msgspec.json.decode(message.body, type=StoredItem)
        old = self._known.get(new.item.id)
        self._known[new.item.id] = new
        if old is None:
            return
        if old.item.state in ENDED and new.item.state is not old.item.state:
            self._broke(f"{new.item.id} had ended as {old.item.state.value} and became {new.item.state.value}")
        if new.item.fence < old.item.fence:
            self._broke(f"{new.item.id} went back from fence {old.item.fence} to {new.item.fence}")

    def _broke(self, text: str) -> None:
        self._story.broken.append(text)

    def check(self, store: JetStreamStore) -> None:
        """At the end: one record for each piece of work, and a mirror that is like the stream."""
        stream = self._broker.streams[store.names.state]
        records: dict[str, list[Stored]] = {}
        for message in stream.messages.values():
            if message.subject.split(".")[1] == "work":
                records.setdefault(message.subject.rpartition(".")[2], []).append(message)
        is_open = {}
        for work_id, found in records.items():
            if not found[-1].body or any(one.body for one in found[:-1]):
                self._broke(f"{work_id} has {sum(map(bool, (one.body for one in found)))} records, the last is no end")
            if found[-1].subject.split(".")[2] == OPEN and found[-1].body:
                item = msgspec.json.decode(found[-1].body, type=StoredItem).item
                is_open[item.id] = item.state, item.owner, item.fence, found[-1].seq
        table, revisions = store.state.table, store.state.revisions
        mirrored = {
            item.id: (item.state, item.owner, item.fence, revisions.get(item.id))
            for item in table.items.values()
            if item.state in (WorkState.PENDING, WorkState.RUNNING)
        }
        if mirrored != is_open:
            self._broke(f"the mirror has {mirrored}, and the stream {is_open}")


class FastReturnTransport(JetStreamTransport):
    """A transport whose unacknowledged assignments come back within the time of a run."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, ack_wait=ACK_WAIT_S)


class BrokerWorld(World):
    """A world whose store is on a broker."""

    troubles = (*TROUBLES, *BROKEN_BROKER)

    def __init__(self, seed: int, broker: Broker, store: JetStreamStore, *given: Any, **variant: Any) -> None:
        super().__init__(seed, store, *given, **variant)
        self.broker = broker
        self.own_store = store
        self.has_own_transport = seed % 2 == 1
        self.worker_options = {"shared_subject": self.has_own_transport}
        self.peer = store.transport(keeps_shared=True)
        self.accepted: set[str] = set()
        """Assignments that a worker said yes to."""
        self.rules_of_stream = StreamRules(broker, self.story)
        if self.has_own_transport:
            broker.heard = self._heard

    def _heard(self, subject: str, body: bytes) -> None:
        if subject.startswith("caf."):
            self.sea.heard.append((subject, body))
            self.sea.on_send(subject, body)

    def _accepted_means_kept(self, subject: str, body: bytes) -> None:
        """Whoever says yes has it in the stream by then, not only in its mirror."""
        if subject != ACK:
            return
        ack = msgspec.json.decode(body, type=ExecAssignmentAck)
        stream = self.broker.streams[self.own_store.names.state]
        found = stream.last_on(self.own_store.names.any_work(record_of(ack.assignment_id)))
        kept = stream.messages[found].body if found else b""
        item = msgspec.json.decode(kept, type=StoredItem).item if kept else None
        if ack.status is AckStatus.ACCEPTED:
            self.accepted.add(ack.assignment_id)
        if ack.status is AckStatus.ACCEPTED and (item is None or (is_unassigned(item) and not item.admission)):
            self.story.broken.append(f"{ack.assignment_id} was accepted and is not kept")

    async def store_of(self, process: Process) -> JetStreamStore:
        token = PROCESS.set(process)
        try:
            return await JetStreamStore(options_from_url(URL), self.clock).start()
        finally:
            PROCESS.reset(token)

    def port_of(self, process: Process, store: Any) -> Any:
        return store.transport(keeps_shared=True) if self.has_own_transport else super().port_of(process, store)

    async def _hand_in(self, assignment: ExecAssignment) -> None:
        """A caller who is not answered asks again: under the same id it is the same assignment."""
        if self.has_own_transport and self.rng.random() < 0.4:
            await self._publish(assignment)
            return
        while True:
            try:
                await super()._hand_in(assignment)
                return
            except StoreError:
                await asyncio.sleep(1.0)

    async def _publish(self, assignment: ExecAssignment) -> None:
        """Hand it in as a peer does that knows only the documented subjects: it counts when a worker accepted it."""
        name, ends = assignment.assignment_id, self.clock.now() + ACKED_S
        with contextlib.suppress(StoreError):
            await self.peer.publish(ASSIGN, msgspec.json.encode(assignment), message_id=name)
        while name not in self.accepted and self.clock.now() < ends:  # noqa: ASYNC110 - in virtual time it costs nothing
            await asyncio.sleep(0.1)
        if name not in self.accepted:
            raise QueueFullError(depth=1, limit=1)

    async def _report_capacity(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                await super()._report_capacity()
            await asyncio.sleep(1.0)

    async def _disconnect(self, member: Any) -> None:
        self.broker.lose_a_connection()

    async def _restart(self, member: Any) -> None:
        self.broker.restart(self.rng.random() * 6)

    async def _leaderless(self, member: Any) -> None:
        self.broker.lose_leader(self.rng.random() * 8)

    async def _vanish(self, member: Any) -> None:
        self.broker.lose_consumers()

    async def _calm(self) -> None:
        self.broker.faults = Faults(0.003, 0.0, 0.0, 0.0, 0.0, 0.0)
        await super()._calm()

    async def _until_answered(self) -> None:
        await asyncio.sleep(10.0)  # whatever is still on its way has arrived, or is given up
        await super()._until_answered()
        await asyncio.sleep(5.0)  # what the mirror has yet to hear of
        self.rules_of_stream.check(self.own_store)


@contextlib.contextmanager
def the_same_chance(seed: int) -> Iterator[None]:
    """A scope in which ids and pauses are drawn from a seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        with (
            patch("reefknot.runtime.seeds.process_seed", seed),
            patch("reefknot.runtime.seeds._next_number", count(1).__next__),
        ):
            yield
    finally:
        random.setstate(before)


def run_on_broker(seed: int, *, faults: Faults | None = None, **variant: Any) -> Story:
    """One whole run on the model of a broker, in virtual time."""

    async def main(clock: Clock, jumping: JumpingClock) -> Story:
        broker = Broker(Random(-seed - 1), faults=NO_FAULTS)
        with broker.clients():
            store = await JetStreamStore(options_from_url(URL), clock).start()
            try:
                world = BrokerWorld(seed, broker, store, clock, jumping, **variant)
                broker.faults = faults or Faults()
                story = await world.run()
                await world.peer.close()
            finally:
                await store.close()
        story.broker = broker.counts
        return story

    with the_same_chance(seed), patch("reefknot.stores.jetstream.store.JetStreamTransport", FastReturnTransport):
        return simulated(main)
