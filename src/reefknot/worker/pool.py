"""
The slots of one resource class.

A free slot takes the next due piece of work from the store, runs one attempt, and settles it with its events in one
step. A wait frees the slot. What is running is known by id, so that it can be cancelled, and its lease is renewed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from reefknot.core.overload.admission import QueueView, Rules
from reefknot.core.overload.level import OverloadStatus, level, reported
from reefknot.core.work import WorkItem
from reefknot.execution import report
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Held, WorkQueue
from reefknot.worker.queue import BoundedQueue, Queued

IDLE_S = 1.0
"""How long an idle pool waits before it looks again although nobody woke it."""
STORE_S = 30.0
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
    ) -> None:
        self.name = name
        self.queue_name = queue_name
        self.slots = slots
        self.rules = rules
        self.queue = BoundedQueue(rules.size if bounded else None)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.held: dict[str, Held] = {}
        self.paused = False
        self._owner = owner
        self._work = work
        self._clock = clock
        self._lease = lease
        self._run = run
        self._status = OverloadStatus.HEALTHY
        self._wake = asyncio.Event()
        self._known = 0
        self._mean_ms = 0.0

    # ---- what others see --------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.running)

    def depth(self) -> int:
        """Places taken. Work that a free slot takes at once does not wait, and does not count."""
        return max(0, self.queue.depth - max(0, min(self.queue.ready, self.slots - self.active)))

    def status(self) -> OverloadStatus:
        """The reported status, which does not flutter."""
        self._status = reported(self._status, self.depth(), self.rules.size, self.rules.thresholds)
        return self._status

    def view(self, *, draining: bool) -> QueueView:
        """What admission looks at: the raw depth before the newcomer."""
        now = self._clock.now()
        return QueueView(self.depth(), self.slots, self._known, self._mean_ms, self.queue.oldest(now), draining)

    def overloaded(self) -> bool:
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        return raw.severity >= OverloadStatus.OVERLOADED.severity

    def served(self, milliseconds: float) -> None:
        """A service time became known."""
        self._known += 1
        share = max(_SMOOTHING, 1 / self._known)
        self._mean_ms += (milliseconds - self._mean_ms) * share

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
            free = self.slots - self.active
            due_in = self.queue.next_due(self._clock.now())
            if free > 0 and due_in == 0.0 and not self.paused:
                await self._fill(free)
                continue
            wait = IDLE_S if due_in is None or free <= 0 or self.paused else min(IDLE_S, due_in)
            await self._sleep(max(0.001, wait))

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _fill(self, free: int) -> None:
        ready = self.queue.ready or 1
        try:
            async with asyncio.timeout(STORE_S):
                items = await self._work.claim(
                    min(free, ready),
                    owner=self._owner,
                    classes=(self.queue_name,),
                    lease=self._lease,
                    newest_first=self.overloaded(),
                )
        except Exception as error:
            report.logger().error(
                "%s: the store cannot be read (%s)", self.name, report.printable(str(error), most=300)
            )
            await self._sleep(IDLE_S)
            return
        for item in items:
            self.queue.remove(item.id)
            self._start(item)
        if not items:
            await self._resync()

    def _start(self, item: WorkItem) -> None:
        self.held[item.id] = Held(item.id, item.owner, item.fence)
        task = asyncio.get_running_loop().create_task(self._run(item), name=f"step {item.id}")
        self.running[item.id] = task
        task.add_done_callback(lambda done: self._finished(item.id))

    def _finished(self, work_id: str) -> None:
        self.running.pop(work_id, None)
        self.held.pop(work_id, None)
        self._wake.set()

    async def _resync(self) -> None:
        """The queue said ready and the store said no: somebody else took it away. Take over what the store says."""
        now = self._clock.now()
        for queued in self.queue.drain_ready(now):
            item = await self._work.get(queued.id)
            if item is not None and item.state.value == "pending" and item.resource_class == self.queue_name:
                due = now + max(0.01, item.due_at / 1000 - self._clock.wall())
                self.queue.put(Queued(item.id, item.priority, queued.since, due, queued.expires), now)

    async def renew(self) -> list[str]:
        """Hold what is running for longer; answers the ids that were lost, whose work must stop."""
        held = list(self.held.values())
        if not held:
            return []
        async with asyncio.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one.id for one, ok in zip(held, kept, strict=True) if not ok]
