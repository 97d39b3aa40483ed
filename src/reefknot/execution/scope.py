"""
A time limit around a piece of asynchronous work.

Most awaits that matter for speed never suspend: the coroutine is driven one step by hand, and only if it really waits
is a timer armed. Our own timeout is told from somebody else's cancellation by our own scope, never by the exception's
type: when both happen, the other one wins.
"""

from __future__ import annotations

from types import coroutine

from reefknot.execution import timing

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType
    from typing import Any, Self, TypeVar

    T = TypeVar("T")


class TimeScope:
    """Cancels the current task's work after `seconds`, and turns that cancellation into `expired()`'s error."""

    __slots__ = ("_before", "_expired", "_fired", "_handle", "_seconds", "_task")

    def __init__(self, seconds: float, expired: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._expired = expired
        self._fired = False
        self._handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._before = 0

    def __enter__(self) -> Self:
        import asyncio

        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a running asyncio task")
        self._task = task
        self._before = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._fire)
        return self

    def _fire(self) -> None:
        self._fired = True
        assert self._task is not None
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        assert self._task is not None
        self._handle.cancel()
        if not self._fired:
            return
        outer_cancelled = self._task.uncancel() > self._before
        if kind is not None and kind.__name__ == "CancelledError" and not outer_cancelled:
            raise self._expired() from None


@coroutine
def within(
    work: Coroutine[Any, Any, T], seconds: float, expired: Callable[[], Exception], started: float
) -> Generator[Any, Any, T]:
    """Await `work` for at most `seconds` after `started`; a timer exists only if it suspends."""
    try:
        waiting_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    with TimeScope(seconds - (timing.now() - started), expired):
        return (yield from continued(work, waiting_for))


def continued(work: Coroutine[Any, Any, T] | Generator[Any, Any, T], item: Any) -> Generator[Any, Any, T]:
    """Delegate, like `yield from`, to a coroutine or generator whose first item is in hand already."""
    try:
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                work.close()
                raise
            except BaseException as thrown:
                item = work.throw(thrown)
            else:
                item = work.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result
