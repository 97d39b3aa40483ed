"""
Dispatch: choose a worker, send, ask again, give up.

    waiting → choose a worker → send → acked → … → result
       ▲            │ none can: it waits            │ worker gone, refused, silent
       └────────────┴───────────────────────────────┘

A result whose message was lost is found in the store. What was cancelled is not sent any more, and what has not ended
by itself soon after its deadline is ended here, wherever it is. Work of a type that no worker knows, or of a class that
none has, goes to quarantine after a while: it was accepted, and the process that can run it may only be late. As long
as there is no worker at all, or a silent one whose process exists has not answered, everything waits.
"""

import asyncio
from math import inf
from shlex import quote

import msgspec

from reefknot.audit.assignments import ended_event
from reefknot.audit.model.event import Event
from reefknot.core.backoff import draw, key_number
from reefknot.core.failure import ErrorCode
from reefknot.queue.execution.tracing import record_cancelled
from reefknot.queue.model.messages import (
    ASSIGN,
    CANCEL,
    DEADLINE_AT,
    FLEET,
    LIMITED,
    Cancel,
    ExecAssignment,
    Fleet,
    ResultStatus,
    assign_subject,
    encode,
)
from reefknot.queue.model.results import UNKNOWN_TYPE, answer_of, overdue_reason, unrun_result
from reefknot.queue.model.routing import NO_RUN, Chosen, Nobody, RoutingInputs, Run, Why, WorkerHealth, WorkerRanking
from reefknot.queue.model.submission import EXPIRED
from reefknot.queue.model.work import WorkItem, is_over, is_workers
from reefknot.queue.router.completion import Completion
from reefknot.queue.router.health import HealthTable
from reefknot.queue.router.limits import RouterLimits
from reefknot.queue.router.pending import Pending, RouterContext, WaitingLine
from reefknot.queue.router.settings import ACK_WITHIN_S, ASK_AGAIN_S, LATE_S
from reefknot.runtime import seeds

PUBLISH_S = 10.0
PUBLISH_BATCH = 64
"""Assignments that are published within one `PUBLISH_S`."""
FLEET_EVERY_S = 5.0
REFUSED_FOR_S = 1.0
"""How long a worker that refused is not asked, when its ack did not say."""
UNKNOWN_FOR_S = 5.0
"""How long workers that do not know a step are not asked, while one that knew it is gone."""
SHARED = ""
"""The worker id of those that listen on the shared subject."""
PASSED_BY = 64
"""How many that cannot go now are passed by, before the rest waits for the next full pass."""
TOO_LATE = "the deadline passed while the assignment waited at the router"
NO_CLASS = "no worker has its class"


class Dispatcher:
    """Sends assignments to workers, and sends them again."""

    def __init__(
        self, context: RouterContext, health: HealthTable, completion: Completion, limits: RouterLimits
    ) -> None:
        self._context = context
        self._limits = limits
        self._table = context.table
        self._health = health
        self._transport = context.transport
        self._work = context.work
        self._clock = context.clock
        self._completion = completion
        self._settings = context.settings
        self._draws = 0
        self._runs: dict[str, Run] = {}
        """By class: the worker that was chosen last, and how many it has got in a row."""
        self._published_fleet = (0, -inf)
        self._unknown: list[Pending] = []
        """Assignments whose type no live worker knows, and whose wait for one is over."""
        self._missing: dict[str, float] = {}
        """Classes that no worker has, and since when, while there are workers of other classes."""

    # ---- out --------------------------------------------------------------------------------------------------------

    async def send_waiting(self, all_waiting: bool = True) -> None:
        """Send what a worker can take. Unless `all_waiting`, a queue is left once many in it have to wait."""
        while self._table.cancelled:
            pending = self._table.cancelled[0]
            await self.end_cancelled(pending)
            self._table.cancelled.remove(pending)
        await self._end_all_overdue()
        now = self._clock.now()
        if self._limits.is_on:
            self._limits.release(now)
        chosen: list[Pending] = []
        for name, line in self._table.lines():
            self._choose(name, line, now, inf if all_waiting else PASSED_BY, chosen)
        await self._publish_all(chosen)
        while self._unknown:
            await self._quarantine_unknown(self._unknown.pop())

    async def _end_all_overdue(self) -> None:
        now, wall_ms = self._clock.now(), int(self._clock.wall() * 1000)
        for pending in self._table.overdue(wall_ms):
            await self._end_overdue(pending, now, wall_ms)

    async def _end_overdue(self, pending: Pending, now: float, wall_ms: int) -> None:
        """End an assignment whose deadline has passed. One that a worker may have in hand gets a moment longer."""
        assert pending.deadline_at is not None
        if pending.sent_before:
            late = min((wall_ms - pending.deadline_at) / 1000, now - pending.since)
            if late < LATE_S:
                self._table.check_deadline_at(pending, wall_ms + max(1, int((LATE_S - late) * 1000)))
                return
            self._table.check_deadline_at(pending, wall_ms + 1000)  # should the store not answer now
            item = await self._stored(pending)
            result = answer_of(item)
            if result is not None:
                self._completion.finish(pending, result)
                return
            worker_id = pending.worker_id
            if item is not None and is_workers(item):
                await self._end_in_store(pending, overdue_reason(item), self._context.expired(pending))
            else:
                self._end_expired(pending)
            if worker_id is not None:  # whether it can hear that or not
                await self.send_cancel(pending.assignment, EXPIRED)
            return
        self._end_expired(pending)

    def _end_expired(self, pending: Pending) -> None:
        result = unrun_result(pending.assignment, ResultStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, TOO_LATE)
        self._completion.end(pending, result, self._context.expired(pending))

    async def _stored(self, pending: Pending) -> WorkItem | None:
        async with asyncio.timeout(PUBLISH_S):
            return await self._work.get(pending.id)

    def _choose(self, name: str, line: WaitingLine, now: float, passed_by: float, chosen: list[Pending]) -> None:
        """Choose workers for the assignments of a queue, until no worker can take another."""
        stay: list[Pending] = []
        workers: list[WorkerHealth] = []
        ranking: WorkerRanking | None = None
        while len(stay) <= passed_by and (pending := line.next()) is not None:
            if pending.cancel_reason is not None:
                self._table.cancelled.append(pending)
                continue
            if self._is_held_up(pending):
                stay.append(pending)
                continue
            if self._limits.is_on and (key := self._limits.held_by(pending, now)):
                self._table.hold(pending, key)
                continue
            run = self._runs.get(name, NO_RUN)
            if ranking is None or pending.refused_until:
                workers, together = self._health.of_class(name, self._table.unacked), self._health.together(name)
                room = run.room(together, self._table.under_way[run.worker_id, name], now)
                ranking = WorkerRanking(workers, now, run.worker_id, together=together, run=run, room=room)
            willing, asked = workers, ranking
            if pending.refused_until:
                willing = [one for one in workers if pending.refused_until.get(one.worker_id, -inf) <= now]
                asked, ranking = (
                    WorkerRanking(willing, now, run.worker_id),
                    None,
                )  # the other one does not count this choice
            number = self._draw(pending) if asked.needs_draw else None
            route = pending.route + 1
            inputs = asked.inputs(workers=len(workers), willing=len(willing), draw=number, route=route)
            choice = asked.choose(number or 0.0)
            if isinstance(choice, Chosen):
                self._runs[name] = run.after(choice, now, is_next=inputs.together > 0)
            if isinstance(choice, Nobody) and self._may_share(pending, now):
                choice = Chosen(SHARED)
            if isinstance(choice, Chosen):
                self._assign(pending, choice, now, inputs)
                chosen.append(pending)
                continue
            if pending.refused_until and self._is_unknown(pending, now):
                continue
            stay.append(pending)
            if choice.why is not Why.PASSED_OVER and len(willing) == len(workers):
                break
        for pending in stay:
            self._table.line_up(pending)

    def _is_held_up(self, pending: Pending) -> bool:
        """
        Whether it waits for another tenant's assignment of the same id, because an ack would fit both.

        The result of a worker with another store may lack the tenant too; the request's id then says which one is
        meant.
        """
        assignment = pending.assignment
        others = self._table.out(assignment.assignment_id)
        return bool(others) and any(
            not one.acked
            or (
                one.assignment.request_id == assignment.request_id
                and not self._health.shares_store(one.worker_id or SHARED)
            )
            for one in others
        )

    def _may_share(self, pending: Pending, now: float) -> bool:
        return self._settings.shared_subject and pending.refused_until.get(SHARED, -inf) <= now

    def _assign(self, pending: Pending, choice: Chosen, now: float, inputs: RoutingInputs) -> None:
        name = pending.resource_class
        if choice.probe:
            self._health.probed(choice.worker_id, name, now)
        self._table.sent(pending, choice.worker_id, now)
        if self._limits.is_on:
            self._limits.grant(pending, now)
        pending.maybe_held_before_send, pending.sent_before = pending.sent_before, True
        why = "probe" if choice.probe else "chosen"
        self._context.journal.write_soon(self._context.routing(pending, choice.worker_id, why, inputs.recorded()))

    def _is_unknown(self, pending: Pending, now: float) -> bool:
        """Whether no worker that is there has known the type for as long as the router is patient."""
        if not self._table.known_nowhere(pending, self._health.may_know(pending.resource_class, now)):
            pending.unknown_since = None
            return False
        if pending.unknown_since is None:
            pending.unknown_since = now
        if now - pending.unknown_since < self._settings.patience:
            return False
        self._unknown.append(pending)
        return True

    async def _quarantine_unknown(self, pending: Pending) -> None:
        """Quarantine an assignment of an unknown type, unless a worker that knew it had it and may come back."""
        item = await self._stored(pending) if pending.sent_before else None
        if pending.was_accepted or (item is not None and is_workers(item) and not is_over(item)):
            again_at = self._clock.now() + UNKNOWN_FOR_S
            pending.refused_until = {worker: min(until, again_at) for worker, until in pending.refused_until.items()}
            if self._table.get(pending.id) is pending and pending.worker_id is None:
                self._table.line_up(pending)
            return
        message = (
            f"{pending.refusal}. No worker that knows it came within {self._settings.patience:g} s, so it is in "
            f"quarantine. Start a worker with the module of this step (--module), then: {_requeue_command(pending)}"
        )
        result = unrun_result(pending.assignment, ResultStatus.ERROR, ErrorCode.invalid_input, message)
        self._completion.set_aside(pending, result, UNKNOWN_TYPE)

    async def _publish_all(self, chosen: list[Pending]) -> None:
        """Publish the chosen; those after a failed one wait here again."""
        sent = 0
        try:
            while sent < len(chosen):
                async with asyncio.timeout(PUBLISH_S):
                    for pending in chosen[sent : sent + PUBLISH_BATCH]:
                        sent += 1
                        await self._publish_assignment(pending)
        finally:
            for pending in chosen[sent:]:
                pending.sent_before = pending.maybe_held_before_send
                self._table.back(pending)

    async def _publish_assignment(self, pending: Pending) -> None:
        """
        Send it with the time left to its deadline, and with the deadline by the worker's own clock.

        The worker's count begins when it accepts the assignment; by its clock it can tell what passed on the way.
        """
        body, headers = pending.body, dict[str, str]()
        if pending.deadline_at is not None or not body:
            body = encode(self._with_deadline(pending))
        if pending.deadline_at is not None:
            ahead_ms = self._health.ahead_ms(pending.worker_id or SHARED)
            if ahead_ms is not None:
                headers[DEADLINE_AT] = str(pending.deadline_at + ahead_ms)
        if pending.grant is not None:
            headers[LIMITED] = "1"
        if pending.assignment.correlation is not None and (parent := pending.assignment.traceparent) is not None:
            headers["traceparent"] = parent  # also in the body; as a header workers of others understand it
            headers["trace_id"] = pending.assignment.trace_id or ""  # which otherwise would follow from it
        subject = assign_subject(pending.worker_id) if pending.worker_id else ASSIGN
        name = f"{pending.id}/{pending.held.fence}/{pending.route}"
        await self._transport.publish(subject, body, headers=headers or None, message_id=name)

    def _with_deadline(self, pending: Pending) -> msgspec.Struct:
        if pending.deadline_at is None:
            return pending.assignment
        left = pending.deadline_at - int(self._clock.wall() * 1000)
        options = msgspec.structs.replace(pending.assignment.options, deadline_ms=max(1, left))
        return msgspec.structs.replace(pending.assignment, options=options)

    def _draw(self, pending: Pending) -> float:
        self._draws += 1
        seed = seeds.process_seed if self._context.seed is None else self._context.seed
        return draw(seed, key_number(pending.id), self._draws)

    # ---- looking after ----------------------------------------------------------------------------------------------

    async def look_after(self) -> None:
        """Requeue what was sent to a worker that is gone, and ask again where there was no news for long."""
        now = self._clock.now()
        gone = self._health.gone(now)
        self._health.forget(now)
        for pending in self._table.sent_to(gone) if gone else ():
            self._back(pending, "its worker is gone")
        for pending in self._table.silent(unacked_since=now - ACK_WITHIN_S, acked_since=now - ASK_AGAIN_S):
            if pending.acked:
                await self._check_acked(pending)
            else:
                self._back(pending, "no ack arrived")
        await self._end_all_overdue()
        await self._limits.look_after(now)
        self._quarantine_without_class(now)
        await self._publish_fleet(now)

    async def _check_acked(self, pending: Pending) -> None:
        """Look for a result whose message was lost: in the store, or at a worker that has its own."""
        item = await self._stored(pending)
        result = answer_of(item)
        if result is not None:
            self._completion.finish(pending, result)
        elif item is not None and is_workers(item):
            self._table.asked_again(pending, self._clock.now())
        else:
            await self.ask_again(pending)

    def _quarantine_without_class(self, now: float) -> None:
        """Quarantine work of a class that no worker has, after the router's patience."""
        there = [] if self._settings.shared_subject else self._health.classes(now)
        waiting = {name: line for name, line in self._table.lines() if there and not self._health.knows(name)}
        self._missing = {name: self._missing.get(name, now) for name in waiting}
        for name, line in waiting.items():
            for pending in line.all():
                waited = now - max(self._missing[name], pending.since)
                if waited >= self._settings.patience:
                    self._quarantine_of_class(pending, there, waited)

    def _quarantine_of_class(self, pending: Pending, there: list[str], waited: float) -> None:
        name = pending.resource_class
        message = (
            f"resource_class: no worker here has {name!r}, and none came within {waited:.0f} s; there are: "
            f"{', '.join(there)}. It is in quarantine. Start a worker with a pool {name!r} "
            f"(worker.queue.v2.resource_pools), then: {_requeue_command(pending)}"
        )
        inputs = {"resource_class": name, "classes": there, "waited_s": round(waited, 3)}
        result = unrun_result(pending.assignment, ResultStatus.ERROR, ErrorCode.resource_unavailable, message)
        self._context.journal.write_soon(self._context.routing(pending, None, NO_CLASS, inputs))
        self._completion.set_aside(pending, result, NO_CLASS)

    async def worker_is_back(self, worker_id: str, how: str) -> None:
        """Ask a worker that restarted or resumed again for what it accepted; requeue the rest. It may know other steps
        now."""
        for pending in self._table.all():
            if pending.worker_id != worker_id:
                pending.refused_until.pop(worker_id, None)
            elif pending.acked:
                await self.ask_again(pending)
            else:
                self._back(pending, f"its worker {how}")

    async def ask_again(self, pending: Pending) -> None:
        """Send it to the same worker again, which answers with the result, if there is one."""
        self._table.asked_again(pending, self._clock.now())
        async with asyncio.timeout(PUBLISH_S):
            if pending.cancel_reason is not None:
                await self._publish_cancel(pending.assignment, pending.cancel_reason)
            await self._publish_assignment(pending)

    def _back(self, pending: Pending, why: str) -> None:
        self._context.journal.write_soon(self._context.requeued(pending, why))
        self._table.back(pending)

    async def end_cancelled(self, pending: Pending) -> None:
        """Cancel an assignment that no live worker has. Its record may still be queued for one that is gone."""
        reason = pending.cancel_reason or "cancelled"
        await self._end_in_store(pending, reason, self._context.cancelled(pending.assignment, reason))

    async def _end_in_store(self, pending: Pending, reason: str, event: Event) -> None:
        """End an assignment, whichever process holds its record, and give its caller the result."""
        async with asyncio.timeout(PUBLISH_S):
            item = await self._work.get(pending.id)
            ended = [] if item is None else [ended_event(item, self._clock.wall(), cancelled=reason)]
            entries = self._context.journal.entries([event, *ended])
            is_ours = await self._work.cancel(pending.id, reason=reason, who="router", events=entries)
            item = await self._work.get(pending.id)
        result = answer_of(item)
        if item is not None and result is not None:
            if is_ours:
                record_cancelled(item, result)
            self._completion.finish(pending, result)

    async def send_cancel(self, assignment: ExecAssignment, reason: str) -> None:
        """Tell the worker that has it."""
        async with asyncio.timeout(PUBLISH_S):
            await self._publish_cancel(assignment, reason)

    async def _publish_cancel(self, assignment: ExecAssignment, reason: str) -> None:
        cancel = Cancel(assignment.assignment_id, reason, assignment.tenant_id)
        await self._transport.publish(CANCEL, encode(cancel))

    async def _publish_fleet(self, now: float) -> None:
        workers = self._health.live(now)
        published, at = self._published_fleet
        if workers and (workers != published or now - at >= FLEET_EVERY_S):
            self._published_fleet = workers, now
            async with asyncio.timeout(PUBLISH_S):
                await self._transport.publish(FLEET, encode(Fleet(workers)))


def _requeue_command(pending: Pending) -> str:
    assignment = pending.assignment
    tenant = f" --tenant {quote(assignment.tenant_id)}" if assignment.tenant_id else ""
    return f"reefknot quarantine requeue {quote(assignment.assignment_id)}{tenant}"
