"""
Admission to a SQLite store's work queue, and the order in which its work is claimed.

Open work is counted by triggers, in the transaction that changes it: admission reads a handful of rows, however many
wait. Claims go by priority, then age, and tenants take turns.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import apsw
from msgspec import json

from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.admission import Reject
from reefknot.queue.model.results import DROPPED
from reefknot.queue.model.submission import (
    BatchAdmission,
    Capacity,
    Displace,
    OpenWork,
    ServiceTime,
    SubmissionRules,
    Waiting,
    in_turns,
)
from reefknot.queue.model.work import ROUTER, WorkItem, pool_of
from reefknot.queue.port.work_queue import Enqueued, ItemEvents, Outcome, Taken, WorkClaim
from reefknot.stores.sqlite import work_rows as rows
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.transaction import Transaction

_OPEN_WORK = "SELECT stage, priority, tenant, number FROM open_work WHERE pool = ?"
# Only those with work that can be claimed: what a router holds is counted as submitted too. With its limit, SQLite does
# not make a join of it, which begins more slowly than a look.
_CLAIMABLE = (
    " AND EXISTS (SELECT 1 FROM work WHERE state = 'pending' AND ready = 1 AND resource_class = ?1 "
    "AND tenant_id IS nullif(tenant, '') LIMIT 1)"
)
_SUBMITTERS = f"SELECT tenant FROM open_work WHERE stage IN ('submitted', 'scheduled'){_CLAIMABLE}"  # noqa: S608
_QUEUED_TENANTS = f"SELECT tenant FROM open_work WHERE pool = ?2 AND stage = 'queued'{_CLAIMABLE}"  # noqa: S608
_SERVICE_TIME = "SELECT known, mean_ms FROM service_time WHERE pool = ?"
# Literals, not parameters: only then SQLite uses the partial indexes.
_SUBMISSION = (
    "resource_class = 'router' AND pool = ?1 AND priority = ?2 AND tenant_id IS ?3 "
    "AND (state = 'running' OR reason <> 'scheduled')"
)
_OLDEST_SUBMISSION = (
    f"SELECT id FROM (SELECT id, seq FROM work WHERE state = 'pending' AND ready = 1 AND {_SUBMISSION} "  # noqa: S608
    f"UNION ALL SELECT id, seq FROM work INDEXED BY work_later WHERE state = 'pending' AND ready = 0 AND {_SUBMISSION} "
    f"UNION ALL SELECT id, seq FROM work INDEXED BY work_leased WHERE state = 'running' AND {_SUBMISSION}) "
    "ORDER BY seq LIMIT 1"
)
_capacity = json.Decoder(Capacity)
_NEXT = (
    "SELECT priority, due_at, seq FROM work WHERE state = 'pending' AND ready = 1 "
    "AND resource_class = ? AND tenant_id IS ? ORDER BY priority DESC, due_at {0}, seq {0} LIMIT ?"
)
_NAMED = (
    "SELECT seq FROM work WHERE id IN (SELECT value FROM json_each(?)) AND state = 'pending' AND ready = 1 "
    "AND resource_class IN (SELECT value FROM json_each(?)) ORDER BY priority DESC, due_at, seq LIMIT ?"
)
_SUSPECTS = (
    "SELECT seq FROM work WHERE seq IN (SELECT value FROM json_each(?)) AND crashes > 0 AND resource_class <> 'router'"
)
MOST_TENANTS = 64
"""Most tenants whose queues one claim reads; the others have their turn at the next claims."""


def open_work(connection: apsw.Connection, wall: int, pool: str) -> tuple[OpenWork, SubmissionRules | None]:
    """The open work of a resource class, and the rules that a router has published, if there is one."""
    counted = list(query(connection, _OPEN_WORK, (pool,)))
    known = query(connection, _SERVICE_TIME, (pool,)).fetchone()
    slots, rules = 0, None
    for (text,) in query(connection, "SELECT capacity FROM status WHERE stale_at > ? ORDER BY sequence", (wall,)):
        capacity = _capacity.decode(text)
        slots += capacity.slots.get(pool, 0)
        rules = rules or capacity.rules
    return OpenWork(counted, slots=slots, service=None if known is None else ServiceTime(*known)), rules


def fold_service_times(connection: apsw.Connection, took: Mapping[str, Sequence[float]]) -> None:
    """Count the service times of attempts that have ended, by resource class."""
    for pool, times in took.items():
        known = query(connection, _SERVICE_TIME, (pool,)).fetchone()
        mean = ServiceTime() if known is None else ServiceTime(*known)
        for took_ms in times:
            mean = mean.after(took_ms)
        connection.execute("INSERT OR REPLACE INTO service_time VALUES (?, ?, ?)", (pool, mean.known, mean.mean_ms))


_BY_KEY = (
    "SELECT id FROM work INDEXED BY work_unique WHERE extra <> '{}' "
    "AND json_extract(extra, '$.unique') = ?1 AND ifnull(tenant_id, '') = ?2 AND state IN "
)
_WITH_KEY = (
    f"{_BY_KEY} ('pending', 'running', 'quarantined') UNION ALL {_BY_KEY} "
    "('succeeded', 'failed', 'cancelled', 'discarded') "
    "AND created_at + ifnull(json_extract(extra, '$.unique_ms'), 0) > ?3 LIMIT 1"
)


def tenants(connection: apsw.Connection, resource_class: str) -> list[str]:
    """The tenants with claimable work of this class."""
    if resource_class == ROUTER:
        found = rows.column(connection, _SUBMITTERS, resource_class)
    else:
        found = rows.column(connection, _QUEUED_TENANTS, resource_class, pool_of(resource_class))
    return list(dict.fromkeys(found))  # not DISTINCT, for which SQLite makes a table


def oldest_submission(connection: apsw.Connection, pool: str, priority: int, tenant: str) -> str | None:
    """The id of the oldest submission of this priority and tenant, claimed by a router or unclaimed."""
    found = query(connection, _OLDEST_SUBMISSION, (pool, priority, tenant or None)).get
    return None if found is None else str(found)


def with_key(connection: apsw.Connection, item: WorkItem, wall: int) -> str | None:
    """The id of the row that holds the key of an item, if it has one."""
    if not item.extra.unique:
        return None
    found = query(connection, _WITH_KEY, (item.extra.unique, item.tenant_id or "", wall)).get
    return None if found is None else str(found)


def verdicts(
    connection: apsw.Connection, items: Sequence[WorkItem], rules: SubmissionRules, wall: int
) -> list[Outcome]:
    """The answers that `enqueue` would give now. Nothing is written."""
    known = rows.known(connection, [item.id for item in items])
    arrivals = BatchAdmission(partial(open_work, connection, wall))
    now = Moment(0, wall)
    answers: list[Outcome] = []
    for item in items:
        if item.id in known:
            answers.append(Enqueued.DUPLICATE)
            continue
        if (holder := with_key(connection, item, wall)) is not None:
            answers.append(Taken(holder))
            continue
        new = core.accepted(item, now)
        verdict = arrivals.admit(new.pool, core.stage_of(new), core.arrival_of(new, now), rules)
        answers.append(verdict if isinstance(verdict, Reject) else Enqueued.ACCEPTED)
    return answers


def displace(transaction: Transaction, pool: str, verdict: Displace, drop_events: ItemEvents | None) -> None:
    """End the oldest submission of this priority and tenant, to make room."""
    victim = oldest_submission(transaction.connection, pool, verdict.priority, verdict.tenant)
    if victim is not None:
        item = rows.cached_or_loaded(transaction, [victim])[victim]
        dropped = core.cancel(item, transaction.now, reason=DROPPED, who="admission")
        rows.update(transaction, [item], [dropped])
        transaction.add_events(drop_events(dropped) if drop_events else ())


def next_rows(transaction: Transaction, n: int, classes: Sequence[str], claim: WorkClaim) -> list[int]:
    """The rows that come next for a claim, which may name no classes itself."""
    connection = transaction.connection
    if claim.only is not None:
        chosen = rows.column(connection, _NAMED, rows.listed(claim.only), rows.listed(classes), n)
    else:
        chosen = _in_order(transaction, classes, n, claim.newest_first)
    if not claim.isolate or not chosen:
        return chosen
    suspects = set(rows.column(connection, _SUSPECTS, json.encode(chosen).decode()))
    return chosen[: core.number_together([seq in suspects for seq in chosen])]


def _in_order(transaction: Transaction, classes: Sequence[str], n: int, newest_first: bool) -> list[int]:
    """The next rows by priority, then age, tenants taking turns."""
    statement = _NEXT.format("DESC" if newest_first else "ASC")
    queues: dict[str, list[Waiting]] = {}
    for name in dict.fromkeys(classes):
        for tenant in _next_tenants(transaction, name):
            queues.setdefault(tenant, []).extend(query(transaction.connection, statement, (name, tenant or None, n)))
    sign = -1 if newest_first else 1
    for queue in queues.values():
        queue.sort(key=lambda one: (-one[0], sign * one[1], sign * one[2]))
    taken = in_turns(queues, n, transaction.cache.last_tenant)
    if taken:
        transaction.cache.last_tenant = taken[-1][0]
    return [waiting[2] for _, waiting in taken]


def _next_tenants(transaction: Transaction, resource_class: str) -> list[str]:
    """The tenants with pending work of a class, those behind the last one served first."""
    names, last = tenants(transaction.connection, resource_class), transaction.cache.last_tenant
    if len(names) <= MOST_TENANTS:
        return names
    return sorted(names, key=lambda name: (name <= last, name))[:MOST_TENANTS]
