"""
`reefknot telemetry`: what the retries of each connector came to, counted by all processes over a store.

`--json` is the schema of `retry_metrics` and nothing else; what is counted beside it is under a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, Wide, arg, unknown
from reefknot.cli.output import plural, put, put_table, say, seconds, show
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.cli.watch import Watch, repeated

if TYPE_CHECKING:
    from reefknot.ingestion.telemetry import ConnectorMetrics
    from reefknot.ports.store import Store

app = noun("telemetry", "telemetry show", "telemetry show --json")

ConnectorName = Annotated[str | None, arg("Only this connector, such as imap_mailbox.")]
NOTHING_YET = "no job of a source has run over this store yet: `source run`, or `up` with a schedule"
_RESET_TRIES = 50


def stored(address: StoreAddress, connector: str | None = None) -> dict[str, ConnectorMetrics]:
    """The counts of every connector, or of one. A store that has not been made yet has none."""
    from reefknot.ingestion.telemetry import stored_metrics

    async def read(store: Store) -> dict[str, ConnectorMetrics]:
        return await stored_metrics(store.values)

    is_new = address.is_sqlite and not address.path.exists()
    found = {} if is_new else dict(sorted(with_store(address, read).items()))
    if connector is None or not found:
        return found
    if connector not in found:
        raise unknown("--connector", connector, found)
    return {connector: found[connector]}


@app.command(name="show", help_epilogue=examples("telemetry show", "telemetry show --connector imap_mailbox --json"))
def show_metrics(
    *,
    connector: ConnectorName = None,
    details: Annotated[bool, arg("Show executions, quarantine and waits, too; in JSON under `details`.")] = False,
    wide: Wide = False,
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """Show the retries of each connector: how many succeeded, after which failures, and how long they waited."""
    address = address_of(options)

    def look() -> None:
        found = stored(address, connector)
        fields: dict[str, Any] = {"retry_metrics": {name: one.as_written() for name, one in found.items()}}
        if details:
            fields["details"] = {name: _details(one) for name, one in found.items()}
        show(fields, lambda: _put(found, details=details, wide=wide), json=options.json)
        if not found:
            say(NOTHING_YET)

    repeated(watch, look)


def _details(metrics: ConnectorMetrics) -> dict[str, Any]:
    """All counts, as they are kept."""
    return {name: getattr(metrics, name) for name in metrics.__struct_fields__}


def _put(found: Mapping[str, ConnectorMetrics], *, details: bool, wide: bool) -> None:
    columns = ("connector", "retries", "successful", "failed", "success rate", "average attempts")
    more = ("after failures", "quarantined", "mean wait")
    rows = [
        (
            name,
            *map(str, (one.successful_retries + one.failed_retries, one.successful_retries, one.failed_retries)),
            _rate(one.successful_retries, one.failed_retries),
            f"{one.average_attempts:.2f}" if one.successes else "-",
            _by_type(one.retried_after),
            _by_type(one.quarantined),
            seconds(round(one.waited_s / one.scheduled, 1)) if one.scheduled else "-",
        )
        for name, one in found.items()
    ]
    optional = ("failed", "average attempts", "mean wait")
    put_table((*columns, *more), rows, styles=("cyan",), whole=("connector",), optional=optional, wide=wide)
    for name, one in found.items() if details else ():
        put()
        put(f"{name}: {plural(one.executions, 'execution')}, {seconds(round(one.busy_s, 1))} busy")
        put(f"  succeeded after  {_by_executions(one.successes)}")
        put(f"  failures         {_by_type(one.failures)}")
        put(f"  retries          {one.scheduled} scheduled")


def _rate(good: int, bad: int) -> str:
    return f"{good / (good + bad):.0%}" if good + bad else "-"


def _by_type(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()) if number) or "-"


def _by_executions(successes: Mapping[str, int]) -> str:
    ordered = sorted((int(executions), number) for executions, number in successes.items())
    return ", ".join(f"{plural(one, 'execution')}: {plural(number, 'job')}" for one, number in ordered) or "-"


@app.command(help_epilogue=examples("telemetry reset imap_mailbox"))
def reset(
    connector: Annotated[str, arg("Connector whose counts begin anew.")], /, *, options: OperatorFlags = OPERATOR
) -> None:
    """Begin the counts of a connector anew, so that they tell of its present policy alone. The reset is audited."""
    from reefknot.ingestion.telemetry import PREFIX

    address = address_of(options)
    found = stored(address)
    if connector not in found:
        raise unknown("CONNECTOR", connector, found, also="" if found else f"; {NOTHING_YET}")

    async def work(store: Store) -> None:
        counts = msgspec.to_builtins(found[connector].as_written())
        event = address.event("telemetry.reset", connector, counts=counts)
        for _ in range(_RESET_TRIES):  # a system that runs adds to the counts every second
            value = await store.values.get(PREFIX + connector)
            if value is None or await store.values.delete(PREFIX + connector, version=value.version, events=[event]):
                return
        raise CommandError(f"the counts of {connector} are changed all the time; try again", Exit.TEMPORARY)

    if not options.dry_run:
        with_store(address, work)
    fields = {"connector": connector, "actor": address.actor, "dry_run": options.dry_run}
    show(fields, lambda: put(f"{connector} {'would begin' if options.dry_run else 'begins'} anew"), json=options.json)
