"""
`Renewal`: holds the lease of a key for as long as its work runs.

When another owner took the key over, the work is cancelled and `LeaseLostError` is raised in its place: a late owner
has nothing to write. Its own cancellation is told from an outer one by counting, never by the exception's type; when
both happen, the outer one wins. A failed renewal is tried again; the fence protects the record meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from reefknot.errors import LeaseLostError
from reefknot.runtime.log import logger, printable
from reefknot.runtime.redaction import redact

if TYPE_CHECKING:
    from reefknot.core.idempotency import Claim
    from reefknot.ports.idempotency_store import IdempotencyStore


class Renewal:
    """`async with Renewal(store, claim, lease): …` renews the claim three times per lease."""

    def __init__(self, store: IdempotencyStore, claim: Claim, lease: float) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self._work_task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancelled_before = 0
        self._lost: LeaseLostError | None = None

    @property
    def lost(self) -> bool:
        """Whether another owner holds the key."""
        return self._lost is not None

    async def __aenter__(self) -> Self:
        self._work_task = asyncio.current_task()
        assert self._work_task is not None
        self._cancelled_before = self._work_task.cancelling()
        # Most work ends before its lease has to be renewed: a timer is cheap, and a task is made only for the rest.
        self._timer = asyncio.get_running_loop().call_later(self._lease / 3, self._begin)
        return self

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._lease / 3):
                    await self._store.renew(self._claim, lease=self._lease)
            except LeaseLostError as lost:
                self._lost = lost
                assert self._work_task is not None
                self._work_task.cancel()
                return
            except Exception as error:
                logger().warning(
                    "the lease of key %s could not be renewed and is tried again: %s: %s",
                    printable(redact(self._claim.key), most=80),
                    type(error).__name__,
                    printable(redact(str(error)), most=300),
                )
            await asyncio.sleep(self._lease / 3)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._timer is not None
        assert self._work_task is not None
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._lost is None:
            return
        outer_cancelled = self._work_task.uncancel() > self._cancelled_before
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            if outer_cancelled:
                return
            raise self._lost from None
        raise self._lost from error
