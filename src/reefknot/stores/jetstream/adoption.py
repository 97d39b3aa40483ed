"""
All work of a store on JetStream, read for a move to another store, and written as it came from one.

Neither goes through the table of this process, which would hold all of it. What is written is compared with nothing but
the absence of a record under its id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec import json, structs

from reefknot.core.time import Moment
from reefknot.queue.model.unique import holds_key
from reefknot.queue.model.work import ENDED, WorkItem
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.control import JetStreamValues
from reefknot.stores.jetstream.reads import gathered, stored_now
from reefknot.stores.jetstream.state import (
    INLINE_PAYLOAD,
    INLINE_RESULT,
    Message,
    Record,
    State,
    StoredItem,
    key_messages,
)
from reefknot.stores.port import MOVE, refusal_in

PAGE = 250
"""Items that are read, or written in one batch, at a time."""
PAGE_BYTES = 4 << 20
"""Payloads and results that are written in one batch, unless a single item has more."""
PLACES = 500
"""Records of one page of those from which the order is known."""
Place = tuple[int, int, str, int]
"""The place of an item in lists (its creation, its arrival among those of the same process, its id); its revision."""


class Adoption:
    """Reads and writes all work of a store."""

    def __init__(self, state: State, commits: Commits) -> None:
        self._state = state
        self._commits = commits
        self._given = 0
        """How many items of another store this process was given: the order of those of one moment."""

    async def refuse_moved(self) -> None:
        """Refuse work for a store that was moved while this client had it open."""
        found = await JetStreamValues(self._state, self._commits).get(MOVE)
        if (refusal := refusal_in(None if found is None else found.body)) is not None:
            raise refusal

    async def records(self) -> AsyncIterator[list[WorkItem]]:
        """All items in the order of their creation. Their places are read first, and are all in memory."""
        state, places = self._state, list[Place]()
        subjects = [state.names.all_work()]
        async for page in stored_now(state.connection, state.names.state, subjects, most=PLACES):
            for message in (one for one in page if one.body):
                stored = json.decode(message.body, type=StoredItem)
                places.append((stored.item.created_at, stored.order, stored.item.id, message.sequence))
        places.sort()
        for at in range(0, len(places), PAGE):
            found = await self._read(places[at : at + PAGE])
            yield [await state.whole(one.item, one.payload_parts, one.result_parts) for one in found]

    async def _read(self, places: Sequence[Place]) -> list[StoredItem]:
        found = await self._state.read_directly([work_id for _, _, work_id, _ in places])
        for index, (_, _, work_id, revision) in enumerate(places):
            if found[index][1] < revision:  # the answer of a server that is a moment behind
                found[index] = await self._state.read_work(work_id)
        return [stored for stored, _, _ in found if stored is not None]

    async def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]]) -> int:
        """Keep the items whose ids are not here. Their order is that of all calls, so all of them are repeated."""
        added = 0
        while items:
            number, size = 1, _size(items[0])
            while number < min(len(items), PAGE) and (size := size + _size(items[number])) <= PAGE_BYTES:
                number += 1
            added += await self._adopt_page(items[:number], notes)
            self._given += number
            items = items[number:]
        return added

    async def _adopt_page(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]]) -> int:
        ids = [item.id for item in items]
        found = await self._state.read_directly(ids)

        async def look() -> None:
            found[:] = await gathered(self._state.read_work, ids)

        def run(batch: Batch, now: Moment) -> int:
            new = [(order, item, one) for order, (item, one) in enumerate(zip(items, found, strict=True), self._given)]
            new = [(order, item, one) for order, item, one in new if one[0] is None]
            for order, item, one in new:
                for part, body in notes.get(item.id, {}).items():
                    batch.add(Message(self._state.names.blob(item.id, part, 0), body))
                for message in self._messages(item, order, one, now):
                    batch.add(message)
            return len(new)

        return await self._commits.change(run, prepare=look)

    def _messages(self, item: WorkItem, order: int, known: Record, now: Moment) -> list[Message]:
        """The messages of an item, its record the last. Ended work stays for what is left of its retention."""
        state, messages = self._state, list[Message]()
        payload_parts = state.add_blob(messages, item, "payload", item.payload, INLINE_PAYLOAD)
        result_parts = state.add_blob(messages, item, "result", (item.result or "").encode(), INLINE_RESULT)
        payload, result = b"" if payload_parts else item.payload, None if result_parts else item.result
        kept = structs.replace(item, payload=payload, result=result)
        body = json.encode(StoredItem(kept, order, payload_parts, result_parts))
        ttl = None
        if state.work_ttl is not None and item.state in ENDED:
            ttl = state.work_ttl - max(0, now.wall - item.updated_at) // 1000
        messages += key_messages(state.names, {}, item, None, now) if holds_key(item, now.wall) else ()
        messages.append(Message(state.names.work(item), body, known[1], state.names.any_work(item.id), ttl=ttl))
        return messages


def _size(item: WorkItem) -> int:
    return len(item.payload) + len(item.result or "")
