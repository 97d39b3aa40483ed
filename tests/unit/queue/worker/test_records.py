"""Records of a worker: log lines of its decisions (bounded, without secrets), counters, results that can be sent."""

import logging
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.core.redaction import Redactor
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.queue.worker.records import Counters, sendable
from reefknot.queue.worker.settings import default_settings
from tests.unit.queue.shops import ran, sent
from tests.workshop import DENIED, NO_BREAKER, OK, REFUSED, Shop, Step, http, work


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if hasattr(one, "decision")]


async def test_each_retry_is_one_line_with_its_wait(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(REFUSED, REFUSED, http(200)), wait=60)
    first, second, *_ = said(caplog)
    assert first.getMessage().startswith("w1: test.step a: attempt 1 of ")
    assert "refused; trying again in " in first.getMessage()
    assert (first.levelname, first.name) == ("WARNING", "reefknot")
    job = {"work_id": "a", "tenant_id": None, "job_type": "test.step", "trace_id": None, "quarantined": False}
    failure = {"error_code": "NETWORK_ERROR", "failure_type": "transient", "retryable": True, "reason": None}
    fields = {**job, **failure, "decision": "retry", "attempt": 1, "target": "block:test.step", "layer": "builtin"}
    assert {name: getattr(first, name) for name in fields} == fields
    assert second.__dict__["attempt"] == 2
    assert first.__dict__["wait_s"] >= 0.0


async def test_what_goes_to_quarantine_says_so(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(REFUSED), work("aside", retry_count=0), wait=10, quarantine_failed=True)
    (aside,) = (one.__dict__ for one in said(caplog))
    assert (aside["levelname"], aside["decision"], aside["quarantined"]) == ("ERROR", "give_up", True)


NO_TIME = {"timeout_ms": 50, "retry_count": 100}
EXPIRES = {"deadline_ms": 1100, "timeout_ms": 60_000, "retry_count": 5}


@pytest.mark.parametrize(
    ("step", "given", "told", "words"),
    [
        (Step(REFUSED, OK), {}, ("INFO", "recovered", None, None), "w1: test.step a: succeeded at attempt 2, after "),
        (Step(DENIED), {}, ("INFO", "give_up", "not_retryable", False), "not retryable"),
        (Step(REFUSED), NO_TIME, ("ERROR", "give_up", "budget_spent", True), "would not fit into the deadline"),
        (Step(REFUSED, seconds=1.0), EXPIRES, ("ERROR", "give_up", "budget_spent", False), "all attempts was over"),
    ],
    ids=["a recovery", "not one to retry", "no time left", "expired"],
)
async def test_the_last_line_of_a_job_says_what_was_decided_and_why(
    shop: Shop, caplog: pytest.LogCaptureFixture, step: Step, given: Any, told: tuple[object, ...], words: str
) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, step, work("a", **given), wait=60)
    last = said(caplog)[-1].__dict__
    assert (last["levelname"], last["decision"], last.get("reason"), last.get("retryable")) == told
    assert words in last["message"]
    assert ("elapsed_s" in last) is (last["decision"] == "recovered")


async def test_a_success_at_the_first_try_says_nothing(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    await ran(shop, Step(), wait=1)
    assert said(caplog) == []


async def test_a_storm_of_retries_is_ten_lines_then_one_a_second(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
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
    assert (counts.retry_success_rate, counts.mean_backoff_s, counts.retries) == (None, 0.0, 0)


def test_counts_tell_first_tries_from_recoveries() -> None:
    counters = Counters()
    for ok, retried in ((True, False), (True, True), (False, True), (False, False)):
        counters.ended(ok=ok, retried=retried)
    counters.retry("HTTP_ERROR", "http.request", 2.0)
    counters.retry("NETWORK_ERROR", "http.request", 1.0)
    counts = counters.snapshot()
    assert (counts.succeeded, counts.failed, counts.recovered, counts.given_up) == (2, 2, 1, 1)
    assert counts.retries_by_block == {"http.request": 2}
    assert (counts.mean_backoff_s, counts.retry_success_rate) == (1.5, 0.5)


def test_an_output_that_has_no_json_form_is_a_failure_with_its_place_and_not_null() -> None:
    for number in (float("nan"), float("inf"), -float("inf")):
        step = sendable(StepResult(outputs={"a": [1, {"b": number}], "c": None}))
        assert (step.status, step.error_code) == (StepStatus.ERROR, ErrorCode.execution_failed)
        assert "outputs.a[1].b" in step.error_message
    null = StepResult(outputs={"a": None, "b": "null"})
    assert sendable(null) is null
