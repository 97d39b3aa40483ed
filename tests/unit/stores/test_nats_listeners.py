"""Back-pressure between ends on NATS, decided in virtual time over a connection that delivers to itself."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import json

from reefknot.stores.jetstream.connection import Connection, NatsOptions
from reefknot.stores.jetstream.listeners import Announcement, Line, Listeners

SUBJECT = "reefknot.listeners"


class FakeConnection:
    """Delivers at once what is published to a handler that is here."""

    options = NatsOptions(("nats://nowhere",))

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], None]] = {}
        self.sent: list[tuple[str, bytes]] = []

    async def listen(self, subject: str, handler: Callable[[Any], None]) -> None:
        self.handlers[subject] = handler

    async def publish(self, subject: str, body: bytes) -> None:
        self.sent.append((subject, body))
        if subject in self.handlers:
            self.handlers[subject](SimpleNamespace(data=body))


async def opened() -> tuple[FakeConnection, Listeners]:
    connection = FakeConnection()
    listeners = Listeners(cast(Connection, connection), "me", list, asyncio.ensure_future)
    await listeners.open()
    return connection, listeners


async def announce(connection: FakeConnection, *, limit: int, unread: int = 0) -> None:
    """A listener of `a` at another end says that it is there."""
    await connection.publish(SUBJECT, json.encode(Announcement("other", [Line("1.0", ["a"], limit, unread)])))


async def answer(connection: FakeConnection, mark: str) -> None:
    """The reader of that listener has come to this mark."""
    await connection.publish("reefknot.read.me", json.encode(("other", "1.0", int(mark.partition("/")[2]))))


async def sent_until_it_waits(listeners: Listeners) -> tuple[list[str], asyncio.Future[str]]:
    marks: list[str] = []
    while True:
        sending = asyncio.ensure_future(listeners.wait_for_room("a"))
        await asyncio.wait([sending], timeout=0.01)
        if not sending.done():
            return marks, sending
        marks.append(sending.result())


async def test_a_message_of_each_quarter_is_marked_and_a_whole_limit_ahead_waits_for_one_answer() -> None:
    connection, listeners = await opened()
    await announce(connection, limit=8)
    marks, waiting = await sent_until_it_waits(listeners)
    assert [bool(mark) for mark in marks] == [False, True] * 4
    await answer(connection, marks[1])
    await waiting
    more, waiting = await sent_until_it_waits(listeners)
    assert len(more) == 1  # an answer makes room for a quarter
    waiting.cancel()


async def test_where_nobody_listens_nobody_waits() -> None:
    connection, listeners = await opened()
    await announce(connection, limit=1)
    assert listeners.has("a")
    assert not listeners.has("b")
    assert [await listeners.wait_for_room("b") for _ in range(5)] == [""] * 5


async def test_a_listener_is_forgotten_after_three_silent_seconds_and_not_before() -> None:
    connection, listeners = await opened()
    loop = asyncio.get_running_loop()
    await announce(connection, limit=1)
    _, waiting = await sent_until_it_waits(listeners)
    for _ in range(5):
        await asyncio.sleep(1.0)
        await announce(connection, limit=1, unread=1)
    assert not waiting.done()
    heard_at = loop.time()
    await waiting
    assert 3.0 <= loop.time() - heard_at <= 4.1


async def test_a_listener_that_says_goodbye_is_waited_for_no_longer() -> None:
    connection, listeners = await opened()
    loop = asyncio.get_running_loop()
    await announce(connection, limit=1)
    _, waiting = await sent_until_it_waits(listeners)
    said_at = loop.time()
    await connection.publish(SUBJECT, json.encode(Announcement("other", [])))
    await waiting
    assert loop.time() == said_at


@pytest.mark.parametrize(("seconds", "is_free"), [(1.5, True), (0.5, False)], ids=["arrived or lost", "on its way"])
async def test_a_listeners_own_count_is_believed_when_all_has_arrived(seconds: float, is_free: bool) -> None:
    """What was lost on the way is not waited for; what is still on its way is."""
    connection, listeners = await opened()
    await announce(connection, limit=4)
    _, waiting = await sent_until_it_waits(listeners)
    await asyncio.sleep(seconds)
    await announce(connection, limit=4, unread=0)
    await asyncio.wait([waiting], timeout=0.01)
    assert waiting.done() is is_free
    waiting.cancel()


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'["other","1.0"]', b"\xff", b'["nobody","9.9",1]'])
async def test_messages_of_others_on_these_subjects_change_nothing(body: bytes) -> None:
    connection, listeners = await opened()
    await announce(connection, limit=2)
    for subject in (SUBJECT, "reefknot.read.me"):
        await connection.publish(subject, body)
    marks, waiting = await sent_until_it_waits(listeners)
    assert len(marks) == 2
    waiting.cancel()


@pytest.mark.parametrize("mark", ["", "x", "a.b/1", "*/1", "me/x", "me/"])
async def test_a_mark_that_is_none_of_ours_is_not_answered(mark: str) -> None:
    connection, listeners = await opened()
    connection.sent.clear()
    await listeners.answer(mark, "1.0")
    assert connection.sent == []
