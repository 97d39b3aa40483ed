"""
One clock whose wall time does not jump.

It reads the machine's wall clock once and carries it on by the steady one. Stores reckon in the same way, so a due time
that was computed here comes due there, whatever somebody does to the machine's clock meanwhile. A clock that is steady
already is not read again: parts that are given the same one agree to the millisecond.
"""

from reefknot.ports.clock import Clock


class SteadyClock:
    """Another clock's time, with a wall that only moves as the steady clock does."""

    _clock: Clock
    _offset: float

    def __init__(self, clock: Clock) -> None:
        if isinstance(clock, SteadyClock):
            self._clock, self._offset = clock._clock, clock._offset
        else:
            self._clock, self._offset = clock, clock.wall() - clock.now()

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.now() + self._offset

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await self._clock.asleep(seconds)
