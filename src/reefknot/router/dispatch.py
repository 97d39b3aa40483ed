"""
Where work goes out, and where it is looked after until its result is there.

    waiting → choose a worker → send → acked → … → result
       ▲            │ nobody can: it waits          │ worker gone, refused, silent
       └────────────┴───────────────────────────────┘

Silence is asked about: a result that was sent and lost is in the worker's store, and comes when the assignment is sent
again. What was called off, or whose deadline is over, is not sent any more. Work of a class that no worker has ends
after a while, and says which classes there are; as long as no worker is there at all, it waits.
"""

import asyncio
from math import inf

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ASSIGN,
    CANCEL,
    FLEET,
    Cancel,
    ExecResult,
    Fleet,
    ResultStatus,
    assign_subject,
    encode,
)
from reefknot.core.overload.admission import RejectReason
from reefknot.core.retry.backoff import draw, key_number
from reefknot.core.routing import Chosen, Lineup, Nobody, Why, WorkerHealth, choose_worker
from reefknot.core.work import WorkState
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Transport
from reefknot.ports.work_queue import WorkQueue
from reefknot.router.admission import HealthTable
from reefknot.router.completion import Ends
from reefknot.router.pending import Line, Pending, PendingTable
from reefknot.router.records import Records
from reefknot.router.settings import ACK_WITHIN_S, ASK_AGAIN_S, LATE_S, RouterSettings
from reefknot.router.submissions import ended_here
from reefknot.runtime import seeds as chance

PUBLISH_S = 10.0
FLEET_EVERY_S = 5.0
REFUSED_FOR_S = 1.0
"""How long a worker that refused is left alone when it did not say."""
UNKNOWN_FOR_S = 5.0
"""How long workers that do not know a step are left alone with it, while one that knew it is gone."""
SHARED = ""
"""The worker id of whoever listens on the shared subject."""
PASSED_BY = 64
"""Those that cannot go now and are passed by, before the rest has to wait for the next full look at the line."""
TOO_LATE = "the deadline passed while the assignment waited at the router"
NO_CLASS = "no worker has its class"

_results = msgspec.json.Decoder(ExecResult)


class Dispatcher:
    """Sends, and sends again."""

    def __init__(
        self,
        *,
        table: PendingTable,
        health: HealthTable,
        transport: Transport,
        work: WorkQueue,
        records: Records,
        clock: Clock,
        ends: Ends,
        seed: int | None,
        settings: RouterSettings,
    ) -> None:
        self._table = table
        self._health = health
        self._transport = transport
        self._work = work
        self._records = records
        self._clock = clock
        self._ends = ends
        self._seed = seed
        self._settings = settings
        self._draws = 0
        self._last: dict[str, str] = {}
        """Who was chosen last, of each class that a worker has."""
        self._told_fleet = (0, -inf)
        self._unknown: list[Pending] = []
        """Those whose step nobody who is there knows."""
        self._missing: dict[str, float] = {}
        """Classes that no worker has, and since when that is so with workers of other classes there."""

    # ---- out --------------------------------------------------------------------------------------------------------

    async def send_waiting(self, *, everyone: bool = True) -> None:
        """What waits here and somebody can take. Unless `everyone`, a line is left when many in it have to wait."""
        while self._table.off:
            pending = self._table.off[0]
            await self.end_cancelled(pending)
            self._table.off.remove(pending)
        now, wall_ms = self._clock.now(), int(self._clock.wall() * 1000)
        for pending in self._table.overdue(wall_ms):
            await self._look_at(pending, now, wall_ms)
        chosen: list[Pending] = []
        for name, line in self._table.lines():
            self._choose(name, line, now, inf if everyone else PASSED_BY, chosen)
        await self._publish_all(chosen)
        while self._unknown:
            await self._end_unknown(self._unknown.pop())

    async def _look_at(self, pending: Pending, now: float, wall_ms: int) -> None:
        """Its deadline is over. Somebody may have it done already: that one is asked a while longer, then its store."""
        assert pending.deadline_at is not None
        late = min((wall_ms - pending.deadline_at) / 1000, now - pending.since)
        if pending.sent_before and late < LATE_S:
            self._table.look_at(pending, wall_ms + max(1, int((LATE_S - late) * 1000)))
            return
        stored = await self._stored_result(pending) if pending.sent_before else None
        if stored is not None:
            self._ends.soon(pending, stored)
            return
        result = ended_here(pending.assignment, ResultStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, TOO_LATE)
        self._ends.soon(pending, result, self._records.too_late(pending))

    async def _stored_result(self, pending: Pending) -> ExecResult | None:
        """What a worker over this very store ended it with, should its result have been lost on the way."""
        async with asyncio.timeout(PUBLISH_S):
            item = await self._work.get(pending.id)
        if item is None or item.result is None or item.state in (WorkState.PENDING, WorkState.RUNNING):
            return None
        return _results.decode(item.result)

    def _choose(self, name: str, line: Line, now: float, passed_by: float, chosen: list[Pending]) -> None:
        """Workers for those who stand in this line, until nobody can take anything any more."""
        stay: list[Pending] = []
        workers: list[WorkerHealth] = []
        lineup: Lineup | None = None
        while len(stay) <= passed_by and (pending := line.next()) is not None:
            if pending.called_off is not None:
                self._table.off.append(pending)
                continue
            last = self._last.get(name, "")
            if lineup is None or pending.not_before:
                workers = self._health.of_class(name, self._table.unspoken)
                lineup = Lineup(workers, now, last)
            willing, number = workers, self._draw(pending)
            if pending.not_before:
                willing = [one for one in workers if pending.not_before.get(one.worker_id, -inf) <= now]
                choice = choose_worker(willing, number, now, last)
                lineup = None  # it does not know of this choice
            else:
                choice = lineup.choose(number)
            if isinstance(choice, Chosen):
                self._last[name] = choice.worker_id
            if isinstance(choice, Nobody) and self._may_share(pending, now):
                choice = Chosen(SHARED)
            if isinstance(choice, Chosen):
                self._goes_to(pending, choice, now, {"draw": number, "workers": len(workers), "willing": len(willing)})
                chosen.append(pending)
                continue
            if pending.not_before and self._is_unknown(pending, now):
                continue
            stay.append(pending)
            if choice.why is not Why.PASSED_OVER and len(willing) == len(workers):
                break
        for pending in stay:
            self._table.line_up(pending)

    def _may_share(self, pending: Pending, now: float) -> bool:
        return self._settings.shared_subject and pending.not_before.get(SHARED, -inf) <= now

    def _goes_to(self, pending: Pending, choice: Chosen, now: float, inputs: dict[str, object]) -> None:
        name = pending.resource_class
        if choice.probe:
            self._health.probed(choice.worker_id, name, now)
        self._table.sent(pending, choice.worker_id, now)
        pending.unsure_before, pending.sent_before = pending.sent_before, True
        status = self._health.status(choice.worker_id, name)
        inputs |= {"status": status and status.value, "route": pending.route}
        why = "probe" if choice.probe else "chosen"
        self._records.put(self._records.routing(pending, choice.worker_id, why, inputs))

    def _is_unknown(self, pending: Pending, now: float) -> bool:
        """Every worker that is there said that it does not know the step: then it ends."""
        everybody = self._health.everybody().get(pending.resource_class, {}).values()  # one that is paused may know it
        if not self._table.known_nowhere(pending, {one.worker_id for one in everybody if not one.gone(now)}):
            return False
        self._unknown.append(pending)
        return True

    async def _end_unknown(self, pending: Pending) -> None:
        """Unless somebody who knew the step has taken it in: that one may come back, and has it in this store."""
        if pending.sent_before and await self._is_kept_by_a_worker(pending):
            again_at = self._clock.now() + UNKNOWN_FOR_S
            pending.not_before = {worker: min(until, again_at) for worker, until in pending.not_before.items()}
            if self._table.get(pending.id) is pending and pending.worker_id is None:
                self._table.line_up(pending)
            return
        result = ended_here(pending.assignment, ResultStatus.ERROR, ErrorCode.invalid_input, pending.refusal)
        self._ends.soon(pending, result, self._records.routing(pending, None, RejectReason.UNKNOWN_JOB_TYPE.value))

    async def _is_kept_by_a_worker(self, pending: Pending) -> bool:
        async with asyncio.timeout(PUBLISH_S):
            item = await self._work.get(pending.id)
        return item is not None and item.state in (WorkState.PENDING, WorkState.RUNNING)

    async def _publish_all(self, chosen: list[Pending]) -> None:
        """What could not be tried because an earlier one failed waits here again."""
        sent = 0
        try:
            while sent < len(chosen):
                async with asyncio.timeout(PUBLISH_S):
                    for pending in chosen[sent : sent + PASSED_BY]:
                        sent += 1
                        await self._publish_assignment(pending)
        finally:
            for pending in chosen[sent:]:
                pending.sent_before = pending.unsure_before
                self._table.back(pending)

    async def _publish_assignment(self, pending: Pending) -> None:
        """With what is left of its deadline: the worker's clock for it begins when it takes it in."""
        body = pending.body
        if pending.deadline_at is not None or not body:
            body = encode(self._with_deadline(pending))
        subject = assign_subject(pending.worker_id) if pending.worker_id else ASSIGN
        name = f"{pending.id}/{pending.held.fence}/{pending.route}"
        await self._transport.publish(subject, body, message_id=name)

    def _with_deadline(self, pending: Pending) -> msgspec.Struct:
        if pending.deadline_at is None:
            return pending.assignment
        left = pending.deadline_at - int(self._clock.wall() * 1000)
        options = msgspec.structs.replace(pending.assignment.options, deadline_ms=max(1, left))
        return msgspec.structs.replace(pending.assignment, options=options)

    def _draw(self, pending: Pending) -> float:
        self._draws += 1
        seed = chance.process_seed if self._seed is None else self._seed
        return draw(seed, key_number(pending.id), self._draws)

    # ---- looking after ----------------------------------------------------------------------------------------------

    async def look_after(self) -> None:
        """Send again what was sent to a worker that is gone, and ask about what nobody spoke of for long."""
        now = self._clock.now()
        gone = self._health.gone(now)
        self._health.forget(now)
        for pending in self._table.sent_to(gone) if gone else ():
            self._back(pending, "its worker is gone")
        for pending in self._table.silent(unacked_since=now - ACK_WITHIN_S, acked_since=now - ASK_AGAIN_S):
            if pending.acked:
                await self.ask_again(pending)
            else:
                self._back(pending, "no ack arrived")
        self._end_without_class(now)
        await self._tell_fleet(now)

    def _end_without_class(self, now: float) -> None:
        """Work that no worker here could ever take, after it was waited for one that could."""
        there = [] if self._settings.shared_subject else self._health.classes(now)
        waiting = {name: line for name, line in self._table.lines() if there and not self._health.knows(name)}
        self._missing = {name: self._missing.get(name, now) for name in waiting}
        for name, line in waiting.items():
            for pending in line.everyone():
                waited = now - max(self._missing[name], pending.since)
                if waited >= self._settings.patience:
                    self._end_of_class(pending, there, waited)

    def _end_of_class(self, pending: Pending, there: list[str], waited: float) -> None:
        name = pending.resource_class
        message = (
            f"resource_class: no worker here has {name!r}, and none came within {waited:.0f} s; there are: "
            f"{', '.join(there)}. Start a worker with a pool {name!r} (worker.queue.v2.resource_pools), or hand it in "
            "again with one of these classes"
        )
        inputs = {"resource_class": name, "classes": there, "waited_s": round(waited, 3)}
        result = ended_here(pending.assignment, ResultStatus.ERROR, ErrorCode.resource_unavailable, message)
        self._ends.soon(pending, result, self._records.routing(pending, None, NO_CLASS, inputs))

    async def began_anew(self, worker_id: str) -> None:
        """A worker restarted: what it was sent it has in its store, or never saw; it may know other steps now."""
        for pending in self._table.everyone():
            if pending.worker_id != worker_id:
                pending.not_before.pop(worker_id, None)
            elif pending.acked:
                await self.ask_again(pending)
            else:
                self._back(pending, "its worker began anew")

    async def ask_again(self, pending: Pending) -> None:
        """The same worker has it. It answers with the result, if there is one."""
        self._table.asked_again(pending, self._clock.now())
        async with asyncio.timeout(PUBLISH_S):
            if pending.called_off is not None:
                await self._transport.publish(CANCEL, encode(Cancel(pending.id, pending.called_off)))
            await self._publish_assignment(pending)

    def _back(self, pending: Pending, why: str) -> None:
        self._records.put(self._records.back(pending, why))
        self._table.back(pending)

    async def end_cancelled(self, pending: Pending) -> None:
        """It is in nobody's hands. Should a worker that is gone still have it in this store, it is off there too."""
        reason = pending.called_off or "cancelled"
        async with asyncio.timeout(PUBLISH_S):
            await self._work.cancel(pending.id, reason=reason, who="router")
        code = ErrorCode.cancelled_by_user
        result = ended_here(pending.assignment, ResultStatus.CANCELLED, code, reason)
        await self._ends.now(pending, result, self._records.cancelled(pending.assignment, reason))

    async def tell_cancelled(self, assignment_id: str, reason: str) -> None:
        """To the worker that has it."""
        async with asyncio.timeout(PUBLISH_S):
            await self._transport.publish(CANCEL, encode(Cancel(assignment_id, reason)))

    async def _tell_fleet(self, now: float) -> None:
        workers = self._health.live(now)
        told, at = self._told_fleet
        if workers and (workers != told or now - at >= FLEET_EVERY_S):
            self._told_fleet = workers, now
            async with asyncio.timeout(PUBLISH_S):
                await self._transport.publish(FLEET, encode(Fleet(workers)))
