"""
The slots of one resource class, and the queue in front of them.

A free slot takes the next due piece of work from the store and runs one attempt. A wait frees the slot, and so does the
end of an attempt: its report goes to the store beside the next claim, and only so many may be under way. While steps
take next to no time a pool claims a handful ahead, as much as its slots run in a few milliseconds. Everything it has
claimed is known by id, so that it can be cancelled, and its lease is renewed until its report is kept.

The store has the last word: work can come back by itself (crashed, requeued by a person), and the store wakes the pool.

Work that was running when a process died is suspect, and runs alone in its process (`Isolation`), one at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from typing import Any

from msgspec import structs

from reefknot.queue.execution.isolation import AGAIN_S, RUNS_ALONE, Isolation
from reefknot.queue.model.admission import (
    KNOWN_AFTER,
    Arrival,
    HeldStatus,
    Oldest,
    OverloadStatus,
    QueueView,
    held,
    level,
    reported,
    rules_hash,
)
from reefknot.queue.model.submission import running_mean
from reefknot.queue.model.work import Snooze, WorkItem, WorkState, worker_class
from reefknot.queue.port.work_queue import Held, ItemEvents, Settlement, WorkClaim
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.queue import BoundedQueue, Queued
from reefknot.runtime.log import RepeatedErrors, error_text, logger
from reefknot.runtime.tasks import run_in_background
from reefknot.runtime.timeouts import STORE_S

IDLE_S = 5.0
"""How long an idle pool waits before it looks around although nothing woke it."""
STORE_PAUSE_S = 1.0
"""How long a pool waits after the store has failed."""
RETURN_AFTER_S = 0.1
"""How soon the work of a slot goes back that was cancelled from outside; never, if it is the loop that ends."""
MOST_RETURNS = 5
RESYNC_BATCH = 50
RESYNC_S = 0.05
"""How soon a pool asks again for what the store did not give it."""
AHEAD_MS = 5.0
"""What the slots run within this time is claimed ahead: later claims know better what comes first."""
MOST_AHEAD = 100
LEAST_SHARE = 0.02
"""A claim that takes less than this share of an attempt is not worth one ahead."""


RunAttempt = Callable[[WorkItem], Coroutine[Any, Any, bool]]
"""Makes one attempt. Returns whether its time is a service time."""


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


@contextmanager
def starting(pools: "Sequence[Pool]") -> Iterator[None]:
    """A scope in which each of these pools, once for each time it is named, gets an item that is started already."""
    for pool in pools:
        pool.starting += 1
    try:
        yield
    finally:
        for pool in pools:
            pool.starting -= 1


class Pool:
    """Queue, slots and status of one class."""

    def __init__(
        self,
        name: str,
        context: WorkerContext,
        run: RunAttempt,
        crash_events: ItemEvents,
        *,
        isolation: Isolation | None = None,
    ) -> None:
        """`isolation` is shared by all pools of a process."""
        settings = context.settings
        self.name = name
        self.queue_name = worker_class(name, context.worker_id)
        self.slots = settings.slots_for(name)
        self.rules = settings.rules_for(name)
        self.rules_hash = rules_hash(self.rules, name)
        self.queue = BoundedQueue(self.rules.size if settings.queue_v2 else None)
        self.reserved = 0
        """Places of work that was admitted and is being written."""
        self.entering: Counter[int] = Counter()
        """Those by priority: none of them can be dropped before it is written."""
        self._entered = asyncio.Event()
        self.starting = 0
        """Those of them that the same write starts."""
        self.running: dict[str, asyncio.Task[None]] = {}
        """The attempts in the slots."""
        self._cancelled: set[asyncio.Task[None]] = set()
        """Slots that the pool itself has cancelled."""
        self.prefetched: dict[str, WorkItem] = {}
        """Claimed, and waiting for a slot to end what it runs now."""
        self.claimed: dict[str, Held] = {}
        """Everything that was claimed and whose report is not kept yet."""
        self.paused = False
        self._context = context
        self._clock = context.clock
        self._errors = RepeatedErrors()
        self._run = run
        self._crash_events = crash_events
        self._isolation = isolation or Isolation()
        self._isolation.pools.append(self)
        self._status = OverloadStatus.HEALTHY
        self._held = HeldStatus()
        self._wake = asyncio.Event()
        self._store_has_work = True
        self._store_is_empty = asyncio.Event()
        self._claimed_from = 0.0
        """When the pool began to ask for what it claimed last."""
        self._asked = 0
        """What a claim that is under way may bring."""
        self._asks_since: float | None = None
        """Since when there is something to claim and no room for its report."""
        self._service_times = 0
        self._mean_ms = 0.0
        self._attempts_timed = 0
        self._attempt_ms = 0.0
        self._claims_timed = 0
        self._claim_ms = 0.0

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.running)

    @property
    def is_claiming(self) -> bool:
        return self._asked > 0

    def depth(self) -> int:
        """
        Places taken. Work that a free slot takes at once does not wait, and does not count.

        A slot whose last attempt is not on record yet is not free: that work may come back for another one.
        """
        waiting = self.queue.ready + self.reserved + len(self.prefetched)
        taken = max(len(self.running), len(self.claimed) - len(self.prefetched))
        free = 0 if self.paused or self._isolation.is_on else self.slots - taken
        return self.queue.later + (waiting - min(waiting, free) if free > 0 else waiting)

    def reserve(self, priority: int) -> None:
        """Take a place for work that is being written."""
        self.reserved += 1
        self.entering[priority] += 1

    def release(self, priority: int) -> None:
        """Give a reserved place up: its work has one in the queue or a slot now, or is not kept."""
        self.reserved -= 1
        self.entering[priority] -= 1
        self.entering += Counter()  # without priorities of which none is left
        self._entered.set()

    async def entered(self) -> None:
        """Wait until a reserved place is given up."""
        self._entered.clear()
        await self._entered.wait()

    @property
    def has_room(self) -> bool:
        return self.queue.size is None or self.depth() < self.queue.size

    def status(self) -> OverloadStatus:
        """
        The reported status, which has hysteresis. A queue without a bound is never full.

        During isolation it is overloaded at least: routers prefer every worker that begins work, and where there is
        none they still send some.
        """
        if self.queue.size is not None and (self._status is not OverloadStatus.HEALTHY or self.depth()):
            self._status = reported(self._status, self.depth(), self.rules.size, self.rules.thresholds)
        least = OverloadStatus.OVERLOADED if self._isolation.is_on else OverloadStatus.HEALTHY
        return max(self._status, least, key=lambda one: one.severity)

    def level_inputs(self) -> dict[str, Any]:
        """The inputs of `status` beside the depth, if they count: isolation, and a level that hysteresis holds."""
        inputs: dict[str, Any] = {"isolated": True} if self._isolation.is_on else {}
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        if self.queue.size is not None and self._status is not raw:
            inputs["held"] = self._status.value
        return inputs

    def held_status(self) -> OverloadStatus:
        """The status that people are told, who look every second: it has hysteresis in time too. Routers steer by
        `status`."""
        self._held = held(self._held, self.status(), self._clock.now())
        return self._held.status

    def level_reason(self) -> str:
        """The reason of a level that people are told; empty while the pool is healthy."""
        if self.held_status() is OverloadStatus.HEALTHY:
            return ""
        if self._isolation.is_on:
            return "a job that may have crashed a worker runs alone"
        size, depth = self.rules.size, self.depth()
        taken = f"{depth} of {size} places in the queue are taken"
        raw = level(depth, size, self.rules.thresholds)
        return taken if raw is self._held.status else f"{taken}; it was {self._held.status.value} a moment ago"

    def view(self, arrival: Arrival, *, draining: bool) -> QueueView:
        """The snapshot that admission decides by: the raw depth before the arrival."""
        depth = self.depth()
        oldest = self.oldest() if self.is_full(depth) else None  # else admission does not look at it
        behind = self.queue.behind(arrival.priority, arrival.tenant) if arrival.deadline_ms is not None else 0
        return QueueView(depth, self.slots, self._service_times, round(self._mean_ms, 3), oldest, draining, behind)

    def oldest(self) -> Oldest | None:
        return self.queue.oldest(self._clock.now())

    def is_full(self, depth: int) -> bool:
        return self.queue.size is not None and depth >= self.queue.size * self.rules.thresholds.critical

    def overloaded(self) -> bool:
        """Whether the newest comes first. Not in the baseline, which has no levels."""
        if self.queue.size is None:
            return False
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        return raw.severity >= OverloadStatus.OVERLOADED.severity

    def has(self, work_id: str) -> bool:
        return work_id in self.claimed or work_id in self.queue or work_id in self.running

    def ahead(self) -> int:
        """
        The number to claim beyond the free slots (prefetch), so that none stands empty while the next claim is made.

        Of short attempts it is what ends within a few milliseconds, of others what ends during a claim. After a restart
        it is 0 until attempts were timed.
        """
        if self._attempts_timed < KNOWN_AFTER:
            return 0
        attempt_ms = max(0.001, self._attempt_ms)
        if attempt_ms <= AHEAD_MS:
            return min(MOST_AHEAD, int(self.slots * AHEAD_MS / attempt_ms))
        share = self._claim_ms / attempt_ms
        return 0 if share < LEAST_SHARE else min(self.slots, ceil(self.slots * share))

    def can_start(self, arrivals: int) -> int:
        """
        The number of these arrivals, whose places are reserved, that may start without a claim.

        None while others wait, since they come first; nor may they take the slots that a claim is under way for.
        """
        if self.paused or self.queue.ready or self._isolation.is_on:
            return 0
        ahead = self.ahead()
        free = self.slots + ahead - self.active - len(self.prefetched) - self._asked - (self.reserved - arrivals)
        return max(0, min(arrivals, free, 2 * (self.slots + ahead) - len(self.claimed) - self._asked))

    def _record_service_time(self, began: float, started: float) -> None:
        """
        Count a service time: all of the time that its slot could do nothing else.

        That is the claim it waited for (since `began`) and the attempt (since `started`).
        """
        now = self._clock.now()
        self._service_times += 1
        self._mean_ms = running_mean(self._mean_ms, (now - began) * 1000, number=self._service_times)
        self._attempts_timed += 1
        self._attempt_ms = running_mean(self._attempt_ms, (now - started) * 1000, number=self._attempts_timed)

    # ---- in and out -------------------------------------------------------------------------------------------------

    def put(self, queued: Queued) -> None:
        self.queue.put(queued, self._clock.now())
        self._wake.set()

    def queued(self, item: WorkItem, due_at: int | None = None) -> Queued:
        """The place of a stored item, due when the store says or at `due_at`."""
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        since = now - max(0.0, wall - item.created_at / 1000)
        due = (item.due_at if due_at is None else due_at) / 1000 - wall
        at = now + (due if due >= 0.001 else min(due, 0.0))
        return Queued(item.id, item.priority, since, at, expires, item.tenant_id or "")

    def wake(self) -> None:
        self._store_has_work = True
        self._wake.set()

    def begin(self, items: Iterable[WorkItem], since: float | None = None) -> None:
        """Run what was claimed (asked for `since` then), or accepted with a start, as soon as a slot is free."""
        self._claimed_from = self._clock.now() if since is None else since
        for item in items:
            self.queue.remove(item.id)
            self._cancel_attempt(item.id)  # its lease was lost unnoticed; the earlier attempt may not report any more
            self.claimed[item.id] = Held.of(item)
            self.prefetched[item.id] = item
        self._fill_slots()

    async def serve(self) -> None:
        """Fill free slots for as long as the worker runs."""
        while True:
            self._wake.clear()
            self._fill_slots()
            now, ahead = self._clock.now(), self.ahead()
            wanted = 0 if self.paused else self.slots + ahead - self.active - len(self.prefetched) - self.reserved
            wanted = self._isolation.may_claim(self, wanted)
            due_in = self.queue.next_due(now)
            if wanted > 0 and (due_in == 0.0 or self._store_has_work):
                if self._asks_since is None:
                    self._asks_since = now
                room = 2 * (self.slots + ahead) - len(self.claimed)
                if room > 0:
                    asked = self._asked = min(wanted, room)
                    try:
                        got = await self._claim_some(asked)
                    finally:
                        self._asked = 0
                        self._isolation.ended(self)
                    if got < asked:
                        self._store_has_work = False
                        self._store_is_empty.set()
                    if got or due_in != 0.0:
                        continue
                    await self._resync()
                    continue
            wait = IDLE_S if due_in is None or wanted <= 0 or due_in == 0.0 else min(IDLE_S, due_in)
            await _wait(self._wake, max(0.001, wait))

    async def watch_store(self) -> None:
        """Wake the pool when the store has work for it that its own queue does not know."""
        while True:
            await self._store_is_empty.wait()
            try:
                has_work = await self._context.work.wait(IDLE_S, classes=(self.queue_name,))
            except Exception:  # the claim that follows says what is wrong
                has_work = True
            if has_work:
                self._store_is_empty.clear()
                self.wake()

    async def _claim_some(self, wanted: int) -> int:
        asked_at = self._clock.now()
        try:
            items = await self._context.claims.finish(self._claim(wanted), Held.of)
        except Exception as error:
            self._errors.log(f"{self.name}: the store cannot be read", error, self._clock.now())
            self._asks_since = None
            await asyncio.sleep(STORE_PAUSE_S)
            return wanted
        since, self._asks_since, self._asked = self._asks_since, None, 0
        self._claims_timed += 1
        self._claim_ms = running_mean(self._claim_ms, (self._clock.now() - asked_at) * 1000, number=self._claims_timed)
        if self._isolation.admits(self, items, self._clock.now(), name=self._context.worker_id):
            self.begin(items, since)
        else:
            await self._put_off(items[0])
        return len(items)

    async def _put_off(self, item: WorkItem) -> None:
        """Give a suspect back until it can run alone. One that waited here would be blamed for what others do."""
        due_at = item.due_at if self._isolation.is_on else int((self._clock.wall() + AGAIN_S) * 1000)
        back = Settlement(item.id, item.owner, item.fence, Snooze(due_at, RUNS_ALONE))
        try:
            with self._context.timeouts.timeout(STORE_S):
                await self._context.work.settle([back])
            self.put(self.queued(item, due_at))
        except Exception as error:  # its lease runs out
            logger().error("%s: %s could not be put off (%s)", self.name, item.assignment_id, error_text(error))

    async def _claim(self, free: int) -> list[WorkItem]:
        claim = WorkClaim(
            self._context.owner,
            classes=(self.queue_name,),
            lease=self._context.settings.lease,
            newest_first=self.overloaded(),
            isolate=True,
            crash_events=self._crash_events,
        )
        with self._context.timeouts.timeout(STORE_S):
            return await self._context.work.claim(free, claim)

    def _fill_slots(self) -> None:
        create = asyncio.get_running_loop().create_task
        while self.prefetched and not self.paused and len(self.running) < self.slots:
            item = self._next_prefetched()
            task = create(self._slot(item), name=f"slot {self.name}")
            self.running[item.id] = task
            task.add_done_callback(self._slot_ended)

    async def _slot(self, first: WorkItem) -> None:
        """Run one attempt after the other, as long as something is prefetched."""
        task = self.running[first.id]
        began, item = self._claimed_from, first
        while True:
            started = self._clock.now()
            try:
                is_service_time = await self._run(item)
            except GeneratorExit:  # the loop has ended
                self.settled(item.id, item.fence)
                raise
            except BaseException:  # cancelled, or a defect of ours: there will be no report
                self._left(Held.of(item), task, is_often=item.interruptions >= MOST_RETURNS)
                raise
            finally:
                if self.running.get(item.id) is task:
                    del self.running[item.id]
            if is_service_time:
                self._record_service_time(began, started)
            if not self.prefetched or self.paused or task.cancelling():
                break
            began, item = self._clock.now(), self._next_prefetched()
            self.running[item.id] = task
        self._wake.set()

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            for work_id in [one for one, running in self.running.items() if running is task]:
                del self.running[work_id]  # cancelled before it began
                if held := self.claimed.get(work_id):
                    self._left(held, task)
            self._isolation.ended(self)
            self._wake.set()
        self._cancelled.discard(task)

    def _left(self, held: Held, task: asyncio.Task[None], *, is_often: bool = False) -> None:
        """
        Give up the claim of a slot that has ended early. One that was not stopped by the pool hands its work back.

        Work that was handed back often may be the one that stops others: its lease runs out, and so it becomes suspect.
        """
        if self.claimed.get(held.id) != held or task in self._cancelled or is_often:
            self.settled(held.id, held.fence)
            return
        logger().error("%s: the slot of %s was cancelled from outside; the job goes back", self.queue_name, held.id)
        asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return, held)

    def _return(self, held: Held) -> None:
        """Return a claim. It stays claimed until then, so that its lease is renewed."""
        if self.claimed.get(held.id) == held:
            run_in_background(self._give_back(held), f"giving back {held.id}")

    async def _give_back(self, held: Held) -> None:
        try:
            await self._context.claims.give_back([held])
        finally:
            self.settled(held.id, held.fence)
            self.wake()

    def settled(self, work_id: str, fence: int) -> None:
        """Forget a claim whose report is kept, or is not wanted any more."""
        if (held := self.claimed.get(work_id)) and held.fence == fence:
            del self.claimed[work_id]
        self._isolation.ended(self)
        self._wake.set()

    def cancel(self, work_id: str) -> None:
        """Stop working on an item that was cancelled, or that somebody else has by now."""
        self._cancel_attempt(work_id)
        self.claimed.pop(work_id, None)
        self._isolation.ended(self)
        self._wake.set()

    def _cancel_attempt(self, work_id: str) -> None:
        task = self.running.get(work_id)
        if task is not None:
            self._cancelled.add(task)
            task.cancel()
        else:
            self.prefetched.pop(work_id, None)

    def _next_prefetched(self) -> WorkItem:
        return self.prefetched.pop(next(iter(self.prefetched)))

    async def _resync(self) -> None:
        """Correct places that are due here and not in the store: somebody else has them, or they are due later."""
        for queued in self.queue.due(self._clock.now(), RESYNC_BATCH):
            item = await self._context.work.get(queued.id)
            if item is not None and item.state is WorkState.PENDING and item.resource_class == self.queue_name:
                self.queue.remove(queued.id)
                due = self._clock.now() + max(RESYNC_S, item.due_at / 1000 - self._clock.wall())
                self.put(structs.replace(queued, due=due))
            elif queued.id not in self.claimed:
                self.queue.remove(queued.id)

    def release_prefetched(self) -> list[Held]:
        """Give up what no slot has begun. Returns it; it stays claimed until it is given back."""
        prefetched, self.prefetched = self.prefetched, {}
        return [held for work_id in prefetched if (held := self.claimed.get(work_id)) is not None]

    def cancel_all(self) -> list[Held]:
        """Stop everything. Returns what was claimed."""
        self.paused = True
        self.prefetched.clear()
        for task in self.running.values():
            self._cancelled.add(task)
            task.cancel()
        return list(self.claimed.values())

    async def renew(self) -> list[str]:
        """Renew the leases of everything claimed. Returns the ids that were lost, whose work must stop."""
        lost = await self._context.claims.renew(list(self.claimed.values()))
        return [one.id for one in lost if self.claimed.get(one.id) == one]
