"""
What is in scope: the store, and whoever wants to hear of keys whose outcome is unknown.

`async with open_store(…)` puts its store here for the code inside, so that a decorated function need not be handed one.
A worker puts a list here for each attempt: what a guarded key leaves behind unknown must not be tried again by itself.

Keys and their records, by the documented names.

For whoever asks, records or clears by hand. Guarding an effect is `Once`'s business, which claims before it acts:
checking here and then acting would let two callers act.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, event_id, now_text
from reefknot.core.audit.event import IdempotencyEvent
from reefknot.core.canonical import fingerprint, json_value, result_to_json
from reefknot.core.idempotency import KeyState, compute_key
from reefknot.errors import KeyConflictError, NoStoreError
from reefknot.idempotency.events import Telling
from reefknot.idempotency.once import How, Once

if TYPE_CHECKING:
    from reefknot.ports.idempotency_store import IdempotencyStore
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


class Lookup(Struct, frozen=True):
    """What is on record for a key; a recorded None is told from none at all."""

    found: bool
    result: Any = None
    state: str | None = None
    metadata: Any = None


class IdempotencyManager:
    """Keys and their records. Events go to `journal`, if there is one."""

    def __init__(self, store: IdempotencyStore, *, journal: Journal | None = None) -> None:
        self.store = store
        self.once = Once(store)
        self._journal = journal or Journal(None)

    @staticmethod
    def compute_idempotency_key(
        operation: str,
        tenant_id: str | None = None,
        correlation_id: str | None = None,
        additional_params: Mapping[str, object] | None = None,
    ) -> str:
        """The same four, the same key, whatever the order inside the parameters."""
        return compute_key(operation, tenant_id, correlation_id, additional_params)

    async def check_idempotency(self, idempotency_key: str) -> Any | None:
        """The recorded result, or None when there is none. `lookup` tells a recorded None apart."""
        found = await self.lookup(idempotency_key)
        if found.found:
            await self._journal.write(self._event(idempotency_key, "hit"))
        return found.result

    async def lookup(self, idempotency_key: str) -> Lookup:
        """What is on record."""
        record = await self.store.get(idempotency_key)
        if record is None:
            return Lookup(False)
        metadata = None if record.metadata is None else msgspec.json.decode(record.metadata)
        if record.state is not KeyState.DONE or record.result is None:
            return Lookup(False, None, record.state.value, metadata)
        return Lookup(True, msgspec.json.decode(record.result), record.state.value, metadata)

    async def record_result(self, idempotency_key: str, result: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Put a result on record by hand. The same once more is fine; another answer than the recorded is refused."""
        given = json_value(result)
        kept = None if metadata is None else result_to_json(dict(metadata))

        async def known() -> Any:
            return given

        telling = Telling(self._journal, lambda action: self._event(idempotency_key, action), one_chain=False)
        recorded = await self.once.run(idempotency_key, known, How(wait=0.0, metadata=kept), telling)
        await telling.tell()
        mine, theirs = fingerprint(given), fingerprint(recorded)
        if mine != theirs:
            raise KeyConflictError(idempotency_key, recorded=theirs, given=mine)

    async def clear_idempotency(self, idempotency_key: str) -> None:
        """Forget a key that nobody holds."""
        if await self.store.forget(idempotency_key):
            await self._journal.write(self._event(idempotency_key, "forget"))

    def _event(self, key: str, action: str) -> IdempotencyEvent:
        return IdempotencyEvent(timestamp=now_text(), event_id=event_id(), idempotency_key=key, action=action)
