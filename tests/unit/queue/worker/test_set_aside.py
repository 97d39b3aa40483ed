"""What a worker cannot run goes aside: with a result, an event, and without a secret in the log."""

import asyncio
import logging
from typing import Any, cast

import pytest
from msgspec import structs

from reefknot.audit.model.event import Quarantined
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.router.submissions import Submissions
from tests.unit.queue.shops import made, sent, stored
from tests.workshop import Shop, work

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
    assert "failed inside, at test_set_aside.py:" in caplog.text
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
