"""
Rows of messages and of listeners: written, read, counted, removed.

Transactions come one after the other, so a higher number was always committed later: a reader that has seen a number
misses nothing before it. Times are those of the steady clock, which all processes of the machine share.
"""

from collections.abc import Set as AbstractSet

import apsw
from msgspec import Struct, json

from reefknot.core.time import Moment
from reefknot.queue.port.transport import Delivery
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.transaction import Transaction
from reefknot.stores.sqlite.wait_table import MESSAGE_TOPIC, ROOM_TOPIC

GONE_AFTER_MS = 4_000
"""Milliseconds after which a silent listener no longer blocks senders."""
WINDOW_MS = 10_000
"""How long a message and its id are kept after its arrival, read or not."""
LONGEST_MS = 60_000
"""How long a message is kept for a listener that does not read."""

_LAST = "SELECT seq FROM sqlite_sequence WHERE name = 'message'"
# Rows are found by number only: with another index all earlier rows would be read as well.
_NEWS = (
    "SELECT seq, origin, subject, headers, body FROM message NOT INDEXED WHERE seq > ?1 AND seq <= ?2 AND origin <> ?3 "
    "AND recipient IN ('', ?3) AND subject IN (SELECT value FROM json_each(?4)) ORDER BY seq LIMIT ?5"
)
_UNREAD = (
    "SELECT count(*) FROM message NOT INDEXED WHERE seq > ?1 AND origin <> ?2 AND recipient IN ('', ?2) "
    "AND subject IN (SELECT value FROM json_each(?3))"
)
_INSERT = (
    "INSERT INTO message (at, origin, recipient, subject, message_id, headers, body) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT DO NOTHING"
)
_LISTENERS = "SELECT name, origin, subjects, places, read_to FROM listener WHERE seen_at > ? AND seen_at <= ?"
_KNOWN = "SELECT 1 FROM listener WHERE name = ? AND subjects = ? AND read_to = ?"
_REFRESH = "INSERT OR REPLACE INTO listener VALUES (?, ?, ?, ?, ?, ?)"
_YOUNG = "SELECT seq FROM message WHERE at > ? ORDER BY seq LIMIT 1"
_headers = json.Decoder(dict[str, str])
_subjects = json.Decoder(frozenset[str])

Message = tuple[str, str, str, str | None, str, bytes]
"""Origin, the only one that it concerns or "", subject, id, headers as JSON, body."""
Row = tuple[int, str, Delivery]
"""A message as it was found: number, origin, and what is delivered."""


class Listener(Struct, frozen=True):
    """A subscription of any process: its subjects, how many messages may be unread, and how far it has read."""

    name: str
    origin: str
    subjects: frozenset[str]
    places: int
    read_to: int


def topic_of(subject: str, recipient: str = "") -> str:
    """The topic of messages on a subject: of those for all, or of those for one recipient."""
    return f"{MESSAGE_TOPIC}{subject} {recipient}" if recipient else MESSAGE_TOPIC + subject


def last(connection: apsw.Connection) -> int:
    """The last number given out, whether its message still exists or not."""
    return int(query(connection, _LAST).get or 0)


def news(
    connection: apsw.Connection, *, origin: str, after: int, subjects: AbstractSet[str], limit: int
) -> tuple[int, list[Row]]:
    """Messages of other processes after `after`, and the last sequence number there is."""
    end = last(connection)
    if end <= after:
        return after, []
    return end, [
        (seq, sender, Delivery(subject, body, _headers.decode(headers) if headers != "{}" else {}, sender=sender))
        for seq, sender, subject, headers, body in query(
            connection, _NEWS, (after, end, origin, _listed(subjects), limit)
        )
    ]


def listeners(connection: apsw.Connection, now: Moment) -> list[Listener]:
    """The subscriptions that were refreshed lately."""
    return [
        Listener(name, origin, _subjects.decode(wanted), places, read_to)
        for name, origin, wanted, places, read_to in query(
            connection, _LISTENERS, (now.steady - GONE_AFTER_MS, now.steady)
        )
    ]


def publish_batch(transaction: Transaction, wanted: list[Message]) -> list[bool]:
    """Write these messages. False: a listener of that one has too many unread messages."""
    connection = transaction.connection
    room = _Room(connection, transaction.now)
    answers = []
    for origin, recipient, subject, name, headers, body in wanted:
        may = room.is_there(subject, origin, recipient)
        if may:
            connection.execute(_INSERT, (transaction.now.steady, origin, recipient, subject, name, headers, body))
            if connection.changes():
                room.take(subject, origin, recipient)
                transaction.touched.add(topic_of(subject, recipient))
        answers.append(may)
    return answers


class _Room:
    """The messages that each listener may still be sent in this transaction."""

    def __init__(self, connection: apsw.Connection, now: Moment) -> None:
        self._connection = connection
        self._last = last(connection)
        self._listeners = listeners(connection, now)
        self._left: dict[str, int] = {}

    def _left_for(self, one: Listener) -> int:
        """The places of a listener, counted when a message for it comes: others may be far behind, and cost nothing."""
        left = self._left.get(one.name)
        if left is None:
            left = self._left[one.name] = self._counted(one)
        return left

    def _counted(self, one: Listener) -> int:
        since = max(0, self._last - one.read_to)
        if since >= one.places:  # part of it may be for other listeners
            since = query(self._connection, _UNREAD, (one.read_to, one.origin, _listed(one.subjects))).get
        return one.places - since

    def is_there(self, subject: str, origin: str, recipient: str) -> bool:
        return all(self._left_for(one) > 0 for one in self._hearing(subject, origin, recipient))

    def take(self, subject: str, origin: str, recipient: str) -> None:
        for one in self._hearing(subject, origin, recipient):
            self._left[one.name] -= 1

    def _hearing(self, subject: str, origin: str, recipient: str) -> list[Listener]:
        return [
            one
            for one in self._listeners
            if subject in one.subjects and one.origin != origin and recipient in ("", one.origin)
        ]


def refresh_batch(transaction: Transaction, wanted: list[tuple[str, list[Listener]]]) -> list[list[Listener]]:
    """Store the subscriptions of each origin and how far they have read; trim messages. Returns all listeners."""
    connection, now, is_news = transaction.connection, transaction.now, False
    for origin, own in wanted:
        names = _listed({one.name for one in own})
        connection.execute(
            "DELETE FROM listener WHERE origin = ? AND name NOT IN (SELECT value FROM json_each(?))", (origin, names)
        )
        is_news = is_news or connection.changes() > 0
        for one in own:
            values = (one.name, _listed(one.subjects), one.read_to)
            is_news = is_news or connection.execute(_KNOWN, values).get is None
            connection.execute(_REFRESH, (one.name, one.origin, values[1], one.places, one.read_to, now.steady))
    connection.execute("DELETE FROM listener WHERE seen_at <= ? OR seen_at > ?", (now.steady - LONGEST_MS, now.steady))
    there = listeners(connection, now)
    _trim(connection, now, there)
    if is_news:  # a mere sign of life wakes no sender
        transaction.touched.add(ROOM_TOPIC)
    return [there] * len(wanted)


def leave_batch(transaction: Transaction, wanted: list[str]) -> list[None]:
    """Remove the subscriptions of these origins."""
    transaction.connection.executemany("DELETE FROM listener WHERE origin = ?", [(origin,) for origin in wanted])
    transaction.touched.add(ROOM_TOPIC)
    return [None] * len(wanted)


def _trim(connection: apsw.Connection, now: Moment, there: list[Listener]) -> None:
    """
    Delete messages that all listeners have read, after the window; any message after the longest time; and those of an
    earlier boot.
    """
    oldest = query(connection, "SELECT at FROM message ORDER BY seq LIMIT 1").get
    if oldest is None:
        return
    if oldest > now.steady:
        connection.execute("DELETE FROM message WHERE at > ?", (now.steady,))
    end = last(connection) + 1
    young = query(connection, _YOUNG, (now.steady - WINDOW_MS,)).get
    kept = query(connection, _YOUNG, (now.steady - LONGEST_MS,)).get
    unread = min((one.read_to + 1 for one in there), default=end)
    first = max(min(end if young is None else young, unread), end if kept is None else kept)
    connection.execute("DELETE FROM message WHERE seq < ?", (first,))


def _listed(names: AbstractSet[str]) -> str:
    return json.encode(sorted(names)).decode()
