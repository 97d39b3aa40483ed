"""One effect per key: claim, act under a lease, record outside of the act."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from reefknot import errors, idempotency, testing
from reefknot.idempotency.model import Claimed, Done, KeyRecord, KeyState, Released
from reefknot.idempotency.once import KeyOptions, Mode, Once, mode_named
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.processes import process_mark
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from tests.stories import InLoop
from tests.unit.idempotency.failing_store import Failing, actions_in, key_events, once
from tests.unit.runtime.test_processes import gone_process

NOT_WAITING = KeyOptions(wait=0.0)
GUARD = KeyOptions(Mode.GUARD, lease=6, wait=0.0)
ITS_NUMBER = object()


@pytest.fixture
def keys(url: str) -> InLoop:
    """The keys of an open store, which fail where a test says so."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Failing]:
        async with open_store(url) as store:
            yield Failing(store.idempotency)

    return InLoop(opened)


class Effect:
    """Counts how often it happened; takes `seconds`, then gives the number of the time, or what it is to give."""

    def __init__(self, seconds: float = 0.0, error: BaseException | None = None, gives: object = ITS_NUMBER) -> None:
        self.times = 0
        self.ended = 0
        self.seconds = seconds
        self.error = error
        self.gives = gives

    async def __call__(self) -> Any:
        self.times += 1
        mine = self.times
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.ended += 1
        return {"time": mine} if self.gives is ITS_NUMBER else self.gives


async def begun(work: Coroutine[Any, Any, Any], seconds: float = 1.0) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(seconds)
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def record_of(keys: Failing) -> KeyRecord:
    record: KeyRecord | None = await keys.inner.get("k")
    assert record is not None
    return record


# ---- one effect, one answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gives", "answer"), [(ITS_NUMBER, {"time": 1}), (None, None)])
async def test_the_second_caller_gets_the_record_and_no_effect(keys: Failing, gives: object, answer: object) -> None:
    effect = Effect(gives=gives)
    assert await once(keys, "k", effect) == answer
    assert (await once(keys, "k", effect), effect.times) == (answer, 1)
    assert await actions_in(keys.audit) == ["record", "hit"]


async def sixteen_callers(run: Any, keys: int) -> tuple[Counter[str], dict[str, set[str]]]:
    """16 callers go through all keys, each in an order of its own: effects by key, and the answers that were given."""
    effects: Counter[str] = Counter()
    answers: dict[str, set[str]] = {}

    async def caller(number: int) -> None:
        for step in range(keys):
            key = f"k{(step * 7 + number * 3) % keys}"

            async def effect(key: str = key) -> str:
                effects[key] += 1
                mine = f"{key} by {number}"
                await asyncio.sleep(0.01)
                return mine

            answers.setdefault(key, set()).add(await run(key, effect))

    await asyncio.gather(*(caller(number) for number in range(16)))
    return effects, answers


async def test_sixteen_callers_of_many_keys_one_effect_each_and_no_two_answers(keys: Failing) -> None:
    effects, answers = await sixteen_callers(lambda key, work: once(keys, key, work), 50)
    assert (len(effects), set(effects.values()), {len(given) for given in answers.values()}) == (50, {1}, {1})


async def test_control_checking_first_and_acting_then_runs_effects_more_than_once(keys: Failing) -> None:
    """Without the claim, the same callers do it again and again, and get differing answers."""

    async def check_then_act(key: str, work: Any) -> Any:
        record = await keys.get(key)
        if record is not None and record.result is not None:
            return msgspec.json.decode(record.result)
        result = await work()
        answer = await keys.claim(key, owner="anybody")
        if isinstance(answer, Claimed):
            await keys.finish(answer.claim, Done(msgspec.json.encode(result).decode()))
        return result

    effects, answers = await sixteen_callers(check_then_act, 50)
    assert max(effects.values()) > 1
    assert max(len(given) for given in answers.values()) > 1


async def test_first_and_later_callers_get_equal_answers_however_the_first_one_was_made(keys: Failing) -> None:
    made = Effect(gives={"pair": (1, 2), "whole": 3.0, 7: "seven", "big": 2**70})
    first, later = await once(keys, "k", made), await once(keys, "k", made)
    assert first == later == {"pair": [1, 2], "whole": 3.0, "7": "seven", "big": 2**70}
    assert [type(one) for one in first.values()] == [type(one) for one in later.values()]


async def test_a_result_that_does_not_fit_the_type_is_an_error_and_stays_recorded(keys: Failing) -> None:
    effect = Effect()
    for _ in range(2):
        with pytest.raises(errors.ParameterTypeError, match="result_type"):
            await once(keys, "k", effect, KeyOptions(result_type=int))
    assert await once(keys, "k", effect) == {"time": 1}


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("value", [object(), float("nan"), {"a": {1: float("inf")}}, lambda: None, ENDLESS])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "remembered"])
async def test_a_result_that_is_no_json_is_refused_not_repeated(keys: Failing, value: object, recorded: bool) -> None:
    effect = Effect(gives=value)
    keys.fails["finish"] = 0 if recorded else 6
    with pytest.raises(errors.NotJsonError):
        await once(keys, "k", effect)
    with pytest.raises(errors.RecordedFailureError, match="it happened, but its result could not be kept"):
        await once(keys, "k", effect)
    assert effect.times == 1


async def test_a_result_that_is_too_large_is_refused_and_the_effect_is_not_repeated(url: str) -> None:
    effect = Effect(gives="x" * 2000)
    async with open_store(url, largest_result=1000) as store:
        with pytest.raises(errors.ResultTooLargeError) as refused:
            await once(store.idempotency, "k", effect)
        assert refused.value.limit == 1000
        with pytest.raises(errors.RecordedFailureError):
            await once(store.idempotency, "k", effect)
        assert await actions_in(store.audit) == ["record", "hit"]
    assert effect.times == 1


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "remembered"])
async def test_another_payload_under_a_key_is_refused_with_both_fingerprints(keys: Failing, recorded: bool) -> None:
    effect = Effect()
    keys.fails["finish"] = 0 if recorded else 6
    await once(keys, "k", effect, KeyOptions(fingerprint="one"))
    with pytest.raises(errors.KeyConflictError) as refused:
        await once(keys, "k", effect, KeyOptions(fingerprint="two"))
    assert (refused.value.recorded, refused.value.given, effect.times) == ("one", "two", 1)
    assert await actions_in(keys.audit) == ["record" if recorded else "unrecorded", "conflict"]


@pytest.mark.parametrize("key", ["", "x" * 600])
async def test_an_invalid_key_is_refused_before_any_work(keys: Failing, key: str) -> None:
    effect = Effect()
    with pytest.raises(ValueError, match="key"):
        await once(keys, key, effect)
    assert effect.times == 0


# ---- waiting for the first -------------------------------------------------------------------------------------------


async def test_five_callers_at_once_one_effect_and_all_wait_for_it(keys: Failing) -> None:
    effect = Effect(seconds=3)
    answers = await asyncio.gather(*(once(keys, "k", effect) for _ in range(5)))
    assert (effect.times, answers) == (1, [{"time": 1}] * 5)
    assert sorted(await actions_in(keys.audit)) == ["hit"] * 4 + ["record"]


@pytest.mark.parametrize("wait", [0, 10])
async def test_a_caller_waits_no_longer_than_its_limit(keys: Failing, wait: float) -> None:
    effect = Effect(seconds=30)
    first = await begun(once(keys, "k", effect))
    began = asyncio.get_running_loop().time()
    with pytest.raises(errors.KeyInProgressError) as refused:
        await once(keys, "k", effect, KeyOptions(wait=wait))
    assert 0 < refused.value.retry_after <= 60
    assert asyncio.get_running_loop().time() - began == pytest.approx(wait, abs=0.1)
    await first
    assert (await actions_in(keys.audit), effect.times) == (["in_progress", "record"], 1)


async def test_when_the_first_one_fails_a_waiting_caller_tries_itself(keys: Failing) -> None:
    first = await begun(once(keys, "k", Effect(seconds=2, error=ConnectionError("no"))))
    assert await once(keys, "k", Effect()) == {"time": 1}
    with pytest.raises(ConnectionError):
        await first
    assert await actions_in(keys.audit) == ["release", "record"]


# ---- leases ----------------------------------------------------------------------------------------------------------


async def test_work_that_takes_longer_than_its_lease_keeps_it(keys: Failing) -> None:
    effect = Effect(seconds=300)
    first = await begun(once(keys, "k", effect, KeyOptions(lease=6)), 200)
    with pytest.raises(errors.KeyInProgressError):
        await once(keys, "k", effect, NOT_WAITING)
    assert (await first, effect.times) == ({"time": 1}, 1)


async def test_a_zombie_is_refused_and_its_work_cancelled(keys: Failing) -> None:
    """Its renewals fail for longer than its lease; another one takes over; then the store is back."""
    slow = Effect(seconds=1000)
    zombie = await begun(once(keys, "k", slow, KeyOptions(lease=6)), 0.1)
    keys.fails["renew"] = 4
    await asyncio.sleep(7)
    assert await once(keys.inner, "k", Effect()) == {"time": 1}
    with pytest.raises(errors.LeaseLostError):
        await zombie
    assert (slow.times, slow.ended) == (1, 0), "the work was cut off"
    assert keys.calls["finish"] == 0, "and there is nothing to write"
    assert asyncio.get_running_loop().time() < 20
    assert (await record_of(keys)).result == '{"time":1}'


async def test_a_zombie_that_finishes_before_its_renewal_fails_cannot_write(keys: Failing) -> None:
    keys.fails["renew"] = 1000
    zombie = await begun(once(keys, "k", Effect(seconds=20), KeyOptions(lease=6)), 7)
    assert await once(keys.inner, "k", Effect(gives="theirs")) == "theirs"
    with pytest.raises(errors.LeaseLostError):
        await zombie
    assert keys.calls["finish"] == 1, "what was refused is not tried again"
    assert await once(keys, "k", Effect()) == "theirs"


async def test_a_wall_clock_that_jumps_by_a_day_changes_nothing(url: str) -> None:
    class Jumping(VirtualClock):
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__()
            self.loop = loop
            self.jumped = 0.0

        def now(self) -> float:
            return self.loop.time()

        def wall(self) -> float:
            return 1_700_000_000 + self.loop.time() + self.jumped

    clock, effect = Jumping(asyncio.get_running_loop()), Effect(seconds=5)
    async with open_store(url, clock=clock, retention=3600) as store:
        assert await once(store.idempotency, "done", effect) == {"time": 1}
        held = await begun(once(store.idempotency, "held", effect))
        for jump in (86400.0, -86400.0):
            clock.jumped = jump
            assert await once(store.idempotency, "done", effect) == {"time": 1}
            with pytest.raises(errors.KeyInProgressError):
                await once(store.idempotency, "held", effect, NOT_WAITING)
        assert await held == {"time": 2}
    assert effect.times == 2


async def test_a_lease_error_of_another_key_inside_the_work_is_the_works_own_failure(keys: Failing) -> None:
    inner = errors.LeaseLostError("other", owner="x", fence=1)
    with pytest.raises(errors.LeaseLostError) as raised:
        await once(keys, "k", Effect(error=inner))
    assert raised.value is inner
    assert (await record_of(keys)).state is KeyState.RELEASED


# ---- cancellation ----------------------------------------------------------------------------------------------------


class Slow(Failing):
    """Every ending takes five seconds to be kept."""

    async def finish(self, claim: Any, ending: Any, **more: Any) -> Any:
        await asyncio.sleep(5)
        return await super().finish(claim, ending, **more)


async def test_cancelled_work_releases_its_key(keys: Failing) -> None:
    await cancelled(await begun(once(keys, "k", Effect(seconds=10))))
    assert await once(keys, "k", Effect(), NOT_WAITING) == {"time": 1}


async def test_a_second_cancellation_does_not_keep_the_key_from_being_released(keys: Failing) -> None:
    first = await begun(once(Slow(keys), "k", Effect(seconds=10)))
    first.cancel()
    await asyncio.sleep(1)
    await cancelled(first)
    await asyncio.sleep(10)
    assert await once(keys, "k", Effect(), NOT_WAITING) == {"time": 1}


@pytest.mark.parametrize("chain", [True, False])
async def test_a_caller_cancelled_while_its_result_is_recorded_keeps_the_record(keys: Failing, chain: bool) -> None:
    effect = Effect()
    await cancelled(await begun(once(Slow(keys), "k", effect, chain=chain), 2))
    assert (await once(keys, "k", effect), effect.times) == ({"time": 1}, 1)
    await asyncio.sleep(1)
    assert sorted(await actions_in(keys.audit)) == ["hit", "record"]


@pytest.mark.parametrize("mode", [Mode.RETRY, Mode.GUARD])
async def test_a_claim_whose_answer_was_lost_by_cancellation_is_released(keys: Failing, mode: Mode) -> None:
    class SlowToAnswer(Failing):
        async def claim(self, key: str, **more: Any) -> Any:
            answer = await super().claim(key, **more)
            await asyncio.sleep(1)
            return answer

    effect = Effect()
    await cancelled(await begun(once(SlowToAnswer(keys), "k", effect, KeyOptions(mode)), 0.5))
    assert effect.times == 0
    await asyncio.sleep(2)
    assert await once(keys, "k", Effect(), KeyOptions(mode, wait=0.0)) == {"time": 1}


async def test_an_outer_cancellation_wins_over_a_lost_lease(keys: Failing) -> None:
    """Both arrive in the same turn of the loop."""
    first = await begun(once(keys, "k", Effect(seconds=100), KeyOptions(lease=6)))
    keys.error = errors.LeaseLostError("k", owner="me", fence=1)
    keys.fails["renew"] = 1
    asyncio.get_running_loop().call_at(2.0, first.cancel)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert first.cancelled()


async def test_a_lost_lease_leaves_no_cancellation_behind(keys: Failing) -> None:
    """A task that goes on after `LeaseLostError` can wait as before."""
    keys.error = errors.LeaseLostError("k", owner="me", fence=1)
    keys.fails["renew"] = 1
    with pytest.raises(errors.LeaseLostError) as lost:
        await once(keys, "k", Effect(seconds=100), KeyOptions(lease=6))
    assert lost.value.__cause__ is None
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(1)


# ---- guard -----------------------------------------------------------------------------------------------------------


async def test_under_a_guard_an_exception_leaves_the_outcome_to_a_person(keys: Failing) -> None:
    effect = Effect(error=TimeoutError("did it arrive?"))
    with pytest.raises(TimeoutError):
        await once(keys, "k", effect, GUARD)
    with pytest.raises(errors.OutcomeUnknownError):
        await once(keys, "k", effect, GUARD)
    assert "did it arrive?" in ((await record_of(keys)).failure or "")
    assert (await actions_in(keys.audit), effect.times) == (["unknown", "unknown"], 1)
    await keys.resolve("k", Done('"it arrived"'))
    assert await once(keys, "k", effect, GUARD) == "it arrived"


async def test_under_a_guard_alone_a_vanished_owner_leaves_the_outcome_to_a_person(keys: Failing) -> None:
    effect = Effect()
    await keys.claim("k", owner="vanished", lease=6, guard=True)
    await keys.claim("control", owner="vanished", lease=6)
    await asyncio.sleep(7)
    with pytest.raises(errors.OutcomeUnknownError, match="vanished"):
        await once(keys, "k", effect, GUARD)
    assert effect.times == 0
    await keys.resolve("k", Released())
    assert await once(keys, "k", effect, GUARD) == {"time": 1}
    assert await once(keys, "control", effect) == {"time": 2}, "without the guard the work is done again"


async def test_under_a_guard_cancelled_work_is_unknown(keys: Failing) -> None:
    await cancelled(await begun(once(keys, "k", Effect(seconds=3), GUARD)))
    with pytest.raises(errors.OutcomeUnknownError):
        await once(keys, "k", Effect(), GUARD)


# ---- a record that cannot be written ---------------------------------------------------------------------------------


async def test_a_record_is_tried_again_with_one_event_and_the_effect_is_not(keys: Failing) -> None:
    effect = Effect()
    keys.fails["finish"] = 4
    assert (await once(keys, "k", effect), effect.times, keys.calls["finish"]) == ({"time": 1}, 1, 5)
    assert await actions_in(keys.audit) == ["record"]
    keys.done_but_lost["finish"] = 2
    assert await once(keys, "other", Effect()) == {"time": 1}
    assert await actions_in(keys.audit) == ["record", "record"]


@pytest.mark.parametrize("chain", [True, False])
async def test_a_record_that_never_succeeds_is_remembered_and_written_by_the_next_caller(
    keys: Failing, chain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    effect = Effect()
    keys.fails["finish"] = 6
    assert await once(keys, "k", effect, chain=chain) == {"time": 1}
    assert "is done but could not be recorded" in caplog.text
    assert await once(keys, "k", effect, chain=chain) == {"time": 1}, "from memory"
    assert await once(keys, "k", effect, chain=chain) == {"time": 1}, "and now it is written"
    assert effect.times == 1
    assert (await record_of(keys)).state is KeyState.DONE
    assert await actions_in(keys.audit) == ["unrecorded", "hit", "record", "hit"]


async def test_control_a_record_inside_the_retried_work_repeats_the_effect(keys: Failing) -> None:
    """What spec 4's sample does: the effect and its record in one retried block."""
    effect = Effect()
    keys.fails["finish"] = 2
    claimed = await keys.claim("k", owner="me")
    assert isinstance(claimed, Claimed)
    for _ in range(3):
        try:
            await effect()
            await keys.finish(claimed.claim, Done("1"))
            break
        except errors.StoreError:
            continue
    assert effect.times == 3


async def test_a_remembered_result_outlives_its_lease_in_this_process(keys: Failing) -> None:
    effect = Effect()
    keys.fails["finish"] = 5
    await once(keys, "k", effect, KeyOptions(lease=6))
    await asyncio.sleep(100)
    assert (await once(keys, "k", effect, KeyOptions(lease=6)), effect.times) == ({"time": 1}, 1)


async def test_a_result_that_another_owner_recorded_meanwhile_counts(keys: Failing) -> None:
    keys.fails["finish"] = 5
    await once(keys, "k", Effect(), KeyOptions(lease=6))
    await asyncio.sleep(10)
    assert await once(keys.inner, "k", Effect(gives="theirs")) == "theirs"
    assert await once(keys, "k", Effect()) == "theirs"


async def test_what_could_not_be_recorded_is_written_when_the_store_works_again(keys: Failing) -> None:
    """Nobody asks for the key again; the success of another one tells that the store is back."""
    keys.fails["finish"] = 5
    await once(keys, "k", Effect())
    await once(keys, "other", Effect())
    await asyncio.sleep(1)
    assert (await record_of(keys)).state is KeyState.DONE


async def test_no_new_work_begins_while_too_much_is_unrecorded(keys: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency.unrecorded, "MOST_UNRECORDED", 2)
    effect = Effect()
    await once(keys, "earlier", effect)
    keys.fails["finish"] = 10
    await once(keys, "one", effect)
    await once(keys, "two", effect)
    with pytest.raises(errors.StoreUnavailableError, match="2 results wait"):
        await once(keys, "three", effect)
    assert effect.times == 3
    assert await once(keys, "earlier", effect) == {"time": 1}, "what is on record is still answered"
    assert await once(keys, "one", effect) == {"time": 2}, "and written now"
    assert await once(keys, "three", effect) == {"time": 4}


# ---- a store in trouble ----------------------------------------------------------------------------------------------


async def test_a_store_that_does_not_answer_is_an_error_with_a_bound(keys: Failing) -> None:
    effect = Effect()
    keys.hangs.add("claim")
    with pytest.raises(errors.StoreUnavailableError, match="no answer within 30 s"):
        await once(keys, "k", effect)
    assert asyncio.get_running_loop().time() == pytest.approx(30)
    assert effect.times == 0
    keys.hangs.clear()
    await asyncio.sleep(60)


async def test_an_unreleased_key_hides_no_failure_of_the_work(keys: Failing, caplog: pytest.LogCaptureFixture) -> None:
    keys.fails["finish"] = 1
    with pytest.raises(ConnectionError, match="the real reason"):
        await once(keys, "k", Effect(error=ConnectionError("the real reason")), KeyOptions(lease=6))
    assert "could not be released" in caplog.text
    assert await once(keys, "k", Effect()) == {"time": 1}, "after the lease ran out"
    assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.5)


async def test_a_failed_renewal_is_logged_and_tried_again(keys: Failing, caplog: pytest.LogCaptureFixture) -> None:
    keys.error = OSError("any error at all")
    keys.fails["renew"] = 1
    assert await once(keys, "k", Effect(seconds=30), KeyOptions(lease=6)) == {"time": 1}
    assert "could not be renewed and is tried again: OSError: any error at all" in caplog.text


async def test_a_coroutine_that_is_closed_in_the_middle_leaves_quietly() -> None:
    """Nothing can be awaited any more then; its lease runs out by itself."""
    async with open_store("memory:") as store:
        effect = Effect(seconds=5)
        running = Once(store.idempotency).run("k", effect, KeyOptions(lease=6), key_events(store.idempotency, "k"))
        running.send(None)
        assert effect.times == 1
        running.close()
        assert await once(store.idempotency, "k", Effect()) == {"time": 1}


def test_neither_a_store_nor_its_memory_is_kept_alive() -> None:
    async def main() -> weakref.ref[Any]:
        keys = Failing(MemoryStore(VirtualClock()).idempotency)
        keys.fails["finish"] = 5
        await once(keys, "k", Effect())
        return weakref.ref(keys)

    gone = testing.run_virtual(main())
    gc.collect()
    assert gone() is None


def test_a_mode_is_known_by_its_name_and_txn_is_refused_with_where_to_find_it() -> None:
    assert [mode_named(mode) for mode in ("retry", "guard", "dedup")] == [Mode.RETRY, Mode.GUARD, Mode.DEDUP]
    with pytest.raises(errors.ParameterError, match="ledger"):
        mode_named("txn")


# ---- owners that are gone --------------------------------------------------------------------------------------------


async def held_by(keys: Failing, owner: str, mode: Mode = Mode.RETRY) -> None:
    """The key `k` is held by this owner, for a minute."""
    assert isinstance(await keys.claim("k", owner=owner, lease=60, guard=mode is Mode.GUARD), Claimed)


@pytest.mark.parametrize("mode", Mode)
async def test_a_key_whose_process_is_gone_is_free_at_once_or_unknown_under_a_guard(keys: Failing, mode: Mode) -> None:
    await held_by(keys, f"1@{gone_process()}", mode)
    effect = Effect()
    if mode is Mode.GUARD:
        with pytest.raises(errors.OutcomeUnknownError):
            await once(keys, "k", effect, KeyOptions(mode, wait=0.0))
    else:
        assert await once(keys, "k", effect, KeyOptions(mode, wait=0.0)) == {"time": 1}
    assert effect.times == (0 if mode is Mode.GUARD else 1)


@pytest.mark.parametrize(
    "owner", ["1", "1@0123456789ab.1.1", f"1@{process_mark()}"], ids=["plain", "foreign", "living"]
)
async def test_a_key_whose_process_lives_or_is_not_known_is_waited_for(keys: Failing, owner: str) -> None:
    await held_by(keys, owner)
    with pytest.raises(errors.KeyInProgressError, match=r"expires in 5\d"):
        await once(keys, "k", Effect(), KeyOptions(wait=5.0))


async def test_a_caller_that_waits_sees_the_process_end(keys: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr("reefknot.idempotency.waiting.owner_is_gone", lambda owner: owner in gone)
    loop = asyncio.get_running_loop()
    await held_by(keys, "other")
    waiting = await begun(once(keys, "k", Effect()), 10.5)
    assert not waiting.done()
    gone.append("other")
    began = loop.time()
    assert await waiting == {"time": 1}
    assert loop.time() - began <= 1.01


async def test_of_two_callers_that_notice_it_one_takes_over(keys: Failing) -> None:
    await held_by(keys, f"1@{gone_process()}")
    effect = Effect(1)
    answers = await asyncio.gather(*(once(keys, "k", effect) for _ in range(5)))
    assert (effect.times, answers) == (1, [{"time": 1}] * 5)
