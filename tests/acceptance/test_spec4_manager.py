"""
Retry and idempotency design: the retry flow, the key, the audit samples, and the testing strategy item by item.

Exception lists by themselves are in `test_spec4_exceptions.py`, the rows of the matrix in `test_spec4_matrix.py`. Where
the document's own code is wrong, the test says what holds instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reefknot as rk
from reefknot.audit.port import AuditQuery
from reefknot.stores.port import Store
from reefknot.testing import run_virtual
from tests.acceptance.test_spec4_matrix import MATRIX
from tests.stories import InLoop

Category = rk.RetryCategory
ROWS = {name: (attempts, base, cap, timeout) for name, _, attempts, base, cap, timeout in MATRIX}
WHO: dict[str, Any] = {"tenant_id": "tenant-123", "correlation_id": "corr-456", "trace_id": "trace-789"}


class Given(NamedTuple):
    """An open store, and a manager over it."""

    store: Store
    manager: rk.RetryManager

    async def execute(self, *given: Any, **more: Any) -> Any:
        return await self.manager.execute_with_retry(*given, **more)

    async def on_record(self, event_type: str | None = None) -> list[dict[str, Any]]:
        """The events as anybody reads them: plain JSON."""
        kept = await self.store.audit.read(AuditQuery(event_type=event_type, limit=10_000))
        return [json.loads(one.entry.body) for one in kept]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Given]:
    async with rk.open_store(url) as store:
        yield Given(store, rk.RetryManager(idempotency=store.idempotency, audit=store.audit))


@pytest.fixture(params=["memory", "sqlite"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> InLoop:
    url = "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'state.db'}"
    return InLoop(partial(opened, url))


class Operation:
    """Fails as often as it is told to, then gives `value`; counts."""

    def __init__(self, *errors: Exception, value: Any = "done", seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.value = value
        self.seconds = seconds
        self.calls = 0

    async def __call__(self) -> Any:
        self.calls += 1
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        return self.value


def failing(times: int = 99) -> Operation:
    return Operation(*(TimeoutError("Connection timeout") for _ in range(times)))


async def test_an_operation_of_an_unknown_category_runs_under_the_fallback(given: Given) -> None:
    work = failing()
    with pytest.raises(rk.RetryError):
        await given.execute("RETRY_MOON_LANDING", "land", work)
    assert work.calls == 3
    assert {event["retry_category"] for event in await given.on_record()} == {"RETRY_MOON_LANDING"}


@pytest.mark.parametrize("category", list(Category))
async def test_every_category_gives_up_after_its_attempts_with_waits_in_its_range(
    given: Given, category: rk.RetryCategory
) -> None:
    attempts, base, cap, _ = ROWS[category.name]
    work = failing()
    with pytest.raises(rk.RetryError) as given_up:
        await given.execute(category, "x", work)
    assert work.calls == attempts
    assert len(given_up.value.attempts) == attempts
    waits = [one.delay for one in given_up.value.attempts]
    assert waits[-1] is None
    for retry, wait in enumerate(waits[:-1]):
        assert wait is not None
        middle = min(cap, base * 2**retry)
        assert 0.9 * middle <= wait <= min(cap, 1.1 * middle)


@pytest.mark.parametrize("category", list(Category))
async def test_every_attempt_has_the_timeout_of_its_category(given: Given, category: rk.RetryCategory) -> None:
    with pytest.raises(rk.RetryError) as given_up:
        await given.execute(category, "x", asyncio.Event().wait)
    assert isinstance(given_up.value.__cause__, rk.AttemptTimeoutError)
    attempts, _, _, limit = ROWS[category.name]
    spent = asyncio.get_running_loop().time()
    waited = sum(one.delay or 0.0 for one in given_up.value.attempts)
    assert spent == pytest.approx(limit * attempts + waited)
    timeouts = await given.on_record("timeout_occurred")
    assert [event["timeout_seconds"] for event in timeouts] == [limit] * attempts


# ---- integration tests of the document -------------------------------------------------------------------------------


async def test_nats_operations_are_published_unless_said_otherwise(given: Given) -> None:
    assert await given.manager.execute_with_nats_retry("Publish to subject", failing(2), **WHO) == "done"
    with pytest.raises(rk.RetryError) as given_up:
        await given.manager.execute_with_nats_retry("connect", failing(), category=Category.NATS_CONNECT)
    assert len(given_up.value.attempts) == 5
    seen = Counter(event["retry_category"] for event in await given.on_record("retry_attempt"))
    assert seen == {"RETRY_NATS_PUBLISH": 2, "RETRY_NATS_CONNECT": 4}


async def test_kv_operations_are_gets_unless_said_otherwise(given: Given) -> None:
    assert await given.manager.execute_with_kv_retry("Get kill switch status", failing(1), **WHO) == "done"
    work = Operation(value={"revision": 1})
    for _ in range(2):
        answer = await given.manager.execute_with_kv_retry(
            "Store kill switch state", work, category=Category.KV_PUT, idempotency_key="k"
        )
        assert answer == {"revision": 1}
    assert work.calls == 1
    assert [event["retry_category"] for event in await given.on_record()] == [
        "RETRY_KV_GET",
        "RETRY_KV_GET",
        "RETRY_KV_PUT",
        "RETRY_KV_PUT",
    ]


async def test_a_retry_attempt_event_has_the_documented_keys(given: Given) -> None:
    operation = "Publish to exoarmur.audit.append.v1"
    await given.execute(Category.NATS_PUBLISH, operation, failing(2), **WHO, additional_context={"subject": "audit"})
    event = (await given.on_record("retry_attempt"))[1]
    assert 0.9 <= event["delay_seconds"] <= 1.1
    assert event["timestamp"].endswith("Z")
    expected = {
        "retry_category": "RETRY_NATS_PUBLISH",
        "operation": operation,
        "attempt_number": 2,
        "max_attempts": 3,
        "exception_type": "TimeoutError",
        "exception_message": "Connection timeout",
        "additional_context": {"subject": "audit"},
    }
    assert event.items() >= (expected | WHO).items()


async def test_a_retry_exhausted_event_has_the_documented_keys(given: Given) -> None:
    with pytest.raises(rk.RetryError):
        await given.execute(Category.KV_GET, "Get kill switch status", failing(), **WHO)
    (event,) = await given.on_record("retry_exhausted")
    expected = {
        "retry_category": "RETRY_KV_GET",
        "operation": "Get kill switch status",
        "total_attempts": 3,
        "final_exception_type": "TimeoutError",
        "final_exception_message": "Connection timeout",
    }
    assert event.items() >= (expected | WHO).items()
    assert len(await given.on_record("retry_attempt")) == 2, "the last failure is only exhausted"


async def test_idempotency_events_have_the_documented_keys(given: Given) -> None:
    for _ in range(2):
        await given.execute(Category.KV_PUT, "Store state", Operation(), idempotency_key="abc123def456", **WHO)
    events = await given.on_record("idempotency")
    assert [event["action"] for event in events] == ["record", "hit"]
    expected = {"retry_category": "RETRY_KV_PUT", "operation": "Store state", "idempotency_key": "abc123def456"}
    for event in events:
        assert event.items() >= (expected | WHO).items()
        assert "timestamp" in event


# ---- the key ---------------------------------------------------------------------------------------------------------

KEY = ("kill_switch_update", "tenant-123", "corr-456", {"switch_name": "all_execution"})


def test_a_key_is_a_hash_of_the_four_names_and_nothing_else() -> None:
    compute = rk.get_retry_manager().idempotency_manager.compute_idempotency_key
    key = compute(*KEY)
    assert key == compute(
        operation=KEY[0], tenant_id=KEY[1], correlation_id=KEY[2], additional_params={"switch_name": "all_execution"}
    )
    canonical = (
        '{"additional_params":{"switch_name":"all_execution"},"correlation_id":"corr-456",'
        '"operation":"kill_switch_update","tenant_id":"tenant-123"}'
    )
    assert key == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        ("kill_switch_updat", *KEY[1:]),
        (KEY[0], None, *KEY[2:]),
        (KEY[0], "", *KEY[2:]),
        (*KEY[:3], None),
        (*KEY[:3], {"switch_name": None}),
    ],
)
def test_another_value_anywhere_is_another_key(other: tuple[Any, ...]) -> None:
    compute = rk.IdempotencyManager.compute_idempotency_key
    assert compute(*other) != compute(*KEY)
    assert compute("x", None) != compute("x", "")


def test_control_the_documents_own_key_depends_on_the_order() -> None:
    def documents(params: dict[str, Any]) -> str:
        return hashlib.sha256(str(sorted({"additional_params": params}.items())).encode()).hexdigest()

    assert documents({"a": 1, "b": 2}) != documents({"b": 2, "a": 1})


@pytest.mark.parametrize("params", [{"a": object()}, {"a": float("nan")}, {1: "a"}])
def test_parameters_that_are_not_json_are_refused(params: dict[Any, Any]) -> None:
    with pytest.raises(rk.NotJsonError):
        rk.IdempotencyManager.compute_idempotency_key("x", additional_params=params)


# ---- the document's mistakes -----------------------------------------------------------------------------------------


async def test_a_result_of_none_is_a_hit(given: Given) -> None:
    work = Operation(value=None)
    for _ in range(3):
        assert await given.execute(Category.KV_DELETE, "x", work, idempotency_key="k") is None
    assert work.calls == 1
    assert [event["action"] for event in await given.on_record()] == ["record", "hit", "hit"]


async def five_at_once(execute: Callable[[Operation], Awaitable[Any]]) -> tuple[int, list[Any]]:
    work = Operation(value={"paid": 20}, seconds=1)
    answers = await asyncio.gather(*(execute(work) for _ in range(5)))
    return work.calls, answers


async def test_five_concurrent_callers_one_effect(given: Given) -> None:
    calls, answers = await five_at_once(lambda work: given.execute(Category.KV_PUT, "pay", work, idempotency_key="k"))
    assert calls == 1
    assert answers == [{"paid": 20}] * 5


async def test_control_the_documents_flow_runs_the_effect_for_each_of_them(given: Given) -> None:
    """Check, act, record, as the document has it."""
    keys = given.manager.idempotency_manager

    async def check_then_act(work: Operation) -> Any:
        existing = await keys.check_idempotency("k")
        if existing is not None:
            return existing
        result = await work()
        await keys.record_result("k", result)
        return result

    calls, _ = await five_at_once(check_then_act)
    assert calls == 5


def test_a_key_outlives_the_process_on_a_durable_store(tmp_path: Path) -> None:
    """Two runs of an event loop over one file stand for two processes."""
    work = Operation(value=[1, {"two": None}])

    async def main() -> None:
        async with opened(f"sqlite:{tmp_path / 'state.db'}") as given:
            assert given.store.durable
            answer = await given.execute(Category.KV_PUT, "x", work, idempotency_key="k")
            assert answer == [1, {"two": None}]

    for _ in range(2):
        run_virtual(main())
    assert work.calls == 1
