"""
`UnrecordedResults`: results of effects that happened in this process and are not in the store yet.

There is one instance per store, so that two managers of one store see the same results. It is bounded by refusing new
work, because forgetting a result would repeat its effect. It does not keep the store alive and ends with the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from msgspec import Struct

from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreUnavailableError
from reefknot.idempotency.model import Claim, Done, Failed

if TYPE_CHECKING:
    from reefknot.idempotency.port import IdempotencyStore

MOST_UNRECORDED = 1000


class UnrecordedResult(Struct, frozen=True):
    """The result of an effect, the claim it happened under, and the fingerprint of its payload."""

    claim: Claim
    ending: Done | Failed
    fingerprint: str
    entries: tuple[AuditEntry, ...]
    """Audit entries to keep in the same step as the record."""


class UnrecordedResults:
    """Unrecorded results of one store. `stuck` ones failed to be written; the others are being written."""

    def __init__(self) -> None:
        self._by_key: dict[str, UnrecordedResult] = {}
        self._stuck: set[str] = set()

    @property
    def any_stuck(self) -> bool:
        return bool(self._stuck)

    @property
    def is_full(self) -> bool:
        return len(self._stuck) >= MOST_UNRECORDED

    def get(self, key: str) -> UnrecordedResult | None:
        return self._by_key.get(key)

    def remember(self, result: UnrecordedResult) -> None:
        self._by_key[result.claim.key] = result

    def mark_stuck(self, result: UnrecordedResult) -> bool:
        """Note that writing failed. False when another caller has written it meanwhile."""
        if self._by_key.get(result.claim.key) is not result:
            return False
        self._stuck.add(result.claim.key)
        return True

    def take_stuck(self) -> list[UnrecordedResult]:
        """All stuck results, for one writer; each must be marked or forgotten again."""
        taken = [self._by_key[key] for key in self._stuck]
        self._stuck.clear()
        return taken

    def forget(self, result: UnrecordedResult) -> bool:
        """Drop the result. True to the first caller only, so that its event is written once."""
        if self._by_key.get(result.claim.key) is not result:
            return False
        del self._by_key[result.claim.key]
        self._stuck.discard(result.claim.key)
        return True

    def refusal(self) -> StoreUnavailableError:
        """The error for new work while `is_full`."""
        problem = f"{len(self._stuck)} results wait in this process to be recorded"
        return StoreUnavailableError("of idempotency keys", problem, "repair the store; no new work begins before")


_by_store: WeakKeyDictionary[IdempotencyStore, UnrecordedResults] = WeakKeyDictionary()


def unrecorded_of(store: IdempotencyStore) -> UnrecordedResults:
    """The unrecorded results of this store."""
    found = _by_store.get(store)
    if found is None:
        found = _by_store[store] = UnrecordedResults()
    return found
