"""
Steps that outlive their time: answered when it is over, and watched until they end.

A time-out cancels its step. One that catches `asyncio.CancelledError` and goes on cannot be stopped from outside, so
its attempt is reported without it. Its slot stays taken until it ends, because it still uses what a slot stands for.
When its worker ends, it is waited for a bounded time (`slots.stop_attempts`).
"""

import asyncio
from collections.abc import Callable

from reefknot.core.clock import Clock
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.execution.failures import suspended_at
from reefknot.queue.model.messages import ExecAssignment
from reefknot.steps.port import Block

CLEANUP_S = 0.1
"""Time to clean up after a time-out, before the attempt is reported without its step."""


class OverdueWatch:
    """The watch over one execution, from its time-out to its end."""

    def __init__(
        self,
        log: DecisionLog,
        clock: Clock,
        assignment: ExecAssignment,
        block: Block,
        allowed: float,
        report: Callable[[], None],
    ) -> None:
        """`report` is called when the step goes on after the time that it is `allowed`."""
        self._log = log
        self._clock = clock
        self._assignment = assignment
        self._place = str(getattr(block, "place", ""))
        self._allowed = allowed
        self._report = report
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._since = clock.now()
        self.is_reported = False
        """Whether the attempt was reported without its step."""

    def cancelled(self) -> None:
        """Begin to watch: the time-out has cancelled the step."""
        self._timer = asyncio.get_running_loop().call_later(CLEANUP_S, self._goes_on)

    def _goes_on(self) -> None:
        self.is_reported = True
        self._place = suspended_at(self._task) or self._place
        self._log.overdue(self._assignment, self._place, self._allowed)
        self._report()

    def ended(self) -> None:
        """End the watch: the step has ended, whenever that is."""
        if self._timer is not None:
            self._timer.cancel()
        if self.is_reported:
            late = self._clock.now() - self._since - self._allowed
            self._log.ended_late(self._assignment, self._place, late)
