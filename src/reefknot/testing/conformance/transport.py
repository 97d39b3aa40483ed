"""
Conformance suite of the transport.

Stories have two ends, as two processes would: what is sent at one is heard at both. They wait for what must come, and
prove that something did not come by what came after it. Who has just come may be unknown at the other end for a moment;
a word from there ends that, as it does between routers and workers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import wraps

from reefknot.queue.port.transport import Delivery, Transport
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing.conformance.harness import LONGEST_STORY, S

Ends = tuple[Transport, Transport]
TransportStory = Callable[[Transport, Transport, VirtualClock], Awaitable[None]]
MOST_AHEAD = 5000
"""A sender that gets this far ahead of a reader with two places has no bound."""
LAST = b"that was all"
WAIT_S = 0.2
"""How long a test waits to see that a reader waits."""


class TransportHarness:
    """Runs a story on two ends of a transport of its own. `factory` opens them in the time of a clock."""

    def __init__(self, factory: Callable[[VirtualClock], AbstractAsyncContextManager[Ends]]) -> None:
        self._factory = factory

    def run(self, story: TransportStory) -> None:
        async def main() -> None:
            clock = VirtualClock()
            async with asyncio.timeout(LONGEST_STORY), self._factory(clock) as (near, far):
                await story(near, far, clock)

        asyncio.run(main())


async def receive(line: AsyncIterator[Delivery], count: int) -> list[bytes]:
    """This number of messages, or a failed test."""
    return [(await anext(line)).body for _ in range(count)]


async def until_last(line: AsyncIterator[Delivery]) -> list[bytes]:
    """Everything before the last message."""
    found: list[bytes] = []
    async for delivery in line:
        if delivery.body == LAST:
            return found
        found.append(delivery.body)
    raise AssertionError("it ended before the last message")


def transport_story(
    method: Callable[[S, Transport, Transport], Awaitable[None]],
) -> Callable[[S, TransportHarness], None]:
    """A decorator that makes a story a test: pytest gives it `transports`, which open the two ends."""

    @wraps(method)
    def test(self: S, transports: TransportHarness) -> None:
        transports.run(lambda near, far, clock: method(self, near, far))

    vars(test).pop("__wrapped__")  # pytest asks for the fixtures of the test, not of the story
    return test


class TransportContract:
    """Subclass it, and give it a `transports`."""

    @transport_story
    async def test_everybody_who_listens_hears_it_in_order_at_both_ends(self, near: Transport, far: Transport) -> None:
        lines = [near.subscribe("a", "b"), far.subscribe("a", "b"), far.subscribe("b")]
        await _acquainted(near, far)
        await near.publish("a", b"1")
        await near.publish("b", b"2")
        await near.publish("unheard", b"3")
        await near.publish("b", LAST)
        assert [await until_last(line) for line in lines] == [[b"1", b"2"], [b"1", b"2"], [b"2"]]

    @transport_story
    async def test_subject_body_and_headers_arrive_as_they_were_sent(self, near: Transport, far: Transport) -> None:
        large = bytes(range(256)) * 4096
        line = far.subscribe("a.b")
        await near.publish("a.b", large, headers={"trace_id": "naïve 🪢"})
        await near.publish("a.b", b"")
        one, two = await anext(line), await anext(line)
        assert (one.subject, one.body, dict(one.headers)) == ("a.b", large, {"trace_id": "naïve 🪢"})
        assert (two.body, dict(two.headers)) == (b"", {})

    @transport_story
    async def test_what_was_sent_before_one_listens_is_not_heard(self, near: Transport, far: Transport) -> None:
        first = far.subscribe("a")
        await near.publish("a", b"early")
        assert await receive(first, 1) == [b"early"]
        line = far.subscribe("a")
        await near.publish("a", LAST)
        assert await until_last(line) == []

    @transport_story
    async def test_one_id_is_delivered_once_for_each_subject_and_no_id_every_time(
        self, near: Transport, far: Transport
    ) -> None:
        line = far.subscribe("a", "b")
        for subject, name in (("a", "x"), ("a", "x"), ("b", "x"), ("a", ""), ("a", "")):
            await near.publish(subject, f"{subject}{name}".encode(), message_id=name)
        await near.publish("a", LAST)
        assert await until_last(line) == [b"ax", b"bx", b"a", b"a"]

    @transport_story
    async def test_nothing_is_lost_or_doubled_when_many_send_at_once(self, near: Transport, far: Transport) -> None:
        lines = [near.subscribe("a", limit=50), far.subscribe("a", limit=50)]
        reading = [asyncio.ensure_future(receive(line, 400)) for line in lines]
        sent = [(end, f"{name}{n}".encode()) for end, name in ((near, "n"), (far, "f")) for n in range(200)]
        await _acquainted(near, far)
        await asyncio.gather(*(end.publish("a", body, message_id=body.decode()) for end, body in sent))
        for found in await asyncio.gather(*reading):
            assert sorted(found) == sorted(body for _, body in sent)

    @transport_story
    async def test_a_sender_that_gets_ahead_waits_and_nothing_is_lost(self, near: Transport, far: Transport) -> None:
        line = far.subscribe("a", limit=2)
        await _acquainted(near, far)
        sent, waiting = await _sent_until_it_waits(near)
        assert sorted(await receive(line, sent + 1), key=int) == [str(n).encode() for n in range(sent + 1)]
        await waiting

    @transport_story
    async def test_who_gave_up_waiting_may_send_again_under_the_same_id(self, near: Transport, far: Transport) -> None:
        line = far.subscribe("a", limit=2)
        await _acquainted(near, far)
        sent, waiting = await _sent_until_it_waits(near)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert sorted(await receive(line, sent), key=int) == [str(n).encode() for n in range(sent)]
        await near.publish("a", str(sent).encode(), message_id=str(sent))
        assert await receive(line, 1) == [str(sent).encode()]

    @transport_story
    async def test_who_does_not_read_holds_up_nobody_elses_messages(self, near: Transport, far: Transport) -> None:
        far.subscribe("full", limit=1)
        line = far.subscribe("a")
        await _acquainted(near, far)
        waiting = asyncio.ensure_future(_flood(near, "full"))
        await near.publish("a", b"1")
        assert await receive(line, 1) == [b"1"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    @transport_story
    async def test_who_stops_listening_holds_up_nobody(self, near: Transport, far: Transport) -> None:
        line = far.subscribe("a", limit=1)
        await _acquainted(near, far)
        await near.publish("a", b"x")
        assert await receive(line, 1) == [b"x"]
        listening = asyncio.ensure_future(until_last(line))
        await asyncio.sleep(0)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        for _ in range(5):
            await near.publish("a", b"y")

    @transport_story
    async def test_closing_ends_the_listeners_of_that_end_and_holds_up_nobody(
        self, near: Transport, far: Transport
    ) -> None:
        here, empty, full = near.subscribe("a"), far.subscribe("a"), far.subscribe("b", limit=1)
        await _acquainted(near, far)
        await near.publish("b", b"x")
        await far.close()
        await far.close()
        assert [delivery.body async for delivery in empty] == []
        assert len([delivery async for delivery in full]) <= 1
        for _ in range(3):
            await near.publish("b", b"y")
        await near.publish("a", b"z")
        assert await receive(here, 1) == [b"z"]


async def _flood(end: Transport, subject: str) -> None:
    for _ in range(MOST_AHEAD):
        await end.publish(subject, b"x")


async def _sent_until_it_waits(end: Transport) -> tuple[int, asyncio.Future[None]]:
    """Numbers, each under its own id. Answers how many went out, and the one that waits."""
    for n in range(MOST_AHEAD):
        sending = asyncio.ensure_future(end.publish("a", str(n).encode(), message_id=str(n)))
        done, _ = await asyncio.wait([sending], timeout=WAIT_S)
        if not done:
            return n, sending
    raise AssertionError("it never waited")


async def _acquainted(near: Transport, far: Transport) -> None:
    """Each end has heard the other, and so knows who listens there."""
    for speaker, listener in ((near, far), (far, near)):
        line = listener.subscribe("acquaintance")
        arrived = asyncio.ensure_future(anext(line))
        while not arrived.done():
            await speaker.publish("acquaintance", b"")
            await asyncio.wait([arrived], timeout=0.01)
