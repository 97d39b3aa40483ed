"""A store whose calls fail on demand, and what a test needs to look at its events."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Any

from reefknot import clock, errors
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import AnyEvent, IdempotencyEvent, decode
from reefknot.audit.port import AuditEntry, AuditLog, AuditQuery
from reefknot.idempotency.events import KeyEvents
from reefknot.idempotency.model import Claim, ClaimResult, Ending, KeyRecord
from reefknot.idempotency.once import KeyOptions, Once
from reefknot.idempotency.port import IdempotencyStore

DOWN = errors.StoreUnavailableError("test", "the disk is on fire", "wait")


class Failing:
    """An idempotency store in front of another: `fails[name]` calls of a method fail, `hangs` never answer."""

    def __init__(self, inner: IdempotencyStore) -> None:
        self.inner = inner
        self.fails: Counter[str] = Counter()
        self.hangs: set[str] = set()
        self.done_but_lost: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.error: Exception = DOWN

    @property
    def audit(self) -> AuditLog:
        return self.inner.audit

    async def _through(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls[name] += 1
        if name in self.hangs:
            await asyncio.Event().wait()
        if self.fails[name] > 0:
            self.fails[name] -= 1
            raise copy(self.error)  # a fresh one: a traceback would hold on to what it passed
        answer = await call()
        if self.done_but_lost[name] > 0:
            self.done_but_lost[name] -= 1
            raise copy(self.error)  # a fresh one: a traceback would hold on to what it passed
        return answer

    async def claim(self, key: str, **more: Any) -> ClaimResult:
        answer: ClaimResult = await self._through("claim", lambda: self.inner.claim(key, **more))
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        record: KeyRecord = await self._through("renew", lambda: self.inner.renew(claim, lease=lease))
        return record

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        self.inner.extend(claims, lease=lease)

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        record: KeyRecord = await self._through("finish", lambda: self.inner.finish(claim, ending, events=events))
        return record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def key_events(store: IdempotencyStore, key: str, *, one_chain: bool = True) -> KeyEvents:
    def event(action: str) -> IdempotencyEvent:
        return IdempotencyEvent(**envelope(wall=clock.wall()), idempotency_key=key, action=action)

    return KeyEvents(Journal(store.audit), event, one_chain=one_chain)


async def once(
    store: IdempotencyStore,
    key: str,
    work: Callable[[], Awaitable[Any]],
    options: KeyOptions | None = None,
    *,
    chain: bool = True,
) -> Any:
    return await Once(store).run(key, work, options or KeyOptions(), key_events(store, key, one_chain=chain))


async def events_in(log: AuditLog) -> list[AnyEvent]:
    return [decode(kept.entry.body) for kept in await log.read(AuditQuery(limit=100_000))]


async def actions_in(log: AuditLog) -> list[str]:
    return [event.action for event in await events_in(log) if isinstance(event, IdempotencyEvent)]
