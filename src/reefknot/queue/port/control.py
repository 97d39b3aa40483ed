"""
Control channel between the processes over one store: commands, and the status that each system reports of itself.

A command is addressed to one target by name, or to `*`. Every reader keeps its own position and sees each command once.
Commands expire: one that was not read in time is not carried out later.

A system has one status: its last report. Reports wake no reader. A status goes stale unless it is renewed, and is
withdrawn at an orderly end. A stale status therefore is the last report of a system that died or cannot reach its
store; it is kept for `SILENT_KEPT_S`.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.submission import Capacity

EVERYONE = "*"
NO_CAPACITY = Capacity()
SILENT_KEPT_S = 900.0
"""How long the status of a silent system is kept for later questions."""


class Command(Struct, frozen=True):
    """A command to one target or to all. `body` is JSON text; `at` is milliseconds UTC."""

    sequence: int
    name: str
    target: str
    body: str
    sender: str
    at: int


class StatusReport(Struct, frozen=True):
    """
    The last status of one system. `body` is JSON text; `at` is milliseconds UTC.

    `sequence` is that of its first report: of two systems the one with the smaller number was there first.
    """

    sequence: int
    name: str
    body: str
    at: int


class Control(Protocol):
    """Posts and polls commands, wakes waiting readers, and keeps the status of every system."""

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
        """Post a command, which goes stale after `keep` seconds. Returns its sequence number."""

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        """The commands to this target or to everyone after this sequence number that are not stale."""

    async def latest(self) -> int:
        """The last sequence given out: the start for a reader that only wants new commands."""

    async def wait(self, timeout: float, *, after: int) -> int:
        """Wait until a command after this sequence was posted, at most `timeout` seconds. Returns the latest one."""

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        """
        Replace the status of this system; it goes stale after `keep` seconds.

        Admission of submissions relies on the `capacity` for the same time.

        Returns the sequence of its first report. After a status went stale or was withdrawn, the next report is a first
        one.
        """

    async def withdraw(self, name: str) -> None:
        """Remove the status of this system, if it has one."""

    async def reports(self, *, silent: bool = False) -> list[StatusReport]:
        """
        The status of every system that is not stale, in the order of their first reports.

        With `silent`, those that went stale within `SILENT_KEPT_S` instead.
        """
