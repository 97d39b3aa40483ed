"""
Clocks: the time of this machine, and virtual time for tests and simulation.

`SystemClock` reads the steady clock that all processes of the machine share and that cannot be set; where there is one
that also counts the time the machine slept, it is that one. `VirtualClock` is for one caller: a sleep moves the clock
and returns. `VirtualLoop` is an event loop whose time jumps to the next timer when nothing else can run, so any number
of tasks wait side by side and a day takes milliseconds.

Virtual time stands still while a call of the loop works in a thread (`asyncio.to_thread`), for 30 real seconds at most.
Sockets and threads of others live in real time: while a timer is pending, virtual time does not wait for them, unless
it is asked to (`VirtualLoop.holding`). A loop in which nothing can ever happen again raises `VirtualDeadlockError`
instead of waiting for ever.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from math import inf, nextafter, ulp
from typing import Any, TypeVar, TypeVarTuple, Unpack

from reefknot.clock import pause
from reefknot.core import checks
from reefknot.core.clock import Clock
from reefknot.errors import VirtualDeadlockError
from reefknot.runtime.processes import boot_name

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PATIENCE = 10.0
"""Real seconds that a loop without a timer waits for a thread to wake it. Without other threads it does not wait."""
LONGEST_HOLD_S = 30.0
"""Real seconds for which virtual time stands still at most."""

EPOCH = 1_700_000_000.0
"""Start of virtual wall time: a fixed moment, so that runs can be compared."""

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else None
_LOOP_RESOLUTION = 1e-9
"""Resolution of a loop's clock; where floats are coarser, "now" alone never reaches a timer."""


class SystemClock:
    """The time of this machine. `boot` names the boot in which its steady clock began, for all processes alike."""

    @property
    def boot(self) -> str:
        return boot_name() if _STEADY is not None else ""

    now = staticmethod(time.monotonic if _STEADY is None else partial(time.clock_gettime, _STEADY))

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        if seconds > 0.0:
            time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        if seconds > 0.0:
            await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that moves when its one caller sleeps. `waits` lists the sleeps."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._start = start
        self.waits: list[float] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return EPOCH + self._now - self._start

    def advance(self, seconds: "checks.Seconds") -> None:
        """Let time pass without a sleep, as a slow attempt does."""
        step = checks.in_seconds(seconds)
        if not (checks.is_number(step) and 0 <= step < inf):
            raise ValueError(f"time only moves forward by finite steps, not by {seconds!r}")
        self._now += step

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)
        await pause(0)

    @property
    def waited(self) -> float:
        """Seconds slept in all."""
        return sum(self.waits)


class SkippingClock(VirtualClock):
    """A virtual clock whose sleeps take no time at all: deadlines are as far away as before."""

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


class LoopClock:
    """The clock of a `VirtualLoop`. Its wall time began at `epoch`."""

    def __init__(self, loop: "VirtualLoop", epoch: float = EPOCH) -> None:
        self._loop = loop
        self._epoch = epoch

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._epoch + self._loop.time()

    def sleep(self, seconds: float) -> None:
        if self._loop.is_held and threading.get_ident() != self._loop.thread:
            self._loop.sleep_in_thread(seconds)
        else:
            self._loop.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that does not wait: when there is no real I/O, the loop's time jumps instead."""

    def __init__(self, stuck: Callable[[], Exception]) -> None:
        super().__init__()
        self.now = 0.0
        self.listening = False
        self.held = 0
        """Calls at work for which time stands still."""
        self._stuck = stuck

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if self.held and timeout != 0 and (ready := self._hold()):
            return ready
        if timeout is None:
            return self._wait()
        self.now += timeout
        if ulp(self.now) >= _LOOP_RESOLUTION:
            self.now = nextafter(self.now, inf)  # past the timer: the loop fires timers before now plus its resolution
        return ready

    def _hold(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait in real time until a call that time stands still for wakes the loop."""
        until = time.monotonic() + LONGEST_HOLD_S
        while time.monotonic() < until:
            if ready := super().select(0.05):
                return ready
        return []

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait in real time, as no timer is pending: only a socket, a signal or another thread can wake the loop."""
        if len(self.get_map()) > 1 or self.listening:  # more than the pipe by which threads wake the loop
            return super().select(0.05)
        until = time.monotonic() + PATIENCE
        while threading.active_count() > 1 and time.monotonic() < until:
            ready = super().select(0.05)
            if ready:
                return ready
        ready = super().select(0)  # the last thread may have written just before it ended
        if ready:
            return ready
        raise self._stuck()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which stands still while a call of the loop works in a thread."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector(self._deadlock)
        super().__init__(self._jumping)
        self.thread = threading.get_ident()
        """The thread that runs the loop, or has run it last."""

    def time(self) -> float:
        return self._jumping.now

    def advance(self, seconds: float) -> None:
        self._jumping.now += max(0.0, seconds)

    @property
    def is_held(self) -> bool:
        """Whether time stands still, because a call works in real time."""
        return self._jumping.held > 0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A scope in which time stands still, for a call in a thread or to a real server."""
        self._jumping.held += 1
        try:
            yield
        finally:
            self._jumping.held -= 1

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._jumping.held += 1
        future.add_done_callback(self._release)
        return future

    def _release(self, _: object) -> None:
        self._jumping.held -= 1

    def sleep_in_thread(self, seconds: float) -> None:
        """Sleep in a thread for whose work time stands still: meanwhile it passes, and everything else goes on."""
        is_over = threading.Event()

        def end() -> None:
            self._jumping.held += 1
            is_over.set()

        def begin() -> None:
            self._jumping.held -= 1
            self.call_later(max(0.0, seconds), end)

        self.call_soon_threadsafe(begin)
        while not is_over.wait(0.5):
            if self.is_closed():
                raise RuntimeError("the loop in virtual time has ended while a function slept in it")

    def run_from_thread(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine for a thread for whose work time stands still: meanwhile it passes, as in a sleep."""

        async def released() -> T:
            self._jumping.held -= 1
            try:
                return await work
            finally:
                self._jumping.held += 1

        return asyncio.run_coroutine_threadsafe(released(), self)

    def run_forever(self) -> None:
        self.thread = threading.get_ident()
        super().run_forever()

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        super().add_signal_handler(sig, callback, *args)
        self._jumping.listening = True

    def _deadlock(self) -> VirtualDeadlockError:
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        return VirtualDeadlockError(", ".join(sorted(_position(task) for task in tasks[:20])) or "no task at all")


def _position(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    where = f" at {frames[-1].f_code.co_qualname}, line {frames[-1].f_lineno}" if frames else ""
    return f"{task.get_name()}{where}"


def run_in_virtual_loop(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """The result of the coroutine, run like `asyncio.run` on a virtual loop."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def in_virtual_loop() -> bool:
    """Whether the running loop is one of virtual time, in which no thread may be waited for."""
    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def clock_of_this_loop() -> Clock:
    """The running loop's clock: its virtual time, or the system's."""
    loop = asyncio.get_running_loop()
    return LoopClock(loop) if isinstance(loop, VirtualLoop) else SystemClock()
