"""The harness of the conformance suites: opens a store and runs a test story against it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from reefknot.audit.port import AuditEntry
from reefknot.core.canonical import canonical
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store

P = ParamSpec("P")
S = TypeVar("S")
Story = Callable[[Store, VirtualClock], Awaitable[None]]
StoryMethod = Callable[Concatenate[S, Store, P], Awaitable[None]]

LONGEST_STORY = 20.0
"""The time limit of a story in real seconds: a story that hangs fails."""


class StoreFactory(Protocol):
    """Opens a fresh store in the time of this clock; `options` are `retention`, `largest_result`, `most_keys`."""

    def __call__(self, clock: VirtualClock, **options: Any) -> AbstractAsyncContextManager[Store]: ...


class Harness:
    """Runs test stories, each on a fresh store."""

    def __init__(self, factory: StoreFactory) -> None:
        self._factory = factory

    def opened(self, clock: VirtualClock, **options: Any) -> AbstractAsyncContextManager[Store]:
        """A second store for a test: over the same database, where the engine's harness has one."""
        return self._factory(clock, **options)

    def run(self, story: Story, **options: Any) -> None:
        """Run the story on a fresh store, within a bound of real time."""

        async def main() -> None:
            clock = VirtualClock()
            async with asyncio.timeout(LONGEST_STORY), self._factory(clock, **options) as store:
                await story(store, clock)

        asyncio.run(main())


def story(**options: Any) -> Callable[[StoryMethod[S, P]], Callable[[S, Harness], None]]:
    """
    A decorator that makes a story a test: pytest gives it a `harness`, which opens a store with these options.

    The story is given the store, and the clock if it has a parameter `clock`.
    """

    def decorate(method: StoryMethod[S, P]) -> Callable[[S, Harness], None]:
        run: Callable[..., Awaitable[None]] = method
        wants_clock = "clock" in signature(method).parameters

        @wraps(method)
        def test(self: S, harness: Harness) -> None:
            harness.run(lambda store, clock: run(self, store, *[clock][:wants_clock]), **options)

        vars(test).pop("__wrapped__")  # pytest asks for the fixtures of the test, not of the story
        return test

    return decorate


def event(name: str, **fields: Any) -> AuditEntry:
    """An event of this type, with a body that names it."""
    return AuditEntry(canonical({"event_type": name}), name, fields.pop("at", 0), **fields)


def required(found: S | None) -> S:
    """The record that must have been found."""
    assert found is not None
    return found


def wall_ms(clock: VirtualClock) -> int:
    """Wall time as stores count it, in whole milliseconds."""
    return round(clock.wall() * 1000)


async def event_types(store: Store) -> list[str]:
    """The types of all events in the log, in their order."""
    return [kept.entry.event_type for kept in await store.audit.read()]
