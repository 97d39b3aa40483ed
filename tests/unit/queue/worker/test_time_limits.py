"""How long a step may take in all, and one execution of it: where each limit comes from, and which one holds."""

import asyncio
from typing import Any

from reefknot.policy.book import PolicyBook
from reefknot.queue.model.messages import ExecAssignment, ResultStatus
from reefknot.steps.python import BlockRegistry, block
from tests.rows import for_each_row
from tests.unit.queue.shops import ran, sent
from tests.workshop import Shop, Step, with_shop, work

FILE = """
worker:
  default_timeout_ms: 50000
  retries: {v2: {enabled: true, default_policy: {jitter_type: none, max_attempts: 0},
    block_policies: {slow: {timeout_ms: 70000}, invoice: {timeout_ms: 60000}}}}
"""


def limits(assignment: ExecAssignment, *, type_: str = "test.step", file: str = FILE, **own: Any) -> tuple[float, str]:
    """The seconds that an endless step of this type had, and the code it ended with."""
    registry = BlockRegistry()

    @block(type_, into=registry, **own)
    async def endless(inputs: Any, context: Any) -> None:
        seconds.append(context.seconds)
        await asyncio.sleep(1e9)

    seconds: list[float] = []

    async def story(shop: Shop) -> None:
        await shop.worker("w1", *registry.blocks().values(), book=PolicyBook.loads(file).snapshot)
        await sent(shop, assignment, wait=1000)
        result = shop.result(assignment.assignment_id)
        assert result.status is ResultStatus.TIMEOUT
        codes.append(str(result.error_code))

    codes: list[str] = []
    with_shop(story)
    return seconds[0], codes[0]


@for_each_row(
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
def test_the_time_for_all_executions_is_the_nearest_that_was_said(
    job: str, payload: dict[str, Any], options: dict[str, Any], own: dict[str, Any], expected: float
) -> None:
    assert limits(work("a", payload, job=job, **options), type_=job, **own) == (expected, "CANCELLED_BY_TIMEOUT")


def test_without_any_word_it_is_half_a_minute() -> None:
    assert limits(work("a"), file="worker: {retries: {v2: {default_policy: {max_attempts: 0}}}}")[0] == 30.0


ATTEMPTS = """
worker: {retries: {v2: {enabled: true, default_policy: {jitter_type: none, max_attempts: 1, base_delay_ms: 100,
  attempt_timeout_ms: 4000}, block_policies: {slow: {attempt_timeout_ms: 3000}, free: {attempt_timeout_ms: null}}}}}
"""


@for_each_row(
    ("job", "options", "own", "expected"),
    [
        ("test.step", {"attempt_timeout_ms": 1000}, {"attempt_timeout": 2.0}, (1.0, "CONNECTION_TIMEOUT")),
        ("test.step", {}, {"attempt_timeout": 2.0}, (2.0, "CONNECTION_TIMEOUT")),
        ("slow.step", {}, {"attempt_timeout": 2.0}, (3.0, "CONNECTION_TIMEOUT")),
        ("test.step", {}, {}, (4.0, "CONNECTION_TIMEOUT")),
        ("free.step", {}, {}, (30.0, "CANCELLED_BY_TIMEOUT")),
        ("test.step", {"timeout_ms": 500}, {}, (0.5, "CANCELLED_BY_TIMEOUT")),  # both limits hold
    ],
)
def test_the_time_of_one_execution_is_the_nearest_that_was_said(
    job: str, options: dict[str, Any], own: dict[str, Any], expected: tuple[float, str]
) -> None:
    assert limits(work("a", job=job, **options), type_=job, file=ATTEMPTS, **own) == expected


async def test_a_request_that_hangs_once_is_cut_off_and_tried_again(shop: Shop) -> None:
    """Built in for `http.request` alone: ten seconds for one execution."""
    hangs = Step(name="http.request")
    slept = iter((1e6, 0.01))

    async def run(inputs: Any, context: Any) -> Any:
        hangs.contexts.append(context)
        await asyncio.sleep(next(slept))
        return hangs.outcomes[0]

    hangs.run = run  # type: ignore[method-assign]
    await ran(shop, hangs, work("a", job="http.request"), wait=60)
    assert shop.result("a").status is ResultStatus.SUCCESS
    assert [context.seconds for context in hangs.contexts] == [10.0, 10.0]
