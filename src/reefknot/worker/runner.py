"""
One claimed piece of work in a slot: one attempt, and its report.

Reports go to the store in groups: what has ended by the time the store is free goes in together. What was done is
reported even while the worker ends: an effect that happened is not run again because its report was cut off. A report
that the store does not take is tried again, by itself, for as long as the lease lasts. Results are told when kept.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepResult, StepStatus, encode
from reefknot.core.retry.classify import classify
from reefknot.core.work import HandBack, Quarantine, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.execution import report
from reefknot.execution.journal import Journal
from reefknot.execution.limits import STORE_S, Limits
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Settlement, WorkQueue
from reefknot.worker import step_events as tell
from reefknot.worker.endings import Endings
from reefknot.worker.outbox import Outbox
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.results import EXPIRED, Envelope, envelopes, stand_in
from reefknot.worker.step import Report, Steps

BROKEN = "the worker failed inside"
UNREADABLE = "what was kept of it cannot be read"
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class Runner:
    """Runs what the pools of one worker have claimed."""

    def __init__(
        self,
        name: str,
        *,
        pool_of: Callable[[str], Pool],
        steps: Steps,
        endings: Endings,
        work: WorkQueue,
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        lease: float,
        limits: Limits,
    ) -> None:
        self._name = name
        self._pool_of = pool_of
        self._steps = steps
        self._endings = endings
        self._work = work
        self._journal = journal
        self._outbox = outbox
        self._clock = clock
        self._lease = lease
        self._limits = limits
        self._ended: list[_Ended] = []
        """Attempts that are over, on their way to the store."""
        self._busy = False
        self.reporting: set[asyncio.Task[None]] = set()
        """Reports that are being kept and told."""

    async def run(self, item: WorkItem) -> bool:
        """One attempt of one claimed item. Answers whether it tells how long a step takes."""
        pool = self._pool_of(item.resource_class)
        try:
            envelope = envelopes.decode(item.payload)
        except msgspec.DecodeError as error:
            envelope = stand_in(item)
            self._report(item, self._aside(item, envelope, f"{UNREADABLE}: {error}"), pool, envelope)
            return False
        try:
            outcome = await self._steps.attempt(item, envelope)
        except Exception as error:  # a mistake of ours: the assignment ends with it, and the worker goes on
            outcome = self._broken(item, envelope, error)
        self._report(item, outcome, pool, envelope)
        return _was_run(outcome)

    def _broken(self, item: WorkItem, envelope: Envelope, error: Exception) -> Report:
        text = report.printable(self._journal.safe(f"{type(error).__name__}: {error}"), most=300)
        report.logger().error("%s: attempting %s failed inside, %s: %s", self._name, item.id, _place_of(error), text)
        return self._aside(item, envelope, BROKEN)

    def _aside(self, item: WorkItem, envelope: Envelope, reason: str) -> Report:
        """Nobody could run it. It still gets its result, and is on record."""
        step = StepResult(StepStatus.ERROR, ErrorCode.internal_error, error_message=reason)
        assignment = envelope.assignment
        failure = classify(reason, code=ErrorCode.internal_error)
        event = tell.quarantined(assignment, self._clock.wall(), reason, failure)
        self._steps.counters.ended(ok=False, retried=item.attempts > 0)
        result = self._steps.result(assignment, step, retries_used=item.attempts)
        return Report(Quarantine(reason), (event,), result)

    def _report(self, item: WorkItem, outcome: Report, pool: Pool, envelope: Envelope) -> None:
        """Hand it in. From here on it does not depend on the slot any more."""
        settled, body = outcome.settled, None
        if outcome.result is not None:
            body = encode(self._endings.completed(outcome.result, pool, envelope))
            if isinstance(settled, WorkDone):
                settled = WorkDone(body.decode())
            elif isinstance(settled, WorkFailed | Quarantine):
                settled = msgspec.structs.replace(settled, result=body.decode())
        entries = tuple(self._journal.entries(outcome.events)) if outcome.events else ()
        self._ended.append(_Ended(item, Settlement(item.id, item.owner, item.fence, settled, entries), pool, body))
        if not self._busy:
            self._busy = True
            self._begin(self._keep_all())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.reporting.add(task)
        task.add_done_callback(self.reporting.discard)

    async def _keep_all(self) -> None:
        """Group by group, until nothing is left; then the last group's results are told here."""
        while True:
            group, self._ended = self._ended, []
            try:
                kept = await self._kept_together(group)
            except BaseException:
                self._busy = False  # the next report begins anew
                raise
            if not self._ended:
                self._busy = False
                await self._tell_all(group, kept)
                return
            self._begin(self._tell_all(group, kept))

    async def _kept_together(self, group: list["_Ended"]) -> list[bool | None]:
        """For each, whether its report was kept. None: the store did not say, and it goes on by itself."""
        try:
            with self._limits.within(STORE_S):
                kept: list[bool | None] = [*await self._work.settle([one.settlement for one in group])]
        except Exception as error:
            self._say_not_kept(group[0].item, error, more=len(group) - 1)
            for one in group:
                self._begin(self._keep_alone(one))
            return [None] * len(group)
        for one, ours in zip(group, kept, strict=True):
            self._settled(one, ours)
        return kept

    async def _keep_alone(self, one: "_Ended") -> None:
        """Until the store takes it, at most as long as the lease lasts."""
        ends, pause = self._clock.now() + self._lease, _FIRST_PAUSE
        kept = False
        while self._clock.now() + pause < ends:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)
            try:
                with self._limits.within(STORE_S):
                    (kept,) = await self._work.settle([one.settlement])
                break
            except Exception as error:
                self._say_not_kept(one.item, error)
        self._settled(one, kept)
        await self._tell_all([one], [kept])

    def _say_not_kept(self, item: WorkItem, error: Exception, more: int = 0) -> None:
        text = report.printable(f"{type(error).__name__}: {error}", most=300)
        others = f" and {more} more" if more else ""
        report.logger().error("%s: the report of %s%s was not kept (%s)", self._name, item.id, others, text)

    def _settled(self, one: "_Ended", kept: bool | None) -> None:
        one.pool.settled(one.item.id, one.item.fence)
        settled = one.settlement.settled
        if not kept:
            report.logger().info("%s: %s was taken away meanwhile; its report was refused", self._name, one.item.id)
        elif isinstance(settled, TryAgain | Snooze):
            self._wait_for(one.item, settled.due_at, one.pool)

    async def _tell_all(self, group: list["_Ended"], kept: list[bool | None]) -> None:
        for one, ours in zip(group, kept, strict=True):
            if not ours or one.body is None:
                continue
            try:
                await self._outbox.result(one.item.id, one.body, one.item.generation)
            except Exception as error:  # it is stored; whoever asks again gets it
                said = report.printable(str(error), most=300)
                report.logger().error("%s: the result of %s was not sent (%s)", self._name, one.item.id, said)

    def _wait_for(self, item: WorkItem, due_at: int, pool: Pool) -> None:
        place = self._endings.place(item)
        due = self._clock.now() + due_at / 1000 - self._clock.wall()
        pool.put(Queued(place.id, place.priority, place.since, due, place.expires))

    async def empty_hands(self, pools: list[Pool]) -> None:
        """Give back what was claimed ahead and no slot has begun."""
        held = [(pool, one) for pool in pools for one in pool.empty_hand()]
        if held:
            with self._limits.within(STORE_S):
                await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for _, one in held])
        for pool, one in held:
            pool.settled(one.id, one.fence)

    async def hand_back(self, pools: list[Pool]) -> int:
        """Let what is reporting finish, stop the rest, and give it back. Answers how many went back."""
        await self._reported()
        tasks = [task for pool in pools for task in pool.running.values()]
        held = [one for pool in pools for one in pool.let_go()]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reported()  # an attempt that ended in the very moment it was stopped
        if not held:
            return 0
        with self._limits.within(STORE_S):
            back = await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for one in held])
        for pool in pools:
            pool.held.clear()
        return sum(back)

    async def _reported(self) -> None:
        ends = self._clock.now() + STORE_S
        while self.reporting and self._clock.now() < ends:
            await asyncio.wait(set(self.reporting), timeout=ends - self._clock.now())


class _Ended(Struct, frozen=True):
    """An attempt that is over, and what is to be kept and told of it."""

    item: WorkItem
    settlement: Settlement
    pool: Pool
    body: bytes | None


def _place_of(error: Exception) -> str:
    """Where it was raised, without anything of what was in the frames."""
    frames = extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nobody knows where"


def _was_run(outcome: Report) -> bool:
    """Whether it tells how long a step takes. What came too late or was put off took no time."""
    settled = outcome.settled
    return not isinstance(settled, Snooze) and getattr(settled, "reason", "") != EXPIRED
