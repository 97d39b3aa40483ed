"""The harness of the conformance suites: opens a store and runs a test story against it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from reefknot.core.canonical import canonical
from reefknot.engines.clocks import VirtualClock
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.store import Store

Story = Callable[[Store, VirtualClock], Awaitable[None]]

LONGEST_STORY = 20.0
"""The time limit of a story in real seconds: a story that hangs fails."""


class StoreFactory(Protocol):
    """Opens a fresh store in the time of this clock; `options` are `retention`, `largest_result`, `most_keys`."""

    def __call__(self, clock: VirtualClock, **options: Any) -> AbstractAsyncContextManager[Store]: ...


class Harness:
    """Runs test stories, each on a fresh store."""

    def __init__(self, factory: StoreFactory) -> None:
        self._factory = factory

    def run(self, story: Story, **options: Any) -> None:
        """Run the story on a fresh store, within a bound of real time."""

        async def main() -> None:
            clock = VirtualClock()
            async with asyncio.timeout(LONGEST_STORY), self._factory(clock, **options) as store:
                await story(store, clock)

        asyncio.run(main())


def event(name: str, **fields: Any) -> AuditEntry:
    """An event of this type, with a body that names it."""
    return AuditEntry(canonical({"event_type": name}), name, fields.pop("at", 0), **fields)


async def event_types(store: Store) -> list[str]:
    """The types of all events in the log, in their order."""
    return [kept.entry.event_type for kept in await store.audit.read()]
