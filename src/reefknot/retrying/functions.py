"""
Kinds of functions: plain, async, generator.

Read from code flags, because `inspect` costs as much to import as everything else the light path loads.
"""

from __future__ import annotations

COROUTINE, GENERATOR, ASYNC_GENERATOR = 0x80, 0x20, 0x200


def code_flags(fn: object) -> int:
    """Code flags of the function that a call of `fn` ends up in; 0 when there is none to see."""
    for _ in range(16):
        if hasattr(fn, "func") and hasattr(fn, "keywords"):
            fn = fn.func
        elif hasattr(fn, "__func__"):
            fn = fn.__func__
        else:
            break
    code = getattr(fn, "__code__", None)
    if code is None and not isinstance(fn, type):
        code = getattr(getattr(type(fn), "__call__", None), "__code__", None)  # noqa: B004 - the attribute, not the question
    return int(getattr(code, "co_flags", 0))


def is_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine, as far as its code or a marker tells."""
    # inspect's marker is a bare object; a mock, which has every attribute, answers with another mock.
    return bool(code_flags(fn) & COROUTINE) or type(getattr(fn, "_is_coroutine_mark", None)) is object


def name_of(fn: object) -> str:
    """Name of a function in notes and log lines."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def what_to_pass(fn: object) -> str:
    """Error text: what to pass instead of `fn`. Closes a coroutine object, so that it does not warn later."""
    if hasattr(fn, "cr_frame") and hasattr(fn, "close"):
        fn.close()
        return "a function to call for every attempt; a coroutine object can run only once, so pass the function itself"
    return "a function to call for every attempt"
