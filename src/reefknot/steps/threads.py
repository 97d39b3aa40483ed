"""
Threads of plain functions: bounded in number, and never waited for when the process ends.

A function in a thread cannot be interrupted. One whose attempt is over goes on, and keeps its thread until it returns:
then another thread takes its place, up to a limit. A block that leaves many such functions behind is refused further
ones, so that it does not take all threads from the others. The threads are daemons: a shutdown does not depend on them.

A function that has returned in time is answered by its result, however late the event loop hears of it: the loop may
have been blocked by another step meanwhile, and the time-out is then the first thing it sees.
"""

import asyncio
import inspect
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from math import inf
from typing import Any

from reefknot.runtime.log import LogBudget, logger, printable

MOST_THREADS = 256
MOST_OVERDUE = 16
"""Functions of one block that may still run although their attempts are over."""
IDLE_S = 60.0
"""How long a thread without work is kept."""


class FunctionsOverdueError(Exception):
    """Too many functions of this block still run although their attempts are over."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(
            f"{number} functions of the block {name} still run although their time is over, and a plain function "
            "cannot be interrupted; give their calls a time limit, or write the block as an async function"
        )


class _FunctionCall:
    """Call of a function, from its request to its return."""

    __slots__ = (
        "error",
        "function",
        "future",
        "has_begun",
        "has_ended",
        "is_overdue",
        "loop",
        "name",
        "returned_at",
        "value",
    )

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name = name
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.has_begun = False
        self.has_ended = False
        self.is_overdue = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.returned_at = inf
        """When it returned or raised, by the clock of its loop."""

    def run(self) -> None:
        """Call the function, and give its result or its exception to the task that still waits for it."""
        try:
            self.value = self.function()
        except StopIteration as stop:  # a future cannot carry it
            self.error = RuntimeError(f"the function raised {stop!r}")
        except BaseException as raised:
            self.error = raised
        self.returned_at = self.loop.time()
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self.loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)

    def returned_by(self, ends: float) -> bool:
        """
        Whether it has returned by then. A result that has to be awaited does not count: nothing would end it in time.
        """
        return self.returned_at <= ends and not inspect.isawaitable(self.value)

    def answer(self) -> Any:
        """The value of a function that has returned; what it raised is raised here."""
        if self.error is not None:
            raise self.error
        return self.value


class FunctionThreads:
    """A pool of daemon threads that starts a thread when none is idle, up to `most` of them."""

    def __init__(self, *, most: int = MOST_THREADS, most_overdue: int = MOST_OVERDUE) -> None:
        self._most = most
        self._most_overdue = most_overdue
        self._changed = threading.Condition()
        self._waiting: deque[_FunctionCall] = deque()
        self._threads = 0
        self._idle = 0
        self._overdue: Counter[str] = Counter()
        """By block: functions that still run although their attempts are over."""
        self._lines = LogBudget()

    @property
    def overdue(self) -> int:
        """The number of functions that still run although their attempts are over."""
        with self._changed:
            return self._overdue.total()

    async def run(self, name: str, function: Callable[[], Any], *, within: float = inf) -> Any:
        """
        The function's result, from a thread; `FunctionsOverdueError` when its block has left too many behind.

        A cancellation is ignored when the function returns `within` these seconds: its effect is known.
        """
        if self._overdue[name] >= self._most_overdue:
            raise FunctionsOverdueError(name, self._overdue[name])
        call = _FunctionCall(name, function)
        ends = call.loop.time() + within
        self._put(call)
        try:
            with _standing_still(call.loop):
                return await call.future
        except asyncio.CancelledError:
            self._leave(call)
            if call.returned_by(ends):
                return call.answer()
            raise

    def _put(self, call: _FunctionCall) -> None:
        with self._changed:
            self._waiting.append(call)
            wants_thread = self._idle < len(self._waiting)
            may_start = wants_thread and self._threads < self._most
            self._threads += may_start
            self._changed.notify()
        if may_start:
            threading.Thread(target=self._serve, name="reefknot-block", daemon=True).start()
        elif wants_thread:
            self._warn(call, "all %d threads of plain functions are taken; a step of the block %s waits", self._most)

    def _leave(self, call: _FunctionCall) -> None:
        """Forget a call whose caller has stopped waiting. One that runs counts as overdue until it returns."""
        if call.future.done() and not call.future.cancelled():
            call.future.exception()  # else asyncio complains that it was never retrieved
        with self._changed:
            if not call.has_begun:
                self._waiting.remove(call)
                return
            if call.has_ended:
                return
            call.is_overdue = True
            self._overdue[call.name] += 1
            number = self._overdue[call.name]
        text = "%d plain functions run on although their attempts have ended; they cannot be interrupted (block %s)"
        self._warn(call, text, number)

    def _warn(self, call: _FunctionCall, text: str, number: int) -> None:
        if self._lines.take(call.loop.time()) is not None:
            logger().warning(text, number, printable(call.name, most=100))

    def _serve(self) -> None:
        """Run calls, one after the other, until there was none for a while."""
        while (call := self._next()) is not None:
            call.run()
            with self._changed:
                call.has_ended = True
                if call.is_overdue:
                    self._overdue[call.name] -= 1

    def _next(self) -> _FunctionCall | None:
        with self._changed:
            while not self._waiting:
                self._idle += 1
                is_notified = self._changed.wait(IDLE_S)
                self._idle -= 1
                if not is_notified and not self._waiting:
                    self._threads -= 1
                    return None
            call = self._waiting.popleft()
            call.has_begun = True
            return call


def _standing_still(loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
    """A scope in which a loop in virtual time does not go on; no other loop is changed."""
    holding: Callable[[], AbstractContextManager[None]] = getattr(loop, "holding", nullcontext)
    return holding()


@cache
def function_threads() -> FunctionThreads:
    """The threads of this process. Not the loop's own: functions that wait would use them up for everybody."""
    return FunctionThreads()
