"""
The router: one assignment to one worker that can take it, and its answer back to the caller.

    submit → is there room here → keep it → choose a worker → send → ack → result → tell the caller

A rejected assignment goes to another worker or waits here; one whose worker is gone is sent again. The router's own
queue is bounded, and its caller is told when to come back.
"""

import asyncio
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import Admission, Event
from reefknot.core.messages import (
    ACK,
    CANCEL,
    HEARTBEAT,
    RESULT,
    AckStatus,
    Cancel,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    Job,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.core.overload.admission import Reject, RejectionPolicy, Rules
from reefknot.core.overload.level import OverloadStatus, level
from reefknot.errors import ParameterError, QueueFullError
from reefknot.execution.crew import Crew
from reefknot.execution.journal import Journal, event_id
from reefknot.execution.steady import SteadyClock
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.ports.transport import Transport
from reefknot.router.desk import Desk, work_id
from reefknot.router.dispatch import Dispatcher
from reefknot.router.health import HealthTable
from reefknot.router.inbox import Inbox
from reefknot.router.pace import Door
from reefknot.router.pending import Pending, PendingTable

TICK_S = 0.05
LOOK_S = 0.25
CLAIM_S = 0.25
RENEW_S = 10.0
CALLERS_S = 1.0
CONTROL_S = 0.25
BATCH = 200
AT_ONCE = 64

_cancels = msgspec.json.Decoder(Cancel)


class RouterSnapshot(Struct, frozen=True):
    """The router at one moment."""

    waiting: int
    pending: int
    status: OverloadStatus
    workers: dict[str, dict[str, Any]]


class Router:
    """Routes assignments over a transport."""

    def __init__(
        self,
        *,
        store: Store,
        transport: Transport,
        clock: Clock,
        rules: Rules | None = None,
        seed: int | None = None,
        shared_subject: bool = False,
        router_id: str = "router",
    ) -> None:
        clock = SteadyClock(clock)
        self.router_id = router_id
        self._store = store
        self._transport = transport
        self._clock = clock
        self._journal = Journal(store.audit)
        # The same bounds as a worker's; what cannot come in here is refused, whatever a worker would do with it.
        same = rules or Rules()
        self._rules = msgspec.structs.replace(same, policy=RejectionPolicy.REJECT_NEW)
        self.desk = Desk(store.work, clock, size=self._rules.size, journal=self._journal)
        self._owner = f"{router_id}#{event_id()}"
        self.health = HealthTable()
        self.table = PendingTable()
        self.dispatcher = Dispatcher(
            table=self.table,
            health=self.health,
            transport=transport,
            work=store.work,
            journal=self._journal,
            clock=clock,
            end=self._end,
            seed=seed,
            shared_subject=shared_subject,
        )
        self._crew = Crew(router_id, AT_ONCE)
        self._wake = asyncio.Event()
        self._claim_soon = asyncio.Event()
        self._inbox = Inbox(
            table=self.table,
            health=self.health,
            dispatcher=self.dispatcher,
            journal=self._journal,
            clock=clock,
            crew=self._crew,
            end=self._end,
            wake=self._wake.set,
        )
        self._callers: dict[str, asyncio.Future[ExecResult]] = {}
        self.door = Door(self._rules, table=self.table, health=self.health, clock=clock)
        self._tasks: list[asyncio.Task[Any]] = []

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        heard = self._transport.subscribe(ACK, RESULT, HEARTBEAT)
        after = await self._store.control.latest()
        loops = [
            (self._inbox.listen(heard), "inbox"),
            (self._take_on(), "desk"),
            (self._dispatch(), "dispatch"),
            (self._renew(), "leases"),
            (self._look_for_callers(), "callers"),
            (self._obey(after), "control"),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work, name=f"{self.router_id} {name}") for work, name in loops]

    async def stop(self) -> None:
        """Let go of everything: what is pending goes back to the desk, for whoever routes next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._crew.stop()
        held = [one.held for one in self.table.everyone()]
        if held:
            await self._crew.survive("pending work could not be given back", self.desk.give_back, held)

    def snapshot(self) -> RouterSnapshot:
        workers = {
            name: {one: msgspec.to_builtins(h) for one, h in by.items()} for name, by in self.health.everybody().items()
        }
        waiting = self.door.waiting()
        status = level(waiting, self._rules.size, self._rules.thresholds)
        return RouterSnapshot(waiting, len(self.table), status, workers)

    # ---- callers ----------------------------------------------------------------------------------------------------

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Take it on, or raise `QueueFullError` with the time to come back. The future is its result."""
        checked = read_assignment(encode(assignment))
        if isinstance(checked, InvalidMessage):
            raise ParameterError(checked.field or "assignment", assignment.assignment_id, checked.message)
        name = checked.assignment_id
        future = self._callers.get(name)
        if future is not None and not future.done():
            return future
        answer = self.door.admission(checked)
        if isinstance(answer, Reject) and await self._store.work.get(work_id(name)) is None:
            await self._journal.write(self._refused(checked, answer))
            wait, size = answer.retry_after_ms / 1000, self._rules.size
            why = answer.reason.value.replace("_", " ")
            raise QueueFullError(depth=self.door.waiting(), limit=size, retry_after=wait, reason=why)
        future = asyncio.get_running_loop().create_future()
        self._callers[name] = future
        self.door.unclaimed.add(name)
        try:
            if not await self.desk.hand_in(checked):
                self.door.unclaimed.discard(name)
                await self._answer_from_record(name)
        except BaseException as error:
            self._callers.pop(name, None)
            self.door.unclaimed.discard(name)
            if not future.done():  # whoever asked for the same meanwhile waits for this very future
                future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                future.exception()
            raise
        self._claim_soon.set()
        return future

    async def _answer_from_record(self, assignment_id: str) -> None:
        """The same assignment again: if it has ended, its stored result is the answer."""
        stored = await self.desk.look(assignment_id)
        if stored is not None:
            self._tell_caller(stored)

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
            await self.dispatcher.publish(CANCEL, encode(Cancel(assignment_id, why)))
        return True

    async def _call_off_at_desk(self, assignment_id: str, why: str) -> bool:
        event = self.dispatcher.cancelled_event(ExecAssignment(assignment_id, "", Job("")), why)
        if not await self.desk.call_off(assignment_id, why, tuple(self._journal.entries([event]))):
            return False
        await self._answer_from_record(assignment_id)
        return True

    async def _look_for_callers(self) -> None:
        """Results that another router brought, or that this one could not hold on to."""
        while True:
            await asyncio.sleep(CALLERS_S)
            elsewhere = [name for name in self._callers if self.table.get(name) is None][:BATCH]
            for name in elsewhere:
                await self._crew.survive("a result could not be looked up", self._answer_from_record, name)

    async def _obey(self, after: int) -> None:
        """What other processes ask for."""
        while True:
            await asyncio.sleep(CONTROL_S)
            try:
                commands = await self._store.control.poll(self.router_id, after=after)
            except Exception:  # noqa: S112 - the desk says that the store is away
                continue
            for command in commands:
                after = max(after, command.sequence)
                if command.name == "cancel":
                    await self._crew.survive("a cancellation failed", self._cancel_command, command.body)

    async def _cancel_command(self, body: str) -> None:
        cancel = _cancels.decode(body)
        await self.cancel(cancel.assignment_id, cancel.reason)

    # ---- desk -------------------------------------------------------------------------------------------------------

    async def _take_on(self) -> None:
        """Claim what callers handed in, here or in another process, as long as there is room to look after it."""
        while True:
            self._claim_soon.clear()
            room = min(BATCH, self._rules.size - len(self.table))
            before = len(self.table)
            if room > 0:
                await self._crew.survive("the store cannot be read", self._claim, room)
            if len(self.table) == before:
                await self._until(self._claim_soon, CLAIM_S)

    async def _claim(self, n: int) -> None:
        claim = asyncio.get_running_loop().create_task(self.desk.claim(n, self._owner))
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
        if taken:
            self._wake.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._crew.survive("leases could not be renewed", self._renew_all)

    async def _renew_all(self) -> None:
        held = [one.held for one in self.table.everyone()]
        if not held:
            return
        lost = {one.id: one for one in await self.desk.renew(held)}
        for pending in self.table.everyone():
            if lost.get(pending.held.id) == pending.held:  # somebody else answers it now
                self.table.remove(pending)

    async def _until(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        look_at = -inf
        while True:
            self._wake.clear()
            if self._clock.now() >= look_at:
                look_at = self._clock.now() + LOOK_S
                await self._crew.survive("looking after pending work failed", self.dispatcher.look_after)
            if self.table.waiting:
                await self._crew.survive("an assignment could not be sent", self.dispatcher.send_waiting)
            await self._until(self._wake, TICK_S if self.table.waiting else LOOK_S)

    # ---- ends --------------------------------------------------------------------------------------------------------

    async def _end(self, pending: Pending, result: ExecResult, *events: Event) -> None:
        """Keep the answer, then tell whoever waits for it here."""
        if self.table.get(pending.id) is pending and pending.worker_id is not None:
            self.door.ended(pending, result)
        if not self.table.remove(pending):
            return
        kept = await self.desk.answer(pending.held, result, events=tuple(self._journal.entries(events)))
        if kept:
            self._tell_caller(result)
        self._wake.set()
        self._claim_soon.set()

    def _tell_caller(self, result: ExecResult) -> None:
        self.door.unclaimed.discard(result.assignment_id)
        future = self._callers.pop(result.assignment_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    def _refused(self, assignment: ExecAssignment, answer: Reject) -> Event:
        return Admission(
            **self.dispatcher.about(assignment),
            status=AckStatus.REJECTED.value,
            reason=answer.reason.value,
            resource_class="router",
            queue_depth=self.door.waiting(),
        )
