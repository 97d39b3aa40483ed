"""
Context of the running code: the open store, and the list that collects keys with an unknown outcome.

`async with open_store(…)` sets the store for the code inside, so that a decorated function finds it by itself. A worker
sets the list for each attempt: a step that leaves a guarded key unknown must not be retried automatically.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from reefknot.errors import NoStoreError

if TYPE_CHECKING:
    from reefknot.ports.store import Store

current_store: ContextVar[Store | None] = ContextVar("reefknot_store", default=None)
unknown_keys: ContextVar[list[str] | None] = ContextVar("reefknot_unknown_keys", default=None)


def store_in_scope() -> Store:
    """The innermost open store; `NoStoreError` when there is none."""
    store = current_store.get()
    if store is None:
        raise NoStoreError
    return store


@contextmanager
def in_scope(store: Store) -> Iterator[None]:
    """Make `store` the store in scope for the code inside, and for the tasks it starts."""
    token = current_store.set(store)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in: that one never saw the store
            current_store.reset(token)


def report_unknown(key: str) -> None:
    """Tell the worker that runs this code that the outcome of a guarded key is unknown."""
    keys = unknown_keys.get()
    if keys is not None:
        keys.append(key)
