"""Steps that end in odd ways: each is an ordinary failure with its cause, answered at once, and harms no neighbour."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ResultStatus, StepResult, StepStatus
from reefknot.queue.model.results import WORKER_FAILED
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker.pool import Pool
from reefknot.queue.worker.service import Worker
from reefknot.runtime.tasks import Services
from reefknot.steps import port, python
from tests.unit.queue.shops import ran, sent, stored
from tests.unit.retrying.odd_errors import TOLD, VALUES, all_odd, deep_group
from tests.workshop import NO_BREAKER, OK, Shop, Step, work

WITHIN_S = 5.0
"""The lease is 60 s: whoever is answered before was not found by its end."""
FAILED = (StepStatus.ERROR, ErrorCode.execution_failed)


def odd_results() -> dict[str, Any]:
    """What a block may give instead of a result, by a name for the report."""
    odd: dict[str, Any] = {"none": None, "dict": {}, "class": StepResult, "number": 5}
    values: tuple[Any, ...] = (*VALUES, None, 5, "text")
    for number, given in enumerate(values):
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

    async def run(self, inputs: Mapping[str, Any], context: port.BlockContext) -> StepResult:
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


FLOW = (GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit, KeyboardInterrupt)


@pytest.mark.parametrize("kind", FLOW)
@pytest.mark.parametrize("is_async", [True, False])
async def test_control_flow_is_answered_with_its_cause(shop: Shop, kind: type[BaseException], is_async: bool) -> None:
    async def awaited(inputs: Mapping[str, Any], context: port.BlockContext) -> None:
        raise kind("of its own")

    def plain(inputs: Mapping[str, Any], context: port.BlockContext) -> None:
        raise kind("of its own")

    await shop.worker("w1", python.PythonBlock("test.step", awaited if is_async else plain))
    await shop.send(work("a"))
    await shop.send(work("b"))
    async with asyncio.timeout(WITHIN_S):
        while len(shop.results) < 2:  # noqa: ASYNC110 - a result sets no event
            await asyncio.sleep(0.01)
    result = shop.result("a")
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "EXECUTION_FAILED")
    assert kind.__name__ in (result.error_message or "")


async def test_a_slot_that_is_closed_from_outside_reports_no_failure_of_its_step(shop: Shop) -> None:
    """A loop that ends closes the coroutines it leaves behind: that is the process's end, not the step's."""
    worker = await ran(shop, Step(seconds=3600), wait=1)
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


def cancel_all(but: set[asyncio.Task[Any]]) -> None:
    for task in asyncio.all_tasks() - but:
        task.cancel()


class Vandal(Step):
    """A step that cancels every task of the worker but its own, each time it runs."""

    def __init__(self, spared: set[asyncio.Task[Any]], *, itself: bool = False) -> None:
        super().__init__(name="vandal")
        self._spared = spared
        self._itself = itself

    async def run(self, inputs: Any, context: Any) -> StepResult:
        self.began.append((context.assignment_id, asyncio.get_running_loop().time()))
        mine = asyncio.current_task()
        assert mine is not None
        cancel_all(self._spared if self._itself else self._spared | {mine})
        await asyncio.sleep(0)
        return OK


async def vandalised(shop: Shop, *, itself: bool = False) -> tuple[Worker, Step]:
    """Three neighbours of ten seconds each, and one step that cancels everything of the worker after a second."""
    spared, step = asyncio.all_tasks(), Step(seconds=10)
    worker = await shop.worker("w1", step, Vandal(spared, itself=itself), concurrency={"cpu": 4})
    await sent(shop, *(work(f"n{n}") for n in range(3)), wait=1)
    await shop.send(work("bad", job="vandal"))
    return worker, step


async def test_neighbours_of_a_step_that_cancels_tasks_go_back_and_succeed_as_an_interruption(shop: Shop) -> None:
    worker, step = await vandalised(shop)
    await asyncio.sleep(0.5)
    items = [await stored(shop, f"n{n}") for n in range(3)]
    counts = [(one.state, one.attempts, one.interruptions, one.crashes) for one in items]
    assert (counts, len(worker.pools["cpu"].running)) == ([(WorkState.RUNNING, 0, 1, 0)] * 3, 3)
    await asyncio.sleep(15)
    ends = {one.assignment_id: one.status for one in shop.results}
    assert ends == dict.fromkeys(("n0", "n1", "n2", "bad"), ResultStatus.SUCCESS)
    assert (len(step.times("n0")), worker.claims()) == (2, [])


async def test_a_step_that_cancels_itself_too_becomes_suspect_and_does_not_run_for_ever(shop: Shop) -> None:
    await vandalised(shop, itself=True)
    await asyncio.sleep(1000)
    bad = await stored(shop, "bad")
    assert (bad.state, bad.crashes) == (WorkState.QUARANTINED, 3)
    assert {shop.result(f"n{n}").status for n in range(3)} == {ResultStatus.SUCCESS}


async def test_without_handing_back_they_would_stay_running(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the slots forget their work, and the services of the worker stay cancelled."""
    monkeypatch.setattr(Pool, "_left", lambda self, held, task, **_: self.settled(held.id, held.fence))
    monkeypatch.setattr(Services, "_ended", lambda *_: None)
    await vandalised(shop)
    await asyncio.sleep(1000)
    assert (await stored(shop, "n0")).state is WorkState.RUNNING
    shop.members.clear()
