"""What the parts of a memory store share: the time, a counter of fences, and waking up whoever waits."""

import asyncio
from itertools import count

from reefknot.core.moment import Moment, Timeline
from reefknot.errors import StoreUnavailableError
from reefknot.ports.clock import Clock


class Shared:
    """The state beneath all parts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self.next_fence = count(1).__next__

    def now(self) -> Moment:
        """The moment, as long as the store is open."""
        if self._closed:
            raise StoreUnavailableError("memory:", "it is closed", "open a new one")
        return self._timeline.at(self._clock.now())

    def changed(self) -> None:
        """Something was written: whoever waits looks again."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def change(self, timeout: float) -> bool:
        """Until something is written, at most `timeout` seconds."""
        self.now()
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True

    def deadline(self, timeout: float) -> float:
        """When a wait that begins now ends, in the time of the loop that waits."""
        self.now()
        return asyncio.get_running_loop().time() + max(0.0, timeout)

    def left(self, deadline: float) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(0.0, deadline - asyncio.get_running_loop().time())

    def close(self) -> None:
        self._closed = True
        self.changed()
