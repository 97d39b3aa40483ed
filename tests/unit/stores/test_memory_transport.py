"""Messages inside one process, beyond the contract of a transport: ids are forgotten, and closing ends every line."""

from reefknot.stores.memory.store import REMEMBERED_IDS, MemoryTransport


async def test_ids_are_remembered_for_a_while_and_not_for_ever() -> None:
    transport = MemoryTransport()
    for number in range(REMEMBERED_IDS + 1):
        await transport.publish("a", b"", message_id=str(number))
    line = transport.subscribe("a")
    await transport.publish("a", b"first again", message_id="0")
    await transport.publish("a", b"last again", message_id=str(REMEMBERED_IDS))
    await transport.publish("a", b"end")
    assert [(await anext(line)).body for _ in range(2)] == [b"first again", b"end"]


async def test_closing_ends_every_listener_after_what_it_has_not_read_even_on_a_full_line() -> None:
    transport = MemoryTransport()
    empty, full = transport.subscribe("a"), transport.subscribe("b", limit=1)
    await transport.publish("b", b"x")
    await transport.close()
    await transport.close()
    assert [delivery.body for line in (empty, full) async for delivery in line] == [b"x"]
