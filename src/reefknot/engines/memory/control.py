"""Words between the tasks of one process."""

from collections.abc import Sequence

from reefknot.core.moment import milliseconds
from reefknot.engines.memory.audit import MemoryAuditLog
from reefknot.engines.memory.state import Shared
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.control import EVERYONE, Command


class MemoryControl:
    """The commands of a memory store."""

    def __init__(self, shared: Shared, audit: MemoryAuditLog) -> None:
        self._shared = shared
        self._audit = audit
        self._posted: list[tuple[int, Command]] = []
        self._last = 0

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
        now = self._shared.now()
        self._posted = [(stale_at, command) for stale_at, command in self._posted if stale_at > now.wall]
        self._last += 1
        self._posted.append((now.wall + milliseconds(keep), Command(self._last, name, target, body, sender, now.wall)))
        self._audit.add(events)
        self._shared.changed()
        return self._last

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        now = self._shared.now()
        heard = [
            command
            for stale_at, command in self._posted
            if command.sequence > after and command.target in (EVERYONE, target) and stale_at > now.wall
        ]
        return heard[:limit]

    async def latest(self) -> int:
        self._shared.now()
        return self._last

    async def wait(self, timeout: float) -> bool:
        return await self._shared.change(timeout)
