"""
An attempt in a thread of its own, so that somebody can stop waiting for it.

No exception is ever injected into a thread. Work that ran out of time goes on alone, and the error says so.
"""

from collections.abc import Callable
from contextvars import copy_context
from threading import Event, Thread
from typing import Any


class _Slot:
    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = Event()
        self.value: Any = None
        self.error: BaseException | None = None


def call_within(
    fn: Callable[..., Any], args: Any, kwargs: Any, *, seconds: float, expired: Callable[[], Exception]
) -> Any:
    """`fn(*args, **kwargs)`, waited for at most `seconds`."""
    slot = _Slot()
    context = copy_context()

    def work() -> None:
        try:
            slot.value = context.run(fn, *args, **kwargs)
        except BaseException as error:  # handed to the waiting thread, which raises it
            slot.error = error
        finally:
            slot.done.set()

    Thread(target=work, name="reefknot-attempt", daemon=True).start()
    if not slot.done.wait(None if seconds == float("inf") else seconds):
        raise expired()
    error, slot.error = slot.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error
    return slot.value
