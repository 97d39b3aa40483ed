"""Two ends of a transport, over stores that are opened for them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance import Harness, TransportHarness
from reefknot.testing.conformance.transport import Ends


def harness_of(make: Callable[..., Awaitable[Store]]) -> Harness:
    """The harness of an engine whose stores are made with a clock and options."""

    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[Store]:
        store = await make(clock, **options)
        try:
            yield store
        finally:
            await store.close()

    return Harness(opened)


def two_ends(make: Callable[[VirtualClock], Awaitable[Store]], number: int = 1) -> TransportHarness:
    """The first and the last of so many stores: two know no more of each other than two processes do."""

    @asynccontextmanager
    async def opened(clock: VirtualClock) -> AsyncIterator[Ends]:
        stores: Sequence[Any] = [await make(clock) for _ in range(number)]
        near, far = stores[0].transport(), stores[-1].transport()
        try:
            yield near, far
        finally:
            for part in (near, far, *stores):
                await part.close()

    return TransportHarness(opened)
