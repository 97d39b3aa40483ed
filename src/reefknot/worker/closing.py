"""
What a worker sends: acks, results, heartbeats. Each under a time limit.

Only a fresh result carries a message id: what is said again has to arrive again.

Ends that need no slot, and answers given again.

    cancelled · dropped · expired while queued · crashed too often · asked for once more · left behind by another worker

Each is one step of the store with its event, and then a result. What ended without a stored result is answered from the
reason that was kept, as often as somebody asks.

One claimed piece of work in a slot: one attempt, and its report.

Reports go to the store in groups: what has ended by the time the store is free goes in together. What was done is
reported even while the worker ends: an effect that happened is not run again because its report was cut off. A report
that the store does not take is tried again, by itself, for as long as the lease lasts. Results are told when kept.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Dropped, Event, OperatorAction, Quarantined, Requeued, timestamp
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ACK,
    HEARTBEAT,
    RESULT,
    Cancel,
    ExecAssignmentAck,
    ExecResult,
    StepResult,
    StepStatus,
    encode,
)
from reefknot.core.retry.classify import classify
from reefknot.core.work import ENDED, HandBack, Quarantine, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Transport
from reefknot.ports.work_queue import Settlement, WorkQueue
from reefknot.runtime.log import logger, printable
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.worker import records as tell
from reefknot.worker.attempt import Report, Steps
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.records import DROPPED, EXPIRED, Envelope, ended_without_result, envelope_of, envelopes, stand_in

PUBLISH_S = 10.0


class Outbox:
    """Sends over a transport."""

    def __init__(self, transport: Transport, limits: Timeouts) -> None:
        self._transport = transport
        self._limits = limits

    async def ack(self, ack: ExecAssignmentAck) -> None:
        await self._send(ACK, encode(ack))

    async def result(self, assignment_id: str, body: bytes, generation: int) -> None:
        """The result of this generation, as it is kept: a person who requeues the work starts another one."""
        await self._send(RESULT, body, f"{assignment_id}/{generation}")

    async def result_again(self, result: ExecResult) -> None:
        await self._send(RESULT, encode(result))

    async def heartbeat(self, beat: Struct) -> None:
        await self._send(HEARTBEAT, encode(beat))

    async def _send(self, subject: str, body: bytes, message_id: str = "") -> None:
        with self._limits.timeout(PUBLISH_S):
            await self._transport.publish(subject, body, message_id=message_id)


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
        limits: Timeouts,
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
        with self._limits.timeout(STORE_S):
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
            with self._limits.timeout(STORE_S):  # nobody may be left who would notice that its lease ran out
                await self._work.claim(
                    0, owner=self._owner, classes=(item.resource_class,), crash_events=self.crash_events
                )
            item = await self._get(work_id)
        if item is None or item.state is not WorkState.PENDING or pool.paused:
            return False
        with self._limits.timeout(STORE_S):
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
        with self._limits.timeout(STORE_S):
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


BROKEN = "the worker failed inside"
UNREADABLE = "what was kept of it cannot be read"
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class Runner:
    """Runs what the pools of one worker have claimed."""

    def __init__(
        self,
        name: str,
        *,
        pool_of: Callable[[str], Pool],
        steps: Steps,
        endings: Endings,
        work: WorkQueue,
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        lease: float,
        limits: Timeouts,
    ) -> None:
        self._name = name
        self._pool_of = pool_of
        self._steps = steps
        self._endings = endings
        self._work = work
        self._journal = journal
        self._outbox = outbox
        self._clock = clock
        self._lease = lease
        self._limits = limits
        self._ended: list[_Ended] = []
        """Attempts that are over, on their way to the store."""
        self._busy = False
        self.reporting: set[asyncio.Task[None]] = set()
        """Reports that are being kept and told."""

    async def run(self, item: WorkItem) -> bool:
        """One attempt of one claimed item. Answers whether it tells how long a step takes."""
        pool = self._pool_of(item.resource_class)
        try:
            envelope = envelopes.decode(item.payload)
        except msgspec.DecodeError as error:
            envelope = stand_in(item)
            self._report(item, self._aside(item, envelope, f"{UNREADABLE}: {error}"), pool, envelope)
            return False
        try:
            outcome = await self._steps.attempt(item, envelope)
        except Exception as error:  # a mistake of ours: the assignment ends with it, and the worker goes on
            outcome = self._broken(item, envelope, error)
        self._report(item, outcome, pool, envelope)
        return _was_run(outcome)

    def _broken(self, item: WorkItem, envelope: Envelope, error: Exception) -> Report:
        text = printable(self._journal.safe(f"{type(error).__name__}: {error}"), most=300)
        logger().error("%s: attempting %s failed inside, %s: %s", self._name, item.id, _place_of(error), text)
        return self._aside(item, envelope, BROKEN)

    def _aside(self, item: WorkItem, envelope: Envelope, reason: str) -> Report:
        """Nobody could run it. It still gets its result, and is on record."""
        step = StepResult(StepStatus.ERROR, ErrorCode.internal_error, error_message=reason)
        assignment = envelope.assignment
        failure = classify(reason, code=ErrorCode.internal_error)
        event = tell.quarantined(assignment, self._clock.wall(), reason, failure)
        self._steps.counters.ended(ok=False, retried=item.attempts > 0)
        result = self._steps.result(assignment, step, retries_used=item.attempts)
        return Report(Quarantine(reason), (event,), result)

    def _report(self, item: WorkItem, outcome: Report, pool: Pool, envelope: Envelope) -> None:
        """Hand it in. From here on it does not depend on the slot any more."""
        settled, body = outcome.settled, None
        if outcome.result is not None:
            body = encode(self._endings.completed(outcome.result, pool, envelope))
            if isinstance(settled, WorkDone):
                settled = WorkDone(body.decode())
            elif isinstance(settled, WorkFailed | Quarantine):
                settled = msgspec.structs.replace(settled, result=body.decode())
        entries = tuple(self._journal.entries(outcome.events)) if outcome.events else ()
        self._ended.append(_Ended(item, Settlement(item.id, item.owner, item.fence, settled, entries), pool, body))
        if not self._busy:
            self._busy = True
            self._begin(self._keep_all())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.reporting.add(task)
        task.add_done_callback(self.reporting.discard)

    async def _keep_all(self) -> None:
        """Group by group, until nothing is left; then the last group's results are told here."""
        while True:
            group, self._ended = self._ended, []
            try:
                kept = await self._kept_together(group)
            except BaseException:
                self._busy = False  # the next report begins anew
                raise
            if not self._ended:
                self._busy = False
                await self._tell_all(group, kept)
                return
            self._begin(self._tell_all(group, kept))

    async def _kept_together(self, group: list["_Ended"]) -> list[bool | None]:
        """For each, whether its report was kept. None: the store did not say, and it goes on by itself."""
        try:
            with self._limits.timeout(STORE_S):
                kept: list[bool | None] = [*await self._work.settle([one.settlement for one in group])]
        except Exception as error:
            self._say_not_kept(group[0].item, error, more=len(group) - 1)
            for one in group:
                self._begin(self._keep_alone(one))
            return [None] * len(group)
        for one, ours in zip(group, kept, strict=True):
            self._settled(one, ours)
        return kept

    async def _keep_alone(self, one: "_Ended") -> None:
        """Until the store takes it, at most as long as the lease lasts."""
        ends, pause = self._clock.now() + self._lease, _FIRST_PAUSE
        kept = False
        while self._clock.now() + pause < ends:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)
            try:
                with self._limits.timeout(STORE_S):
                    (kept,) = await self._work.settle([one.settlement])
                break
            except Exception as error:
                self._say_not_kept(one.item, error)
        self._settled(one, kept)
        await self._tell_all([one], [kept])

    def _say_not_kept(self, item: WorkItem, error: Exception, more: int = 0) -> None:
        text = printable(f"{type(error).__name__}: {error}", most=300)
        others = f" and {more} more" if more else ""
        logger().error("%s: the report of %s%s was not kept (%s)", self._name, item.id, others, text)

    def _settled(self, one: "_Ended", kept: bool | None) -> None:
        one.pool.settled(one.item.id, one.item.fence)
        settled = one.settlement.settled
        if not kept:
            logger().info("%s: %s was taken away meanwhile; its report was refused", self._name, one.item.id)
        elif isinstance(settled, TryAgain | Snooze):
            self._wait_for(one.item, settled.due_at, one.pool)

    async def _tell_all(self, group: list["_Ended"], kept: list[bool | None]) -> None:
        for one, ours in zip(group, kept, strict=True):
            if not ours or one.body is None:
                continue
            try:
                await self._outbox.result(one.item.id, one.body, one.item.generation)
            except Exception as error:  # it is stored; whoever asks again gets it
                said = printable(str(error), most=300)
                logger().error("%s: the result of %s was not sent (%s)", self._name, one.item.id, said)

    def _wait_for(self, item: WorkItem, due_at: int, pool: Pool) -> None:
        place = self._endings.place(item)
        due = self._clock.now() + due_at / 1000 - self._clock.wall()
        pool.put(Queued(place.id, place.priority, place.since, due, place.expires))

    async def empty_hands(self, pools: list[Pool]) -> None:
        """Give back what was claimed ahead and no slot has begun."""
        held = [(pool, one) for pool in pools for one in pool.empty_hand()]
        if held:
            with self._limits.timeout(STORE_S):
                await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for _, one in held])
        for pool, one in held:
            pool.settled(one.id, one.fence)

    async def hand_back(self, pools: list[Pool]) -> int:
        """Let what is reporting finish, stop the rest, and give it back. Answers how many went back."""
        await self._reported()
        tasks = [task for pool in pools for task in pool.running.values()]
        held = [one for pool in pools for one in pool.let_go()]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reported()  # an attempt that ended in the very moment it was stopped
        if not held:
            return 0
        with self._limits.timeout(STORE_S):
            back = await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for one in held])
        for pool in pools:
            pool.held.clear()
        return sum(back)

    async def _reported(self) -> None:
        ends = self._clock.now() + STORE_S
        while self.reporting and self._clock.now() < ends:
            await asyncio.wait(set(self.reporting), timeout=ends - self._clock.now())


class _Ended(Struct, frozen=True):
    """An attempt that is over, and what is to be kept and told of it."""

    item: WorkItem
    settlement: Settlement
    pool: Pool
    body: bytes | None


def _place_of(error: Exception) -> str:
    """Where it was raised, without anything of what was in the frames."""
    frames = extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nobody knows where"


def _was_run(outcome: Report) -> bool:
    """Whether it tells how long a step takes. What came too late or was put off took no time."""
    settled = outcome.settled
    return not isinstance(settled, Snooze) and getattr(settled, "reason", "") != EXPIRED
