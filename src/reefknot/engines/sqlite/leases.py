"""The leases of a SQLite store."""

from collections.abc import Collection
from typing import Any

import apsw
from msgspec import json

from reefknot.engines.sqlite.link import Link
from reefknot.engines.sqlite.transaction import Transaction

_OWNERS = "SELECT DISTINCT owner FROM work INDEXED BY work_leased WHERE state = 'running' ORDER BY owner"
_END = (
    "UPDATE work INDEXED BY work_leased SET lease_until = 0 "
    "WHERE state = 'running' AND owner IN (SELECT value FROM json_each(?))"
)


class SqliteLeases:
    """Over the work of one file."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def owners(self) -> list[str]:
        return await self._link.read(_owners)

    async def end(self, owners: Collection[str]) -> int:
        if not owners:
            return 0
        ended: int = await self._link.write(_ends, json.encode(sorted(owners)).decode())
        return ended


def _owners(connection: apsw.Connection) -> list[str]:
    found: Any = connection.execute(_OWNERS)
    return [owner for (owner,) in found]


def _ends(transaction: Transaction, wanted: list[str]) -> list[int]:
    answers = []
    for owners in wanted:
        transaction.connection.execute(_END, (owners,))
        answers.append(transaction.connection.changes())
    transaction.memory.clear()  # what is remembered of these items has the old lease in it
    transaction.touched.add("work")
    return answers
