"""
`reefknot idempotency`: show, count, resolve and delete idempotency keys.

A change by an operator is audited. An outcome can be set only for a key whose outcome is unknown to everyone else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, arg
from reefknot.cli.output import put, put_fields, put_table, show, time_text
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.core.idempotency import Done, Failed, KeyRecord, KeyState, Released
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.ports.store import Store

app = noun("idempotency", "idempotency stats")

Key = Annotated[str, arg("Idempotency key.")]


@app.command(name="show", help_epilogue=examples("idempotency show order-7"))
def show_key(key: Key, /, *, options: StoreFlags = STORE) -> None:
    """Show the record of a key. Configured secrets, and values beside names such as `password`, are hidden."""
    address = address_of(options)
    record = with_store(address, lambda store: store.idempotency.get(key))
    if record is None:
        raise _absent(key)
    fields = _fields(record, address)
    show(fields, lambda: put_fields(fields), json=options.json)


@app.command(help_epilogue=examples("idempotency stats --json"))
def stats(*, options: StoreFlags = STORE) -> None:
    """Count the keys in each state. Keys in state `unknown` wait for an operator."""
    found = with_store(address_of(options), lambda store: store.idempotency.counts())
    counts = {state.value: found.get(state, 0) for state in KeyState}
    counts["total"] = sum(counts.values())
    rows = [(state, str(number)) for state, number in counts.items()]
    show(counts, lambda: put_table(("state", "keys"), rows, styles=("cyan",)), json=options.json)


@app.command(help_epilogue=examples("idempotency forget order-7 --dry-run"))
def forget(key: Key, /, *, options: OperatorFlags = OPERATOR) -> None:
    """Delete a key, so that its work may run again. A key in progress is refused (exit code 75)."""
    from reefknot.idempotency.waiting import end_dead_lease

    address, dry_run = address_of(options), options.dry_run

    async def work(store: Store) -> KeyRecord | None:
        record = await store.idempotency.get(key)
        if record is None or dry_run:
            return record
        await end_dead_lease(store.idempotency, record)
        events = [address.event("idempotency.forget", key, state=record.state.value)]
        return record if await store.idempotency.forget(key, events=events) else None

    record = with_store(address, work)
    if record is None:
        raise _absent(key)
    shown, done = address.redactor(key), "would be deleted" if dry_run else "deleted"
    data = {"key": shown, "state": record.state, "forgotten": not dry_run, "actor": address.actor}
    show(data, lambda: put(f"{shown} ({record.state}) {done}; its work may run again"), json=options.json)


@app.command(help_epilogue=examples("idempotency resolve charge:order-7 --done '{\"id\": 7}'"))
def resolve(
    key: Key,
    /,
    *,
    done: Annotated[str | None, arg("The effect happened: its result, as JSON.")] = None,
    failed: Annotated[str | None, arg("The effect failed for good: the reason.")] = None,
    released: Annotated[bool, arg("The effect never happened: the next caller may try.")] = False,
    options: OperatorFlags = OPERATOR,
) -> None:
    """Set the outcome of a guarded key in state `unknown`, with one of --done, --failed and --released."""
    ending = _ending(done, failed, released)
    outcome = type(ending).__name__.lower()  # the state that it leads to
    address, dry_run = address_of(options), options.dry_run

    async def work(store: Store) -> tuple[KeyRecord | None, bool]:
        record = await store.idempotency.get(key)
        if record is None or dry_run:
            return record, False
        events = [address.event("idempotency.resolve", key, outcome=outcome)]
        return record, await store.idempotency.resolve(key, ending, events=events)

    record, resolved = with_store(address, work)
    if record is None:
        raise _absent(key)
    if not resolved and (not dry_run or record.state != "unknown"):
        raise _not_unknown(key, record)
    shown = address.redactor(key)
    data = {"key": shown, "outcome": outcome, "resolved": resolved, "actor": address.actor, "dry_run": dry_run}
    would = "would be" if dry_run else "is now"
    show(data, lambda: put(f"{shown} (unknown) {would} {outcome}; later callers get that outcome"), json=options.json)


def _ending(done: str | None, failed: str | None, released: bool) -> Done | Failed | Released:
    from reefknot.core.canonical import canonical

    if (done is not None) + (failed is not None) + released != 1:
        raise CommandError("name the outcome with exactly one of --done JSON, --failed TEXT and --released")
    if done is not None:
        try:
            return Done(canonical(msgspec.json.decode(done)).decode())
        except RecursionError:
            raise CommandError("--done: nested too deeply; no result of a step is") from None
        except msgspec.DecodeError as error:
            raise CommandError(f"--done: not JSON: {error}; a text is written as '\"…\"', no result as null") from None
    return Released() if failed is None else Failed(canonical({"message": failed}).decode())


def _not_unknown(key: str, record: KeyRecord) -> CommandError:
    held = record.state == "in_progress"
    why = "a caller holds it; try again when its lease has ended" if held else "its outcome is recorded"
    text = f"key {printable(key[:200])!r} is {record.state.value}, not unknown: {why} (reefknot idempotency show)"
    return CommandError(text, Exit.TEMPORARY if held else Exit.FAILED)


def _absent(key: str) -> CommandError:
    return CommandError(f"there is no record for key {printable(key[:200])!r}, or its retention has ended", Exit.FAILED)


def _fields(record: KeyRecord, address: StoreAddress) -> dict[str, Any]:
    def hidden(text: str | None) -> Any:
        return None if text is None else address.redactor.tree(msgspec.json.decode(text))

    return {
        "key": address.redactor(record.key),
        "state": record.state.value,
        "owner": address.redactor(record.owner),
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
    from reefknot.engines.clocks import SystemClock

    if record.state is not KeyState.IN_PROGRESS:
        return {"lease_ends_at": None, "lease_seconds_left": None}
    clock = SystemClock()
    left_ms = max(0, record.lease_until - int(clock.now() * 1000))
    return {
        "lease_ends_at": time_text(int(clock.wall() * 1000) + left_ms) if left_ms else None,
        "lease_seconds_left": left_ms / 1000,
    }
