"""
Idempotency keys over the model of a broker: many changes are on their way at once, and what goes wrong is repaired.

Time is virtual. Each test has a control: the same story with one part weakened, which must go wrong.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import pytest
from msgspec import json

from reefknot.errors import LeaseLostError, StoreUnavailableError
from reefknot.idempotency.model import Busy, Claim, Claimed, Done, Hit, KeyRecord, KeyState, Unknown
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore, commits, reads
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.idempotency import JetStreamIdempotencyStore
from reefknot.stores.jetstream.reads import StreamMessage
from reefknot.stores.jetstream.requests import UnansweredError
from reefknot.stores.jetstream.state import Message
from reefknot.testing.conformance.harness import required
from tests.simulation.broker import NO_FAULTS, Broker, Faults
from tests.stories import InLoop

URL = "nats://model:4222"
CALLERS = 64
UNSTEADY = Faults(latency=0.01, lost_request=0.05, lost_answer=0.1, lost_delivery=0.0, twice=0.0, stalled=0.0)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(Random(3)).clients() as model:
        yield model


def in_loop() -> InLoop:
    @asynccontextmanager
    async def opened() -> AsyncIterator[JetStreamStore]:
        store = await JetStreamStore.open(URL, VirtualClock(), has_server_time=False)
        try:
            yield store
        finally:
            await store.close()

    return InLoop(opened)


@pytest.fixture
def one(broker: Broker) -> InLoop:
    return in_loop()


@pytest.fixture
def other(broker: Broker) -> InLoop:
    return in_loop()


def seconds() -> float:
    return asyncio.get_running_loop().time()


async def claimed(store: JetStreamStore, key: str = "k", owner: str = "first") -> Claim:
    answer = await store.idempotency.claim(key, owner=owner)
    assert isinstance(answer, Claimed), answer
    return answer.claim


async def claimed_and_finished(store: JetStreamStore, key: str) -> None:
    await store.idempotency.finish(await claimed(store, key), Done("1"))


def with_control(what: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("is_control", [False, True], ids=["", f"control: {what}"])


@with_control("one after the other")
async def test_changes_of_many_keys_are_on_their_way_at_once(
    one: JetStreamStore, broker: Broker, is_control: bool
) -> None:
    one._commits._places = asyncio.Semaphore(1 if is_control else commits.MOST_ALONE)
    broker.faults, began = Faults(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), seconds()
    await asyncio.gather(*[claimed_and_finished(one, f"k{number}") for number in range(CALLERS)])
    assert (seconds() - began < 5.0) is not is_control


@with_control("without revisions")
async def test_of_many_callers_of_one_key_one_gets_it(
    one: JetStreamStore, other: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    if is_control:
        monkeypatch.setattr(Message, "headers", lambda self: {})
    stores = [one, other] * (CALLERS // 2)
    answers = await asyncio.gather(
        *[store.idempotency.claim("k", owner=f"o{number}") for number, store in enumerate(stores)]
    )
    assert (Counter(map(type, answers)) == {Claimed: 1, Busy: CALLERS - 1}) is not is_control


async def _sends_once(self: Commits, messages: list[Message], commit_id: str, *, is_doubtful: bool) -> int:
    try:
        return await self._send(messages, commit_id)
    except UnansweredError:
        return 1_000_000


@with_control("an unanswered change counts as stored")
async def test_lost_requests_and_answers_lose_no_result_and_let_no_second_caller_in(
    one: JetStreamStore, other: JetStreamStore, broker: Broker, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    effects: Counter[str] = Counter()

    async def run(store: JetStreamStore, key: str, owner: str) -> None:
        answer = await store.idempotency.claim(key, owner=owner)
        if isinstance(answer, Claimed):
            effects[key] += 1
            await store.idempotency.finish(answer.claim, Done(f'"{owner}"'))

    if is_control:
        monkeypatch.setattr(Commits, "_send_until_known", _sends_once)
    broker.faults, keys = UNSTEADY, [f"k{number}" for number in range(80)]
    calls = [run(store, key, f"{name}{key}") for key in keys for name, store in (("a", one), ("b", other))]
    gone = [error for error in await asyncio.gather(*calls, return_exceptions=True) if error is not None]
    broker.faults = NO_FAULTS
    records = [await other.idempotency.get(key) for key in keys]
    is_kept = all(record is not None and record.state is KeyState.DONE for record in records)
    assert min(broker.counts["lost_request"], broker.counts["lost_answer"]) > 3
    assert (not gone and is_kept and effects == dict.fromkeys(keys, 1)) is not is_control


async def _finds_nothing(self: Commits, message: Message, commit_id: str) -> None:
    """Take the message of an unanswered change for lost when its second try is refused."""


@with_control("without the look for its own message")
async def test_a_change_whose_answer_is_lost_is_not_taken_for_anothers(
    one: JetStreamStore, broker: Broker, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    """A repeated `resolve` would find nothing left to do, and say so."""
    if is_control:
        monkeypatch.setattr(Commits, "_found", _finds_nothing)
    broker.faults = UNSTEADY

    async def resolved(key: str) -> bool:
        await one.idempotency.finish(await claimed(one, key), Unknown())
        return await one.idempotency.resolve(key, Done("1"))

    answers = await asyncio.gather(*[resolved(f"k{number}") for number in range(40)])
    assert all(answers) is not is_control


async def _sees_nothing(self: JetStreamIdempotencyStore, key: str) -> None:
    """Go on with what was known."""


@with_control("without a look at the newer record")
async def test_a_refused_change_is_made_again_on_the_newer_record(
    one: JetStreamStore, other: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    claim = await claimed(one)
    renewed = await other.idempotency.renew(claim, lease=500.0)
    if is_control:
        monkeypatch.setattr(JetStreamIdempotencyStore, "_look", _sees_nothing)
        with pytest.raises(StoreUnavailableError, match="changed the same records first"):
            await one.idempotency.finish(claim, Done("1"))
        return
    done = await one.idempotency.finish(claim, Done("1"))
    assert (done.result, done.lease_until) == ("1", renewed.lease_until)
    assert (await one.idempotency.finish(claim, Done("1"))) == await other.idempotency.get("k")


async def _believes_every_read(self: JetStreamIdempotencyStore, key: str) -> KeyRecord | None:
    message = await reads.last_message(self._state.connection, self._state.names.state, self._state.names.key(key))
    await asyncio.sleep(1.0)
    record = None if message is None else json.decode(message.body, type=KeyRecord)
    self._known[key] = 0 if message is None else message.sequence, record
    return record


async def _reads_slowly(*given: Any) -> StreamMessage | None:
    message = await reads.last_message(*given)
    await asyncio.sleep(1.0)
    return message


@pytest.mark.parametrize("is_new", [False, True], ids=["an older record", "no record"])
@with_control("what was read last counts")
async def test_a_slow_read_does_not_replace_what_another_caller_has_stored_meanwhile(
    one: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool, is_new: bool
) -> None:
    claims = [] if is_new else [await claimed(one)]
    monkeypatch.setattr("reefknot.stores.jetstream.idempotency.last_message", _reads_slowly)
    if is_control:
        monkeypatch.setattr(JetStreamIdempotencyStore, "_look", _believes_every_read)
    looking = asyncio.create_task(one.idempotency.get("k"))
    await asyncio.sleep(0.5)
    cast("VirtualClock", one.state.clock).advance(5)
    for claim in claims:
        await one.idempotency.finish(claim, Done("1"))
    if is_new:
        await claimed(one)
    await looking
    assert (await one.idempotency.newest_at() == one.moment().wall) is not is_control


async def _cancelled_after_sending(finishing: Awaitable[KeyRecord]) -> None:
    task = asyncio.ensure_future(finishing)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@with_control("a memory that is written before the answer")
async def test_a_caller_cancelled_before_its_change_arrives_leaves_no_memory_of_it(
    one: JetStreamStore, broker: Broker, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    claim = await claimed(one)
    send = Commits.store_alone

    async def remembered_early(self: Commits, message: Message) -> int:
        record = json.decode(message.body, type=KeyRecord)
        one.idempotency._remember("k", required(message.expected) + 1, record)
        return await send(self, message)

    if is_control:
        monkeypatch.setattr(Commits, "store_alone", remembered_early)
    broker.faults = Faults(0.1, 1.0, 0.0, 0.0, 0.0, 0.0)
    await _cancelled_after_sending(one.idempotency.finish(claim, Done("1")))
    await asyncio.sleep(1.0)
    broker.faults = NO_FAULTS
    if is_control:
        with pytest.raises(LeaseLostError):
            await one.idempotency.renew(claim)
        return
    assert (await one.idempotency.renew(claim)).state is KeyState.IN_PROGRESS
    assert (await one.idempotency.finish(claim, Done("2"))).result == "2"


async def test_a_change_whose_caller_is_cancelled_on_its_way_is_found_by_all(
    one: JetStreamStore, other: JetStreamStore, broker: Broker
) -> None:
    claim = await claimed(one)
    broker.faults = Faults(0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    await _cancelled_after_sending(one.idempotency.finish(claim, Done("1")))
    with pytest.raises(LeaseLostError):
        await one.idempotency.renew(claim)
    assert (await one.idempotency.finish(claim, Done("1"))).result == "1"
    for store in (one, other):
        assert isinstance(await store.idempotency.claim("k", owner="second"), Hit)


async def _stops_at_once(self: Commits) -> None:
    self._closed = True
    await self._services.stop()


@with_control("a store that waits for nothing")
async def test_a_store_closes_when_the_changes_on_their_way_are_stored(
    one: JetStreamStore, broker: Broker, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    if is_control:
        monkeypatch.setattr(Commits, "close", _stops_at_once)
    broker.faults = Faults(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    claiming = asyncio.create_task(claimed(one))
    await asyncio.sleep(0)
    await one.close()
    (answer,) = await asyncio.gather(claiming, return_exceptions=True)
    assert isinstance(answer, StoreUnavailableError if is_control else Claim)
    with pytest.raises(StoreUnavailableError, match="closed"):
        await claimed(one, "later")


@with_control("each says so")
async def test_callers_wait_for_a_server_that_is_away_and_one_line_says_so(
    one: JetStreamStore,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_control: bool,
) -> None:
    if is_control:
        monkeypatch.setattr(commits, "SAY_EVERY_S", 0.0)
    broker.restart(8.0)
    claims = await asyncio.gather(*[claimed(one, f"k{number}") for number in range(CALLERS)])
    assert len({claim.key for claim in claims}) == CALLERS
    assert (caplog.text.count("changes wait until") == 1) is not is_control
