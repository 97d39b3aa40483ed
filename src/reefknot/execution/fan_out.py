"""
One journal, several sinks.

Every sink gets every event. One that fails or is slow holds back neither the others nor the work: what it missed waits
for it, with a bound, and what goes beyond is counted and told. Only when no sink keeps the events is that the caller's
failure. A sink may see an event twice after a time-out; its `event_id` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reefknot.errors import ParameterError
from reefknot.execution import report
from reefknot.execution.journal import MOST_BUFFERED, AuditSink

if TYPE_CHECKING:
    from reefknot.core.audit.chain import Head
    from reefknot.ports.audit_log import AuditEntry

SECONDS_A_SINK = 5.0
"""Less than a journal waits for the whole."""


class FanOut:
    """Several sinks as one. Its head is that of the first sink that kept the events."""

    def __init__(self, *sinks: AuditSink, most_buffered: int = MOST_BUFFERED, seconds: float = SECONDS_A_SINK) -> None:
        if not sinks:
            raise ParameterError("sinks", sinks, "one sink or more")
        self._branches = [_Branch(sink, most_buffered, seconds) for sink in sinks]
        self._turn = asyncio.Lock()

    @property
    def lost(self) -> int:
        """Events that some sink will never get, counted once for each such sink."""
        return sum(branch.lost for branch in self._branches)

    @property
    def buffered(self) -> int:
        """Events that wait for a sink to come back, counted once for each such sink."""
        return sum(len(branch.waiting) for branch in self._branches)

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Keep these in every sink that can; the error of the first when none can."""
        async with self._turn:  # in one order everywhere
            answers = await asyncio.gather(*(branch.append(entries) for branch in self._branches))
        heads = [answer for answer in answers if not isinstance(answer, Exception)]
        if not heads:
            assert isinstance(answers[0], Exception)
            raise answers[0]  # nobody has them: whoever called still does
        for branch, answer in zip(self._branches, answers, strict=True):
            if isinstance(answer, Exception):
                branch.keep_back(entries, answer)
        return heads[0]


class _Branch:
    """One sink, and what it has missed."""

    def __init__(self, sink: AuditSink, most: int, seconds: float) -> None:
        self._sink = sink
        self._most = most
        self._seconds = seconds
        self.waiting: list[AuditEntry] = []
        self.lost = 0

    async def append(self, entries: Sequence[AuditEntry]) -> Head | Exception:
        try:
            async with asyncio.timeout(self._seconds):
                head = await self._sink.append([*self.waiting, *entries])
        except Exception as error:
            return error
        self.waiting.clear()
        return head

    def keep_back(self, entries: Sequence[AuditEntry], trouble: Exception) -> None:
        pending = [*self.waiting, *entries]
        overflow = max(0, len(pending) - self._most)
        self.lost += overflow
        self.waiting = pending[overflow:]
        report.logger().error(
            "an audit sink (%s) cannot be written (%s: %s); %d events wait for it, %d are lost in all",
            type(self._sink).__name__,
            type(trouble).__name__,
            report.printable(str(trouble), most=300),
            len(self.waiting),
            self.lost,
        )
