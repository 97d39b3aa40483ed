"""
The slots of one resource class.

A free slot takes the next due piece of work from the store and runs one attempt. A wait frees the slot, and so does the
end of an attempt: its report goes to the store beside the next one's claim, and only so many may be on their way. While
steps take next to no time a pool claims a handful ahead, as much as its slots run in a few milliseconds. Everything it
has claimed is known by id, so that it can be called off, and its lease is renewed until its report is kept.

The store has the last word: now and then a pool asks it although its own queue is empty, and finds what came back by
itself: crashed work, and work that a person took out of quarantine.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from reefknot.core.overload.admission import KNOWN_AFTER, OverloadStatus, QueueView, Rules, level, reported
from reefknot.core.work import HandBack, WorkItem, WorkState
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import CrashEvents, Held, Settlement, WorkQueue
from reefknot.runtime.log import logger, printable
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.worker.queue import BoundedQueue, Queued

IDLE_S = 1.0
"""How long an idle pool waits before it looks again although nobody woke it."""
AT_ONCE = 50
AGAIN_S = 0.05
"""How soon a pool asks again for what the store did not give it."""
_SMOOTHING = 0.1
AHEAD_MS = 5.0
"""Claimed ahead is what the slots run within this time: later claims know better what comes first."""
MOST_AHEAD = 32
"""Attempts that must have been timed before anything is claimed ahead: after a crash it is one at a time again."""

Runner = Callable[[WorkItem], Coroutine[Any, Any, bool]]
"""Makes one attempt; answers whether it tells how long a step takes."""


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
        limits: Timeouts,
    ) -> None:
        self.name = name
        self.queue_name = queue_name
        self.slots = slots
        self.rules = rules
        self.queue = BoundedQueue(rules.size if bounded else None)
        self.entering = 0
        """Places of work that was admitted and is being kept."""
        self.running: dict[str, asyncio.Task[None]] = {}
        """The attempts in the slots."""
        self.hand: deque[WorkItem] = deque()
        """Claimed, and waiting for a slot to end what it runs now."""
        self.held: dict[str, Held] = {}
        """Everything that was claimed and whose report is not kept yet."""
        self.paused = False
        self._owner = owner
        self._work = work
        self._clock = clock
        self._lease = lease
        self._run = run
        self._crash_events = crash_events
        self._limits = limits
        self._status = OverloadStatus.HEALTHY
        self._wake = asyncio.Event()
        self._look_at = 0.0
        self._claimed_from = 0.0
        """When the pool began to ask the store for what is in its hand."""
        self._asks_since: float | None = None
        """Since when there is something to ask for and no room for its report."""
        self._known = 0
        self._mean_ms = 0.0
        self._attempts_known = 0
        self._attempt_ms = 0.0

    # ---- what others see --------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.running)

    def depth(self) -> int:
        """Places taken. Work that a free slot takes at once does not wait, and does not count."""
        waiting = self.queue.ready + self.entering + len(self.hand)
        free = 0 if self.paused else self.slots - len(self.running)
        return self.queue.later + (waiting - min(waiting, free) if free > 0 else waiting)

    @property
    def has_room(self) -> bool:
        return self.queue.size is None or self.depth() < self.queue.size

    def status(self) -> OverloadStatus:
        """The reported status, which does not flutter. A queue without a bound is never full."""
        if self.queue.size is not None and (self._status is not OverloadStatus.HEALTHY or self.depth()):
            self._status = reported(self._status, self.depth(), self.rules.size, self.rules.thresholds)
        return self._status

    def view(self, *, draining: bool) -> QueueView:
        """What admission looks at: the raw depth before the newcomer."""
        oldest = self.queue.oldest(self._clock.now())
        return QueueView(self.depth(), self.slots, self._known, self._mean_ms, oldest, draining)

    def overloaded(self) -> bool:
        """Whether the newest comes first. Not in the baseline, which knows no levels."""
        if self.queue.size is None:
            return False
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        return raw.severity >= OverloadStatus.OVERLOADED.severity

    def has(self, work_id: str) -> bool:
        return work_id in self.held or work_id in self.queue or work_id in self.running

    def ahead(self) -> int:
        """How many may be claimed beyond what the slots take at once."""
        if self._attempts_known < KNOWN_AFTER or self._attempt_ms > AHEAD_MS:
            return 0
        return min(MOST_AHEAD, int(self.slots * AHEAD_MS / max(0.001, self._attempt_ms)))

    def _served(self, began: float, started: float) -> None:
        """
        A service time became known: all of the time that its slot could do nothing else.

        That is the claim it waited for, and the attempt. `started` is when the attempt began.
        """
        now = self._clock.now()
        self._known += 1
        self._mean_ms += ((now - began) * 1000 - self._mean_ms) * max(_SMOOTHING, 1 / self._known)
        self._attempts_known += 1
        self._attempt_ms += ((now - started) * 1000 - self._attempt_ms) * max(_SMOOTHING, 1 / self._attempts_known)

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
            self._fill_slots()
            now, ahead = self._clock.now(), self.ahead()
            wanted = 0 if self.paused else self.slots + ahead - self.active - len(self.hand)
            due_in = self.queue.next_due(now)
            if wanted > 0 and (due_in == 0.0 or now >= self._look_at):
                if self._asks_since is None:
                    self._asks_since = now
                room = 2 * (self.slots + ahead) - len(self.held)
                if room > 0:
                    self._look_at = now + IDLE_S
                    if await self._fill(min(wanted, room)) or due_in != 0.0:
                        continue
                    await self._resync()
                    continue
            wait = IDLE_S if due_in is None or wanted <= 0 or due_in == 0.0 else min(IDLE_S, due_in)
            await self._sleep(max(0.001, wait))

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _fill(self, wanted: int) -> int:
        claim = asyncio.get_running_loop().create_task(self._claim(wanted))
        try:
            items = await asyncio.shield(claim)
        except asyncio.CancelledError:
            await self._give_back(await claim)
            raise
        except Exception as error:
            text = printable(f"{type(error).__name__}: {error}", most=300)
            logger().error("%s: the store cannot be read (%s)", self.name, text)
            self._asks_since = None
            await asyncio.sleep(IDLE_S)
            return 1
        if self._asks_since is not None:
            self._claimed_from, self._asks_since = self._asks_since, None
        for item in items:
            self.queue.remove(item.id)
            self._call_off(item.id)  # its lease was lost without our knowing; the earlier one may not report any more
            self.held[item.id] = Held(item.id, item.owner, item.fence)
            self.hand.append(item)
        self._fill_slots()
        return len(items)

    async def _claim(self, free: int) -> list[WorkItem]:
        with self._limits.timeout(STORE_S):
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

    def _fill_slots(self) -> None:
        create = asyncio.get_running_loop().create_task
        while self.hand and not self.paused and len(self.running) < self.slots:
            item = self.hand.popleft()
            task = create(self._slot(item), name=f"slot {self.name}")
            self.running[item.id] = task
            task.add_done_callback(self._slot_ended)

    async def _slot(self, first: WorkItem) -> None:
        """One after the other, as long as there is something in the hand."""
        task = self.running[first.id]
        began, item = self._claimed_from, first
        while True:
            started = self._clock.now()
            try:
                timed = await self._run(item)
            except BaseException:  # called off, or a mistake of ours: nobody will report it
                self.settled(item.id, item.fence)
                raise
            finally:
                if self.running.get(item.id) is task:
                    del self.running[item.id]
            if timed:
                self._served(began, started)
            if not self.hand or self.paused or task.cancelling():  # who was told to stop and did not begins no other
                break
            began, item = self._clock.now(), self.hand.popleft()
            self.running[item.id] = task
        self._wake.set()

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._wake.set()

    def settled(self, work_id: str, fence: int) -> None:
        """Its report is kept, or nobody wants it any more."""
        held = self.held.get(work_id)
        if held is not None and held.fence == fence:
            del self.held[work_id]
        self._wake.set()

    def call_off(self, work_id: str) -> None:
        """Stop working on it: somebody called it off, or has it by now."""
        self._call_off(work_id)
        self.held.pop(work_id, None)
        self._wake.set()

    def _call_off(self, work_id: str) -> None:
        task = self.running.get(work_id)
        if task is not None:
            task.cancel()
        elif any(item.id == work_id for item in self.hand):
            self.hand = deque(item for item in self.hand if item.id != work_id)

    async def _resync(self) -> None:
        """The queue said due and the store said no: somebody else took it away, or it is due a moment later."""
        for queued in self.queue.due(self._clock.now(), AT_ONCE):
            item = await self._work.get(queued.id)
            if item is not None and item.state is WorkState.PENDING and item.resource_class == self.queue_name:
                self.queue.remove(queued.id)
                due = self._clock.now() + max(AGAIN_S, item.due_at / 1000 - self._clock.wall())
                self.put(Queued(item.id, item.priority, queued.since, due, queued.expires))
            elif queued.id not in self.held:
                self.queue.remove(queued.id)

    def empty_hand(self) -> list[Held]:
        """What was claimed will not be begun here; answers what that was, which is held until it is given back."""
        hand, self.hand = self.hand, deque()
        return [held for item in hand if (held := self.held.get(item.id)) is not None]

    def let_go(self) -> list[Held]:
        """Stop everything; answers what it held."""
        self.paused = True
        self.hand.clear()
        held = list(self.held.values())
        for task in self.running.values():
            task.cancel()
        return held

    async def renew(self) -> list[str]:
        """Hold what is running for longer; answers the ids that were lost, whose work must stop."""
        held = list(self.held.values())
        if not held:
            return []
        with self._limits.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one.id for one, ok in zip(held, kept, strict=True) if not ok and self.held.get(one.id) == one]
