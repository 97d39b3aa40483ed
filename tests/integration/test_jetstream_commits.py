"""
Changes of several processes over one store on NATS: one winner each, however answers get lost.

Two stores of one name know no more of each other than two processes do. Each test has a control: the same story without
the part that it is about, which must go wrong.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import HOST, NatsServer
from reefknot.errors import StoreReplacedError, StoreUnavailableError
from reefknot.idempotency.model import Claimed, Done, KeyRecord, KeyState
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Enqueue, Enqueued, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.connection import Connection, NatsOptions
from reefknot.stores.jetstream.requests import UnansweredError
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.store import sweep_blobs
from reefknot.testing.conformance.harness import event, event_types, required
from tests.faults.proxy import Way, proxied
from tests.stories import InLoop

pytestmark = pytest.mark.real_time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def name() -> str:
    return f"two-{uuid4().hex[:12]}"


@asynccontextmanager
async def opened(server: NatsServer, clock: VirtualClock, name: str) -> AsyncIterator[JetStreamStore]:
    store = await JetStreamStore.open(server.url, clock, name=name, has_server_time=False)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def one(nats_server: NatsServer, clock: VirtualClock, name: str) -> InLoop:
    return InLoop(lambda: opened(nats_server, clock, name))


@pytest.fixture
def other(nats_server: NatsServer, clock: VirtualClock, name: str) -> InLoop:
    return InLoop(lambda: opened(nats_server, clock, name))


def item(work_id: str, **fields: Any) -> WorkItem:
    return WorkItem(work_id, "own.step", **fields)


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control without revisions"])
async def test_work_that_two_processes_claim_at_once_goes_to_one_of_them(
    one: JetStreamStore, other: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    if is_control:
        monkeypatch.setattr(Message, "headers", lambda self: {})
    await asyncio.gather(one.state.mirror(), other.state.mirror())
    twice = False
    for turn in range(300 if is_control else 1):  # in many turns a mirror is as fast as the claims
        names = {f"w{turn}-{number}" for number in range(40)}
        await one.work.enqueue([item(name) for name in names])
        await other.work.wait(10.0, classes=["cpu"])
        claims = [
            store.work.claim(5, WorkClaim(owner=f"{name}-{number}", classes=["cpu"]))
            for number in range(8)
            for name, store in (("one", one), ("other", other))
        ]
        taken = [work.id for claimed in await asyncio.gather(*claims) for work in claimed]
        assert set(taken) == names
        twice = len(taken) > len(names)
        if twice:
            break
    assert twice is is_control


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: without the comparison of arrivals"])
async def test_the_bound_is_exact_however_many_submit_at_once(
    one: JetStreamStore, other: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    """Ten places, one of them for work above the default priority."""
    if is_control:
        monkeypatch.setattr(State, "pool_messages", lambda self: [])
    bounded, fields = Enqueue(rules=SubmissionRules(size=10)), {"resource_class": "router", "pool": "cpu"}
    arrivals = [
        store.work.enqueue([item(f"{name}{number}", **fields)], bounded)
        for number in range(20)
        for name, store in (("a", one), ("b", other))
    ]
    accepted = [answer for kept in await asyncio.gather(*arrivals) for answer in kept].count(Enqueued.ACCEPTED)
    assert accepted > 9 if is_control else accepted == 9


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
    @pytest.mark.parametrize("is_control", [False, True], ids=["", "control: without the look for its own batch"])
    async def test_a_batch_whose_answer_is_lost_is_stored_once_and_its_callers_hear_so(
        self, one: JetStreamStore, other: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
    ) -> None:
        async def unknown(self: Commits, message: object, commit_id: str) -> None:
            return None

        if is_control:
            monkeypatch.setattr(Commits, "_found", unknown)
        heard = [await self._live(one, number) for number in range(6)]
        assert (heard == [[Enqueued.ACCEPTED, f"w{number}", True] for number in range(6)]) is not is_control
        assert is_control or await event_types(other) == ["submitted"] * 6


async def _sends_once(self: Commits, messages: list[Message], commit_id: str, *, is_doubtful: bool) -> int:
    return await self._send(messages, commit_id)


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: without a second try"])
async def test_results_whose_answers_are_lost_with_the_connection_are_recorded_and_their_callers_hear_so(
    nats_server: NatsServer,
    clock: VirtualClock,
    name: str,
    other: JetStreamStore,
    monkeypatch: pytest.MonkeyPatch,
    is_control: bool,
) -> None:
    if is_control:
        monkeypatch.setattr(Commits, "_send_until_known", _sends_once)
    keys = [f"k{number}" for number in range(64)]
    async with proxied(required(nats_server.port)) as proxy:
        address = NatsOptions((f"nats://{HOST}:{proxy.port}",), name)
        store = await JetStreamStore(address, clock, has_server_time=False).start()
        claims = await asyncio.gather(*[store.idempotency.claim(key, owner=key) for key in keys])
        proxy.hold(Way.DOWN)
        finishing = [
            asyncio.create_task(store.idempotency.finish(one.claim, Done("1")))
            for one in claims
            if isinstance(one, Claimed)
        ]
        while (await other.idempotency.counts()).get(KeyState.DONE, 0) < len(keys):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.01)
        proxy.cut()
        proxy.release()
        answers = await asyncio.gather(*finishing, return_exceptions=True)
        await store.close()
    expected = UnansweredError if is_control else KeyRecord
    assert [type(one) for one in answers] == [expected] * len(keys)


async def test_work_that_ended_while_nobody_heard_is_not_open_any_more(
    one: JetStreamStore, other: JetStreamStore, clock: VirtualClock
) -> None:
    """After so long that tombstones may be gone, everything is read anew."""

    await one.work.enqueue([item("stays"), item("ends")])
    await other.work.wait(10.0)
    feed = other.state._mirrors["all"].feed
    await feed.stop()
    await one.work.cancel("ends")
    clock.advance(3600)
    feed.caught_up.clear()
    await feed.start()
    await other.connection._back()  # as after a connection that was lost
    async with asyncio.timeout(20):
        while "ends" in other.state.table.items:  # noqa: ASYNC110 - the feed has no event for what it removes
            await asyncio.sleep(0.01)
    assert set(other.state.table.items) == {"stays"}


async def test_a_change_that_is_too_large_fails_for_its_own_caller(one: JetStreamStore, other: JetStreamStore) -> None:
    many = [item(f"m{number}") for number in range(1200)]
    small = one.work.enqueue([item("small")])
    answers = await asyncio.gather(one.work.enqueue(many), small, return_exceptions=True)
    assert isinstance(answers[0], Exception)
    assert answers[1] == [Enqueued.ACCEPTED]
    assert await other.work.get("m0") is None


async def test_payloads_and_results_of_megabytes_come_back_whole(one: JetStreamStore, other: JetStreamStore) -> None:
    payload, result = bytes(range(256)) * 12_000, "r" * 2_000_000
    await one.work.enqueue([item("large", payload=payload)])
    await other.work.wait(10.0)
    (claimed,) = await other.work.claim(1, WorkClaim(owner="other"))
    assert claimed.payload == payload
    await other.work.settle([Settlement("large", "other", claimed.fence, WorkDone(result))])
    found = required(await one.work.ended("large", 10.0))
    assert (found.payload, found.result) == (payload, result)


async def test_a_payload_without_a_record_is_swept_and_others_stay(one: JetStreamStore, other: JetStreamStore) -> None:
    payload = bytes(10_000)
    await one.work.enqueue([item("stays", payload=payload), item("goes", payload=payload)])
    gone = one.names.any_work("goes").replace("*.*", "open.cpu")
    await one.connection.request(gone, b"", headers=Message(gone, ttl=1).headers())
    assert await sweep_blobs(one.state) == 1
    assert await sweep_blobs(one.state) == 0
    assert required(await other.work.get("stays")).payload == payload


async def test_a_stream_that_is_gone_is_said_and_not_waited_for(one: JetStreamStore) -> None:
    await one.connection.api(f"STREAM.DELETE.{one.names.state}")
    with pytest.raises(StoreReplacedError, match=rf"its stream {one.names.state} was deleted while it was open"):
        await one.work.enqueue([item("w")])
    assert isinstance(one.failure, StoreReplacedError)


async def test_a_closed_store_says_so(one: JetStreamStore) -> None:
    await one.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await one.work.enqueue([item("w")])
