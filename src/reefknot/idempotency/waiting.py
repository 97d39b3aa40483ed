"""
Waiting for a key that another caller holds: until the key changes, its process is gone, or the attempt is nearly over.

A worker sets `attempt_keys` for each attempt: a step that leaves a guarded key unknown must not be retried
automatically, and one that waits for a key which another caller holds stops in time to report it. The worker then
postpones the work, and `KeyWaits` keeps the time since when it has waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from reefknot.errors import LeaseLostError, StoreUnavailableError
from reefknot.idempotency.model import Claim, KeyRecord, KeyState
from reefknot.runtime.processes import owner_is_gone
from reefknot.runtime.timeouts import STORE_S

if TYPE_CHECKING:
    from reefknot.idempotency.port import IdempotencyStore

T = TypeVar("T")

LOOK_S = 1.0
"""How often a caller that waits for a key looks whether the process that holds it still exists."""
MARGIN_S = 0.5
MARGIN_SHARE = 0.2
"""Time of an attempt that is not spent on waiting for a key, in seconds and as a share of what is left."""
MOST_KEY_WAITS = 10_000

attempt_keys: ContextVar[AttemptKeys | None] = ContextVar("reefknot_attempt_keys", default=None)


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
        """The longest wait for a key, in seconds, that leaves the attempt time to report it."""
        left = max(0.0, self.ends_at - now)
        return left - min(MARGIN_S, left * MARGIN_SHARE)


class KeyWaits(dict[str, float]):
    """
    The times, by work id, since when attempts have waited for a key that another caller holds. Beyond a bound the
    oldest is forgotten.
    """

    def goes_on(self, work_id: str, since: float) -> None:
        if len(self) >= MOST_KEY_WAITS:
            del self[next(iter(self))]
        self[work_id] = since


def report_unknown(key: str) -> None:
    """Tell the worker that runs this code that the outcome of a guarded key is unknown."""
    keys = attempt_keys.get()
    if keys is not None:
        keys.unknown.append(key)


async def wait_for_change(store: IdempotencyStore, held: KeyRecord, seconds: float) -> None:
    """Wait until the key changes or the process that holds it is gone, at most `seconds`."""
    async with asyncio.timeout(seconds + STORE_S):
        while seconds > 0:
            record = await store.wait(held.key, min(seconds, LOOK_S))
            seconds -= LOOK_S
            if record is None or record.state is not KeyState.IN_PROGRESS or record.fence != held.fence:
                return
            if owner_is_gone(record.owner):
                return


async def end_dead_lease(store: IdempotencyStore, record: KeyRecord) -> bool:
    """End the lease of a key whose process is gone. True when it is: the next claim then need not wait for it."""
    if record.state is not KeyState.IN_PROGRESS or not owner_is_gone(record.owner):
        return False
    with suppress(LeaseLostError):  # another caller was faster
        await bounded(store.renew(Claim(record.key, record.owner, record.fence), lease=0.0))
    return True


async def bounded(request: Awaitable[T]) -> T:
    """The answer to a request to the store; `StoreUnavailableError` when it takes longer than a store may."""
    try:
        async with asyncio.timeout(STORE_S):
            return await request
    except TimeoutError as error:
        problem = f"no answer within {STORE_S:g} s"
        raise StoreUnavailableError("of idempotency keys", problem, "see whether it is overloaded or gone") from error
