"""One attempt after another: retries by the book, both clocks, throttle, breaker, degradation, and the baseline."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.model.event import BreakerEvent, RetryAttempt, RetryExhausted, RetryRecovered, RetryRefused, encode
from reefknot.audit.model.replay import replay
from reefknot.core.failure import ErrorCode
from reefknot.policy.book import PolicyBook
from reefknot.queue.model.admission import RejectionPolicy, Rules
from reefknot.queue.model.messages import ExecAssignment, ResultStatus, StepResult, StepStatus
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker.settings import ThrottleSettings
from tests.unit.queue.shops import ran, sent, stored, told
from tests.workshop import DENIED, NO_BREAKER, OK, REFUSED, Shop, Step, http, work

FLAT = """
worker: {retries: {v2: {enabled: true,
  default_policy: {jitter_type: none},
  block_policies: {http: {max_attempts: 5, base_delay_ms: 200, jitter_type: none,
    error_overrides: {"429": {max_attempts: 2, base_delay_ms: 1000}}}}}}}
"""


def flat() -> Any:
    """The documents' delays, without chance in them."""
    return PolicyBook.loads(FLAT.replace("jitter_type: none", "jitter_type: full")).snapshot


async def test_waits_are_due_times_and_follow_the_book_for_block_code_and_status(shop: Shop) -> None:
    step = Step(http(503), http(503), http(429), OK, name="http.request")
    await ran(shop, step, work("a", job="http.request"), wait=30, book=flat())
    waits = [(event.decision.policy.base_delay, event.max_attempts) for event in await shop.events(RetryAttempt)]  # type: ignore[union-attr]
    assert waits == [(0.2, 6), (0.2, 6)], "the third failure is a 429, which has 1 + 2 attempts"
    assert shop.result("a").status is ResultStatus.ERROR
    (end,) = await shop.events(RetryExhausted)
    assert (end.reason, end.total_attempts) == ("attempts_spent", 3)  # type: ignore[union-attr]


async def test_a_request_has_the_last_word_on_how_often(shop: Shop) -> None:
    step = Step(REFUSED)
    await ran(shop, step, work("a", retry_count=0), work("b", retry={"max_attempts": 2}), work("c"), wait=30)
    assert {name: len(step.times(name)) for name in "abc"} == {"a": 1, "b": 3, "c": 4}
    assert {name: shop.result(name).retries_used for name in "abc"} == {"a": 0, "b": 2, "c": 3}


async def test_what_is_not_worth_another_try_ends_at_once_and_is_on_record(shop: Shop) -> None:
    step = Step(DENIED)
    await ran(shop, step, wait=5)
    result = shop.result("a")
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "PERMISSION_DENIED")
    assert (result.error_message, len(step.began)) == ("not allowed", 1)
    assert [event.reason for event in await told(shop, RetryRefused)] == ["not_retryable"]


async def test_a_recovery_is_on_record_and_every_decision_replays(shop: Shop) -> None:
    await shop.worker("w1", Step(REFUSED, http(500), OK), Step(REFUSED, name="other"))
    await sent(shop, work("a"), work("b", job="other"), wait=60)
    (event,) = await shop.events(RetryRecovered)
    assert (event.work_id, event.total_attempts) == ("a", 3)  # type: ignore[union-attr]
    seen = replay(kept.entry.body for kept in await shop.store.audit.read())
    assert (seen.kinds["retry"], seen.differences) == (6, ())


async def test_the_time_budget_counts_executions_and_waits_from_the_first_beginning(shop: Shop) -> None:
    """Two executions of 2 s; with a wait between them a third would begin with less than 1 s left, and is cut."""
    step = Step(REFUSED, seconds=2)
    worker = await ran(shop, step, work("a", timeout_ms=5000, retry={"max_attempts": 50, "backoff_ms": 1}), wait=30)
    result = shop.result("a")
    assert (len(step.began), result.status, result.error_code) == (3, ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
    assert "before that: " in (result.error_message or "")
    assert "refused" in (result.error_message or "")
    assert step.began[0][1] + 5 == pytest.approx(step.began[2][1] + shop.seconds("a"), abs=0.01)
    assert worker.snapshot().retries.budget_exhaustions == 1


@pytest.mark.parametrize(
    ("hint", "given", "status", "code", "told"),
    [
        (
            *(10, {"timeout_ms": 5000}, ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT"),
            "another attempt would not fit into the time for all of them, 5 s (the server asked to wait 10 s)",
        ),
        (301, {}, ResultStatus.ERROR, "HTTP_ERROR", "the server asked to wait 301 s, and at most 300 s are waited"),
    ],
)
async def test_a_wait_that_is_too_long_is_not_started_and_the_last_error_is_told(
    shop: Shop, hint: float, given: Any, status: ResultStatus, code: str, told: str
) -> None:
    step = Step(http(503, retry_after=hint), name="http.request")
    await ran(shop, step, work("a", job="http.request", **given), wait=30)
    result = shop.result("a")
    assert (result.status, result.error_code, len(step.began)) == (status, code, 1)
    assert result.error_message == f"{told}; the last error: HTTP_ERROR: failed"


async def test_a_success_has_no_code_and_an_end_without_one_gets_that_of_its_status(shop: Shop) -> None:
    ends = {
        None: StepResult(StepStatus.OK, ErrorCode.network_error),
        "CANCELLED_BY_USER": StepResult(StepStatus.CANCELLED),
        "CANCELLED_BY_TIMEOUT": StepResult(StepStatus.TIMEOUT),
        "EXECUTION_FAILED": StepResult(StepStatus.ERROR),
    }
    await shop.worker("w1", *(Step(end, name=f"test.{end.status}") for end in ends.values()))
    await sent(shop, *(work(end.status, job=f"test.{end.status}", retry_count=0) for end in ends.values()), wait=5)
    assert {shop.result(end.status).error_code: end for end in ends.values()} == ends


async def test_the_wait_that_was_decided_is_the_previous_one_of_the_next_decision(shop: Shop) -> None:
    await ran(shop, Step(REFUSED), wait=60)
    first, second, *_ = await shop.events(RetryAttempt)
    assert second.decision.history.previous_delay == first.delay_seconds  # type: ignore[union-attr]


async def test_the_deadline_holds_as_well_and_counts_from_acceptance(shop: Shop) -> None:
    await shop.worker("w1", Step(seconds=60))
    await shop.send(work("a", deadline_ms=3000, timeout_ms=50_000), work("b", deadline_ms=50_000, timeout_ms=4000))
    await asyncio.sleep(20)
    assert shop.result("a").latency_ms == pytest.approx(3000, abs=5)
    assert shop.result("b").latency_ms == pytest.approx(4000, abs=5)
    assert {shop.result(name).error_code for name in "ab"} == {"CANCELLED_BY_TIMEOUT"}


async def test_a_retry_that_would_end_after_the_deadline_is_not_waited_for(shop: Shop) -> None:
    step = Step(http(503, retry_after=10), name="http.request")
    await ran(shop, step, work("a", job="http.request", deadline_ms=5000), wait=1)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    seen = replay(kept.entry.body for kept in await shop.store.audit.read())
    assert (seen.kinds["retry"], seen.differences) == (1, ())


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (StepResult(outputs={"x": object()}), "cannot be written as JSON"),
        (StepResult(outputs={"x": "y" * 1_100_000}), "bytes; accepted"),
        ("text", "gave a str, not a StepResult"),
        (StepResult(StepStatus.ERROR, error_message="just so"), "just so"),
    ],
)
async def test_a_result_that_cannot_be_sent_fails_and_the_worker_goes_on(shop: Shop, outcome: Any, words: str) -> None:
    async def give() -> Any:
        return outcome

    await ran(shop, Step(give), Step(name="fine"), work("a"), work("b", job="fine"), wait=5)
    assert shop.result("a").error_code == "EXECUTION_FAILED"
    assert words in (shop.result("a").error_message or "")
    assert shop.result("b").status is ResultStatus.SUCCESS


async def test_a_cost_is_a_number_or_nothing(shop: Shop) -> None:
    given = (1.5, 2, "3", True, float("nan"), None)
    steps = [Step(StepResult(metadata={"cost": cost}), name=f"test.{n}") for n, cost in enumerate(given)]
    await ran(shop, *steps, *(work(step.type, job=step.type) for step in steps), wait=1)
    assert [shop.result(step.type).cost for step in steps] == [1.5, 2, 0, 0, 0, 0]


async def test_a_busy_destination_that_is_down_is_throttled_and_the_refusals_say_so(shop: Shop) -> None:
    step = Step(REFUSED, seconds=0.0)
    worker = await shop.worker("w1", step, concurrency={"cpu": 50})
    for group in range(10):
        await sent(shop, *(work(f"a{group}-{n}", skip_circuit_breaker=True) for n in range(100)), wait=0.2)
    await asyncio.sleep(60)
    assert len(shop.results) == 1000
    assert worker.snapshot().retries.throttled > 500
    assert len(step.began) < 1400, "four times as many without a throttle"
    refusals = [event for event in await shop.events(RetryRefused) if event.reason == "throttled"]  # type: ignore[union-attr]
    assert len(refusals) == worker.snapshot().retries.throttled
    said = [one for one in shop.results if (one.error_message or "").startswith("its retry was throttled")]
    assert len(said) == len(refusals)


class _RefusedHereError(ConnectionRefusedError):
    """A class of a step's own, with parents that a forger may name instead."""


async def test_events_name_the_class_of_the_exception_and_a_replay_finds_a_parent_in_its_place(shop: Shop) -> None:
    await ran(shop, Step(_RefusedHereError("no"), OK), wait=60)
    (event,) = await shop.events(RetryAttempt)
    assert isinstance(event, RetryAttempt)
    assert event.exception_type == "_RefusedHereError"
    assert "builtins.ConnectionRefusedError" in event.decision.failure.exceptions
    forged = structs.replace(event, exception_type="ConnectionRefusedError")
    older = structs.replace(event, exception_type=event.decision.failure.code)
    found = [str(replay([encode(one)]).differences) for one in (event, older, forged)]
    assert ["exception_type" in one for one in found] == [False, False, True]


async def test_small_work_always_gets_its_retries(shop: Shop) -> None:
    """The control: the same failures, too few for the throttle to act on; the breaker is not asked."""
    step = Step(REFUSED)
    await ran(shop, step, *(work(f"a{n}") for n in range(20)), wait=60, breaker=NO_BREAKER)
    assert len(step.began) == 80


async def test_an_open_breaker_keeps_calls_away_and_then_lets_one_through(shop: Shop) -> None:
    step, throttle = Step(REFUSED, seconds=0.0), ThrottleSettings(enabled=False)
    await shop.worker("w1", step, concurrency={"cpu": 4}, throttle=throttle, rules=Rules(size=100_000))
    for group in range(3):
        await sent(shop, *(work(f"a{group}-{n}", retry_count=0) for n in range(60)), wait=0.5)
    before = len(step.began)
    await sent(shop, work("late", retry_count=0), wait=0.5)
    assert len(step.began) == before, "it is not called"
    first, *_, late = await told(shop, BreakerEvent)
    assert (first.state, late.work_id, late.state, late.correlation_id) == ("open", "late", "open", "r-late")
    assert 0 < late.wait_seconds <= 5.0, "that it waits is on record"
    item = await stored(shop, "late")
    assert (item.state, item.attempts, item.snoozes) == (WorkState.PENDING, 0, 1)


async def test_a_destination_that_answers_unkindly_is_not_left_alone(shop: Shop) -> None:
    step = Step(http(404), name="http.request", seconds=0.0)
    await shop.worker("w1", step)
    for group in range(3):
        await sent(shop, *(work(f"a{group}-{n}", job="http.request") for n in range(100)), wait=0.5)
    assert len(step.began) == 300
    assert await shop.events(BreakerEvent) == []


async def test_a_steps_result_knows_the_queue_that_its_assignment_met(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency={"cpu": 1}, rules=Rules(size=2))
    met: dict[str, tuple[int, str]] = {}
    real: Any = worker.steps.result

    def result(assignment: ExecAssignment, step: StepResult, **more: Any) -> Any:
        met[assignment.assignment_id] = step.queue_depth_at_queue, step.overload_status_at_queue.value
        return real(assignment, step, **more)

    worker.steps.result = result  # type: ignore[method-assign]
    for name in "abc":
        await shop.send(work(name))
    await asyncio.sleep(10)
    assert met == {"a": (0, "healthy"), "b": (1, "degraded"), "c": (2, "critical")}
    assert {name: shop.result(name).queue_depth for name in "abc"} == {"a": 0, "b": 1, "c": 2}


async def test_degraded_work_gets_no_retries_and_less_time(shop: Shop) -> None:
    step = Step(REFUSED, seconds=1)
    rules = Rules(size=10, policy=RejectionPolicy.DEGRADE)
    await shop.worker("w1", step, concurrency={"cpu": 1}, rules=rules, breaker=NO_BREAKER)
    await shop.send(work("run", timeout_ms=100_000))
    await shop.send(*(work(f"n{n}", timeout_ms=100_000) for n in range(10)))
    words = [str(shop.ack(f"n{n}").message).removeprefix("Assignment accepted with degradation: ") for n in range(10)]
    assert words == ["Assignment queued"] * 5 + ["light"] * 3 + ["medium"] * 2
    await asyncio.sleep(600)
    assert [len(step.times(name)) for name in ("n4", "n6", "n9")] == [4, 4, 1]
    assert {one.assignment_id: one.seconds for one in step.contexts}["n9"] == pytest.approx(80.0, abs=0.1)


@pytest.mark.parametrize("outcome", [DENIED, http(503, retry_after=400.0)], ids=["denied", "asked to stay away"])
async def test_the_baseline_waits_100_200_300_ms_and_bounds_each_attempt(shop: Shop, outcome: StepResult) -> None:
    step = Step(outcome, seconds=0.0)
    await ran(shop, step, work("a", timeout_ms=500), wait=10, retries_v2=False)
    assert [round(b - a, 2) for a, b in pairwise(step.times("a"))] == [0.1, 0.2, 0.3]
    assert [round(one.seconds, 3) for one in step.contexts] == [0.5] * 4, "no budget over all of them"
    assert shop.result("a").retries_used == 3


async def test_the_baseline_does_not_retry_a_cancellation(shop: Shop) -> None:
    step = Step(StepResult(StepStatus.CANCELLED, ErrorCode.cancelled_by_user))
    await ran(shop, step, wait=10, retries_v2=False)
    assert len(step.began) == 1
    assert shop.result("a").status is ResultStatus.CANCELLED
