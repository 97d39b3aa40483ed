"""
Worker retry policy, by its numbers: §2 (layers), §9.1 and §9.2 (what is accepted); through the library §1.2, §4.1 and
§5.1, the statuses, the waits and the budget of all attempts.

What a running worker does of §3.3 and §9 is in `test_spec1_worker.py`; the examples of §2 and §7 are in
`test_cli_policy.py`.

The document counts retries, a resolved policy counts executions: "max_attempts 2" there is `retries == 2` here (A1).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.core.failure import ErrorCode
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import V2, HttpError, StepError, Work, worker

SAMPLES = Path(__file__).with_name("samples")
SECTION_2_2 = (SAMPLES / "spec1-2.2-structure.json").read_text()


def book(text: str) -> rk.PolicyBook:
    return rk.PolicyBook.loads(text, format="json", name="worker.json")


def v2(section: dict[str, Any]) -> rk.PolicyBook:
    return book(json.dumps({"worker": {"retries": {"v2": section}}}))


def test_2_4_each_step_up_the_layers_is_heard() -> None:
    found = book(SECTION_2_2)

    assert found.resolve("block:http", http_status=429).retries == 3
    assert found.resolve("block:http", http_status=503).retries == 5
    assert found.resolve("block:other", http_status=503).retries == 5
    assert found.resolve("block:other", code="system_overload").retries == 3
    assert found.resolve("block:other", code="invalid_input").retries == 0
    assert found.resolve("block:other").retries == 3


def test_9_1_the_documents_configuration_says_what_the_defaults_say() -> None:
    """Default retryability rules match the design: writing them down changes nothing."""
    written, default = book(SECTION_2_2), rk.PolicyBook()

    for code in ErrorCode:
        assert written.resolve("block:x", code=code).retryable is default.resolve("block:x", code=code).retryable
    for status in range(400, 600):
        one, other = (found.resolve("block:x", http_status=status) for found in (written, default))
        assert one.retryable is other.retryable


def test_9_2_the_order_of_the_layers_is_right() -> None:
    """Each layer says another number; taking the top one away lets the next one speak."""
    section: dict[str, Any] = {
        "default_policy": {"max_attempts": 11},
        "error_classification": {"network_errors": {"max_attempts": 12}},
        "block_policies": {
            "http": {
                "max_attempts": 13,
                "error_overrides": {
                    "transient": {"max_attempts": 14},
                    "http_error": {"max_attempts": 15},
                    "503": {"max_attempts": 16},
                },
            }
        },
    }
    overrides = section["block_policies"]["http"]["error_overrides"]

    def retries(**request: Any) -> int:
        return v2(section).resolve("block:http", code="http_error", http_status=503, **request).retries

    assert retries(retry_count=17) == 17
    assert retries() == 16
    del overrides["503"]
    assert retries() == 15
    del overrides["http_error"]
    assert retries() == 14
    del overrides["transient"]
    assert retries() == 13
    del section["block_policies"]
    assert retries() == 12
    del section["error_classification"]
    assert retries() == 11
    del section["default_policy"]
    assert retries() == 3


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
