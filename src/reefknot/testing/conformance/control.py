"""Conformance suite of the control channel."""

import asyncio

from reefknot.queue.port.control import SILENT_KEPT_S
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, story


class ControlContract:
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_a_command_reaches_its_target_and_nobody_else(self, store: Store) -> None:
        await store.control.post("drain", target="w1", body='{"now": true}', sender="cli")
        (command,) = await store.control.poll("w1")
        assert (command.name, command.target, command.body, command.sender) == ("drain", "w1", '{"now": true}', "cli")
        assert await store.control.poll("w2") == []

    @story()
    async def test_what_is_said_to_everyone_reaches_everyone_once_each(self, store: Store) -> None:
        sequence = await store.control.post("pause", events=[event("operator_action")])
        for target in ("w1", "w2"):
            assert [command.name for command in await store.control.poll(target)] == ["pause"]
            assert await store.control.poll(target, after=sequence) == []
        assert await store.control.latest() == sequence
        assert await event_types(store) == ["operator_action"]

    @story()
    async def test_commands_come_in_their_order_and_in_pages(self, store: Store) -> None:
        assert await store.control.latest() == 0
        for name in ("a", "b", "c"):
            await store.control.post(name)
        first = await store.control.poll("w", limit=2)
        rest = await store.control.poll("w", after=first[-1].sequence)
        assert [command.name for command in first + rest] == ["a", "b", "c"]

    @story()
    async def test_a_command_goes_stale(self, store: Store, clock: VirtualClock) -> None:
        first = await store.control.post("drain", keep=10)
        clock.advance(10)
        assert await store.control.poll("w") == []
        assert await store.control.post("drain") > first

    @story()
    async def test_who_waits_is_woken_by_a_newer_command_and_told_its_sequence(self, store: Store) -> None:
        assert await store.control.wait(0.01, after=0) == 0
        waiting = asyncio.create_task(store.control.wait(15, after=0))
        await asyncio.sleep(0)
        first = await store.control.post("drain")
        assert await waiting == first
        assert await store.control.wait(15, after=0) == first, "one that came before is not waited for"
        assert await store.control.wait(0.01, after=first) == first

    @story()
    async def test_a_system_has_one_status_however_often_it_reports_and_keeps_its_first_sequence(
        self, store: Store, clock: VirtualClock
    ) -> None:
        first = await store.control.report("a", '{"n": 0}', keep=5)
        second = await store.control.report("b", "{}", keep=5)
        assert first < second
        for number in range(1, 4):
            clock.advance(1)
            assert await store.control.report("a", f'{{"n": {number}}}', keep=5) == first
        a, b = await store.control.reports()
        assert (a.name, a.sequence, a.body) == ("a", first, '{"n": 3}')
        assert (b.name, b.sequence, b.body) == ("b", second, "{}")
        assert a.at == b.at + 3000, "the time of the last report, not of the first"

    @story()
    async def test_reports_at_once_get_sequences_of_their_own(self, store: Store) -> None:
        names = [f"s{number}" for number in range(5)]
        given = await asyncio.gather(*(store.control.report(name, "{}", keep=5) for name in names))
        assert len(set(given)) == 5
        assert {one.name: one.sequence for one in await store.control.reports()} == dict(zip(names, given, strict=True))

    @story()
    async def test_a_status_goes_stale_and_who_comes_back_is_a_newcomer(
        self, store: Store, clock: VirtualClock
    ) -> None:
        frozen = await store.control.report("frozen", "{}", keep=5)
        clock.advance(3)
        other = await store.control.report("other", "{}", keep=5)
        clock.advance(2)
        assert [one.name for one in await store.control.reports()] == ["other"]
        again = await store.control.report("frozen", "{}", keep=5)
        assert frozen < other < again
        assert [one.name for one in await store.control.reports()] == ["other", "frozen"]
        clock.advance(5)
        assert await store.control.reports() == []

    @story()
    async def test_the_last_word_of_a_silent_system_is_kept_for_a_while_unless_it_was_withdrawn(
        self, store: Store, clock: VirtualClock
    ) -> None:
        for name in ("dead", "ended", "frozen"):
            await store.control.report(name, f'"{name}"', keep=5)
        await store.control.withdraw("ended")
        assert await store.control.reports(silent=True) == []
        clock.advance(5)
        last = await store.control.reports(silent=True)
        assert [(one.name, one.body) for one in last] == [("dead", '"dead"'), ("frozen", '"frozen"')]
        assert await store.control.report("frozen", "{}", keep=5) > max(one.sequence for one in last)
        assert [one.name for one in await store.control.reports(silent=True)] == ["dead"]
        clock.advance(SILENT_KEPT_S - 1)
        assert await store.control.report("frozen", "{}", keep=5)
        assert [one.name for one in await store.control.reports(silent=True)] == ["dead"]
        clock.advance(1)
        assert [one.name for one in await store.control.reports(silent=True)] == []

    @story()
    async def test_a_withdrawn_status_is_gone_and_the_others_stay(self, store: Store) -> None:
        for name in ("a", "b"):
            await store.control.report(name, "{}", keep=5)
        for _ in range(2):
            await store.control.withdraw("b")
            assert [one.name for one in await store.control.reports()] == ["a"]
        (a,) = await store.control.reports()
        assert await store.control.report("b", "{}", keep=5) > a.sequence
        assert [one.name for one in await store.control.reports()] == ["a", "b"]

    @story()
    async def test_a_status_is_no_command_and_wakes_nobody(self, store: Store) -> None:
        waiting = asyncio.create_task(store.control.wait(15, after=0))
        await asyncio.sleep(0)
        await store.control.report("a", "{}", keep=5)
        await store.control.withdraw("a")
        assert (await store.control.latest(), await store.control.poll("a")) == (0, [])
        assert not waiting.done()
        assert await store.control.post("drain") == await waiting
