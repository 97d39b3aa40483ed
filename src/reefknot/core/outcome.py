"""
How a piece of work ended, as data.

The history holds failures, never live exceptions: nothing that an attempt had in its hands is kept alive by it.
"""

from typing import Generic, TypeVar

from msgspec import Struct

from reefknot.core.failure import Failure
from reefknot.core.retry.decide import Reason

T = TypeVar("T")


class AttemptRecord(Struct, frozen=True):
    """One failed execution and what came of it: the wait that followed, or None when it was the last."""

    number: int
    failure: Failure
    elapsed: float
    delay: float | None
    draw: float


class Outcome(Struct, Generic[T], frozen=True):
    """What `Retrier.run` gives back."""

    ok: bool
    value: T | None
    error: Exception | None
    attempts: int
    history: tuple[AttemptRecord, ...]
    elapsed: float
    reason: Reason | None
    """Why there was no further attempt; None after a success."""

    def unwrap(self) -> T:
        """The value, or the error raised."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # ok: the value is whatever the work gave, None included
