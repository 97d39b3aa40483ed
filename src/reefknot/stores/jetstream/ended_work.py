"""
`EndedWork`: tasks that wait for the end of work, woken by its message, with one look a second for all of them.

The process that ends work sends a message without content on a subject of this work alone, which its waiters hear. It
may be lost, and may overtake the record on its way to a replica. So every second all awaited records are read at once,
and a waiter that was woken reads its own record again until it is there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from math import inf
from typing import Protocol, TypeVar

from reefknot.core.time import Moment
from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.work import WorkItem, WorkState, is_over
from reefknot.runtime.changes import until
from reefknot.runtime.log import error_text, logger
from reefknot.stores.jetstream.state import State
from reefknot.stores.wakeups import END_TOPIC, LOOK_S

R = TypeVar("R")
MOST_LOOKED = 1000
"""Most items that one look asks for; of more, those that were looked for longest ago."""
BEHIND_S = 0.01
"""The first pause before asking again a server that does not have an end yet."""
_IS_OPEN = (WorkState.PENDING, WorkState.RUNNING)


class _Look(Protocol):
    """Reads the state while nothing in it is unstored."""

    async def __call__(self, read: Callable[[Moment], R]) -> R: ...


class EndedWork:
    """The waiters of one process for the ends of work."""

    def __init__(self, state: State, look: _Look) -> None:
        self._state = state
        self._look = look
        self._awaited: Counter[str] = Counter()
        """By work id: how many tasks wait. Those that were looked for longest ago come first."""
        self._over: Collection[str] = ()
        """Those that the last look has found ended."""
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    async def wait(self, work_id: str, timeout: float) -> WorkItem | None:
        """The item as soon as it has ended, None after `timeout` seconds; a server that is away is waited for."""
        loop = asyncio.get_running_loop()
        deadline, connection = loop.time() + timeout, self._state.connection
        self._awaited[work_id] += 1
        try:
            while True:
                try:
                    return await self._heard(work_id, deadline - loop.time())
                except StoreUnavailableError:
                    if connection.failure is not None:
                        raise connection.failure from None
                    if connection.is_closed or loop.time() >= deadline:
                        raise
                    await connection.wait_until_up(deadline - loop.time())
        finally:
            self._awaited[work_id] -= 1
            if not self._awaited[work_id]:
                del self._awaited[work_id]

    async def _heard(self, work_id: str, timeout: float) -> WorkItem | None:
        connection, topic = self._state.connection, END_TOPIC + work_id
        subscription = await connection.listen(self._state.names.over(work_id), lambda _: self._state.wake(topic))
        try:
            return await self._watch(work_id, timeout)
        finally:
            if connection.is_up:
                await connection.unsubscribe([subscription])

    async def _watch(self, work_id: str, timeout: float) -> WorkItem | None:
        loop, state = asyncio.get_running_loop(), self._state
        deadline, behind = loop.time() + timeout, 0
        while True:
            with state.listening(END_TOPIC + work_id) as change:
                item = await self._read(work_id, is_first=not behind)
                if item is not None:
                    return item
                soon = BEHIND_S * 2 ** min(behind, 10) if behind else inf
                while not await until(change, min(soon, LOOK_S, deadline - loop.time())):
                    if loop.time() >= deadline:
                        return await self._read(work_id)
                    if soon < LOOK_S or work_id in await self._look_together():
                        break
                behind += 1  # its end was heard of: a server that does not have it yet is asked again

    async def _read(self, work_id: str, *, is_first: bool = False) -> WorkItem | None:
        """The item, if it has ended. At first, one that is mirrored as open is not asked for."""
        state = self._state
        known = await self._look(lambda _: state.table.get(work_id)) if is_first else None
        if known is not None and known.state in _IS_OPEN and state.is_mirrored(known):
            return None
        stored, _, _ = await state.read_work(work_id)
        if stored is None or not is_over(stored.item):
            return None
        return await state.whole(stored.item, stored.payload_parts, stored.result_parts)

    async def _look_together(self) -> Collection[str]:
        """The awaited items that have ended, asked for at most once a second: one task for all waiters."""
        loop = asyncio.get_running_loop()
        if self._looking is None and loop.time() - self._looked_at >= LOOK_S:
            self._looked_at = loop.time()
            self._looking = loop.create_task(self._look_for_ends(), name="ends of work")
        if self._looking is not None:
            await asyncio.wait([self._looking])  # if a step cancels it, a new one starts a second later
        return self._over

    async def _look_for_ends(self) -> None:
        """Find the awaited items that have ended without a message."""
        ids = list(self._awaited)[:MOST_LOOKED]
        for work_id in ids:
            self._awaited[work_id] = self._awaited.pop(work_id)  # to the end of the line: each has its turn
        try:
            found = await self._state.read_directly(ids)
            over = [one.item.id for one, _, _ in found if one is not None and is_over(one.item)]
            self._over = frozenset(over)
            self._state.wake(*(END_TOPIC + work_id for work_id in over))
        except StoreUnavailableError as error:
            logger().debug("the server was not asked for ended work (%s); asking again in a second", error_text(error))
        finally:
            self._looking = None
