"""`GilYield`: lets the writer thread have the interpreter's lock while the event loop is busy."""

import asyncio
import threading
import time
from queue import SimpleQueue

MAX_BLOCK_S = 0.001
"""Longest time a loop blocks for one transaction."""
PAUSE_AFTER_TIMEOUT_S = 0.02
"""Time without blocking after a failed try, because other processes hold the file's lock."""
NUDGE_S = 0.00015
"""Sleep of a loop that lets the thread have the GIL."""
IDLE_GAP_S = 0.01
"""Time to the next such sleep while the loop has nothing to do, and the thread can have the GIL."""
MIN_GAP_S = 0.0003
MAX_GAP_S = 0.004
"""Time between two such sleeps; doubled as long as the thread makes no progress."""


class GilYield:
    """
    Lets the writer thread have the interpreter's lock (the GIL) while the event loop is busy.

    Everything the thread does before it goes to the disk needs the GIL, and two threads that compete for it are slower
    than one after the other. So a loop that has more to do blocks after it has woken the thread, for a millisecond at
    most, until the thread goes to the disk. A thread that comes back from the disk has to ask for the GIL again, and
    may ask for seconds: a busy loop frees the lock at every turn and takes it back before the thread is awake. So the
    loop sleeps for 150 µs now and then, at growing intervals, until the thread has no more to do.

    The thread reports its state through the public fields.
    """

    def __init__(self) -> None:
        self.idle = True
        """The thread waits to be woken."""
        self.working = False
        """The thread has the file's lock and is not on the disk: the GIL is all it can be waiting for."""
        self.batches = 0
        """Batches the thread has finished."""
        self._released = threading.Lock()
        self._released.acquire()
        self._blocking = False
        self._paused_until = 0.0
        self._nudging: asyncio.AbstractEventLoop | None = None

    def wake(self, loop: asyncio.AbstractEventLoop, wakeups: SimpleQueue[None]) -> None:
        """Wake the thread that waits on `wakeups`, block a busy loop until `release`, and begin to nudge."""
        self.idle = False
        self._blocking = has_more_to_do(loop) and time.monotonic() >= self._paused_until
        wakeups.put(None)
        if self._blocking and not self._released.acquire(timeout=MAX_BLOCK_S):
            self._blocking = False
            if not self.working:
                self._paused_until = time.monotonic() + PAUSE_AFTER_TIMEOUT_S
        if self._nudging is not loop:
            self._nudging = loop
            gap = MIN_GAP_S if has_more_to_do(loop) else IDLE_GAP_S
            loop.call_later(gap, self.nudge, loop, gap, self.batches)

    def nudge(self, loop: asyncio.AbstractEventLoop, gap: float, batches: int) -> None:
        """Sleep in a busy loop so that the thread gets the GIL, and come back after a gap until the thread is idle."""
        if self._nudging is not loop:
            return
        if self.idle:
            self._nudging = None
            return
        if has_more_to_do(loop):
            time.sleep(NUDGE_S)
            makes_progress = self.working or self.batches != batches
            gap = MIN_GAP_S if makes_progress else min(2 * gap, MAX_GAP_S)
        else:  # the thread can have the GIL
            gap = IDLE_GAP_S
        loop.call_later(gap, self.nudge, loop, gap, self.batches)

    def release(self) -> None:
        """Unblock the loop: the thread goes to the disk, or gives up."""
        self.working = False
        if self._blocking:
            self._blocking = False
            if self._released.locked():
                self._released.release()


def has_more_to_do(loop: asyncio.AbstractEventLoop, but: int = 0) -> bool:
    """Whether the loop goes on at once instead of waiting. A hint: a loop without `_ready` counts as busy."""
    ready = getattr(loop, "_ready", None)
    return ready is None or len(ready) > but
