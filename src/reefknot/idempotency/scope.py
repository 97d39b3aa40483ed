"""
Context of the running code: the open store, and the keys that an attempt of a worker has met.

`async with open_store(…)` sets the store for the code inside, so that a decorated function finds it by itself. A worker
sets `attempt_keys` for each attempt: a step that leaves a guarded key unknown must not be retried automatically, and
one that waits for a key which somebody else holds stops in time to say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import Struct

from reefknot.errors import NoStoreError

if TYPE_CHECKING:
    from reefknot.ports.store import Store

current_store: ContextVar[Store | None] = ContextVar("reefknot_store", default=None)
attempt_keys: ContextVar[AttemptKeys | None] = ContextVar("reefknot_attempt_keys", default=None)

MARGIN_S = 0.5
MARGIN_SHARE = 0.2
"""Time of an attempt that is not spent on waiting for a key, in seconds and as a share of what is left."""


class HeldKey(Struct, frozen=True):
    """A key that an attempt waited for in vain. `wait` is how long its caller would have waited in all."""

    key: str
    owner: str
    wait: float


class AttemptKeys(Struct):
    """The keys that one attempt met. It ends at `ends_at` by its loop's clock."""

    ends_at: float
    unknown: list[str] = []
    """Guarded keys whose outcome is unknown."""
    held: list[HeldKey] = []

    def wait(self, now: float) -> float:
        """The most seconds that the attempt may wait for a key and still tell about it."""
        left = max(0.0, self.ends_at - now)
        return left - min(MARGIN_S, left * MARGIN_SHARE)


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
    keys = attempt_keys.get()
    if keys is not None:
        keys.unknown.append(key)
