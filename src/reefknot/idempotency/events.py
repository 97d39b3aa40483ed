"""
The events of one call on a key, each told once.

Where the store keeps the same chain, an event goes with the change it tells of, in one step. Elsewhere it is written
when the change has happened. What changes nothing (a hit, a refusal) is always written afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reefknot.runtime.tasks import run_in_background

if TYPE_CHECKING:
    from reefknot.audit.journal import Journal
    from reefknot.core.audit.event import Event
    from reefknot.ports.audit_log import AuditEntry


class Telling:
    """Made for one call; `event` makes the event of an action on the key."""

    def __init__(self, journal: Journal, event: Callable[[str], Event], *, one_chain: bool) -> None:
        self._journal = journal
        self._event = event
        self._one_chain = one_chain
        self._later: list[Event] = []
        self.with_record: list[Event] = []
        """What else is to be told when the result is recorded."""

    def safe(self, text: str) -> str:
        """The text without secrets: what is recorded of a failure is told, unlike a result."""
        return self._journal.safe(text)

    def beside(self, action: str) -> list[AuditEntry]:
        """The events to keep in the same step as the change."""
        if not self._one_chain:
            return []
        more = self.with_record if action == "record" else ()
        return self._journal.entries([*more, self._event(action)])

    def did(self, action: str) -> None:
        """The store keeps the change, with what `beside` gave."""
        if not self._one_chain:
            self._later.append(self._event(action))
        elif action == "record":
            self.with_record.clear()

    def saw(self, action: str) -> None:
        """The key was found so; nothing was written to it."""
        self._later.append(self._event(action))

    async def tell(self) -> None:
        """Write what was not kept with a change."""
        events = [*self.with_record, *self._later]
        self.with_record.clear()
        self._later.clear()
        if events:
            await self._journal.write(*events)

    def tell_later(self) -> None:
        """The same, without waiting for it: the caller is being cancelled."""
        if self.with_record or self._later:
            run_in_background(self.tell(), "telling of a key")
