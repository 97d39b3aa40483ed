"""The audit log of a store on JetStream."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import json

from reefknot.core.audit.chain import Head, link
from reefknot.ports.audit_log import AuditEntry, KeptEntry
from reefknot.runtime.seeds import new_id


class AuditWriter:
    """The chain of this process."""

    def __init__(self, state: object) -> None:
        self.writer = new_id()
        self.head = Head(self.writer)
        self.kept: list[KeptEntry] = []

    async def has_room(self) -> None: ...

    def seal(self, events: Sequence[AuditEntry]) -> list[KeptEntry]:
        head, sealed = self.head, []
        for event in events:
            head, hashed = link(head, event.body)
            sealed.append(KeptEntry(head.sequence, hashed, event))
        return sealed

    def outbox(self, sealed: Sequence[KeptEntry]) -> bytes:
        return json.encode(sealed)

    def stored(self, sealed: Sequence[KeptEntry]) -> None:
        self.kept += sealed
        if sealed:
            self.head = Head(self.writer, sealed[-1].sequence, sealed[-1].hash)

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class JetStreamAuditLog:
    def __init__(self, state, commits, writer) -> None:
        self.w = writer
        self.c = commits

    async def head(self):
        return self.w.head

    async def append(self, entries):
        await self.c.change(lambda batch, now: batch.events.extend(entries))
        return self.w.head

    async def wait(self, after, timeout):
        import asyncio

        await asyncio.sleep(timeout)
        return False

    async def read(self, query=None):
        return list(self.w.kept)

    async def newest_at(self):
        return None
