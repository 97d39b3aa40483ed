"""
For tests of code that retries: no real waiting.

`virtual_time()` is for one caller, sync or async; `no_wait()` for when nothing but speed matters; `run_virtual(main())`
for a whole event loop with many tasks. All are scoped to the code inside them.
"""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from reefknot.clock import using_clock
from reefknot.engines.clocks import LoopClock, SkippingClock, VirtualClock, VirtualLoop, run_in_virtual_loop
from reefknot.errors import VirtualDeadlockError

T = TypeVar("T")

__all__ = ["SkippingClock", "VirtualClock", "VirtualDeadlockError", "no_wait", "run_virtual", "virtual_time"]


@contextmanager
def virtual_time(start: float = 1000.0) -> Iterator[VirtualClock]:
    """
    Waits move a clock instead of taking time; deadlines count in that time.

    The clock tells what was waited (`waits`, `waited`) and can be moved by hand (`advance`).
    """
    clock = VirtualClock(start)
    with using_clock(clock):
        yield clock


@contextmanager
def no_wait() -> Iterator[SkippingClock]:
    """Waits are counted but not waited: every retry comes at once, and no deadline comes nearer by waiting."""
    clock = SkippingClock()
    with using_clock(clock):
        yield clock


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """
    Run a coroutine to its end in virtual time, every task and `asyncio.sleep` in it included.

    Time jumps to the next timer whenever nothing else can run. When there is no timer either, and nothing real that
    could wake a task, it raises `VirtualDeadlockError` and says what waits where.
    """
    loop = VirtualLoop()
    with using_clock(LoopClock(loop)):
        return run_in_virtual_loop(main, loop)
