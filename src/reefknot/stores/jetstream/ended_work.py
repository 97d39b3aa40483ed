"""
`EndedWork`: tasks that wait for the end of work, woken by its tombstone, with one check a second for all of them.

A tombstone on the subject of an open record says that it has ended, or moved. It names no work id, and may be of a
record that was never mirrored here: so waiters are found by the last token of its subject. The server that answers a
read may be behind the one that sent the tombstone (each replica applies in its own time, and a deposed leader answers a
little longer): so a record that is no newer than its tombstone is read again. Anything that is still missed is found
within a second.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from reefknot.core.time import Moment
from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.work import WorkItem, WorkState, is_over
from reefknot.runtime.log import error_text, logger
from reefknot.stores.jetstream.reads import LATEST, scan
from reefknot.stores.jetstream.state import State
from reefknot.stores.jetstream.streams import OPEN, token_of
from reefknot.stores.wakeups import END_TOPIC, LOOK_S

R = TypeVar("R")
AT_ONCE = 100
"""Number of items that are asked for at once."""
MOST_LOOKED = 1000
"""Most items that one check asks for; of more, those that were checked longest ago."""
BEHIND_S = 0.01
"""The first pause before asking again a server that does not have the tombstone yet."""
_IS_OPEN = (WorkState.PENDING, WorkState.RUNNING)


class _Look(Protocol):
    """Reads the mirror while nothing in it is unstored."""

    async def __call__(self, read: Callable[[Moment], R]) -> R: ...


class EndedWork:
    """The waiters of one process for the ends of work."""

    def __init__(self, state: State, look: _Look) -> None:
        self._state = state
        self._look = look
        self._awaited: Counter[str] = Counter()
        """By work id: how many tasks wait. Those that were checked longest ago come first."""
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    async def wait(self, work_id: str, timeout: float) -> WorkItem | None:
        """The item as soon as it has ended, None after `timeout` seconds; a server that is away is waited for."""
        loop = asyncio.get_running_loop()
        deadline, token, connection = loop.time() + timeout, token_of(work_id), self._state.connection
        self._awaited[work_id] += 1
        self._state.awaited.setdefault(token, 0)
        try:
            while True:
                try:
                    return await self._watch(work_id, deadline - loop.time())
                except StoreUnavailableError:
                    if connection.is_closed or loop.time() >= deadline:
                        raise
                    await connection.wait_until_up(deadline - loop.time())
        finally:
            self._awaited[work_id] -= 1
            if not self._awaited[work_id]:
                del self._awaited[work_id]
                self._state.awaited.pop(token, None)

    async def _watch(self, work_id: str, timeout: float) -> WorkItem | None:
        state, token = self._state, token_of(work_id)
        began, behind = asyncio.get_running_loop().time(), 0

        async def over() -> WorkItem | None:
            nonlocal behind
            await self._look_together(began)
            item = await self._look(lambda _: state.table.get(work_id))
            if item is not None and item.state in _IS_OPEN:
                return None
            stored, revision, _ = await state.read_work(work_id)
            behind = behind + 1 if revision <= state.awaited.get(token, 0) else 0
            if behind or stored is None or not is_over(stored.item):
                return None
            return await state.whole(stored.item, stored.payload_parts, stored.result_parts)

        def pause(item: WorkItem | None) -> float:
            if item is not None:
                return 0.0
            return min(LOOK_S, BEHIND_S * 2 ** min(behind, 10)) if behind else LOOK_S

        return await state.watch(over, END_TOPIC + work_id, END_TOPIC + token, pause=pause, timeout=timeout)

    async def _look_together(self, began: float) -> None:
        """Ask the server for the ends of all awaited work: one task for all waiters, at most once a second."""
        loop = asyncio.get_running_loop()
        if loop.time() - began < LOOK_S:
            return
        if self._looking is None and loop.time() - self._looked_at >= LOOK_S:
            self._looked_at = loop.time()
            self._looking = loop.create_task(self._look_for_ends(), name="ends of work")
        if self._looking is not None:
            await asyncio.wait([self._looking])  # if a step cancels it, a new one starts a second later

    async def _look_for_ends(self) -> None:
        """Load awaited items that have ended without the mirror noticing."""
        try:
            ids = list(self._awaited)[:MOST_LOOKED]
            for work_id in ids:
                self._awaited[work_id] = self._awaited.pop(work_id)  # to the end of the line: each has its turn
            if len(ids) > AT_ONCE:
                pages = [ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE)]
                ids = [one for page in pages for one in await self._ended_among(page)]
            found = await gathered(self._state.read_work, ids)

            def take(now: Moment) -> None:
                for stored, revision, subject in found:
                    if stored is None or stored.item.state in _IS_OPEN:
                        continue
                    if revision > self._state.revisions.get(stored.item.id, 0):
                        self._state.load(stored, revision, subject)

            await self._look(take)
        except StoreUnavailableError as error:
            logger().debug("the server was not asked for ended work (%s); asking again in a second", error_text(error))
        finally:
            self._looking = None

    async def _ended_among(self, ids: Sequence[str]) -> list[str]:
        """The items among these whose records are no longer open: one request, answered without bodies."""
        names = self._state.names
        start = {**LATEST, "headers_only": True}
        found = await scan(self._state.connection, names.state, [names.any_work(one) for one in ids], start=start)
        is_open = f"{names.name}.work.{OPEN}."
        ended = {one.subject.rpartition(".")[2] for one in found if not one.subject.startswith(is_open)}
        return [one for one in ids if token_of(one) in ended]


async def gathered(read: Callable[[str], Awaitable[R]], wanted: Sequence[str]) -> list[R]:
    """The answers for each of these, a few of them asked for at a time."""
    found: list[R] = []
    for at in range(0, len(wanted), AT_ONCE):
        found += await asyncio.gather(*(read(one) for one in wanted[at : at + AT_ONCE]))
    return found
