"""
The router: one assignment to one worker that can take it, and its result back to the caller.

    submit → admit → keep → choose a worker → send → ack → result → resolve the caller

A refused assignment goes to another worker or waits here; one whose worker is gone is sent again. The router's own
queue is bounded; a refused caller gets the time to wait before its next try.
"""

import asyncio
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

import msgspec

from reefknot.audit.assignments import ended_event
from reefknot.audit.journal import Journal
from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.redaction import Redactor
from reefknot.queue.execution.tracing import submitting
from reefknot.queue.model.admission import level
from reefknot.queue.model.arguments import validated
from reefknot.queue.model.messages import ACK, HEARTBEAT, RESULT, Cancel, ExecAssignment, ExecResult, encode
from reefknot.queue.model.results import answer_of, assignment_of, cancel_reason
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, is_ingestion, is_over, is_workers, pool_of, worker_of
from reefknot.queue.pauses import Pauses
from reefknot.queue.port.control import Command
from reefknot.queue.port.transport import Transport
from reefknot.queue.router.completion import Completion
from reefknot.queue.router.dispatch import SHARED, Dispatcher
from reefknot.queue.router.health import HealthTable
from reefknot.queue.router.inbox import Inbox
from reefknot.queue.router.limits import DestinationOf, RouterLimits
from reefknot.queue.router.pending import ClaimedSubmission, Pending, PendingTable, RouterContext, RouterSnapshot
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.router.submissions import LocalCallers, Submissions
from reefknot.queue.router.waiting import WaitingWork
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import RepeatedErrors
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import BoundedTasks, Service, Services
from reefknot.runtime.timeouts import STORE_S
from reefknot.runtime.tracing import tracing
from reefknot.stores.port import Store

TICK_S, CHECK_S = 0.05, 0.25
CLAIM_S = 5.0
CALLERS_S = 1.0
RECALL_S = 4.0
"""How often work of gone workers is looked for; longer than it takes to hear of every worker."""
CALLER_WAIT_S, CONTROL_S = 30.0, 5.0
STORE_PAUSE_S = 0.25
BATCH = 200
AT_ONCE = 64
LAST_WRITES_S = 10.0
EARLY_S = 300.0
"""How long a cancel of what another router holds is remembered; a command is kept as long."""
MOST_EARLY = 10_000
UNANSWERED_S = 2.0
MOST_UNANSWERED = 100
"""Assignments that a snapshot names as not acknowledged, and the seconds from which on one counts."""

_cancels = msgspec.json.Decoder(Cancel)


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
        own_workers: Collection[str] = (),
        pauses: Pauses | None = None,
        destination_of: DestinationOf | None = None,
    ) -> None:
        """
        Build a router; `start` runs it.

        `process` marks whose work this is: others then see at once that it is gone, and need not wait for leases. With
        `own_workers`, names of workers that serve no other router, it routes only what is submitted through it. For
        `pauses` and `destination_of` see `RouterLimits`.
        """
        clock = SteadyClock(clock)
        settings, journal = settings or RouterSettings(), Journal(store.audit, redactor=Redactor(secrets))
        self.router_id = router_id
        self.table = PendingTable()
        self._store, self._clock = store, clock
        self._errors = RepeatedErrors()
        self._context = context = RouterContext(
            router_id=router_id,
            owner=f"{router_id}#{new_id()}{process and '@'}{process}",
            settings=settings,
            work=store.work,
            transport=transport,
            journal=journal,
            clock=clock,
            table=self.table,
            seed=seed,
        )
        self._wake, self._claim_now, self._left_here = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._store_may_have_more = False
        self._background = BoundedTasks(router_id, AT_ONCE)
        rules, more = settings.submission_rules, dict[str, Any](journal=journal, control=store.control)
        self.submissions = Submissions(store.work, clock, rules=rules, lease=settings.lease, **more)
        self._takes_all = not own_workers
        self._leads = True
        self._led: bool | None = None
        """Whether it led as of the last change; None before its start."""
        self.health = HealthTable(own_workers)
        self._callers = LocalCallers(context, self.submissions, on_claimed=self._wake.set, on_left=self._left)
        self.limits = RouterLimits(context, store, pauses, destination_of, wake=self._wake.set)
        self._completion = done = Completion(context, resolve=self._resolve, freed=self._after_ends)
        self._waiting_work = WaitingWork(context, self.submissions, done, wake=self._wake.set)
        self.dispatcher = Dispatcher(context, self.health, self._completion, self.limits)
        self._inbox = Inbox(context, self.health, self.dispatcher, done, tasks=self._background, wake=self._wake.set)
        self.services = Services(router_id)
        self._started_at = self._obeyed = 0
        """The sequence of the last command that was looked at."""
        self._early_cancels: dict[str, tuple[float, str | None]] = {}
        """Cancels of assignments that another router still holds: by id, when they came."""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        require_asyncio("Router")
        self._started_at = int(self._clock.wall() * 1000)
        self.health.store = self._store.identity
        loops: list[tuple[Service, str]] = [
            (self._claim_submissions, "claims"),
            (self._dispatch, "dispatch"),
            (self._renew, "leases"),
            (self._recall_from_gone, "recall"),
            (self._resolve_callers, "callers"),
            (self._obey, "commands"),
            (self._callers.batch.serve, "submissions"),
            (self._completion.batch.serve, "completion"),
            (self._waiting_work.serve, "waiting work"),
        ]
        for service, name in loops:
            self.services.keep(name, service)
        self.leads = self._leads

    @property
    def leads(self) -> bool:
        """
        Whether this router takes the submissions of the store.

        Where the store is led by one router, another one stands by: it takes none, hears no worker, and leaves what is
        submitted through it to the one that leads. Elsewhere all take submissions, and the one that leads recalls the
        work of workers that are gone.
        """
        return self._leads

    @leads.setter
    def leads(self, leads: bool) -> None:
        self._leads, self._callers.claims = leads, self._serves
        if not self.services.names or leads is self._led:
            return
        self._led, work = leads, self._store.work
        if self._serves:
            subscribe = self._context.transport.subscribe
            self.services.keep("inbox", lambda: self._inbox.listen(subscribe(ACK, RESULT, HEARTBEAT)))
        work.take_submissions(self._callers.take_over if leads and self._takes_all else None)
        self._claim_now.set()

    @property
    def _serves(self) -> bool:
        """Whether it claims submissions."""
        return self._leads or not self._takes_all or not self._store.work.led_by_one

    async def stop(self) -> None:
        """Return everything that is pending to the store, for the next router."""
        self._store.work.take_submissions(None)
        await self.services.stop()
        await self._background.stop()
        await self._background.run_logged("the last results could not be kept", self._last_writes)
        held = [*(one.held for one in self.table.all()), *self._waiting_work.held.values()]
        if held:
            await self._background.run_logged(
                "pending work could not be given back", self.submissions.claims.give_back, held
            )

    async def _last_writes(self) -> None:
        async with asyncio.timeout(LAST_WRITES_S):
            await self._callers.batch.finish()
            await self._completion.batch.finish()

    @property
    def owner(self) -> str:
        return self._context.owner

    @property
    def ended(self) -> Mapping[str, int]:
        """The number of ends since the start, by status; `rejected` are those that no worker took."""
        return self._completion.counts

    def snapshot(self) -> RouterSnapshot:
        now = self._clock.now()
        known, left_out = self.health.shown(now)
        workers = {
            name: {one: {"state": self.health.state(one, now), **msgspec.to_builtins(h)} for one, h in by.items()}
            for name, by in known.items()
        }
        rules, waiting = self._context.settings.rules, self.table.waiting
        status = level(waiting, rules.size, rules.thresholds)
        unanswered = self.table.unanswered(now - UNANSWERED_S, MOST_UNANSWERED)
        silent = {one.id: (one.worker_id or SHARED, round(now - one.asked_at, 1)) for one in unanswered}
        shared = self._context.settings.shared_subject
        more = workers, left_out, silent, shared, self.limits.snapshot(now)
        return RouterSnapshot(self.router_id, waiting, len(self.table), status, *more)

    # ---- callers ----------------------------------------------------------------------------------------------------

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Keep an assignment, or raise `QueueFullError` with the time to come back. Returns its future result."""
        return await self._submit(*validated(assignment))

    async def _submit(self, assignment: ExecAssignment, body: bytes) -> asyncio.Future[ExecResult]:
        if tracing.tracer is None:
            return await self._callers.submit(assignment, body)
        with submitting(assignment) as traced:
            return await self._callers.submit(traced, body if traced is assignment else encode(traced))

    async def cancel(self, assignment_id: str, reason: str | None = None, *, tenant_id: str | None = None) -> bool:
        """Cancel an assignment of this tenant, wherever it is. False when it is not known here."""
        return await self._cancel(Cancel(assignment_id, reason, tenant_id).record_id, reason)

    async def _cancel(self, work_id: str, reason: str | None) -> bool:
        why = cancel_reason(reason)
        pending = self.table.get(work_id)
        if pending is None:
            return await self._cancel_unheld(work_id, why)
        pending.cancel_reason = why
        if pending.worker_id is None:
            await self.dispatcher.end_cancelled(pending)
        else:
            await self.dispatcher.send_cancel(pending.assignment, why)
        return True

    async def _cancel_unheld(self, work_id: str, why: str) -> bool:
        """Cancel an assignment that is not in this router's table. A worker may have it."""
        item = await self.submissions.find(work_id)
        if item is None or is_over(item):
            return False
        worker_id = worker_of(item.resource_class)
        if worker_id and self.health.is_live(worker_id, self._clock.now()):
            await self.dispatcher.send_cancel(assignment_of(item), why)
            return True
        is_elsewhere = item.state is WorkState.RUNNING and item.id not in self._waiting_work.held
        if is_elsewhere and not worker_id and not is_ingestion(item):
            return False  # another router holds it
        return await self._cancel_in_store(item, why)

    async def _cancel_in_store(self, item: WorkItem, why: str) -> bool:
        ended = ended_event(item, self._context.clock.wall(), cancelled=why)
        async with asyncio.timeout(STORE_S):
            entries = self._context.journal.entries([self._context.cancelled(assignment_of(item), why), ended])
            if not await self._store.work.cancel(item.id, reason=why, events=entries):
                return False
        await self._callers.answer_from_store(item.id)
        return True

    def _resolve(self, work_id: str, result: ExecResult) -> None:
        """Give a result to its caller, and let what waits for it know."""
        self._callers.resolve(work_id, result)
        self._waiting_work.ended(work_id)

    async def _resolve_callers(self) -> None:
        """
        Resolve callers by the store: at once where this router does not look after their assignments.

        The others are looked for from their second look on: the message with a result may get lost.
        """
        waiting: dict[str, asyncio.Task[None]] = {}
        before: set[str] = set()
        try:
            while True:
                self._left_here.clear()
                await _until(self._left_here, CALLERS_S)
                waiting = {name: task for name, task in waiting.items() if not task.done()}
                here = self._callers.names()
                wanted, before = [*self._callers.elsewhere(), *(one for one in here if one in before)], set(here)
                for name in dict.fromkeys(wanted):
                    if name not in waiting:
                        work = self._background.run_logged("a result could not be read", self._resolve_caller, name)
                        waiting[name] = asyncio.get_running_loop().create_task(work)
        finally:
            for task in waiting.values():
                task.cancel()

    async def _resolve_caller(self, name: str) -> None:
        result = await self.submissions.result(name, CALLER_WAIT_S)
        if result is not None:
            self._callers.resolve(name, result)

    # ---- commands ---------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        """Obey commands of other processes, recent ones from before the start included."""
        control, latest = self._store.control, self._obeyed
        while True:
            try:
                latest = await control.wait(CONTROL_S, after=latest)
                commands = await control.poll("router", after=self._obeyed)
            except Exception:  # the claims say that the store is away
                await asyncio.sleep(STORE_PAUSE_S)
                continue
            cancels = [command for command in commands if command.name == "cancel"]
            self._obeyed = max([self._obeyed, *(command.sequence for command in commands)])
            run_logged = self._background.run_logged  # at once: the store writes what comes together in one step
            await asyncio.gather(*(run_logged("a job was not cancelled", self._cancel_command, one) for one in cancels))

    async def _cancel_command(self, command: Command) -> None:
        cancel = _cancels.decode(command.body)
        name = cancel.record_id
        if self.table.get(name) is None or command.at < self._started_at:
            item = await self.submissions.find(name)
            if item is None or any(one.what == "requeued" and one.at > command.at for one in item.history):
                return  # a person wanted it again since
            if self.table.get(name) is None and item.state is not WorkState.PENDING:
                await self._cancel_elsewhere(item, cancel)
                return
        await self._cancel(name, cancel.reason)

    async def _cancel_elsewhere(self, item: WorkItem, cancel: Cancel) -> None:
        """Cancel what this router does not look after, or remember it while another router holds it."""
        if await self._cancel(item.id, cancel.reason) or is_workers(item):
            return
        if item.state is WorkState.RUNNING and len(self._early_cancels) < MOST_EARLY:
            self._early_cancels[item.id] = self._clock.now(), cancel.reason

    async def _cancel_early_ones(self, names: list[str]) -> None:
        """Cancel those whose cancellation came before their claim."""
        for name in names:
            came_at, reason = self._early_cancels.pop(name, (-inf, None))
            if self._clock.now() - came_at < EARLY_S:
                await self._cancel(name, reason)

    # ---- claims -----------------------------------------------------------------------------------------------------

    def _left(self) -> None:
        """Look for what a local caller left in the store: its work, or its result where another router leads."""
        self._claim_now.set()
        if not self._serves:
            self._left_here.set()

    async def _claim_submissions(self) -> None:
        """Claim what other processes submitted, or what came when there was no room, as long as there is some now."""
        while True:
            self._claim_now.clear()
            room = min(BATCH, self.table.room(self._context.settings.rules.size)) if self._serves else 0
            before = len(self.table)
            failed = False
            only = None if self._takes_all else self._callers.elsewhere()
            if room > 0 and (only or self._takes_all):
                failed = await self._try_claim(room, only)
            self._store_may_have_more = room <= 0 or len(self.table) - before >= room
            if failed:
                await asyncio.sleep(STORE_PAUSE_S)
            elif room <= 0 or not self._takes_all:
                await _until(self._claim_now, CLAIM_S if self._takes_all else CALLERS_S)
            elif not self._store_may_have_more:
                await self._wait_for_submissions()

    async def _try_claim(self, n: int, only: list[str] | None) -> bool:
        """Whether the claim failed."""
        try:
            await self._claim(n, only)
        except Exception as error:
            self._errors.log(f"{self.router_id}: the store cannot be read", error, self._clock.now())
            return True
        return False

    async def _wait_for_submissions(self) -> None:
        """Wait until the store has something to claim, or a local caller left something there."""
        loop = asyncio.get_running_loop()
        left_here = loop.create_task(self._claim_now.wait())
        try:
            while not left_here.done():
                in_store = loop.create_task(self._store.work.wait(CLAIM_S, classes=(ROUTER,)))
                try:
                    await asyncio.wait([in_store, left_here], return_when=asyncio.FIRST_COMPLETED)
                    if in_store.done() and (in_store.exception() is not None or in_store.result()):
                        return  # the claim says what is wrong, if anything is
                finally:
                    in_store.cancel()
                    await asyncio.gather(in_store, return_exceptions=True)
        finally:
            left_here.cancel()

    async def _claim(self, n: int, only: list[str] | None = None) -> None:
        claim = self.submissions.claim(n, self.owner, only)
        claimed = await self.submissions.claims.finish(claim, lambda one: one.held)
        now = self._clock.now()
        for one in claimed:
            if one.waits is None:
                self.table.add(one, self.submissions.class_of(one.assignment), now)
        for one in claimed:
            if one.waits is not None:
                self._waiting_work.held[one.held.id] = one.held
                await self._background.start("waiting work was not looked at", self._look_at, one)
        if self._early_cancels:
            await self._cancel_early_ones([one.held.id for one in claimed if one.waits is None])
        if claimed:
            self._wake.set()

    async def _look_at(self, waiting: ClaimedSubmission) -> None:
        """Look at work that waits for other work, unless it was cancelled before that or meanwhile."""
        name = waiting.held.id
        if name not in self._early_cancels:
            await self._waiting_work.look(waiting)
        await self._cancel_early_ones([name] if name in self._early_cancels else [])
        self._waiting_work.held.pop(name, None)

    async def _recall_from_gone(self) -> None:
        """Bring work back that is queued for workers which are gone: then it is routed, expired or cancelled here."""
        while True:
            await asyncio.sleep(RECALL_S)
            if not self._leads:
                continue
            await self._background.run_logged("work of gone workers could not be recalled", self._recall_once)

    async def _recall_once(self) -> None:
        now = self._clock.now()
        async with asyncio.timeout(STORE_S):
            classes = await self._store.work.open_classes()
        workers = {name: worker_of(name) for name in classes}
        gone = [
            name
            for name, worker in workers.items()
            if worker and not self.health.keeps_queue(worker, pool_of(name), now)
        ]
        if gone:
            await self.submissions.recall(gone)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.renew_every)
            await self._background.run_logged("leases could not be renewed", self._renew_all)

    async def _renew_all(self) -> None:
        """Renew the claims of this router. A lost one has another router, or a worker whose ack was lost."""
        held = [one.held for one in self.table.all() if self._holds(one)]
        for lost in await self.submissions.claims.renew(held):
            pending = self.table.get(lost.id)
            if pending is None or pending.held != lost or not self._holds(pending):
                continue
            item = await self.submissions.find(lost.id)
            if pending.held != lost:
                continue  # claimed again meanwhile
            result = answer_of(item)
            if result is not None:
                self._completion.finish(pending, result)
            elif item is None or not is_workers(item):
                self.table.remove(pending)

    def _holds(self, pending: Pending) -> bool:
        """Whether this router's claim counts: a worker over the same store that has acked holds the record itself."""
        return not pending.acked or not self.health.shares_store(pending.worker_id or SHARED)

    # ---- dispatch ---------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        check_at = all_at = -inf
        while True:
            self._wake.clear()
            now = self._clock.now()
            if self.limits.leads is not self._leads and self._takes_all:
                what = "what runs under limits could not be counted"
                await self._background.run_logged(what, self.limits.take_lead, self._leads)
            if now >= check_at:
                check_at = now + CHECK_S
                await self._background.run_logged("pending work was not checked", self.dispatcher.look_after)
            if self.table.waiting:
                all_waiting = now >= all_at
                if all_waiting:
                    all_at = now + TICK_S
                what = "an assignment could not be sent"
                await self._background.run_logged(what, self.dispatcher.send_waiting, all_waiting)
            longest = TICK_S if self.table.waiting else CHECK_S
            await _until(self._wake, min(longest, self.limits.next_in(now)) if self.table.held else longest)

    def _after_ends(self) -> None:
        """Use the room that an end has made, here and at a worker."""
        if self.table.waiting:
            self._wake.set()
        if self._store_may_have_more:
            self._claim_now.set()


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, for at most `seconds`."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


async def submit_read(router: Router, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
    """`Router.submit` for what `read_assignment` has returned, which needs no second check."""
    return await router._submit(assignment, encode(assignment))
