"""
Generators under retry: an attempt is everything up to the first item.

    generating(retried(first_item(fn)))

What came before the first item can be repeated, since the caller has seen nothing of it. From then on the caller and
the generator talk to each other, and an error goes to the caller as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reefknot.retrying.functions import FirstItem, continued

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from typing import Any


def first_item(fn: Callable[..., Any]) -> Callable[..., FirstItem]:
    """A function that starts a generator and returns it with its first item."""

    def first(*args: Any, **kwargs: Any) -> FirstItem:
        items = fn(*args, **kwargs)
        try:
            return FirstItem((items, True, next(items)))
        except StopIteration as ended:
            return FirstItem((items, False, ended.value))

    return first


def generating(first: Callable[..., FirstItem]) -> Callable[..., Any]:
    """The generator function whose start is `first`."""

    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        items, going, item = first(*args, **kwargs)
        if not going:
            return item
        return (yield from continued(items, item))

    return generate


def afirst_item(fn: Callable[..., Any]) -> Callable[..., Awaitable[FirstItem]]:
    """`first_item` of an async generator."""

    async def first(*args: Any, **kwargs: Any) -> FirstItem:
        items = fn(*args, **kwargs)
        try:
            return FirstItem((items, True, await anext(items)))
        except StopAsyncIteration:
            return FirstItem((items, False, None))

    return first


def agenerating(first: Callable[..., Awaitable[FirstItem]]) -> Callable[..., Any]:
    """The async generator function whose start is `first`."""

    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        items, going, item = await first(*args, **kwargs)
        try:
            while going:
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as thrown:
                    item = await items.athrow(thrown)
                else:
                    item = await items.asend(sent)
        except StopAsyncIteration:
            return
        finally:
            await items.aclose()

    return generate
