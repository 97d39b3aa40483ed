"""
What this process wrote last, so that it need not be read back.

A key that was just claimed is about to be finished, an item that was just claimed about to be settled. As long as
`PRAGMA data_version` says that no other connection has written since, the record in memory is the record in the file.
Notes of a transaction count within it at once, and beyond it only after its commit.

Many rows, few statements.

Every statement that runs hands the interpreter's lock over and has to get it back, which beside a busy loop takes long.
So one statement takes several rows. It knows nothing of what they mean.

What all requests of one transaction share.

Fences and counts are read once and written once; events gather and are chained at the end, in the order they came.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import apsw

from reefknot.core.audit.chain import Head, link
from reefknot.core.idempotency import KeyRecord
from reefknot.core.time import Moment
from reefknot.core.work import WorkItem
from reefknot.ports.audit_log import AuditEntry

R = TypeVar("R")

LARGEST = 10_000


class Recall(Generic[R]):
    """Records by name. Dropping one is always safe: it is read from the file then."""

    __slots__ = ("_kept", "_noted")

    def __init__(self) -> None:
        self._kept: dict[str, R] = {}
        self._noted: dict[str, R | None] = {}

    def get(self, name: str) -> R | None:
        """The record as it stands inside the transaction, None when it has to be read."""
        noted = self._noted
        return noted[name] if noted and name in noted else self._kept.get(name)

    def note(self, name: str, record: R) -> None:
        self._noted[name] = record

    def drop(self, name: str) -> None:
        self._noted[name] = None

    def clear(self) -> None:
        """Somebody else has written, or what was written is not known."""
        self._kept.clear()
        self._noted.clear()

    def committed(self) -> None:
        """What was noted is in the file."""
        for name, record in self._noted.items():
            if record is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = record
        self._noted.clear()
        if len(self._kept) > LARGEST:
            self._kept.clear()


SIZES = (32, 8, 1)
"""Rows of one statement. More in one are slower again; few sizes, because SQLite prepares each once."""


class Grouped:
    """
    A statement for any number of rows. `template` has one place, for the rows' values.

    An insert has to say `OR ROLLBACK`: SQLite then needs no way back to the middle of the transaction, and keeps no
    copy of every page it touches. The writer gives the whole transaction up on an error in any case.
    """

    __slots__ = ("texts",)

    def __init__(self, template: str, *, width: int) -> None:
        row = f"({', '.join('?' * width)})"
        self.texts = [(size, template.format(", ".join([row] * size))) for size in SIZES]

    def run(self, connection: apsw.Connection, rows: Sequence[Sequence[Any]]) -> None:
        at, number = 0, len(rows)
        for size, text in self.texts:
            while number - at >= size:
                connection.execute(text, tuple(chain.from_iterable(rows[at : at + size])))
                at += size


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
