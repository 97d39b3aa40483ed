"""How long a step, and one execution of it, may take; one that ignores its end is answered at its time all the same."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reefknot.policy.book import PolicyBook
from reefknot.queue.model.messages import ExecAssignment, ResultStatus, StepResult
from reefknot.queue.model.work import WorkState
from reefknot.steps.port import BlockContext
from reefknot.steps.python import BlockRegistry, PythonBlock, block
from tests.unit.queue.shops import ONE, ran, sent, stored
from tests.workshop import OK, Shop, Step, work

FILE = """
worker:
  default_timeout_ms: 50000
  retries: {v2: {enabled: true, default_policy: {jitter_type: none, max_attempts: 0},
    block_policies: {slow: {timeout_ms: 70000}, invoice: {timeout_ms: 60000}}}}
"""


async def limits(
    shop: Shop, assignment: ExecAssignment, *, type_: str = "test.step", file: str = FILE, **own: Any
) -> tuple[float, str]:
    """The seconds that an endless step of this type had, and the code it ended with."""
    registry = BlockRegistry()
    seconds: list[float] = []

    @block(type_, into=registry, **own)
    async def endless(inputs: Any, context: Any) -> None:
        seconds.append(context.seconds)
        await asyncio.sleep(1e9)

    await shop.worker("w1", *registry.blocks().values(), book=PolicyBook.loads(file).snapshot)
    await sent(shop, assignment, wait=1000)
    result = shop.result(assignment.assignment_id)
    assert result.status is ResultStatus.TIMEOUT
    return seconds[0], str(result.error_code)


@pytest.mark.parametrize(
    ("job", "payload", "options", "own", "expected"),
    [
        ("test.step", {}, {"timeout_ms": 1000}, {"timeout": 9.0}, 1.0),
        ("test.step", {"timeout_ms": 2000}, {}, {"timeout": 9.0}, 2.0),
        ("test.step", {}, {}, {"timeout": 9.0}, 9.0),
        ("invoice.render", {}, {}, {"timeout": 9.0}, 60.0),  # the file comes before the decorator
        ("slow.step", {}, {}, {}, 70.0),
        ("test.step", {}, {}, {}, 50.0),
    ],
)
async def test_the_time_for_all_executions_is_the_nearest_that_was_said(
    shop: Shop, job: str, payload: Any, options: Any, own: Any, expected: float
) -> None:
    found = await limits(shop, work("a", payload, job=job, **options), type_=job, **own)
    assert found == (expected, "CANCELLED_BY_TIMEOUT")


async def test_without_any_word_it_is_half_a_minute(shop: Shop) -> None:
    bare = "worker: {retries: {v2: {default_policy: {max_attempts: 0}}}}"
    assert (await limits(shop, work("a"), file=bare))[0] == 30.0


ATTEMPTS = """
worker: {retries: {v2: {enabled: true, default_policy: {jitter_type: none, max_attempts: 1, base_delay_ms: 100,
  attempt_timeout_ms: 4000}, block_policies: {slow: {attempt_timeout_ms: 3000}, free: {attempt_timeout_ms: null}}}}}
"""


@pytest.mark.parametrize(
    ("job", "options", "own", "seconds", "code"),
    [
        ("test.step", {"attempt_timeout_ms": 1000}, {"attempt_timeout": 2.0}, 1.0, "CONNECTION_TIMEOUT"),
        ("test.step", {}, {"attempt_timeout": 2.0}, 2.0, "CONNECTION_TIMEOUT"),
        ("slow.step", {}, {"attempt_timeout": 2.0}, 3.0, "CONNECTION_TIMEOUT"),
        ("test.step", {}, {}, 4.0, "CONNECTION_TIMEOUT"),
        ("free.step", {}, {}, 30.0, "CANCELLED_BY_TIMEOUT"),
        ("test.step", {"timeout_ms": 500}, {}, 0.5, "CANCELLED_BY_TIMEOUT"),  # both limits hold
    ],
)
async def test_the_time_of_one_execution_is_the_nearest_that_was_said(
    shop: Shop, job: str, options: Any, own: Any, seconds: float, code: str
) -> None:
    assert await limits(shop, work("a", job=job, **options), type_=job, file=ATTEMPTS, **own) == (seconds, code)


async def test_a_request_that_hangs_once_is_cut_off_and_tried_again(shop: Shop) -> None:
    """Built in for `http.request` alone: ten seconds for one execution."""

    async def hangs() -> StepResult:
        await asyncio.sleep(1e6)
        return OK

    step = Step(hangs, OK, name="http.request")
    await ran(shop, step, work("a", job="http.request"), wait=60)
    assert shop.result("a").status is ResultStatus.SUCCESS
    assert [context.seconds for context in step.contexts] == [10.0, 10.0]


async def stubborn(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    """Take 8.5 s, whatever happens."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + 8.5
    while loop.time() < ends:
        try:
            await asyncio.sleep(ends - loop.time())
        except asyncio.CancelledError:
            continue
    return {"late": True}


LINES = Path(__file__).read_text().splitlines()
PLACE = f"{__file__}:{next(number for number, text in enumerate(LINES, 1) if 'sleep(ends - loop' in text)}"


async def test_it_is_timed_out_at_its_time_and_its_end_is_dropped(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reefknot")
    worker = await shop.worker("w1", PythonBlock("test.step", stubborn), concurrency=ONE)
    began = shop.clock.now()
    await shop.send(work("a", timeout_ms=2000, retry=None))
    async with asyncio.timeout(8):
        while not shop.results:  # noqa: ASYNC110 - a result sets no event
            await asyncio.sleep(0.01)
    assert 2.0 <= shop.clock.now() - began < 2.3
    assert (shop.result("a").status, shop.result("a").output) == (ResultStatus.TIMEOUT, None)
    assert (await stored(shop, "a")).state is WorkState.FAILED
    assert worker.snapshot().classes["cpu"].active == 1, "its slot is taken"
    await asyncio.sleep(7)
    assert worker.snapshot().classes["cpu"].active == 0
    assert (len(shop.results), worker.claims()) == (1, [])
    goes_on, ended = (one for one in caplog.messages if "its step" in one)
    assert f"w1: test.step a: its step goes on after its 2 s, at {PLACE}" in goes_on
    assert "ended 6.5 s after its time was over; its result is not kept" in ended
    assert PLACE in ended


async def test_the_next_attempt_runs_in_another_slot_and_the_slots_are_not_exceeded(shop: Shop) -> None:
    running: list[int] = []

    async def first_is_stubborn(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
        running.append(context.attempt)
        if context.attempt == 1 and context.assignment_id == "a":
            await stubborn(inputs, context)
        return {"attempt": context.attempt}

    worker = await shop.worker("w1", PythonBlock("test.step", first_is_stubborn), concurrency={"cpu": 2})
    await sent(shop, work("a", attempt_timeout_ms=500, timeout_ms=60_000), wait=3)
    assert (shop.result("a").status, shop.result("a").output) == (ResultStatus.SUCCESS, {"attempt": 2})
    pool = worker.pools["cpu"]
    assert (running, pool.active, pool.has("a")) == ([1, 2], 1, False)
    for n in range(6):
        await shop.send(work(f"b{n}"))
    await asyncio.sleep(1)
    assert len(shop.results) == 7, "the other slot works on"
    await asyncio.sleep(8)
    assert pool.active == 0


async def test_one_slot_waits_for_the_step_that_holds_it(shop: Shop) -> None:
    await shop.worker("w1", PythonBlock("test.step", stubborn), Step(name="test.other"), concurrency=ONE)
    await sent(shop, work("a", timeout_ms=2000, retry=None), work("b", job="test.other"), wait=8)
    assert [one.assignment_id for one in shop.results] == ["a"]
    await asyncio.sleep(2)
    assert [one.assignment_id for one in shop.results] == ["a", "b"]


async def test_a_step_that_cleans_up_soon_is_an_ordinary_time_out(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async def cleans(inputs: Mapping[str, Any], context: BlockContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)

    caplog.set_level(logging.WARNING, "reefknot")
    await shop.worker("w1", PythonBlock("test.step", cleans), concurrency=ONE)
    await sent(shop, work("a", timeout_ms=1000, retry=None), wait=2)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    assert not any("its step" in one for one in caplog.messages)


async def test_a_worker_that_ends_does_not_wait_for_ever(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "reefknot")
    released = asyncio.Event()

    async def deaf(inputs: Mapping[str, Any], context: BlockContext) -> None:
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()

    worker = await shop.worker("w1", PythonBlock("test.step", deaf), concurrency=ONE)
    await sent(shop, work("a", timeout_ms=60_000), wait=1)
    began = shop.clock.now()
    await worker.drain(2)
    await worker.stop()
    assert shop.clock.now() - began < 15
    assert (await stored(shop, "a")).state is WorkState.PENDING, "it went back, and runs again elsewhere"
    await asyncio.sleep(60)
    released.set()
    await asyncio.sleep(1)
    assert shop.results == [], "what it comes to is nobody's any more"
    (line,) = (one for one in caplog.messages if "ignores that it is cancelled" in one)
    assert f"at {__file__}:" in line
