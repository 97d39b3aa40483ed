"""Worker retry policy, §5: the time budget over all attempts, and the four ways to end early."""

from __future__ import annotations

import asyncio

import pytest

import reefknot as rk
from reefknot.core.decide import Again, History, Stop, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import V2, StepError, Work, worker

BUDGET = V2.replace(max_attempts=10, time_budget=5.0)
NETWORK = Failure(ErrorCode.network_error, FailureType.TRANSIENT)


class SlowWork:
    """Executions that take the given seconds of virtual time and fail; `began` is when each one started."""

    def __init__(self, clock: VirtualClock, *seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._zero = clock.now()
        self.began: list[float] = []

    def __call__(self) -> None:
        self.began.append(self._clock.now() - self._zero)
        self._clock.advance(self._seconds[len(self.began) - 1])
        raise StepError(ErrorCode.network_error)


def test_5_1_elapsed_time_counts_executions_and_waits(virtual_time: VirtualClock) -> None:
    """1000 + 100, 800 + 200 and 1200 + 400 ms: the true sums are 1100, 2100 and 3700, so a fourth attempt begins."""
    work = SlowWork(virtual_time, 1.0, 0.8, 1.2, 1.2)

    outcome = worker(BUDGET).run(work)

    assert work.began == pytest.approx([0.0, 1.1, 2.1, 3.7])
    assert [record.elapsed for record in outcome.history] == pytest.approx([1.0, 1.9, 3.3, 4.9])
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4])


def test_5_1_a_wait_that_would_reach_the_budget_is_not_started(virtual_time: VirtualClock) -> None:
    """4.9 s are gone after the fourth attempt; 800 ms more would end beyond 5 s."""
    outcome = worker(BUDGET).run(SlowWork(virtual_time, 1.0, 0.8, 1.2, 1.2))

    assert outcome.reason is rk.Reason.BUDGET_SPENT
    assert outcome.attempts == 4
    assert outcome.elapsed == pytest.approx(4.9)
    assert outcome.history[-1].failure.code is ErrorCode.network_error
    assert isinstance(outcome.error, StepError)


def test_5_1_without_a_budget_the_same_work_goes_on(virtual_time: VirtualClock) -> None:
    """The control: it is the budget that ended it."""
    outcome = worker(BUDGET.replace(time_budget=None)).run(SlowWork(virtual_time, *[1.0] * 10))

    assert outcome.reason is rk.Reason.ATTEMPTS_SPENT
    assert outcome.elapsed > 5.0


def test_5_1_the_attempt_that_would_exceed_the_budget_is_cut_at_the_budget() -> None:
    """The fourth attempt begins at 3.7 s and has 1.3 s; it wants 2."""
    took = [1.0, 0.8, 1.2, 2.0]
    began: list[float] = []

    async def work() -> None:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(took[len(began) - 1])
        raise StepError(ErrorCode.network_error)

    async def main() -> tuple[rk.Outcome[None], float]:
        outcome = await worker(BUDGET).arun(work)
        return outcome, asyncio.get_running_loop().time()

    outcome, ended = rk.testing.run_virtual(main())

    assert began == pytest.approx([0.0, 1.1, 2.1, 3.7])
    assert ended == pytest.approx(5.0)
    assert isinstance(outcome.error, rk.DeadlineExceededError)
    assert outcome.reason is rk.Reason.BUDGET_SPENT
    assert outcome.history[-1].failure.code is ErrorCode.cancelled_by_timeout
    assert outcome.history[-2].failure.code is ErrorCode.network_error
    assert any("StepError: the step failed" in note for note in outcome.error.__notes__)


@pytest.mark.parametrize(
    ("elapsed", "goes_on"),
    [(1.1, True), (2.1, True), (3.7, True), (4.85, True), (4.9, False), (5.0, False), (7, False)],
)
def test_5_1_the_budget_is_for_all_attempts_not_for_each(elapsed: float, goes_on: bool) -> None:
    """A wait of 100 ms, whenever it begins; one that ends at the deadline itself is too late."""
    decision = decide(BUDGET, History(1, elapsed), NETWORK, 0.0)

    assert decision == (Again(0.1) if goes_on else Stop(rk.Reason.BUDGET_SPENT))


def test_5_2_1_a_spent_budget_ends_it_whatever_attempts_are_left() -> None:
    assert decide(BUDGET, History(2, 5.1), NETWORK, 0.0) == Stop(rk.Reason.BUDGET_SPENT)


def test_5_2_2_a_non_retryable_error_ends_it_whatever_is_left(virtual_time: VirtualClock) -> None:
    work = Work(StepError(ErrorCode.permission_denied))

    outcome = worker(BUDGET).run(work)

    assert (work.executions, outcome.reason, virtual_time.waits) == (1, rk.Reason.NOT_RETRYABLE, [])


def test_5_2_3_a_cancellation_ends_the_wait_at_once() -> None:
    """Cancelled 50 ms into the first wait of 100 ms: no second attempt, and no rest of the wait."""
    executions = 0

    async def work() -> None:
        nonlocal executions
        executions += 1
        raise StepError(ErrorCode.network_error)

    async def main() -> float:
        task = asyncio.create_task(worker(BUDGET).acall(work))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert rk.testing.run_virtual(main()) == pytest.approx(0.05)
    assert executions == 1


@pytest.mark.parametrize("ending", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_5_2_3_a_cancellation_inside_an_attempt_is_never_retried(
    virtual_time: VirtualClock, ending: type[BaseException]
) -> None:
    executions = 0

    def work() -> None:
        nonlocal executions
        executions += 1
        raise ending

    with pytest.raises(ending):
        rk.Retrier(BUDGET, on=lambda error: True).call(work)
    assert (executions, virtual_time.waits) == (1, [])


@pytest.mark.parametrize("attempts", [1, 2, 4, 6])
def test_5_2_4_the_last_attempt_ends_it(virtual_time: VirtualClock, attempts: int) -> None:
    """1 + 3 retries are four executions."""
    work = Work(StepError(ErrorCode.network_error))

    outcome = worker(V2.replace(max_attempts=attempts)).run(work)

    assert (work.executions, outcome.attempts) == (attempts, attempts)
    assert outcome.reason is rk.Reason.ATTEMPTS_SPENT
    assert len(virtual_time.waits) == attempts - 1
