"""
How assignments ended, counted.

Every assignment has exactly one of six ends. `recovered` are among those that succeeded, `quarantined` among those that
failed. What no worker ever took in was rejected; what one gave up to make room was dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from reefknot.core.messages import ExecResult, ResultStatus
from reefknot.core.overload.admission import RejectReason
from reefknot.core.work import WorkState

if TYPE_CHECKING:
    from reefknot.ports.store import Store

ENDS = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")
_BY_STATUS = {
    ResultStatus.SUCCESS: "succeeded",
    ResultStatus.TIMEOUT: "timed_out",
    ResultStatus.CANCELLED: "cancelled",
}


class Tally:
    """Counts ends."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(ENDS, 0)
        self.recovered = 0
        self.quarantined = 0
        self.retries = 0

    @property
    def total(self) -> int:
        return sum(self.ends.values())

    @property
    def all_succeeded(self) -> bool:
        return self.total == self.ends["succeeded"]

    def rejected(self) -> None:
        """A line that is no assignment: it ends here."""
        self.ends["rejected"] += 1

    async def count(self, result: ExecResult, store: Store) -> str:
        """Count one result; answers which end it was."""
        end = _BY_STATUS.get(result.status) or await self._failure(result, store)
        self.ends[end] += 1
        retries = 0 if result.retries_used is UNSET else result.retries_used
        self.retries += retries
        self.recovered += end == "succeeded" and retries > 0
        return end

    async def _failure(self, result: ExecResult, store: Store) -> str:
        """The worker's own record says whether it was ever taken in, and what became of it."""
        item = await store.work.get(result.assignment_id)
        if item is None:
            return "rejected"
        if item.state is WorkState.CANCELLED and item.reason == RejectReason.DROPPED_OLDEST.value:
            return "dropped"
        self.quarantined += item.state is WorkState.QUARANTINED
        return "failed"

    def summary(self, elapsed: float) -> dict[str, Any]:
        return {
            "total": self.total,
            **self.ends,
            "recovered": self.recovered,
            "quarantined": self.quarantined,
            "retries": self.retries,
            "elapsed_s": round(elapsed, 3),
        }

    def sentence(self, elapsed: float) -> str:
        """The same for people, without what did not happen."""
        asides = {
            "succeeded": f" ({self.recovered} after retries)" if self.recovered else "",
            "failed": f" ({self.quarantined} in quarantine)" if self.quarantined else "",
        }
        told = [f"{n} {end.replace('_', ' ')}{asides.get(end, '')}" for end, n in self.ends.items() if n]
        noun = "assignment" if self.total == 1 else "assignments"
        retries = f"; {self.retries} {'retry' if self.retries == 1 else 'retries'}"
        return f"{self.total} {noun} in {elapsed:.1f} s: {', '.join(told) or 'nothing to do'}{retries}"
