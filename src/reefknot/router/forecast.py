"""
How long the lines are, as routers told a moment ago, for callers in other processes.

A caller with a deadline hears at once that its work would miss it, by the rule that a router itself goes by. Where no
router has told anything, or one that could still make it, nobody is refused: then the count alone bounds.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from reefknot.core.messages import ExecAssignment, resource_class
from reefknot.core.overload.admission import Newcomer, QueueView, Rules, retry_after_ms, would_miss_deadline
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.router.pace import MARGIN

FRESH_S = 1.0
"""As often as routers tell."""

Told = Callable[[Store], Awaitable[Sequence[Mapping[str, Any]]]]
"""What each router over a store last told of itself: its snapshot, as JSON carries it."""


class Forecast:
    """Asks what routers told, at most once a second."""

    def __init__(self, store: Store, clock: Clock, told: Told | None) -> None:
        self._store = store
        self._clock = clock
        self._told = told
        self._said: Sequence[Mapping[str, Any]] = ()
        self._fresh_until = float("-inf")

    async def refusal(self, assignment: ExecAssignment) -> float | None:
        """Seconds after which it may come back, if it would miss its deadline at every router. None: come in."""
        if self._told is None or assignment.options.deadline_ms is None:
            return None
        if self._clock.now() >= self._fresh_until:
            self._said = await self._told(self._store)
            self._fresh_until = self._clock.now() + FRESH_S
        waits = [_wait(said, assignment) for said in self._said]
        misses = [wait for wait in waits if wait is not None]
        return min(misses) / 1000 if misses and len(misses) == len(waits) else None


def _wait(said: Mapping[str, Any], assignment: ExecAssignment) -> int | None:
    """Milliseconds until it may be worth asking this router again; None when it is worth it now."""
    line = said.get("lines", {}).get(resource_class(assignment))
    if line is None:
        return None
    view = msgspec.convert(line, QueueView)
    rules = Rules(max_wait_fraction=said.get("max_wait_fraction"))
    newcomer = Newcomer(assignment.priority, MARGIN * (assignment.options.deadline_ms or 0))
    return retry_after_ms(view) if would_miss_deadline(view, newcomer, rules) else None
