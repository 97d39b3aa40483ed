"""Rows of the work table: written, read, and turned into items. Payloads are only read where they are wanted."""

from collections.abc import Iterable, Sequence
from typing import Any

import apsw
from msgspec import json, structs

from reefknot.core.work import Budget, HistoryEntry, WorkItem, WorkState
from reefknot.engines.sqlite.connection import query
from reefknot.engines.sqlite.transaction import Transaction

_FIELDS = WorkItem.__struct_fields__
FULL = ", ".join(_FIELDS)
"""Every field, the payload last."""

_NESTED = {"budget": "json(budget)", "history": "json(history)"}
_LIGHT = ", ".join(_NESTED.get(name, name) for name in _FIELDS[:-1])
_AS_ONE_ROW = f"SELECT json_group_array(json_array({_LIGHT})) FROM "  # noqa: S608 - our own column names
_LOAD = _AS_ONE_ROW + "work WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
_KNOWN = "SELECT json_group_array(id) FROM work WHERE id IN (SELECT value FROM json_each(?))"
# Named, because the planner would rather walk the whole table in the order of seq.
_EXPIRED = (
    _AS_ONE_ROW  # noqa: S608 - our own column names
    + "(SELECT * FROM work INDEXED BY work_leased WHERE state = 'running' AND lease_until <= ?1 "
    "AND (?2 = '[]' OR resource_class IN (SELECT value FROM json_each(?2))) ORDER BY seq)"
)
_INSERT = f"INSERT INTO work (ready, {FULL}) VALUES ({', '.join('?' * (len(_FIELDS) + 1))})"  # noqa: S608

# Identity and payload never change.
_CHANGING = _FIELDS[_FIELDS.index("state") : -1]
_FIRST_CHANGING = _FIELDS.index("state")
_UPDATE = (
    f"UPDATE work SET ready = ?, resource_class = ?, {', '.join(f'{name} = ?' for name in _CHANGING)} WHERE id = ?"  # noqa: S608
)
_OVER = (
    f"SELECT {FULL} FROM work WHERE id IN (SELECT value FROM json_each(?)) "  # noqa: S608 - our own column names
    "AND state NOT IN ('pending', 'running')"
)

CLASS_TOPIC = "work in "
"""Before the name of a class: the topic of those who wait for something to claim there."""
ENDED_TOPIC = "work ended"

_items = json.Decoder(list[WorkItem], strict=False)
_budget = json.Decoder(Budget)
_history = json.Decoder(tuple[HistoryEntry, ...])
_BLANK = Budget()
_NO_BUDGET = json.encode(_BLANK).decode()
_STATES = {state.value: state for state in WorkState}


def listed(names: Iterable[str]) -> str:
    """Text that `json_each` reads."""
    return json.encode(list(names)).decode()


def column(connection: apsw.Connection, statement: str, *values: Any) -> list[Any]:
    """The values of a query that has one column."""
    return [value for (value,) in query(connection, statement, *values)]


def load(connection: apsw.Connection, ids: list[str]) -> dict[str, WorkItem]:
    """The items of these ids, without payloads."""
    return {item.id: item for item in _decoded(connection, _LOAD, (listed(ids),))}


def cached_or_loaded(transaction: Transaction, ids: list[str]) -> dict[str, WorkItem]:
    """The items of these ids, from the write cache where it has them. Payloads are not to be relied on."""
    cached = transaction.cache.items.get
    found = {work_id: item for work_id in ids if (item := cached(work_id)) is not None}
    rest = [work_id for work_id in ids if work_id not in found]
    return found | load(transaction.connection, rest) if rest else found


def expired(connection: apsw.Connection, steady: int, classes: Sequence[str] = ()) -> list[WorkItem]:
    """Items (of these classes, when any is named) whose owner let its lease run out, without payloads."""
    return _decoded(connection, _EXPIRED, (steady, listed(classes)))


def page(connection: apsw.Connection, where: Sequence[str], values: Sequence[Any], limit: int) -> list[WorkItem]:
    """Items in the order of their ids, without payloads."""
    chosen = f"(SELECT * FROM work WHERE {' AND '.join(where)} ORDER BY id LIMIT ?)"  # noqa: S608 - our own words
    return _decoded(connection, _AS_ONE_ROW + chosen, (*values, limit))


def one(connection: apsw.Connection, work_id: str) -> WorkItem | None:
    """The item of this id with its payload, if there is one."""
    row = query(connection, f"SELECT {FULL} FROM work WHERE id = ?", work_id).fetchone()  # noqa: S608
    return None if row is None else item_of(row)


def known(connection: apsw.Connection, ids: list[str]) -> set[str]:
    """Which of these ids are there already."""
    return json.decode(query(connection, _KNOWN, listed(ids)).get, type=set[str])


def over(connection: apsw.Connection, ids: Sequence[str]) -> list[WorkItem]:
    """The items among these ids that have their result."""
    return [item_of(row) for row in query(connection, _OVER, listed(ids))]


def insert(transaction: Transaction, items: Sequence[WorkItem]) -> None:
    """Write new items."""
    if items:
        transaction.connection.executemany(_INSERT, [(_is_ready(transaction, item), *_row(item)) for item in items])


def update(transaction: Transaction, items: Sequence[WorkItem]) -> None:
    """Write what has changed of known items. What the write cache has of them is dropped."""
    if not items:
        return
    drop = transaction.cache.items.drop
    rows = []
    for item in items:
        ready = _is_ready(transaction, item)
        rows.append((ready, item.resource_class, *_row(item)[_FIRST_CHANGING:-1], item.id))
        drop(item.id)
    transaction.connection.executemany(_UPDATE, rows)


def _is_ready(transaction: Transaction, item: WorkItem) -> bool:
    """Whether the item can be claimed now. Whoever waits for its class, or for its end, is woken after the commit."""
    if item.state is not WorkState.PENDING:
        transaction.touched.add("work" if item.state is WorkState.RUNNING else ENDED_TOPIC)
        return False
    transaction.touched.add(CLASS_TOPIC + item.resource_class)
    return item.due_at <= transaction.now.wall


def item_of(row: Sequence[Any]) -> WorkItem:
    """A full row as an item."""
    values = list(row)
    values[_STATE] = _STATES[values[_STATE]]
    values[_BUDGET] = _BLANK if values[_BUDGET] == _NO_BUDGET else _budget.decode(values[_BUDGET])
    values[_HISTORY] = () if values[_HISTORY] == "[]" else _history.decode(values[_HISTORY])
    return WorkItem(*values)


_STATE = _FIELDS.index("state")
_BUDGET = _FIELDS.index("budget")
_HISTORY = _FIELDS.index("history")


def _row(item: WorkItem) -> list[Any]:
    values = list(structs.astuple(item))
    values[_BUDGET] = _NO_BUDGET if item.budget == _BLANK else json.encode(item.budget).decode()
    values[_HISTORY] = json.encode(item.history).decode() if item.history else "[]"
    return values


def _decoded(connection: apsw.Connection, statement: str, values: tuple[Any, ...]) -> list[WorkItem]:
    return _items.decode(query(connection, statement, *values).get)
