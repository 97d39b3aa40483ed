"""
`reefknot telemetry`: what the retries of each connector came to, counted by all processes over a store.

`--json` is the schema of `retry_metrics` and nothing else; what is counted beside it is under a key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.options import OPERATOR, STORE, ConnectorName, OperatorFlags, StoreFlags, Wide, arg, unknown
from reefknot.cli.output import plural, put, put_document, put_table, say, seconds, show
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.cli.watch import Watch, repeated
from reefknot.core.retry.tuning import ConnectorCounts, TuningAnswer, Verdict, proposed_values

if TYPE_CHECKING:
    from reefknot.ingestion.telemetry import ConnectorMetrics
    from reefknot.ports.store import Store

app = noun("telemetry", "telemetry show", "telemetry show --json")

NOTHING_COUNTED = (
    "nothing is counted: no job of a source has run over this store, or none since `telemetry reset`; "
    "`source run` runs one, and so does `up` with a schedule"
)
_RESET_TRIES = 50
_CONNECTOR = re.compile(r"[a-z][a-z0-9_]{2,63}")  # what a configuration accepts


def stored(address: StoreAddress, connector: str | None = None) -> dict[str, ConnectorMetrics]:
    """
    The counts of every connector that has any, or of one, which may have none.

    A store that has not been made yet has no counts. A name that is no connector's is refused.
    """
    from reefknot.ingestion.telemetry import ConnectorMetrics, DamagedMetricsError, stored_metrics

    async def read(store: Store) -> dict[str, ConnectorMetrics]:
        try:
            return await stored_metrics(store.values)
        except DamagedMetricsError as error:
            way_out = f"`telemetry reset {error.connector}` starts its counts anew"
            raise CommandError(f"{error}; {way_out}", Exit.MISMATCH) from None

    found = {} if address.is_unmade() else dict(sorted(with_store(address, read).items()))
    if connector is None:
        return found
    _check_connector("--connector", connector, address, found)
    return {connector: found.get(connector, ConnectorMetrics())}


def _check_connector(flag: str, name: str, address: StoreAddress, counted: Iterable[str]) -> None:
    """Refuse what is no connector: one is built in, in the configuration, or has counts."""
    from reefknot.connectors.registry import BUILTIN

    known = {*BUILTIN, *counted}
    if address.settings is not None:
        written = address.settings.configuration
        known |= {*written.retry_policies, *written.ingestion.connectors}
        known |= {source.connector for source in written.sources.values()}
    if name not in known:
        raise unknown(flag, name, sorted(known))


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
        if not any(one.executions for one in found.values()):
            say(NOTHING_COUNTED)

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


def _found_by_name(address: StoreAddress) -> dict[str, ConnectorMetrics | None]:
    """The counts by connector; None for a record that cannot be read, which a reset is for as well."""
    from reefknot.ingestion.telemetry import PREFIX, DamagedMetricsError, decoded_metrics

    async def read(store: Store) -> dict[str, ConnectorMetrics | None]:
        found: dict[str, ConnectorMetrics | None] = {}
        for one in await store.values.list(PREFIX):
            name = one.name.removeprefix(PREFIX)
            try:
                found[name] = decoded_metrics(name, one.body)
            except DamagedMetricsError:
                found[name] = None
        return found

    return {} if address.is_unmade() else with_store(address, read)


@app.command(help_epilogue=examples("telemetry reset imap_mailbox"))
def reset(
    connector: Annotated[str, arg("Connector whose counts begin anew.")], /, *, options: OperatorFlags = OPERATOR
) -> None:
    """Begin the counts of a connector anew, so that they tell of its present policy alone. The reset is audited."""
    from reefknot.ingestion.telemetry import PREFIX

    address = address_of(options)
    found = _found_by_name(address)
    _check_connector("CONNECTOR", connector, address, found)
    is_news = connector in found

    async def work(store: Store) -> None:
        metrics = found[connector]
        counts = None if metrics is None else msgspec.to_builtins(metrics.as_written())
        event = address.event("telemetry.reset", connector, counts=counts)
        for _ in range(_RESET_TRIES):  # a system that runs adds to the counts every second
            value = await store.values.get(PREFIX + connector)
            if value is None or await store.values.delete(PREFIX + connector, version=value.version, events=[event]):
                return
        raise CommandError(f"the counts of {connector} are changed all the time; try again", Exit.TEMPORARY)

    if is_news and not options.dry_run:
        with_store(address, work)
    fields = {"connector": connector, "changed": is_news, "actor": address.actor, "dry_run": options.dry_run}
    begins = f"{'would begin' if options.dry_run else 'begins'} anew"
    show(fields, lambda: put(f"{connector} {begins if is_news else 'has no counts'}"), json=options.json)


# ---- proposals of `policy tune` --------------------------------------------------------------------------------------

CANNOT_KNOW = (
    "Counts begin with the store, or with `telemetry reset`: those of an earlier policy are in them until then.",
    "Whether another wait would have helped is a guess from the waits that there were; nothing is tried out.",
    "Successes are not counted by failure type, and a job in quarantine is taken to have had all its retries.",
)
"""What the counts cannot tell."""


_WORDS = {Verdict.ADVICE: "advice: ", Verdict.KEEP: "no change: ", Verdict.NOT_ENOUGH_DATA: ""}


class TunedConnector(Struct, frozen=True):
    """The counts of one connector, the answers about its policy, and the sources that have a policy of their own."""

    name: str
    counts: ConnectorCounts
    answers: list[TuningAnswer]
    own_policies: list[str]

    @property
    def fields(self) -> dict[str, int]:
        """The fields to write into its policy; none where a configuration does not accept its name."""
        return proposed_values(self.answers) if _CONNECTOR.fullmatch(self.name) else {}

    def as_json(self) -> dict[str, Any]:
        answers = msgspec.to_builtins(self.answers)
        return {"jobs": self.counts.jobs, "answers": answers, "sources_with_own_policies": self.own_policies}


def counts_of(metrics: ConnectorMetrics) -> ConnectorCounts:
    """The counts that proposals are computed from."""
    return ConnectorCounts(
        {int(executions): number for executions, number in metrics.successes.items()},
        metrics.failures,
        metrics.quarantined,
        metrics.retried_after,
    )


def put_tuning(found: Sequence[TunedConnector], *, json: bool) -> None:
    """The answers about all connectors, and the YAML of their proposals."""
    yaml = _yaml({one.name: one.fields for one in found if one.fields})
    fields = {"connectors": {one.name: one.as_json() for one in found}, "yaml": yaml, "cannot_know": CANNOT_KNOW}

    def text() -> None:
        for one in found:
            _put_answers(one)
        if yaml:
            put_document(yaml)

    show(fields, text, json=json)
    if yaml:
        say("Nothing was changed. To apply: put these keys into `retry_policies:` of the configuration.")
        say("Then: reefknot policy check, and reefknot telemetry reset, so that the effect can be seen.")
    elif found:
        say("No change is proposed.")
    else:
        say(NOTHING_COUNTED)
    if found and not json:
        for line in CANNOT_KNOW:
            say(line)


def _put_answers(found: TunedConnector) -> None:
    put(f"{found.name}: {plural(found.counts.jobs, 'job')}, {plural(found.counts.executions, 'execution')}")
    for one in found.answers:
        if one.verdict is Verdict.PROPOSAL:
            put(f"  proposal: {one.field}: {one.current} → {one.proposed}")
            put(f"    why: {one.why}")
            put(f"    effect: {one.effect}")
        else:
            put(f"  {_WORDS[one.verdict]}{one.question}: {one.why}")
    if found.own_policies:
        put(f"  with a policy of their own, and in these counts: {', '.join(found.own_policies)}")
    if proposed_values(found.answers) and not found.fields:
        put("  a configuration does not accept this name: set the policy in the program (RetryPolicyRegistry)")
    put()


def _yaml(policies: Mapping[str, Mapping[str, int]]) -> str:
    from reefknot.config.editing import with_entry

    text = ""
    for name, values in policies.items():
        text, _ = with_entry(text, "retry_policies", name, values=values, file="proposal", written_in="yaml")
    return text
