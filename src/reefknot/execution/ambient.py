"""
What is in scope: the store, and whoever wants to hear of keys whose outcome is unknown.

`async with open_store(…)` puts its store here for the code inside, so that a decorated function need not be handed one.
A worker puts a list here for each attempt: what a guarded key leaves behind unknown must not be tried again by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from reefknot.errors import NoStoreError

if TYPE_CHECKING:
    from reefknot.ports.store import Store

current: ContextVar[Store | None] = ContextVar("reefknot_store", default=None)

unknown_keys: ContextVar[list[str] | None] = ContextVar("reefknot_unknown_keys", default=None)


def left_unknown(key: str) -> None:
    """Nobody knows whether the effect of this guarded key happened. Whoever runs this work hears of it."""
    keys = unknown_keys.get()
    if keys is not None:
        keys.append(key)


def store_in_scope() -> Store:
    """The innermost open store."""
    store = current.get()
    if store is None:
        raise NoStoreError
    return store


@contextmanager
def in_scope(store: Store) -> Iterator[None]:
    """For the code inside, and for the tasks it starts, this is the store."""
    token = current.set(store)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in: that one never saw the store
            current.reset(token)
