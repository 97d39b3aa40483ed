"""
Time, asked for.

`now` only ever goes forward and means nothing outside the process; `wall` is what is stored and sent. A clock that also
waits is what makes a test that does not.
"""

from typing import Protocol


class Clock(Protocol):
    """Reads the time and lets it pass."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since the epoch, UTC."""

    def sleep(self, seconds: float) -> None:
        """Block this thread."""

    async def asleep(self, seconds: float) -> None:
        """Suspend this task."""
