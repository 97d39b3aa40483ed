"""One effect per key: claim, act under a lease, record outside of the act."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections import Counter
from typing import Any

import msgspec
import pytest

from reefknot import errors
from reefknot.idempotency import unrecorded
from reefknot.idempotency.model import Claimed, Done, KeyState, Released
from reefknot.idempotency.once import KeyOptions, Mode, Once, mode_named
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.processes import process_mark
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from reefknot.testing import run_virtual
from tests.unit.idempotency.failing_store import Failing, actions_in, key_events, once
from tests.unit.runtime.test_processes import gone_process

NOT_WAITING = KeyOptions(wait=0.0)


class Effect:
    """Counts how often it happened; takes `seconds`, then gives the number of the time."""

    def __init__(self, seconds: float = 0.0, error: BaseException | None = None) -> None:
        self.times = 0
        self.ended = 0
        self.seconds = seconds
        self.error = error

    async def __call__(self) -> Any:
        self.times += 1
        mine = self.times
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.ended += 1
        return {"time": mine}


# ---- one effect, one answer ------------------------------------------------------------------------------------------


async def test_the_second_caller_gets_the_recorded_answer_and_no_effect(url: str) -> None:
    effect = Effect()
    async with open_store(url) as store:
        assert await once(store.idempotency, "k", effect) == {"time": 1}
        assert await once(store.idempotency, "k", effect) == {"time": 1}
        assert effect.times == 1
        assert await actions_in(store.audit) == ["record", "hit"]


async def test_a_recorded_none_is_an_answer(url: str) -> None:
    times = 0

    async def nothing() -> None:
        nonlocal times
        times += 1

    async with open_store(url) as store:
        assert await once(store.idempotency, "k", nothing) is None
        assert await once(store.idempotency, "k", nothing) is None
    assert times == 1


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


async def test_sixteen_callers_of_many_keys_one_effect_each_and_no_two_answers(url: str) -> None:
    async with open_store(url) as store:
        effects, answers = await sixteen_callers(lambda key, work: once(store.idempotency, key, work), 50)
    assert set(effects.values()) == {1}
    assert len(effects) == 50
    assert {len(given) for given in answers.values()} == {1}


async def test_control_checking_first_and_acting_then_runs_effects_more_than_once(url: str) -> None:
    """Without the claim, the same callers do it again and again, and get differing answers."""
    async with open_store(url) as store:
        keys = store.idempotency

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


async def test_first_and_later_callers_get_equal_answers_however_the_first_one_was_made(url: str) -> None:
    async def made() -> Any:
        return {"pair": (1, 2), "whole": 3.0, 7: "seven", "big": 2**70}

    async with open_store(url) as store:
        first = await once(store.idempotency, "k", made)
        later = await once(store.idempotency, "k", made)
    assert first == later == {"pair": [1, 2], "whole": 3.0, "7": "seven", "big": 2**70}
    assert [type(one) for one in first.values()] == [type(one) for one in later.values()]


class Receipt(msgspec.Struct):
    number: int
    lines: tuple[str, ...] = ()


async def test_with_a_type_every_caller_gets_an_object_of_it(url: str) -> None:
    async def made() -> Receipt:
        return Receipt(7, ("a",))

    async with open_store(url) as store:
        typed = KeyOptions(result_type=Receipt)
        assert await once(store.idempotency, "k", made, typed) == Receipt(7, ("a",))
        assert await once(store.idempotency, "k", made, typed) == Receipt(7, ("a",))
        assert await once(store.idempotency, "k", made) == {"number": 7, "lines": ["a"]}


async def test_a_result_that_does_not_fit_the_type_is_an_error_and_stays_recorded(url: str) -> None:
    effect = Effect()
    async with open_store(url) as store:
        for _ in range(2):
            with pytest.raises(errors.ParameterTypeError, match="result_type"):
                await once(store.idempotency, "k", effect, KeyOptions(result_type=int))
        assert await once(store.idempotency, "k", effect) == {"time": 1}


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("value", [object(), float("nan"), {"a": {1: float("inf")}}, lambda: None, ENDLESS])
async def test_a_result_that_is_not_json_is_refused_and_the_effect_is_not_repeated(url: str, value: object) -> None:
    times = 0

    async def effect() -> object:
        nonlocal times
        times += 1
        return value

    async with open_store(url) as store:
        with pytest.raises(errors.NotJsonError):
            await once(store.idempotency, "k", effect)
        with pytest.raises(errors.RecordedFailureError, match="it happened, but its result could not be kept"):
            await once(store.idempotency, "k", effect)
    assert times == 1


async def test_a_result_that_is_too_large_is_refused_and_the_effect_is_not_repeated(url: str) -> None:
    times = 0

    async def effect() -> str:
        nonlocal times
        times += 1
        return "x" * 2000

    async with open_store(url, largest_result=1000) as store:
        with pytest.raises(errors.ResultTooLargeError) as refused:
            await once(store.idempotency, "k", effect)
        assert refused.value.limit == 1000
        with pytest.raises(errors.RecordedFailureError):
            await once(store.idempotency, "k", effect)
        assert await actions_in(store.audit) == ["record", "hit"]
    assert times == 1


async def test_another_payload_under_the_same_key_is_refused_with_both_fingerprints(url: str) -> None:
    effect = Effect()
    async with open_store(url) as store:
        await once(store.idempotency, "k", effect, KeyOptions(fingerprint="one"))
        with pytest.raises(errors.KeyConflictError) as refused:
            await once(store.idempotency, "k", effect, KeyOptions(fingerprint="two"))
        assert (refused.value.recorded, refused.value.given) == ("one", "two")
        assert await actions_in(store.audit) == ["record", "conflict"]
    assert effect.times == 1


@pytest.mark.parametrize("key", ["", "x" * 600])
async def test_an_invalid_key_is_refused_before_any_work(url: str, key: str) -> None:
    effect = Effect()
    async with open_store(url) as store:
        with pytest.raises(ValueError, match="key"):
            await once(store.idempotency, key, effect)
    assert effect.times == 0


# ---- waiting for the first -------------------------------------------------------------------------------------------


async def test_five_callers_at_once_one_effect_and_all_wait_for_it(url: str) -> None:
    effect = Effect(seconds=3)
    async with open_store(url) as store:
        answers = await asyncio.gather(*(once(store.idempotency, "k", effect) for _ in range(5)))
        assert effect.times == 1
        assert answers == [{"time": 1}] * 5
        assert sorted(await actions_in(store.audit)) == ["hit"] * 4 + ["record"]


async def test_a_caller_that_does_not_wait_gets_an_error_at_once(url: str) -> None:
    effect = Effect(seconds=3)
    async with open_store(url) as store:
        first = asyncio.create_task(once(store.idempotency, "k", effect))
        await asyncio.sleep(1)
        with pytest.raises(errors.KeyInProgressError) as refused:
            await once(store.idempotency, "k", effect, NOT_WAITING)
        assert 0 < refused.value.retry_after <= 60
        await first
        assert await actions_in(store.audit) == ["in_progress", "record"]
    assert effect.times == 1


async def test_a_waiting_caller_waits_no_longer_than_its_limit(url: str) -> None:
    effect = Effect(seconds=1000)
    async with open_store(url) as store:
        first = asyncio.create_task(once(store.idempotency, "k", effect))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(errors.KeyInProgressError):
            await once(store.idempotency, "k", effect, KeyOptions(wait=10))
        assert asyncio.get_running_loop().time() - began == pytest.approx(10, abs=0.1)
        await first


async def test_when_the_first_one_fails_a_waiting_caller_tries_itself(url: str) -> None:
    async with open_store(url) as store:
        broken = Effect(seconds=2, error=ConnectionError("no"))
        first = asyncio.create_task(once(store.idempotency, "k", broken))
        await asyncio.sleep(1)
        assert await once(store.idempotency, "k", Effect()) == {"time": 1}
        with pytest.raises(ConnectionError):
            await first
        assert await actions_in(store.audit) == ["release", "record"]


# ---- leases ----------------------------------------------------------------------------------------------------------


async def test_work_that_takes_longer_than_its_lease_keeps_it(url: str) -> None:
    effect = Effect(seconds=300)
    async with open_store(url) as store:
        first = asyncio.create_task(once(store.idempotency, "k", effect, KeyOptions(lease=6)))
        await asyncio.sleep(200)
        with pytest.raises(errors.KeyInProgressError):
            await once(store.idempotency, "k", effect, NOT_WAITING)
        assert await first == {"time": 1}
    assert effect.times == 1


async def test_a_zombie_is_refused_and_its_work_cancelled(url: str) -> None:
    """Its renewals fail for longer than its lease; another one takes over; then the store is back."""
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        slow = Effect(seconds=1000)
        zombie = asyncio.create_task(once(keys, "k", slow, KeyOptions(lease=6)))
        await asyncio.sleep(0.1)
        keys.fails["renew"] = 4
        await asyncio.sleep(7)
        assert await once(store.idempotency, "k", Effect()) == {"time": 1}
        with pytest.raises(errors.LeaseLostError):
            await zombie
        assert slow.times == 1
        assert slow.ended == 0, "the work was cut off"
        assert keys.calls["finish"] == 0, "and there is nothing to write"
        assert asyncio.get_running_loop().time() < 20
        record = await store.idempotency.get("k")
        assert record is not None
        assert record.result == '{"time":1}'


async def test_a_zombie_that_finishes_before_its_renewal_fails_cannot_write(url: str) -> None:
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.fails["renew"] = 1000
        zombie = asyncio.create_task(once(keys, "k", Effect(seconds=20), KeyOptions(lease=6)))
        await asyncio.sleep(7)

        async def theirs() -> str:
            return "theirs"

        assert await once(store.idempotency, "k", theirs) == "theirs"
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

    clock = Jumping(asyncio.get_running_loop())
    async with open_store(url, clock=clock, retention=3600) as store:
        effect = Effect(seconds=5)
        assert await once(store.idempotency, "done", effect) == {"time": 1}
        held = asyncio.create_task(once(store.idempotency, "held", effect))
        await asyncio.sleep(1)
        for jump in (86400.0, -86400.0):
            clock.jumped = jump
            assert await once(store.idempotency, "done", effect) == {"time": 1}
            with pytest.raises(errors.KeyInProgressError):
                await once(store.idempotency, "held", effect, NOT_WAITING)
        assert await held == {"time": 2}
    assert effect.times == 2


async def test_a_lease_error_of_another_key_inside_the_work_is_the_works_own_failure(url: str) -> None:
    async with open_store(url) as store:
        inner = errors.LeaseLostError("other", owner="x", fence=1)
        with pytest.raises(errors.LeaseLostError) as raised:
            await once(store.idempotency, "k", Effect(error=inner))
        assert raised.value is inner
        record = await store.idempotency.get("k")
        assert record is not None
        assert record.state is KeyState.RELEASED


# ---- cancellation ----------------------------------------------------------------------------------------------------


async def test_cancelled_work_releases_its_key(url: str) -> None:
    async with open_store(url) as store:
        first = asyncio.create_task(once(store.idempotency, "k", Effect(seconds=10)))
        await asyncio.sleep(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await once(store.idempotency, "k", Effect(), NOT_WAITING) == {"time": 1}


async def test_a_second_cancellation_does_not_keep_the_key_from_being_released(url: str) -> None:
    async with open_store(url) as store:
        keys = Slow(store.idempotency)
        first = asyncio.create_task(once(keys, "k", Effect(seconds=10)))
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.sleep(10)
        assert await once(store.idempotency, "k", Effect(), NOT_WAITING) == {"time": 1}


class Slow(Failing):
    """Every ending takes five seconds to be kept."""

    async def finish(self, claim: Any, ending: Any, **more: Any) -> Any:
        await asyncio.sleep(5)
        return await super().finish(claim, ending, **more)


@pytest.mark.parametrize("chain", [True, False])
async def test_a_caller_cancelled_while_its_result_is_recorded_does_not_undo_the_record(url: str, chain: bool) -> None:
    async with open_store(url) as store:
        effect = Effect()
        first = asyncio.create_task(once(Slow(store.idempotency), "k", effect, chain=chain))
        await asyncio.sleep(2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await once(store.idempotency, "k", effect) == {"time": 1}
        assert effect.times == 1
        await asyncio.sleep(1)
        assert sorted(await actions_in(store.audit)) == ["hit", "record"]


async def test_a_claim_whose_answer_was_lost_by_cancellation_is_released(url: str) -> None:
    class SlowToAnswer(Failing):
        async def claim(self, key: str, **more: Any) -> Any:
            answer = await super().claim(key, **more)
            await asyncio.sleep(1)
            return answer

    async with open_store(url) as store:
        for mode in (Mode.RETRY, Mode.GUARD):
            effect = Effect()
            first = asyncio.create_task(once(SlowToAnswer(store.idempotency), mode, effect, KeyOptions(mode)))
            await asyncio.sleep(0.5)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert effect.times == 0
            await asyncio.sleep(2)
            assert await once(store.idempotency, mode, Effect(), KeyOptions(mode, wait=0.0)) == {"time": 1}


async def test_an_outer_cancellation_wins_over_a_lost_lease(url: str) -> None:
    """Both arrive in the same turn of the loop."""
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        first = asyncio.create_task(once(keys, "k", Effect(seconds=100), KeyOptions(lease=6)))
        await asyncio.sleep(1)
        keys.error = errors.LeaseLostError("k", owner="me", fence=1)
        keys.fails["renew"] = 1
        asyncio.get_running_loop().call_at(2.0, first.cancel)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert first.cancelled()


async def test_a_lost_lease_leaves_no_cancellation_behind(url: str) -> None:
    """A task that goes on after `LeaseLostError` can wait as before."""
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
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


GUARD = KeyOptions(Mode.GUARD, lease=6, wait=0.0)


async def test_under_a_guard_an_exception_leaves_the_outcome_to_a_person(url: str) -> None:
    async with open_store(url) as store:
        effect = Effect(error=TimeoutError("did it arrive?"))
        with pytest.raises(TimeoutError):
            await once(store.idempotency, "k", effect, GUARD)
        with pytest.raises(errors.OutcomeUnknownError):
            await once(store.idempotency, "k", effect, GUARD)
        record = await store.idempotency.get("k")
        assert record is not None
        assert "did it arrive?" in (record.failure or "")
        assert await actions_in(store.audit) == ["unknown", "unknown"]
        assert effect.times == 1

        await store.idempotency.resolve("k", Done('"it arrived"'))
        assert await once(store.idempotency, "k", effect, GUARD) == "it arrived"


async def test_under_a_guard_a_vanished_owner_leaves_the_outcome_to_a_person(url: str) -> None:
    async with open_store(url) as store:
        await store.idempotency.claim("k", owner="vanished", lease=6, guard=True)
        await asyncio.sleep(7)
        effect = Effect()
        with pytest.raises(errors.OutcomeUnknownError, match="vanished"):
            await once(store.idempotency, "k", effect, GUARD)
        assert effect.times == 0

        await store.idempotency.resolve("k", Released())
        assert await once(store.idempotency, "k", effect, GUARD) == {"time": 1}


async def test_control_without_the_guard_a_vanished_owners_work_is_done_again(url: str) -> None:
    async with open_store(url) as store:
        await store.idempotency.claim("k", owner="vanished", lease=6)
        await asyncio.sleep(7)
        effect = Effect()
        await once(store.idempotency, "k", effect)
        assert effect.times == 1


async def test_under_a_guard_cancelled_work_is_unknown(url: str) -> None:
    async with open_store(url) as store:
        first = asyncio.create_task(once(store.idempotency, "k", Effect(seconds=3), GUARD))
        await asyncio.sleep(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(errors.OutcomeUnknownError):
            await once(store.idempotency, "k", Effect(), GUARD)


# ---- a record that cannot be written ---------------------------------------------------------------------------------


async def test_a_record_that_fails_at_first_is_tried_again_and_the_effect_is_not(url: str) -> None:
    async with open_store(url) as store:
        keys, effect = Failing(store.idempotency), Effect()
        keys.fails["finish"] = 4
        assert await once(keys, "k", effect) == {"time": 1}
        assert effect.times == 1
        assert keys.calls["finish"] == 5
        assert await actions_in(store.audit) == ["record"]


async def test_a_record_whose_answer_was_lost_has_one_event(url: str) -> None:
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.done_but_lost["finish"] = 2
        assert await once(keys, "k", Effect()) == {"time": 1}
        assert await actions_in(store.audit) == ["record"]


@pytest.mark.parametrize("chain", [True, False])
def test_a_record_that_never_succeeds_is_remembered_and_written_by_the_next_caller(
    url: str, chain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_store(url) as store:
            keys, effect = Failing(store.idempotency), Effect()
            keys.fails["finish"] = 6
            assert await once(keys, "k", effect, chain=chain) == {"time": 1}
            assert await once(keys, "k", effect, chain=chain) == {"time": 1}, "from memory"
            assert await once(keys, "k", effect, chain=chain) == {"time": 1}, "and now it is written"
            assert effect.times == 1
            record = await store.idempotency.get("k")
            assert record is not None
            assert record.state is KeyState.DONE
            assert await actions_in(store.audit) == ["unrecorded", "hit", "record", "hit"]

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert "is done but could not be recorded" in caplog.text


async def test_control_a_record_inside_the_retried_work_repeats_the_effect(url: str) -> None:
    """What spec 4's sample does: the effect and its record in one retried block."""
    async with open_store(url) as store:
        keys, effect = Failing(store.idempotency), Effect()
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


async def test_a_remembered_result_outlives_its_lease_in_this_process(url: str) -> None:
    async with open_store(url) as store:
        keys, effect = Failing(store.idempotency), Effect()
        keys.fails["finish"] = 5
        await once(keys, "k", effect, KeyOptions(lease=6))
        await asyncio.sleep(100)
        assert await once(keys, "k", effect, KeyOptions(lease=6)) == {"time": 1}
        assert effect.times == 1


async def test_a_result_that_another_owner_recorded_meanwhile_counts(url: str) -> None:
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.fails["finish"] = 5
        await once(keys, "k", Effect(), KeyOptions(lease=6))
        await asyncio.sleep(10)

        async def theirs() -> str:
            return "theirs"

        assert await once(store.idempotency, "k", theirs) == "theirs"
        assert await once(keys, "k", Effect()) == "theirs"


async def test_a_remembered_result_that_could_not_be_kept_is_a_recorded_failure(url: str) -> None:
    async with open_store(url) as store:
        keys, times = Failing(store.idempotency), 0

        async def effect() -> object:
            nonlocal times
            times += 1
            return object()

        keys.fails["finish"] = 6
        with pytest.raises(errors.NotJsonError):
            await once(keys, "k", effect)
        with pytest.raises(errors.RecordedFailureError):
            await once(keys, "k", effect)
        assert times == 1


async def test_a_remembered_result_is_not_given_for_another_payload(url: str) -> None:
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.fails["finish"] = 6
        await once(keys, "k", Effect(), KeyOptions(fingerprint="one"))
        with pytest.raises(errors.KeyConflictError):
            await once(keys, "k", Effect(), KeyOptions(fingerprint="two"))


async def test_what_could_not_be_recorded_is_written_when_the_store_works_again(url: str) -> None:
    """Nobody asks for the key again; the success of another one tells that the store is back."""
    async with open_store(url) as store:
        keys = Failing(store.idempotency)
        keys.fails["finish"] = 5
        await once(keys, "k", Effect())
        await once(keys, "other", Effect())
        await asyncio.sleep(1)
        record = await store.idempotency.get("k")
        assert record is not None
        assert record.state is KeyState.DONE


async def test_no_new_work_begins_while_too_much_is_unrecorded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrecorded, "MOST_UNRECORDED", 2)
    async with open_store(url) as store:
        keys, effect = Failing(store.idempotency), Effect()
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


async def test_a_store_that_does_not_answer_is_an_error_with_a_bound(url: str) -> None:
    async with open_store(url) as store:
        keys, effect = Failing(store.idempotency), Effect()
        keys.hangs.add("claim")
        with pytest.raises(errors.StoreUnavailableError, match="no answer within 30 s"):
            await once(keys, "k", effect)
        assert asyncio.get_running_loop().time() == pytest.approx(30)
        assert effect.times == 0
        keys.hangs.clear()
        await asyncio.sleep(60)


def test_a_key_that_cannot_be_released_does_not_hide_why_the_work_failed(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_store(url) as store:
            keys = Failing(store.idempotency)
            keys.fails["finish"] = 1
            with pytest.raises(ConnectionError, match="the real reason"):
                await once(keys, "k", Effect(error=ConnectionError("the real reason")), KeyOptions(lease=6))
            assert await once(keys, "k", Effect()) == {"time": 1}, "after the lease ran out"
            assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.5)

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert "could not be released" in caplog.text


def test_a_failed_renewal_is_logged_and_tried_again(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_store(url) as store:
            keys = Failing(store.idempotency)
            keys.error = OSError("any error at all")
            keys.fails["renew"] = 1
            assert await once(keys, "k", Effect(seconds=30), KeyOptions(lease=6)) == {"time": 1}

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
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
        store = MemoryStore(VirtualClock())
        keys = Failing(store.idempotency)
        keys.fails["finish"] = 5
        await once(keys, "k", Effect())
        return weakref.ref(keys)

    gone = run_virtual(main())
    gc.collect()
    assert gone() is None


def test_a_mode_is_known_by_its_name_and_txn_is_refused_with_where_to_find_it() -> None:
    assert [mode_named(mode) for mode in ("retry", "guard", "dedup")] == [Mode.RETRY, Mode.GUARD, Mode.DEDUP]
    with pytest.raises(errors.ParameterError, match="ledger"):
        mode_named("txn")


# ---- owners that are gone --------------------------------------------------------------------------------------------


async def held_by(store: Any, owner: str, mode: Mode = Mode.RETRY) -> None:
    """The key `k` is held by this owner, for a minute."""
    answer = await store.idempotency.claim("k", owner=owner, lease=60, guard=mode is Mode.GUARD)
    assert isinstance(answer, Claimed)


@pytest.mark.parametrize("mode", [Mode.RETRY, Mode.DEDUP])
async def test_a_key_whose_process_is_gone_is_free_at_once(url: str, mode: Mode) -> None:
    async with open_store(url) as store:
        await held_by(store, f"1@{gone_process()}")
        effect = Effect()
        assert await once(store.idempotency, "k", effect, KeyOptions(mode, wait=0.0)) == {"time": 1}


async def test_a_guarded_key_whose_process_is_gone_is_unknown_at_once(url: str) -> None:
    async with open_store(url) as store:
        await held_by(store, f"1@{gone_process()}", Mode.GUARD)
        effect = Effect()
        with pytest.raises(errors.OutcomeUnknownError):
            await once(store.idempotency, "k", effect, KeyOptions(Mode.GUARD, wait=0.0))
        assert effect.times == 0


@pytest.mark.parametrize(
    "owner", ["1", "1@0123456789ab.1.1", f"1@{process_mark()}"], ids=["plain", "foreign", "living"]
)
async def test_a_key_whose_process_lives_or_is_not_known_is_waited_for(url: str, owner: str) -> None:
    async with open_store(url) as store:
        await held_by(store, owner)
        with pytest.raises(errors.KeyInProgressError, match=r"expires in 5\d"):
            await once(store.idempotency, "k", Effect(), KeyOptions(wait=5.0))


async def test_a_caller_that_waits_notices_that_the_process_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr("reefknot.idempotency.waiting.owner_is_gone", lambda owner: owner in gone)
    loop = asyncio.get_running_loop()
    async with open_store(url) as store:
        await held_by(store, "other")
        waiting = asyncio.create_task(once(store.idempotency, "k", Effect()))
        await asyncio.sleep(10.5)
        assert not waiting.done()
        gone.append("other")
        began = loop.time()
        assert await waiting == {"time": 1}
        assert loop.time() - began <= 1.01


async def test_of_two_callers_that_notice_it_one_takes_over(url: str) -> None:
    async with open_store(url) as store:
        await held_by(store, f"1@{gone_process()}")
        effect = Effect(1)
        answers = await asyncio.gather(*(once(store.idempotency, "k", effect) for _ in range(5)))
        assert (effect.times, answers) == (1, [{"time": 1}] * 5)
