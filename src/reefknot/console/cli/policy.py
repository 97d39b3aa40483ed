"""
`reefknot policy`: the policy book before anything has failed. No command here runs or changes anything.

Unknown targets, sources and failures are refused with what is accepted, before anything is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, examples, noun
from reefknot.console.cli.options import (
    COMMON,
    STORE,
    CommonFlags,
    ConnectorName,
    FileName,
    Json,
    Modules,
    StoreFlags,
    Wide,
    arg,
    file_arg,
    is_unconfigured,
    settings,
)
from reefknot.console.cli.output import (
    GAP,
    prints_to_stderr,
    put,
    put_document,
    put_table,
    relative,
    say,
    show,
    table_width,
)
from reefknot.console.operations import policies as operations
from reefknot.console.operations.policies import ActiveBook, PolicyQuestion
from reefknot.console.operations.values import ParameterUseError, long_seconds, seconds, unknown_word
from reefknot.console.words import policies as words
from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.policy.model.book import Book, FieldOrigin, FieldValue, ResolvedPolicy
from reefknot.policy.model.explain import PlannedWait
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.policy.model.tuning import CurrentPolicy
    from reefknot.steps.port import Block

# ---- options ---------------------------------------------------------------------------------------------------------

Kind = Annotated[Literal["block", "connector", "operation"] | None, arg("Only blocks, connectors or operations.")]
Source = Annotated[str | None, arg("Configured source; its policy overrides that of its connector.")]
Seed = Annotated[int | None, arg("Draw the waits with this seed, instead of showing their ranges.")]
Target = Annotated[str | None, arg("block:TYPE, connector:TYPE or operation:NAME.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class FailureFlags:
    """The failure that a command asks about."""

    error: Annotated[str | None, arg("Error code, such as http_error or 3003.")] = None
    status: Annotated[int | None, arg("HTTP status.")] = None
    failure_type: Annotated[str | None, arg("Failure type: transient, rate_limited, permanent or unknown.")] = None
    exception: Annotated[str | None, arg("Exception by name: TimeoutError, httpx.ReadTimeout.")] = None
    message: Annotated[str | None, arg("Error message.")] = None
    retry_after: Annotated[float | None, arg("Seconds that the server asked to wait.")] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RequestFlags:
    """The retry options that a request carries."""

    retry_count: Annotated[int | None, arg("Retries that the request asks for, over every policy.")] = None
    timeout_ms: Annotated[int | None, arg("The request's time budget, in milliseconds.")] = None


NO_FAILURE, NO_REQUEST = FailureFlags(), RequestFlags()


def _question(
    target: str | None, source: str | None, flags: FailureFlags, request: RequestFlags, **more: Any
) -> PolicyQuestion:
    _require_target(target, source)
    return PolicyQuestion(target=target, source=source, **asdict(flags), **asdict(request), **more)


def _require_target(target: str | None, source: str | None) -> None:
    if target is None and source is None:
        raise CommandError(f"--target is missing; accepted: {operations.TARGETS}")


# ---- the book --------------------------------------------------------------------------------------------------------


def active_book(config: str | None, modules: Sequence[str] | None = None) -> ActiveBook:
    """The book and the gate; with the modules of one's own steps, as a worker that loads them has it."""
    found = None if is_unconfigured(config) else settings(config)
    if not modules:
        return operations.active_book(found)

    from reefknot.steps.port import own_policies, own_rules

    blocks = _own_blocks(modules)
    return operations.active_book(found, own=own_policies(blocks))._replace(rules=own_rules(blocks))


def _own_blocks(modules: Sequence[str]) -> list[Block]:
    """The steps in these modules."""
    from reefknot.steps.python import load_module

    with prints_to_stderr():  # a module may print when it is imported
        return [block for name in modules for block in load_module(name, path=os.getcwd()).values()]


# ---- commands --------------------------------------------------------------------------------------------------------

app = noun("policy", "policy explain --target block:http --status 429")
EXPLAIN = "reefknot policy explain --target"


@app.command(name="list", help_epilogue=examples("policy list --kind connector"))
def list_policies(*, kind: Kind = None, wide: Wide = False, common: CommonFlags = COMMON) -> None:
    """List every target and source with its policy, and where it is defined."""
    active = active_book(common.config)
    rows = operations.policy_rows(active.book, kind)
    show(operations.policies_json(active, rows), lambda: put_policies(rows, wide=wide), json=common.json)


@app.command(name="show", help_epilogue=examples("policy show connector:imap_mailbox"))
def show_policy(
    target: Target = None,
    *,
    source: Source = None,
    module: Modules = None,
    wide: Wide = False,
    common: CommonFlags = COMMON,
) -> None:
    """Show one target's policy field by field: its value, the layer and source that set it, and what it overrides."""
    active = active_book(common.config, module)
    _require_target(target, source)
    row = operations.policy_row(active, target, source)

    def text() -> None:
        put(words.headline(row.target, row.policy))
        put()
        put_policy(row.policy, row.policy.provenance, wide=wide)
        rows = [
            (words.condition_name(condition), field, words.field_text(field, one.value), relative(one.source))
            for condition, fields in row.overrides.items()
            for field, one in fields.items()
        ]
        if rows:
            put()
            put_table(("for failures", "field", "value", "source"), rows, styles=("cyan", "", "bold"))

    show(operations.policy_row_json(active, row), text, json=common.json)


@app.command(
    help_epilogue=f"Examples:\n\n    {EXPLAIN} block:http --status 429 --retry-count 2\n"
    f"    {EXPLAIN} connector:imap_mailbox --message timeout\n"
    f"    {EXPLAIN} operation:nats.publish --seed 7 --json\n"
    f"    {EXPLAIN} block:invoice.render --module steps.py"
)
def explain(
    target: Target = None,
    *,
    source: Source = None,
    flags: FailureFlags = NO_FAILURE,
    request: RequestFlags = NO_REQUEST,
    module: Modules = None,
    seed: Seed = None,
    baseline: Annotated[bool, arg("Explain the baseline, which is in force while the gate is off.")] = False,
    wide: Wide = False,
    common: CommonFlags = COMMON,
) -> None:
    """
    Explain whether a failure is retried, why, and when.

    The exit code is 0 whether it is retried or not.
    """
    active = active_book(common.config, module)
    question = _question(target, source, flags, request, seed=seed, baseline=baseline)
    operations.known_target(active.book, target, source)
    if not question.has_failure:
        say("No failure given: this explains an unknown one. Describe it with --error, --status, --exception, …")
    if question.has_unknown_exception:
        name = printable(active.redactor.values_out_of(question.exception or ""), most=80)
        say(
            f"{name} is taken by its name alone, because its class is not known here: write it as it is imported, "
            "with its library installed, or name its module with --module."
        )
    answer = operations.explained(active, question)
    show(operations.answer_json(answer), lambda: put_answer(answer, wide=wide), json=common.json)


@app.command(help_epilogue=examples("policy schedule connector:github_repository --seed 7"))
def schedule(
    target: Target = None,
    *,
    source: Source = None,
    flags: FailureFlags = NO_FAILURE,
    request: RequestFlags = NO_REQUEST,
    module: Modules = None,
    seed: Seed = None,
    common: CommonFlags = COMMON,
) -> None:
    """Draw the waits of a target as bars: the range that jitter allows for each, and the elapsed time."""
    active = active_book(common.config, module)
    found = operations.planned(active, _question(target, source, flags, request, seed=seed))

    def text() -> None:
        put(words.headline(found.target, found.policy))
        put()
        if found.waits:
            put_schedule(found.waits)
        else:
            put("Not retried, so there are no waits.")

    show(found.as_json(), text, json=common.json)


@app.command(help_epilogue=examples("policy check reefknot.yaml staging.yaml"))
def check(
    *files: Annotated[FileName, file_arg("File to check. Default: the one that would be found.")],
    common: CommonFlags = COMMON,
) -> int:
    """Check the policies in files and report every mistake with its line. Exits with 78 when there is one."""
    from reefknot.console.cli.config import check_files

    named = [*files, *(() if common.config is None else (common.config,))]
    return check_files(named or [None], json=common.json, policies_only=True)


@app.command(help_epilogue=examples("policy templates", "policy templates mailbox"))
def templates(
    name: Annotated[str | None, arg("Print this template, ready to be saved as a file.")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List ready-made policies for common situations, or print one."""
    from reefknot.console.cli.config import TEMPLATES, template_text

    if name is None:
        data = {"templates": [{"name": one, "about": about} for one, about in TEMPLATES.items()]}
        show(data, lambda: put_table(("template", "use it for"), TEMPLATES.items(), styles=("cyan",)), json=json)
        return
    known = name.lower().replace("_", "-")
    if known not in TEMPLATES:
        raise ParameterUseError("name", unknown_word(name, TEMPLATES))
    text = template_text(known)
    show({"name": known, "about": TEMPLATES[known], "text": text}, lambda: put_document(text), json=json)


# ---- tuning ----------------------------------------------------------------------------------------------------------


@app.command(help_epilogue=examples("policy tune", "policy tune --connector imap_mailbox --json"))
def tune(*, connector: ConnectorName = None, options: StoreFlags = STORE) -> None:
    """
    Propose changes to the policies of connectors, from the outcomes of their retries.

    Nothing is changed: the proposals are printed as YAML for `retry_policies:`, with their reasons and effects.
    """
    from reefknot.console.cli.ingestion import telemetry
    from reefknot.console.cli.store import address_of, looked
    from reefknot.console.operations.telemetry import connector_metrics
    from reefknot.policy.model.tuning import tune as answers

    address = address_of(options)
    book = active_book(options.config).book
    counted = looked(address, lambda at: connector_metrics(at, connector))
    found = [
        telemetry.TunedConnector(
            name,
            telemetry.counts_of(metrics),
            answers(telemetry.counts_of(metrics), _current(book, name)),
            _with_own_policy(book, name),
        )
        for name, metrics in counted.items()
    ]
    telemetry.put_tuning(found, json=options.json)


def _with_own_policy(book: Book, connector: str) -> list[str]:
    """The sources of a connector that override its policy."""
    own = {name: entry for name, (its, entry) in book.sources.items() if its == connector}
    return sorted(name for name, entry in own.items() if entry.policy or entry.overrides)


def _current(book: Book, connector: str) -> CurrentPolicy:
    """The policy of a connector in its own words: retries and whole seconds."""
    from reefknot.policy.book import failure_from_facts
    from reefknot.policy.model.tuning import CurrentPolicy

    by_type = {
        kind: book.resolve(f"connector:{connector}", failure_from_facts(failure_type=kind)) for kind in FailureType
    }
    usual, limited = by_type[FailureType.UNKNOWN], by_type[FailureType.RATE_LIMITED]
    transient = by_type[FailureType.TRANSIENT].retries
    return CurrentPolicy(
        str(usual.strategy),
        usual.retries,
        None if transient == usual.retries else transient,
        round(usual.base_delay),
        round(usual.max_delay),
        None if limited.base_delay == usual.base_delay else round(limited.base_delay),
        permanent_failures_no_retry=not by_type[FailureType.PERMANENT].retryable,
    )


# ---- printing --------------------------------------------------------------------------------------------------------

BAR_WIDTH = 36
NARROWEST_BAR = 10
MOST_DRAWN = 20


def put_policies(rows: Sequence[operations.PolicyRow], *, wide: bool = False) -> None:
    """A table with a line per target and source."""
    table = [
        (
            row.target if row.source is None else f"  source {row.source}",
            words.count(row.policy.max_attempts),
            words.growth(row.policy),
            words.limits(row.policy),
            ", ".join(sorted(map(words.condition_name, row.overrides))),
            _origin(row.policy),
        )
        for row in rows
    ]
    columns = ("target", "attempts", "waits", "time limit", "overrides for", "defined in")
    whole, optional = ("target", "attempts"), ("overrides for", "defined in")
    put_table(columns, table, styles=("cyan", "bold"), whole=whole, optional=optional, wide=wide)


def _origin(policy: ResolvedPolicy) -> str:
    found = operations.origins(policy)
    if found[0].startswith("built-in:"):
        return "built-in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{relative(found[0])}{more}"


def put_policy(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin], *, wide: bool = False) -> None:
    """A table with a line per field: value, layer, source, and what was overridden."""
    rows = [
        (
            name,
            words.field_text(name, field.value),
            field.layer.value,
            relative(field.source).removeprefix("built-in: "),
            [_overridden(name, one) for one in field.overrode if one.value != field.value],
        )
        for name, field in operations.with_provenance(policy, provenance).items()
        if name != "retries"  # "4 attempts (1 + 3 retries)" has it
    ]
    columns = ("field", "value", "layer", "source", "overrides")
    styles = ("", "bold", "cyan", "", "dim")
    put_table(columns, rows, styles=styles, whole=("field", "layer"), optional=("overrides",), wide=wide)


def _overridden(name: str, one: FieldValue) -> str:
    value = words.count(one.value) if name == "max_attempts" else words.field_text(name, one.value)
    return f"{value}, {relative(one.source)}"


def put_answer(answer: words.PolicyAnswer, *, wide: bool = False) -> None:
    """The answer for people: the sentence first, then the policy, the waits and the gate."""
    put(words.sentence(answer))
    for more in (words.short_of_time(answer), words.by_step(answer)):
        if more:
            put(more)
    put()
    put_policy(answer.policy, answer.provenance, wide=wide)
    if answer.schedule:
        put()
        put_schedule(answer.schedule)
    if answer.target.startswith("block:"):
        put()
        advice = (
            ", so workers use the baseline (explained with --baseline); "
            "turn it on with worker.retries.v2.enabled: true, or WORKER_RETRIES_V2_ENABLED=true"
        )
        state, more = ("on", "") if answer.gate else ("off", advice)
        put(f"gate worker.retries.v2: {state} ({relative(answer.gate.origin)}){more}")
        if load := words.under_load(answer):
            put(load)
        for limit in answer.limits:
            put(f"{words.limit_text(limit)} ({relative(limit.place)})")
    if answer.health is not None:
        put()
        rows = words.in_ingestion(answer, answer.health).items()
        put_table(("in ingestion", "what happens"), rows, styles=("cyan",), whole=("in ingestion",))


def put_schedule(schedule: Sequence[PlannedWait]) -> None:
    """A line per wait: its range, its bar, and the elapsed time when the next attempt starts, were attempts instant."""
    longest = max((wait.max for wait in schedule), default=0.0)
    seeded = any(wait.delay is not None for wait in schedule)
    rows, waits_drawn, low, high, drawn = [], [], 0.0, 0.0, 0.0
    for wait in schedule:
        low, high, drawn = low + wait.min, high + wait.max, drawn + (wait.delay or 0.0)
        if wait.retry >= MOST_DRAWN:
            continue
        elapsed = f"{long_seconds(low)} – {long_seconds(high)}" if high > low else long_seconds(high)
        row = [str(wait.retry + 1), words.span(wait.min, wait.max), elapsed]
        rows.append([*row, seconds(wait.delay), long_seconds(drawn)] if seeded else row)
        waits_drawn.append(wait)
    columns = ["retry", "wait", "elapsed", *(["drawn", "sum"] if seeded else [])]
    cells = zip(columns, *rows, strict=True)
    room = table_width() - sum(max(map(len, column)) + GAP for column in cells)
    width = max(NARROWEST_BAR, min(BAR_WIDTH, room - 1))
    for row, wait in zip(rows, waits_drawn, strict=True):
        row.insert(2, bar(wait, longest, width))
    columns.insert(2, f"0 … {seconds(longest)}")
    put_table(columns, rows, styles=("", "", "cyan"), whole=columns)
    if len(schedule) > MOST_DRAWN:
        put(f"… and {len(schedule) - MOST_DRAWN} more, {long_seconds(low)} – {long_seconds(high)} in total")


def bar(wait: PlannedWait, longest: float, width: int = BAR_WIDTH) -> str:
    """The range of one wait on a line from 0 to the longest of all; `◆` marks the seed's draw."""
    if longest <= 0:
        return "│" + " " * width
    first = min(width - 1, int(wait.min / longest * width))
    last = max(first + 1, round(wait.max / longest * width))
    cells = ["·"] * first + ["█"] * (last - first) + [" "] * (width - last)
    if wait.delay is not None:
        cells[min(width - 1, int(wait.delay / longest * width))] = "◆"
    return "│" + "".join(cells)
