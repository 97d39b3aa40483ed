"""Conformance suites of named values: for every engine, and for those whose database several stores share."""

import asyncio

import pytest

from reefknot.errors import ParameterError
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import LONGEST_BODY, LONGEST_NAME, Store, StoredValue
from reefknot.testing.conformance.harness import Harness, event, event_types, required, story

ODD_TEXT = 'ünïcode "quoted" \\ \n\t\x01 🪢 *.> %'


class ValueContract:
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_a_value_is_made_read_replaced_and_deleted(self, store: Store) -> None:
        values = store.values
        assert await values.get("a") is None
        made = required(await values.put("a", '{"n": 1}', version=0))
        assert (made.name, made.body, await values.get("a")) == ("a", '{"n": 1}', made)
        replaced = required(await values.put("a", '{"n": 2}', version=made.version))
        assert replaced.version > made.version > 0
        assert await values.get("a") == replaced
        assert await values.delete("a", version=replaced.version)
        assert (await values.get("a"), list(await values.list())) == (None, [])

    @story()
    async def test_a_change_of_another_version_changes_nothing(self, store: Store) -> None:
        values = store.values
        assert await values.put("a", "0", version=7) is None, "there is none yet"
        assert not await values.delete("a", version=0)
        first = required(await values.put("a", "1", version=0))
        assert await values.put("a", "2", version=0) is None, "there is one by now"
        second = required(await values.put("a", "3", version=first.version))
        assert await values.put("a", "4", version=first.version) is None
        assert not await values.delete("a", version=first.version)
        assert not await values.delete("a", version=0)
        assert await values.get("a") == second

    @story()
    async def test_a_value_that_was_made_anew_has_a_version_it_never_had(self, store: Store) -> None:
        """Otherwise a change that was decided on the deleted value would be made to the new one."""
        versions = []
        for _ in range(3):
            made = required(await store.values.put("a", "{}", version=0))
            versions.append(made.version)
            assert await store.values.delete("a", version=made.version)
        assert versions == sorted(set(versions))
        made = required(await store.values.put("a", "{}", version=0))
        assert await store.values.put("a", "old", version=versions[-1]) is None
        assert await store.values.get("a") == made

    @story()
    async def test_of_writers_at_once_exactly_one_wins(self, store: Store) -> None:
        version = 0
        for number in range(3):
            answers = await asyncio.gather(
                *(store.values.put("a", f"{number} {n}", version=version, events=[event(f"{n}")]) for n in range(16))
            )
            (won,) = [one for one in answers if one is not None]
            assert await store.values.get("a") == won
            version = won.version
        assert len(await event_types(store)) == 3

    @story()
    async def test_events_are_kept_with_the_change_and_never_without(self, store: Store) -> None:
        made = required(await store.values.put("a", "1", version=0, events=[event("made")]))
        assert await store.values.put("a", "2", version=0, events=[event("not made")]) is None
        assert not await store.values.delete("a", version=made.version + 1, events=[event("not deleted")])
        assert await store.values.delete("a", version=made.version, events=[event("deleted")])
        assert not await store.values.delete("a", version=made.version, events=[event("deleted twice")])
        with pytest.raises(ParameterError):
            await store.values.put("a", "x" * (LONGEST_BODY + 1), version=0, events=[event("too long")])
        assert await event_types(store) == ["made", "deleted"]

    @story()
    async def test_values_are_listed_by_prefix_in_the_order_of_their_names(self, store: Store) -> None:
        names = ["b", "a:2", "a:10", "a:ä", "a%", "A:1", "a:"]
        for name in names:
            await store.values.put(name, name.upper(), version=0)
        assert [one.name for one in await store.values.list()] == sorted(names)
        assert [(one.name, one.body) for one in await store.values.list("a:")] == [
            (name, name.upper()) for name in ("a:", "a:10", "a:2", "a:ä")
        ]
        assert list(await store.values.list("c")) == []

    @story()
    async def test_names_and_bodies_are_kept_as_they_are(self, store: Store) -> None:
        texts = {ODD_TEXT: "", "e": ODD_TEXT, "ä" * (LONGEST_NAME // 2): '"' * LONGEST_BODY, "n": "\x00" * LONGEST_BODY}
        for name, body in texts.items():
            await store.values.put(name, body, version=0)
        assert {one.name: one.body for one in await store.values.list()} == texts
        for name, body in texts.items():
            assert required(await store.values.get(name)).body == body

    @pytest.mark.parametrize("name", ["", "n" * (LONGEST_NAME + 1), "ä" * (LONGEST_NAME // 2 + 1), "\ud800"])
    def test_a_name_that_no_value_can_have_is_refused(self, harness: Harness, name: str) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            for refused in (
                store.values.get(name),
                store.values.put(name, "{}", version=0),
                store.values.delete(name, version=1),
            ):
                with pytest.raises(ParameterError, match=f"a text of 1 to {LONGEST_NAME} bytes"):
                    await refused
            assert list(await store.values.list()) == []

        harness.run(story)

    @pytest.mark.parametrize("body", ["ä" * (LONGEST_BODY // 2 + 1), "\ud800"])
    def test_a_body_that_is_too_long_or_no_text_is_refused_and_the_value_stays(
        self, harness: Harness, body: str
    ) -> None:
        async def story(store: Store, clock: VirtualClock) -> None:
            made = required(await store.values.put("a", "{}", version=0))
            with pytest.raises(ParameterError, match=f"at most {LONGEST_BODY} bytes"):
                await store.values.put("a", body, version=made.version)
            assert await store.values.get("a") == made

        harness.run(story)


class SharedValueContract(ValueContract):
    """The suite of an engine whose harness opens the same database every time."""

    def test_two_stores_see_each_others_changes_at_once(self, harness: Harness) -> None:
        async def story(one: Store, clock: VirtualClock) -> None:
            async with harness.opened(clock) as other:
                version = 0
                for number in range(10):
                    near, far = (one, other) if number % 2 else (other, one)
                    made = required(await near.values.put("a", f"{number}", version=version))
                    assert (await far.values.get("a"), list(await far.values.list())) == (made, [made])
                    version = made.version
                assert await one.values.put("a", "{}", version=version - 1) is None
                assert await one.values.delete("a", version=version)
                assert (await other.values.get("a"), list(await other.values.list())) == (None, [])
                assert await other.values.put("a", "{}", version=0) is not None

        harness.run(story)

    def test_of_writers_in_two_stores_exactly_one_wins(self, harness: Harness) -> None:
        async def story(one: Store, clock: VirtualClock) -> None:
            async with harness.opened(clock) as other:
                version = 0
                for _ in range(5):
                    changes = [
                        store.values.put("a", f"{number}", version=version, events=[event("changed")])
                        for number, store in enumerate([one, other] * 8)
                    ]
                    (won,) = [made for made in await asyncio.gather(*changes) if made is not None]
                    assert await one.values.get("a") == won == await other.values.get("a")
                    version = won.version
                assert await event_types(one) == ["changed"] * 5

        harness.run(story)

    def test_values_survive_and_deleted_ones_do_not_come_back(self, harness: Harness) -> None:
        async def main() -> None:
            clock, kept = VirtualClock(), list[StoredValue]()
            async with harness.opened(clock) as store:
                for name in ("stays", "goes", ODD_TEXT):
                    kept.append(required(await store.values.put(name, name, version=0)))
                assert await store.values.delete("goes", version=kept.pop(1).version)
            for _ in range(2):
                async with harness.opened(clock) as store:
                    assert list(await store.values.list()) == sorted(kept, key=lambda one: one.name)
                    assert await store.values.get("goes") is None
            async with harness.opened(clock) as store:
                made = required(await store.values.put("goes", "again", version=0))
                assert made.version > max(one.version for one in kept)

        asyncio.run(main())
