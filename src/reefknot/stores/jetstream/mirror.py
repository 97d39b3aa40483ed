"""
`Mirror`: a part of the state stream as one process follows it, from its first interest in it on.

A feed delivers what there is, then every change. After a lost connection its consumer is created again; if tombstones
may be gone by then, everything is read again, and what is not there any more is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from reefknot.core.clock import Clock
from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.work import WorkItem
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.reads import LATEST, Feed, Start, StreamMessage

TOMBSTONE_S = 3600
"""How long a tombstone, which says that a record has left its subject, is kept."""
RELOAD_AFTER_S = TOMBSTONE_S / 2
OPENED_S = 30.0


class Records(Protocol):
    """The records that a process knows."""

    connection: Connection
    clock: Clock

    def open_items(self) -> list[WorkItem]: ...

    def arrived(self, apply: Callable[[StreamMessage], None], message: StreamMessage) -> None: ...

    def id_at(self, subject: str) -> str: ...

    def forget(self, work_id: str) -> None: ...


class Mirror:
    """A feed of records of the state stream, from the start of a process's interest in them on."""

    def __init__(
        self,
        records: Records,
        stream: str,
        filters: Sequence[str],
        apply: Callable[[StreamMessage], None],
        *,
        holds: Callable[[WorkItem], bool] = lambda _: False,
    ) -> None:
        """`holds` says of an open item whether its record is among those of the filters."""
        self._records = records
        self._apply = apply
        self.holds = holds
        self._reloading: set[str] | None = None
        self._heard_at = records.clock.now()
        self.feed = Feed(
            records.connection, stream, filters, self._arrived, start=LATEST, restarted=self._where_to_begin
        )

    async def start(self) -> None:
        """Read what there is; an error when that is not possible."""
        try:
            await self.feed.start()
            async with asyncio.timeout(OPENED_S):
                await self.feed.caught_up.wait()
        except TimeoutError as error:
            await self.feed.stop()
            shown = self._records.connection.options.shown
            raise StoreUnavailableError(shown, "its records cannot be read", "check the server's load") from error
        except BaseException:
            await self.feed.stop()
            raise

    def _where_to_begin(self) -> Start | None:
        """The place where a recreated feed begins: at the start if tombstones may be gone by now."""
        if self._records.clock.now() - self._heard_at < RELOAD_AFTER_S:
            return None
        self._reloading = {one.id for one in self._records.open_items() if self.holds(one)}
        return LATEST

    def _arrived(self, message: StreamMessage) -> None:
        self._heard_at = self._records.clock.now()
        self._records.arrived(self._apply, message)
        if self._reloading is not None:
            self._reloading.discard(self._records.id_at(message.subject))
            if self.feed.caught_up.is_set():
                gone, self._reloading = self._reloading, None
                for work_id in gone:
                    self._records.forget(work_id)
