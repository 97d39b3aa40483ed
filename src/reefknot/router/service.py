"""
The router: one assignment to one worker that can take it, and its answer back to the caller.

    submit → is there room here → keep it → choose a worker → send → ack → result → tell the caller

A rejected assignment goes to another worker or waits here; one whose worker is gone is sent again. The router's own
queue is bounded, and its caller is told when to come back.
"""

import asyncio
from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, event_id
from reefknot.clock import SteadyClock
from reefknot.core.messages import ACK, HEARTBEAT, RESULT, Cancel, ExecAssignment, ExecResult, Job, resource_class
from reefknot.core.overload.admission import OverloadStatus, QueueView, RejectionPolicy, level
from reefknot.core.redaction import Redactor
from reefknot.core.work import WorkState
from reefknot.ports.clock import Clock
from reefknot.ports.control import Command
from reefknot.ports.store import Store
from reefknot.ports.transport import Transport
from reefknot.router.admission import Door, HealthTable
from reefknot.router.completion import Ends
from reefknot.router.dispatch import Dispatcher
from reefknot.router.inbox import Inbox
from reefknot.router.pending import PendingTable
from reefknot.router.records import Records
from reefknot.router.settings import RouterSettings
from reefknot.router.submissions import Desk, Entry, as_it_travels
from reefknot.runtime.tasks import BoundedTasks

TICK_S = 0.05
LOOK_S = 0.25
CLAIM_S = 0.25
CALLERS_S = 1.0
CONTROL_S = 0.25
BATCH = 200
AT_ONCE = 64
LAST_WRITES_S = 10.0
EARLY_S = 300.0
"""How long a cancel of what somebody else holds is remembered; a command is kept as long."""
MOST_EARLY = 1000

_cancels = msgspec.json.Decoder(Cancel)


class RouterSnapshot(Struct, frozen=True):
    """The router at one moment."""

    waiting: int
    pending: int
    status: OverloadStatus
    workers: dict[str, dict[str, Any]]
    lines: dict[str, QueueView] = {}
    """By class: what is ahead of a newcomer, and how fast it goes."""
    max_wait_fraction: float | None = None


class Router:
    """Routes assignments over a transport."""

    def __init__(
        self,
        *,
        store: Store,
        transport: Transport,
        clock: Clock,
        settings: RouterSettings | None = None,
        seed: int | None = None,
        router_id: str = "router",
        process: str = "",
        secrets: tuple[str, ...] = (),
    ) -> None:
        """`process` marks whose work this is: others then see at once that it is gone, and need not wait for leases."""
        clock = SteadyClock(clock)
        settings = settings or RouterSettings()
        # The same bounds as a worker's; what cannot come in here is refused, whatever a worker would do with it.
        rules = msgspec.structs.replace(settings.rules, policy=RejectionPolicy.REJECT_NEW)
        self.router_id = router_id
        self.owner = f"{router_id}#{event_id()}{process and '@'}{process}"
        self._settings = settings
        self._rules = rules
        self._store = store
        self._transport = transport
        self._clock = clock
        journal = Journal(store.audit, redactor=Redactor(secrets))
        self.desk = Desk(store.work, clock, size=rules.size, lease=settings.lease, journal=journal)
        self.health = HealthTable()
        self.table = PendingTable()
        self.door = Door(rules, table=self.table, health=self.health, clock=clock)
        self._records = Records(journal, clock)
        self._crew = BoundedTasks(router_id, AT_ONCE)
        self._wake = asyncio.Event()
        self._claim_soon = asyncio.Event()
        self._more_to_claim = False
        shared: dict[str, Any] = {"table": self.table, "records": self._records}
        self._entry = Entry(
            **shared,
            owner=self.owner,
            desk=self.desk,
            door=self.door,
            rules=rules,
            clock=clock,
            taken_on=self._wake.set,
            left=self._claim_soon.set,
        )
        self._ends = Ends(
            **shared, desk=self.desk, by_worker=self.door.ended, tell=self._entry.tell, freed=self._after_ends
        )
        shared |= {"ends": self._ends, "health": self.health, "clock": clock}
        self.dispatcher = Dispatcher(**shared, transport=transport, work=store.work, seed=seed, settings=settings)
        self._inbox = Inbox(**shared, dispatcher=self.dispatcher, crew=self._crew, wake=self._wake.set)
        self._tasks: list[asyncio.Task[Any]] = []
        self._started_at = 0
        self._called_off_early: dict[str, tuple[float, str | None]] = {}
        """Cancels of what somebody else still holds, perhaps an earlier life of ours: by id, when they were heard."""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._started_at = int(self._clock.wall() * 1000)
        heard = self._transport.subscribe(ACK, RESULT, HEARTBEAT)
        loops = [
            (self._inbox.listen(heard), "inbox"),
            (self._take_on(), "desk"),
            (self._dispatch(), "dispatch"),
            (self._renew(), "leases"),
            (self._look_for_callers(), "callers"),
            (self._obey(), "control"),
            (self._entry.gather.serve(), "entry"),
            (self._ends.gather.serve(), "ends"),
            (self._records.gather.serve(), "records"),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work, name=f"{self.router_id} {name}") for work, name in loops]

    async def stop(self) -> None:
        """Let go of everything: what is pending goes back to the desk, for whoever routes next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._crew.stop()
        await self._crew.run_logged("the last results could not be kept", self._last_writes)
        held = [one.held for one in self.table.everyone()]
        if held:
            await self._crew.run_logged("pending work could not be given back", self.desk.give_back, held)

    async def _last_writes(self) -> None:
        async with asyncio.timeout(LAST_WRITES_S):
            await self._entry.gather.finish()
            await self._ends.gather.finish()
            await self._records.gather.finish()

    @property
    def ended(self) -> Mapping[str, int]:
        """How many ended since the start, by their status; `rejected` are those that no worker took."""
        return self._ends.counts

    def snapshot(self) -> RouterSnapshot:
        workers = {
            name: {one: msgspec.to_builtins(h) for one, h in by.items()} for name, by in self.health.everybody().items()
        }
        waiting = self.door.waiting()
        status = level(waiting, self._rules.size, self._rules.thresholds)
        pending, fraction = len(self.table), self._rules.max_wait_fraction
        return RouterSnapshot(waiting, pending, status, workers, self.door.lines(), fraction)

    # ---- callers ----------------------------------------------------------------------------------------------------

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Take it on, or raise `QueueFullError` with the time to come back. The future is its result."""
        return await self._entry.submit(*as_it_travels(assignment))

    async def cancel(self, assignment_id: str, reason: str | None = None) -> bool:
        """Call it off, wherever it is. False when it is not known here."""
        why = (reason or "cancelled").strip()[:300] or "cancelled"
        pending = self.table.get(assignment_id)
        if pending is None:
            return await self._call_off_at_desk(assignment_id, why)
        pending.called_off = why
        if pending.worker_id is None:
            await self.dispatcher.end_cancelled(pending)
        else:
            await self.dispatcher.tell_cancelled(assignment_id, why)
        return True

    async def _call_off_at_desk(self, assignment_id: str, why: str) -> bool:
        event = self._records.cancelled(ExecAssignment(assignment_id, "", Job("")), why)
        if not await self.desk.call_off(assignment_id, why, tuple(self._records.journal.entries([event]))):
            return False
        await self._entry.answer_from_record(assignment_id)
        return True

    async def _look_for_callers(self) -> None:
        """Results that another router brought, or that this one could not hold on to."""
        seen = 0
        while True:
            await asyncio.sleep(CALLERS_S)
            names = self._entry.elsewhere()
            seen = seen if seen < len(names) else 0
            some = names[seen : seen + BATCH]  # however many there are, everyone's turn comes
            seen += len(some)
            for name in some:
                await self._crew.run_logged("a result could not be looked up", self._entry.answer_from_record, name)

    async def _obey(self) -> None:
        """What other processes ask for, and what they asked for lately, while nobody was here to hear it."""
        after = 0
        while True:
            await asyncio.sleep(CONTROL_S)
            try:
                commands = await self._store.control.poll("router", after=after)
            except Exception:  # noqa: S112 - the desk says that the store is away
                continue
            for command in commands:
                after = max(after, command.sequence)
                if command.name == "cancel":
                    await self._crew.run_logged("a cancellation failed", self._cancel_command, command)

    async def _cancel_command(self, command: Command) -> None:
        cancel = _cancels.decode(command.body)
        name = cancel.assignment_id
        if self.table.get(name) is None or command.at < self._started_at:
            item = await self.desk.find(name)
            if item is None or any(one.what == "requeued" and one.at > command.at for one in item.history):
                return  # a person wanted it again since
            is_elsewhere = self.table.get(name) is None and item.state is WorkState.RUNNING
            if is_elsewhere and len(self._called_off_early) < MOST_EARLY:
                self._called_off_early[name] = self._clock.now(), cancel.reason
                return
        await self.cancel(name, cancel.reason)

    async def _cancel_early_ones(self, names: list[str]) -> None:
        """Those that were called off before they came to us."""
        for name in names:
            heard_at, reason = self._called_off_early.pop(name, (-inf, None))
            if self._clock.now() - heard_at < EARLY_S:
                await self.cancel(name, reason)

    # ---- desk -------------------------------------------------------------------------------------------------------

    async def _take_on(self) -> None:
        """Claim what others handed in, or what came when there was no room, as long as there is some now."""
        while True:
            self._claim_soon.clear()
            room = min(BATCH, self._rules.size - len(self.table))
            before = len(self.table)
            if room > 0:
                await self._crew.run_logged("the store cannot be read", self._claim, room)
            self._more_to_claim = room <= 0 or len(self.table) - before >= room
            if room <= 0 or not self._more_to_claim:
                await _until(self._claim_soon, CLAIM_S)

    async def _claim(self, n: int) -> None:
        claim = asyncio.get_running_loop().create_task(self.desk.claim(n, self.owner))
        try:
            taken = await asyncio.shield(claim)
        except asyncio.CancelledError:
            late = await claim
            if late:
                await self.desk.give_back([one.held for one in late])
            raise
        now = self._clock.now()
        for one in taken:
            self.door.unclaimed.discard(one.assignment.assignment_id)
            self.table.add(one, resource_class(one.assignment), now)
        if self._called_off_early:
            await self._cancel_early_ones([one.assignment.assignment_id for one in taken])
        if taken:
            self._wake.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._settings.renew_every)
            await self._crew.run_logged("leases could not be renewed", self._renew_all)

    async def _renew_all(self) -> None:
        held = [one.held for one in self.table.everyone()]
        if not held:
            return
        lost = {one.id: one for one in await self.desk.renew(held)}
        for pending in self.table.everyone():
            if lost.get(pending.held.id) == pending.held:  # somebody else answers it now
                self.table.remove(pending)

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        look_at = all_at = -inf
        while True:
            self._wake.clear()
            now = self._clock.now()
            if now >= look_at:
                look_at = now + LOOK_S
                await self._crew.run_logged("looking after pending work failed", self.dispatcher.look_after)
            if self.table.waiting:
                everyone = now >= all_at
                if everyone:
                    all_at = now + TICK_S
                await self._crew.run_logged("an assignment could not be sent", self._send, everyone)
            await _until(self._wake, TICK_S if self.table.waiting else LOOK_S)

    async def _send(self, everyone: bool) -> None:
        await self.dispatcher.send_waiting(everyone=everyone)

    def _after_ends(self) -> None:
        """There is room for more, here and at a worker."""
        if self.table.waiting:
            self._wake.set()
        if self._more_to_claim:
            self._claim_soon.set()


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Until it happens, at most so long."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
