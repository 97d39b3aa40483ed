"""
Workers that hear the shared subject on one server, whose steps wait for `go`, and a peer that hears all they answer.

`tests/integration` tells these stories on a real server, `tests/simulation` on the model of one in virtual time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from reefknot.queue.model.admission import RejectionPolicy, Rules
from reefknot.queue.model.messages import (
    ACK,
    ASSIGN,
    RESULT,
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    StepResult,
    assign_subject,
    encode,
)
from reefknot.queue.port.transport import Delivery, Room
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import LoopClock
from reefknot.stores.jetstream.assignments import CONSUMER, EXPIRES_S
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.transport import JetStreamTransport
from reefknot.stores.memory import MemoryStore
from tests.workshop import OK, Step, work

PLACES = 5
BURST = 50


class CountingTransport(JetStreamTransport):
    """A transport that counts what it pulls from the shared subject."""

    pulled = 0

    async def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        async for delivery in super().subscribe(*subjects, limit=limit, room=room):
            self.pulled += delivery.subject == ASSIGN
            yield delivery


class FixedLimitTransport(CountingTransport):
    """The control: a transport that looks at no room, and whose messages cannot be given back."""

    async def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        async for delivery in super().subscribe(*subjects, limit=limit):
            yield msgspec.structs.replace(delivery, back=None)


class SharedSubject:
    """One store's shared subject, its workers and their answers."""

    def __init__(self, url: str, stack: AsyncExitStack, kind: type[CountingTransport]) -> None:
        self.go = asyncio.Event()
        self.acks: list[ExecAssignmentAck] = []
        self.results: list[ExecResult] = []
        self.began: list[tuple[str, str]] = []
        """The worker and the assignment of each attempt."""
        self.ends: dict[str, CountingTransport] = {}
        """The transport of each worker."""
        self._url = url
        self._stack = stack
        self._kind = kind

    async def open(self) -> None:
        self._peer = await self.end()
        await self._peer.ensure_stream()
        hearing = asyncio.create_task(self._hear(self._peer.subscribe(ACK, RESULT, limit=100_000)))
        self._stack.callback(hearing.cancel)
        await self._peer.ready()

    async def end(self, kind: type[CountingTransport] = CountingTransport) -> CountingTransport:
        connection = Connection(options_from_url(self._url, patience=30.0, subject_prefix=""))
        await connection.open()
        self._stack.push_async_callback(connection.close)
        self._connection = connection
        end = kind(connection, shared_stream=True)
        self._stack.push_async_callback(end.close)
        return end

    async def _hear(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            if delivery.subject == ACK:
                self.acks.append(msgspec.json.decode(delivery.body, type=ExecAssignmentAck))
            else:
                self.results.append(msgspec.json.decode(delivery.body, type=ExecResult))

    async def worker(self, name: str, *, policy: str = "reject_new", **changes: Any) -> Worker:
        """A worker that has `PLACES` places and one slot in each class."""
        began, go = self.began, self.go

        class Waiting(Step):
            async def run(self, inputs: Any, context: Any) -> StepResult:
                began.append((name, context.assignment_id))
                await go.wait()
                return OK

        changes = {"concurrency": {"cpu": 1}, "rules": Rules(size=PLACES, policy=RejectionPolicy(policy)), **changes}
        loop: Any = asyncio.get_running_loop()
        clock = LoopClock(loop)
        end = self.ends[name] = await self.end(self._kind)
        parts: dict[str, Any] = {"store": MemoryStore(clock), "transport": end, "clock": clock}
        blocks: Any = {"test.step": Waiting()}
        worker = Worker(name, settings=default_settings(**changes), blocks=blocks, shared_subject=True, **parts)
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        return worker

    async def send(self, number: int, *, first: int = 0, to: str | None = None, resource_class: str = "cpu") -> None:
        """Send assignments, over the shared subject or to one worker."""
        subject = ASSIGN if to is None else assign_subject(to)
        for n in range(first, first + number):
            one: ExecAssignment = msgspec.structs.replace(work(f"a{n}"), resource_class=resource_class)
            await self._peer.publish(subject, encode(one))

    async def left(self) -> int:
        """The number of assignments in the stream."""
        answer = await self._connection.api(f"STREAM.INFO.{self._stream}")
        return int(msgspec.json.decode(answer)["state"]["messages"])

    async def until_requests(self, number: int) -> None:
        """Wait until this number of requests for assignments is at the server."""
        async with asyncio.timeout(EXPIRES_S / 2):  # before any ends by itself
            while await self._requests() != number:  # noqa: ASYNC110 - it is asked of a server
                await asyncio.sleep(0.02)

    async def _requests(self) -> int:
        answer = await self._connection.api(f"CONSUMER.INFO.{self._stream}.{CONSUMER}")
        return int(msgspec.json.decode(answer)["num_waiting"])

    @property
    def _stream(self) -> str:
        return f"{self._connection.options.name}_assign"

    async def until_left(self, number: int) -> None:
        while await self.left() != number:  # noqa: ASYNC110 - it is asked of a server
            await asyncio.sleep(0.02)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110 - a message tells it
            await asyncio.sleep(0.02)

    async def finish(self, number: int) -> None:
        """Let all steps end; each assignment was accepted once, ran once and succeeded."""
        self.go.set()
        await self.until(lambda: len(self.results) >= number)
        await self.until_left(0)
        assert {one.status.value for one in self.results} == {"success"}
        assert Counter(one.assignment_id for one in self.results) == Counter(f"a{n}" for n in range(number))
        assert sorted(one.assignment_id for one in self.acks) == sorted(f"a{n}" for n in range(number))
        assert sorted(name for _, name in self.began) == sorted(f"a{n}" for n in range(number))
        assert self.refused() == []

    def refused(self) -> list[ExecAssignmentAck]:
        return [one for one in self.acks if one.status is not AckStatus.ACCEPTED]


@asynccontextmanager
async def on_server(url: str, kind: type[CountingTransport] = CountingTransport) -> AsyncIterator[SharedSubject]:
    async with AsyncExitStack() as stack:
        subject = SharedSubject(url, stack, kind)
        await subject.open()
        yield subject


# ---- stories ---------------------------------------------------------------------------------------------------------


async def a_burst_is_shared(subject: SharedSubject) -> None:
    """One worker takes as many as it has a slot and places for; a second one gets its share of the rest."""
    await subject.send(BURST)
    await subject.worker("w1")
    await subject.until_left(BURST - PLACES - 1)
    await subject.worker("w2")
    await subject.until_left(BURST - 2 * (PLACES + 1))
    assert Counter(one.worker_id for one in subject.acks) == {"w1": PLACES + 1, "w2": PLACES + 1}
    await subject.finish(BURST)
    assert sum(end.pulled for end in subject.ends.values()) == BURST, "nothing was given back"
    assert max(one.queue_depth for one in subject.acks if isinstance(one.queue_depth, int)) == PLACES


async def a_burst_is_refused(subject: SharedSubject) -> None:
    """The control of the burst: what has no place is pulled and refused."""
    await subject.send(BURST)
    await subject.worker("w1")
    await subject.until(lambda: len(subject.acks) == BURST)
    await subject.until_left(0)
    assert [one.reason for one in subject.refused()] == ["queue_full"] * (BURST - PLACES - 1)


async def a_full_class_holds_up_no_other(subject: SharedSubject) -> None:
    """What the head of the stream holds for a full class is given back, until there is room."""
    await subject.send(20, resource_class="io")
    await subject.send(3, first=20)
    await subject.worker("w1", concurrency={"cpu": 3, "io": 1})
    await subject.until(lambda: {"a20", "a21", "a22"} <= {name for _, name in subject.began})
    assert subject.refused() == []
    await subject.finish(23)


async def a_worker_that_its_own_subject_fills_refuses_nothing(subject: SharedSubject) -> None:
    """Its request for places that others took since is at the server."""
    await subject.worker("w1")
    await subject.until_requests(1)
    await subject.ends["w1"].ready()
    await subject.send(1, to="w1")
    await subject.until(lambda: len(subject.began) == 1)
    await subject.send(PLACES, first=1, to="w1")
    await subject.until(lambda: len(subject.acks) == PLACES + 1)
    await subject.send(10, first=PLACES + 1)
    assert subject.refused() == []
    await subject.finish(PLACES + 11)


async def a_paused_worker_takes_nothing(subject: SharedSubject) -> None:
    """What is sent during the pause goes to another worker at once, or stays in the stream until the pause ends."""
    worker = await subject.worker("w1")
    await subject.send(1)
    await subject.until(lambda: len(subject.began) == 1)
    await subject.until_requests(1)
    worker.pause()
    await subject.until_requests(0)
    await subject.worker("w2")
    await subject.send(PLACES + 6, first=1)
    await subject.until_left(5)
    await subject.until(lambda: len(subject.acks) == PLACES + 2)
    assert Counter(one.worker_id for one in subject.acks) == {"w1": 1, "w2": PLACES + 1}
    assert subject.ends["w1"].pulled == 1
    worker.resume()
    await subject.until_left(0)
    assert Counter(one.worker_id for one in subject.acks) == {"w1": 6, "w2": PLACES + 1}
    await subject.finish(PLACES + 7)


async def drop_oldest_still_drops(subject: SharedSubject) -> None:
    await subject.send(BURST)
    await subject.worker("w1", policy="drop_oldest")
    await subject.until_left(0)
    await subject.until(lambda: len(subject.refused()) == BURST - PLACES - 1)
    assert {one.reason for one in subject.refused()} == {"dropped_oldest"}


Story = Callable[[SharedSubject], Awaitable[None]]
STORIES = [
    pytest.param(story, kind, id=story.__name__)
    for story, kind in (
        (a_burst_is_shared, CountingTransport),
        (a_burst_is_refused, FixedLimitTransport),
        (a_full_class_holds_up_no_other, CountingTransport),
        (a_worker_that_its_own_subject_fills_refuses_nothing, CountingTransport),
        (a_paused_worker_takes_nothing, CountingTransport),
        (drop_oldest_still_drops, CountingTransport),
    )
]
