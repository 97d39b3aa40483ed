"""
Idempotency keys: shown, counted, resolved and deleted.

An outcome can be set only for a key whose outcome is unknown to everyone else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.console.operations.values import time_text
from reefknot.errors import OperationError
from reefknot.idempotency.model import Done, Failed, KeyRecord, KeyState, Released
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.core.redaction import Redactor


async def show_key(operator: Operator, key: str) -> dict[str, Any]:
    """The record of a key, secrets hidden."""
    record = await operator.store.idempotency.get(key)
    if record is None:
        raise _absent(key)
    return _fields(record, operator.redactor)


async def key_stats(operator: Operator) -> dict[str, Any]:
    """The number of keys in each state, and of all."""
    found = await operator.store.idempotency.counts()
    counts = {state.value: found.get(state, 0) for state in KeyState}
    return counts | {"total": sum(counts.values())}


async def forget_key(operator: Operator, key: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Delete a key, so that its work may run again. A key in progress is refused."""
    from reefknot.idempotency.waiting import end_dead_lease

    keys = operator.store.idempotency
    record = await keys.get(key)
    if record is not None and not dry_run:
        await end_dead_lease(keys, record)
        event = operator.event("idempotency.forget", key, state=record.state.value)
        record = record if await keys.forget(key, events=[event]) else None
    if record is None:
        raise _absent(key)
    fields = {"key": operator.redactor(key), "state": record.state.value, "forgotten": not dry_run}
    return {**fields, "actor": operator.actor, "dry_run": dry_run}


async def resolve_key(
    operator: Operator, key: str, ending: Done | Failed | Released, *, dry_run: bool = False
) -> dict[str, Any]:
    """Set the outcome of a guarded key in state `unknown`."""
    outcome = type(ending).__name__.lower()  # the state that it leads to
    keys = operator.store.idempotency
    record = await keys.get(key)
    if record is None:
        raise _absent(key)
    resolved = False
    if not dry_run:
        resolved = await keys.resolve(key, ending, events=[operator.event("idempotency.resolve", key, outcome=outcome)])
    if not resolved and (not dry_run or record.state is not KeyState.UNKNOWN):
        raise _not_unknown(key, record)
    shown = operator.redactor(key)
    return {"key": shown, "outcome": outcome, "resolved": resolved, "actor": operator.actor, "dry_run": dry_run}


def _not_unknown(key: str, record: KeyRecord) -> OperationError:
    held = record.state is KeyState.IN_PROGRESS
    why = "a caller holds it; try again when its lease has ended" if held else "its outcome is recorded"
    text = f"key {printable(key[:200])!r} is {record.state.value}, not unknown: {why} (reefknot idempotency show)"
    return OperationError(text, "temporary" if held else "conflict")


def _absent(key: str) -> OperationError:
    text = f"there is no record for key {printable(key[:200])!r}, or its retention has ended"
    return OperationError(text, "not_found")


def _fields(record: KeyRecord, redactor: Redactor) -> dict[str, Any]:
    def hidden(text: str | None) -> Any:
        return None if text is None else redactor.tree(msgspec.json.decode(text))

    return {
        "key": redactor(record.key),
        "state": record.state.value,
        "owner": redactor(record.owner),
        "fence": record.fence,
        "guard": record.guard,
        "fingerprint": record.fingerprint or None,
        **_lease(record),
        "result": hidden(record.result),
        "failure": hidden(record.failure),
        "metadata": hidden(record.metadata),
        "created_at": time_text(record.created_at),
        "updated_at": time_text(record.updated_at),
        "expires_at": time_text(record.expires_at),
    }


def _lease(record: KeyRecord) -> dict[str, Any]:
    """The end of the lease of a held key. Leases are measured by the machine's steady clock, as here."""
    from reefknot.runtime.clocks import SystemClock

    if record.state is not KeyState.IN_PROGRESS:
        return {"lease_ends_at": None, "lease_seconds_left": None}
    clock = SystemClock()
    left_ms = max(0, record.lease_until - int(clock.now() * 1000))
    return {
        "lease_ends_at": time_text(int(clock.wall() * 1000) + left_ms) if left_ms else None,
        "lease_seconds_left": left_ms / 1000,
    }
