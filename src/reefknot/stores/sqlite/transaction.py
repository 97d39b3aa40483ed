"""
Write transactions: `Transaction` is shared by all requests of a batch; `BulkStatement` and `WriteCache` make it cheap.

A transaction reads counters once and writes them once; events gather in it and are chained at the end, in order. A bulk
statement writes many rows with few statements: every statement gives up the interpreter's lock and has to get it back,
which takes long while a loop is busy. A write cache keeps what this process wrote last, so that it need not be read
back: a key that was just claimed is about to be finished, an item that was just claimed about to be settled. As long as
`PRAGMA data_version` says that no other connection has written, a cached record is the record in the file.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar, TypeVarTuple

import apsw
from msgspec import Struct, structs

from reefknot.audit.model.chain import Head, link
from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.errors import ReefknotError
from reefknot.idempotency.model import KeyRecord
from reefknot.queue.model.work import WorkItem, WorkState, stage_of
from reefknot.runtime.sqlite_files import close_connection, immediate
from reefknot.stores.sqlite.wait_table import AUDIT_TOPIC

_Key = tuple[Any, ...]
_counted = attrgetter("resource_class", "state", "pool", "priority", "tenant_id", "reason", "kind", "source")

COLUMNS = {
    "work_count": ("resource_class", "state"),
    "open_work": ("pool", "stage", "priority", "tenant"),
    "quarantine_count": ("kind", "source", "reason"),
}
"""The tables of numbers, each with the columns that its rows are counted by."""
_STAGE = (
    "CASE WHEN resource_class = 'router' AND state = 'pending' AND reason = 'scheduled' THEN 'scheduled' "
    "WHEN resource_class = 'router' THEN 'submitted' WHEN state = 'pending' THEN 'queued' ELSE 'running' END"
)
COUNTED = {
    "work_count": "SELECT resource_class, state, count(*) FROM work GROUP BY 1, 2",
    "open_work": (
        f"SELECT pool, {_STAGE}, priority, ifnull(tenant_id, ''), count(*) FROM work "  # noqa: S608 - our own words
        "WHERE state IN ('pending', 'running') GROUP BY 1, 2, 3, 4"
    ),
    "quarantine_count": (
        "SELECT kind, source, reason, count(*) FROM work INDEXED BY work_quarantined "
        "WHERE state = 'quarantined' GROUP BY 1, 2, 3"
    ),
}
"""The same numbers, counted row by row."""


def _statements(table: str, columns: tuple[str, ...]) -> tuple[str, str]:
    places = ", ".join("?" * len(columns))
    changed = f"INSERT INTO {table} VALUES ({places}, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number"  # noqa: S608
    removed = f"DELETE FROM {table} WHERE ({', '.join(columns)}) = ({places}) AND number <= 0"  # noqa: S608
    return changed, removed


_STATEMENTS = {table: _statements(table, columns) for table, columns in COLUMNS.items()}


class WorkCounts:
    """The changes of the numbers of work rows within a transaction."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, items: Iterable[WorkItem], number: int = 1) -> set[tuple[str, WorkState]]:
        """Add these rows to the counts; with a number of -1 subtract them. Returns the classes and states they have."""
        numbers, counted = self._numbers, Counter(map(_counted, items))
        for key, found in counted.items():
            numbers[key] = numbers.get(key, 0) + number * found
        return {key[:2] for key in counted}

    def start(self, items: Iterable[WorkItem]) -> None:
        """Count these running rows, which were pending."""
        numbers = self._numbers
        for key, found in Counter(map(_counted, items)).items():
            before = (key[0], WorkState.PENDING, *key[2:])
            numbers[key] = numbers.get(key, 0) + found
            numbers[before] = numbers.get(before, 0) - found

    def flush(self, connection: apsw.Connection) -> None:
        """Write what was gathered."""
        if not self._numbers:
            return
        changes: dict[tuple[str, _Key], int] = {}
        for (resource_class, state, pool, priority, tenant, reason, kind, source), number in self._numbers.items():
            counted: list[tuple[str, _Key]] = [("work_count", (resource_class, state))]
            stage = stage_of(WorkItem("", kind, resource_class, state=state, reason=reason))
            if stage is not None:
                counted.append(("open_work", (pool, stage, priority, tenant or "")))
            elif state is WorkState.QUARANTINED:
                counted.append(("quarantine_count", (kind, source, reason)))
            for one in counted:
                changes[one] = changes.get(one, 0) + number
        self._numbers.clear()
        for (table, key), number in changes.items():
            change, remove = _STATEMENTS[table]
            if number:
                connection.execute(change, (*key, number))
            if number < 0:
                connection.execute(remove, key)


def wrong_counts(connection: apsw.Connection) -> list[str]:
    """The tables whose numbers are not those of the rows."""
    connection.execute("BEGIN")  # one snapshot
    try:
        return [
            table
            for table, columns in COLUMNS.items()
            if set(connection.execute(f"SELECT {', '.join(columns)}, number FROM {table}"))  # noqa: S608
            != set(connection.execute(COUNTED[table]))
        ]
    finally:
        connection.execute("COMMIT")


def recount(connection: apsw.Connection) -> None:
    """Count all rows again, inside the caller's transaction."""
    for table, counted in COUNTED.items():
        connection.execute(f"DELETE FROM {table}; INSERT INTO {table} {counted}")  # noqa: S608 - our own words


A = TypeVar("A")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

StoredKey = tuple[int, KeyRecord]
"""The number of a key's row, and the record in it."""

LARGEST = 10_000
"""Records a cache may hold; a larger one is emptied."""


class WriteCache(Generic[R]):
    """
    Records this process wrote last, by name. Dropping one is always safe: it is read from the file then.

    Changes noted by a transaction count within it at once, and outside only after its commit.
    """

    __slots__ = ("_kept", "_noted")

    def __init__(self) -> None:
        self._kept: dict[str, R] = {}
        self._noted: dict[str, R | None] = {}

    def find(self, names: Iterable[str]) -> tuple[dict[str, R], list[str]]:
        """The records as of this transaction, and the names of those that have to be read."""
        kept, noted = self._kept, self._noted
        found: dict[str, R] = {}
        rest: list[str] = []
        for name in names:
            record = noted[name] if name in noted else kept.get(name)
            if record is None:
                rest.append(name)
            else:
                found[name] = record
        return found, rest

    def note(self, records: Mapping[str, R | None]) -> None:
        """Keep these; one that is None is dropped."""
        self._noted.update(records)

    def drop(self, names: Iterable[str]) -> None:
        self._noted.update(dict.fromkeys(names))

    def clear(self) -> None:
        """Forget everything: another connection has written, or the outcome of a write is not known."""
        self._kept.clear()
        self._noted.clear()

    def committed(self) -> None:
        """Keep what was noted: it is in the file now."""
        for name, record in self._noted.items():
            if record is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = record
        self._noted.clear()
        if len(self._kept) > LARGEST:
            self._kept.clear()


class RecordCaches:
    """The caches of one writer's connection: idempotency keys and work items."""

    __slots__ = ("_version", "counters", "items", "keys", "last_tenant")

    def __init__(self) -> None:
        self._version: object = None
        self.counters: tuple[int, ...] = ()
        """The counters as the last transaction wrote them; empty when they have to be read."""
        self.last_tenant = ""
        """The tenant whose work was claimed last; the tenant after it has the next turn."""
        self.keys: WriteCache[StoredKey] = WriteCache()
        self.items: WriteCache[WorkItem] = WriteCache()

    def check(self, connection: apsw.Connection) -> None:
        """Forget everything if another connection has written. Called inside a transaction, where none can."""
        version = connection.execute("PRAGMA data_version").get
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        self.counters = ()
        self.keys.clear()
        self.items.clear()

    def committed(self) -> None:
        self.keys.committed()
        self.items.committed()


SIZES = (32, 8, 1)
"""Rows per statement. Larger statements are slower again; few sizes, because SQLite prepares each once."""


class BulkStatement:
    """
    A statement for any number of rows. `template` has one `{}`, for the rows' values.

    An insert has to say `OR ROLLBACK`: SQLite then never rolls back to the middle of the transaction, and keeps no copy
    of every page it touches. The writer gives up the whole transaction on an error in any case. `single` is a simpler
    statement for one row.
    """

    __slots__ = ("texts",)

    def __init__(self, template: str, *, width: int, single: str = "") -> None:
        row = f"({', '.join('?' * width)})"
        self.texts = [(size, template.format(", ".join([row] * size))) for size in SIZES]
        if single:
            self.texts[-1] = (1, single)

    def run(self, connection: apsw.Connection, rows: Sequence[Sequence[Any]]) -> None:
        at, number = 0, len(rows)
        for size, text in self.texts:
            while number - at >= size:
                connection.execute(text, tuple(chain.from_iterable(rows[at : at + size])))
                at += size


_READ_COUNTERS = "SELECT fence, keys, command FROM counter"
_SAVE_COUNTERS = "UPDATE counter SET fence = ?, keys = ?, command = ?, transactions = transactions + ?, steady = ?"
_COUNT_NEWS = "UPDATE counter SET transactions = transactions + 1, steady = ?"


class StoreCounters(Struct):
    """Last fence, number of idempotency keys, last command sequence: counted by all processes together."""

    fence: int
    keys: int
    command: int


_INSERT_EVENT = "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_indexed = attrgetter("at", "event_type", "correlation_id", "trace_id", "work_id")
EVENTS_PER_BLOCK = 1024
"""Events that share a row of `audit_block`, which has the times of the latest and the earliest of them."""
_EXTEND_BLOCK = (
    "INSERT INTO audit_block VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
    "latest_at = max(latest_at, excluded.latest_at), earliest_at = min(earliest_at, excluded.earliest_at)"
)


class Transaction:
    """An open write transaction. `touched` collects the topics it changes, whose waiters are woken."""

    __slots__ = ("_counters", "_events", "_saved", "at_end", "cache", "connection", "counts", "now", "touched")

    def __init__(self, connection: apsw.Connection, now: Moment, cache: RecordCaches) -> None:
        self.connection = connection
        self.now = now
        self.cache = cache
        self.touched: set[str] = set()
        self.counts = WorkCounts()
        self.at_end: list[Callable[[], None]] = []
        """What is to be done after all requests of the transaction."""
        self._events: list[AuditEntry] = []
        self._counters: StoreCounters | None = None
        self._saved: tuple[int, ...] = ()

    def add_events(self, events: Iterable[AuditEntry]) -> None:
        """Append these events to the audit log with this transaction."""
        self._events += events

    @property
    def counters(self) -> StoreCounters:
        """The counters, read at first use, written by `flush` if they have changed."""
        if self._counters is None:
            read: Any = self.cache.counters or self.connection.execute(_READ_COUNTERS).get
            self._saved = read
            self._counters = StoreCounters(*self._saved)
        return self._counters

    def flush(self) -> None:
        """
        Write counts, counters and events, right before the commit.

        A transaction that touched no topic is not counted: no waiter of another process needs to check it.
        """
        for act in self.at_end:
            act()
        self.counts.flush(self.connection)
        is_news = bool(self.touched or self._events)
        counters = () if self._counters is None else structs.astuple(self._counters)
        if counters != self._saved:
            self.connection.execute(_SAVE_COUNTERS, (*counters, is_news, self.now.steady))
            self.cache.counters = counters  # forgotten if the commit fails
        elif is_news:
            self.connection.execute(_COUNT_NEWS, (self.now.steady,))
        if self._events:
            self.flush_events()

    def flush_events(self) -> Head:
        """Write the events added so far. Returns the head of the chain."""
        row: Any = self.connection.execute("SELECT chain, sequence, hash FROM audit_head").fetchone()
        head = Head(*row)
        if not self._events:
            return head
        rows = []
        blocks: dict[int, tuple[int, int]] = {}
        for entry in self._events:
            head, hashed = link(head, entry.body)
            rows.append((head.sequence, hashed, *_indexed(entry), entry.body.decode()))
            block = head.sequence // EVENTS_PER_BLOCK
            latest, earliest = blocks.get(block, (entry.at, entry.at))
            blocks[block] = max(entry.at, latest), min(entry.at, earliest)
        self.connection.executemany(_INSERT_EVENT, rows)
        self.connection.executemany(_EXTEND_BLOCK, [(block, *times) for block, times in blocks.items()])
        self.connection.execute("UPDATE audit_head SET sequence = ?, hash = ?", (head.sequence, head.hash))
        self._events.clear()
        self.touched.add(AUDIT_TOPIC)
        return head


Handler = Callable[[Transaction, list[A]], Sequence[R | ReefknotError]]
"""All requests of one kind in, one answer for each out."""


def write_apart(
    connect: Callable[[], apsw.Connection], now: Callable[[], Moment], handler: Handler[A, R], requests: list[A]
) -> set[str]:
    """
    Write requests in a transaction of its own, on a connection of its own, as another process would.

    For threads without the loop that the writer answers to, and while that loop is blocked. Returns the topics that it
    has touched.
    """
    connection = connect()
    try:
        with immediate(connection):
            transaction = Transaction(connection, now(), RecordCaches())
            handler(transaction, requests)
            transaction.flush()
        return transaction.touched
    finally:
        close_connection(connection)


def each(handle: Callable[[Transaction, *Ts], R]) -> Callable[[Transaction, list[tuple[*Ts]]], list[R]]:
    """A handler for the writer that answers the requests of a batch one by one; a request is a tuple of arguments."""

    def handle_batch(transaction: Transaction, batch: list[tuple[*Ts]]) -> list[R]:
        return [handle(transaction, *request) for request in batch]

    return handle_batch
