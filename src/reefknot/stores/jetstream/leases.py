"""Leases of work in a store on JetStream: changed by commits, or from any thread over a connection of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import json, structs

from reefknot.core.time import Moment, milliseconds
from reefknot.queue.model import work as core
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Held
from reefknot.stores.jetstream.commits import run_apart
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.reads import last_message
from reefknot.stores.jetstream.state import Message, State, StoredItem
from reefknot.stores.jetstream.work import JetStreamWorkQueue
from reefknot.stores.work_in_memory.queue import TableLeases

_Change = Callable[[WorkItem, Moment], WorkItem]


class JetStreamLeases(TableLeases):
    """The leases of all work in a store on JetStream."""

    def __init__(self, work: JetStreamWorkQueue) -> None:
        super().__init__(work)
        self._state = work.state
        self._ours = work

    async def owners(self, *, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        if classes:
            await self._ours.follow(classes)
            return await super().owners(silent_for=silent_for, classes=classes)
        table = await self._ours.open_work()
        return await self._ours.look(lambda now: table.owners(now=now, silent_for=silent_for))

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        lease_ms = milliseconds(lease)

        def longer(item: WorkItem, now: Moment) -> WorkItem:
            return structs.replace(item, lease_until=now.steady + lease_ms, lease_ms=lease_ms)

        self._rewrite(held, longer)
        self._work.table.extend(held, now=self._state.now(), lease=lease)  # the mirror gets the change a moment later

    def give_back(self, held: Sequence[Held]) -> None:
        self._rewrite(held, lambda item, now: core.settle(item, core.Interrupted(), now))

    def _rewrite(self, held: Sequence[Held], change: _Change) -> None:
        """Change open items, from any thread."""

        async def all_of_them(connection: Connection) -> None:
            for one in held:
                await _rewrite_one(connection, self._state, one, change)

        run_apart(self._state.connection.options, all_of_them)


async def _rewrite_one(connection: Connection, state: State, held: Held, change: _Change) -> None:
    names = state.names
    message = await last_message(connection, names.state, names.any_work(held.id))
    if message is None or not message.body:
        return
    stored = json.decode(message.body, type=StoredItem)
    if not core.holds(stored.item, owner=held.owner, fence=held.fence):
        return
    body = json.encode(structs.replace(stored, item=change(stored.item, state.now())))
    changed = Message(message.subject, body, message.sequence, names.any_work(held.id))
    answer = await connection.request(changed.subject, changed.body, headers=changed.headers())
    connection.check(answer.data)
