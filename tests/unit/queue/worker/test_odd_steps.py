"""Steps that end in odd ways: each is an ordinary failure with its cause, answered at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ResultStatus, StepResult, StepStatus
from reefknot.queue.model.results import WORKER_FAILED
from reefknot.queue.model.work import WorkState
from reefknot.steps.port import BlockContext
from reefknot.steps.python import PythonBlock
from tests.unit.queue.shops import ran, sent
from tests.unit.retrying.odd_errors import TOLD, VALUES, all_odd, deep_group
from tests.workshop import NO_BREAKER, Shop, Step, work

WITHIN_S = 5.0
"""The lease is 60 s: whoever is answered before was not found by its end."""
FAILED = (StepStatus.ERROR, ErrorCode.execution_failed)


def odd_results() -> dict[str, Any]:
    """What a block may give instead of a result, by a name for the report."""
    odd: dict[str, Any] = {"none": None, "dict": {}, "class": StepResult, "number": 5}
    for number, value in enumerate((*VALUES, None, 5, "text")):
        given: Any = value
        odd[f"status {number}"] = StepResult(given)
        odd[f"code {number}"] = StepResult(StepStatus.ERROR, given)
        odd[f"outputs {number}"] = StepResult(outputs=given)
        odd[f"an output {number}"] = StepResult(outputs={"a": given})
        odd[f"message {number}"] = StepResult(*FAILED, error_message=given)
        odd[f"metadata {number}"] = StepResult(*FAILED, {}, TOLD, given)
        for name in ("retry_after", "http_status_code", "limit_reached", "cost"):
            odd[f"{name} {number}"] = StepResult(*FAILED, {}, TOLD, {name: given})
        odd[f"cost of a success {number}"] = StepResult(metadata={"cost": given})
        odd[f"status_code {number}"] = StepResult(*FAILED, {"status_code": given}, TOLD)
        odd[f"latency {number}"] = StepResult(latency_ms=given, retries_used=given, queue_depth_at_queue=given)
    return odd


class Given:
    """A block that gives back, or raises, what stands under the assignment's id."""

    type = "test.step"

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "here"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        answer = self._answers[context.assignment_id]
        if isinstance(answer, type) and issubclass(answer, BaseException):
            raise answer("own")
        if callable(answer) and not isinstance(answer, type):
            raise answer()
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None: ...


async def unanswered(shop: Shop, answers: Mapping[str, Any]) -> list[str]:
    """Which of these are not answered in time, or only by the worker's own failure."""
    await shop.worker("w1", Given(answers), retries_v2=True, breaker=NO_BREAKER)
    for name in answers:
        await shop.send(work(name, retry=None, timeout_ms=1000))
    await asyncio.sleep(WITHIN_S)
    results = {one.assignment_id: one for one in shop.results}
    wrong = [f"{name}: no answer" for name in answers if name not in results]
    for name, result in results.items():
        has_told = result.status is ResultStatus.SUCCESS or result.error_message or name.startswith("message")
        if result.error_code == "INTERNAL_ERROR" or not has_told:
            wrong.append(f"{name}: {result.error_code}, {result.error_message}")
        item = await shop.store.work.get(name)
        if item is None or item.state not in (WorkState.SUCCEEDED, WorkState.FAILED):
            wrong.append(f"{name}: {item and item.state}")
    return wrong


async def test_every_odd_result_is_a_success_or_an_ordinary_failure(shop: Shop) -> None:
    assert await unanswered(shop, odd_results()) == []


async def test_every_odd_exception_is_an_ordinary_failure(shop: Shop) -> None:
    assert await unanswered(shop, all_odd()) == []


async def test_the_check_catches_an_end_of_the_worker_itself(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a result that is not looked at."""
    monkeypatch.setattr("reefknot.queue.worker.attempt.sendable", lambda step: step)
    wrong = await unanswered(shop, odd_results())
    assert len(wrong) > 20
    assert any(WORKER_FAILED in one for one in wrong)


@pytest.mark.parametrize("kind", [GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("is_async", [True, False])
async def test_control_flow_is_answered_with_its_cause(shop: Shop, kind: type[BaseException], is_async: bool) -> None:
    async def awaited(inputs: Mapping[str, Any], context: BlockContext) -> None:
        raise kind("of its own")

    def plain(inputs: Mapping[str, Any], context: BlockContext) -> None:
        raise kind("of its own")

    await shop.worker("w1", PythonBlock("test.step", awaited if is_async else plain))
    await shop.send(work("a"))
    await shop.send(work("b"))
    for _ in range(500):
        if len(shop.results) == 2:
            break
        await asyncio.sleep(0.01)
    result = shop.result("a")
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "EXECUTION_FAILED")
    assert kind.__name__ in (result.error_message or "")


async def test_a_slot_that_is_closed_from_outside_reports_no_failure_of_its_step(shop: Shop) -> None:
    """A loop that ends closes the coroutines it leaves behind: that is the process's end, not the step's."""
    step = Step(seconds=3600)
    worker = await ran(shop, step, wait=1)
    (task,) = [task for pool in worker.pools.values() for task in pool.running.values()]
    coroutine: Any = task.get_coro()
    with pytest.raises((RuntimeError, ValueError, GeneratorExit)):
        coroutine.throw(GeneratorExit)
    await asyncio.sleep(1)
    assert shop.results == []


async def test_a_deep_group_tells_of_its_leaf(shop: Shop) -> None:
    await shop.worker("w1", Given({"a": lambda: deep_group(3_000)}))
    await sent(shop, work("a", timeout_ms=500), wait=WITHIN_S)
    assert TOLD in (shop.result("a").error_message or "")
    assert shop.result("a").status is not ResultStatus.SUCCESS


async def test_a_success_that_tells_of_an_error_has_none_in_its_result(shop: Shop) -> None:
    odd = StepResult(error_code=ErrorCode.network_error, error_message="all is well", outputs={"n": 1})
    await ran(shop, Step(odd), wait=1)
    result = shop.result("a")
    assert (result.status, result.error_code, result.error_message) == (ResultStatus.SUCCESS, None, None)
    assert result.output == {"n": 1}
