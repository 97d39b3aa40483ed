"""
What happened in this process and is not on record yet.

Kept for each store, not for whoever asks: two managers over one store know the same. It is bounded by refusing new
work, because forgetting would make an effect happen twice. It holds no store alive and ends with the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from msgspec import Struct

from reefknot.core.idempotency import Claim, Done, Failed
from reefknot.errors import StoreUnavailableError
from reefknot.ports.audit_log import AuditEntry

if TYPE_CHECKING:
    from reefknot.ports.idempotency_store import IdempotencyStore

MOST = 1000


class Outstanding(Struct, frozen=True):
    """An effect that happened: who did it, what came of it, of which payload."""

    claim: Claim
    ending: Done | Failed
    fingerprint: str
    entries: tuple[AuditEntry, ...]
    """The events that are kept with the record."""


class Unrecorded:
    """The outstanding records of one store."""

    def __init__(self) -> None:
        self._by_key: dict[str, Outstanding] = {}
        self._stuck: set[str] = set()

    @property
    def any_stuck(self) -> bool:
        """Whether something could not be recorded; what is just being written does not count."""
        return bool(self._stuck)

    @property
    def is_full(self) -> bool:
        return len(self._stuck) >= MOST

    def get(self, key: str) -> Outstanding | None:
        return self._by_key.get(key)

    def remember(self, late: Outstanding) -> None:
        self._by_key[late.claim.key] = late

    def stuck(self, late: Outstanding) -> bool:
        """It could not be recorded. False when somebody else has done so meanwhile."""
        if self._by_key.get(late.claim.key) is not late:
            return False
        self._stuck.add(late.claim.key)
        return True

    def take_stuck(self) -> list[Outstanding]:
        """All that could not be recorded, for one writer to try again; it says for each what came of it."""
        taken = [self._by_key[key] for key in self._stuck]
        self._stuck.clear()
        return taken

    def forget(self, late: Outstanding) -> bool:
        """It is on record, or somebody else's is. True for the first who says so."""
        if self._by_key.get(late.claim.key) is not late:
            return False
        del self._by_key[late.claim.key]
        self._stuck.discard(late.claim.key)
        return True

    def refusal(self) -> StoreUnavailableError:
        problem = f"{len(self._stuck)} results wait in this process to be recorded"
        return StoreUnavailableError("of idempotency keys", problem, "mend the store; no new work begins before")


_by_store: WeakKeyDictionary[IdempotencyStore, Unrecorded] = WeakKeyDictionary()


def outstanding_of(store: IdempotencyStore) -> Unrecorded:
    """The one for this store."""
    found = _by_store.get(store)
    if found is None:
        found = _by_store[store] = Unrecorded()
    return found
