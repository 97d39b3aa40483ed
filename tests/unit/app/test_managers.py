"""`RetryManager` and `IdempotencyManager`: categories, keys and events on top of the retry loop."""

import asyncio
import json
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

import reefknot as rk
from reefknot.app import managers
from reefknot.audit.model.chain import Head
from reefknot.audit.model.event import RetryAttempt, RetryExhausted, RetryRecovered, RetryRefused, TimeoutOccurred
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.policy.book import PolicyBook
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from tests.stories import InLoop
from tests.unit.idempotency.failing_store import Failing, actions_in, events_in
from tests.unit.retrying.flaky import AsyncAlways, AsyncFlaky

PUT = rk.RetryCategory.KV_PUT


def managing(store: Store, **more: Any) -> rk.RetryManager:
    return rk.RetryManager(idempotency=store.idempotency, audit=store.audit, **more)


def in_memory(**more: Any) -> rk.RetryManager:
    return managing(MemoryStore(VirtualClock()), **more)


async def put(manager: rk.RetryManager, work: Any, policy: rk.RetryPolicy | None = None, **more: Any) -> Any:
    return await manager.execute_with_retry(PUT, "store it", work, policy, **more)


async def kinds(store: Store) -> list[str]:
    return [type(event).__name__ for event in await events_in(store.audit)]


@pytest.fixture
def store(url: str) -> InLoop:
    return InLoop(lambda: rk.open_store(url))


# ---- the loop --------------------------------------------------------------------------------------------------------


async def test_a_failure_that_recovers_is_audited_attempt_by_attempt_before_each_wait(store: Store) -> None:
    manager = managing(store)
    assert await put(manager, AsyncFlaky()) == "ok"
    assert await kinds(store) == [], "a success at the first try is no event"
    running = asyncio.create_task(put(manager, AsyncFlaky(ConnectionError("one"), OSError("two"))))
    await asyncio.sleep(0.1)
    assert await kinds(store) == ["RetryAttempt"]
    assert await running == "ok"
    first, second, end = await events_in(store.audit)
    assert isinstance(first, RetryAttempt)
    assert isinstance(second, RetryAttempt)
    assert isinstance(end, RetryRecovered)
    assert (first.attempt_number, first.exception_type, first.exception_message) == (1, "ConnectionError", "one")
    assert (second.attempt_number, second.exception_type, second.max_attempts) == (2, "OSError", 3)
    assert 0.45 <= first.delay_seconds <= 0.55
    assert end.total_attempts == 3
    assert end.elapsed_seconds == pytest.approx(first.delay_seconds + second.delay_seconds)


async def test_giving_up_raises_from_the_last_error_with_the_history_as_data(store: Store) -> None:
    with pytest.raises(rk.RetryError) as given_up:
        await put(managing(store), AsyncAlways())
    error = given_up.value
    assert (error.category, error.operation, error.reason) == ("RETRY_KV_PUT", "store it", "attempts_spent")
    assert isinstance(error.attempts, list)
    assert [type(one) for one in error.attempts] == [rk.AttemptRecord] * 3
    assert [one.failure.message for one in error.attempts] == ["call 1", "call 2", "call 3"]
    assert str(error.__cause__) == "call 3"
    assert await kinds(store) == ["RetryAttempt", "RetryAttempt", "RetryExhausted"]
    end = (await events_in(store.audit))[-1]
    assert isinstance(end, RetryExhausted)
    assert (end.total_attempts, end.final_exception_type, end.reason) == (3, "ConnectionError", "attempts_spent")
    assert end.attempt_seconds == 0.0


async def test_an_error_that_is_not_retryable_is_audited_and_raised_unchanged(store: Store) -> None:
    mistake = ValueError("bad")
    work = AsyncFlaky(mistake)
    with pytest.raises(ValueError, match="bad") as raised:
        await put(managing(store), work, rk.RetryPolicy(non_retryable_exceptions=[ValueError]))
    assert (raised.value is mistake, work.calls) == (True, 1)
    (event,) = await events_in(store.audit)
    assert isinstance(event, RetryRefused)
    assert (event.total_attempts, event.final_exception_type, event.reason) == (1, "ValueError", "not_retryable")


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (rk.RetryPolicy(), 3),
        (rk.RetryPolicy(retryable_exceptions=[KeyError]), 3),
        (rk.RetryPolicy(retryable_exceptions=[OSError]), 1),
        (rk.RetryPolicy(retryable_exceptions=[LookupError], non_retryable_exceptions=[KeyError]), 1),
        (rk.RetryPolicy(non_retryable_exceptions=[LookupError], retryable_exceptions=[KeyError]), 3),
    ],
)
async def test_the_lists_of_the_policy_decide_and_without_any_everything_is_retried(policy: Any, calls: int) -> None:
    work = AsyncAlways(KeyError)
    with pytest.raises((rk.RetryError, KeyError)):
        await put(in_memory(), work, policy)
    assert work.calls == calls


async def test_every_attempt_runs_under_its_categorys_timeout_and_that_is_an_event(store: Store) -> None:
    began: list[float] = []

    async def hangs() -> None:
        began.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    with pytest.raises(rk.RetryError) as given_up:
        await put(managing(store), hangs)
    events = await events_in(store.audit)
    assert isinstance(given_up.value.__cause__, rk.AttemptTimeoutError)
    assert len(began) == 3
    assert 5.45 <= began[1] - began[0] <= 5.55
    timeouts = [event for event in events if isinstance(event, TimeoutOccurred)]
    assert [(one.attempt_number, one.timeout_seconds) for one in timeouts] == [(1, 5.0), (2, 5.0), (3, 5.0)]
    failed = [event for event in events if isinstance(event, RetryAttempt | RetryExhausted)]
    assert [one.attempt_seconds for one in failed] == [5.0, 5.0, 5.0], "each without the wait before it"


@pytest.mark.parametrize(("policy", "seconds"), [({}, 60), ({"attempt_timeout": 100}, 100)])
async def test_a_given_policy_keeps_its_timeout_or_gets_its_categorys(policy: dict[str, Any], seconds: float) -> None:
    once = rk.RetryPolicy(max_attempts=1, **policy)
    with pytest.raises(rk.RetryError) as given_up:
        await in_memory().execute_with_retry("execution_containment", "x", asyncio.Event().wait, once)
    assert isinstance(given_up.value.__cause__, rk.AttemptTimeoutError)
    assert given_up.value.__cause__.seconds == seconds


async def test_an_inner_manager_that_gave_up_is_not_asked_again() -> None:
    store = MemoryStore(VirtualClock())
    manager, work = managing(store), AsyncAlways()
    with pytest.raises(rk.RetryError) as given_up:
        await put(manager, lambda: put(manager, work))
    assert (work.calls, given_up.value.reason) == (3, "inner_exhausted")
    assert (await kinds(store))[-2:] == ["RetryExhausted", "RetryRefused"]


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_object_is_refused_with_what_to_pass_and_a_plain_function_is_as_good() -> None:
    manager, work = in_memory(), AsyncFlaky()
    with pytest.raises(TypeError, match="a coroutine object can run only once, so pass the function itself"):
        await put(manager, work())
    with pytest.raises(TypeError, match="a function to call for every attempt"):
        await put(manager, 5)
    assert work.calls == 0
    assert await put(manager, lambda: 7) == 7


# ---- the key ---------------------------------------------------------------------------------------------------------


async def test_a_hit_runs_nothing_and_the_record_has_one_event(store: Store) -> None:
    work, manager = AsyncFlaky(ConnectionError()), managing(store)
    for _ in range(2):
        assert await put(manager, work, idempotency_key="k") == "ok"
    assert work.calls == 2
    assert await kinds(store) == ["RetryAttempt", "RetryRecovered", "IdempotencyEvent", "IdempotencyEvent"]
    assert await actions_in(store.audit) == ["record", "hit"]


class OwnLog:
    def __init__(self, *, down: bool = False) -> None:
        self.kept: list[AuditEntry] = []
        self.down = down

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        if self.down:
            raise OSError("down")
        self.kept.extend(entries)
        return Head("own", len(self.kept))

    @property
    def types(self) -> list[str]:
        return [entry.event_type for entry in self.kept]


def logging_to(log: OwnLog, store: Store, **more: Any) -> rk.RetryManager:
    return rk.RetryManager(idempotency=store.idempotency, audit=log, **more)


async def test_with_a_log_of_its_own_the_same_events_are_there_once(store: Store) -> None:
    work, log = AsyncFlaky(ConnectionError()), OwnLog()
    for _ in range(2):
        await put(logging_to(log, store), work, idempotency_key="k")
    assert await events_in(store.audit) == []
    assert log.types == ["retry_attempt", "retry_recovered", "idempotency", "idempotency"]


async def test_the_record_and_its_event_are_kept_in_one_step(store: Store) -> None:
    """When the store cannot keep the record, it has no event of it either; when it can, it has both."""
    keys = Failing(store.idempotency)
    keys.fails["finish"] = 5
    manager = rk.RetryManager(idempotency=keys, audit=store.audit)
    await put(manager, AsyncFlaky(), idempotency_key="k")
    assert await actions_in(store.audit) == ["unrecorded"]
    await put(manager, AsyncFlaky(), idempotency_key="k")
    assert await actions_in(store.audit) == ["unrecorded", "record", "hit"]


async def test_on_one_chain_the_record_needs_no_second_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what goes with a change is kept."""
    monkeypatch.setattr(store.audit, "append", OwnLog(down=True).append)
    await put(managing(store), AsyncFlaky(), idempotency_key="k")
    assert await actions_in(store.audit) == ["record"]


@pytest.mark.parametrize("own", [True, False], ids=["a log of its own", "the store's log"])
async def test_a_cancelled_call_is_never_retried_and_its_key_is_released(store: Store, own: bool) -> None:
    log, calls = OwnLog(), 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(4)

    manager = logging_to(log, store) if own else managing(store)
    running = asyncio.create_task(put(manager, slow, idempotency_key="k"))
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(1)
    assert calls == 1
    bodies = log.kept if own else [one.entry for one in await store.audit.read()]
    assert [b'"action":"release"' in entry.body for entry in bodies] == [True]


async def test_under_a_guard_there_is_one_execution_however_many_the_policy_allows(store: Store) -> None:
    manager = managing(store, wait_for_result=0.0)
    for policy in (None, rk.RetryPolicy(max_attempts=5)):
        work, key = AsyncAlways(), f"k {policy is None}"
        for error in (rk.RetryError, rk.OutcomeUnknownError):
            with pytest.raises(error):
                await put(manager, work, policy, idempotency_key=key, mode="guard")
        assert work.calls == 1


async def test_control_without_the_guard_every_attempt_is_made_and_the_key_is_released(store: Store) -> None:
    manager, work = managing(store), AsyncAlways()
    with pytest.raises(rk.RetryError):
        await put(manager, work, idempotency_key="k")
    assert work.calls == 3
    assert await put(manager, AsyncFlaky(), idempotency_key="k") == "ok"
    assert await actions_in(store.audit) == ["release", "record"]


async def test_types_fingerprints_and_modes_are_passed_on(store: Store) -> None:
    async def pair() -> Any:
        return (1, 2)

    manager = managing(store)
    how: dict[str, Any] = {"idempotency_key": "k", "result_type": tuple[int, int]}
    for _ in range(2):
        assert await put(manager, pair, fingerprint="a", **how) == (1, 2)
    with pytest.raises(rk.KeyConflictError):
        await put(manager, pair, fingerprint="b", **how)
    with pytest.raises(rk.ParameterError, match="mode"):
        await put(manager, pair, mode="exactly once")
    with pytest.raises(rk.ParameterTypeError, match="result_type"):
        await put(manager, pair, idempotency_key="z", result_type=OwnLog)


# ---- the log that fails ----------------------------------------------------------------------------------------------


async def test_a_log_that_is_down_changes_no_outcome(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    log = OwnLog(down=True)
    manager = logging_to(log, store)
    assert await put(manager, AsyncFlaky(ConnectionError()), idempotency_key="k") == "ok"
    assert manager.journal.buffered == 3
    log.down = False
    await asyncio.sleep(2)
    await manager.journal.write()
    assert log.types == ["retry_attempt", "retry_recovered", "idempotency"]
    assert "the audit log cannot be written" in caplog.text


async def test_fail_closed_stops_the_work_and_begins_no_other(store: Store) -> None:
    log, work = OwnLog(down=True), AsyncFlaky(ConnectionError())
    manager = logging_to(log, store, on_audit_failure="fail_closed")
    for _ in range(2):
        with pytest.raises(rk.AuditUnavailableError):
            await put(manager, work, idempotency_key="k")
        assert work.calls == 1, "the second time it is not begun"
        await asyncio.sleep(2)
    log.down = False
    assert await put(manager, work, idempotency_key="k") == "ok"
    assert log.types == ["retry_attempt", "idempotency", "idempotency"]


async def test_fail_closed_after_the_effect_does_not_make_it_happen_again(store: Store) -> None:
    """The log breaks between the first failure and the success: the caller gets the error, the record stands."""
    log, calls = OwnLog(), 0
    manager = logging_to(log, store, on_audit_failure="fail_closed")

    async def work() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError
        log.down = True
        return "ok"

    with pytest.raises(rk.AuditUnavailableError):
        await put(manager, work, idempotency_key="k")
    log.down = False
    await asyncio.sleep(2)
    assert (await put(manager, work, idempotency_key="k"), calls) == ("ok", 2)
    assert log.types == ["retry_attempt", "retry_recovered", "idempotency", "idempotency"]


# ---- what is audited -------------------------------------------------------------------------------------------------


async def test_every_audited_decision_replays_to_the_byte(store: Store) -> None:
    manager = managing(store)
    for category in rk.RetryCategory:
        with pytest.raises(rk.RetryError):
            await manager.execute_with_retry(category, "x", AsyncAlways())
    kept = await store.audit.read(AuditQuery(limit=1000))
    assert await store.audit.verify() == []
    again = replay(entry.entry.body for entry in kept)
    assert again.differences == ()
    assert again.decisions == len(kept) == sum(rk.RetryManager().get_policy(c).max_attempts for c in rk.RetryCategory)


async def test_secrets_reach_no_event_no_log_and_no_error(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    secret = "correct-horse-battery"
    caplog.set_level(logging.DEBUG)
    with pytest.raises(rk.RetryError) as given_up:
        await managing(store, secrets=(secret,)).execute_with_retry(
            PUT,
            f"put {secret}",
            AsyncFlaky(*[ConnectionError(f"refused {secret} https://me:hunter2@example.com")] * 3),
            idempotency_key=f"k {secret}",
            tenant_id=f"t {secret}",
            correlation_id=f"c {secret}",
            trace_id=f"r {secret}",
            additional_context={"note": secret, "api_key": "hunter2", secret: {"deep": [secret]}},
        )
    kept = await store.audit.read()
    assert (len(kept), "trying again" in caplog.text) == (4, True)
    for text in (*(repr(one) for one in kept), str(given_up.value), repr(given_up.value.attempts), caplog.text):
        assert secret not in text
        assert "hunter2" not in text


async def test_a_context_that_no_event_could_hold_is_refused_before_anything_happens() -> None:
    work = AsyncFlaky()
    for context, named in (({"a": object()}, "additional_context is"), ({"a": float("nan")}, "a is")):
        with pytest.raises(rk.NotJsonError, match=named):
            await put(in_memory(), work, additional_context=context)
    assert work.calls == 0


@pytest.mark.parametrize("category", [PUT, "RETRY_KV_PUT", "kv.put", "KV_PUT", "retry_kv_put"])
async def test_events_have_the_categorys_value_however_it_was_spelled(category: str) -> None:
    store = MemoryStore(VirtualClock())
    with pytest.raises(rk.RetryError):
        await managing(store).execute_with_retry(category, "x", AsyncAlways())
    events = await events_in(store.audit)
    assert [getattr(event, "retry_category", None) for event in events] == ["RETRY_KV_PUT"] * 3


# ---- keys by hand ----------------------------------------------------------------------------------------------------


async def test_an_answer_recorded_by_hand_stays_the_same_again_is_fine_another_is_refused(store: Store) -> None:
    keys = rk.IdempotencyManager(store.idempotency)
    await keys.record_result("k", {"a": 1, "b": (2,)}, {"by": "hand"})
    await keys.record_result("k", {"b": [2], "a": 1})
    with pytest.raises(rk.KeyConflictError):
        await keys.record_result("k", {"a": 2})
    assert await keys.check_idempotency("k") == {"a": 1, "b": [2]}
    assert (await keys.lookup("k")).metadata == {"by": "hand"}


async def test_a_result_cannot_be_recorded_for_a_key_that_is_being_worked_on(store: Store) -> None:
    await store.idempotency.claim("k", owner="somebody")
    for keys in (rk.IdempotencyManager(store.idempotency), managing(store).idempotency_manager):
        with pytest.raises(rk.KeyInProgressError):
            await keys.record_result("k", 1)
    assert await actions_in(store.audit) == ["in_progress"], "the manager of a RetryManager is audited"


async def test_lookup_tells_none_recorded_from_nothing_recorded(store: Store) -> None:
    keys = rk.IdempotencyManager(store.idempotency)
    await keys.record_result("none", None)
    await store.idempotency.claim("held", owner="somebody")
    assert (await keys.lookup("none")).found
    assert not (await keys.lookup("absent")).found
    assert (await keys.lookup("absent")).state is None
    assert (await keys.lookup("held")).state == "in_progress"
    assert await keys.check_idempotency("none") is await keys.check_idempotency("absent") is None


async def test_a_cleared_key_is_done_again(store: Store) -> None:
    work, manager = AsyncFlaky(), managing(store)
    for _ in range(2):
        await put(manager, work, idempotency_key="k")
        await manager.idempotency_manager.clear_idempotency("k")
    assert (await actions_in(store.audit), work.calls) == (["record", "forget", "record", "forget"], 2)


# ---- without arguments -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_manager", None)
    monkeypatch.setattr(managers, "_warned", False)


@pytest.mark.usefixtures("fresh")
async def test_the_one_default_manager_warns_once_of_keys_and_logs_events(caplog: pytest.LogCaptureFixture) -> None:
    manager = rk.get_retry_manager()
    assert manager is rk.get_retry_manager()
    rk.RetryManager()
    rk.IdempotencyManager()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "end with this process" in caplog.text
    assert "open_store" in caplog.text
    work = AsyncFlaky(ConnectionError())
    caplog.set_level(logging.INFO, logger="reefknot.audit")
    for _ in range(2):
        assert await put(manager, work, idempotency_key="k") == "ok"
    assert work.calls == 2
    lines = [json.loads(record.message) for record in caplog.records if record.name == "reefknot.audit"]
    kinds = ["retry_attempt", "retry_recovered", "idempotency", "idempotency"]
    assert [line["event_type"] for line in lines] == kinds


@pytest.mark.usefixtures("fresh")
async def test_inside_a_store_a_manager_without_arguments_uses_it(store: Store) -> None:
    assert rk.RetryManager().idempotency_manager.store is store.idempotency
    assert rk.IdempotencyManager().store is store.idempotency
    assert rk.get_retry_manager().idempotency_manager.store is not store.idempotency


def test_the_book_given_is_the_one_that_holds() -> None:
    manager = in_memory(book=PolicyBook.loads("operations:\n  KV_PUT:\n    max_attempts: 7\n"))
    assert (manager.get_policy(PUT).max_attempts, manager.get_policy("kv.get").max_attempts) == (7, 3)


# ---- given up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "category"),
    [
        (rk.RetryCategory.API_REQUEST, rk.RetryCategory.API_REQUEST),
        ("RETRY_API_REQUEST", rk.RetryCategory.API_REQUEST),
        ("api.request", rk.RetryCategory.API_REQUEST),
        ("moon.landing", "moon.landing"),
    ],
)
async def test_the_category_of_a_given_up_operation_is_a_category(given: Any, category: object) -> None:
    with pytest.raises(rk.RetryError) as raised:
        await in_memory().execute_with_retry(given, "get", AsyncAlways())
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (error.category, type(error.category)) == (category, type(category))


async def test_the_log_lines_of_a_managers_operation_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    manager, policy = in_memory(), rk.RetryPolicy(2, 0)
    for _ in range(200):
        with pytest.raises(rk.RetryError):
            await manager.execute_with_retry("api.request", "an operation of this test", AsyncAlways(), policy)
    assert sum("trying again" in line for line in caplog.messages) == 10


async def test_the_switch_gives_an_operation_one_attempt(no_retry: None) -> None:
    work = AsyncAlways()
    with pytest.raises(rk.RetryError, match="1 attempt"):
        await put(in_memory(), work)
    assert work.calls == 1
