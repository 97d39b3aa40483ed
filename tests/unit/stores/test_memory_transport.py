"""Messages inside one process: to everybody who listens, in order, once for one id, and never without a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from reefknot.queue.port.transport import Delivery
from reefknot.stores.memory.store import REMEMBERED_IDS, MemoryTransport


async def heard(line: AsyncIterator[Delivery], most: int) -> list[bytes]:
    found: list[bytes] = []
    try:
        async with asyncio.timeout(1):
            async for delivery in line:
                found.append(delivery.body)
                if len(found) == most:
                    break
    except TimeoutError:
        pass
    return found


async def test_everybody_who_listens_to_a_subject_gets_it_in_order() -> None:
    transport = MemoryTransport()
    one, both = transport.subscribe("a"), transport.subscribe("a", "b")
    await transport.publish("a", b"1", headers={"k": "v"})
    await transport.publish("b", b"2")
    await transport.publish("nobody", b"3")
    assert await heard(one, 9) == [b"1"]
    assert await heard(both, 9) == [b"1", b"2"]


async def test_what_was_sent_before_one_listens_is_not_heard() -> None:
    transport = MemoryTransport()
    await transport.publish("a", b"early")
    line = transport.subscribe("a")
    await transport.publish("a", b"late")
    assert await heard(line, 9) == [b"late"]


async def test_one_message_id_is_delivered_once_for_each_subject_and_no_id_every_time() -> None:
    transport = MemoryTransport()
    line = transport.subscribe("a", "b")
    for subject, name in (("a", "x"), ("a", "x"), ("b", "x"), ("a", ""), ("a", "")):
        await transport.publish(subject, f"{subject}{name}".encode(), message_id=name)
    assert await heard(line, 9) == [b"ax", b"bx", b"a", b"a"]


async def test_ids_are_remembered_for_a_while_and_not_for_ever() -> None:
    transport = MemoryTransport()
    for number in range(REMEMBERED_IDS + 1):
        await transport.publish("a", b"", message_id=str(number))
    line = transport.subscribe("a")
    await transport.publish("a", b"first again", message_id="0")
    await transport.publish("a", b"last again", message_id=str(REMEMBERED_IDS))
    assert await heard(line, 9) == [b"first again"]


async def test_a_sender_waits_while_a_line_is_full() -> None:
    transport = MemoryTransport()
    line = transport.subscribe("a", limit=2)
    for _ in range(2):
        await transport.publish("a", b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await transport.publish("a", b"y")
    assert await heard(line, 2) == [b"x", b"x"]


async def test_who_stops_listening_holds_nobody_up() -> None:
    transport = MemoryTransport()
    line = transport.subscribe("a", limit=1)

    async def listen() -> None:
        async for _ in line:
            await asyncio.sleep(0)

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(10):
        await transport.publish("a", b"x")


async def test_closing_ends_every_listener_even_on_a_full_line() -> None:
    transport = MemoryTransport()
    empty, full = transport.subscribe("a"), transport.subscribe("b", limit=1)
    await transport.publish("b", b"x")
    await transport.close()
    await transport.close()
    assert await heard(empty, 9) == []
    assert await heard(full, 9) == []


async def test_a_message_that_was_given_up_on_may_be_sent_again_under_its_id() -> None:
    transport = MemoryTransport()
    line = transport.subscribe("a", limit=1)
    await transport.publish("a", b"1", message_id="one")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await transport.publish("a", b"2", message_id="two")
    assert await heard(line, 1) == [b"1"]
    line = transport.subscribe("a", limit=1)
    await transport.publish("a", b"2", message_id="two")
    assert await heard(line, 1) == [b"2"]
