"""The control channel of a store on JetStream: commands and statuses, mirrored by every process."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import json

from reefknot.core.overload.submission import Capacity
from reefknot.core.time import Moment, milliseconds
from reefknot.engines.jetstream.commits import Batch, Commits
from reefknot.engines.jetstream.state import Message, State, StoredCommand, StoredStatus
from reefknot.engines.jetstream.streams import token_of
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.control import EVERYONE, NO_CAPACITY, Command, StatusReport
from reefknot.runtime.seeds import new_id

LEAST_TTL_S = 60
"""Records of commands and statuses stay for at least so long; whether they are stale is in them."""


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
            subject = self._state.names.command(target, new_id())
            batch.add(Message(subject, json.encode(command), ttl=LEAST_TTL_S + int(keep)), stored)
            batch.events += events

        await self._commits.change(run)
        return given

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        return await self._commits.read(lambda _: self._state.unread((EVERYONE, target), after, limit))

    async def latest(self) -> int:
        return await self._commits.read(lambda _: self._state.last_command)

    async def wait(self, timeout: float, *, after: int) -> int:
        return await self._state.watch(
            self.latest, "control", pause=lambda latest: inf if latest <= after else 0.0, timeout=timeout
        )

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        """A message of its own: a status need not survive the server, and a thousand systems write one each second."""
        token, now = token_of(name), self._state.now()
        known = self._state.statuses.get(token)
        earlier = known[1].first or known[0] if known is not None and known[1].stale_at > now.wall else 0
        status = StoredStatus(name, body, now.wall, now.wall + milliseconds(keep), capacity, earlier)
        message = Message(self._state.names.status(name), json.encode(status), ttl=LEAST_TTL_S + int(keep))
        sequence = await self._publish(message)
        self._state.statuses[token] = sequence, status
        return earlier or sequence

    async def withdraw(self, name: str) -> None:
        if token_of(name) in self._state.statuses:
            await self._publish(Message(self._state.names.status(name), b"", ttl=LEAST_TTL_S))
            self._state.statuses.pop(token_of(name), None)

    async def _publish(self, message: Message) -> int:
        connection = self._state.connection
        answer = await connection.request(message.subject, message.body, headers=message.headers())
        connection.check(answer.data)
        return int(json.decode(answer.data)["seq"])

    async def reports(self) -> list[StatusReport]:
        return await self._commits.read(lambda _: self._state.reports())
