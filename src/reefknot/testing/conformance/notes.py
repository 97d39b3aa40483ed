"""Conformance suite of what a step says while it runs: its checkpoint, its progress, its lines of log."""

from msgspec import structs

from reefknot.queue.model.notes import CHECKPOINT, LARGEST_CHECKPOINT, LINES, Notes, StepProgress
from reefknot.queue.model.transitions import Replace, Requeue
from reefknot.queue.model.work import Extra, Quarantine, TryAgain, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import Harness, required, story, wall_ms


async def claimed(store: Store, n: int = 1) -> list[WorkItem]:
    return await store.work.claim(n, WorkClaim(owner="w", lease=10.0))


class NoteContract:
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_notes_are_kept_under_the_fence_and_hold_the_item_for_another_lease(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t", payload=b"p")])
        (item,) = await claimed(store)
        assert await store.work.notes("a") == {}
        clock.advance(8.0)
        notes = Notes(1, StepProgress(3, 10, "page 3"), {CHECKPOINT: b'{"page":3}', LINES: b"{}"})
        assert await store.work.note(Held.of(item), notes) is True
        clock.advance(8.0)
        assert await claimed(store) == [], "a note holds it for longer"
        assert await store.work.note(Held.of(item), Notes(2, parts={CHECKPOINT: b"4"})) is True
        noted = required(await store.work.get("a"))
        kept = required(noted.extra.notes)
        assert (kept.checkpoints, kept.spent_ms, kept.progress) == (2, 16_000, StepProgress(3, 10, "page 3"))
        assert (noted.updated_at, noted.fence, noted.payload) == (item.updated_at, item.fence, b"p")
        assert await store.work.notes("a") == {CHECKPOINT: b"4", LINES: b"{}"}
        (listed,) = (await store.work.search()).items
        assert listed.extra == noted.extra

        clock.advance(10.5)
        (heir,) = await claimed(store)
        assert heir.extra.notes == structs.replace(kept, at_crash=2)
        assert await store.work.notes("a") == {CHECKPOINT: b"4", LINES: b"{}"}
        assert await store.work.note(Held.of(item), Notes(3, parts={CHECKPOINT: b"late"})) is False
        assert await store.work.note(Held("b", "w", 1), Notes(1, parts={CHECKPOINT: b"none"})) is False
        assert required(await store.work.get("a")).extra == heir.extra
        assert await store.work.notes("a") == {CHECKPOINT: b"4", LINES: b"{}"}
        assert await store.work.notes("b") == {}

    @story()
    async def test_notes_go_with_the_report_or_not_at_all(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        (item,) = await claimed(store)
        again = Settlement(
            item.id, item.owner, item.fence, TryAgain(0, progress=1), notes=Notes(1, None, {LINES: b"1"})
        )
        assert await store.work.settle([again]) == [True]
        waiting = required(await store.work.get("a"))
        assert (waiting.state, waiting.attempts, waiting.budget.progress) == (WorkState.PENDING, 1, 1)
        assert required(waiting.extra.notes).checkpoints == 1
        late = Settlement(item.id, item.owner, item.fence, WorkDone(), notes=Notes(2, None, {LINES: b"2"}))
        assert await store.work.settle([late]) == [False]
        assert await store.work.notes("a") == {LINES: b"1"}
        (item,) = await claimed(store)
        done = Settlement(item.id, item.owner, item.fence, WorkDone(), notes=Notes(2, None, {LINES: b"2"}))
        assert await store.work.settle([done]) == [True]
        assert required(required(await store.work.get("a")).extra.notes).checkpoints == 2
        assert await store.work.notes("a") == {LINES: b"2"}
        assert await store.work.note(Held.of(item), Notes(3, None, {LINES: b"3"})) is False, "it has ended"

    @story()
    async def test_crashes_are_counted_since_the_last_checkpoint(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        for made in range(1, 6):
            (item,) = await claimed(store)
            assert item.crashes == min(1, made - 1)
            clock.advance(1.0)
            assert await store.work.note(Held.of(item), Notes(made, None, {CHECKPOINT: b"%d" % made}))
            clock.advance(10.5)
        for crashes in (1, 2):
            (item,) = await claimed(store)
            assert item.crashes == crashes
            clock.advance(10.5)
        assert await claimed(store) == []
        aside = required(await store.work.get("a"))
        assert (aside.state, aside.reason) == (WorkState.QUARANTINED, "its owner vanished 3 times")
        assert await store.work.notes("a") == {CHECKPOINT: b"5"}, "a person may have it run again, from there"

    @story()
    async def test_notes_go_with_their_item(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t"), WorkItem("plain", "t")])
        for item in await claimed(store, 2):
            notes = None if item.id == "plain" else Notes(1, None, {CHECKPOINT: b"1"})
            await store.work.settle([Settlement(item.id, item.owner, item.fence, WorkDone(), notes=notes)])
        assert required(await store.work.get("plain")).extra == Extra()
        clock.advance(5.0)
        assert await store.work.purge(wall_ms(clock)) == 2
        assert await store.work.notes("a") == {}

    @story()
    async def test_a_requeued_item_goes_on_from_its_checkpoint_and_its_next_version_does_not(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t", payload=b"p")])
        (item,) = await claimed(store)
        aside = Settlement(
            item.id, item.owner, item.fence, Quarantine("stuck"), notes=Notes(1, None, {CHECKPOINT: b"1"})
        )
        assert await store.work.settle([aside]) == [True]
        await store.work.change(WorkFilter(ids=("a",)), Requeue("ann"))
        (item,) = await claimed(store)
        assert (required(item.extra.notes).checkpoints, await store.work.notes("a")) == (1, {CHECKPOINT: b"1"})
        assert await store.work.settle([structs.replace(aside, fence=item.fence, notes=None)]) == [True]
        await store.work.change(WorkFilter(ids=("a",)), Replace(b"edited", "ann"))
        new = required(await store.work.get("a~2"))
        assert (new.payload, new.extra, await store.work.notes("a~2")) == (b"edited", Extra(), {})
        assert await store.work.notes("a") == {CHECKPOINT: b"1"}


class SharedNoteContract(NoteContract):
    """The suite of an engine whose harness opens the same database every time."""

    def test_an_owner_that_does_not_know_of_its_heir_is_refused(self, harness: Harness) -> None:
        """Each in a store of its own, as two processes have."""
        largest = b'"' + b"x" * (LARGEST_CHECKPOINT - 2) + b'"'

        async def story(one: Store, clock: VirtualClock) -> None:
            async with harness.opened(clock) as other:
                await one.work.enqueue([WorkItem("a", "t")])
                (frozen,) = await claimed(one)
                assert await one.work.note(Held.of(frozen), Notes(1, None, {CHECKPOINT: b"1"}))
                clock.advance(10.5)
                (heir,) = await claimed(other)
                assert (heir.fence > frozen.fence, heir.crashes) == (True, 1)
                assert await other.work.notes("a") == {CHECKPOINT: b"1"}
                assert await other.work.note(Held.of(heir), Notes(2, None, {CHECKPOINT: largest}))
                assert await one.work.note(Held.of(frozen), Notes(2, None, {CHECKPOINT: b"late"})) is False
                late = Settlement("a", frozen.owner, frozen.fence, WorkDone(), notes=Notes(2, None, {LINES: b"late"}))
                assert await one.work.settle([late]) == [False]
                assert await one.work.notes("a") == {CHECKPOINT: largest}
                done = Settlement("a", heir.owner, heir.fence, WorkDone(), notes=Notes(3, None, {CHECKPOINT: b"3"}))
                assert await other.work.settle([done]) == [True]
                assert await one.work.notes("a") == {CHECKPOINT: b"3"}

        harness.run(story)
