"""Records of a worker: lines of its decisions, counters, results that can be sent, and what it has to set aside."""

import asyncio
import logging
from typing import Any, cast

import pytest
from msgspec import structs

from reefknot.audit.model.event import Quarantined
from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ResultStatus, StepResult, StepStatus
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.router.submissions import Submissions
from reefknot.queue.worker.records import Counters, sendable
from reefknot.queue.worker.settings import default_settings
from tests.unit.queue.shops import made, ran, sent, stored
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
    assert ({name: getattr(first, name) for name in fields}, second.__dict__["attempt"]) == (fields, 2)
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


CANARY = "Canary-77c1"


async def told(shop: Shop) -> list[tuple[str | None, str | None, str | None, str | None]]:
    events: list[Any] = list(await shop.events(Quarantined))
    return [(one.work_id, one.correlation_id, one.tenant_id, one.trace_id) for one in events]


def item() -> WorkItem:
    whose = {"tenant_id": "t", "correlation_id": "r-a", "trace_id": "trace"}
    return structs.replace(WorkItem("a", "test.step", "cpu@w1", payload=b"{broken"), **whose)


def errors(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    decided = [vars(one) for one in caplog.records if hasattr(one, "decision")]
    return [(one["levelname"], one["decision"], one["work_id"], one["tenant_id"], one["trace_id"]) for one in decided]


ASIDE = ("ERROR", "give_up", "a", "t", "trace")


async def test_unreadable_work_gets_a_result_and_an_event(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    await shop.store.work.enqueue([item()])
    await shop.worker("w1")
    await asyncio.sleep(2)
    result = shop.result("a")
    assert (result.status, result.error_code, result.request_id) == (ResultStatus.ERROR, "INTERNAL_ERROR", "r-a")
    assert (result.tenant_id, result.trace_id, result.job.type) == ("t", "trace", "test.step")
    assert await told(shop) == [("a", "r-a", "t", "trace")]
    found = await stored(shop, "a")
    assert (found.state, found.payload) == (WorkState.QUARANTINED, b"{broken")
    await shop.send(work("a"))
    assert [one.status for one in shop.results] == [ResultStatus.ERROR] * 2, "who asks again is answered again"
    assert errors(caplog) == [ASIDE]


async def test_what_crashed_too_often_is_answered_even_unread(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    await shop.store.work.enqueue([item()])
    items: Any = cast(Any, shop.store.work).table.items
    items["a"] = structs.replace(items["a"], state=WorkState.QUARANTINED, reason="its owner vanished 3 times")
    assert await (await shop.worker("w1")).closing.publish_result("a")
    await asyncio.sleep(0)
    assert "vanished 3 times" in (shop.result("a").error_message or "")
    assert errors(caplog) == [ASIDE]


async def test_a_mistake_of_the_workers_own_is_an_event_its_text_is_kept_out_of_the_log_and_it_goes_on(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*given: object) -> None:
        raise RuntimeError(f"inside, with {CANARY}")

    caplog.set_level(logging.ERROR, logger="reefknot")
    worker = made(shop, "w1", secrets=(CANARY,))
    await worker.start()
    with monkeypatch.context() as patch:
        patch.setattr(worker.steps, "attempt", breaks)
        await sent(shop, work("a"), wait=1)
    assert (shop.result("a").status, shop.result("a").error_code) == (ResultStatus.ERROR, "INTERNAL_ERROR")
    assert [one[:2] for one in await told(shop)] == [("a", "r-a")]
    assert await shop.store.quarantine.show("a") is not None
    assert ", test_records.py:" in caplog.text
    assert "; it goes to quarantine (RuntimeError: inside" in caplog.text
    assert "inside, with [redacted]" in caplog.text
    assert CANARY not in caplog.text
    await sent(shop, work("b"), wait=1)
    assert shop.result("b").status is ResultStatus.SUCCESS


async def test_a_submission_that_cannot_be_read_is_answered_and_on_record(shop: Shop) -> None:
    router = await shop.router()
    submissions = Submissions(shop.store.work, shop.clock, rules=SubmissionRules(10))
    submission = submissions.item(work("a"), b"{broken")
    await shop.store.work.enqueue([submission])
    await asyncio.sleep(1)
    result = await submissions.answer("a")
    assert result is not None
    assert (result.status, result.error_code, result.request_id) == (ResultStatus.ERROR, "INTERNAL_ERROR", "r-a")
    assert [one[:2] for one in await told(shop)] == [("a", "r-a")]
    assert (await stored(shop, submission.id)).state is WorkState.QUARANTINED
    assert len(router.table) == 0
