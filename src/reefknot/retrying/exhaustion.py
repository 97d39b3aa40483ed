"""
Exhausted inner retries: a retry that gave up marks its exception, so that an outer one does not multiply its attempts.

An exception object may be raised again and again, and by several callers at once (a shared future, a constant of a
module). A mark therefore counts for the calls in which the retry that made it ran, and for no other.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from contextvars import ContextVar

from reefknot import clock
from reefknot.retrying.functions import MOST_PARTS, UNREADABLE, is_group

MARK = "__reefknot_exhausted__"
_NO_MARK = (0, 0, 0)


class Exhaustions:
    """Number of retries that gave up in this process. A mark has its number: an older one is of an earlier call."""

    __slots__ = ("count",)  # every call reads it

    def __init__(self) -> None:
        self.count = 0


exhaustions = Exhaustions()
scope_of_caller: ContextVar[int] = ContextVar("reefknot_scope", default=0)
"""In a thread that runs an attempt: the scope of the call that waits for it."""


def current_scope() -> int:
    """Identity of the running task, else of the thread: two calls in one scope are nested, or one after the other."""
    inherited = scope_of_caller.get()
    if inherited:
        return inherited
    asyncio = sys.modules.get("asyncio")  # loaded by those who use it
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return id(asyncio.current_task())
    if clock.in_trio():
        return id(sys.modules["trio"].lowlevel.current_task())
    return get_ident()


def mark_exhausted(error: Exception) -> None:
    """Mark an error that ended a retry: with the number of that end, its scope, and the code that caught the error."""
    exhaustions.count += 1
    try:
        trace = error.__traceback__
        code = 0 if trace is None else id(trace.tb_frame.f_code)
        setattr(error, MARK, (exhaustions.count, current_scope(), code))
    except UNREADABLE:  # an exception that refuses attributes is simply not marked
        return


def is_exhausted(error: BaseException, since: int) -> bool:
    """Whether this error, its cause or an error in its group ended a retry inside the call that began at `since`."""
    todo, seen = [error], {0}
    while todo and len(seen) <= MOST_PARTS:
        link = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if _is_marked_inside(link, since, is_caught=link is error):
            return True
        if is_group(link):
            todo.extend(link.exceptions)
        if link.__cause__ is not None:
            todo.append(link.__cause__)
    return False


def _is_marked_inside(error: BaseException, since: int, *, is_caught: bool) -> bool:
    """
    Whether the retry that marked the error ran inside this call, which runs in this scope.

    In the same scope it did. In another one (a task or a thread) it did if the error came through it on its way here:
    a shared object also carries the marks of others. `is_caught`: the way ends in this call's own frame.
    """
    number, scope, code = error.__dict__.get(MARK, _NO_MARK)
    if number <= since:
        return False
    if scope == current_scope():
        return True
    from opcode import opmap

    trace, is_own = error.__traceback__, is_caught
    while trace is not None:
        here = trace.tb_frame.f_code
        if id(here) == code and not is_own:
            return True
        if here.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]:  # the rest is of an earlier raise of the same object
            return False
        trace, is_own = trace.tb_next, False
    return False
