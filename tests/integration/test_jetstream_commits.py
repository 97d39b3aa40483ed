"""
Changes of several processes over one store on NATS: one winner each, however answers get lost.

Two stores of one name know no more of each other than two processes do. Each test has a control: the same story without
the part that it is about, which must go wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueue, Enqueued, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.connection import Connection, UnansweredError
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.work import sweep_blobs
from reefknot.testing.conformance.harness import event, event_types, required

Story = Callable[[JetStreamStore, JetStreamStore, VirtualClock], Awaitable[None]]


def run(server: NatsServer, story: Story, **options: Any) -> None:
    """Run a story with two stores of one name."""

    async def main() -> None:
        clock = VirtualClock()
        async with asyncio.timeout(60), two_stores(server, clock, **options) as (one, other):
            await story(one, other, clock)

    asyncio.run(main())


@asynccontextmanager
async def two_stores(
    server: NatsServer, clock: VirtualClock, **options: Any
) -> AsyncIterator[tuple[JetStreamStore, JetStreamStore]]:
    name = f"two-{uuid4().hex[:12]}"
    stores = [
        await JetStreamStore.open(server.url, clock, name=name, has_server_time=False, **options) for _ in range(2)
    ]
    try:
        yield stores[0], stores[1]
    finally:
        for store in stores:
            await store.close()


def item(work_id: str, **fields: Any) -> WorkItem:
    return WorkItem(work_id, "own.step", **fields)


class TestOneWinner:
    @staticmethod
    async def _claim_all(one: JetStreamStore, other: JetStreamStore) -> list[str]:
        await one.work.enqueue([item(f"w{number}") for number in range(40)])
        await other.work.wait(10.0, classes=["cpu"])
        claims = [
            store.work.claim(5, WorkClaim(owner=f"{name}-{number}", classes=["cpu"]))
            for number in range(8)
            for name, store in (("one", one), ("other", other))
        ]
        return [work.id for taken in await asyncio.gather(*claims) for work in taken]

    def test_work_that_two_processes_claim_at_once_goes_to_one_of_them(self, nats_server: NatsServer) -> None:
        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            assert sorted(await self._claim_all(one, other)) == sorted(f"w{number}" for number in range(40))

        run(nats_server, story)

    def test_control_without_revisions_it_goes_to_both(
        self, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Message, "headers", lambda self: {})

        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            taken = await self._claim_all(one, other)
            assert len(taken) > len(set(taken))

        run(nats_server, story)

    def test_the_late_result_of_an_owner_that_was_given_up_is_refused(self, nats_server: NatsServer) -> None:
        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            await one.work.enqueue([item("w")])
            (held,) = await one.work.claim(1, WorkClaim(owner="frozen", lease=5))
            clock.advance(6)
            await other.work.wait(5.0)
            (again,) = await other.work.claim(1, WorkClaim(owner="heir"))
            late = Settlement("w", "frozen", held.fence, WorkDone('"late"'), events=(event("late"),))
            assert await one.work.settle([late]) == [False]
            assert await other.work.settle([Settlement("w", "heir", again.fence, WorkDone('"right"'))]) == [True]
            found = required(await one.work.ended("w", 10.0))
            assert (found.state, found.result, found.crashes) == (WorkState.SUCCEEDED, '"right"', 1)
            assert await event_types(other) == []

        run(nats_server, story)


class TestAdmission:
    RULES = SubmissionRules(size=10)

    async def _submit(self, one: JetStreamStore, other: JetStreamStore) -> int:
        arrivals = [
            store.work.enqueue(
                [item(f"{name}{number}", resource_class="router", pool="cpu")], Enqueue(rules=self.RULES)
            )
            for number in range(20)
            for name, store in (("a", one), ("b", other))
        ]
        answers = [answer for kept in await asyncio.gather(*arrivals) for answer in kept]
        return answers.count(Enqueued.ACCEPTED)

    def test_the_bound_is_exact_however_many_submit_at_once(self, nats_server: NatsServer) -> None:
        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            assert await self._submit(one, other) == 9, "ten places, one of them for work above the default priority"

        run(nats_server, story)

    def test_control_whoever_does_not_compare_arrivals_takes_more(
        self, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(State, "pool_messages", lambda self: [])

        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            assert await self._submit(one, other) > 9

        run(nats_server, story)


class TestLostAnswers:
    """The server stores a batch, and its answer does not arrive."""

    @pytest.fixture
    def deaf(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every third answer to a batch is lost."""
        ask, count = Connection.request, 0

        async def request(self: Connection, subject: str, body: bytes = b"", **more: Any) -> Any:
            nonlocal count
            answer = await ask(self, subject, body, **more)
            if "Nats-Batch-Commit" in (more.get("headers") or {}):
                count += 1
                if count % 3 == 1:
                    raise UnansweredError("nats://lost", "an answer was lost", "look")
            return answer

        monkeypatch.setattr(Connection, "request", request)

    @staticmethod
    async def _live(store: JetStreamStore, number: int) -> list[object]:
        """The answers in the life of one item, from its submission to its end."""
        name = f"w{number}"
        answers: list[object] = list(await store.work.enqueue([item(name)], events=[event("submitted", work_id=name)]))
        claimed = await store.work.claim(1, WorkClaim(owner="me"))
        answers += [one.id for one in claimed]
        for one in claimed:
            answers += await store.work.settle([Settlement(one.id, "me", one.fence, WorkDone('"done"'))])
        return answers

    @pytest.mark.usefixtures("deaf")
    def test_a_batch_whose_answer_is_lost_is_stored_once_and_its_callers_hear_so(self, nats_server: NatsServer) -> None:
        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            for number in range(6):
                assert await self._live(one, number) == [Enqueued.ACCEPTED, f"w{number}", True]
            assert await event_types(other) == ["submitted"] * 6

        run(nats_server, story)

    @pytest.mark.usefixtures("deaf")
    def test_control_who_does_not_look_takes_its_own_batch_for_another_ones(
        self, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def unknown(self: Commits, message: object, commit_id: str) -> None:
            return None

        monkeypatch.setattr(Commits, "_found", unknown)

        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            heard = [await self._live(one, number) for number in range(6)]
            assert heard != [[Enqueued.ACCEPTED, f"w{number}", True] for number in range(6)]

        run(nats_server, story)


class TestAMirrorThatWasAway:
    def test_work_that_ended_while_nobody_heard_is_not_open_any_more(self, nats_server: NatsServer) -> None:
        """After so long that tombstones may be gone, everything is read anew."""

        async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
            await one.work.enqueue([item("stays"), item("ends")])
            await other.work.wait(10.0)
            await other.state.feed.stop()
            await one.work.cancel("ends")
            clock.advance(3600)
            other.state.feed.caught_up.clear()
            await other.state.feed.start()
            await other.connection._back()  # as after a connection that was lost
            async with asyncio.timeout(20):
                while "ends" in other.state.table.items:  # noqa: ASYNC110 - the feed has no event for what it removes
                    await asyncio.sleep(0.01)
            assert set(other.state.table.items) == {"stays"}

        run(nats_server, story)


def test_a_change_that_is_too_large_fails_for_its_own_caller(nats_server: NatsServer) -> None:
    async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
        many = [item(f"m{number}") for number in range(1200)]
        small = one.work.enqueue([item("small")])
        answers = await asyncio.gather(one.work.enqueue(many), small, return_exceptions=True)
        assert isinstance(answers[0], Exception)
        assert answers[1] == [Enqueued.ACCEPTED]
        assert await other.work.get("m0") is None

    run(nats_server, story)


def test_a_payload_and_a_result_of_several_megabytes_come_back_as_they_were(nats_server: NatsServer) -> None:
    async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
        payload, result = bytes(range(256)) * 12_000, "r" * 2_000_000
        await one.work.enqueue([item("large", payload=payload)])
        await other.work.wait(10.0)
        (claimed,) = await other.work.claim(1, WorkClaim(owner="other"))
        assert claimed.payload == payload
        await other.work.settle([Settlement("large", "other", claimed.fence, WorkDone(result))])
        found = required(await one.work.ended("large", 10.0))
        assert (found.payload, found.result) == (payload, result)

    run(nats_server, story)


def test_a_payload_whose_record_is_gone_is_swept_and_others_stay(nats_server: NatsServer) -> None:
    async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
        payload = bytes(10_000)
        await one.work.enqueue([item("stays", payload=payload), item("goes", payload=payload)])
        gone = one.names.any_work("goes").replace("*.*", "open.cpu")
        await one.connection.request(gone, b"", headers=Message(gone, ttl=1).headers())
        assert await sweep_blobs(one.state) == 1
        assert await sweep_blobs(one.state) == 0
        assert required(await other.work.get("stays")).payload == payload

    run(nats_server, story)


def test_a_stream_that_is_gone_is_said_and_not_waited_for(nats_server: NatsServer) -> None:
    async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
        await one.connection.api(f"STREAM.DELETE.{one.names.state}")
        with pytest.raises(StoreUnavailableError, match=rf"its stream {one.names.state} is gone"):
            await one.work.enqueue([item("w")])

    run(nats_server, story)


def test_a_closed_store_says_so(nats_server: NatsServer) -> None:
    async def story(one: JetStreamStore, other: JetStreamStore, clock: VirtualClock) -> None:
        await one.close()
        with pytest.raises(StoreUnavailableError, match="closed"):
            await one.work.enqueue([item("w")])

    run(nats_server, story)
