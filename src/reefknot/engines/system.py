"""
The time of this machine.

`now` is the steady clock that all processes of the machine share and that nobody can set; where there is one that also
counts the time the machine slept, it is that one.
"""

import asyncio
import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else None


class SystemClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic() if _STEADY is None else time.clock_gettime(_STEADY)

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        if seconds > 0.0:
            time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        if seconds > 0.0:
            await asyncio.sleep(seconds)
