"""Conformance suite: the contract of an idempotency store."""

import asyncio
from itertools import count

import pytest

from reefknot.audit.port import AuditEntry
from reefknot.errors import (
    KeyInProgressError,
    KeyQuotaError,
    KeyTooLongError,
    LeaseLostError,
    ParameterError,
    ResultTooLargeError,
)
from reefknot.idempotency.model import (
    Busy,
    Claim,
    Claimed,
    Conflict,
    Done,
    Failed,
    Hit,
    KeyRecord,
    KeyState,
    Released,
    Uncertain,
    Unknown,
)
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import Harness, event, event_types, required, story

_owners = count(1)


async def claimed(store: Store, key: str = "k", *, lease: float = 60.0, guard: bool = False) -> Claimed:
    """A claim that must succeed, by an owner of its own."""
    answer = await store.idempotency.claim(key, owner=f"owner-{next(_owners)}", lease=lease, guard=guard)
    assert isinstance(answer, Claimed), answer
    return answer


class IdempotencyContract:
    """Tests that every idempotency store has to pass. A subclass provides the fixture `harness`."""

    @story()
    async def test_the_first_caller_gets_the_key_and_the_second_is_told_who_has_it(self, store: Store) -> None:
        first = await store.idempotency.claim("k", owner="first", lease=10)
        second = await store.idempotency.claim("k", owner="second")
        assert isinstance(first, Claimed)
        assert isinstance(second, Busy)
        assert second.record.owner == "first"
        assert 0 < second.remaining_ms <= 10_000

    @story()
    async def test_a_recorded_null_is_a_hit(self, store: Store) -> None:
        await store.idempotency.finish((await claimed(store)).claim, Done("null"))
        answer = await store.idempotency.claim("k", owner="later")
        assert isinstance(answer, Hit)
        assert answer.record.state is KeyState.DONE
        assert answer.record.result == "null"

    @story()
    async def test_a_final_failure_is_a_hit_too(self, store: Store) -> None:
        await store.idempotency.finish((await claimed(store)).claim, Failed('"no"'))
        answer = await store.idempotency.claim("k", owner="later")
        assert isinstance(answer, Hit)
        assert (answer.record.state, answer.record.failure) == (KeyState.FAILED, '"no"')

    @story()
    async def test_a_released_key_can_be_claimed_again_with_a_higher_fence(self, store: Store) -> None:
        first = await claimed(store)
        await store.idempotency.finish(first.claim, Released())
        second = await claimed(store)
        assert second.claim.fence > first.claim.fence
        assert not second.taken_over

    @story()
    async def test_a_lease_that_ran_out_is_taken_over_and_the_late_owner_refused(
        self, store: Store, clock: VirtualClock
    ) -> None:
        zombie = await claimed(store, lease=5)
        clock.advance(5)
        heir = await claimed(store)
        assert heir.taken_over
        assert heir.claim.fence > zombie.claim.fence
        with pytest.raises(LeaseLostError):
            await store.idempotency.finish(zombie.claim, Done('"zombie"'), events=[event("late")])
        with pytest.raises(LeaseLostError):
            await store.idempotency.renew(zombie.claim)
        await store.idempotency.finish(heir.claim, Done('"heir"'))
        assert required(await store.idempotency.get("k")).result == '"heir"'
        assert await event_types(store) == []

    @story()
    async def test_a_takeover_is_audited_with_both_owners_and_nothing_else_is(
        self, store: Store, clock: VirtualClock
    ) -> None:
        def events(before: KeyRecord, after: KeyRecord) -> list[AuditEntry]:
            return [event(f"{before.owner} {before.fence} {after.owner} {after.fence}")]

        async def claim(owner: str) -> object:
            return await store.idempotency.claim("k", owner=owner, lease=5, takeover_events=events)

        first = await claim("a")
        assert isinstance(first, Claimed)
        assert isinstance(await claim("b"), Busy)
        clock.advance(5)
        heir = await claim("b")
        assert isinstance(heir, Claimed)
        assert await claim("b") == Claimed(heir.record), "the same call once more is no takeover"
        await store.idempotency.finish(heir.claim, Released())
        assert isinstance(await claim("c"), Claimed)
        assert await event_types(store) == [f"a {first.claim.fence} b {heir.claim.fence}"]

    @story()
    async def test_a_renewed_lease_is_not_taken_over(self, store: Store, clock: VirtualClock) -> None:
        held = await claimed(store, lease=5)
        clock.advance(4)
        await store.idempotency.renew(held.claim, lease=5)
        clock.advance(4)
        assert isinstance(await store.idempotency.claim("k", owner="other"), Busy)

    @story()
    async def test_a_lease_is_extended_without_the_loop(self, store: Store, clock: VirtualClock) -> None:
        held = await claimed(store, lease=5)
        clock.advance(4)
        lost = Claim("k", "another", held.claim.fence + 1)
        await asyncio.to_thread(store.idempotency.extend, [held.claim, Claim("unknown", "me", 1)], lease=5)
        await asyncio.to_thread(store.idempotency.extend, [lost], lease=500)
        clock.advance(4)
        assert isinstance(await store.idempotency.claim("k", owner="other"), Busy)
        clock.advance(1)
        heir = await claimed(store)
        assert heir.taken_over
        await asyncio.to_thread(store.idempotency.extend, [held.claim], lease=500)
        with pytest.raises(LeaseLostError):
            await store.idempotency.renew(held.claim)
        assert (await store.idempotency.finish(heir.claim, Done("1"))).state is KeyState.DONE

    @story()
    async def test_a_lease_that_is_renewed_for_no_time_ends_and_is_taken_over(self, store: Store) -> None:
        gone = await claimed(store, lease=60)
        assert isinstance(await store.idempotency.claim("k", owner="other"), Busy)
        await store.idempotency.renew(gone.claim, lease=0)
        heir = await claimed(store)
        assert heir.taken_over
        with pytest.raises(LeaseLostError):
            await store.idempotency.renew(gone.claim, lease=0)

    @story()
    async def test_a_lease_that_ran_out_but_that_nobody_took_is_still_the_owners(
        self, store: Store, clock: VirtualClock
    ) -> None:
        held = await claimed(store, lease=5)
        clock.advance(60)
        record = await store.idempotency.finish(held.claim, Done("1"))
        assert record.state is KeyState.DONE

    @story()
    async def test_a_guarded_key_whose_owner_vanished_is_unknown_and_is_not_run_again(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await claimed(store, lease=5, guard=True)
        clock.advance(5)
        for _ in range(2):
            answer = await store.idempotency.claim("k", owner=f"owner-{next(_owners)}", guard=True)
            assert isinstance(answer, Uncertain)
        assert await store.idempotency.resolve("k", Done('"found out"'), events=[event("resolved")])
        assert isinstance(await store.idempotency.claim("k", owner="later"), Hit)
        assert not await store.idempotency.resolve("k", Done('"again"'), events=[event("twice")])
        assert await event_types(store) == ["resolved"]

    @story()
    async def test_an_owner_can_say_itself_that_it_does_not_know(self, store: Store) -> None:
        await store.idempotency.finish((await claimed(store)).claim, Unknown('"cut off"'))
        assert isinstance(await store.idempotency.claim("k", owner="later"), Uncertain)

    @story()
    async def test_another_payload_under_the_same_key_is_refused_with_both_fingerprints(self, store: Store) -> None:
        await store.idempotency.claim("k", owner="a", fingerprint="one")
        answer = await store.idempotency.claim("k", owner="b", fingerprint="two")
        assert isinstance(answer, Conflict)
        assert (answer.record.fingerprint, answer.given) == ("one", "two")

    @story()
    async def test_the_same_ending_twice_is_fine_and_tells_once(self, store: Store) -> None:
        held = await claimed(store)
        for _ in range(2):
            await store.idempotency.finish(held.claim, Done("1"), events=[event("record")])
        with pytest.raises(LeaseLostError):
            await store.idempotency.finish(held.claim, Done("2"))
        assert await event_types(store) == ["record"]

    @story()
    async def test_the_same_claim_repeated_by_its_owner_is_the_same_claim(self, store: Store) -> None:
        first = await store.idempotency.claim("k", owner="me", events=[event("claimed")])
        second = await store.idempotency.claim("k", owner="me", events=[event("claimed")])
        assert first == second
        assert await event_types(store) == ["claimed"]

    @story()
    async def test_of_many_callers_at_once_exactly_one_gets_the_key(self, store: Store) -> None:
        asked = (
            store.idempotency.claim(f"k{key}", owner=f"{key}/{caller}", events=[event(f"k{key}")])
            for key in range(20)
            for caller in range(16)
        )
        answers = await asyncio.gather(*asked)
        winners = [answer.record.key for answer in answers if isinstance(answer, Claimed)]
        assert sorted(winners) == sorted(f"k{key}" for key in range(20))
        assert sorted(await event_types(store)) == sorted(winners)

    @story()
    async def test_who_waits_gets_the_result_when_it_is_there(self, store: Store) -> None:
        held = await claimed(store)
        waiting = [asyncio.create_task(store.idempotency.wait("k", 15)) for _ in range(5)]
        await asyncio.sleep(0)
        await store.idempotency.finish(held.claim, Done("7"))
        records = await asyncio.gather(*waiting)
        assert [record.result for record in records if record] == ["7"] * 5

    @story()
    async def test_who_waits_too_long_is_told_how_it_stands(self, store: Store) -> None:
        await claimed(store)
        assert required(await store.idempotency.wait("k", 0.01)).state is KeyState.IN_PROGRESS
        assert await store.idempotency.wait("unknown", 0.01) is None

    @story()
    async def test_who_waits_is_told_when_the_lease_has_run_out_and_can_take_over(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await claimed(store, lease=5)
        clock.advance(5)
        assert required(await store.idempotency.wait("k", 15)).state is KeyState.IN_PROGRESS
        assert (await claimed(store)).taken_over

    @story(retention=100)
    async def test_after_its_retention_a_key_is_as_if_it_had_never_been(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.idempotency.finish((await claimed(store)).claim, Done("1"))
        clock.advance(99)
        assert await store.idempotency.get("k") is not None
        clock.advance(1)
        assert await store.idempotency.get("k") is None
        assert not await store.idempotency.counts()
        assert not (await claimed(store)).taken_over

    @story(retention=100)
    async def test_purging_removes_what_is_past_its_retention_and_nothing_else(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.idempotency.finish((await claimed(store, "old")).claim, Done("1"))
        await store.idempotency.finish((await claimed(store, "unknown")).claim, Unknown())
        await claimed(store, "guarded", lease=1, guard=True)
        await claimed(store, "abandoned", lease=1)
        clock.advance(200)
        await store.idempotency.finish((await claimed(store, "young")).claim, Done("1"))
        await claimed(store, "live", lease=1)
        assert await store.idempotency.purge() == 2
        for key in ("guarded", "live", "unknown", "young"):
            assert await store.idempotency.get(key) is not None, key
        assert sum((await store.idempotency.counts()).values()) == 4

    @story()
    async def test_the_log_it_names_is_the_one_that_keeps_the_events_of_its_calls(self, store: Store) -> None:
        log = store.idempotency.audit
        answer = await store.idempotency.claim("k", owner="a", events=[event("claimed")])
        assert isinstance(answer, Claimed)
        await store.idempotency.finish(answer.claim, Done("1"), events=[event("recorded")])
        assert [kept.entry.event_type for kept in await log.read()] == ["claimed", "recorded"]
        assert await log.head() == await store.audit.head()
        await store.idempotency.forget("k", events=[event("forgotten")])
        assert (await log.read())[-1].entry.event_type == "forgotten"

    @story(retention=100, most_keys=2)
    async def test_live_keys_are_refused_beyond_the_quota_and_never_evicted(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.idempotency.finish((await claimed(store, "a")).claim, Done("1"))
        await claimed(store, "b")
        with pytest.raises(KeyQuotaError):
            await store.idempotency.claim("c", owner="x")
        assert await store.idempotency.get("a") is not None
        clock.advance(100)
        await claimed(store, "c")

    @story(largest_result=100)
    async def test_a_result_that_is_too_large_is_refused_and_the_key_stays_held(self, store: Store) -> None:
        held = await claimed(store)
        with pytest.raises(ResultTooLargeError):
            await store.idempotency.finish(held.claim, Done('"' + "ä" * 50 + '"'))
        await store.idempotency.finish(held.claim, Done('"' + "a" * 50 + '"'))

    @pytest.mark.parametrize(("key", "error"), [("", ParameterError), ("k" * 513, KeyTooLongError)])
    def test_an_empty_or_too_long_key_is_refused(
        self, harness: Harness, key: str, error: type[ParameterError | KeyTooLongError]
    ) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            with pytest.raises(error):
                await store.idempotency.claim(key, owner="x")
            with pytest.raises(error):
                await store.idempotency.get(key)

        harness.run(story)

    @story()
    async def test_keys_are_counted_by_state(self, store: Store) -> None:
        for name in "cab":
            await claimed(store, name)
        await store.idempotency.finish((await claimed(store, "d")).claim, Done("1"))
        assert dict(await store.idempotency.counts()) == {KeyState.IN_PROGRESS: 3, KeyState.DONE: 1}

    @story()
    async def test_a_key_nobody_holds_can_be_forgotten_and_a_live_one_cannot(self, store: Store) -> None:
        held = await claimed(store, lease=5)
        with pytest.raises(KeyInProgressError):
            await store.idempotency.forget("k", events=[event("too early")])
        await store.idempotency.finish(held.claim, Done("1"))
        assert await store.idempotency.forget("k", events=[event("forgotten")])
        assert not await store.idempotency.forget("k", events=[event("twice")])
        assert await store.idempotency.get("k") is None
        assert await event_types(store) == ["forgotten"]
        again = await claimed(store)
        assert again.claim.fence > held.claim.fence

    @story()
    async def test_text_of_any_language_and_control_characters_comes_back_as_it_was(self, store: Store) -> None:
        key, text = "ключ\t\"'\\ 🪢", '"naïve \\u0000 🪢 \\"quoted\\""'
        held = await claimed(store, key)
        await store.idempotency.finish(held.claim, Done(text, metadata='{"a": [1]}'))
        record = required(await store.idempotency.get(key))
        assert (record.key, record.result, record.metadata) == (key, text, '{"a": [1]}')
