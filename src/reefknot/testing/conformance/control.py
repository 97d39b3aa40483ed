"""Conformance suite of the control channel."""

import asyncio

from reefknot.engines.clocks import VirtualClock
from reefknot.ports.store import Store
from reefknot.testing.conformance.harness import Harness, event, event_types


class ControlContract:
    """Subclass it, and give it a `harness`."""

    def test_a_command_reaches_its_target_and_nobody_else(self, harness: Harness) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            await store.control.post("drain", target="w1", body='{"now": true}', sender="cli")
            (command,) = await store.control.poll("w1")
            assert (command.name, command.target, command.body, command.sender) == (
                "drain",
                "w1",
                '{"now": true}',
                "cli",
            )
            assert await store.control.poll("w2") == []

        harness.run(story)

    def test_what_is_said_to_everyone_reaches_everyone_once_each(self, harness: Harness) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            sequence = await store.control.post("pause", events=[event("operator_action")])
            for target in ("w1", "w2"):
                assert [command.name for command in await store.control.poll(target)] == ["pause"]
                assert await store.control.poll(target, after=sequence) == []
            assert await store.control.latest() == sequence
            assert await event_types(store) == ["operator_action"]

        harness.run(story)

    def test_commands_come_in_their_order_and_in_pages(self, harness: Harness) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            assert await store.control.latest() == 0
            for name in ("a", "b", "c"):
                await store.control.post(name)
            first = await store.control.poll("w", limit=2)
            rest = await store.control.poll("w", after=first[-1].sequence)
            assert [command.name for command in first + rest] == ["a", "b", "c"]

        harness.run(story)

    def test_a_command_goes_stale(self, harness: Harness) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            first = await store.control.post("drain", keep=10)
            clock.advance(10)
            assert await store.control.poll("w") == []
            assert await store.control.post("drain") > first

        harness.run(story)

    def test_who_waits_is_woken_by_a_newer_command_and_told_its_sequence(self, harness: Harness) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            assert await store.control.wait(0.01, after=0) == 0
            waiting = asyncio.create_task(store.control.wait(15, after=0))
            await asyncio.sleep(0)
            first = await store.control.post("drain")
            assert await waiting == first
            assert await store.control.wait(15, after=0) == first, "one that came before is not waited for"
            assert await store.control.wait(0.01, after=first) == first

        harness.run(story)
