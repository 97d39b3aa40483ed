"""
The slots of one pool: what it has claimed, the attempts that run, and what becomes of a claim without a report.

    claim → (a suspect goes back until it can run alone) → begin → run one attempt → report → settled

A worker has such a pool for each resource class, and ingestion one for each source. What they have claimed is known by
id, so that it can be cancelled, and its lease is renewed until its report is kept. Work that was running when a process
died is suspect, and runs alone in its process (`Isolation`), one at a time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from reefknot.queue.execution.failures import suspended_at
from reefknot.queue.execution.settling import EndedAttempt, OwnerContext, Settling
from reefknot.queue.model.work import CRASH_LIMIT, Snooze, WorkItem, is_suspect
from reefknot.queue.port.work_queue import Held, ItemEvents, Settlement, WorkClaim
from reefknot.runtime.log import logger, printable
from reefknot.runtime.tasks import run_in_background
from reefknot.runtime.timeouts import CANCELLATION_S, CANCELLATIONS, STORE_S

RUNS_ALONE = "a process died while it ran; it waits to run alone"
AGAIN_S = 2.0
"""How soon a suspect is tried again that waits for functions whose attempts are over."""
LONGEST_WAIT_S = 300.0
"""How long suspects wait for such functions: one that never returns must not hold them for ever."""


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most this long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Isolation:
    """
    Isolation of suspects in one process, over all of its pools: while a suspect runs, nothing else does.

    The pool that meets a suspect puts it off and asks for the process. No pool then starts new work. As soon as all
    pools are idle, this one claims the suspect again and runs it: if the process dies now, the cause is known. In the
    meantime the worker reports no free slot, and new work waits until the suspects have ended.

    While functions keep running after the end of their attempts, no suspect is started, because it would be blamed for
    a crash of theirs. All other work goes on: such a function may never return.
    """

    def __init__(self, functions_overdue: Callable[[], int] = lambda: 0) -> None:
        """`functions_overdue` counts the functions of this process that run on although their attempts are over."""
        self.pools: list[Slots] = []
        self._functions_overdue = functions_overdue
        self._waits_since = self._waited_at = -inf
        """Since when suspects wait for such functions, and when one last did."""
        self._asked_by: Slots | None = None
        self._has_begun = False
        self._requested = asyncio.Event()
        """Set when a pool asks for the process; the next request has an event of its own."""

    @property
    def is_on(self) -> bool:
        """Whether a suspect runs, or waits for the others to end. A pool that was paused before it asks in vain."""
        pool = self._asked_by
        return pool is not None and (not pool.paused or bool(pool.claimed))

    def _waits_for_functions(self, now: float) -> bool:
        number = self._functions_overdue()
        if not number:
            self._waited_at = -inf
            return False
        if now - self._waited_at > LONGEST_WAIT_S:
            self._waits_since = now
            text = "work that has to run alone waits: %d plain functions run on although their attempts have ended"
            logger().warning(text, number)
        self._waited_at = now
        return now - self._waits_since < LONGEST_WAIT_S

    async def wait(self, timeout: float) -> None:
        """Wait until a pool asks for the process, at most `timeout` seconds."""
        await wait(self._requested, timeout)

    def may_claim(self, pool: "Slots", wanted: int) -> int:
        """The number of items that this pool may claim now, of those it wants."""
        if not self.is_on:
            return wanted
        return 1 if self._asked_by is pool and not self._has_begun and self._is_idle(pool) else 0

    def admits(self, pool: "Slots", items: Sequence[WorkItem], now: float, *, name: str) -> bool:
        """
        Whether a pool may run what it has claimed: `items`, of which a suspect is the only one.

        False: the suspect cannot run alone yet, and the pool puts it off. `name` is for the log.
        """
        if not items or not is_suspect(items[0]):
            self.no_suspect(pool)
            return True
        if not self.begin(pool, now):
            return False
        text = "%s: %s runs alone, since the process that ran it died (%d of %d times; then it is quarantined)"
        shown = printable(items[0].assignment_id, most=200)
        logger().warning(text, name, shown, items[0].crashes, CRASH_LIMIT)
        return True

    def begin(self, pool: "Slots", now: float) -> bool:
        """
        Begin a suspect that this pool has claimed.

        False while other work runs here: the pool has then asked for the process. False too while functions of ended
        attempts run on: the suspect is put off, and other work is not held up.
        """
        if self._waits_for_functions(now):
            self.no_suspect(pool)
            return False
        if not self.is_on:
            self._asked_by, self._has_begun = pool, False
            self._requested.set()
            self._requested = asyncio.Event()
        if self._asked_by is not pool or not self._is_idle(pool):
            return False
        self._has_begun = True
        return True

    def no_suspect(self, pool: "Slots") -> None:
        """End a wait: what this pool has claimed is no suspect."""
        if self._asked_by is pool:
            self._end()

    def ended(self, pool: "Slots") -> None:
        """Look again after this pool has ended something: the suspect, or what it waits for."""
        if self._asked_by is pool and self._has_begun and not pool.claimed:
            self._end()
        elif self._asked_by is not None:
            self._asked_by.wake()

    def _is_idle(self, holder: "Slots") -> bool:
        return not any(
            pool.claimed or pool.starting or (pool.is_claiming and pool is not holder) for pool in self.pools
        )

    def _end(self) -> None:
        self._asked_by, self._has_begun = None, False
        for pool in self.pools:
            pool.wake()


IDLE_S = 5.0
"""How long an idle pool waits before it looks around although nothing woke it."""
STORE_PAUSE_S = 1.0
"""How long a pool waits after the store has failed."""
RETURN_AFTER_S = 0.1
"""How soon the work of a slot goes back that was cancelled from outside; never, if it is the loop that ends."""
MOST_RETURNS = 5
STOPPING_S = 3.0
"""Time to clean up of attempts whose owner ends. After it they are cancelled again, and again."""

RunAttempt = Callable[[WorkItem], Coroutine[Any, Any, bool]]
"""Makes one attempt and reports it. Returns whether its time is a service time."""


class Slots:
    """The slots of one pool, and the claims of what runs in them or is about to."""

    def __init__(
        self,
        queue_name: str,
        context: OwnerContext,
        run: RunAttempt,
        reports: Settling,
        *,
        slots: int,
        isolation: Isolation,
        crash_events: ItemEvents | None = None,
        wake: asyncio.Event | None = None,
    ) -> None:
        """
        Make the slots of a pool that claims from the class `queue_name`; all pools of a process share `isolation`.

        `crash_events` are those of the owner unless given. Pools that are served by one loop share `wake`.
        """
        self.queue_name = queue_name
        self.slots = slots
        self.starting = 0
        """Places of work that the write under way starts."""
        self.running: dict[str, asyncio.Task[None]] = {}
        """The attempts in the slots."""
        self.prefetched: dict[str, WorkItem] = {}
        """Claimed, and waiting for a slot to end what it runs now."""
        self.claimed: dict[str, Held] = {}
        """Everything that was claimed and whose report is not kept yet."""
        self.paused = False
        self.store_has_work = True
        """Whether the last claim brought all that it asked for, or the store has had something new since."""
        self._context = context
        self._clock = context.clock
        self._run = run
        self._reports = reports
        self._isolation = isolation
        self._isolation.pools.append(self)
        self._crash_events = crash_events or context.crash_events
        self._wake = wake or asyncio.Event()
        self._asked = 0
        """What a claim that is under way may bring."""
        self._claimed_from = 0.0
        """When the pool began to ask for what it claimed last."""
        self._cancelled: set[asyncio.Task[None]] = set()
        """Slots that the pool itself has cancelled."""

    @property
    def active(self) -> int:
        return len(self.running)

    @property
    def is_claiming(self) -> bool:
        return self._asked > 0

    @property
    def taken(self) -> int:
        """The number of items that were claimed or run: what was lost runs until it is cleaned up."""
        return len(self.claimed.keys() | self.running.keys())

    def may_claim(self, wanted: int) -> int:
        """The number of items to claim now, of those wanted: none while a suspect of another pool runs."""
        return self._isolation.may_claim(self, wanted)

    def wake(self) -> None:
        self.store_has_work = True
        self._wake.set()

    # ---- claims -----------------------------------------------------------------------------------------------------

    async def claim(self, wanted: int, *, newest_first: bool = False) -> list[WorkItem]:
        """Claim up to `wanted` due items, which `begin` runs if they are `admitted`."""
        self._asked = wanted
        try:
            return await self._context.claims.finish(self._claim(wanted, newest_first=newest_first), Held.of)
        finally:
            self._asked = 0
            self._isolation.ended(self)

    async def _claim(self, wanted: int, *, newest_first: bool) -> list[WorkItem]:
        context = self._context
        terms = WorkClaim(
            context.owner,
            classes=(self.queue_name,),
            lease=context.lease,
            newest_first=newest_first,
            isolate=True,
            crash_events=self._crash_events,
        )
        with context.timeouts.timeout(STORE_S):
            return await context.work.claim(wanted, terms)

    def admitted(self, items: Sequence[WorkItem]) -> bool:
        """
        Whether what was claimed may run now. A suspect that cannot run alone yet goes back, and comes again.

        One that waited here would be blamed for what others do.
        """
        if self._isolation.admits(self, items, self._clock.now(), name=self._context.name):
            return True
        (item,) = items
        due_at = item.due_at if self._isolation.is_on else int((self._clock.wall() + AGAIN_S) * 1000)
        self.claimed[item.id] = Held.of(item)
        back = Settlement(item.id, item.owner, item.fence, Snooze(due_at, RUNS_ALONE))
        self._reports.report(EndedAttempt(item, back, self))
        return False

    def begin(self, items: Iterable[WorkItem], since: float | None = None) -> None:
        """Run what was claimed (asked for `since` then), or accepted with a start, as soon as a slot is free."""
        self._claimed_from = self._clock.now() if since is None else since
        for item in items:
            self._cancel_attempt(item.id)  # its lease was lost unnoticed; the earlier attempt may not report any more
            self.claimed[item.id] = Held(item.id, item.owner, item.fence)
            self.prefetched[item.id] = item
        self._fill_slots()

    def settled(self, work_id: str, fence: int) -> None:
        """Forget a claim whose report is kept, or is not wanted any more."""
        if (held := self.claimed.get(work_id)) and held.fence == fence:
            del self.claimed[work_id]
        self._isolation.ended(self)
        self._wake.set()

    def due_again(self, item: WorkItem, due_at: int) -> None:
        """Hear that an item of this pool waits in the store until then (ms UTC)."""

    async def renew(self) -> None:
        """Renew the leases of everything claimed, and stop the work of those that were lost."""
        self.stop_lost(await self._context.claims.renew(list(self.claimed.values())))

    def stop_lost(self, lost: Iterable[Held]) -> None:
        """Stop work that was cancelled, or that another owner has by now."""
        for one in lost:
            if self.claimed.get(one.id) == one:
                self.cancel(one.id)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        if not self.prefetched:
            return
        create = asyncio.get_running_loop().create_task
        while self.prefetched and not self.paused and len(self.running) < self.slots:
            item = self._next_prefetched()
            task = create(self._slot(item), name=f"slot {self.queue_name}")
            self.running[item.id] = task
            task.add_done_callback(self._slot_ended)

    def _next_prefetched(self) -> WorkItem:
        return self.prefetched.pop(next(iter(self.prefetched)))

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

    def _record_service_time(self, began: float, started: float) -> None:
        """Count the time of an attempt that was claimed since `began` and ran since `started`."""

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

    def cancel(self, work_id: str) -> None:
        """Stop working on an item that was cancelled, or that another owner has by now."""
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


# ---- the end of an owner ---------------------------------------------------------------------------------------------


async def return_claimed(context: OwnerContext, reports: Settling, pools: Sequence[Slots]) -> int:
    """Let pending reports finish, stop the rest, and give it back. Returns how many went back. Bounded in time."""
    await reports.finished()
    tasks = [task for pool in pools for task in pool.running.values()]
    held = [one for pool in pools for one in pool.cancel_all()]
    left = await stop_attempts(context.name, tasks)
    for pool in pools if left else ():
        pool.running = {name: task for name, task in pool.running.items() if task not in left}
    await reports.finished()  # an attempt that ended in the very moment it was stopped
    if not held:
        return 0
    back = await context.claims.give_back(held)
    for pool in pools:
        pool.claimed.clear()
    return sum(back)


async def stop_attempts(name: str, tasks: Iterable[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """
    Wait for cancelled attempts of the owner `name`, cancelling them again, for a bounded time.

    Returns those that keep running, and logs where each of them is.
    """
    left, seconds = set(tasks), STOPPING_S
    for _ in range(CANCELLATIONS):
        if not left:
            return left
        _, left = await asyncio.wait(left, timeout=seconds)
        seconds = CANCELLATION_S
        for task in left:
            task.cancel()
    for task in left:
        text = "%s: a step ignores that it is cancelled, at %s; the worker ends without it"
        logger().error(text, name, printable(suspended_at(task), most=300) or "an unknown place")
    return left
