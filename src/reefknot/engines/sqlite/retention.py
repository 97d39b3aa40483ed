"""
Removing what is past its retention, a few rows at a time.

Reads find what may go, in pages; a short transaction removes a page of it, and looks again whether it still may: a key
that was claimed anew meanwhile stays. So neither writers nor the write-ahead log wait for a table of any size. It never
touches what lives: a key that is held, work that has not ended, the quarantine.
"""

from functools import partial
from typing import Any

import apsw
from msgspec import json

from reefknot.core.moment import Moment
from reefknot.engines.sqlite.link import Link
from reefknot.engines.sqlite.transaction import Transaction

LOOKED_AT_ONCE = 5000
REMOVED_AT_ONCE = 500

SPENT = (
    "state IN ('done', 'failed', 'released', 'in_progress') AND expires_at <= ?1 "
    "AND (state <> 'in_progress' OR (guard = 0 AND lease_until <= ?2))"
)
"""Of a key, by wall time and steady time: nobody can miss it."""
ENDED = "state IN ('succeeded', 'failed', 'cancelled', 'discarded') AND updated_at < ?1"
"""Of a piece of work, by wall time."""

_PAGE = (
    "SELECT max(seq), json_group_array(seq) FILTER (WHERE {1}) FROM "
    "(SELECT * FROM {0} WHERE seq > ?3 ORDER BY seq LIMIT ?4)"
)
_REMOVE = "DELETE FROM {0} WHERE seq IN (SELECT value FROM json_each(?3)) AND {1} RETURNING {2}"


async def purge_keys(link: Link) -> int:
    """Keys past their retention."""
    return await _purge(link, "idempotency", SPENT, link.now())


async def purge_work(link: Link, before: int) -> int:
    """Work that ended before this time."""
    return await _purge(link, "work", ENDED, Moment(steady=0, wall=before))


async def _purge(link: Link, table: str, which: str, moment: Moment) -> int:
    gone, after = 0, 0
    while True:
        last, found = await link.read(partial(_page, table=table, which=which, moment=moment, after=after))
        for first in range(0, len(found), REMOVED_AT_ONCE):
            gone += await link.write(_removes, (table, which, moment, found[first : first + REMOVED_AT_ONCE]))
        if last is None:
            return gone
        after = last


def _page(
    connection: apsw.Connection, table: str, which: str, moment: Moment, after: int
) -> tuple[int | None, list[int]]:
    values = (moment.wall, moment.steady, after, LOOKED_AT_ONCE)
    row: Any = connection.execute(_PAGE.format(table, which), values).fetchone()
    return row[0], json.decode(row[1], type=list[int])


def _removes(transaction: Transaction, wanted: list[Any]) -> list[int]:
    answers = []
    for table, which, moment, rows in wanted:
        name = "key" if table == "idempotency" else "id"
        values = (moment.wall, moment.steady, json.encode(rows).decode())
        found: Any = transaction.connection.execute(_REMOVE.format(table, which, name), values).fetchall()
        recall: Any = transaction.memory.keys if table == "idempotency" else transaction.memory.items
        for (gone,) in found:
            recall.drop(gone)
        if table == "idempotency":
            transaction.counters.keys -= len(found)
        answers.append(len(found))
    return answers


def make_room(transaction: Transaction, *, keep: list[str]) -> int:
    """Some keys past their retention, in the transaction that needs their place; none of `keep`."""
    now = transaction.now
    query = (
        f"DELETE FROM idempotency WHERE seq IN (SELECT seq FROM idempotency WHERE {SPENT} "  # noqa: S608 - our own words
        "AND key NOT IN (SELECT value FROM json_each(?3)) LIMIT ?4) RETURNING key"
    )
    values = (now.wall, now.steady, json.encode(keep).decode(), REMOVED_AT_ONCE)
    found: Any = transaction.connection.execute(query, values).fetchall()
    for (gone,) in found:
        transaction.memory.keys.drop(gone)
    transaction.counters.keys -= len(found)
    return len(found)
