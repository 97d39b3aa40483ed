"""
The port of the control channel: commands from one process to another.

A command is addressed to one target by name, or to `*`. Every reader keeps its own position and sees each command once.
Commands go stale: one that nobody read in time is not obeyed later.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.ports.audit_log import AuditEntry

EVERYONE = "*"


class Command(Struct, frozen=True):
    """A command to one target, or to all. `body` is JSON text; `at` is milliseconds UTC."""

    sequence: int
    name: str
    target: str
    body: str
    sender: str
    at: int


class Control(Protocol):
    """Posts commands, and reads those addressed to a target."""

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
        """Post a command, which goes stale after `keep` seconds; returns its sequence number."""

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        """The commands to this target or to everyone after this sequence number that are not stale."""

    async def latest(self) -> int:
        """The last sequence number given out: where a reader that only wants what comes now begins."""

    async def wait(self, timeout: float, *, after: int) -> int:
        """Wait until a command after this number was posted, at most `timeout` seconds. Returns the latest one."""
