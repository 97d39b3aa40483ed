"""`RetryManager` and `IdempotencyManager`: categories, keys and events on top of the retry loop."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

import reefknot as rk
from reefknot.app import managers
from reefknot.audit.model.chain import Head
from reefknot.audit.model.event import (
    IdempotencyEvent,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
)
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.policy.book import PolicyBook
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.testing import run_virtual
from tests.unit.idempotency.failing_store import Failing, actions_in, events_in
from tests.unit.retrying.flaky import AsyncAlways, AsyncFlaky

PUT = rk.RetryCategory.KV_PUT


def managing(store: Store, **more: Any) -> rk.RetryManager:
    return rk.RetryManager(idempotency=store.idempotency, audit=store.audit, **more)


def kinds(events: Sequence[object]) -> list[str]:
    return [type(event).__name__ for event in events]


# ---- the loop --------------------------------------------------------------------------------------------------------


async def test_a_success_at_the_first_try_is_no_event(url: str) -> None:
    async with rk.open_store(url) as store:
        assert await managing(store).execute_with_retry(PUT, "store it", AsyncFlaky()) == "ok"
        assert await events_in(store.audit) == []


async def test_a_failure_that_recovers_is_audited_attempt_by_attempt(url: str) -> None:
    async with rk.open_store(url) as store:
        work = AsyncFlaky(ConnectionError("one"), OSError("two"))
        assert await managing(store).execute_with_retry(PUT, "store it", work) == "ok"
        events = await events_in(store.audit)
    assert kinds(events) == ["RetryAttempt", "RetryAttempt", "RetryRecovered"]
    first, second, end = events
    assert isinstance(first, RetryAttempt)
    assert isinstance(second, RetryAttempt)
    assert isinstance(end, RetryRecovered)
    assert (first.attempt_number, first.exception_type, first.exception_message) == (1, "ConnectionError", "one")
    assert (second.attempt_number, second.exception_type, second.max_attempts) == (2, "OSError", 3)
    assert 0.45 <= first.delay_seconds <= 0.55
    assert end.total_attempts == 3
    assert end.elapsed_seconds == pytest.approx(first.delay_seconds + second.delay_seconds)


async def test_a_failure_is_audited_before_the_wait_begins(url: str) -> None:
    async with rk.open_store(url) as store:
        work = AsyncFlaky(ConnectionError("one"))
        running = asyncio.create_task(managing(store).execute_with_retry(PUT, "store it", work))
        await asyncio.sleep(0.1)
        assert kinds(await events_in(store.audit)) == ["RetryAttempt"]
        await running


async def test_giving_up_raises_from_the_last_error_with_the_history_as_data(url: str) -> None:
    async with rk.open_store(url) as store:
        with pytest.raises(rk.RetryError) as given_up:
            await managing(store).execute_with_retry(PUT, "store it", AsyncAlways())
        events = await events_in(store.audit)
    error = given_up.value
    assert (error.category, error.operation, error.reason) == ("RETRY_KV_PUT", "store it", "attempts_spent")
    assert isinstance(error.attempts, list)
    assert [type(one) for one in error.attempts] == [rk.AttemptRecord] * 3
    assert [one.failure.message for one in error.attempts] == ["call 1", "call 2", "call 3"]
    assert str(error.__cause__) == "call 3"
    assert kinds(events) == ["RetryAttempt", "RetryAttempt", "RetryExhausted"]
    end = events[-1]
    assert isinstance(end, RetryExhausted)
    assert (end.total_attempts, end.final_exception_type, end.reason) == (3, "ConnectionError", "attempts_spent")
    assert end.attempt_seconds == 0.0


async def test_an_error_that_is_not_retryable_is_audited_and_raised_unchanged(url: str) -> None:
    policy = rk.RetryPolicy(non_retryable_exceptions=[ValueError])
    mistake = ValueError("bad")
    work = AsyncFlaky(mistake)
    async with rk.open_store(url) as store:
        with pytest.raises(ValueError, match="bad") as raised:
            await managing(store).execute_with_retry(PUT, "store it", work, policy)
        (event,) = await events_in(store.audit)
    assert raised.value is mistake
    assert work.calls == 1
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
        await managing(MemoryStore(VirtualClock())).execute_with_retry(PUT, "x", work, policy)
    assert work.calls == calls


async def test_every_attempt_runs_under_its_categorys_timeout_and_that_is_an_event(url: str) -> None:
    began: list[float] = []

    async def hangs() -> None:
        began.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    async with rk.open_store(url) as store:
        with pytest.raises(rk.RetryError) as given_up:
            await managing(store).execute_with_retry(PUT, "store it", hangs)
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
    with pytest.raises(rk.RetryError) as given_up:
        await managing(MemoryStore(VirtualClock())).execute_with_retry(
            rk.RetryCategory.EXECUTION_CONTAINMENT, "x", asyncio.Event().wait, rk.RetryPolicy(max_attempts=1, **policy)
        )
    assert isinstance(given_up.value.__cause__, rk.AttemptTimeoutError)
    assert given_up.value.__cause__.seconds == seconds


async def test_an_inner_manager_that_gave_up_is_not_asked_again() -> None:
    store = MemoryStore(VirtualClock())
    manager, work = managing(store), AsyncAlways()
    with pytest.raises(rk.RetryError) as given_up:
        await manager.execute_with_retry(PUT, "outer", lambda: manager.execute_with_retry(PUT, "inner", work))
    assert work.calls == 3
    assert given_up.value.reason == "inner_exhausted"
    assert kinds(await events_in(store.audit))[-2:] == ["RetryExhausted", "RetryRefused"]


async def test_cancellation_is_never_retried_and_no_failure() -> None:
    store = MemoryStore(VirtualClock())
    calls = 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(4)

    running = asyncio.create_task(managing(store).execute_with_retry(PUT, "x", slow, idempotency_key="k"))
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert calls == 1
    assert await actions_in(store.audit) == ["release"]


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_object_is_refused_with_what_to_pass_and_without_complaints() -> None:
    manager = managing(MemoryStore(VirtualClock()))
    work = AsyncFlaky()
    with pytest.raises(TypeError, match="a coroutine object can run only once, so pass the function itself"):
        await manager.execute_with_retry(PUT, "x", work())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a function to call for every attempt"):
        await manager.execute_with_retry(PUT, "x", 5)  # type: ignore[arg-type]
    assert work.calls == 0


async def test_a_plain_function_is_as_good() -> None:
    assert await managing(MemoryStore(VirtualClock())).execute_with_retry(PUT, "x", lambda: 7) == 7  # type: ignore[arg-type,return-value]


# ---- the key ---------------------------------------------------------------------------------------------------------


async def test_a_hit_runs_nothing_and_the_record_has_one_event(url: str) -> None:
    work = AsyncFlaky(ConnectionError())
    async with rk.open_store(url) as store:
        manager = managing(store)
        assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
        assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
        events = await events_in(store.audit)
    assert work.calls == 2
    assert kinds(events) == ["RetryAttempt", "RetryRecovered", "IdempotencyEvent", "IdempotencyEvent"]
    assert [event.action for event in events if isinstance(event, IdempotencyEvent)] == ["record", "hit"]


class OwnLog:
    """A log that is not the store's."""

    def __init__(self) -> None:
        self.kept: list[AuditEntry] = []
        self.down = False

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        if self.down:
            raise OSError("down")
        self.kept.extend(entries)
        return Head("own", len(self.kept))

    @property
    def types(self) -> list[str]:
        return [entry.event_type for entry in self.kept]


async def test_with_a_log_of_its_own_the_same_events_are_there_once(url: str) -> None:
    work, log = AsyncFlaky(ConnectionError()), OwnLog()
    async with rk.open_store(url) as store:
        manager = rk.RetryManager(idempotency=store.idempotency, audit=log)
        for _ in range(2):
            await manager.execute_with_retry(PUT, "x", work, idempotency_key="k")
        assert await events_in(store.audit) == []
    assert log.types == ["retry_attempt", "retry_recovered", "idempotency", "idempotency"]


async def test_the_record_and_its_event_are_kept_in_one_step(url: str) -> None:
    """When the store cannot keep the record, it has no event of it either; when it can, it has both."""
    async with rk.open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.fails["finish"] = 5
        manager = rk.RetryManager(idempotency=keys, audit=store.audit)
        await manager.execute_with_retry(PUT, "x", AsyncFlaky(), idempotency_key="k")
        assert await actions_in(store.audit) == ["unrecorded"]
        await manager.execute_with_retry(PUT, "x", AsyncFlaky(), idempotency_key="k")
        assert await actions_in(store.audit) == ["unrecorded", "record", "hit"]


async def test_on_one_chain_the_record_needs_no_second_write(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rk.open_store(url) as store:

        async def down(entries: object) -> Head:
            raise OSError("only what goes with a change is kept")

        monkeypatch.setattr(store.audit, "append", down)
        await managing(store).execute_with_retry(PUT, "x", AsyncFlaky(), idempotency_key="k")
        assert await actions_in(store.audit) == ["record"]


async def test_a_cancelled_call_is_audited_in_a_log_of_its_own_too(url: str) -> None:
    log = OwnLog()
    async with rk.open_store(url) as store:
        manager = rk.RetryManager(idempotency=store.idempotency, audit=log)
        running = asyncio.create_task(manager.execute_with_retry(PUT, "x", asyncio.Event().wait, idempotency_key="k"))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(1)
    assert [b'"action":"release"' in entry.body for entry in log.kept] == [True]


async def test_under_a_guard_there_is_one_execution_however_many_the_policy_allows(url: str) -> None:
    async with rk.open_store(url) as store:
        manager = managing(store, wait_for_result=0.0)
        for policy in (None, rk.RetryPolicy(max_attempts=5)):
            work, key = AsyncAlways(), f"k {policy is None}"
            with pytest.raises(rk.RetryError):
                await manager.execute_with_retry(PUT, "x", work, policy, idempotency_key=key, mode="guard")
            with pytest.raises(rk.OutcomeUnknownError):
                await manager.execute_with_retry(PUT, "x", work, policy, idempotency_key=key, mode="guard")
            assert work.calls == 1


async def test_control_without_the_guard_every_attempt_of_the_policy_is_made(url: str) -> None:
    async with rk.open_store(url) as store:
        work = AsyncAlways()
        with pytest.raises(rk.RetryError):
            await managing(store).execute_with_retry(PUT, "x", work, idempotency_key="k")
        assert work.calls == 3


async def test_an_operation_that_gave_up_releases_its_key(url: str) -> None:
    async with rk.open_store(url) as store:
        manager = managing(store)
        with pytest.raises(rk.RetryError):
            await manager.execute_with_retry(PUT, "x", AsyncAlways(), idempotency_key="k")
        assert await manager.execute_with_retry(PUT, "x", AsyncFlaky(), idempotency_key="k") == "ok"
        assert await actions_in(store.audit) == ["release", "record"]


async def test_types_fingerprints_and_modes_are_passed_on(url: str) -> None:
    async def pair() -> Any:
        return (1, 2)

    async with rk.open_store(url) as store:
        manager = managing(store)
        how: dict[str, Any] = {"idempotency_key": "k", "result_type": tuple[int, int]}
        assert await manager.execute_with_retry(PUT, "x", pair, fingerprint="a", **how) == (1, 2)
        assert await manager.execute_with_retry(PUT, "x", pair, fingerprint="a", **how) == (1, 2)
        with pytest.raises(rk.KeyConflictError):
            await manager.execute_with_retry(PUT, "x", pair, fingerprint="b", **how)
        with pytest.raises(rk.ParameterError, match="mode"):
            await manager.execute_with_retry(PUT, "x", pair, mode="exactly once")
        with pytest.raises(rk.ParameterTypeError, match="result_type"):
            await manager.execute_with_retry(PUT, "x", pair, idempotency_key="z", result_type=OwnLog)


# ---- the log that fails ----------------------------------------------------------------------------------------------


def test_a_log_that_is_down_changes_no_outcome(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        log = OwnLog()
        log.down = True
        async with rk.open_store(url) as store:
            manager = rk.RetryManager(idempotency=store.idempotency, audit=log)
            work = AsyncFlaky(ConnectionError())
            assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
            assert manager.journal.buffered == 3
            log.down = False
            await asyncio.sleep(2)
            await manager.journal.write()
        assert log.types == ["retry_attempt", "retry_recovered", "idempotency"]

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert "the audit log cannot be written" in caplog.text


async def test_fail_closed_stops_the_work_and_begins_no_other(url: str) -> None:
    log = OwnLog()
    log.down = True
    async with rk.open_store(url) as store:
        manager = rk.RetryManager(idempotency=store.idempotency, audit=log, on_audit_failure="fail_closed")
        work = AsyncFlaky(ConnectionError())
        with pytest.raises(rk.AuditUnavailableError):
            await manager.execute_with_retry(PUT, "x", work, idempotency_key="k")
        assert work.calls == 1
        await asyncio.sleep(2)
        with pytest.raises(rk.AuditUnavailableError):
            await manager.execute_with_retry(PUT, "x", work, idempotency_key="k")
        assert work.calls == 1, "not begun"
        log.down = False
        await asyncio.sleep(2)
        assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
    assert log.types == ["retry_attempt", "idempotency", "idempotency"]


async def test_fail_closed_after_the_effect_does_not_make_it_happen_again(url: str) -> None:
    """The log breaks between the first failure and the success: the caller gets the error, the record stands."""
    log = OwnLog()
    async with rk.open_store(url) as store:
        manager = rk.RetryManager(idempotency=store.idempotency, audit=log, on_audit_failure="fail_closed")
        calls = 0

        async def work() -> str:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ConnectionError
            log.down = True
            return "ok"

        with pytest.raises(rk.AuditUnavailableError):
            await manager.execute_with_retry(PUT, "x", work, idempotency_key="k")
        log.down = False
        await asyncio.sleep(2)
        assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
        assert calls == 2
    assert log.types == ["retry_attempt", "retry_recovered", "idempotency", "idempotency"]


# ---- what is audited -------------------------------------------------------------------------------------------------


async def test_every_audited_decision_replays_to_the_byte(url: str) -> None:
    async with rk.open_store(url) as store:
        manager = managing(store)
        for category in rk.RetryCategory:
            with pytest.raises(rk.RetryError):
                await manager.execute_with_retry(category, "x", AsyncAlways())
        kept = await store.audit.read(AuditQuery(limit=1000))
        assert await store.audit.verify() == []
    again = replay(entry.entry.body for entry in kept)
    assert again.differences == ()
    assert again.decisions == len(kept) == sum(rk.RetryManager().get_policy(c).max_attempts for c in rk.RetryCategory)


def test_secrets_reach_neither_events_nor_logs_nor_the_error(url: str, caplog: pytest.LogCaptureFixture) -> None:
    secret = "correct-horse-battery"

    async def main() -> None:
        async with rk.open_store(url) as store:
            manager = managing(store, secrets=(secret,))
            with pytest.raises(rk.RetryError) as given_up:
                await manager.execute_with_retry(
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
        assert len(kept) == 4
        for text in (*(repr(one) for one in kept), str(given_up.value), repr(given_up.value.attempts), caplog.text):
            assert secret not in text
            assert "hunter2" not in text

    with caplog.at_level(logging.DEBUG):
        run_virtual(main())
    assert "trying again" in caplog.text


async def test_a_context_that_no_event_could_hold_is_refused_before_anything_happens(url: str) -> None:
    work = AsyncFlaky()
    async with rk.open_store(url) as store:
        for context, named in (({"a": object()}, "additional_context is"), ({"a": float("nan")}, "a is")):
            with pytest.raises(rk.NotJsonError, match=named):
                await managing(store).execute_with_retry(PUT, "x", work, additional_context=context)
    assert work.calls == 0


@pytest.mark.parametrize("category", [PUT, "RETRY_KV_PUT", "kv.put", "KV_PUT", "retry_kv_put"])
async def test_events_have_the_categorys_value_however_it_was_spelled(category: str) -> None:
    store = MemoryStore(VirtualClock())
    with pytest.raises(rk.RetryError):
        await managing(store).execute_with_retry(category, "x", AsyncAlways())
    events = await events_in(store.audit)
    assert {getattr(event, "retry_category", None) for event in events} == {"RETRY_KV_PUT"}
    assert len(events) == 3


# ---- keys by hand ----------------------------------------------------------------------------------------------------


async def test_a_result_recorded_by_hand_keeps_its_metadata(url: str) -> None:
    async with rk.open_store(url) as store:
        keys = rk.IdempotencyManager(store.idempotency)
        await keys.record_result("k", {"b": 1}, {"by": "hand"})
        assert await keys.check_idempotency("k") == {"b": 1}
        assert (await keys.lookup("k")).metadata == {"by": "hand"}


async def test_a_recorded_answer_stays_the_same_again_is_fine_another_is_refused(url: str) -> None:
    async with rk.open_store(url) as store:
        keys = rk.IdempotencyManager(store.idempotency)
        await keys.record_result("k", {"a": 1, "b": (2,)})
        await keys.record_result("k", {"b": [2], "a": 1})
        with pytest.raises(rk.KeyConflictError):
            await keys.record_result("k", {"a": 2})
        assert await keys.check_idempotency("k") == {"a": 1, "b": [2]}


async def test_a_result_cannot_be_recorded_for_a_key_that_is_being_worked_on(url: str) -> None:
    async with rk.open_store(url) as store:
        await store.idempotency.claim("k", owner="somebody")
        for keys in (rk.IdempotencyManager(store.idempotency), managing(store).idempotency_manager):
            with pytest.raises(rk.KeyInProgressError):
                await keys.record_result("k", 1)
        assert await actions_in(store.audit) == ["in_progress"], "the manager of a RetryManager is audited"


async def test_lookup_tells_none_recorded_from_nothing_recorded(url: str) -> None:
    async with rk.open_store(url) as store:
        keys = rk.IdempotencyManager(store.idempotency)
        await keys.record_result("none", None)
        await store.idempotency.claim("held", owner="somebody")
        assert (await keys.lookup("none")).found
        assert not (await keys.lookup("absent")).found
        assert (await keys.lookup("absent")).state is None
        assert (await keys.lookup("held")).state == "in_progress"
        assert await keys.check_idempotency("none") is await keys.check_idempotency("absent") is None


async def test_a_cleared_key_is_done_anew(url: str) -> None:
    work = AsyncFlaky()
    async with rk.open_store(url) as store:
        manager = managing(store)
        for _ in range(2):
            await manager.execute_with_retry(PUT, "x", work, idempotency_key="k")
            await manager.idempotency_manager.clear_idempotency("k")
        assert await actions_in(store.audit) == ["record", "forget", "record", "forget"]
    assert work.calls == 2


# ---- without arguments -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_manager", None)
    monkeypatch.setattr(managers, "_warned", False)


@pytest.mark.usefixtures("fresh")
def test_the_default_manager_is_one_and_says_once_that_its_keys_are_not_durable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rk.get_retry_manager() is rk.get_retry_manager()
        rk.RetryManager()
        rk.IdempotencyManager()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "end with this process" in caplog.text
    assert "open_store" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_without_arguments_keys_work_and_events_are_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        manager, work = rk.get_retry_manager(), AsyncFlaky(ConnectionError())
        for _ in range(2):
            assert await manager.execute_with_retry(PUT, "x", work, idempotency_key="k") == "ok"
        assert work.calls == 2

    with caplog.at_level(logging.INFO, logger="reefknot.audit"):
        run_virtual(main())
    lines = [record.message for record in caplog.records if record.name == "reefknot.audit"]
    assert [line.partition('"event_type":"')[2].partition('"')[0] for line in lines] == [
        "retry_attempt",
        "retry_recovered",
        "idempotency",
        "idempotency",
    ]


@pytest.mark.usefixtures("fresh")
async def test_inside_a_store_a_manager_without_arguments_uses_it(url: str) -> None:
    async with rk.open_store(url) as store:
        manager = rk.RetryManager()
        assert manager.idempotency_manager.store is store.idempotency
        assert rk.IdempotencyManager().store is store.idempotency
        assert rk.get_retry_manager().idempotency_manager.store is not store.idempotency


def test_the_book_given_is_the_one_that_holds() -> None:
    book = PolicyBook.loads("operations:\n  KV_PUT:\n    max_attempts: 7\n")
    manager = rk.RetryManager(book=book, idempotency=MemoryStore(VirtualClock()).idempotency)
    assert manager.get_policy(PUT).max_attempts == 7
    assert manager.get_policy("kv.get").max_attempts == 3


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
    async def work() -> None:
        raise ConnectionError

    with pytest.raises(rk.RetryError) as raised:
        await rk.RetryManager(idempotency=MemoryStore(VirtualClock()).idempotency).execute_with_retry(
            given, "get", work
        )
    assert raised.value.category is category or raised.value.category == category
    assert type(raised.value.category) is type(category)
    assert pickle.loads(pickle.dumps(raised.value)).category == category


async def test_the_log_lines_of_a_managers_operation_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ConnectionError

    manager = rk.RetryManager(idempotency=MemoryStore(VirtualClock()).idempotency)
    policy = rk.RetryPolicy(2, 0)
    for _ in range(200):
        with pytest.raises(rk.RetryError):
            await manager.execute_with_retry("api.request", "an operation of this test", work, policy)
    assert sum("trying again" in line for line in caplog.messages) == 10


async def test_the_switch_gives_an_operation_one_attempt(no_retry: None) -> None:
    calls = 0

    async def work() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError

    with pytest.raises(rk.RetryError, match="1 attempt"):
        await rk.RetryManager(idempotency=MemoryStore(VirtualClock()).idempotency).execute_with_retry(
            "api.request", "get", work
        )
    assert calls == 1
