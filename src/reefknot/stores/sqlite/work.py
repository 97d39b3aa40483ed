"""
The work queue of a SQLite store: one row for each piece of work.

A claim is one `UPDATE … RETURNING`. What is due later is kept out of the index that claims read, and enters it when its
time comes: a long line of waiting retries costs a claim nothing. A waiter is woken by the commit that concerns it, in
whatever process that is made.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import apsw
from msgspec import json, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment, milliseconds
from reefknot.errors import ReefknotError
from reefknot.queue.model import work as core
from reefknot.queue.model.admission import Reject
from reefknot.queue.model.notes import Notes
from reefknot.queue.model.submission import BatchAdmission, Displace
from reefknot.queue.model.unique import unique_name
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.transport import Notice
from reefknot.queue.port.work_queue import (
    EVERYTHING,
    FREELY,
    NO_NOTES,
    Enqueue,
    Enqueued,
    FollowUps,
    Held,
    ItemEvents,
    Outcome,
    Settlement,
    Taken,
    WorkClaim,
    WorkFilter,
    WorkPage,
    WorkSnapshot,
    events_to_keep,
)
from reefknot.runtime.sqlite_files import close_connection, immediate
from reefknot.runtime.tasks import Services
from reefknot.stores.sqlite import admission
from reefknot.stores.sqlite import upkeep as retention
from reefknot.stores.sqlite import work_rows as rows
from reefknot.stores.sqlite.connection import moved, query
from reefknot.stores.sqlite.message_rows import publish_batch
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import Transaction, each, write_apart
from reefknot.stores.sqlite.work_by_filter import WorkByFilter
from reefknot.stores.wakeups import CLASS_TOPIC, END_TOPIC, LEASES_TOPIC, LOOK_S, WakingQueue

_OWNERS = (
    "SELECT owner FROM work INDEXED BY work_leased WHERE state = 'running' "
    "AND (?2 = '[]' OR resource_class IN (SELECT value FROM json_each(?2))) "
    "GROUP BY owner HAVING max(lease_until - lease_ms) <= ?1 ORDER BY owner"
)
_END = (
    "UPDATE work INDEXED BY work_leased SET lease_until = 0 "
    "WHERE state = 'running' AND owner IN (SELECT value FROM json_each(?))"
)


class SqliteLeases:
    """The leases of all work in a SQLite store."""

    def __init__(self, context: StoreContext, connect: Callable[[], apsw.Connection]) -> None:
        self._context = context
        self._connect = connect

    async def owners(self, *, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        latest, names = self._context.now().steady - milliseconds(silent_for), rows.listed(classes)
        return await self._context.read(lambda connection: rows.column(connection, _OWNERS, latest, names))

    async def end(self, owners: Collection[str]) -> int:
        return await self._context.write(_end, (rows.listed(sorted(owners)),)) if owners else 0

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        lease_ms = milliseconds(lease)
        connection = self._connect()  # its own: the writer answers to a loop
        try:
            with immediate(connection):
                until_ms = self._context.now().steady + lease_ms
                values = [(until_ms, lease_ms, one.id, one.owner, one.fence) for one in held]
                connection.executemany(_RENEW, values)
        finally:
            close_connection(connection)

    def give_back(self, held: Sequence[Held]) -> None:
        back: Sequence[Settlement] = [Settlement(one.id, one.owner, one.fence, core.Interrupted()) for one in held]
        self._context.post(write_apart(self._connect, self._context.now, _settle_batch, [back]))


@each
def _end(transaction: Transaction, owners: str) -> int:
    transaction.connection.execute(_END, (owners,))
    ended = transaction.connection.changes()
    transaction.cache.clear()  # the cached items have the old lease
    transaction.touched.add(LEASES_TOPIC)
    return ended


_RECALL_READY = (
    "UPDATE work SET resource_class = 'router', admission = iif(admission = '', '{}', admission), updated_at = ? "
    "WHERE state = 'pending' AND ready = 1 AND resource_class = ? RETURNING pool, priority, tenant_id, reason"
)
_RECALL_LATER = _RECALL_READY.replace("ready = 1", "ready = 0")
_CLAIM = (
    "UPDATE OR ROLLBACK work SET state = 'running', owner = ?, fence = fence + 1, lease_until = ?, lease_ms = ?, "
    "updated_at = ? WHERE seq IN (SELECT value FROM json_each(?))"
)
REFUSING_S = 1.0
"""Seconds after a refusal in which arrivals are first judged by a read, which costs the writer nothing."""
_RENEW = "UPDATE work SET lease_until = ?, lease_ms = ? WHERE id = ? AND owner = ? AND fence = ? AND state = 'running'"
_PROMOTE = (
    "UPDATE work INDEXED BY work_later SET ready = 1 "
    "WHERE state = 'pending' AND ready = 0 AND resource_class = ? AND due_at <= ?"
)
_SOONEST = (
    "SELECT min(at) FROM (SELECT min(lease_until) - ?1 AS at FROM work INDEXED BY work_leased "
    "WHERE state = 'running' AND (NOT ?4 OR resource_class IN (SELECT value FROM json_each(?3))) "
    "UNION ALL SELECT (SELECT min(due_at) - ?2 FROM work WHERE state = 'pending' AND ready = 0 "
    "AND resource_class = class.value) FROM json_each(?3) AS class "
    "UNION ALL SELECT 0 FROM json_each(?3) AS class WHERE EXISTS "
    "(SELECT 1 FROM work WHERE state = 'pending' AND ready = 1 AND resource_class = class.value))"
)


class SqliteWorkQueue(WorkByFilter, WakingQueue):
    """The work of a SQLite store."""

    led_by_one = True

    def __init__(self, context: StoreContext) -> None:
        WorkByFilter.__init__(self, context)
        WakingQueue.__init__(self, context.waiters)
        self._awaited: dict[str, set[asyncio.Future[WorkItem]]] = {}
        """By id: the waiters for the end of an item."""
        self._to_look_for: list[str] = []
        """The ids whose waiters were woken, and have not looked yet."""
        self._asked = asyncio.Event()
        self._services = Services("store")
        self._refusing_until = 0.0

    async def enqueue(
        self,
        items: Sequence[WorkItem],
        terms: Enqueue = FREELY,
        *,
        events: Sequence[AuditEntry] = (),
    ) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        if terms.rules is not None and loop.time() < self._refusing_until:
            answers = await self._context.read(
                partial(admission.verdicts, items=items, rules=terms.rules, wall=self._context.now().wall)
            )
            if Enqueued.ACCEPTED not in answers:
                return answers
        answers = await self._context.write(_enqueue_batch, (items, terms, events))
        if terms.rules is not None and any(isinstance(answer, Reject) for answer in answers):
            self._refusing_until = loop.time() + REFUSING_S
        return answers

    async def assign(
        self,
        items: Sequence[WorkItem],
        *,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        return await self._context.write(_assign_batch, (items, start, owner, milliseconds(lease), events))

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        return await self._context.write(_claim, (n, claim))

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        return await self._context.write(_renew, (held, milliseconds(lease)))

    async def note(self, held: Held, notes: Notes) -> bool:
        return await self._context.write(_note, (held, notes))

    async def notes(self, work_id: str) -> dict[str, bytes]:
        return await self._context.read(partial(rows.notes, work_id=work_id))

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        answers, sent = await self._context.write(_settle_batch, settlements)
        for notice in sent:
            notice.is_sent = True
        return answers

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        return await self._context.write(_cancel_batch, (work_id, reason, who, events))

    async def transfer(self, work_id: str, resource_class: str, *, due_at: int | None = None) -> bool:
        return await self._context.write(_transfer, (work_id, resource_class, due_at))

    async def open_classes(self) -> list[str]:
        return await self._context.read(partial(rows.classes_with, states=("pending", "running")))

    async def recall(self, classes: Sequence[str], *, crash_events: ItemEvents | None = None) -> int:
        return await self._context.write(_recall, (tuple(classes), crash_events))

    async def get(self, work_id: str) -> WorkItem | None:
        return await self._context.read(lambda connection: rows.one(connection, work_id))

    async def named(self, ids: Sequence[str]) -> list[WorkItem]:
        return await self._context.read(lambda connection: list(rows.load(connection, list(ids)).values()))

    async def search(
        self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100, oldest_first: bool = False
    ) -> WorkPage:
        lost = None if which.gone is None else rows.LostClaims(rows.listed(which.gone), self._context.now().steady)
        wanted = rows.Wanted(which, after, limit, oldest_first, lost)
        return await self._context.read(partial(rows.searched, wanted=wanted))

    async def snapshot(self, gone: Collection[str] = ()) -> WorkSnapshot:
        now = self._context.now()
        lost = rows.LostClaims(rows.listed(gone), now.steady)
        return await self._context.read(partial(rows.snapshot, lost=lost, wall=now.wall))

    async def purge(self, before: int) -> int:
        return await retention.purge_work(self._context, before)

    async def records(self) -> AsyncIterator[list[WorkItem]]:
        seq = 0
        while True:
            found, seq = await self._context.read(partial(rows.page_behind, seq=seq))
            if not found:
                return
            yield found

    async def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]] = NO_NOTES) -> int:
        return await self._context.write(_adopt, (items, notes))

    async def soonest(self, classes: Sequence[str]) -> float:
        return await self._context.look(partial(_soonest, now=self._context.now(), classes=classes))

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[WorkItem] = loop.create_future()
        deadline = loop.time() + max(0.0, timeout)
        self._awaited.setdefault(work_id, set()).add(over)
        try:
            while not over.done():
                with self._context.listening(END_TOPIC + work_id) as change:
                    self._look_for(work_id)
                    left = max(0.0, deadline - loop.time())
                    either: list[asyncio.Future[Any]] = [change, over]
                    await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if not change.done() and not over.done():  # its time is up
                        item = await self.get(work_id)
                        return item if item is not None and core.is_over(item) else None
            return over.result()
        finally:
            waiting = self._awaited.get(work_id)
            if waiting is not None:
                waiting.discard(over)
                if not waiting:
                    del self._awaited[work_id]

    def _look_for(self, work_id: str) -> None:
        self._to_look_for.append(work_id)
        self._asked.set()
        self._services.keep("look for ended work", self._look_for_ends)

    async def _look_for_ends(self) -> None:
        """
        Resolve the waiters of `ended`.

        One read for all whose waiters were woken meanwhile, and one every second for all, however many are awaited. A
        failed read fails every waiter.
        """
        try:
            while self._awaited:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._asked.wait()
                self._asked.clear()
                ids, self._to_look_for = self._to_look_for or list(self._awaited), []
                for item in await self._context.look(partial(rows.over, ids=ids)):
                    for over in self._awaited.pop(item.id, ()):
                        if not over.done():
                            over.set_result(item)
        except Exception as error:
            waiting, self._awaited, self._to_look_for = self._awaited, {}, []
            for over in (one for futures in waiting.values() for one in futures if not one.done()):
                over.set_exception(error)


def _enqueue_batch(transaction: Transaction, wanted: list[Any]) -> Sequence[list[Outcome]] | Sequence[ReefknotError]:
    if (refusal := moved(transaction.connection)) is not None:
        return [refusal] * len(wanted)
    transaction.counts.flush(transaction.connection)
    known = rows.known(transaction.connection, [item.id for items, *_ in wanted for item in items])
    arrivals = BatchAdmission(partial(admission.open_work, transaction.connection, transaction.now.wall))
    new: list[WorkItem] = []
    keys: dict[str, str] = {}
    """By key of unique work: the item among the new ones."""
    answers: list[list[Outcome]] = []
    for items, terms, events in wanted:
        rules, owner, lease_ms = terms.rules, terms.owner, milliseconds(terms.lease)
        answer: list[Outcome] = []
        for item in items:
            if item.id in known:
                answer.append(Enqueued.DUPLICATE)
                continue
            name = unique_name(item)
            holder = keys.get(name) or admission.with_key(transaction.connection, item, transaction.now.wall)
            if holder is not None:
                answer.append(Taken(holder))
                continue
            accepted = core.accepted(item, transaction.now, is_claimed=bool(owner))
            if rules is not None:
                verdict = arrivals.admit(
                    accepted.pool, core.stage_of(accepted), core.arrival_of(accepted, transaction.now), rules
                )
                if isinstance(verdict, Reject):
                    answer.append(verdict)
                    continue
                if isinstance(verdict, Displace):
                    rows.insert(transaction, new)
                    new.clear()
                    keys.clear()
                    admission.displace(transaction, accepted.pool, verdict, terms.drop_events)
            known.add(item.id)
            if name:
                keys[name] = item.id
            answer.append(Enqueued.ACCEPTED)
            new.append(_started(transaction, accepted, owner, lease_ms) if owner else accepted)
            if terms.accept_events is not None:
                transaction.add_events(terms.accept_events(accepted))
        if events and Enqueued.ACCEPTED in answer:
            transaction.add_events(events_to_keep(items, answer, events))
        answers.append(answer)
    rows.insert(transaction, new)
    return answers


def _started(transaction: Transaction, item: WorkItem, owner: str, lease_ms: int) -> WorkItem:
    """The item as claimed by its owner. The write cache has it, so settling need not read it."""
    held = core.started(item, owner=owner, fence=item.fence + 1, lease_ms=lease_ms, now=transaction.now)
    transaction.cache.items.note({held.id: held})
    return held


def _assign_batch(transaction: Transaction, wanted: list[Any]) -> list[list[WorkItem | None]]:
    known = rows.cached_or_loaded(transaction, [item.id for items, *_ in wanted for item in items])
    new: list[WorkItem] = []
    submitted: list[WorkItem] = []
    moved: list[WorkItem] = []
    started: list[WorkItem] = []
    answers: list[list[WorkItem | None]] = []
    for items, start, owner, lease_ms, events in wanted:
        kept: list[WorkItem | None] = []
        for item in items:
            before = known.get(item.id)
            after = core.accepted_for_worker(before, item, transaction.now)
            if after is not None and item.id in start and not core.is_suspect(after):
                now = transaction.now
                after = core.started(after, owner=owner, fence=after.fence + 1, lease_ms=lease_ms, now=now)
                started.append(after)
            if after is not None:
                known[item.id] = after
                if before is None:
                    new.append(after)
                else:
                    submitted.append(before)
                    moved.append(after)
            kept.append(after)
        if None not in kept:
            transaction.add_events(events)
        else:
            answer = [Enqueued.DUPLICATE if one is None else Enqueued.ACCEPTED for one in kept]
            transaction.add_events(events_to_keep(items, answer, events))
        answers.append(kept)
    rows.insert(transaction, new)
    rows.update(transaction, submitted, moved)
    transaction.cache.items.note({item.id: item for item in started})  # settling need not read them
    return answers


@each
def _claim(transaction: Transaction, n: int, claim: WorkClaim) -> list[WorkItem]:
    connection, now, lease_ms = transaction.connection, transaction.now, milliseconds(claim.lease)
    _reap(transaction, claim.classes, claim.crash_limit, claim.crash_events)
    transaction.counts.flush(connection)
    classes = claim.classes or rows.classes_with(connection, ("pending",))
    for name in classes:
        connection.execute(_PROMOTE, (name, now.wall))
    if not classes or n <= 0:
        return []
    chosen = admission.next_rows(transaction, n, classes, claim)
    if not chosen:
        return []
    seqs = json.encode(chosen).decode()
    connection.execute(_CLAIM, (claim.owner, now.steady + lease_ms, lease_ms, now.wall, seqs))
    items = rows.of_seqs(connection, seqs)
    transaction.cache.items.note({item.id: item for item in items})
    transaction.counts.start(items)
    return items


def _reap(transaction: Transaction, classes: Sequence[str], crash_limit: int, crash_events: ItemEvents | None) -> None:
    crashed = rows.expired(transaction.connection, transaction.now.steady, classes)
    back = [core.lease_ran_out(item, transaction.now, crash_limit=crash_limit) for item in crashed]
    rows.update(transaction, crashed, back)
    for item in back:
        transaction.add_events(crash_events(item) if crash_events else ())


@each
def _recall(transaction: Transaction, classes: Sequence[str], crash_events: ItemEvents | None) -> int:
    _reap(transaction, classes, core.CRASH_LIMIT, crash_events)
    number = 0
    for name in classes:
        for statement in (_RECALL_READY, _RECALL_LATER):
            recalled = [
                WorkItem("", "", name, pool=pool, priority=priority, tenant_id=tenant_id, reason=reason)
                for pool, priority, tenant_id, reason in query(
                    transaction.connection, statement, (transaction.now.wall, name)
                )
            ]
            transaction.counts.add(recalled, -1)
            transaction.counts.add([structs.replace(item, resource_class=core.ROUTER) for item in recalled])
            number += len(recalled)
    transaction.cache.clear()  # cached items may be among them
    transaction.touched.add(CLASS_TOPIC + core.ROUTER)
    return number


@each
def _renew(transaction: Transaction, held: Sequence[Held], lease_ms: int) -> list[bool]:
    lease_until = transaction.now.steady + lease_ms
    answer = []
    transaction.cache.items.drop([one.id for one in held])
    for one in held:
        transaction.connection.execute(_RENEW, (lease_until, lease_ms, one.id, one.owner, one.fence))
        answer.append(transaction.connection.changes() == 1)
    return answer


@each
def _note(transaction: Transaction, held: Held, notes: Notes) -> bool:
    item = rows.cached_or_loaded(transaction, [held.id]).get(held.id)
    if item is None or not core.holds(item, owner=held.owner, fence=held.fence):
        return False
    noted = core.with_notes(item, notes, transaction.now)
    noted = structs.replace(noted, lease_until=transaction.now.steady + item.lease_ms)
    rows.update(transaction, [item], [noted])
    rows.keep_notes(transaction, item.id, notes.parts)
    transaction.cache.items.note({item.id: noted})  # the next note, and settling, need not read it
    return True


def _settle_batch(
    transaction: Transaction, wanted: list[Sequence[Settlement]]
) -> list[tuple[list[bool], list[Notice]]]:
    """The answers to each request, and those of its notices that are sent with it."""
    found = rows.cached_or_loaded(transaction, [one.id for settlements in wanted for one in settlements])
    before = found.copy()
    changed: dict[str, WorkItem] = {}
    took: dict[str, list[float]] = {}
    answers = list[tuple[list[bool], list[Notice]]]()
    for settlements in wanted:
        answer, notices, sent = list[bool](), list[Notice](), list[Notice]()
        for one in settlements:
            item = found.get(one.id)
            if item is None or not core.holds(item, owner=one.owner, fence=one.fence):
                answer.append(False)
                continue
            if one.took_ms is not None:
                took.setdefault(item.pool, []).append(one.took_ms)
            answer.append(True)
            noted = core.with_notes(item, one.notes, transaction.now)
            if one.notes is not None:
                rows.keep_notes(transaction, one.id, one.notes.parts)
            if one.follow_ups is not None:
                found[one.id] = changed[one.id] = _settled_with(transaction, one.follow_ups, noted, one)
                if one.follow_ups.instead is not None:
                    continue
            else:
                found[one.id] = changed[one.id] = core.settle(noted, one.settled, transaction.now)
            if one.events:
                transaction.add_events(one.events)
            if one.notice is not None:
                notices.append(one.notice)
        if notices:  # after the acks, which join the transaction
            transaction.at_end.append(partial(_send, transaction, notices, sent))
        answers.append((answer, sent))
    rows.update(transaction, [before[work_id] for work_id in changed], list(changed.values()))
    admission.fold_service_times(transaction.connection, took)
    return answers


def _settled_with(transaction: Transaction, follow: FollowUps, item: WorkItem, one: Settlement) -> WorkItem:
    """The item after its report, whose follow-ups are stored, or after what comes in its place."""
    transaction.counts.flush(transaction.connection)
    arrivals = BatchAdmission(partial(admission.open_work, transaction.connection, transaction.now.wall))
    known = rows.cached_or_loaded(transaction, [child.id for child in follow.items])
    new, events = follow.admit(item, known, arrivals, transaction.now)
    rows.insert(transaction, new)
    transaction.add_events(events)
    return follow.settle(item, one.settled, transaction.now)


def _send(transaction: Transaction, notices: list[Notice], sent: list[Notice]) -> None:
    """Write the messages that have room, and note which these are."""
    written = publish_batch(transaction, [one.message for one in notices])
    sent += [one for one, is_written in zip(notices, written, strict=True) if is_written]


def _cancel_batch(transaction: Transaction, wanted: list[Any]) -> list[bool]:
    found = rows.cached_or_loaded(transaction, [work_id for work_id, _, _, _ in wanted])
    open_ones: list[WorkItem] = []
    changed: list[WorkItem] = []
    answers = []
    for work_id, reason, who, events in wanted:
        item = found.get(work_id)
        may = item is not None and WorkState.CANCELLED in core.MOVES[item.state]
        if may and item is not None:
            open_ones.append(item)
            found[work_id] = core.cancel(item, transaction.now, reason=reason, who=who)
            changed.append(found[work_id])
            transaction.add_events(events)
        answers.append(may)
    rows.update(transaction, open_ones, changed)
    return answers


@each
def _transfer(transaction: Transaction, work_id: str, resource_class: str, due_at: int | None) -> bool:
    item = rows.cached_or_loaded(transaction, [work_id]).get(work_id)
    if item is None or item.state is not WorkState.PENDING:
        return False
    rows.update(transaction, [item], [core.transferred(item, resource_class, transaction.now, due_at=due_at)])
    return True


@each
def _adopt(transaction: Transaction, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]]) -> int:
    known = rows.known(transaction.connection, [item.id for item in items])
    new = [item for item in items if item.id not in known]
    rows.insert(transaction, new)
    for item in new:
        rows.keep_notes(transaction, item.id, notes.get(item.id, {}))
    return len(new)


def _soonest(connection: apsw.Connection, now: Moment, classes: Sequence[str]) -> float:
    """Seconds until something can be claimed, infinite when only a change can bring it."""
    names = classes or rows.classes_with(connection, ("pending",))
    found = query(connection, _SOONEST, (now.steady, now.wall, rows.listed(names), bool(classes))).get
    return inf if found is None else found / 1000
