"""
The slots of one resource class.

A free slot takes the next due piece of work from the store, runs one attempt, and settles it with its events in one
step. A wait frees the slot. What is running is known by id, so that it can be cancelled, and its lease is renewed.

The store has the last word: now and then a pool asks it although its own queue is empty, and finds what came back by
itself: crashed work, and work that a person took out of quarantine.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from reefknot.core.overload.admission import QueueView, Rules
from reefknot.core.overload.level import OverloadStatus, level, reported
from reefknot.core.work import HandBack, WorkItem, WorkState
from reefknot.execution import report
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import CrashEvents, Held, Settlement, WorkQueue
from reefknot.worker.queue import BoundedQueue, Queued

IDLE_S = 1.0
"""How long an idle pool waits before it looks again although nobody woke it."""
STORE_S = 30.0
AT_ONCE = 50
AGAIN_S = 0.05
"""How soon a pool asks again for what the store did not give it."""
_SMOOTHING = 0.1

Runner = Callable[[WorkItem], Coroutine[Any, Any, None]]


class Pool:
    """Queue, slots and status of one class."""

    def __init__(
        self,
        name: str,
        *,
        queue_name: str,
        owner: str,
        slots: int,
        rules: Rules,
        bounded: bool,
        work: WorkQueue,
        clock: Clock,
        lease: float,
        run: Runner,
        crash_events: CrashEvents,
    ) -> None:
        self.name = name
        self.queue_name = queue_name
        self.slots = slots
        self.rules = rules
        self.queue = BoundedQueue(rules.size if bounded else None)
        self.entering = 0
        """Places of work that was admitted and is being kept."""
        self.running: dict[str, asyncio.Task[None]] = {}
        self.held: dict[str, Held] = {}
        self.paused = False
        self._owner = owner
        self._work = work
        self._clock = clock
        self._lease = lease
        self._run = run
        self._crash_events = crash_events
        self._status = OverloadStatus.HEALTHY
        self._wake = asyncio.Event()
        self._look_at = 0.0
        self._known = 0
        self._mean_ms = 0.0
        self._began: dict[str, float] = {}
        """When a slot began to ask the store for what it runs now."""

    # ---- what others see --------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.running)

    def depth(self) -> int:
        """Places taken. Work that a free slot takes at once does not wait, and does not count."""
        queue = self.queue
        at_once = min(queue.ready + self.entering, max(0, self.slots - self.active))
        return queue.depth + self.entering - at_once

    def status(self) -> OverloadStatus:
        """The reported status, which does not flutter. A queue without a bound is never full."""
        if self.queue.size is not None:
            self._status = reported(self._status, self.depth(), self.rules.size, self.rules.thresholds)
        return self._status

    def view(self, *, draining: bool) -> QueueView:
        """What admission looks at: the raw depth before the newcomer."""
        now = self._clock.now()
        return QueueView(self.depth(), self.slots, self._known, self._mean_ms, self.queue.oldest(now), draining)

    def overloaded(self) -> bool:
        """Whether the newest comes first. Not in the baseline, which knows no levels."""
        if self.queue.size is None:
            return False
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        return raw.severity >= OverloadStatus.OVERLOADED.severity

    def served(self, work_id: str) -> None:
        """A service time became known: all of the time that its slot could do nothing else, store calls included."""
        began = self._began.get(work_id)
        if began is None:
            return
        milliseconds = (self._clock.now() - began) * 1000
        self._known += 1
        share = max(_SMOOTHING, 1 / self._known)
        self._mean_ms += (milliseconds - self._mean_ms) * share

    def has(self, work_id: str) -> bool:
        return work_id in self.running or work_id in self.queue

    # ---- in and out -------------------------------------------------------------------------------------------------

    def put(self, queued: Queued) -> None:
        self.queue.put(queued, self._clock.now())
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def serve(self) -> None:
        """Fill free slots for as long as the worker runs."""
        while True:
            self._wake.clear()
            now, free = self._clock.now(), self.slots - self.active
            due_in = self.queue.next_due(now)
            if free > 0 and not self.paused and (due_in == 0.0 or now >= self._look_at):
                self._look_at = now + IDLE_S
                if await self._fill(free) or due_in != 0.0:
                    continue
                await self._resync()
                continue
            wait = IDLE_S if due_in is None or free <= 0 or self.paused else min(IDLE_S, due_in)
            await self._sleep(max(0.001, wait))

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _fill(self, free: int) -> int:
        began = self._clock.now()
        claim = asyncio.get_running_loop().create_task(self._claim(free))
        try:
            items = await asyncio.shield(claim)
        except asyncio.CancelledError:
            await self._give_back(await claim)
            raise
        except Exception as error:
            text = report.printable(f"{type(error).__name__}: {error}", most=300)
            report.logger().error("%s: the store cannot be read (%s)", self.name, text)
            await asyncio.sleep(IDLE_S)
            return 1
        for item in items:
            self.queue.remove(item.id)
            self._began[item.id] = began
            self._start(item)
        return len(items)

    async def _claim(self, free: int) -> list[WorkItem]:
        async with asyncio.timeout(STORE_S):
            return await self._work.claim(
                free,
                owner=self._owner,
                classes=(self.queue_name,),
                lease=self._lease,
                newest_first=self.overloaded(),
                crash_events=self._crash_events,
            )

    async def _give_back(self, items: list[WorkItem]) -> None:
        """Claimed while the worker was ending: nobody runs them, so they go back and spend nothing."""
        if items:
            await self._work.settle([Settlement(item.id, item.owner, item.fence, HandBack()) for item in items])

    def _start(self, item: WorkItem) -> None:
        earlier = self.running.get(item.id)
        if earlier is not None:  # its lease was lost without our knowing; it may not report any more
            earlier.cancel()
        self.held[item.id] = Held(item.id, item.owner, item.fence)
        task = asyncio.get_running_loop().create_task(self._run(item), name=f"step {item.id}")
        self.running[item.id] = task
        task.add_done_callback(lambda done: self._finished(item.id, done))

    def _finished(self, work_id: str, task: asyncio.Task[None]) -> None:
        if self.running.get(work_id) is task:
            del self.running[work_id]
            self.held.pop(work_id, None)
            self._began.pop(work_id, None)
        self._wake.set()

    async def _resync(self) -> None:
        """The queue said due and the store said no: somebody else took it away, or it is due a moment later."""
        for queued in self.queue.due(self._clock.now(), AT_ONCE):
            item = await self._work.get(queued.id)
            if item is not None and item.state is WorkState.PENDING and item.resource_class == self.queue_name:
                self.queue.remove(queued.id)
                due = self._clock.now() + max(AGAIN_S, item.due_at / 1000 - self._clock.wall())
                self.put(Queued(item.id, item.priority, queued.since, due, queued.expires))
            elif queued.id not in self.running:
                self.queue.remove(queued.id)

    async def renew(self) -> list[str]:
        """Hold what is running for longer; answers the ids that were lost, whose work must stop."""
        held = list(self.held.values())
        if not held:
            return []
        async with asyncio.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one.id for one, ok in zip(held, kept, strict=True) if not ok and self.held.get(one.id) == one]
