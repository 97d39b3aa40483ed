"""
Worker retry policy: the acceptance list of §9, §2 and, through the library, §1.2, §4.1 and §5.1, by their numbers.

The document counts retries, a resolved policy counts executions: "max_attempts 2" there is `retries == 2` here (A1).
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.audit.model.event import RetryAttempt
from reefknot.core.failure import ErrorCode
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import ResultStatus, StepResult, StepStatus
from reefknot.queue.worker.settings import WorkerSettings, settings_from
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import V2, HttpError, StepError, Work, worker
from tests.workshop import REFUSED, Shop, Step, http, with_shop, work

SAMPLES = Path(__file__).parent / "samples"
MINIMAL, HTTP, CATEGORY = "spec1-7.1-minimal.json", "spec1-7.2-http.json", "spec1-7.3-category.json"


def configured(sample: str | None, *, environ: dict[str, str] | None = None, forgiving: bool = False) -> WorkerSettings:
    named = None if sample is None else str(SAMPLES / sample)
    loaded = load_settings(named, environ=environ or {}, cwd=SAMPLES, forgiving=forgiving)
    return settings_from(
        loaded.configuration, loaded.book, retries_gate=loaded.retries_gate, queue_gate=loaded.queue_gate
    )


def failed(code: ErrorCode) -> StepResult:
    return StepResult(StepStatus.ERROR, code, error_message="it failed")


def check(
    settings: WorkerSettings, outcome: Any, expected: int, *, job: str = "test.step", **options: Any
) -> list[RetryAttempt]:
    """One assignment that fails runs so often; the retries on record."""
    found: list[RetryAttempt] = []

    async def story(shop: Shop) -> None:
        step = Step(outcome, name=job)
        await shop.worker("w1", step, settings=settings)
        await shop.send(work("a", job=job, timeout_ms=10_000_000, **options))
        await asyncio.sleep(1_000)
        assert shop.result("a").status is not ResultStatus.SUCCESS
        assert len(step.began) == expected
        found.extend(await shop.events(RetryAttempt))  # type: ignore[arg-type]

    with_shop(story)
    return found


RETRIED = {"network_error", "connection_timeout", "http_error", "resource_unavailable", "system_overload"}


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.none], ids=lambda code: code.name)
def test_9_1_1_and_9_1_4_codes_are_retried_as_the_design_says(code: ErrorCode) -> None:
    check(configured(MINIMAL), failed(code), 4 if code.name in RETRIED else 1)


@pytest.mark.parametrize(
    ("status", "again"),
    [(400, False), (401, False), (403, False), (404, False), (408, True), (418, False), (429, True)]
    + [(status, True) for status in (500, 502, 503, 504, 507)],
)
def test_9_1_2_statuses_are_retried_as_the_design_says(status: int, again: bool) -> None:
    check(configured(MINIMAL), http(status), 4 if again else 1, job="http.request")


@pytest.mark.parametrize(
    ("code", "ran"),
    [("execution_failed", 3), ("quota_exceeded", 3), ("internal_error", 1), ("resource_unavailable", 3)],
)
def test_9_1_3_and_9_2_2_a_code_is_made_retryable_and_a_category_counted_by_configuration(code: str, ran: int) -> None:
    check(configured(CATEGORY), failed(ErrorCode[code]), ran)


def test_9_2_1_the_global_default() -> None:
    retries = check(configured(MINIMAL), REFUSED, 4)
    assert {(one.decision.policy.base_delay, one.decision.policy.max_delay) for one in retries} == {(0.1, 30.0)}
    assert {one.decision.policy.jitter for one in retries} == {"full"}


def test_9_2_3_a_block_and_its_statuses() -> None:
    limited = check(configured(HTTP), http(429), 4, job="http.request")
    away = check(configured(HTTP), http(503), 11, job="http.request")
    assert {(one.decision.policy.base_delay, one.decision.policy.max_delay) for one in limited} == {(1.0, 60.0)}
    assert {one.decision.policy.base_delay for one in away} == {0.5}
    assert {one.decision.policy.jitter for one in limited + away} == {"equal"}


@pytest.mark.parametrize("count", [0, 2, 7])
def test_9_2_4_a_request(count: int) -> None:
    check(configured(HTTP), http(429), count + 1, job="http.request", retry_count=count)


def test_9_2_5_the_order_is_the_documents_example() -> None:
    """HTTP 429 with retry_count 2: twice, from the request; 1 s and 60 s from the override; equal from the block."""
    retries = check(configured(HTTP), http(429), 3, job="http.request", retry_count=2)
    policy = retries[0].decision.policy
    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.jitter) == (3, 1.0, 60.0, "equal")


@pytest.mark.parametrize(
    ("sample", "environ", "v2"),
    [
        (MINIMAL, {}, True),
        (MINIMAL, {"WORKER_RETRIES_V2_ENABLED": "false"}, False),
        ("spec1-2.2-structure.json", {}, False),
        ("spec1-2.2-structure.json", {"WORKER_RETRIES_V2_ENABLED": "true"}, True),
    ],
)
def test_9_3_1_to_9_3_3_the_flag_chooses_the_baseline_or_v2(sample: str, environ: dict[str, str], v2: bool) -> None:
    """A failure that no other try would help: once in v2; in the baseline four times, 100, 200 and 300 ms apart."""
    retries = check(configured(sample, environ=environ), failed(ErrorCode.permission_denied), 1 if v2 else 4)
    if not v2:
        assert [one.delay_seconds for one in retries] == pytest.approx([0.1, 0.2, 0.3])


def test_9_3_4_a_missing_file_falls_back_to_the_baseline() -> None:
    environ = {"WORKER_RETRIES_V2_ENABLED": "true"}
    settings = configured("not-there.json", environ=environ, forgiving=True)
    assert not settings.retries_v2
    check(settings, failed(ErrorCode.permission_denied), 4)


def test_9_4_1_and_9_4_2_full_jitter_draws_below_the_exponential_backoff() -> None:
    retries = check(configured(MINIMAL), REFUSED, 11, retry_count=10)
    caps = [min(0.1 * 2**k, 30.0) for k in range(10)]
    assert all(0 <= one.delay_seconds <= cap for one, cap in zip(retries, caps, strict=True))
    assert len({round(one.delay_seconds / cap, 6) for one, cap in zip(retries, caps, strict=True)}) == 10


def test_9_4_3_and_9_4_4_equal_jitter_keeps_half_of_it_and_is_the_blocks() -> None:
    retries = check(configured(HTTP), http(500), 6, job="http.request")
    caps = [min(0.2 * 2**k, 10.0) for k in range(5)]
    assert all(cap / 2 <= one.delay_seconds <= cap for one, cap in zip(retries, caps, strict=True))


@pytest.mark.parametrize(("seconds", "ran"), [(1.0, 5), (2.4, 3), (5.1, 1)])
async def test_9_5_1_to_9_5_3_the_timeout_is_for_all_attempts_together(shop: Shop, seconds: float, ran: int) -> None:
    step = Step(REFUSED, seconds=seconds)
    await shop.worker("w1", step, settings=configured(MINIMAL))
    await shop.send(work("a", timeout_ms=5000, retry={"max_attempts": 50, "backoff_ms": 1}))
    await asyncio.sleep(30)
    assert len(step.began) == ran
    assert shop.result("a").status is ResultStatus.TIMEOUT
    ended = step.began[-1][1] + shop.seconds("a")
    assert ended <= step.began[0][1] + 5.001


@pytest.mark.parametrize("sample", ["spec1-2.2-structure.json", MINIMAL, HTTP, CATEGORY, "spec2-minimal.json"])
def test_every_example_configuration_runs_a_step_to_its_end(sample: str) -> None:
    check(configured(sample, environ={"WORKER_RETRIES_V2_ENABLED": "1"}), failed(ErrorCode.invalid_input), 1)


SECTION_2_2 = (SAMPLES / "spec1-2.2-structure.json").read_text()


def book(text: str) -> rk.PolicyBook:
    return rk.PolicyBook.loads(text, format="json", name="worker.json")


def v2(section: dict[str, Any]) -> rk.PolicyBook:
    return book(json.dumps({"worker": {"retries": {"v2": section}}}))


def test_2_4_each_step_up_the_layers_is_heard() -> None:
    found = book(SECTION_2_2)
    assert [found.resolve("block:http", http_status=status).retries for status in (429, 503)] == [3, 5]
    assert found.resolve("block:other", http_status=503).retries == 5
    codes = (None, "system_overload", "invalid_input")
    assert [found.resolve("block:other", code=code).retries for code in codes] == [3, 3, 0]


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
    named = {"transient": 14, "http_error": 15, "503": 16}
    overrides = {name: {"max_attempts": number} for name, number in named.items()}
    section: dict[str, Any] = {
        "default_policy": {"max_attempts": 11},
        "error_classification": {"network_errors": {"max_attempts": 12}},
        "block_policies": {"http": {"max_attempts": 13, "error_overrides": overrides}},
    }

    def retries(**request: Any) -> int:
        return v2(section).resolve("block:http", code="http_error", http_status=503, **request).retries

    assert retries(retry_count=17) == 17
    layers = [(overrides, name) for name in ("503", "http_error", "transient")]
    layers += [(section, name) for name in ("block_policies", "error_classification", "default_policy")]
    for expected, (place, name) in zip(range(16, 10, -1), layers, strict=True):
        assert retries() == expected, name
        del place[name]
    assert retries() == 3


BUDGET = V2.replace(max_attempts=10, time_budget=5.0)


def test_1_2_of_all_4xx_408_and_429_are_retried_and_every_5xx_by_a_step_as_by_a_client(no_wait: VirtualClock) -> None:
    def retried(retrier: rk.Retrier, error: Callable[[int], Exception]) -> set[int]:
        return {s for s in range(400, 600) if retrier.run(Work(error(s))).history[0].delay is not None}

    by_code = retried(worker(V2), lambda status: StepError(ErrorCode.http_error, http_status=status))
    assert by_code == retried(rk.Retrier(V2), HttpError) == {408, 429, *range(500, 600)}


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


def test_5_1_time_counts_executions_and_waits_and_no_wait_reaches_the_budget(virtual_time: VirtualClock) -> None:
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
