"""The model of the broker answers as a real server does: the same requests to both, and the answers compared."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from msgspec import json

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreFullError
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.reads import (
    EVERYTHING,
    LATEST,
    behind,
    count,
    first_message,
    last_message,
    message_at,
    page,
    scan,
)
from reefknot.stores.jetstream.requests import RefusedError
from tests.simulation.broker import Broker
from tests.simulation.broker_streams import EXPECTED, LAST, OVER

Facts = list[Any]


class Asking:
    """A connection and a stream of one story."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name

    async def api(self, request: str, body: Any = None) -> Any:
        """The answer, or the number and the text of the refusal."""
        try:
            return json.decode(await self.connection.api(request, body))
        except RefusedError as error:
            return error.number, error.text.replace(self.name, "NAME")

    async def make(self, **config: Any) -> Any:
        whole = {"name": self.name, "subjects": [f"{self.name}.>"], "storage": "memory", **config}
        return await self.api(f"STREAM.CREATE.{self.name}", whole)

    async def store(self, subject: str, body: bytes = b"x", /, **headers: str) -> Any:
        """The sequence of a stored message, or the refusal."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.connection.request(f"{self.name}.{subject}", body, headers=given)
        return self._answer(answer.data)

    def _answer(self, data: bytes) -> Any:
        try:
            self.connection.check(data)
        except RefusedError as error:
            return error.number, error.text
        except StoreFullError:
            return "full"
        found = json.decode(data)
        return found["seq"], found.get("duplicate", False), found.get("count")

    async def batch(self, *messages: tuple[str, bytes, dict[str, str]], places: list[int] | None = None) -> Any:
        name, last = uuid4().hex, len(messages)
        for number, (subject, body, headers) in zip(places or range(1, last + 1), messages, strict=True):
            given = {**headers, "Nats-Batch-Id": name, "Nats-Batch-Sequence": str(number)}
            if (subject, body, headers) != messages[-1]:
                await self.connection.publish(f"{self.name}.{subject}", body, headers=given)
                continue
            given["Nats-Batch-Commit"] = "1"
            answer = await self.connection.request(f"{self.name}.{subject}", body, headers=given)
            return self._answer(answer.data)

    def over(self, sequence: int, wanted: str) -> dict[str, str]:
        return {EXPECTED: str(sequence), OVER: f"{self.name}.{wanted}"}

    async def first(self, subject: str) -> int | None:
        found = await first_message(self.connection, self.name, f"{self.name}.{subject}")
        return None if found is None else found.sequence

    async def everything(self) -> Facts:
        found = await scan(self.connection, self.name, [f"{self.name}.>"], start=EVERYTHING)
        return [(one.sequence, one.subject.removeprefix(self.name), one.body) for one in found]


async def _compare_and_set(ask: Asking) -> Facts:
    await ask.make(max_msgs_per_subject=1)
    facts = [await ask.store("a.1"), await ask.store("a.2"), await ask.store("a.1", b"y")]
    facts += [await ask.store("a.1", Nats_Expected_Last_Subject_Sequence="1")]
    facts += [await ask.store("a.1", b"x", **{EXPECTED: "2", OVER: f"{ask.name}.a.*"})]
    facts += [await ask.store("a.3", b"x", **{EXPECTED: "3", OVER: f"{ask.name}.a.*"})]
    facts += [await ask.store("b", Nats_Expected_Last_Subject_Sequence="0")]
    facts += [await ask.store("b", **{EXPECTED: "5", LAST: one}) for one in ("4", "5", "6")]
    last = await last_message(ask.connection, ask.name, f"{ask.name}.a.*")
    facts += [None if last is None else (last.sequence, last.body, dict(last.headers).keys() >= {EXPECTED})]
    facts += [
        await message_at(ask.connection, ask.name, 1),
        await last_message(ask.connection, ask.name, f"{ask.name}.z"),
    ]
    return facts + await ask.everything()


async def _batches(ask: Asking) -> Facts:
    await ask.make(max_msgs_per_subject=1, allow_atomic=True, allow_msg_ttl=True)
    facts = [await ask.batch(("work.open.1", b"record", ask.over(0, "work.*.1")), ("marker", b"", {}))]
    moved = ask.over(1, "work.*.1")
    facts += [await ask.batch(("work.open.1", b"", moved), ("work.done.1", b"record", moved), ("marker", b"", {}))]
    facts += [await ask.batch(("other", b"", {}), ("work.open.1", b"late", moved), ("marker", b"", {}))]
    facts += [await ask.batch(("twice", b"", {}), ("twice", b"", {EXPECTED: "0"}), ("marker", b"", {}))]
    facts += [await ask.batch(("gap", b"", {}), ("marker", b"", {}), places=[1, 3])]
    facts += [await ask.batch(("alone", b"", {}))]
    return facts + await ask.everything()


async def _no_batches(ask: Asking) -> Facts:
    await ask.make()
    return [await ask.batch(("a", b"", {}), ("b", b"", {})), await ask.store("a", Nats_TTL="5s")]


async def _streams(ask: Asking) -> Facts:
    facts = [await ask.api(f"STREAM.INFO.{ask.name}")]
    made = await ask.make()
    again = await ask.make()
    facts += [made["state"]["last_seq"], "error" in again, await ask.make(max_msgs=5)]
    other = {"name": f"{ask.name}2", "subjects": [f"{ask.name}.a"], "storage": "memory"}
    facts += [await ask.api(f"STREAM.CREATE.{ask.name}2", other)]
    facts += [(await ask.api("STREAM.NAMES", {"subject": f"{ask.name}.a"}))["streams"] == [ask.name]]
    for number in range(5):
        await ask.store(f"a.{number % 2}")
    facts += [(await ask.api(f"STREAM.PURGE.{ask.name}", {"seq": 3}))["purged"]]
    state = (await ask.api(f"STREAM.INFO.{ask.name}"))["state"]
    facts += [(state["messages"], state["first_seq"], state["last_seq"])]
    for number in range(4):
        await ask.store(f"a.{number % 2}")
    facts += [(await ask.api(f"STREAM.PURGE.{ask.name}", {"seq": 8, "filter": f"{ask.name}.a.0"}))["purged"]]
    facts += [*await ask.everything(), await ask.first("a.0")]
    facts += [await ask.first("b")]
    await ask.api(f"STREAM.PURGE.{ask.name}")
    state = (await ask.api(f"STREAM.INFO.{ask.name}"))["state"]
    return [*facts, (state["messages"], state["first_seq"], state["last_seq"])]


async def _reads(ask: Asking) -> Facts:
    await ask.make()
    for number in range(7):
        await ask.store(f"a.{number % 3}", b"%d" % number)
    connection, wanted = ask.connection, [f"{ask.name}.a.*"]
    latest = await scan(connection, ask.name, wanted)
    light = await scan(connection, ask.name, wanted, start={**LATEST, "headers_only": True})
    some, is_more = await page(connection, ask.name, wanted, start=EVERYTHING, most=4)
    rest, none_left = await page(connection, ask.name, [f"{ask.name}.a.1"], start=EVERYTHING, most=4)
    facts: Facts = [[(one.sequence, one.body) for one in found] for found in (latest, some, rest)]
    facts += [[(one.body, one.headers.get("Nats-Msg-Size")) for one in light], is_more, none_left]
    fifth = (await ask.api(f"STREAM.MSG.GET.{ask.name}", {"seq": 5}))["message"]["time"]
    start = {"deliver_policy": "by_start_time", "opt_start_time": fifth}
    later, _ = await page(connection, ask.name, wanted, start=start, most=9)
    facts += [[(one.sequence, one.body) for one in later]]
    return [
        *facts,
        await count(connection, ask.name, wanted),
        await count(connection, ask.name, wanted, start=behind(5)),
    ]


async def _shared_stream(ask: Asking) -> Facts:
    """A bounded work queue: refusals, repeated ids, acknowledgements, what is given back."""
    await ask.make(retention="workqueue", discard="new", max_msgs=3)
    facts = [await ask.store("q", b"1", Nats_Msg_Id="one"), await ask.store("q", b"1", Nats_Msg_Id="one")]
    facts += [await ask.store("q", b"2"), await ask.store("q", b"3"), await ask.store("q", b"4")]
    config = {"durable_name": "c", "ack_policy": "explicit", "deliver_policy": "all", "ack_wait": 30_000_000_000}
    body = {"stream_name": ask.name, "config": {"name": "c", **config}}
    facts += [(await ask.api(f"CONSUMER.CREATE.{ask.name}.c", body))["num_pending"]]
    heard: list[Any] = []
    inbox = f"_INBOX.{uuid4().hex}"

    def hear(message: Any) -> None:
        heard.append(message)

    async def fetch(number: int) -> Facts:
        del heard[:]
        asked = json.encode({"batch": number, "expires": 20_000_000_000})
        await ask.connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{ask.name}.c", asked, reply=inbox)
        async with asyncio.timeout(20):
            while len(heard) < number:  # noqa: ASYNC110 - messages come one by one
                await asyncio.sleep(0.005)
        return [(one.data, one.reply.split(".")[4:5]) for one in heard if one.data]

    await ask.connection.listen(inbox, hear)
    facts += [await fetch(2)]
    for message, answer in zip(list(heard), (b"+ACK", b"-NAK"), strict=True):
        await ask.connection.publish(message.reply, answer)
    await ask.connection.round_trip()
    facts += [sorted(await fetch(2))]
    state = (await ask.api(f"STREAM.INFO.{ask.name}"))["state"]
    facts += [state["messages"], await ask.store("q", b"5")]

    async def waiting() -> int:
        return int((await ask.api(f"CONSUMER.INFO.{ask.name}.c"))["num_waiting"])

    began = time.monotonic()
    await ask.connection.publish(heard[0].reply, b'-NAK {"delay": 1500000000}')
    await ask.connection.round_trip()
    facts += [await fetch(1), await fetch(1), time.monotonic() - began > 1]
    asked = json.encode({"batch": 3, "expires": 20_000_000_000})
    listening = await ask.connection.listen(f"{inbox}.more", hear)
    await ask.connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{ask.name}.c", asked, reply=f"{inbox}.more")
    await ask.connection.round_trip()
    facts += [await waiting()]
    await ask.connection.unsubscribe([listening])
    await ask.connection.round_trip()
    return [*facts, await waiting()]


async def _time_limits(ask: Asking) -> Facts:
    await ask.make(allow_msg_ttl=True)
    facts = [await ask.store("short", Nats_TTL="1s"), await ask.store("long", Nats_TTL="600s")]
    async with asyncio.timeout(30):
        while await message_at(ask.connection, ask.name, 1) is not None:  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.05)
    return facts + await ask.everything()


STORIES = [_compare_and_set, _batches, _no_batches, _streams, _reads, _shared_stream, _time_limits]


async def _facts(url: str, story: Callable[[Asking], Awaitable[Facts]]) -> Facts:
    connection = Connection(options_from_url(url, patience=30.0))
    await connection.open()
    name = f"s{uuid4().hex}"
    try:
        return await story(Asking(connection, name))
    finally:
        await connection.close()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__.strip("_"))
def test_the_model_answers_as_a_server(nats_server: NatsServer, story: Callable[[Asking], Awaitable[Facts]]) -> None:
    of_server = asyncio.run(_facts(nats_server.url, story))
    with Broker(Random(1), wall=time.time).clients():
        of_model = asyncio.run(_facts("nats://model:4222", story))

    assert of_model == of_server
