"""
`reefknot idempotency`: show, count, resolve and delete idempotency keys.

A change by an operator is audited. An outcome can be set only for a key whose outcome is unknown to everyone else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from reefknot.console.cli.app import CommandError, examples, noun
from reefknot.console.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, arg
from reefknot.console.cli.output import put, put_fields, put_table, show
from reefknot.console.cli.store import address_of, with_store
from reefknot.console.operations import idempotency as operations
from reefknot.idempotency.model import Done, Failed, Released

app = noun("idempotency", "idempotency stats")

Key = Annotated[str, arg("Idempotency key.")]


@app.command(name="show", help_epilogue=examples("idempotency show order-7"))
def show_key(key: Key, /, *, options: StoreFlags = STORE) -> None:
    """Show the record of a key. Configured secrets, and values of fields such as `password`, are hidden."""
    address = address_of(options, looks=True)
    fields = with_store(address, lambda store: operations.show_key(address.operator(store), key))
    show(fields, lambda: put_fields(fields), json=options.json)


@app.command(help_epilogue=examples("idempotency stats --json"))
def stats(*, options: StoreFlags = STORE) -> None:
    """Count the keys in each state. Keys in state `unknown` wait for an operator."""
    address = address_of(options, looks=True)
    counts = with_store(address, lambda store: operations.key_stats(address.operator(store)))
    rows = [(state, str(number)) for state, number in counts.items()]
    show(counts, lambda: put_table(("state", "keys"), rows, styles=("cyan",)), json=options.json)


@app.command(help_epilogue=examples("idempotency forget order-7 --dry-run"))
def forget(key: Key, /, *, options: OperatorFlags = OPERATOR) -> None:
    """Delete a key, so that its work may run again. A key in progress is refused (exit code 75)."""
    address, dry_run = address_of(options), options.dry_run
    done = with_store(address, lambda store: operations.forget_key(address.operator(store), key, dry_run=dry_run))
    how = "would be deleted" if dry_run else "deleted"
    show(done, lambda: put(f"{done['key']} ({done['state']}) {how}; its work may run again"), json=options.json)


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
    address, dry_run = address_of(options), options.dry_run
    data = with_store(
        address, lambda store: operations.resolve_key(address.operator(store), key, ending, dry_run=dry_run)
    )
    text = f"{data['key']} (unknown) {'would be' if dry_run else 'is now'} {data['outcome']}"
    show(data, lambda: put(f"{text}; later callers get that outcome"), json=options.json)


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
