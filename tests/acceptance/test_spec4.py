"""
Retry and idempotency design: its testing strategy item by item, its matrix row by row, its sample policies.

Where the document's own code is wrong, the test says what holds.
"""

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
from reefknot.policy.model.book import Layer
from reefknot.policy.model.defaults import RetryCategory
from reefknot.stores.port import Store
from reefknot.testing import run_virtual
from tests.acceptance.steps import Work
from tests.stories import InLoop

Category = rk.RetryCategory
MATRIX = [
    # category, wire value, attempts, base, cap, seconds that one attempt may take
    ("NATS_CONNECT", "RETRY_NATS_CONNECT", 5, 1.0, 30.0, 10),
    ("NATS_PUBLISH", "RETRY_NATS_PUBLISH", 3, 0.5, 10.0, 5),
    ("NATS_SUBSCRIBE", "RETRY_NATS_SUBSCRIBE", 3, 0.5, 10.0, 5),
    ("NATS_STREAM_CREATE", "RETRY_NATS_STREAM_CREATE", 2, 2.0, 60.0, 15),
    ("KV_CREATE", "RETRY_KV_CREATE", 2, 1.0, 30.0, 10),
    ("KV_GET", "RETRY_KV_GET", 3, 0.5, 10.0, 5),
    ("KV_PUT", "RETRY_KV_PUT", 3, 0.5, 10.0, 5),
    ("KV_DELETE", "RETRY_KV_DELETE", 2, 1.0, 30.0, 5),
    ("EXECUTION_INTENT", "RETRY_EXECUTION_INTENT", 2, 2.0, 60.0, 30),
    ("EXECUTION_CONTAINMENT", "RETRY_EXECUTION_CONTAINMENT", 2, 2.0, 60.0, 60),
    ("EXECUTION_EXPIRATION", "RETRY_EXECUTION_EXPIRATION", 1, 1.0, 30.0, 120),
    ("APPROVAL_CHECK", "RETRY_APPROVAL_CHECK", 3, 1.0, 30.0, 5),
    ("APPROVAL_GRANT", "RETRY_APPROVAL_GRANT", 2, 2.0, 60.0, 10),
    ("REPLAY_PROCESSING", "REPLAY_REPLAY_PROCESSING", 1, 1.0, 30.0, 300),
    ("REPLAY_VALIDATION", "REPLAY_REPLAY_VALIDATION", 2, 1.0, 30.0, 60),
    ("API_REQUEST", "RETRY_API_REQUEST", 3, 1.0, 30.0, 30),
    ("API_VALIDATION", "RETRY_API_VALIDATION", 2, 0.5, 10.0, 10),
]
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


@pytest.mark.parametrize("category", [*ROWS, "RETRY_MOON_LANDING"])
async def test_every_category_gives_up_after_its_attempts_waits_and_timeouts(given: Given, category: str) -> None:
    """One that is unknown runs under the fallback."""
    attempts, base, cap, limit = ROWS.get(category, (3, 1.0, 30.0, None))
    work = failing()
    with pytest.raises(rk.RetryError) as given_up:
        await given.execute(category, "x", work)
    assert work.calls == len(given_up.value.attempts) == attempts
    waits = [one.delay for one in given_up.value.attempts]
    assert waits[-1] is None
    for retry, wait in enumerate(waits[:-1]):
        middle = min(cap, base * 2**retry)
        assert wait is not None
        assert 0.9 * middle <= wait <= min(cap, 1.1 * middle)
    if limit is None:
        assert {event["retry_category"] for event in await given.on_record()} == {category}
        return

    began = asyncio.get_running_loop().time()
    with pytest.raises(rk.RetryError) as given_up:
        await given.execute(category, "x", asyncio.Event().wait)
    assert isinstance(given_up.value.__cause__, rk.AttemptTimeoutError)
    waited = sum(one.delay or 0.0 for one in given_up.value.attempts)
    assert asyncio.get_running_loop().time() - began == pytest.approx(limit * attempts + waited)
    timeouts = await given.on_record("timeout_occurred")
    assert [event["timeout_seconds"] for event in timeouts] == [limit] * attempts


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
        put = {"category": Category.KV_PUT, "idempotency_key": "k"}
        assert await given.manager.execute_with_kv_retry("Store state", work, **put) == {"revision": 1}
    assert work.calls == 1
    seen = [event["retry_category"] for event in await given.on_record()]
    assert seen == ["RETRY_KV_GET"] * 2 + ["RETRY_KV_PUT"] * 2


async def test_every_event_has_the_documented_keys(given: Given) -> None:
    operation = "Publish to exoarmur.audit.append.v1"
    subject = {"subject": "audit"}
    with pytest.raises(rk.RetryError):
        await given.execute(Category.NATS_PUBLISH, operation, failing(), **WHO, additional_context=subject)
    for _ in range(2):
        await given.execute(Category.KV_PUT, "Store state", Operation(), idempotency_key="abc123def456", **WHO)
    publish = WHO | {"retry_category": "RETRY_NATS_PUBLISH", "operation": operation}
    put = WHO | {"retry_category": "RETRY_KV_PUT", "operation": "Store state", "idempotency_key": "abc123def456"}
    _, second = await given.on_record("retry_attempt")  # the last failure is only exhausted
    (exhausted,) = await given.on_record("retry_exhausted")
    recorded, hit = await given.on_record("idempotency")
    failure = ("TimeoutError", "Connection timeout")
    last = dict(zip(("final_exception_type", "final_exception_message"), failure, strict=True))
    retried = dict(zip(("exception_type", "exception_message"), failure, strict=True))
    expected = [
        (second, publish | retried | {"attempt_number": 2, "max_attempts": 3, "additional_context": subject}),
        (exhausted, publish | last | {"total_attempts": 3}),
        (recorded, put | {"action": "record"}),
        (hit, put | {"action": "hit"}),
    ]
    for event, fields in expected:
        assert event.items() >= fields.items()
        assert event["timestamp"].endswith("Z")
    assert 0.9 <= second["delay_seconds"] <= 1.1


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


def test_another_value_anywhere_is_another_key_and_what_is_not_json_is_refused() -> None:
    compute = rk.IdempotencyManager.compute_idempotency_key
    others: list[tuple[Any, ...]] = [
        ("kill_switch_updat", *KEY[1:]),
        *((KEY[0], tenant, *KEY[2:]) for tenant in (None, "")),
        *((*KEY[:3], params) for params in (None, {"switch_name": None})),
        *(("x", None), ("x", "")),
    ]
    keys = {compute(*one) for one in [KEY, *others]}
    assert len(keys) == len(others) + 1
    for params in ({"a": object()}, {"a": float("nan")}, {1: "a"}):
        with pytest.raises(rk.NotJsonError):
            compute("x", additional_params=params)  # type: ignore[arg-type]


def test_control_the_documents_own_key_depends_on_the_order() -> None:
    def documents(params: dict[str, Any]) -> str:
        return hashlib.sha256(str(sorted({"additional_params": params}.items())).encode()).hexdigest()

    assert documents({"a": 1, "b": 2}) != documents({"b": 2, "a": 1})


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


def test_the_matrix_has_seventeen_rows_and_no_category_is_without_one() -> None:
    assert [row[:2] for row in MATRIX] == [(category.name, category.value) for category in RetryCategory]
    assert len(MATRIX) == 17


@pytest.mark.parametrize("spelling", ["NATS_PUBLISH", "RETRY_NATS_PUBLISH", "nats.publish", "retry_nats_publish"])
def test_a_row_is_configured_under_any_spelling_in_the_documents_own_words(spelling: str) -> None:
    """The document's example of a custom policy, as a file."""
    waits = "max_attempts: 5, base_delay: 2.0, max_delay: 60.0, backoff_multiplier: 1.5"
    jitter = "jitter_enabled: true, jitter_factor: 0.2"
    lists = "[TimeoutError, ConnectionError], non_retryable_exceptions: [ValueError, TypeError, KeyError]"
    text = f"operations: {{{spelling}: {{{waits}, {jitter}, retryable_exceptions: {lists}}}}}"
    policy = rk.PolicyBook.loads(text).resolve("operation:NATS_PUBLISH")

    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.multiplier) == (5, 2.0, 60.0, 1.5)
    assert (policy.jitter.value, policy.jitter_factor, policy.attempt_timeout) == ("proportional", 0.2, 5.0)
    assert policy.retryable_exceptions == ("TimeoutError", "ConnectionError")
    assert policy.non_retryable_exceptions == ("ValueError", "TypeError", "KeyError")
    assert policy.provenance["max_attempts"].layer is Layer.TARGET
    assert policy.provenance["attempt_timeout"].layer is Layer.BUILTIN


def test_a_configured_row_leaves_the_others_alone() -> None:
    book = rk.PolicyBook.loads("operations: {KV_GET: {max_attempts: 9}}")
    others = [category.target for category in RetryCategory if category is not RetryCategory.KV_GET]
    assert [book.resolve(target) for target in others] == [rk.PolicyBook().resolve(target) for target in others]


class NetworkError(Exception):
    """The sample's own class."""


class DnsError(NetworkError):
    """A special case of it."""


DEFAULT = rk.RetryPolicy(retryable_exceptions=[Exception])
STRICT = rk.RetryPolicy(non_retryable_exceptions=[ValueError, TypeError, KeyError])
LENIENT = rk.RetryPolicy(non_retryable_exceptions=[ValueError], retryable_exceptions=[ValueError, NetworkError])


def executions(policy: rk.RetryPolicy, error: Exception) -> int:
    """How often work runs that always fails with `error`: three times or once."""
    work = Work(error)
    with rk.testing.virtual_time():
        rk.Retrier(policy).run(work)
    return work.executions


@pytest.mark.parametrize(
    ("policy", "thrice", "once"),
    [
        (DEFAULT, [ValueError, TypeError, KeyError, RuntimeError, OSError, NetworkError, TimeoutError], []),
        (STRICT, [NetworkError, TimeoutError, LookupError], [ValueError, TypeError, KeyError, UnicodeError]),
        (LENIENT, [ValueError, UnicodeError, NetworkError, DnsError], [KeyError, TimeoutError]),
    ],
    ids=["default", "strict", "lenient"],
)
def test_a_listed_class_is_heard_with_its_subclasses_and_not_with_its_parents(
    policy: rk.RetryPolicy, thrice: list[type[Exception]], once: list[type[Exception]]
) -> None:
    """In the lenient policy `ValueError` stands in both lists, and what is in neither does not run again."""
    assert {error: executions(policy, error()) for error in thrice} == dict.fromkeys(thrice, 3)
    assert {error: executions(policy, error()) for error in once} == dict.fromkeys(once, 1)


@pytest.mark.parametrize("rule", [NetworkError, "NetworkError", f"{NetworkError.__module__}.NetworkError"])
def test_a_class_is_listed_by_itself_or_by_name(rule: type[Exception] | str) -> None:
    assert executions(rk.RetryPolicy(retryable_exceptions=[rule]), DnsError()) == 3
    assert executions(rk.RetryPolicy(non_retryable_exceptions=[rule]), DnsError()) == 1
