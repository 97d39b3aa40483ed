"""`reefknot queue`: job types and tenants paused and resumed, and what waits for a limit. Every change is audited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from reefknot.console.cli.app import Exit, examples, noun
from reefknot.console.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, Wide, arg
from reefknot.console.cli.output import put, put_table, relative, say, show
from reefknot.console.cli.store import StoreAddress, address_of, looked, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations import queues as operations

if TYPE_CHECKING:
    from collections.abc import Mapping

app = noun("queue", "queue pause --type 'billing.*' --reason 'the ledger is closed'", "queue resume --type 'billing.*'")

Type = Annotated[str | None, arg("Job type; * stands for any text: 'billing.*'.")]
TenantName = Annotated[str | None, arg("Tenant.")]


@app.command(help_epilogue=examples("queue pause --type billing.charge --until 2h", "queue pause --tenant acme"))
def pause(
    *,
    type: Type = None,  # noqa: A002 - the name of the flag
    tenant: TenantName = None,
    until: Annotated[str | None, arg("Time of its end, or a duration from now: 90s, 15m, 2h, 7d.")] = None,
    reason: Annotated[str, arg("Reason, shown in lists and audited.")] = "",
    options: OperatorFlags = OPERATOR,
) -> int:
    """
    Pause a job type or a tenant: nothing of it begins, on any machine, until it is resumed.

    What runs may finish. Submissions are accepted, and wait in their place; a retry that is due waits as well.
    """
    operations.checked_subject(type, tenant)
    operations.until_ms(until, 0 if until is None else _now())
    address, dry_run = address_of(options), options.dry_run
    given: dict[str, Any] = {"type": type, "tenant": tenant, "until": until, "reason": reason, "dry_run": dry_run}
    if dry_run:
        fields = looked(address, lambda at: operations.pause_queue(at, **given))
    else:
        fields = with_store(
            address, lambda store: operations.pause_queue(address.operator(store), **given), creates=True
        )
    return _put_change(fields, "paused", json=options.json)


def _now() -> int:
    from reefknot import clock

    return int(clock.wall() * 1000)


@app.command(help_epilogue=examples("queue resume --type billing.charge", "queue resume --tenant acme --dry-run"))
def resume(
    *,
    type: Type = None,  # noqa: A002 - the name of the flag
    tenant: TenantName = None,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Resume a paused job type or tenant, by the name under which it was paused: `queue list` has it."""
    operations.checked_subject(type, tenant)
    address, dry_run = address_of(options), options.dry_run
    fields = looked(address, lambda at: operations.resume_queue(at, type=type, tenant=tenant, dry_run=dry_run))
    return _put_change(fields, "resumed", json=options.json)


def _put_change(fields: Mapping[str, Any], done: str, *, json: bool) -> int:
    what, until = f"{fields['what']} {fields['name']}", fields.get("until")

    def text() -> None:
        if not fields["changed"]:
            put(f"{what} is {'paused already' if done == 'paused' else 'not paused'}")
        else:
            put(f"{what} {'would be ' if fields['dry_run'] else ''}{done}{f' until {until}' if until else ''}")
        if fields["note"]:
            say(f"note: {fields['note']}")

    show(dict(fields), text, json=json)
    return Exit.FINE


@app.command(name="list", help_epilogue=examples("queue list", "queue list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List what is paused, and the limits of the running routers with the work that waits for them."""
    address = address_of(options, looks=True)
    repeated(watch, lambda: _list(address, wide=wide, json=options.json))


def _list(address: StoreAddress, *, wide: bool, json: bool) -> None:
    fields = looked(address, operations.list_queue)

    def text() -> None:
        rows = [
            (f"{one['what']} {one['name']}", one["since"], one["until"] or "resumed", one["by"], one["reason"] or "-")
            for one in fields["paused"]
        ]
        put_table(("paused", "since", "until", "by", "reason"), rows, styles=("cyan",), whole=("paused",), wide=wide)
        if not rows:
            say("nothing is paused; pause with: reefknot queue pause --type TYPE")
        limits = [
            (one["name"], one["text"], _held(one["held"]), relative(one["place"]) or "-") for one in fields["limits"]
        ]
        if limits:
            put()
            put_table(("limit", "at most", "waiting", "defined in"), limits, styles=("cyan",), wide=wide)

    show(fields, text, json=json)


def _held(held: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['waiting']} for {key}" for key, one in held.items()) or "-"
