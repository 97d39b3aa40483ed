"""The lines of the quarantine's suite that guard payloads catch the quarantine that changes one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.queue.model import work as core
from reefknot.queue.port.work_queue import QuarantineFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.table.queue import TableQuarantine
from reefknot.testing.conformance import Harness, QuarantineContract


class ReadsPayloadsAsText(TableQuarantine):
    """A payload that is no UTF-8 is shown as something else."""

    async def show(self, work_id: str) -> core.WorkItem | None:
        item = await super().show(work_id)
        return item and structs.replace(item, payload=item.payload.decode("utf-8", "replace").encode())


class ReplacesInPlace(TableQuarantine):
    """The edited payload is written over the original one."""

    async def replace(
        self, work_id: str, payload: bytes, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> str | None:
        done = await super().replace(work_id, payload, who=who, why=why, events=events)
        if done is not None:
            items = self._work.table.items
            items[work_id] = structs.replace(items[work_id], payload=payload)
        return done


class ForgetsWhatItReplaced(TableQuarantine):
    """The original is deleted as soon as its next version runs."""

    async def replace(
        self, work_id: str, payload: bytes, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> str | None:
        done = await super().replace(work_id, payload, who=who, why=why, events=events)
        if done is not None:
            self._work.table.remove(work_id)
        return done


class RequeuesWithoutThePayload(TableQuarantine):
    async def requeue(self, which: QuarantineFilter, **more: Any) -> list[str]:
        done = await super().requeue(which, **more)
        items = self._work.table.items
        for work_id in done:
            items[work_id] = structs.replace(items[work_id], payload=b"")
        return done


class SendsEverythingToARouter(TableQuarantine):
    """A job of a source comes back where only assignments are looked for."""

    async def requeue(self, which: QuarantineFilter, **more: Any) -> list[str]:
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
def test_a_quarantine_that_changes_what_it_holds_is_noticed(test: Any, broken: type[TableQuarantine]) -> None:
    def harness(quarantine: type[TableQuarantine]) -> Harness:
        @asynccontextmanager
        async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[MemoryStore]:
            store = MemoryStore(clock, **options)
            store.quarantine = quarantine(store.work)
            yield store
            await store.close()

        return Harness(opened)

    test(QuarantineContract(), harness(TableQuarantine))
    with pytest.raises(AssertionError):
        test(QuarantineContract(), harness(broken))
