"""
Tools for tests of code that retries: virtual time instead of real waiting.

`virtual_time()` is for one caller, sync or async; `no_wait()` skips waits altogether, `no_retry()` retries;
`run_virtual(main())` runs an event loop with many tasks. All are scoped to the code inside them.
"""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from reefknot.clock import using_clock
from reefknot.engines.clocks import LoopClock, SkippingClock, VirtualClock, VirtualLoop, run_in_virtual_loop
from reefknot.errors import VirtualDeadlockError
from reefknot.retrying.plan import retry_switch

T = TypeVar("T")

__all__ = [
    "SkippingClock",
    "VirtualClock",
    "VirtualDeadlockError",
    "no_retry",
    "no_wait",
    "run_virtual",
    "virtual_time",
]


@contextmanager
def virtual_time(start: float = 1000.0) -> Iterator[VirtualClock]:
    """
    A scope in which waits advance a virtual clock instead of taking time; deadlines count in that time.

    The clock records the waits (`waits`, `waited`) and can be advanced (`advance`).
    """
    clock = VirtualClock(start)
    with using_clock(clock):
        yield clock


@contextmanager
def no_wait() -> Iterator[SkippingClock]:
    """A scope in which waits are recorded but skipped: retries come at once, and no wait brings a deadline nearer."""
    clock = SkippingClock()
    with using_clock(clock):
        yield clock


@contextmanager
def no_retry() -> Iterator[None]:
    """A scope in which every call has one attempt, as with `REEFKNOT_RETRY=off` in a whole process."""
    before = retry_switch.turn_off()
    try:
        yield
    finally:
        retry_switch.restore(before)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """
    Run a coroutine to its end in virtual time, every task and `asyncio.sleep` in it included.

    Time jumps to the next timer whenever nothing else can run. When there is no timer either, and nothing real that
    could wake a task, it raises `VirtualDeadlockError` with the tasks and where they wait.
    """
    loop = VirtualLoop()
    with using_clock(LoopClock(loop)):
        return run_in_virtual_loop(main, loop)
