"""
`reefknot telemetry`: retry outcomes by connector, counted by all processes over a store.

`--json` is the schema of `retry_metrics` and nothing else; other counts are under a key of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from reefknot.console.cli.app import CommandError, examples, noun
from reefknot.console.cli.options import OPERATOR, STORE, ConnectorName, OperatorFlags, StoreFlags, Wide, arg
from reefknot.console.cli.output import put, put_document, put_table, say, show
from reefknot.console.cli.store import address_of, looked
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations import telemetry as operations
from reefknot.console.operations.values import ParameterUseError, plural, seconds
from reefknot.ingest.telemetry import ConnectorMetrics
from reefknot.policy.model.tuning import ConnectorCounts, TuningAnswer, Verdict, proposed_values

app = noun("telemetry", "telemetry show", "telemetry show --json")

NOTHING_COUNTED = (
    "nothing is counted: no job of a source has run over this store, or none since `telemetry reset`; "
    "`source run` runs one, and so does `up` with a schedule"
)
_CONNECTOR = re.compile(r"[a-z][a-z0-9_]{2,63}")  # what a configuration accepts


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
    address = address_of(options, looks=True)

    def look() -> None:
        fields = looked(address, lambda at: operations.show_telemetry(at, connector=connector, details=True))
        found = msgspec.convert(fields["details"], dict[str, ConnectorMetrics])
        shown = fields if details else {"retry_metrics": fields["retry_metrics"]}
        show(shown, lambda: _put(found, details=details, wide=wide), json=options.json)
        if not any(one.executions for one in found.values()):
            say(NOTHING_COUNTED)

    repeated(watch, look)


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
    connector: Annotated[str, arg("Connector whose counts are reset.")], /, *, options: OperatorFlags = OPERATOR
) -> None:
    """Reset the counts of a connector, so that they describe its current policy alone. The reset is audited."""
    address, dry_run = address_of(options), options.dry_run
    try:
        fields = looked(address, lambda at: operations.reset_telemetry(at, connector, dry_run=dry_run))
    except ParameterUseError as error:  # an argument here, not the flag of this name
        raise CommandError(f"CONNECTOR: {error.problem}") from None
    reset = "counts would be reset" if dry_run else "counts reset"
    show(fields, lambda: put(f"{connector}: {reset if fields['changed'] else 'no counts'}"), json=options.json)


# ---- proposals of `policy tune` --------------------------------------------------------------------------------------

CANNOT_KNOW = (
    "Counts begin with the store, or with `telemetry reset`: those of an earlier policy are in them until then.",
    "Whether another wait would have helped is a guess from the waits that there were; nothing is tried out.",
    "Successes are not counted by failure type, and a job in quarantine is taken to have had all its retries.",
)
"""What the counts cannot show."""


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
    from reefknot.policy.editing import with_entry

    text = ""
    for name, values in policies.items():
        text, _ = with_entry(text, "retry_policies", name, values=values, file="proposal", written_in="yaml")
    return text
