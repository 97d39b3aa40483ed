"""Rows of the work table: written, read, and turned into items. Payloads are only read where they are wanted."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import apsw
from msgspec import Struct, json, structs

from reefknot.queue.model.failure_groups import fingerprint_of, in_small
from reefknot.queue.model.work import (
    INGEST,
    NO_BUDGET,
    NO_EXTRA,
    Budget,
    Extra,
    HistoryEntry,
    WorkItem,
    WorkState,
    record_id,
)
from reefknot.queue.port.work_queue import EVERYTHING, WorkFilter, WorkPage, WorkSnapshot
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.transaction import Transaction
from reefknot.stores.sqlite.wait_table import WORK_TOPIC
from reefknot.stores.wakeups import END_TOPIC, topics_of

_FIELDS = WorkItem.__struct_fields__
FULL = ", ".join(_FIELDS)
"""Every field."""

_NESTED = {"budget": "json(budget)", "history": "json(history)", "payload": "''", "extra": "json(extra)"}
_LIGHT = ", ".join(_NESTED.get(name, name) for name in _FIELDS)
_AS_ONE_ROW = f"SELECT json_group_array(json_array({_LIGHT})) FROM "  # noqa: S608 - our own column names
_LOAD = _AS_ONE_ROW + "work WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
_DELETE = "DELETE FROM work WHERE id IN (SELECT value FROM json_each(?))"
_KNOWN = "SELECT json_group_array(id) FROM work WHERE id IN (SELECT value FROM json_each(?))"
# Named, because the planner would rather walk the whole table in the order of seq.
_EXPIRED = (
    _AS_ONE_ROW  # noqa: S608 - our own column names
    + "(SELECT * FROM work INDEXED BY work_leased WHERE state = 'running' AND lease_until <= ?1 "
    "AND (?2 = '[]' OR resource_class IN (SELECT value FROM json_each(?2))) ORDER BY seq)"
)
_IS_EXPIRED = "SELECT EXISTS (SELECT 1 FROM work INDEXED BY work_leased WHERE state = 'running' AND lease_until <= ?)"
_INSERT = f"INSERT INTO work (ready, {FULL}) VALUES ({', '.join('?' * (len(_FIELDS) + 1))})"  # noqa: S608

# Identity and payload never change.
_CHANGING = tuple(name for name in _FIELDS[_FIELDS.index("state") :] if name != "payload")
_changes = itemgetter(*map(_FIELDS.index, _CHANGING))
_UPDATE = (
    f"UPDATE work SET ready = ?, resource_class = ?, {', '.join(f'{name} = ?' for name in _CHANGING)} WHERE id = ?"  # noqa: S608
)
_OVER = (
    f"SELECT {FULL} FROM work WHERE id IN (SELECT value FROM json_each(?)) "  # noqa: S608 - our own column names
    "AND state NOT IN ('pending', 'running')"
)

# The oldest of each queue of `work_ready`, whose tenants and priorities are counted, and of work not promoted yet.
_OLDEST_DUE = (
    "SELECT resource_class, min(due_at) FROM (SELECT class.resource_class, "
    "(SELECT min(due_at) FROM work WHERE state = 'pending' AND ready = 1 AND resource_class = class.resource_class "
    "AND tenant_id IS nullif(open.tenant, '') AND priority = open.priority) AS due_at "
    "FROM work_count AS class JOIN open_work AS open ON class.state = 'pending' "
    "AND iif(class.resource_class = 'router', open.stage IN ('submitted', 'scheduled'), open.stage = 'queued' "
    "AND substr(class.resource_class, 1, length(open.pool) + 1) IN (open.pool, open.pool || '@')) "
    "UNION ALL SELECT class.resource_class, (SELECT min(due_at) FROM work WHERE state = 'pending' AND ready = 0 "
    "AND resource_class = class.resource_class) FROM work_count AS class WHERE class.state = 'pending') "
    "GROUP BY resource_class HAVING min(due_at) IS NOT NULL"
)
_CLASSES = "SELECT DISTINCT resource_class FROM work_count WHERE state IN (SELECT value FROM json_each(?)) ORDER BY 1"
_KINDS = """
WITH RECURSIVE kinds(name) AS (
    SELECT min(kind) FROM work WHERE state = ?1
    UNION ALL SELECT (SELECT min(kind) FROM work WHERE state = ?1 AND kind > name) FROM kinds WHERE name IS NOT NULL
) SELECT name FROM kinds WHERE name IS NOT NULL
"""
_PAGE = "SELECT seq FROM work WHERE {} ORDER BY seq {} LIMIT ?"
# In one row: a hundred thousand of them would cost more to hand over than to read.
_SCAN = (
    "SELECT count(*), {3}(seq), json_group_array(seq) FILTER (WHERE is_match) "
    "FROM (SELECT seq, {0} AS is_match FROM work WHERE {1} ORDER BY seq {2} LIMIT ?)"
)
SCANNED = (500, 4_500, 20_000)
"""The rows that a search reads in each of its passes, in the order of the table: some 10 ms for all of them."""
LOOKED_UP = (500, 4_500, 5_000)
"""The rows that a search reads in each of its passes, where an index leads to them one by one."""
_LEAST_SHARE = 50
_HAS_ERROR = (
    "(instr(lower(reason), ?) > 0 OR iif(json_valid(failure), instr(lower(failure ->> 'code'), ?) > 0 "
    "OR instr(lower(failure ->> 'failure_type'), ?) > 0 OR instr(lower(failure ->> 'message'), ?) > 0, false))"
)
_CONDITIONS = {
    "ids": "id IN (SELECT value FROM json_each(?))",
    "kind": "kind = ?",
    "source": "source = ?",
    "tenant_id": "tenant_id = ?",
    "pool": "pool = ?",
    "assignment_id": "iif(instr(id, '|'), substr(id, instr(id, '|') + 1), id) = ?",
    "correlation_id": "correlation_id = ?",
    "trace_id": "trace_id = ?",
    "only_ingestion": f"substr(resource_class, 1, {len(INGEST)}) = '{INGEST}' AND instr(resource_class, '@') = 0",
    "since": "created_at >= ?",
    "before": "created_at < ?",
    "changed_since": "updated_at >= ?",
    "changed_before": "updated_at < ?",
    "reason": "instr(reason, ?) > 0",
    "error": _HAS_ERROR,
    "classes": "state IN ('pending', 'running') AND resource_class IN (SELECT value FROM json_each(?))",
}
"""The condition of each field of a filter but its state, which chooses an index, and its fingerprint."""
_CREATED_FROM = "SELECT seq, created_at FROM work WHERE seq >= ? ORDER BY seq LIMIT 1"
_OF_STATE = "state = ? AND kind = ?"
_OF_A_TENANT = "tenant_id IS NOT NULL AND substr(id, instr(id, '|') + 1) = ?"
# The rule of `queue.model.work.visible_state`: running work whose owner is gone.
_LOST = (
    "(resource_class = 'router' OR lease_until NOT BETWEEN ? + 1 AND ? + lease_ms "
    "OR owner IN (SELECT value FROM json_each(?)))"
)
_LOST_CLAIMS = (
    "SELECT resource_class, count(*), min(due_at) FROM work INDEXED BY work_leased "  # noqa: S608 - constants
    f"WHERE state = 'running' AND {_LOST} GROUP BY resource_class"
)
_OF_CLASS = {
    WorkState.PENDING: ("state = 'pending' AND ready = 1", "state = 'pending' AND ready = 0"),
    WorkState.RUNNING: ("state = 'running'",),
}
# In the order in which they are named.
_OF_SEQS = f"SELECT {FULL} FROM (SELECT value AS chosen FROM json_each(?)) CROSS JOIN work ON seq = chosen"  # noqa: S608
_BY_SEQ = _AS_ONE_ROW + "(SELECT * FROM work WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq {})"  # noqa: S608

PAGE_ROWS, PAGE_BYTES = 500, 4 << 20
_BEHIND = (
    f"SELECT seq, {FULL} FROM work WHERE seq > ?1 AND seq <= (SELECT max(seq) FROM (SELECT seq, "  # noqa: S608
    "sum(length(payload) + ifnull(length(result), 0)) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) "
    f"- length(payload) - ifnull(length(result), 0) AS before FROM (SELECT seq, payload, result FROM work "
    f"WHERE seq > ?1 ORDER BY seq LIMIT {PAGE_ROWS})) WHERE before < {PAGE_BYTES}) ORDER BY seq"
)


Way = tuple[str, tuple[str | int, ...]]
"""A condition, and its values."""
_ALL_ROWS: Way = ("true", ())


class LostClaims(Struct, frozen=True):
    """The facts that identify running work without a live owner: owners that are gone, as JSON, and the steady time."""

    owners: str
    steady: int


class Wanted(Struct, frozen=True):
    """A page of a search. With `lost`, the state is the visible one."""

    match: WorkFilter
    after: str
    limit: int
    oldest_first: bool = False
    lost: LostClaims | None = None


_items = json.Decoder(list[WorkItem], strict=False)
_budget = json.Decoder(Budget)
_history = json.Decoder(tuple[HistoryEntry, ...])
_NO_BUDGET = json.encode(NO_BUDGET).decode()
_extra = json.Decoder(Extra)
_STATES = {state.value: state for state in WorkState}
_PENDING = WorkState.PENDING
_OPEN = frozenset({_PENDING, WorkState.RUNNING})


def listed(names: Iterable[str]) -> str:
    """Text that `json_each` reads."""
    return json.encode(list(names)).decode()


def column(connection: apsw.Connection, statement: str, *values: Any) -> list[Any]:
    """The values of a query that has one column."""
    return [value for (value,) in query(connection, statement, values)]


def load(connection: apsw.Connection, ids: list[str]) -> dict[str, WorkItem]:
    """The items of these ids, without payloads."""
    return {item.id: item for item in _decoded(connection, _LOAD, (listed(ids),))}


def cached_or_loaded(transaction: Transaction, ids: list[str]) -> dict[str, WorkItem]:
    """The items of these ids, from the write cache where it has them. Their payloads may be missing."""
    found, rest = transaction.cache.items.find(ids)
    return found | load(transaction.connection, rest) if rest else found


def expired(connection: apsw.Connection, steady: int, classes: Sequence[str] = ()) -> list[WorkItem]:
    """Items (of these classes, when any is named) whose owner let its lease run out, without payloads."""
    if not query(connection, _IS_EXPIRED, (steady,)).get:
        return []
    return _decoded(connection, _EXPIRED, (steady, listed(classes)))


def by_id(connection: apsw.Connection, table: str, way: Way, limit: int) -> list[WorkItem]:
    """Items of the table, with its index, that meet this condition, in the order of their ids, without payloads."""
    where, values = way
    chosen = f"(SELECT * FROM {table} WHERE {where} ORDER BY id LIMIT ?)"  # noqa: S608 - constants
    return _decoded(connection, _AS_ONE_ROW + chosen, (*values, limit))


def searched(connection: apsw.Connection, wanted: Wanted) -> WorkPage:
    """
    A page of the items that match the filter of a search, without payloads, all of one snapshot.

    Where indexes lead to all that the filter asks for, no statement reads more rows than it returns. Otherwise rows are
    read in the order of the page, each with the answer whether it matches: few at first, then more, and no more than
    `SCANNED` or `LOOKED_UP` in all. With several ways each has its share of the rows; rows beyond the nearest end of a
    share are left to the next pass.
    """
    connection.execute("BEGIN")
    try:
        bounds, values = _bounds(connection, wanted)
        ways = _ways_to(connection, wanted) if None not in values else []
        found, end = list[int](), None
        order = "ASC" if wanted.oldest_first else "DESC"
        is_indexed = conditions(wanted.match, but=_BY_INDEX) == _ALL_ROWS and not _ways_to_few(wanted.match)
        sizes = SCANNED if ways == [_ALL_ROWS] else LOOKED_UP
        for size in sizes if ways and not is_indexed else ():
            read, end = _scanned(connection, wanted, ways, (bounds, values, end), size)
            found += read
            if end is None or len(found) >= wanted.limit:
                break
        for where, of_way in ways if is_indexed else ():
            found += column(connection, _PAGE.format(where + bounds, order), *of_way, *values, wanted.limit)
        if is_indexed:
            found.sort(reverse=not wanted.oldest_first)
        chosen = found[: wanted.limit]
        last = chosen[-1] if chosen and len(found) >= wanted.limit else end
        after = "" if last is None else query(connection, "SELECT id FROM work WHERE seq = ?", (last,)).get
        items = _decoded(connection, _BY_SEQ.format(order), (json.encode(chosen).decode(),)) if chosen else []
        wanted_one = wanted.match.fingerprint
        return WorkPage([one for one in items if wanted_one in (None, fingerprint_of(one))], after)
    finally:
        connection.execute("COMMIT")


def _scanned(
    connection: apsw.Connection,
    wanted: Wanted,
    ways: list[Way],
    bounds: tuple[str, list[int | None], int | None],
    size: int,
) -> tuple[list[int], int | None]:
    """The matching rows among the next `size` rows of these ways, and the row up to which they are complete; None for
    all. The bounds are those of the page, and the row up to which was read before."""
    where, values, start = bounds
    side, order, furthest = (">", "ASC", "max") if wanted.oldest_first else ("<", "DESC", "min")
    nearest = min if wanted.oldest_first else max
    matches, of_match = conditions(wanted.match, but=_BY_INDEX)
    if start is not None:
        where, values = f"{where} AND seq {side} ?", [*values, start]
    share, found, ends = max(_LEAST_SHARE, size // len(ways)), list[int](), list[int]()
    for way, of_way in ways:
        statement = _SCAN.format(matches, way + where, order, furthest)
        number, last, of_part = query(connection, statement, (*of_match, *of_way, *values, share)).get
        found += json.decode(of_part, type=list[int])
        if number == share:
            ends.append(last)
    found.sort(reverse=not wanted.oldest_first)
    end = nearest(ends) if ends else None
    return found if end is None else [seq for seq in found if nearest(seq, end) == seq], end


_BY_INDEX = frozenset({"ids", "kind", "assignment_id", "correlation_id", "trace_id", "since", "before", "classes"})


def conditions(match: WorkFilter, *, but: Collection[str] = ()) -> Way:
    """The conditions of a filter, without those of some fields."""
    parts, values = ["true"], list[str | int]()
    for name, words in _CONDITIONS.items():
        value = getattr(match, name)
        if name not in but and value != getattr(EVERYTHING, name):
            value = listed(value) if name in ("ids", "classes") else in_small(value) if name == "error" else value
            parts.append(words)
            values += [value] * words.count("?")
    return " AND ".join(parts), tuple(values)


def _bounds(connection: apsw.Connection, wanted: Wanted) -> tuple[str, list[int | None]]:
    """Conditions for a page that is not the first, or since a time. An `after` that is gone has the value None."""
    bounds, values = "", list[int | None]()
    if wanted.after:
        bounds += f" AND seq {'>' if wanted.oldest_first else '<'} ?"
        values.append(query(connection, "SELECT seq FROM work WHERE id = ?", (wanted.after,)).get)
    if since := wanted.match.since:
        bounds += " AND seq >= ? AND created_at >= ?"
        values += [_first_since(connection, since), since]
    if wanted.match.before is not None:
        bounds += " AND seq < ? AND created_at < ?"
        values += [_first_since(connection, wanted.match.before), wanted.match.before]
    return bounds, values


def _first_since(connection: apsw.Connection, since: int) -> int:
    """A row before which none was created since this time. Rows are created in the order of their numbers."""
    low, high = 1, (query(connection, "SELECT max(seq) FROM work").get or 0) + 1
    while low < high:
        middle = (low + high) // 2
        seq, created_at = query(connection, _CREATED_FROM, (middle,)).fetchone() or (high, since)
        low, high = (seq + 1, high) if created_at < since else (low, middle)
    return low


def _ways_to(connection: apsw.Connection, wanted: Wanted) -> list[Way]:
    """Conditions that together meet what is wanted, each of them the beginning of an index."""
    state_wanted, kind_wanted = wanted.match.state, wanted.match.kind
    if classes := wanted.match.classes:
        kind = "" if kind_wanted is None else " AND kind = ?"
        states = _OF_CLASS if state_wanted is None else {state_wanted}
        places = [place for state in states for place in _OF_CLASS.get(state, ())]
        values = () if kind_wanted is None else (kind_wanted,)
        return [(f"{one} AND resource_class = ?{kind}", (name, *values)) for one in places for name in classes]
    if few := _ways_to_few(wanted.match):
        condition, of_state = _in_state(wanted)
        return [(f"{where}{condition}", (*values, *of_state)) for where, values in few]
    if state_wanted is None and kind_wanted is None:
        return [_ALL_ROWS]
    ways: list[Way] = []
    for state in WorkState if state_wanted is None else (state_wanted,):
        kinds = [kind_wanted] if kind_wanted is not None else column(connection, _KINDS, str(state))
        ways += [(_OF_STATE, (str(state), kind)) for kind in kinds]
    if wanted.lost is None or state_wanted not in (WorkState.PENDING, WorkState.RUNNING):
        return ways
    lost: tuple[str | int, ...] = (wanted.lost.steady, wanted.lost.steady, wanted.lost.owners)
    if state_wanted is WorkState.RUNNING:
        return [(f"{where} AND NOT {_LOST}", (*values, *lost)) for where, values in ways]
    running = structs.replace(wanted.match, state=WorkState.RUNNING)
    ways_to_running = _ways_to(connection, structs.replace(wanted, match=running, lost=None))
    return ways + [(f"{where} AND {_LOST}", (*values, *lost)) for where, values in ways_to_running]


def _ways_to_few(match: WorkFilter) -> list[Way]:
    """Conditions of a filter that matches few rows, found by an index of its own; none for other filters."""
    if match.ids is not None:
        return [conditions(match, but={"since", "before"})]
    if match.assignment_id is not None:
        named = (record_id(match.assignment_id, None),)
        more, values = "", tuple[str, ...]()
        for name in ("correlation_id", "trace_id"):
            if (value := getattr(match, name)) is not None:
                more, values = f"{more} AND +{name} = ?", (*values, value)
        return [(f"id = ?{more}", (*named, *values)), (_OF_A_TENANT + more, (match.assignment_id, *values))]
    if match.correlation_id is not None and match.trace_id is not None:
        return [("correlation_id = ? AND +trace_id = ?", (match.correlation_id, match.trace_id))]
    if match.correlation_id is not None:
        return [("correlation_id = ?", (match.correlation_id,))]
    return [] if match.trace_id is None else [("trace_id = ?", (match.trace_id,))]


def _in_state(wanted: Wanted) -> Way:
    """The condition for the kind and the state that are wanted, which leads to no index."""
    parts, values, state = "", list[str | int](), wanted.match.state
    if wanted.match.kind is not None:
        parts, values = " AND +kind = ?", [wanted.match.kind]
    if state is None:
        return parts, tuple(values)
    if wanted.lost is None or state not in (WorkState.PENDING, WorkState.RUNNING):
        return f"{parts} AND +state = ?", (*values, str(state))
    lost: tuple[str | int, ...] = (wanted.lost.steady, wanted.lost.steady, wanted.lost.owners)
    is_lost = f"(+state = 'running' AND {_LOST})"
    words = (
        f"(+state = 'pending' OR {is_lost})"
        if state is WorkState.PENDING
        else f"(+state = 'running' AND NOT {is_lost})"
    )
    return f"{parts} AND {words}", (*values, *lost)


def snapshot(connection: apsw.Connection, lost: LostClaims, wall: int) -> WorkSnapshot:
    """The queue at one moment, by class and visible state."""
    connection.execute("BEGIN")
    try:
        counts: dict[str, dict[WorkState, int]] = {}
        for name, state, number in query(connection, "SELECT resource_class, state, number FROM work_count"):
            counts.setdefault(name, {})[WorkState(state)] = number
        due = dict[str, int](query(connection, _OLDEST_DUE))
        for name, number, due_at in query(connection, _LOST_CLAIMS, (lost.steady, lost.steady, lost.owners)):
            of_class = counts[name]
            of_class[WorkState.PENDING] = of_class.get(WorkState.PENDING, 0) + number
            of_class[WorkState.RUNNING] -= number
            if not of_class[WorkState.RUNNING]:
                del of_class[WorkState.RUNNING]
            due[name] = min(due_at, due.get(name, due_at))
        return WorkSnapshot(counts, {name: wall - due_at for name, due_at in due.items() if due_at <= wall})
    finally:
        connection.execute("COMMIT")


def classes_with(connection: apsw.Connection, states: Sequence[str]) -> list[str]:
    """The resource classes that have items in one of these states."""
    return column(connection, _CLASSES, listed(states))


def one(connection: apsw.Connection, work_id: str) -> WorkItem | None:
    """The item of this id with its payload, if there is one."""
    row = query(connection, f"SELECT {FULL} FROM work WHERE id = ?", (work_id,)).fetchone()  # noqa: S608
    return None if row is None else item_of(row)


def keep_notes(transaction: Transaction, work_id: str, parts: Mapping[str, bytes]) -> None:
    """Write these parts of an item's notes."""
    for part, body in parts.items():
        transaction.connection.execute("INSERT OR REPLACE INTO work_note VALUES (?, ?, ?)", (work_id, part, body))


def notes(connection: apsw.Connection, work_id: str) -> dict[str, bytes]:
    """The parts of an item's notes."""
    return dict(query(connection, "SELECT part, body FROM work_note WHERE id = ?", (work_id,)))


def known(connection: apsw.Connection, ids: list[str]) -> set[str]:
    """The ids among these that exist already."""
    return json.decode(query(connection, _KNOWN, (listed(ids),)).get, type=set[str])


def over(connection: apsw.Connection, ids: Sequence[str]) -> list[WorkItem]:
    """The items among these ids that have their result."""
    return [item_of(row) for row in query(connection, _OVER, (listed(ids),))]


def of_seqs(connection: apsw.Connection, seqs: str) -> list[WorkItem]:
    """The items of these rows, with their payloads, in the order in which the rows are named."""
    return [item_of(row) for row in query(connection, _OF_SEQS, (seqs,)).fetchall()]


def page_behind(connection: apsw.Connection, seq: int) -> tuple[list[WorkItem], int]:
    """The next items behind a row in the order of arrival, with their payloads, and the last one's row."""
    found = query(connection, _BEHIND, (seq,)).fetchall()
    return [item_of(row[1:]) for row in found], found[-1][0] if found else seq


def insert(transaction: Transaction, items: Sequence[WorkItem]) -> None:
    """Write new items."""
    if items:
        _count(transaction, items)
        wall = transaction.now.wall
        rows = [(item.state is _PENDING and item.due_at <= wall, *_row(item)) for item in items]
        transaction.connection.executemany(_INSERT, rows)


def update(transaction: Transaction, old: Iterable[WorkItem], new: Sequence[WorkItem]) -> None:
    """Write what has changed of known items, from old to new. What the write cache has of them is dropped."""
    if not new:
        return
    transaction.counts.add(old, -1)
    _count(transaction, new)
    transaction.cache.items.drop([item.id for item in new])
    wall = transaction.now.wall
    rows = [
        (item.state is _PENDING and item.due_at <= wall, item.resource_class, *_changes(_row(item)), item.id)
        for item in new
    ]
    transaction.connection.executemany(_UPDATE, rows)


def delete(transaction: Transaction, items: Sequence[WorkItem]) -> None:
    """Remove the rows of these items."""
    if items:
        transaction.counts.add(items, -1)
        transaction.connection.execute(_DELETE, (listed(item.id for item in items),))


def _count(transaction: Transaction, items: Sequence[WorkItem]) -> None:
    """Count items as they are written. Waiters for their classes, or for their end, are woken after the commit."""
    for name, state in transaction.counts.add(items):
        # A claim is news only to those who wait for any change.
        transaction.touched.update(topics_of(name, state, end=WORK_TOPIC) or (WORK_TOPIC,))
    transaction.touched.update(END_TOPIC + item.id for item in items if item.state not in _OPEN)


def item_of(row: Sequence[Any]) -> WorkItem:
    """A full row as an item."""
    values = list(row)
    values[_STATE] = _STATES[values[_STATE]]
    values[_BUDGET] = NO_BUDGET if values[_BUDGET] == _NO_BUDGET else _budget.decode(values[_BUDGET])
    values[_HISTORY] = () if values[_HISTORY] == "[]" else _history.decode(values[_HISTORY])
    values[_EXTRA] = NO_EXTRA if values[_EXTRA] == "{}" else _extra.decode(values[_EXTRA])
    return WorkItem(*values)


_STATE = _FIELDS.index("state")
_BUDGET = _FIELDS.index("budget")
_HISTORY = _FIELDS.index("history")
_EXTRA = _FIELDS.index("extra")


def _row(item: WorkItem) -> list[Any]:
    values = list(structs.astuple(item))
    values[_BUDGET] = _NO_BUDGET if item.budget is NO_BUDGET else json.encode(item.budget).decode()
    values[_HISTORY] = json.encode(item.history).decode() if item.history else "[]"
    values[_EXTRA] = "{}" if item.extra is NO_EXTRA else json.encode(item.extra).decode()
    return values


def _decoded(connection: apsw.Connection, statement: str, values: tuple[Any, ...]) -> list[WorkItem]:
    return _items.decode(query(connection, statement, values).get)
