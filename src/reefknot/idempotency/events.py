"""
`KeyEvents`: the audit events of one call on a key, each written once.

Where the store also keeps the audit log, the event of a change is written in the change's own transaction. Elsewhere it
is written after the change. An event without a change (a hit, a refusal) is always written afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from reefknot.audit.model.event import TakenOver
from reefknot.runtime.tasks import run_in_background

if TYPE_CHECKING:
    from reefknot.audit.journal import Journal
    from reefknot.audit.model.event import Event, IdempotencyEvent
    from reefknot.audit.port import AuditEntry
    from reefknot.idempotency.model import KeyRecord


class KeyEvents:
    """Events of one call. `event` builds the event of an action; `one_chain`: the store keeps the journal's log."""

    def __init__(self, journal: Journal, event: Callable[[str], IdempotencyEvent], *, one_chain: bool) -> None:
        self._journal = journal
        self._event = event
        self._one_chain = one_chain
        self._pending: list[Event] = []
        self._takeover: TakenOver | None = None
        self.with_record: list[Event] = []
        """Further events to write together with the recorded result."""

    def safe(self, text: str) -> str:
        """The text without secrets: a recorded failure is shown to people, unlike a result."""
        return self._journal.safe(text)

    def atomic_with(self, action: str) -> list[AuditEntry]:
        """Entries to pass to the store with the change; none when the log is elsewhere."""
        if not self._one_chain:
            return []
        more = self.with_record if action == "record" else ()
        return self._journal.entries([*more, self._event(action)])

    def applied(self, action: str) -> None:
        """Note that the store has made the change, and kept the entries of `atomic_with`."""
        if not self._one_chain:
            self._pending.append(self._event(action))
        elif action == "record":
            self.with_record.clear()

    def taking_over(self, before: KeyRecord, after: KeyRecord) -> list[AuditEntry]:
        """Entries to keep with a takeover, given the record before and after it; none when the log is elsewhere."""
        fields = asdict(self._event("taken_over"))
        fields = {name: value for name, value in fields.items() if name not in ("event_code", "action")}
        self._takeover = TakenOver(
            **fields,
            owner=after.owner,
            fence=after.fence,
            previous_owner=before.owner,
            previous_fence=before.fence,
        )
        return self._journal.entries([self._takeover]) if self._one_chain else []

    def taken_over(self) -> None:
        """Note that the store has made the takeover, and kept the entries of `taking_over`."""
        if not self._one_chain and self._takeover is not None:
            self._pending.append(self._takeover)

    def observed(self, action: str) -> None:
        """Note an action that changed nothing in the store."""
        self._pending.append(self._event(action))

    async def flush(self) -> None:
        """Write the events that were not kept with a change."""
        events = [*self.with_record, *self._pending]
        self.with_record.clear()
        self._pending.clear()
        if events:
            await self._journal.write(*events)

    def flush_later(self) -> None:
        """Flush in a task of its own, because the caller is being cancelled."""
        if self.with_record or self._pending:
            run_in_background(self.flush(), "writing the events of a key")
