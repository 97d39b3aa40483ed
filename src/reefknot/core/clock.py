"""
The port of a clock: reads the time and waits.

`now` only goes forward and means nothing outside the process; `wall` is stored and sent. Because waiting goes through
the clock too, a test with a virtual clock does not wait.
"""

from typing import Protocol


class Clock(Protocol):
    """A source of time, and of waiting."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since the epoch, UTC."""

    def sleep(self, seconds: float) -> None:
        """Block this thread."""

    async def asleep(self, seconds: float) -> None:
        """Suspend this task."""
