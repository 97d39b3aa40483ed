"""Records of a worker: log lines of its decisions (bounded, without secrets), counters, results that can be sent."""

import logging

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.core.redaction import Redactor
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.queue.worker.records import Counters, sendable
from reefknot.queue.worker.settings import default_settings
from tests.unit.queue.shops import ran, sent
from tests.workshop import DENIED, NO_BREAKER, REFUSED, Shop, Step, http, with_shop, work


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if hasattr(one, "decision")]


async def test_each_retry_is_one_line_with_its_wait(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(REFUSED, REFUSED, http(200)), wait=60)
    first, second, *_ = said(caplog)
    assert first.getMessage().startswith("w1: test.step a: attempt 1 of ")
    assert "refused; trying again in " in first.getMessage()
    assert (first.levelname, first.name) == ("WARNING", "reefknot")
    fields = {
        "decision": "retry",
        "work_id": "a",
        "tenant_id": None,
        "job_type": "test.step",
        "trace_id": None,
        "error_code": "NETWORK_ERROR",
        "failure_type": "transient",
        "retryable": True,
        "reason": None,
        "attempt": 1,
        "target": "block:test.step",
        "layer": "builtin",
        "quarantined": False,
    }
    assert {name: getattr(first, name) for name in fields} == fields
    assert second.__dict__["attempt"] == 2
    assert first.__dict__["wait_s"] >= 0.0


def test_a_recovery_is_information_and_what_needs_a_person_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def story(shop: Shop) -> None:
        await shop.worker("w1", Step(REFUSED), settings=default_settings(quarantine_failed=True))
        await sent(shop, work("aside", retry_count=0), wait=10)
        await shop.worker("w2", Step(REFUSED, StepResult()))

    async def recovery(shop: Shop) -> None:
        await ran(shop, Step(REFUSED, StepResult()), wait=60)

    with caplog.at_level(logging.INFO, "reefknot"):
        with_shop(story)
        with_shop(recovery)
    aside, retried, recovered = (one.__dict__ for one in said(caplog))
    assert (aside["levelname"], aside["decision"], aside["quarantined"]) == ("ERROR", "give_up", True)
    assert (retried["levelname"], retried["decision"]) == ("WARNING", "retry")
    assert (recovered["levelname"], recovered["decision"], recovered["attempt"]) == ("INFO", "recovered", 2)
    assert recovered["elapsed_s"] >= 0.0
    assert "w1: test.step a: succeeded at attempt 2, after " in recovered["message"]


async def test_work_that_expired_is_a_line_of_its_own(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(REFUSED, seconds=1.0), work("a", deadline_ms=1100, timeout_ms=60_000, retry_count=5), wait=60)
    assert [one.__dict__["decision"] for one in said(caplog)][-1] == "give_up"


async def test_a_failure_that_is_not_one_to_retry_is_information(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(DENIED), wait=1)
    (line,) = said(caplog)
    assert (line.levelname, line.__dict__["reason"], line.__dict__["retryable"]) == ("INFO", "not_retryable", False)
    assert "not retryable" in line.getMessage()


async def test_the_end_of_the_time_budget_is_told(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(REFUSED), work("a", timeout_ms=50, retry_count=100), wait=60)
    assert (said(caplog)[-1].__dict__["reason"], said(caplog)[-1].levelname) == ("budget_spent", "ERROR")
    assert "would not fit into the deadline" in said(caplog)[-1].getMessage()


async def test_a_success_at_the_first_try_says_nothing(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(), wait=1)
    assert said(caplog) == []


async def test_a_storm_of_retries_is_ten_lines_and_then_one_a_second(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    slots = default_settings(concurrency={"cpu": 200}, breaker=NO_BREAKER)
    await shop.worker("w1", Step(REFUSED, seconds=0.0), settings=slots)
    await sent(shop, *(work(f"a{n}", retry_count=0) for n in range(200)), wait=5)
    await sent(shop, work("last", retry_count=0), wait=1)
    lines = said(caplog)
    assert len(lines) == 11
    assert lines[-1].getMessage().endswith("(190 such lines left out)")


async def test_no_line_holds_a_configured_secret(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    worker = await shop.worker("w1", Step(ConnectionError("no hunter2 here")))
    worker.steps._redactor = Redactor(("hunter2",))
    worker.steps.log = DecisionLog("w1", worker.steps._redactor, worker.steps._clock)
    await sent(shop, work("a-hunter2", retry_count=1), wait=60)
    told = [f"{one.getMessage()} {one.__dict__}" for one in said(caplog)]
    assert len(told) == 2
    assert not [line for line in told if "hunter2" in line]


def test_a_worker_that_did_nothing_has_no_rate() -> None:
    counts = Counters().snapshot()

    assert counts.retry_success_rate is None
    assert (counts.mean_backoff_s, counts.retries) == (0.0, 0)


def test_counts_tell_first_tries_from_recoveries() -> None:
    counters = Counters()
    counters.ended(ok=True, retried=False)
    counters.ended(ok=True, retried=True)
    counters.ended(ok=False, retried=True)
    counters.ended(ok=False, retried=False)
    counters.retry("HTTP_ERROR", "http.request", 2.0)
    counters.retry("NETWORK_ERROR", "http.request", 1.0)
    counts = counters.snapshot()

    assert (counts.succeeded, counts.failed, counts.recovered, counts.given_up) == (2, 2, 1, 1)
    assert counts.retries_by_block == {"http.request": 2}
    assert (counts.mean_backoff_s, counts.retry_success_rate) == (1.5, 0.5)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_an_output_that_has_no_json_form_is_a_failure_with_its_place_and_not_null(number: float) -> None:
    step = sendable(StepResult(outputs={"a": [1, {"b": number}], "c": None}))
    assert (step.status, step.error_code) == (StepStatus.ERROR, ErrorCode.execution_failed)
    assert "outputs.a[1].b" in step.error_message


def test_an_output_that_is_null_is_null() -> None:
    step = StepResult(outputs={"a": None, "b": "null"})
    assert sendable(step) is step
