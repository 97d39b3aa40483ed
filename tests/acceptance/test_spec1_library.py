"""Worker retry policy, §1.2, §4.1 and §5.1, through the library: statuses, waits, and the budget of all attempts."""

from __future__ import annotations

import asyncio

import pytest

import reefknot as rk
from reefknot.core.failure import ErrorCode
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import V2, HttpError, StepError, Work, worker

BUDGET = V2.replace(max_attempts=10, time_budget=5.0)


def test_1_2_of_all_4xx_408_and_429_are_retried_and_every_5xx_by_a_step_as_by_a_client(no_wait: VirtualClock) -> None:
    by_code = {
        s
        for s in range(400, 600)
        if worker(V2).run(Work(StepError(ErrorCode.http_error, http_status=s))).history[0].delay is not None
    }
    by_status = {s for s in range(400, 600) if rk.Retrier(V2).run(Work(HttpError(s))).history[0].delay is not None}

    assert by_code == by_status == {408, 429, *range(500, 600)}


def test_4_1_a_call_that_keeps_failing_waits_exactly_these_delays(virtual_time: VirtualClock) -> None:
    outcome = rk.Retrier(V2.replace(max_attempts=11)).run(Work(ConnectionError()))

    assert outcome.attempts == 11
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])


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


def test_5_1_elapsed_time_counts_executions_and_waits_and_a_wait_that_would_reach_the_budget_is_not_started(
    virtual_time: VirtualClock,
) -> None:
    """
    1000 + 100, 800 + 200 and 1200 + 400 ms: the true sums are 1100, 2100 and 3700, so a fourth attempt begins. After it
    4.9 s are gone, and 800 ms more would end beyond 5 s.
    """
    work = SlowWork(virtual_time, 1.0, 0.8, 1.2, 1.2)

    outcome = worker(BUDGET).run(work)

    assert work.began == pytest.approx([0.0, 1.1, 2.1, 3.7])
    assert [record.elapsed for record in outcome.history] == pytest.approx([1.0, 1.9, 3.3, 4.9])
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4])
    assert outcome.reason is rk.Reason.BUDGET_SPENT
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
