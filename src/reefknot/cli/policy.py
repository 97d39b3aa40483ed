"""
`reefknot policy`: the policy book before anything has failed. No command here runs or changes anything.

Unknown targets, sources and failures are refused with what is accepted, before anything is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import float_info
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from cyclopts import Parameter

from reefknot.cli import policy_view as view
from reefknot.cli.app import CommandError, examples, noun
from reefknot.cli.options import (
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
    check_number,
    file_arg,
    is_unconfigured,
    one_of,
    settings,
    unknown,
)
from reefknot.cli.output import prints_to_stderr, put, put_document, put_table, relative, say, show
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import Redactor
from reefknot.core.retry.book import Book, FieldOrigin, Request
from reefknot.core.retry.policy import RetryPolicy

if TYPE_CHECKING:
    from reefknot.config.layers import Gate
    from reefknot.config.settings import Settings
    from reefknot.core.overload.source_health import HealthRules
    from reefknot.core.retry.tuning import CurrentPolicy

CONTROL_FLOW_EXCEPTIONS = frozenset(
    {"KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "asyncio.CancelledError"}
)
"""Exceptions that are never retried and never classified, whatever a policy says."""

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

    @property
    def is_control_flow(self) -> bool:
        return (self.exception or "").removeprefix("builtins.") in CONTROL_FLOW_EXCEPTIONS

    def failure(self, redact: Redactor) -> Failure | None:
        """The described failure, without secrets; None without any flag."""
        if self == NO_FAILURE:
            return None
        from reefknot.config.book import failure_from_facts

        code = None if self.error is None else _error_code(self.error)
        types = {kind.value: kind for kind in FailureType}
        kind = None if self.failure_type is None else one_of("--failure-type", self.failure_type, types)
        if self.status is not None and not 300 <= self.status <= 599:
            raise CommandError(f"--status: {self.status} is not a failure; accepted: a status from 300 to 599")
        check_number("--retry-after", self.retry_after, 0, float_info.max, "seconds, 0 or more")
        return failure_from_facts(
            code=code,
            http_status=self.status,
            failure_type=kind,
            exception=None if self.exception is None else redact.values_out_of(self.exception),
            message=redact(self.message or ""),
            retry_after=self.retry_after,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RequestFlags:
    """The retry options that a request carries."""

    retry_count: Annotated[int | None, arg("Retries that the request asks for, over every policy.")] = None
    timeout_ms: Annotated[int | None, arg("The request's time budget, in milliseconds.")] = None

    def request(self) -> Request:
        from reefknot.config.book import request_of

        return request_of(retry_count=self.retry_count, timeout_ms=self.timeout_ms)


NO_FAILURE, NO_REQUEST = FailureFlags(), RequestFlags()


def _error_code(given: str) -> ErrorCode:
    names = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
    numbers = {str(code.value): code for code in names.values()}
    return numbers.get(given) or one_of("--error", given, names)


# ---- the book --------------------------------------------------------------------------------------------------------


class ActiveBook(NamedTuple):
    """The policy book in force, the gate that decides whether workers follow it, and what hides the file's secrets."""

    book: Book
    gate: Gate
    redactor: Redactor
    settings: Settings | None = None
    """None where nothing is configured."""

    @property
    def gate_text(self) -> str:
        return "on" if self.gate else "off"


def active_book(config: str | None, modules: Sequence[str] | None = None) -> ActiveBook:
    """The book and the gate; with the modules of one's own steps, as a worker that loads them has it."""
    active = _written_book(config)
    return active._replace(book=active.book.with_blocks(_own_limits(modules))) if modules else active


def _own_limits(modules: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """The time limits of the steps in these modules, by target."""
    from reefknot.blocks.python import load_module
    from reefknot.ports.block import own_limits

    with prints_to_stderr():  # a module may print when it is imported
        blocks = [block for name in modules for block in load_module(name, path=os.getcwd()).values()]
    return own_limits(blocks)


def _written_book(config: str | None) -> ActiveBook:
    """The book and the gate. Secrets that cannot be read here are skipped: what was not read cannot be shown."""
    if is_unconfigured(config):
        from reefknot.config.layers import RETRIES, gate
        from reefknot.core.retry.defaults import builtin_book

        return ActiveBook(builtin_book(), gate(RETRIES, os.environ, None), Redactor())
    from reefknot.config.secrets import secret_texts

    found = settings(config)
    secrets, _ = secret_texts(found.tree, found.path, environ=os.environ)
    return ActiveBook(found.book, found.retries_gate, Redactor(secrets), found)


def known_target(book: Book, target: str | None, source: str | None = None) -> str:
    """The target as the book spells it. A block may have any name; an unknown connector or operation is refused."""
    from reefknot.core.retry.defaults import operation_target

    if source is not None and source not in book.sources:
        raise unknown("--source", source, sorted(book.sources))
    if target is None:
        if source is None:
            raise CommandError("--target is missing; accepted: block:TYPE, connector:TYPE or operation:NAME")
        return f"connector:{book.sources[source][0]}"
    kind, colon, name = target.partition(":")
    if kind not in ("block", "connector", "operation") or not colon or not name or not name.isprintable():
        also = "" if target in book.targets else "; a target is block:TYPE, connector:TYPE or operation:NAME"
        raise unknown("--target", target, sorted(book.targets), also=also)
    if kind == "operation":
        target = operation_target(name)
    known = view.all_targets(book)
    if kind != "block" and target not in known:
        raise unknown("--target", target, sorted(one for one in known if one.startswith(f"{kind}:")), prefix=f"{kind}:")
    return target


# ---- commands --------------------------------------------------------------------------------------------------------

app = noun("policy", "policy explain --target block:http --status 429")
EXPLAIN = "reefknot policy explain --target"


@app.command(name="list", help_epilogue=examples("policy list --kind connector"))
def list_policies(*, kind: Kind = None, wide: Wide = False, common: CommonFlags = COMMON) -> None:
    """List every target and source with its policy, and where it is defined."""
    active = active_book(common.config)
    rows = view.policy_rows(active.book, kind)
    data = {"gate": active.gate_text, "policies": [row.as_json() for row in rows]}
    show(data, lambda: view.put_policies(rows, wide=wide), json=common.json)


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
    name = known_target(active.book, target, source)
    policy = active.book.resolve(name, source=source)
    overrides = view.overrides_of(active.book, name, source)
    data: dict[str, Any] = {
        "target": name,
        "source": source,
        "gate": active.gate_text,
        "policy": view.policy_json(policy, policy.provenance),
        "overrides": {
            view.condition_name(condition): {field: view.value_json(one) for field, one in fields.items()}
            for condition, fields in overrides.items()
        },
    }

    def text() -> None:
        put(view.headline(name, policy))
        put()
        view.put_policy(policy, policy.provenance, wide=wide)
        rows = [
            (view.condition_name(condition), field, view.field_text(field, one.value), relative(one.source))
            for condition, fields in overrides.items()
            for field, one in fields.items()
        ]
        if rows:
            put()
            put_table(("for failures", "field", "value", "source"), rows, styles=("cyan", "", "bold"))

    show(data, text, json=common.json)


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

    The answer "stop" is an answer: the exit code is 0.
    """
    from reefknot.core.retry.explain import explain as decided

    active = active_book(common.config, module)
    name = known_target(active.book, target, source)
    failure = flags.failure(active.redactor) or _unknown_failure()
    if baseline:
        failure, policy, provenance = _baseline(active.book, name, request.request(), failure)
    else:
        resolved = active.book.resolve(name, failure, source=source, request=request.request())
        policy, provenance = resolved, resolved.provenance
    explanation = decided(name, policy, failure, seed=seed)
    reason = view.RETRYABLE if explanation.reason is None else explanation.reason.value
    schedule = explanation.schedule
    if flags.is_control_flow:
        reason, schedule = view.CONTROL_FLOW, ()
    in_ingestion = name.startswith("connector:") and not flags.is_control_flow
    health = _health_rules(active) if in_ingestion else None
    answer = view.PolicyAnswer(name, failure, policy, provenance, reason, schedule, active.gate, health)
    show(view.answer_json(answer), lambda: view.put_answer(answer, wide=wide), json=common.json)


def _health_rules(active: ActiveBook) -> HealthRules:
    """The rules by which a source is held to be down."""
    from reefknot.app.sources import health_rules
    from reefknot.core.overload.source_health import HealthRules

    return HealthRules() if active.settings is None else health_rules(active.settings)


def _unknown_failure() -> Failure:
    from reefknot.config.book import failure_from_facts

    say("No failure given: this explains an unknown one. Describe it with --error, --status, --exception, …")
    return failure_from_facts()


def _baseline(
    book: Book, name: str, request: Request, failure: Failure
) -> tuple[Failure, RetryPolicy, Mapping[str, FieldOrigin]]:
    """The failure as the baseline classifies it, and the baseline's policy for it. Its time is that of the book."""
    from reefknot.core.failure import ErrorCategory
    from reefknot.core.retry.defaults import BASELINE_RETRIES, baseline, without_retry_after

    if not name.startswith("block:"):
        raise CommandError(f"--baseline: {name} has none; the gate worker.retries.v2 governs blocks alone")
    failure = without_retry_after(failure)
    time = view.baseline_time(book, name)
    policy = baseline(
        BASELINE_RETRIES if request.retries is None else request.retries,
        timeout=time.value if request.time_budget is None else request.time_budget,
        retryable=failure.category is not ErrorCategory.CANCELLATION,
    )
    provenance = view.baseline_provenance(
        policy, time, counted=request.retries is not None, timed=request.time_budget is not None
    )
    return failure, policy, provenance


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
    from reefknot.core.retry.explain import explain as decided
    from reefknot.core.retry.explain import schedule as planned

    active = active_book(common.config, module)
    name = known_target(active.book, target, source)
    failure = flags.failure(active.redactor)
    policy = active.book.resolve(name, failure, source=source, request=request.request())
    if failure is None:
        waits = tuple(planned(policy, seed=seed, key=name)) if policy.retryable else ()
    else:
        waits = decided(name, policy, failure, seed=seed).schedule

    def text() -> None:
        put(view.headline(name, policy))
        put()
        if waits:
            view.put_schedule(waits)
        else:
            put("Not retried, so there are no waits.")

    data = {"target": name, "max_attempts": policy.max_attempts, "schedule": msgspec.to_builtins(waits)}
    show(data, text, json=common.json)


@app.command(help_epilogue=examples("policy check reefknot.yaml staging.yaml"))
def check(
    *files: Annotated[FileName, file_arg("File to check. Default: the one that would be found.")],
    common: CommonFlags = COMMON,
) -> int:
    """Check the policies in files and report every mistake with its line. Exits with 78 when there is one."""
    from reefknot.cli.config import check_files

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
    from reefknot.cli.config import TEMPLATES, template_text

    if name is None:
        data = {"templates": [{"name": one, "about": about} for one, about in TEMPLATES.items()]}
        show(data, lambda: put_table(("template", "use it for"), TEMPLATES.items(), styles=("cyan",)), json=json)
        return
    known = name.lower().replace("_", "-")
    if known not in TEMPLATES:
        raise unknown("NAME", name, TEMPLATES)
    text = template_text(known)
    show({"name": known, "about": TEMPLATES[known], "text": text}, lambda: put_document(text), json=json)


# ---- tuning ----------------------------------------------------------------------------------------------------------


@app.command(help_epilogue=examples("policy tune", "policy tune --connector imap_mailbox --json"))
def tune(*, connector: ConnectorName = None, options: StoreFlags = STORE) -> None:
    """
    Propose changes of the policies of connectors, from what their retries came to.

    Nothing is changed: the proposals are printed as YAML for `retry_policies:`, with their reasons and effects.
    """
    from reefknot.cli.ingestion import telemetry
    from reefknot.cli.store import address_of, looked
    from reefknot.core.retry.tuning import tune as answers
    from reefknot.operations.telemetry import connector_metrics

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
    from reefknot.config.book import failure_from_facts
    from reefknot.core.retry.tuning import CurrentPolicy

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
