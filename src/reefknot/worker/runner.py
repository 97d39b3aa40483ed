"""
One claimed piece of work in a slot: one attempt, settled, told.

What was done is reported even while the worker ends: an effect that happened is not run again because its report was
cut off. A report that the store does not take is tried again for as long as the lease lasts.
"""

import asyncio
from collections.abc import Callable

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepResult, StepStatus, encode
from reefknot.core.overload.admission import Degradation
from reefknot.core.work import HandBack, Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.execution import report
from reefknot.execution.journal import Journal
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Settlement, WorkQueue
from reefknot.worker.endings import Endings
from reefknot.worker.outbox import Outbox
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.results import EXPIRED, Envelope, envelopes
from reefknot.worker.step import Report, Steps

STORE_S = 30.0
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
        self.reporting: set[asyncio.Task[None]] = set()
        """Attempts that are over and whose report is on its way."""

    async def run(self, item: WorkItem) -> None:
        """One attempt of one claimed item."""
        pool = self._pool_of(item.resource_class)
        try:
            envelope = envelopes.decode(item.payload)
        except msgspec.DecodeError as error:
            await self._settled(item, Quarantine(f"what was kept of it cannot be read: {error}"), Report(HandBack()))
            return
        change = Degradation(envelope.skip_retries, envelope.timeout_factor, envelope.skip_circuit_breaker)
        try:
            outcome = await self._steps.attempt(item, envelope.assignment, change)
        except Exception as error:  # a mistake of ours: the assignment ends with it, and the worker goes on
            outcome = self._broken(item, envelope, error)
        reporting = asyncio.get_running_loop().create_task(self._report(item, outcome, pool, envelope))
        self.reporting.add(reporting)
        reporting.add_done_callback(self.reporting.discard)
        await asyncio.shield(reporting)
        if _was_run(outcome):
            pool.served(item.id)

    def _broken(self, item: WorkItem, envelope: Envelope, error: Exception) -> Report:
        text = f"{type(error).__name__}: {error}"
        report.logger().error("%s: attempting %s failed inside: %s", self._name, item.id, text, exc_info=error)
        step = StepResult(StepStatus.ERROR, ErrorCode.internal_error, error_message="the worker failed inside")
        result = self._steps.result(envelope.assignment, step, retries_used=item.attempts)
        return Report(Quarantine("the worker failed inside"), (), result)

    async def _report(self, item: WorkItem, outcome: Report, pool: Pool, envelope: Envelope) -> None:
        settled = outcome.settled
        result = None if outcome.result is None else self._endings.completed(outcome.result, pool, envelope)
        if result is not None and isinstance(settled, WorkDone | WorkFailed | Quarantine):
            settled = msgspec.structs.replace(settled, result=encode(result).decode())
        if not await self._settled(item, settled, outcome):
            report.logger().info("%s: %s was taken away meanwhile; its report was refused", self._name, item.id)
            return
        if result is not None:
            try:
                await self._outbox.result(result, item.generation)
            except Exception as error:  # it is stored; whoever asks again gets it
                said = report.printable(str(error), most=300)
                report.logger().error("%s: the result of %s was not sent (%s)", self._name, item.id, said)
        elif isinstance(settled, TryAgain | Snooze):
            self._wait_for(item, settled.due_at, pool)

    async def _settled(self, item: WorkItem, settled: Settled, outcome: Report) -> bool:
        """Report to the store. False when somebody else has it by now, or the store stayed away for too long."""
        settlement = Settlement(item.id, item.owner, item.fence, settled, tuple(self._journal.entries(outcome.events)))
        ends, pause = self._clock.now() + self._lease, _FIRST_PAUSE
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    (kept,) = await self._work.settle([settlement])
                return kept
            except Exception as error:
                text = report.printable(f"{type(error).__name__}: {error}", most=300)
                report.logger().error("%s: the report of %s was not kept (%s)", self._name, item.id, text)
                if self._clock.now() + pause >= ends:
                    return False
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _wait_for(self, item: WorkItem, due_at: int, pool: Pool) -> None:
        place = self._endings.place(item)
        due = self._clock.now() + due_at / 1000 - self._clock.wall()
        pool.put(Queued(place.id, place.priority, place.since, due, place.expires))

    async def hand_back(self, pools: list[Pool]) -> int:
        """Let what is reporting finish, stop the rest, and give it back. Answers how many went back."""
        if self.reporting:
            await asyncio.wait(set(self.reporting), timeout=STORE_S)
        held = [one for pool in pools for one in pool.held.values()]
        tasks = [task for pool in pools for task in pool.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.reporting:  # an attempt that ended in the very moment it was stopped
            await asyncio.wait(set(self.reporting), timeout=STORE_S)
        if not held:
            return 0
        async with asyncio.timeout(STORE_S):
            back = await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for one in held])
        return sum(back)


def _was_run(outcome: Report) -> bool:
    """Whether it tells how long a step takes. What came too late or was put off took no time."""
    settled = outcome.settled
    return not isinstance(settled, Snooze) and getattr(settled, "reason", "") != EXPIRED
