"""Work, leases and quarantine of a store on JetStream: the mirror's table, its changes stored by commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from msgspec import json, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment, milliseconds
from reefknot.queue.model import work as core
from reefknot.queue.model.edited_work import next_record
from reefknot.queue.model.failure_groups import FailureGroups
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.queue.port.work_queue import (
    ALL,
    EVERYTHING,
    Held,
    QuarantineFilter,
    QuarantineStats,
    WorkClaim,
    WorkFilter,
    WorkSnapshot,
    refuse_classes_with_gone,
)
from reefknot.stores.jetstream.commits import Commits, run_apart
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.ended_work import EndedWork, gathered
from reefknot.stores.jetstream.reads import StreamMessage, count, last_message, newest, scan, scan_each
from reefknot.stores.jetstream.state import Message, State, StoredItem
from reefknot.stores.jetstream.streams import StreamInfo, token_of
from reefknot.stores.work_in_memory.queue import TableLeases, TableQuarantine, TableWorkQueue
from reefknot.stores.work_in_memory.transitions import matches

R = TypeVar("R")
_Change = Callable[[WorkItem, Moment], WorkItem]
MOST_SWEPT = 10_000
PAGE = 100
"""Items that an operator's action changes in one batch."""
SKEW_MS = 2_000
"""Largest difference between the time of a record and the server's."""
_OPEN = (WorkState.PENDING, WorkState.RUNNING)
_Place = tuple[int, int, str]
"""The place of an item in lists: its creation, its arrival among those of the same process, its id."""
_Listed = dict[str, tuple[_Place, WorkItem]]


class JetStreamWorkQueue(TableWorkQueue):
    """The work of a store on JetStream."""

    def __init__(self, state: State, commits: Commits) -> None:
        super().__init__(state.table, state)
        self.state = state
        self._commits = commits
        self._ends = EndedWork(state, self.look)

    async def change(
        self, run: Callable[[Moment], R], *, ids: Sequence[str] = (), wake: bool = True, is_soft: bool = False
    ) -> R:
        return await self._commits.change(
            lambda _, now: run(now), prepare=partial(self.load, ids) if ids else None, is_soft=is_soft
        )

    async def look(self, read: Callable[[Moment], R]) -> R:
        return await self._commits.read(read)

    async def load(self, ids: Sequence[str]) -> None:
        """
        Load the records of these items if they are not in the mirror, because they have ended or another process was
        faster.
        """
        unknown = [one for one in dict.fromkeys(ids) if one not in self.table.items]
        unknown += [one for one in dict.fromkeys(ids) if one in self.table.items and self._is_ended(one)]
        found = await gathered(self.state.read_work, unknown)

        def take(now: Moment) -> None:
            for work_id, (stored, revision, subject) in zip(unknown, found, strict=True):
                if stored is None:
                    if work_id not in self.table.items or self._is_ended(work_id):
                        self.state.forget(work_id)
                        self.state.revisions[work_id] = revision
                elif revision > self.state.revisions.get(work_id, 0):
                    self.state.load(stored, revision, subject)

        await self.look(take)  # not while a batch is on its way, because its changes could no longer be undone

    def _is_ended(self, work_id: str) -> bool:
        return self.table.items[work_id].state not in _OPEN

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        if not n and self.table.soonest(claim.classes, self.state.now()) > 0:
            return []
        return [await self._whole(item) for item in await super().claim(n, claim)]

    async def _whole(self, item: WorkItem) -> WorkItem:
        _, payload_parts, result_parts = self.state.kept.get(item.id, ("", 0, 0))
        return await self.state.whole(item, payload_parts, result_parts)

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        await self.load([work_id])
        return await super().cancel(work_id, reason=reason, who=who, events=events)

    async def retry(
        self, ids: Sequence[str], *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        back: list[str] = []
        wanted = list(dict.fromkeys(ids))
        for at in range(0, len(wanted), PAGE):
            page = wanted[at : at + PAGE]
            await self.load(page)
            back += await super().retry(page, who=who, why=why, events=() if back else events)
        return back

    async def get(self, work_id: str) -> WorkItem | None:
        item = await self.look(lambda _: self.table.get(work_id))
        if item is not None and item.state in _OPEN:
            return await self._whole(item)
        stored, _, _ = await self.state.read_work(work_id)
        if stored is None:
            return None
        return await self.state.whole(stored.item, stored.payload_parts, stored.result_parts)

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        return await self._ends.wait(work_id, timeout)

    async def find(
        self,
        *,
        state: WorkState | None = None,
        kind: str | None = None,
        classes: Collection[str] = (),
        after: str = "",
        limit: int = 100,
        since: int = 0,
        oldest_first: bool = False,
        gone: Collection[str] | None = None,
        match: WorkFilter = EVERYTHING,
    ) -> list[WorkItem]:
        refuse_classes_with_gone(classes, gone)
        last = await self._place(after) if after else None
        if after and last is None:
            return []

        def is_wanted(place: _Place, item: WorkItem, now: Moment) -> bool:
            shown = item.state if gone is None else core.visible_state(item, now, gone=gone)
            return (
                (state is None or shown is state)
                and kind in (None, item.kind)
                and item.created_at >= since
                and match.matches(item)
                and (not classes or (item.state in _OPEN and item.resource_class in classes))
                and (last is None or (place > last if oldest_first else place < last))
            )

        def choose(ended: _Listed, now: Moment) -> list[WorkItem]:
            open_items = [item for item in self.table.items.values() if item.state in _OPEN]
            order_of = self.table.order_of
            everything = ended | {one.id: ((one.created_at, order_of(one.id), one.id), one) for one in open_items}
            wanted = [(place, item) for place, item in everything.values() if is_wanted(place, item, now)]
            wanted.sort(key=lambda one: one[0], reverse=not oldest_first)
            return [structs.replace(item, payload=b"") for _, item in wanted[:limit]]

        chosen: list[WorkItem] = []
        async for ended, left_out in self._ended_work(state, is_open=bool(classes), least=0 if oldest_first else limit):
            chosen = await self.look(partial(choose, ended))
            known_from = left_out + SKEW_MS  # what was created later has ended since, or is open
            if since > known_from or (len(chosen) >= limit and chosen[-1].created_at > known_from):
                return chosen
        return chosen

    async def _place(self, work_id: str) -> _Place | None:
        """The place of an item in lists; None for an unknown item."""
        item = await self.look(lambda _: self.table.get(work_id))
        if item is not None and item.state in _OPEN:
            return item.created_at, self.table.order_of(work_id), work_id
        stored, _, _ = await self.state.read_work(work_id)
        return None if stored is None else (stored.item.created_at, stored.order, work_id)

    async def _ended_work(
        self, state: WorkState | None, *, is_open: bool, least: int
    ) -> AsyncIterator[tuple[_Listed, int]]:
        """
        Items of this state that are not open, by id: those that ended last, then more of them, and at the end all.

        With them comes the time by which those left out had ended, 0 if none was left out. Without `least` all are read
        at once.
        """
        if is_open or state in _OPEN:
            yield {}, 0
            return
        connection, names = self.state.connection, self.state.names
        filters = [names.all_work(state.value)] if state else [names.all_work(one.value) for one in _NOT_OPEN]
        if not least:
            yield _listed(await scan(connection, names.state, filters)), 0
            return
        async for messages, left_out in newest(connection, names.state, filters, least=least):
            yield _listed(messages), left_out

    async def snapshot(self, gone: Collection[str] = ()) -> WorkSnapshot:
        def open_work(now: Moment) -> WorkSnapshot:
            found = self.table.snapshot(gone, now=now)
            return WorkSnapshot(
                {
                    name: {state: n for state, n in states.items() if state in _OPEN}
                    for name, states in found.counts.items()
                    if any(state in _OPEN for state in states)
                },
                found.oldest_ms,
            )

        found = await self.look(open_work)
        pools = sorted({item.pool for item in self.table.items.values()} | set(self.table.service_times))
        wanted = [(pool, state) for pool in pools for state in _NOT_OPEN]
        names = self.state.names
        subjects = [names.all_work(state.value, token_of(pool)) for pool, state in wanted]
        numbers = await gathered(lambda one: count(self.state.connection, names.state, [one]), subjects)
        for (pool, state), number in zip(wanted, numbers, strict=True):
            if number:
                found.counts.setdefault(pool, {})[state] = number
        return found

    async def purge(self, before: int) -> int:
        names, gone = self.state.names, 0
        ended = [state for state in WorkState if state in ENDED]
        found = await scan(self.state.connection, names.state, [names.all_work(one.value) for one in ended])
        old = [one.item.id for one in _decoded(found) if one.item.updated_at < before]
        for at in range(0, len(old), PAGE):
            page = old[at : at + PAGE]
            await self.load(page)
            gone += await self.change(partial(self._purge, page, before), ids=page, wake=False)
        return gone

    def _purge(self, ids: Sequence[str], before: int, now: Moment) -> int:
        items = [self.table.items[one] for one in ids if one in self.table.items]
        old = [item.id for item in items if item.state in ENDED and item.updated_at < before]
        for work_id in old:
            self.table.remove(work_id)
        return len(old)


async def sweep_blobs(state: State) -> int:
    """
    Remove payloads and results whose records are gone: the server removes a record, but not its parts.

    Returns how many messages went. A record and its blobs are stored in one batch, so a blob without one is left over.
    """
    connection, names, gone = state.connection, state.names, 0
    body = {"subjects_filter": f"{names.name}.blob.>"}
    answer = await connection.api(f"STREAM.INFO.{names.state}", body)
    subjects = json.decode(answer, type=StreamInfo).state.get("subjects") or {}
    for subject in sorted(subjects)[:MOST_SWEPT]:
        owner, field = subject.split(".")[2:4]
        if field == "key":
            continue  # it has the time limit of its record
        blob = await last_message(connection, names.state, subject)
        record = await last_message(connection, names.state, f"{names.name}.work.*.*.{owner}")
        if blob is not None and blob.body and (record is None or not record.body):
            nothing = Message(subject, b"", blob.sequence, ttl=1)
            answered = await connection.request(subject, b"", headers=nothing.headers())
            connection.check(answered.data)
            gone += 1
    return gone


_NOT_OPEN = tuple(state for state in WorkState if state not in _OPEN)


def _decoded(messages: Sequence[StreamMessage]) -> list[StoredItem]:
    return [json.decode(message.body, type=StoredItem) for message in messages if message.body]


def _listed(messages: Sequence[StreamMessage]) -> _Listed:
    items = _decoded(messages)
    return {one.item.id: ((one.item.created_at, one.order, one.item.id), one.item) for one in items}


class JetStreamQuarantine(TableQuarantine):
    """The quarantine of a store on JetStream. It is not mirrored: its items are read on request."""

    def __init__(self, work: JetStreamWorkQueue) -> None:
        super().__init__(work)
        self._queue = work

    async def _load(self, which: QuarantineFilter) -> list[str]:
        """Load the quarantined items that a filter may match. Returns the ids of those that match."""
        state = self._queue.state
        found = [one for one in await scan(state.connection, state.names.state, self._subjects(which)) if one.body]

        def take(now: Moment) -> None:
            for message in found:
                stored = json.decode(message.body, type=StoredItem)
                if message.sequence > state.revisions.get(stored.item.id, 0):
                    state.load(stored, message.sequence, message.subject)

        await self._queue.look(take)
        return [item.id for item in await TableQuarantine.find(self, which, limit=len(found))]

    def _subjects(self, which: QuarantineFilter) -> list[str]:
        names = self._queue.state.names
        return [names.any_work(one) for one in which.ids] or [names.all_work(WorkState.QUARANTINED.value)]

    async def _read(self, which: QuarantineFilter, take: Callable[[WorkItem], None]) -> None:
        """Read the items that match a filter one by one, in no order; there may be more than fit into memory."""
        state = self._queue.state

        def handle(message: StreamMessage) -> None:
            if message.body:
                item = json.decode(message.body, type=StoredItem).item
                is_latest = message.sequence >= state.revisions.get(item.id, 0)
                if is_latest and item.state is WorkState.QUARANTINED and matches(which, item):
                    take(item)

        await scan_each(state.connection, state.names.state, self._subjects(which), handle)

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        found: list[WorkItem] = []

        def take(item: WorkItem) -> None:
            if item.id > after:
                found.append(structs.replace(item, payload=b""))
                if len(found) >= 2 * limit + PAGE:
                    trim()

        def trim() -> None:
            found.sort(key=lambda one: one.id)
            del found[limit:]

        await self._read(which, take)
        trim()
        return found

    async def show(self, work_id: str) -> WorkItem | None:
        item = await self._queue.get(work_id)
        return item if item is not None and item.state is WorkState.QUARANTINED else None

    async def requeue(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        why: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return await self._in_pages(partial(super().requeue, who=who, why=why), which, dry_run, events)

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return await self._in_pages(partial(super().discard, who=who, reason=reason), which, dry_run, events)

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return await self._in_pages(super().purge, which, dry_run, events)

    async def replace(
        self, work_id: str, payload: bytes, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> str | None:
        await self._queue.load([work_id, next_record(work_id)])
        return await super().replace(work_id, payload, who=who, why=why, events=events)

    async def _in_pages(
        self,
        act: Callable[..., Awaitable[list[str]]],
        which: QuarantineFilter,
        dry_run: bool,
        events: Sequence[AuditEntry],
    ) -> list[str]:
        meant = await self._load(which)
        if dry_run:
            return meant
        done: list[str] = []
        for at in range(0, len(meant), PAGE):
            page = structs.replace(which, ids=tuple(meant[at : at + PAGE]))
            done += await act(page, dry_run=False, events=() if done else events)
        return done

    async def count(self, which: QuarantineFilter = ALL) -> dict[str, int]:
        number: Counter[str] = Counter()
        await self._read(which, lambda item: number.update([item.kind]))
        return dict(number.most_common())

    async def stats(self) -> QuarantineStats:
        kinds, sources, reasons = Counter[str](), Counter[str](), Counter[str]()
        oldest: list[int] = []

        def take(item: WorkItem) -> None:
            for counter, name in ((kinds, item.kind), (sources, item.source), (reasons, item.reason)):
                counter[name] += 1
            oldest[:] = [min((*oldest, item.updated_at))]

        await self._read(ALL, take)
        by_kind, by_source, by_reason = (dict(one.most_common()) for one in (kinds, sources, reasons))
        return QuarantineStats(kinds.total(), by_kind, by_source, by_reason, oldest[0] if oldest else None)

    async def groups(self, which: QuarantineFilter = ALL) -> FailureGroups:
        groups = FailureGroups()
        await self._read(which, groups.add)
        return groups


class JetStreamLeases(TableLeases):
    """The leases of all work in a store on JetStream."""

    def __init__(self, work: JetStreamWorkQueue) -> None:
        super().__init__(work)
        self._state = work.state

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
