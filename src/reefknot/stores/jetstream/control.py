"""
The commands, statuses and named values of a store on JetStream.

Commands are mirrored by the processes that wait for them, statuses by those that mirror all open work; others read the
statuses when they need them, by one request. Values are not mirrored: they may be large and change often, few processes
read them, and a reader needs the current one. So they are read from the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
from msgspec import json, msgpack

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment, milliseconds
from reefknot.queue.model.submission import Capacity
from reefknot.queue.port.control import EVERYONE, NO_CAPACITY, SILENT_KEPT_S, Command, StatusReport
from reefknot.runtime.log import logger
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.reads import StreamMessage, last_message
from reefknot.stores.jetstream.state import Message, State, StoredCommand, StoredStatus, unreadable
from reefknot.stores.jetstream.streams import patiently, token_of
from reefknot.stores.port import StoredValue, checked_body, checked_name

LEAST_TTL_S = 60
"""Least seconds for which records of commands and statuses are kept; each says itself when it is stale."""


class JetStreamControl:
    """The commands and statuses of a store on JetStream."""

    def __init__(self, state: State, commits: Commits) -> None:
        self._state = state
        self._commits = commits

    async def post(
        self,
        name: str,
        *,
        target: str = EVERYONE,
        body: str = "{}",
        sender: str = "",
        keep: float = 300.0,
        events: Sequence[AuditEntry] = (),
    ) -> int:
        given = 0

        def run(batch: Batch, now: Moment) -> None:
            def stored(sequence: int) -> None:
                nonlocal given
                given = sequence
                self._state.add_command(sequence, command)

            command = StoredCommand(name, target, body, sender, now.wall, now.wall + milliseconds(keep))
            subject = self._state.names.command(name, new_id())
            batch.add(Message(subject, json.encode(command), ttl=LEAST_TTL_S + int(keep)), stored)
            batch.events += events

        await self._commits.change(run)
        return given

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        await self._state.hear_commands()
        return await self._commits.read(lambda _: self._state.unread((EVERYONE, target), after, limit))

    async def latest(self) -> int:
        await self._state.hear_commands()
        return await self._commits.read(lambda _: self._state.last_command)

    async def wait(self, timeout: float, *, after: int) -> int:
        return await self._state.watch(
            self.latest, "control", pause=lambda latest: inf if latest <= after else 0.0, timeout=timeout
        )

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        """
        Report by a message outside of batches: a status need not survive the server, and a thousand systems each write
        one a second.
        """
        token, now = token_of(name), self._state.now()
        known = self._state.statuses.get(token)
        if known is None and not self._state.mirrors_all:
            await self._state.read_status(name)
            known = self._state.statuses.get(token)
        earlier = known[1].first or known[0] if known is not None and known[1].stale_at > now.wall else 0

        async def publish() -> tuple[int, StoredStatus]:
            at = self._state.now().wall
            status = StoredStatus(name, body, at, at + milliseconds(keep), capacity, earlier)
            ttl = LEAST_TTL_S + int(SILENT_KEPT_S + keep)
            return await self._publish(Message(self._state.names.status(name), json.encode(status), ttl=ttl)), status

        stored = await (publish() if earlier else patiently(self._state.connection, publish))  # the first is a start
        self._state.statuses[token] = stored
        return earlier or stored[0]

    async def withdraw(self, name: str) -> None:
        if token_of(name) in self._state.statuses:
            await self._publish(Message(self._state.names.status(name), b"", ttl=LEAST_TTL_S))
            self._state.statuses.pop(token_of(name), None)

    async def _publish(self, message: Message) -> int:
        connection = self._state.connection
        answer = await connection.request(message.subject, message.body, headers=message.headers())
        sequence = connection.check(answer.data)
        connection.highest = max(connection.highest, sequence)
        return sequence

    async def reports(self, *, silent: bool = False) -> list[StatusReport]:
        if not self._state.mirrors_all:
            await self._state.read_statuses()
        return await self._commits.read(lambda _: self._state.reports(silent=silent))


class JetStreamValues:
    """
    The named values of a store on JetStream.

    The version of a value is the sequence of its message. A deletion is a message without a body, which the server
    removes after a second.
    """

    def __init__(self, state: State, commits: Commits) -> None:
        self._state = state
        self._commits = commits

    async def get(self, name: str) -> StoredValue | None:
        message = await self._last(checked_name(name))
        try:
            return None if message is None else _value_of(message)
        except msgspec.DecodeError:
            assert message is not None
            raise unreadable(self._state.connection, message) from None

    async def put(self, name: str, body: str, *, version: int, events: Sequence[AuditEntry] = ()) -> StoredValue | None:
        packed = msgpack.encode((checked_name(name), checked_body(body)))  # unlike JSON no longer than the texts
        sequence = await self._replace(name, packed, version, events)
        return StoredValue(name, body, sequence) if sequence else None

    async def delete(self, name: str, *, version: int, events: Sequence[AuditEntry] = ()) -> bool:
        return version > 0 and bool(await self._replace(checked_name(name), b"", version, events))

    async def list(self, prefix: str = "") -> Sequence[StoredValue]:
        names = self._state.names
        messages = await self._state.direct.matching(f"{names.name}.value.*")
        values = list[StoredValue]()
        for message in messages:
            try:
                value = _value_of(message)
            except msgspec.DecodeError:
                logger().warning("%s", unreadable(self._state.connection, message))
                continue
            if value is not None and value.name.startswith(prefix):
                values.append(value)
        return sorted(values, key=lambda value: value.name)

    async def _last(self, name: str) -> StreamMessage | None:
        return await last_message(self._state.connection, self._state.names.state, self._state.names.value(name))

    async def _replace(self, name: str, packed: bytes, version: int, events: Sequence[AuditEntry]) -> int:
        """Replace the value of this version; returns the sequence of its new message, or 0 if it has another one."""
        subject, stored_at = self._state.names.value(name), 0
        known = await self._last(name)

        async def look() -> None:
            nonlocal known
            known = await self._last(name)

        def run(batch: Batch, now: Moment) -> None:
            def stored(sequence: int) -> None:
                nonlocal stored_at
                stored_at = sequence

            current = known.sequence if known is not None and known.body else 0
            # An earlier change in this batch has made a version whose number is not known yet.
            if current == version and all(message.subject != subject for message in batch.messages):
                expected = 0 if known is None else known.sequence
                batch.add(Message(subject, packed, expected, ttl=None if packed else 1), stored)
                batch.events += events

        await self._commits.change(run, prepare=look)
        return stored_at


def _value_of(message: StreamMessage) -> StoredValue | None:
    """The value in a message; None for a deletion."""
    if not message.body:
        return None
    name, body = msgpack.decode(message.body, type=tuple[str, str])
    return StoredValue(name, body, message.sequence)
