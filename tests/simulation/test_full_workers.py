"""Workers on the model of a NATS server take from the shared subject what they have places for, in virtual time."""

import asyncio
from collections.abc import Callable
from random import Random

import msgspec
import pytest

from reefknot.queue.model.messages import ASSIGN
from tests.shared_subject import STORIES, CountingTransport, Story, on_server
from tests.simulation.broker import Broker


class FivePlaces:
    """A room that is the same whatever was read."""

    is_open = True

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None

    def free(self) -> int:
        return 5


async def test_what_waits_unread_takes_its_room() -> None:
    with Broker(Random(1)).clients() as broker:
        async with on_server("nats://model:4222") as subject:
            await subject.send(12)
            (consumer,) = broker.streams["reefknot_assign"].consumers.values()
            end = await subject.end()
            line = end.subscribe(ASSIGN, room=FivePlaces())
            names = []
            for n in range(12):
                delivery = await anext(line)
                names.append(msgspec.json.decode(delivery.body)["assignment_id"])
                assert delivery.done is not None
                await delivery.done()
                await asyncio.sleep(600)
                assert len(consumer.unacked) == min(5, 11 - n)
            assert names == [f"a{n}" for n in range(12)]


@pytest.mark.parametrize(("story", "kind"), STORIES)
async def test_a_full_worker_leaves_the_rest_in_the_stream(story: Story, kind: type[CountingTransport]) -> None:
    with Broker(Random(1)).clients():
        async with on_server("nats://model:4222", kind) as subject:
            await story(subject)
