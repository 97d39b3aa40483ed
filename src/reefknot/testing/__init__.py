"""
Tools for tests of code that retries: virtual time instead of real waiting.

`virtual_time()` is for one caller, sync or async; `no_wait()` skips waits altogether, `no_retry()` retries;
`run_virtual(main())` runs an event loop with many tasks. All are scoped to the code inside them.

`system()` and `system_sync()` are a whole system, router and workers over a store in memory, with virtual time of its
own. They are loaded when they are first used: a test of a retry does not pay for them.
"""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from reefknot.clock import using_clock
from reefknot.core import checks
from reefknot.errors import JobsStuckError, VirtualDeadlockError
from reefknot.retrying.plan import retry_switch
from reefknot.runtime.clocks import LoopClock, SkippingClock, VirtualClock, VirtualLoop, run_in_virtual_loop

if TYPE_CHECKING:
    from reefknot.testing.systems import SyncVirtualJob as SyncVirtualJob
    from reefknot.testing.systems import SyncVirtualSystem as SyncVirtualSystem
    from reefknot.testing.systems import VirtualJob as VirtualJob
    from reefknot.testing.systems import VirtualSystem as VirtualSystem
    from reefknot.testing.systems import system as system
    from reefknot.testing.systems import system_sync as system_sync

T = TypeVar("T")

__all__ = [
    "JobsStuckError",
    "SkippingClock",
    "SyncVirtualJob",
    "SyncVirtualSystem",
    "VirtualClock",
    "VirtualDeadlockError",
    "VirtualJob",
    "VirtualSystem",
    "no_retry",
    "no_wait",
    "run_virtual",
    "system",
    "system_sync",
    "virtual_time",
]
_OF_SYSTEMS = frozenset({"SyncVirtualJob", "SyncVirtualSystem", "VirtualJob", "VirtualSystem", "system", "system_sync"})

if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        if name not in _OF_SYSTEMS:
            raise AttributeError(f"module 'reefknot.testing' has no attribute {name!r}")
        from reefknot.testing import systems

        return getattr(systems, name)


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
def no_retry(attempts: int = 1) -> Iterator[None]:
    """
    A scope in which every call has one attempt, as with `REEFKNOT_RETRY=off` in a whole process.

    `attempts` allows for more of them: `with no_wait(), no_retry(attempts=2):` shows one retry, at once.
    """
    before = retry_switch.limit(checks.whole_number("attempts", attempts))
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
