"""
The keys of unique work in a store on JetStream: who holds one, whichever process knows it.

Each job with a key has an entry `NAME.blob.KEY.unique.ID`, written in the batch that keeps it. That batch expects the
last sequence of all entries of the key, so of two processes that keep a job at once one is refused, and looks again. An
entry alone decides nothing: the job that it names is read from the stream's leader. When the job ends its entry gets
the time that is left to it, or becomes a tombstone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reefknot.core.time import Moment
from reefknot.queue.model.unique import unique_name
from reefknot.queue.model.work import WorkItem
from reefknot.stores.jetstream.reads import gathered
from reefknot.stores.jetstream.state import State

Look = Callable[[Callable[[Moment], None]], Awaitable[None]]
"""Calls a function while nothing in the state is unstored."""


class KeysOf:
    """The holders of the keys of some items, as they were last read."""

    def __init__(self, state: State, look: Look, items: Sequence[WorkItem]) -> None:
        self._state, self._look = state, look
        self._keys = list(dict.fromkeys(name for item in items if (name := unique_name(item))))
        self._revisions: dict[str, int] = {}

    async def read(self) -> None:
        """Read the entries of the keys, and the records of all items that may hold one."""
        names, known = self._state.names, self._state.table.keyed
        found = await gathered(lambda key: self._state.direct.matching(names.keyed(key, "*")), self._keys)
        self._revisions = {
            key: max((one.sequence for one in entries), default=0)
            for key, entries in zip(self._keys, found, strict=True)
        }
        named = [one.body.decode() for entries in found for one in entries if one.body]
        ids = list(dict.fromkeys([*named, *(one for key in self._keys for one in known(key))]))
        records = await gathered(self._state.read_if_readable, ids)
        await self._look(lambda _: self._state.take_records(ids, records))

    def take(self) -> None:
        """Let the change that is made now expect what was read."""
        self._state.key_revisions.update(self._revisions)
