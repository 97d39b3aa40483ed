"""
What lies between the parts: messages that come late, twice or never, and processes that die, freeze and come back.

Everything is drawn from one seeded source and happens in virtual time, so a run is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from reefknot.queue.port.transport import Delivery, Notice, Room
from reefknot.runtime.clocks import EPOCH
from reefknot.stores.port import Store


class Crashed(BaseException):
    """The process is gone: nothing it does reaches anybody any more. No code may catch it."""


@dataclass(frozen=True)
class Weather:
    """How bad it gets: chances for each message, and seconds."""

    lost: float = 0.02
    late: float = 0.05
    latest: float = 12.0
    twice: float = 0.05
    hops: float = 0.003
    """The most that one call to the store takes, before and after it."""


class Process:
    """What can die and freeze. Every call of its parts to the world outside goes through here."""

    def __init__(self, rng: Random, weather: Weather) -> None:
        self._rng = rng
        self._weather = weather
        self.dead = False
        self._thaw = asyncio.Event()
        self._thaw.set()

    def freeze(self) -> None:
        self._thaw.clear()

    def thaw(self) -> None:
        self._thaw.set()

    @property
    def frozen(self) -> bool:
        return not self._thaw.is_set()

    async def hop(self) -> None:
        """A moment in which it may die."""
        if self.dead:
            raise Crashed
        await asyncio.sleep(self._rng.random() * self._weather.hops)
        await self._thaw.wait()
        if self.dead:
            raise Crashed

    async def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        await self.hop()
        answer = await function(*given, **named)
        await self.hop()
        return answer


class Through:
    """A part of a store, as one process sees it."""

    def __init__(self, part: Any, process: Process) -> None:
        self._part = part
        self._process = process

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def gated(*given: Any, **named: Any) -> Any:
            return await self._process.call(found, *given, **named)

        return gated


class StoreThrough:
    """A store, as one process sees it: every call of its parts, and of no transport, is a call to the world outside."""

    parts: tuple[str, ...] = ("idempotency", "audit", "work", "quarantine", "control", "values")

    def __init__(self, store: Store, process: Process) -> None:
        self._store = store
        self._process = process
        for name in self.parts:
            setattr(self, name, Through(getattr(store, name), process))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def durable(self) -> bool:
        return True

    async def close(self) -> None: ...


class Sea:
    """The network between all processes."""

    def __init__(self, rng: Random, weather: Weather) -> None:
        self._rng = rng
        self.weather = weather
        self._lines: dict[str, list[tuple[frozenset[str], asyncio.Queue[Delivery], Process]]] = {}
        """By subject: who listens to it."""
        self.heard: list[tuple[str, bytes]] = []
        self.calm = False
        self.on_send: Callable[[str, bytes], None] = lambda subject, body: None

    def port(self, process: Process) -> Port:
        return Port(self, process)

    def send(self, delivery: Delivery) -> None:
        self.heard.append((delivery.subject, delivery.body))
        self.on_send(delivery.subject, delivery.body)
        for line in self._lines.get(delivery.subject, ()):
            if not line[2].dead:
                for delay in self._fate():
                    asyncio.get_running_loop().call_later(delay, self._arrive, line, delivery)

    def _fate(self) -> list[float]:
        rng, weather = self._rng, self.weather
        delay = rng.random() * 0.01
        if self.calm:
            return [delay]
        number = rng.random()
        if number < weather.lost:
            return []
        if number < weather.lost + weather.late:
            delay = rng.random() * weather.latest
        if rng.random() < weather.twice:
            return [delay, rng.random() * weather.latest]
        return [delay]

    def _arrive(self, line: tuple[frozenset[str], asyncio.Queue[Delivery], Process], delivery: Delivery) -> None:
        if not line[2].dead:
            line[1].put_nowait(delivery)

    async def _read(self, line: tuple[frozenset[str], asyncio.Queue[Delivery], Process]) -> AsyncIterator[Delivery]:
        while True:
            delivery = await line[1].get()
            await line[2].hop()
            yield delivery

    def listen(self, subjects: tuple[str, ...], process: Process) -> AsyncIterator[Delivery]:
        line = (frozenset(subjects), asyncio.Queue[Delivery](), process)
        for subject in line[0]:
            self._lines.setdefault(subject, []).append(line)
        return self._read(line)


class Port:
    """A transport, as one process sees it."""

    def __init__(self, sea: Sea, process: Process) -> None:
        self._sea = sea
        self._process = process

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = "", to: str = ""
    ) -> None:
        await self._process.hop()
        self._sea.send(Delivery(subject, body, headers or {}))

    def notice(self, subject: str, body: bytes, *, message_id: str, to: str) -> Notice | None:
        return None

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        return self._sea.listen(subjects, self._process)

    async def ready(self) -> None: ...

    async def close(self) -> None: ...


class JumpingClock:
    """The loop's time, with a wall clock that somebody sets."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH + self.now() + self.offset

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing blocks here")

    async def asleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
