"""Each line of the suites that guards something catches the transport, or the quarantine, that lacks it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from reefknot.queue.model import work as core
from reefknot.queue.port.quarantine import QuarantineStore
from reefknot.queue.port.transport import Delivery, Room
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore, MemoryWorkQueue
from reefknot.stores.memory import store as memory
from reefknot.stores.memory.store import Hub, MemoryTransport
from reefknot.testing import run_virtual
from reefknot.testing.conformance import Harness, QuarantineContract, TransportContract, TransportHarness
from reefknot.testing.conformance import transport as suite
from reefknot.testing.conformance.transport import Ends


class DropsWhenFull(MemoryTransport):
    """What has no place is gone, and nobody hears of it."""

    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        for line in self._hub.lines:
            if subject in line.subjects and not line.unread.full():
                line.unread.put_nowait(Delivery(subject, body))


class NeverWaits(MemoryTransport):
    """Lines without a bound."""

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        return super().subscribe(*subjects, limit=0)


class KnowsNoIds(MemoryTransport):
    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        await super().publish(subject, body, headers=named.get("headers"))


class RemembersWhatItNeverSent(MemoryTransport):
    """An id counts as sent although its sender gave up."""

    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        try:
            await super().publish(subject, body, **named)
        except asyncio.CancelledError:
            self._hub.seen[f"{subject} {named.get('message_id')}"] = None
            raise


class HearsOnlyItself(MemoryTransport):
    def __init__(self, hub: Hub | None = None) -> None:
        super().__init__()


class ForgetsNobody(MemoryTransport):
    """Who stopped listening keeps a line that fills up."""

    def _forget(self, line: memory._Inbox) -> None:
        pass


class RemembersForLatecomers(MemoryTransport):
    """Who comes later hears what was sent before."""

    def __init__(self, hub: Hub | None = None) -> None:
        super().__init__(hub)
        self._said: list[Delivery] = _said.setdefault(id(hub), [])

    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        self._said.append(Delivery(subject, body))
        await super().publish(subject, body, **named)

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        line = super().subscribe(*subjects, limit=limit)
        for delivery in self._said:
            if delivery.subject in subjects:
                self._own[-1].unread.put_nowait(delivery)
        return line


_said: dict[int, list[Delivery]] = {}
_contract = TransportContract()


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (DropsWhenFull, _contract.test_a_sender_that_gets_ahead_waits_and_nothing_is_lost),
        (DropsWhenFull, _contract.test_nothing_is_lost_or_doubled_when_many_send_at_once),
        (NeverWaits, _contract.test_a_sender_that_gets_ahead_waits_and_nothing_is_lost),
        (KnowsNoIds, _contract.test_one_id_is_delivered_once_for_each_subject_and_no_id_every_time),
        (RemembersWhatItNeverSent, _contract.test_who_gave_up_waiting_may_send_again_under_the_same_id),
        (HearsOnlyItself, _contract.test_subject_body_and_headers_arrive_as_they_were_sent),
        (ForgetsNobody, _contract.test_who_stops_listening_holds_up_nobody),
        (RemembersForLatecomers, _contract.test_what_was_sent_before_one_listens_is_not_heard),
    ],
)
def test_the_suite_catches(
    monkeypatch: pytest.MonkeyPatch, broken: type[MemoryTransport], line: Callable[[TransportHarness], None]
) -> None:
    monkeypatch.setattr(asyncio, "run", run_virtual)  # a story that hangs is over at once
    monkeypatch.setattr(suite, "LONGEST_STORY", 1.0)
    monkeypatch.setattr(suite, "WAIT_S", 0.05)
    monkeypatch.setattr(suite, "MOST_AHEAD", 50)

    @asynccontextmanager
    async def two_ends(clock: VirtualClock) -> AsyncIterator[Ends]:
        hub = Hub()
        yield broken(hub), broken(hub)

    with pytest.raises((AssertionError, TimeoutError)):
        line(TransportHarness(two_ends))


class BrokenQuarantine(QuarantineStore):
    """The quarantine of a memory store, with a view of its table."""

    def __init__(self, work: MemoryWorkQueue) -> None:
        super().__init__(work)
        self._table = work.table


class ReadsPayloadsAsText(BrokenQuarantine):
    """A payload that is no UTF-8 is shown as something else."""

    async def show(self, work_id: str) -> core.WorkItem | None:
        item = await super().show(work_id)
        return item and structs.replace(item, payload=item.payload.decode("utf-8", "replace").encode())


class ReplacesInPlace(BrokenQuarantine):
    """The edited payload is written over the original one."""

    async def replace(self, work_id: str, payload: bytes, **named: Any) -> str | None:
        done = await super().replace(work_id, payload, **named)
        if done is not None:
            items = self._table.items
            items[work_id] = structs.replace(items[work_id], payload=payload)
        return done


class ForgetsWhatItReplaced(BrokenQuarantine):
    """The original is deleted as soon as its next version runs."""

    async def replace(self, work_id: str, payload: bytes, **named: Any) -> str | None:
        done = await super().replace(work_id, payload, **named)
        if done is not None:
            self._table.remove(work_id)
        return done


class RequeuesWithoutThePayload(BrokenQuarantine):
    async def requeue(self, which: WorkFilter, **more: Any) -> list[str]:
        done = await super().requeue(which, **more)
        items = self._table.items
        for work_id in done:
            items[work_id] = structs.replace(items[work_id], payload=b"")
        return done


class SendsEverythingToARouter(BrokenQuarantine):
    """A job of a source comes back where only assignments are looked for."""

    async def requeue(self, which: WorkFilter, **more: Any) -> list[str]:
        done = await super().requeue(which, **more)
        for work_id in done:
            await self._work.transfer(work_id, core.ROUTER)
        return done


KEPT = QuarantineContract.test_it_keeps_the_payload_byte_for_byte_with_reason_failure_and_history
REQUEUED = QuarantineContract.test_a_requeued_item_keeps_its_id_and_gets_a_fresh_budget
REPLACED = QuarantineContract.test_a_replaced_item_keeps_its_payload_and_the_next_version_runs
OF_SOURCE = QuarantineContract.test_a_job_of_a_source_returns_to_its_own_class


@pytest.mark.parametrize(
    ("test", "broken"),
    [
        (KEPT, ReadsPayloadsAsText),
        (REQUEUED, RequeuesWithoutThePayload),
        (REPLACED, ReplacesInPlace),
        (REPLACED, ForgetsWhatItReplaced),
        (OF_SOURCE, SendsEverythingToARouter),
    ],
)
def test_a_quarantine_that_changes_what_it_holds_is_noticed(test: Any, broken: type[BrokenQuarantine]) -> None:
    def harness(quarantine: type[BrokenQuarantine]) -> Harness:
        @asynccontextmanager
        async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[MemoryStore]:
            store = MemoryStore(clock, **options)
            store.quarantine = quarantine(store.work)
            yield store
            await store.close()

        return Harness(opened)

    test(QuarantineContract(), harness(BrokenQuarantine))
    with pytest.raises(AssertionError):
        test(QuarantineContract(), harness(broken))
