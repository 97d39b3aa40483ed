"""
Work and leases of a store on JetStream: the table of what this process knows, its changes stored by commits.

A call that concerns work which this process holds, or names, needs no mirror (see `state`). A claim mirrors the pool of
its class, unless the class is one worker's own. Only claims of the router's class, admission, and questions about all
open work mirror all of it; for such a question a process with workers alone reads it once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.failure_groups import FailureGroups
from reefknot.queue.model.transitions import Replace, Requeue, Transition, records_of
from reefknot.queue.model.work import ENDED, WorkItem, WorkState, pool_of, worker_of
from reefknot.queue.port.work_queue import (
    EVERYTHING,
    FREELY,
    NO_NOTES,
    Enqueue,
    Enqueued,
    Held,
    ItemEvents,
    Outcome,
    QuarantineStats,
    Settlement,
    TakeOver,
    WorkClaim,
    WorkFilter,
    WorkPage,
    WorkSnapshot,
)
from reefknot.stores.jetstream.adoption import Adoption
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.ended_work import EndedWork
from reefknot.stores.jetstream.reads import (
    StreamMessage,
    count,
    gathered,
    newest,
    scan,
    scan_each,
    stored_now,
)
from reefknot.stores.jetstream.remote_submissions import KeysOf, RemoteSubmissions
from reefknot.stores.jetstream.state import State, StoredItem, check_fits, readable
from reefknot.stores.jetstream.streams import OPEN, token_of
from reefknot.stores.work_in_memory.queue import TableWorkQueue
from reefknot.stores.work_in_memory.table import WorkTable

T = TypeVar("T")
R = TypeVar("R")
MOST_HELD = 300
"""Held items that one change is about: each takes up to two messages, and a batch has room for 900."""
MOST_NOTED = 150
"""The same, of settlements with notes of their steps: two messages more."""
PAGE = 100
"""Items that an operator's action changes in one batch."""
MOST_READ = 500
"""Records of one page of all open work."""
READ_AGAIN_S = 1.0
"""How long what was read of all open work answers questions about it: the questions of one look share a read."""
READ_SHARE = 20
"""How many times as long as it took a read answers questions: with much open work reading costs a part of the time."""
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
        self._remote = RemoteSubmissions(state.connection, state.names)
        self._followed: set[str] = set()
        """The classes whose open work is known here."""
        self._has_queue = False
        """Whether a worker of this process has a queue of its own."""
        self._read_table: WorkTable | None = None
        """All open work as it was last read, without a mirror."""
        self._read_until = 0.0
        self._adoption = Adoption(state, commits)
        self._pools_aside: set[str] = set()
        """Classes with work in quarantine, as of the last snapshot."""

    async def follow(self, classes: Sequence[str]) -> None:
        """Know the open work of these classes, or of all, from now on."""
        if not classes or core.ROUTER in classes:
            await self.state.mirror()
        if self.state.mirrors_all:
            return
        for name in classes:
            if name in self._followed:
                continue
            if worker_of(name):  # what others do to a worker's own queue it learns by its compare-and-sets
                await self._read_queue(name)
                self._has_queue = True
            else:
                await self.state.mirror_pool(name)
            self._followed.add(name)

    async def _read_queue(self, name: str) -> None:
        """Read what an earlier process of this worker has left."""
        names = self.state.names
        found = await scan(self.state.connection, names.state, [names.all_work(OPEN, token_of(pool_of(name)))])
        await self.look(partial(self._take, found, only=name))

    def _take(self, found: Sequence[StreamMessage], _: Moment, *, only: str = "") -> None:
        """Know these records, or those of one class alone, where they are newer than what is known."""
        for message in (one for one in found if one.body):
            stored = readable(message)
            if stored is None:
                continue
            is_newer = message.sequence > self.state.revisions.get(stored.item.id, 0)
            if is_newer and only in ("", stored.item.resource_class):
                self.state.load(stored, message.sequence, message.subject)

    async def open_work(self) -> WorkTable:
        """
        The table with all open work: that of the mirror, which begins with this, or one that is read for this question.

        A process with workers and no router asks only now and then, while no router runs at all. A mirror would bring
        it every change of its own once more.
        """
        if self.state.mirrors_all or not self._has_queue:
            await self.state.mirror()
            return self.table
        began = self.state.clock.now()
        if self._read_table is None or began >= self._read_until:
            names, table = self.state.names, WorkTable(self.state.offered)
            async for page in stored_now(self.state.connection, names.state, [names.all_work(OPEN)], most=MOST_READ):
                now = self.state.now()
                for stored in _decoded(page):
                    table.put(stored.item, now, stored.order)
            ended = self.state.clock.now()
            self._read_table, self._read_until = table, ended + max(READ_AGAIN_S, READ_SHARE * (ended - began))
        return self._read_table

    async def write(
        self, run: Callable[[Moment], R], *, ids: Sequence[str] = (), wake: bool = True, is_soft: bool = False
    ) -> R:
        return await self._commits.change(
            lambda _, now: run(now), prepare=partial(self.load, ids) if ids else None, is_soft=is_soft
        )

    async def look(self, read: Callable[[Moment], R]) -> R:
        return await self._commits.read(read)

    async def load(self, ids: Sequence[str]) -> None:
        """
        Load the records of these items that are not mirrored, or have ended, as the stream's leader has them.

        It waits until no batch is on its way, because its changes could no longer be undone.
        """
        unknown = [one for one in dict.fromkeys(ids) if not self._is_current(one)]
        found = await gathered(self.state.read_if_readable, unknown)
        await self.look(lambda _: self.state.take_records(unknown, found))

    async def _load_soon(self, ids: Sequence[str]) -> None:
        """Load the records of these items that are not known here, perhaps not their latest: a write tells."""
        unknown = [one for one in dict.fromkeys(ids) if one not in self.table.items]
        found = await self.state.read_directly(unknown) if unknown else []
        if any(revision for _, revision, _ in found):  # else there is nothing to take, nor a batch to wait for
            await self.look(lambda _: self.state.take_records(unknown, found))

    def _seems_taken(self, work_id: str) -> bool:
        """Whether a worker has this item as far as is known here: a router may have taken it back since."""
        item = self.table.items.get(work_id)
        return item is not None and not core.is_unassigned(item)

    def _is_current(self, work_id: str) -> bool:
        item = self.table.items.get(work_id)
        return item is not None and item.state in _OPEN and self.state.is_mirrored(item)

    async def enqueue(
        self, items: Sequence[WorkItem], terms: Enqueue = FREELY, *, events: Sequence[AuditEntry] = ()
    ) -> list[Outcome]:
        check_fits(items, self.state.connection.options.shown)
        may_be_kept, asked_at = False, self.state.now().wall
        if terms.rules is not None and not self.state.mirrors_all:
            if not terms.owner and not events and not self._remote.serves:
                answers, may_be_kept = await self._remote.ask(items, terms)
                if answers is not None:  # for a moment two routers may believe that they lead, and one keep it first
                    return await self._without_own(items, answers, asked_at)
            await self.state.mirror()
        if terms.rules is not None and not self.state.leads:
            await self._adoption.refuse_moved()
        kept = await self._enqueue(items, terms, events)
        return await self._without_own(items, kept, asked_at - SKEW_MS) if may_be_kept else kept

    async def _enqueue(self, items: Sequence[WorkItem], terms: Enqueue, events: Sequence[AuditEntry]) -> list[Outcome]:
        if not any(item.extra.unique for item in items):
            return await super().enqueue(items, terms, events=events)
        keys = KeysOf(self.state, self.look, items)

        async def prepare() -> None:
            await self.load([item.id for item in items])
            await keys.read()

        def run(_: Batch, now: Moment) -> list[Outcome]:
            keys.take()
            return self.table.enqueue(items, terms, now=now, events=events)

        await keys.read()
        return await self._commits.change(run, prepare=prepare)

    async def _without_own(self, items: Sequence[WorkItem], answers: Sequence[Outcome], since: int) -> list[Outcome]:
        """The answers, in which no item is a duplicate of what a router has kept for this very submission."""

        async def own(item: WorkItem, answer: Outcome) -> Outcome:
            known = await self.get(item.id) if answer is Enqueued.DUPLICATE else None
            if known is None or known.created_at < since:
                return answer
            is_own = known.payload == item.payload and known.trace_id == item.trace_id
            return Enqueued.ACCEPTED if is_own else answer

        return [await own(*one) for one in zip(items, answers, strict=True)]

    led_by_one = True

    def take_submissions(self, take: TakeOver | None) -> None:
        self.state.leads = take is not None
        self._remote.serve(take)

    async def assign(
        self,
        items: Sequence[WorkItem],
        *,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        if not self.state.mirrors_all:
            ids = [item.id for item in items]
            await self._load_soon(ids)
            await self.load([one for one in ids if self._seems_taken(one)])
        return await super().assign(items, start=start, owner=owner, lease=lease, events=events)

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        if n or claim.only is None:
            await self.follow(claim.classes)
        else:  # whether the leases of these ran out
            await self.load(list(claim.only))
        if not n and self.table.soonest(claim.classes, self.state.now()) > 0:
            return []
        return [await self._whole(item) for item in await super().claim(min(n, 2 * MOST_HELD), claim)]

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        return await _in_parts(held, partial(super().renew, lease=lease))

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        if any(one.follow_ups is not None for one in settlements):  # which are admitted by all open work
            await self.state.mirror()
        has_more = any(one.notes is not None or self._is_unique(one.id) for one in settlements)
        most = MOST_NOTED if has_more else MOST_HELD
        return await _in_parts(settlements, super().settle, most=most)

    def _is_unique(self, work_id: str) -> bool:
        item = self.table.items.get(work_id)
        return item is not None and bool(item.extra.unique)

    async def notes(self, work_id: str) -> dict[str, bytes]:
        return await self.state.notes(work_id)

    async def _whole(self, item: WorkItem) -> WorkItem:
        _, payload_parts, result_parts = self.state.kept.get(item.id, ("", 0, 0))
        return await self.state.whole(item, payload_parts, result_parts)

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        await self.load([work_id])
        return await super().cancel(work_id, reason=reason, who=who, events=events)

    async def change(
        self, which: WorkFilter, transition: Transition, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        await self.state.mirror()
        await self._load_matching(which)
        if isinstance(transition, Replace):
            await self.load(records_of(which.ids or (), transition))
        meant = await self.look(lambda now: self.table.change(which, transition, now=now, dry_run=True))
        if dry_run:
            return meant
        done: list[str] = []
        for at in range(0, len(meant), PAGE):
            page = structs.replace(which, ids=tuple(meant[at : at + PAGE]))
            change = partial(self._change_page, page, transition, () if done else events)
            done += await self.write(change, ids=records_of(page.ids or (), transition))
        return done

    def _change_page(
        self, page: WorkFilter, transition: Transition, events: Sequence[AuditEntry], now: Moment
    ) -> list[str]:
        """Change these items. Where a router runs it routes what is requeued, because a worker hears nothing of it."""
        changed = self.table.change(page, transition, now=now, events=events)
        _, router = self.state.offered("", now.wall)
        if isinstance(transition, Requeue) and router is not None:
            for item in [self.table.items[one] for one in changed]:
                if core.is_workers(item):
                    self.table.put(core.recalled(item, now), now)
        return changed

    async def _load_matching(self, which: WorkFilter) -> None:
        """Load the items that a filter may match: what is not open is not mirrored."""
        subjects = self._subjects(which)
        found = await scan(self.state.connection, self.state.names.state, subjects) if subjects else []
        await self.look(partial(self._take, found))

    def _subjects(self, which: WorkFilter) -> list[str]:
        names, states = self.state.names, WorkState if which.state is None else (which.state,)
        if which.ids is not None:
            return [names.any_work(one) for one in dict.fromkeys(which.ids)]
        return [names.all_work(one) for one in sorted({OPEN if one in _OPEN else one.value for one in states})]

    async def _read(self, which: WorkFilter, take: Callable[[WorkItem], None]) -> None:
        """Read the items that match a filter one by one, in no order; there may be more than fit into memory."""

        def handle(message: StreamMessage) -> None:
            stored = readable(message) if message.body else None
            if stored is not None:
                item = stored.item
                is_latest = message.sequence >= self.state.revisions.get(item.id, 0)
                if is_latest and which.state in (None, item.state) and which.matches(item):
                    take(item)

        if subjects := self._subjects(which):
            await scan_each(self.state.connection, self.state.names.state, subjects, handle)

    async def by_id(self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100) -> list[WorkItem]:
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

    async def count(self, which: WorkFilter = EVERYTHING) -> dict[str, int]:
        number = Counter[str]()
        await self._read(which, lambda item: number.update([item.kind]))
        return dict(number.most_common())

    async def groups(self, which: WorkFilter = EVERYTHING) -> FailureGroups:
        groups = FailureGroups()
        await self._read(which, groups.add)
        return groups

    async def quarantine_stats(self) -> QuarantineStats:
        kinds, sources, reasons, oldest = Counter[str](), Counter[str](), Counter[str](), list[int]()

        def take(item: WorkItem) -> None:
            for counter, name in ((kinds, item.kind), (sources, item.source), (reasons, item.reason)):
                counter[name] += 1
            oldest[:] = [min((*oldest, item.updated_at))]

        await self._read(WorkFilter(state=WorkState.QUARANTINED), take)
        by_kind, by_source, by_reason = (dict(one.most_common()) for one in (kinds, sources, reasons))
        return QuarantineStats(kinds.total(), by_kind, by_source, by_reason, oldest[0] if oldest else None)

    async def get(self, work_id: str) -> WorkItem | None:
        item = await self.look(lambda _: self.table.get(work_id))
        if item is not None and self._is_current(work_id):
            return await self._whole(item)
        stored, _, _ = await self.state.read_work(work_id)
        if stored is None:
            return None
        return await self.state.whole(stored.item, stored.payload_parts, stored.result_parts)

    async def named(self, ids: Sequence[str]) -> list[WorkItem]:
        here = await self.look(lambda _: [self.table.items[one] for one in ids if self._is_current(one)])
        known = {one.id for one in here}
        read = await self.state.read_directly([one for one in ids if one not in known])
        return [*here, *(stored.item for stored, _, _ in read if stored is not None)]

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        return await self._ends.wait(work_id, timeout)

    def records(self) -> AsyncIterator[list[WorkItem]]:
        return self._adoption.records()

    async def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]] = NO_NOTES) -> int:
        return await self._adoption.adopt(items, notes)

    async def search(
        self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100, oldest_first: bool = False
    ) -> WorkPage:
        table = self.table
        if which.classes and core.ROUTER not in which.classes:
            await self.follow(which.classes)
        elif which.classes or which.state is None or which.state in _OPEN or which.gone is not None:
            table = await self.open_work()
        last = await self._place(after) if after else None
        if after and last is None:
            return WorkPage([])

        def choose(ended: _Listed, now: Moment) -> list[WorkItem]:
            open_items = [item for item in table.items.values() if item.state in _OPEN]
            order_of = table.order_of
            everything = ended | {one.id: ((one.created_at, order_of(one.id), one.id), one) for one in open_items}
            wanted = [
                (place, item)
                for place, item in everything.values()
                if which.shows(item, now) and (last is None or (place > last if oldest_first else place < last))
            ]
            wanted.sort(key=lambda one: one[0], reverse=not oldest_first)
            return [item for _, item in wanted[:limit]]

        chosen: list[WorkItem] = []
        least, is_open = 0 if oldest_first else limit, bool(which.classes)
        async for ended, left_out in self._ended_work(which, is_open=is_open, least=least):
            chosen = await self.look(partial(choose, ended))
            known_from = left_out + SKEW_MS  # what was created later has ended since, or is open
            if which.since > known_from or (len(chosen) >= limit and chosen[-1].created_at > known_from):
                break
        return WorkPage.of(chosen, limit)

    async def _place(self, work_id: str) -> _Place | None:
        """The place of an item in lists; None for an unknown item."""
        item = await self.look(lambda _: self.table.get(work_id))
        if item is not None and item.state in _OPEN:  # mirrored, or of a class that is attended to
            return item.created_at, self.table.order_of(work_id), work_id
        stored, _, _ = await self.state.read_work(work_id)
        return None if stored is None else (stored.item.created_at, stored.order, work_id)

    async def _ended_work(self, which: WorkFilter, *, is_open: bool, least: int) -> AsyncIterator[tuple[_Listed, int]]:
        """
        Matching items that are not open, by id: of those that ended last, then of more of them, and at the end of all.

        With them comes the time by which those left out had ended, 0 if none was left out. Without `least` all are read
        at once.
        """
        state = which.state
        if is_open or state in _OPEN:
            yield {}, 0
            return
        connection, names = self.state.connection, self.state.names
        filters = [names.all_work(state.value)] if state else [names.all_work(one.value) for one in _NOT_OPEN]
        if not least:
            yield _listed(await scan(connection, names.state, filters), which), 0
            return
        async for messages, left_out in newest(connection, names.state, filters, least=least):
            yield _listed(messages, which), left_out

    async def snapshot(self, gone: Collection[str] = ()) -> WorkSnapshot:
        table = await self.open_work()

        def open_work(now: Moment) -> WorkSnapshot:
            found = table.snapshot(gone, now=now)
            return WorkSnapshot(
                {
                    name: {state: n for state, n in states.items() if state in _OPEN}
                    for name, states in found.counts.items()
                    if any(state in _OPEN for state in states)
                },
                found.oldest_ms,
            )

        names, aside = self.state.names, WorkState.QUARANTINED
        every = await count(self.state.connection, names.state, [names.all_work(aside.value)])
        found = await self.look(open_work)
        known = {item.pool for one in (self.table, table) for item in one.items.values()} | set(
            self.table.service_times
        )
        wanted = [(pool, state) for pool in sorted(known | self._pools_aside) for state in _NOT_OPEN]
        subjects = [names.all_work(state.value, token_of(pool)) for pool, state in wanted]
        numbers = await gathered(lambda one: count(self.state.connection, names.state, [one]), subjects)
        for (pool, state), number in zip(wanted, numbers, strict=True):
            if number:
                found.counts.setdefault(pool, {})[state] = number
        if every > sum(states.get(aside, 0) for states in found.counts.values()):
            await self._count_aside(found)
        self._pools_aside = {pool for pool, states in found.counts.items() if aside in states}
        return found

    async def _count_aside(self, found: WorkSnapshot) -> None:
        """Count all that is in quarantine by reading it: items of a class that is not known otherwise are among it."""
        aside, by_pool = WorkFilter(state=WorkState.QUARANTINED), Counter[str]()
        await self._read(aside, lambda item: by_pool.update([item.pool]))
        for pool, number in by_pool.items():
            found.counts.setdefault(pool, {})[WorkState.QUARANTINED] = number

    async def open_classes(self) -> list[str]:
        await self.state.mirror()
        return await super().open_classes()

    async def recall(self, classes: Sequence[str], *, crash_events: ItemEvents | None = None) -> int:
        await self.state.mirror()
        return await super().recall(classes, crash_events=crash_events)

    async def transfer(self, work_id: str, resource_class: str, *, due_at: int | None = None) -> bool:
        await self.load([work_id])
        return await super().transfer(work_id, resource_class, due_at=due_at)

    async def soonest(self, classes: Sequence[str]) -> float:
        await self.follow(classes)
        return await super().soonest(classes)

    async def purge(self, before: int) -> int:
        names, gone = self.state.names, 0
        ended = [state for state in WorkState if state in ENDED]
        found = await scan(self.state.connection, names.state, [names.all_work(one.value) for one in ended])
        old = [one.item.id for one in _decoded(found) if one.item.updated_at < before]
        for at in range(0, len(old), PAGE):
            page = old[at : at + PAGE]
            await self.load(page)
            gone += await self.write(partial(self._purge, page, before), ids=page, wake=False)
        return gone

    def _purge(self, ids: Sequence[str], before: int, now: Moment) -> int:
        known = (self.table.items[one] for one in ids if one in self.table.items)
        old = [item.id for item in known if item.state in ENDED and item.updated_at < before]
        for work_id in old:
            self.table.remove(work_id)
        return len(old)


async def _in_parts(
    wanted: Sequence[T], change: Callable[[Sequence[T]], Awaitable[list[R]]], most: int | None = None
) -> list[R]:
    """The answers of a change that is made in several where one would not fit into a batch."""
    most = MOST_HELD if most is None else most
    if len(wanted) <= most:
        return await change(wanted)
    parts = [wanted[at : at + most] for at in range(0, len(wanted), most)]
    return [one for answers in await asyncio.gather(*map(change, parts)) for one in answers]


_NOT_OPEN = tuple(state for state in WorkState if state not in _OPEN)


def _decoded(messages: Iterable[StreamMessage]) -> Iterator[StoredItem]:
    """The records of these messages; what cannot be read is left out, with a warning."""
    for message in messages:
        stored = readable(message) if message.body else None
        if stored is not None:
            yield stored


def _listed(messages: Iterable[StreamMessage], which: WorkFilter) -> _Listed:
    return {
        one.item.id: ((one.item.created_at, one.order, one.item.id), one.item)
        for one in _decoded(messages)
        if which.matches(one.item)
    }
