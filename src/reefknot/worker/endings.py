"""
Ends that need no slot, and answers given again.

    cancelled · dropped · expired while queued · crashed too often · asked for once more · left behind by another worker

Each is one step of the store with its event, and then a result. What ended without a stored result is answered from the
reason that was kept, as often as somebody asks.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from reefknot.core.audit.event import Dropped, Event, OperatorAction, Quarantined, Requeued, timestamp
from reefknot.core.messages import Cancel, ExecResult, encode
from reefknot.core.work import ENDED, WorkItem, WorkState
from reefknot.execution.journal import Journal, event_id
from reefknot.execution.limits import STORE_S, Limits
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import WorkQueue
from reefknot.worker import step_events as tell
from reefknot.worker.outbox import Outbox
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.results import DROPPED, EXPIRED, Envelope, ended_without_result, envelope_of
from reefknot.worker.step import Steps

MOST_WATCHED = 10_000

_results = msgspec.json.Decoder(ExecResult)


class Endings:
    """Ends assignments of one worker that are not in a slot."""

    def __init__(
        self,
        *,
        owner: str,
        v2: bool,
        pools: Mapping[str, Pool],
        steps: Steps,
        work: WorkQueue,
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._owner = owner
        self._v2 = v2
        self._pools = pools
        self._steps = steps
        self._work = work
        self._journal = journal
        self._outbox = outbox
        self._clock = clock
        self._limits = limits
        self._crashed: deque[str] = deque(maxlen=MOST_WATCHED)
        self._watched: dict[str, str] = {}
        """Sent to us while another worker has it: by id, the class it comes to when that one lets go."""

    # ---- results ----------------------------------------------------------------------------------------------------

    def completed(self, result: ExecResult, pool: Pool, envelope: Envelope) -> ExecResult:
        """The overload fields, which the baseline withholds."""
        if not self._v2:
            return result
        return msgspec.structs.replace(result, queue_depth=envelope.queue_depth, overload_status=pool.status())

    def _answer(self, item: WorkItem) -> ExecResult | None:
        """The result of an item that has ended, stored or not; None while it has not."""
        if item.state not in ENDED and item.state is not WorkState.QUARANTINED:
            return None
        if item.result is not None:
            return _results.decode(item.result)
        step = ended_without_result(item)
        if step is None:
            return None
        envelope = envelope_of(item)
        pool = self._pools.get(item.resource_class.partition("@")[0]) or next(iter(self._pools.values()))
        retries = max(0, item.attempts - 1)
        return self.completed(self._steps.result(envelope.assignment, step, retries_used=retries), pool, envelope)

    async def say(self, work_id: str, *, again: bool = False) -> bool:
        """Publish what is known of it, if it has ended."""
        item = await self._get(work_id)
        result = None if item is None else self._answer(item)
        if item is None or result is None:
            return False
        if again:
            await self._outbox.result_again(result)
        else:
            await self._outbox.result(work_id, encode(result), item.generation)
        return True

    # ---- ends -------------------------------------------------------------------------------------------------------

    async def cancel(self, cancel: Cancel) -> bool:
        """Somebody called it off. It gets its result once, wherever it is."""
        work_id = cancel.assignment_id
        pool = next((one for one in self._pools.values() if one.has(work_id)), None)
        if pool is None:
            return False
        reason = self._journal.safe(cancel.reason or "").strip()[:300] or "cancelled"
        if reason in (DROPPED, EXPIRED):
            reason = f"cancelled: {reason}"
        item = await self._get(work_id)
        if item is None:
            return False
        event = OperatorAction(
            **_about(item, self._clock.wall()),
            actor="cancel message",
            action="cancel",
            subject=work_id,
            details={"reason": reason},
        )
        if not await self._called_off(work_id, pool, reason, event):
            return False
        pool.call_off(work_id)
        return await self.say(work_id)

    async def drop(self, victim: str, pool: Pool) -> bool:
        """Make room. Its place is free already; False when it had ended by itself."""
        item = await self._get(victim)
        if item is None:
            return False
        event = Dropped(**_about(item, self._clock.wall()), reason=DROPPED, resource_class=pool.name)
        return await self._called_off(victim, pool, DROPPED, event)

    async def expire(self, late: Queued, pool: Pool) -> None:
        """Its deadline passed while it waited. It does not wait for a slot to hear that."""
        item = await self._get(late.id)
        if item is None or item.state is not WorkState.PENDING:
            return
        if item.attempts:  # an attempt says it better: it knows the last error
            pool.put(msgspec.structs.replace(late, due=0.0, expires=float("inf")))
            return
        envelope = envelope_of(item)
        event = tell.expired(envelope.assignment, self._clock.wall(), item.attempts)
        if await self._called_off(late.id, pool, EXPIRED, event):
            self._steps.counters.expired += 1
            await self.say(late.id)

    async def _called_off(self, work_id: str, pool: Pool, reason: str, event: Event) -> bool:
        entries = self._journal.entries([event])
        with self._limits.within(STORE_S):
            done = await self._work.cancel(work_id, reason=reason, events=entries)
        pool.queue.remove(work_id)
        return done

    # ---- crashes ----------------------------------------------------------------------------------------------------

    def crash_events(self, item: WorkItem) -> Iterable[AuditEntry]:
        """What is put on record when an owner vanished. It runs where the store runs, perhaps in another thread."""
        about = _about(item, self._clock.wall())
        if item.state is WorkState.QUARANTINED:
            self._crashed.append(item.id)
            return self._journal.entries([Quarantined(**about, reason=item.reason)])
        return self._journal.entries([Requeued(**about, reason="its worker vanished", generation=item.generation)])

    async def tell_crashed(self) -> None:
        """What crashed too often is in quarantine, and still gets its result."""
        while self._crashed:
            await self.say(self._crashed.popleft())

    # ---- sent here, known already -----------------------------------------------------------------------------------

    async def known_already(self, work_id: str, pool: Pool) -> None:
        """An assignment that the store has: answer it again, or take it over from the worker that had it."""
        if pool.has(work_id) or await self.say(work_id, again=True) or await self._taken_over(work_id, pool):
            self._watched.pop(work_id, None)
        elif len(self._watched) < MOST_WATCHED:
            self._watched[work_id] = pool.name

    async def watch(self) -> None:
        """Look again after what another worker still has."""
        for work_id, name in list(self._watched.items()):
            await self.known_already(work_id, self._pools[name])

    async def _taken_over(self, work_id: str, pool: Pool) -> bool:
        item = await self._get(work_id)
        if item is None:
            return True
        if item.state is WorkState.RUNNING and item.resource_class != pool.queue_name:
            with self._limits.within(STORE_S):  # nobody may be left who would notice that its lease ran out
                await self._work.claim(
                    0, owner=self._owner, classes=(item.resource_class,), crash_events=self.crash_events
                )
            item = await self._get(work_id)
        if item is None or item.state is not WorkState.PENDING or pool.paused:
            return False
        with self._limits.within(STORE_S):
            if not await self._work.transfer(work_id, pool.queue_name):
                return False
        if not pool.has(work_id):
            pool.put(self.place(item))
        return True

    def place(self, item: WorkItem) -> Queued:
        """A stored item's place in the queue."""
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        since = now - max(0.0, wall - item.created_at / 1000)
        return Queued(item.id, item.priority, since, now + item.due_at / 1000 - wall, expires)

    async def _get(self, work_id: str) -> WorkItem | None:
        with self._limits.within(STORE_S):
            item = await self._work.get(work_id)
        return item if item is not None and _is_a_workers(item) else None


def _is_a_workers(item: WorkItem) -> bool:
    """Only a worker's work stands in a queue of this form. A router's submissions, say, are nobody's here."""
    return "@" in item.resource_class


def _about(item: WorkItem, wall: float) -> dict[str, Any]:
    """When, and whose."""
    return {
        "timestamp": timestamp(wall),
        "event_id": event_id(),
        "tenant_id": item.tenant_id,
        "trace_id": item.trace_id,
        "correlation_id": item.correlation_id,
        "work_id": item.id,
    }
