"""`reefknot schedule`: the timetables of schedules and sources, and what came of them. Every change is audited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from reefknot.console.cli.app import Exit, examples, noun
from reefknot.console.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, Wide, arg
from reefknot.console.cli.output import put, put_fields, put_table, say, show
from reefknot.console.cli.store import StoreAddress, address_of, looked, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations import schedules as operations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from reefknot.console.operations.operator import Operator

app = noun("schedule", "schedule list", "schedule run nightly")

Name = Annotated[str, arg("Name of the schedule.")]


@app.command(name="list", help_epilogue=examples("schedule list", "schedule list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List schedules and sources with their timetables, due times, and the outcome of the last job."""
    address = address_of(options, looks=True)
    repeated(watch, lambda: _list(address, wide=wide, json=options.json))


def _list(address: StoreAddress, *, wide: bool, json: bool) -> None:
    fields = looked(address, operations.list_schedules)
    found = fields["schedules"]

    def text() -> None:
        columns = ("name", "timetable", "next due", "last due", "last outcome")
        rows = [
            (one["name"], one["timetable"], _next_in_words(one), one["last_due"] or "-", one["last_outcome"] or "-")
            for one in found
        ]
        put_table(columns, rows, styles=("cyan",), whole=("name", "next due"), optional=("last due",), wide=wide)
        if not found:
            say("no schedule is configured; add one under `schedules:` in reefknot.yaml")

    show(fields, text, json=json)


def _next_in_words(fields: Mapping[str, Any]) -> str:
    if fields["paused"]:
        return f"paused by {fields['paused_by'] or 'unknown'}" + (f": {fields['why']}" if fields["why"] else "")
    return fields["next_due"] or "-"


@app.command(name="show", help_epilogue=examples("schedule show nightly", "schedule show nightly --json"))
def show_(name: Name, /, *, options: StoreFlags = STORE) -> None:
    """Show one schedule: its timetable, and its last 20 runs with the state of each job."""
    address = address_of(options)
    operations.check_schedule(address.operator(None), name, "show")
    fields = looked(address, lambda at: operations.show_schedule(at, name))

    def text() -> None:
        put_fields({one: value for one, value in fields.items() if one != "runs"})
        put()
        rows = [(one["due"], one["submitted_at"] or "-", one["job"] or "-", one["outcome"]) for one in fields["runs"]]
        put_table(("due", "submitted", "job", "outcome"), rows, whole=("due", "job"))
        if not rows:
            say(f"{name} has not been due yet")

    show(fields, text, json=options.json)


@app.command(help_epilogue=examples("schedule run nightly", "schedule run nightly --missed --dry-run"))
def run(
    name: Name,
    /,
    *,
    missed: Annotated[bool, arg("Submit one job for each of the last 20 due times that was missed.")] = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Submit the assignment of a schedule now, outside its timetable, and print the job's id."""
    address, dry_run = address_of(options), options.dry_run
    operations.check_schedule(address.operator(None), name, "run")
    fields = _changed(
        address, lambda at: operations.run_schedule(at, name, missed=missed, dry_run=dry_run), creates=not dry_run
    )

    def text() -> None:
        for job in fields["jobs"]:
            put(f"{job} would be submitted" if dry_run else job)
        if not fields["jobs"]:
            put(f"{name} has missed no due time" if missed else f"{name} would be submitted")

    show(fields, text, json=options.json)
    return Exit.FINE


def _changed(
    address: StoreAddress, change: Callable[[Operator], Awaitable[dict[str, Any]]], *, creates: bool
) -> dict[str, Any]:
    """The answer of `change(operator)`. What holds for systems that will be started is kept: it creates a store, and so
    its words are checked before."""
    if creates:
        return with_store(address, lambda store: change(address.operator(store)), creates=True)
    return looked(address, change)


@app.command(help_epilogue=examples("schedule pause nightly --because 'the stock is counted'"))
def pause(
    name: Name,
    /,
    *,
    because: Annotated[str, arg("Reason, shown in the list and audited.")],
    options: OperatorFlags = OPERATOR,
) -> int:
    """Pause a timetable for all processes: its due times are passed over until it is resumed."""
    address, dry_run = address_of(options), options.dry_run
    operations.check_schedule(address.operator(None), name, "pause", because=because)
    fields = _changed(
        address,
        lambda at: operations.pause_schedule(at, name, because=because, dry_run=dry_run),
        creates=not dry_run,
    )
    return _put_change(fields, "paused", json=options.json)


@app.command(help_epilogue=examples("schedule resume nightly"))
def resume(name: Name, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Resume a paused timetable with its next due time; what was due meanwhile is passed over."""
    address, dry_run = address_of(options), options.dry_run
    fields = _changed(address, lambda at: operations.resume_schedule(at, name, dry_run=dry_run), creates=False)
    return _put_change(fields, "resumed", json=options.json)


def _put_change(fields: Mapping[str, Any], done: str, *, json: bool) -> int:
    name, is_pause = fields["name"], done == "paused"

    def text() -> None:
        if not fields["changed"]:
            put(f"{name} is {'paused already' if is_pause else 'not paused'}")
        elif fields["dry_run"]:
            put(f"{name} would be {done}")
        else:
            put(f"{name} {done}" + ("" if is_pause else f"; next due: {fields['next_due'] or '-'}"))

    show(fields, text, json=json)
    return Exit.FINE
