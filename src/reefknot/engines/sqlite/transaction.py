"""
What all requests of one transaction share.

Fences and counts are read once and written once; events gather and are chained at the end, in the order they came.
"""

from collections.abc import Iterable
from typing import Any

import apsw

from reefknot.core.audit.chain import Head, link
from reefknot.core.idempotency import KeyRecord
from reefknot.core.moment import Moment
from reefknot.core.work import WorkItem
from reefknot.engines.sqlite.recall import Recall
from reefknot.ports.audit_log import AuditEntry

_INSERT_EVENT = "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class Memory:
    """What the writer knows without reading. It outlives a transaction and belongs to one connection."""

    __slots__ = ("_version", "items", "keys")

    def __init__(self) -> None:
        self._version: object = None
        self.keys: Recall[KeyRecord] = Recall()
        self.items: Recall[WorkItem] = Recall()

    def check(self, connection: apsw.Connection) -> None:
        """Forget everything if another connection has written. Asked inside a transaction, where nobody else can."""
        version = connection.execute("PRAGMA data_version").get
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        self.keys.clear()
        self.items.clear()

    def committed(self) -> None:
        self.keys.committed()
        self.items.committed()


class Counters:
    """The last fence given out, how many idempotency keys there are, the last command. By all processes together."""

    __slots__ = ("command", "fence", "keys")

    def __init__(self, fence: int, keys: int, command: int) -> None:
        self.fence = fence
        self.keys = keys
        self.command = command

    @property
    def values(self) -> tuple[int, int, int]:
        return self.fence, self.keys, self.command


class Transaction:
    """One write transaction under way. It lives in the writer's thread."""

    __slots__ = ("_counters", "_entries", "_saved", "connection", "memory", "now", "touched")

    def __init__(self, connection: apsw.Connection, now: Moment, memory: Memory) -> None:
        self.connection = connection
        self.now = now
        self.memory = memory
        self.touched: set[str] = set()
        self._entries: list[AuditEntry] = []
        self._counters: Counters | None = None
        self._saved: tuple[int, int, int] = (0, 0, 0)

    def tell(self, entries: Iterable[AuditEntry]) -> None:
        """Keep these events with this transaction."""
        self._entries += entries

    @property
    def counters(self) -> "Counters":
        """Read when they are first asked for, written at the end if they have changed."""
        if self._counters is None:
            row: Any = self.connection.execute("SELECT fence, keys, command FROM counter").fetchone()
            self._saved = row
            self._counters = Counters(*row)
        return self._counters

    def flush(self) -> None:
        """Write what was shared, right before the commit."""
        if self._counters is not None and self._counters.values != self._saved:
            self.connection.execute("UPDATE counter SET fence = ?, keys = ?, command = ?", self._counters.values)
        if self._entries:
            self.chain()

    def chain(self) -> Head:
        """Write the events gathered so far, and tell where the chain stands."""
        row: Any = self.connection.execute("SELECT chain, sequence, hash FROM audit_head").fetchone()
        head = Head(*row)
        if not self._entries:
            return head
        rows = []
        for entry in self._entries:
            head, hashed = link(head, entry.body)
            rows.append(
                (
                    head.sequence,
                    hashed,
                    entry.at,
                    entry.event_type,
                    entry.correlation_id,
                    entry.trace_id,
                    entry.work_id,
                    entry.body.decode(),
                )
            )
        self.connection.executemany(_INSERT_EVENT, rows)
        self.connection.execute("UPDATE audit_head SET sequence = ?, hash = ?", (head.sequence, head.hash))
        self._entries.clear()
        self.touched.add("audit")
        return head
