"""
What a command is asked about: the settings in force, a target, a failure, a request.

Names that mean nothing are refused here, with what is accepted and what was perhaps meant, before anything is resolved.

`reefknot policy`: the policy book, asked before anything has failed. Nothing here runs or changes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Config, Json, Seed, Source, Target, one_of, settings, unknown
from reefknot.cli.output import put, put_json, put_table, say, where
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.book import Book, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reefknot.cli.policy_view import Answer
    from reefknot.config.layers import Gate
    from reefknot.core.failure import Failure
    from reefknot.core.retry.book import FieldOrigin
    from reefknot.core.retry.policy import RetryPolicy

CONTROL_FLOW = frozenset(
    {"KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "asyncio.CancelledError"}
)
"""What is never retried and never classified, whatever a policy says."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Happened:
    """What is known of a failure."""

    error: Annotated[str | None, Parameter(help="Its error code, such as http_error or 3003.")] = None
    status: Annotated[int | None, Parameter(help="Its HTTP status.")] = None
    failure_type: Annotated[str | None, Parameter(help="Its type: transient, rate_limited, permanent or unknown.")] = (
        None
    )
    exception: Annotated[str | None, Parameter(help="Its exception, by name: TimeoutError, httpx.ReadTimeout.")] = None
    message: Annotated[str | None, Parameter(help="Its message.")] = None
    retry_after: Annotated[float | None, Parameter(help="Seconds that the server asked to wait.")] = None

    @property
    def is_control_flow(self) -> bool:
        return (self.exception or "").removeprefix("builtins.") in CONTROL_FLOW

    def failure(self) -> Failure | None:
        """The failure, None when nothing was said of it."""
        if self == Happened():
            return None
        from reefknot.config.book import failure_of
        from reefknot.core.redaction import redact

        code = None if self.error is None else _code(self.error)
        kind = None if self.failure_type is None else one_of("--failure-type", self.failure_type, dict(_TYPES))
        if self.status is not None and not 300 <= self.status <= 599:
            raise CommandError(f"--status: {self.status} is not a failure; accepted: a status from 300 to 599")
        if self.retry_after is not None and not (isfinite(self.retry_after) and self.retry_after >= 0):
            raise CommandError(f"--retry-after: {self.retry_after:g} is not accepted: seconds, 0 or more")
        return failure_of(
            code=code,
            http_status=self.status,
            failure_type=kind,
            exception=self.exception,
            message=redact(self.message or ""),
            retry_after=self.retry_after,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Asked:
    """What one request says of its own retries."""

    retry_count: Annotated[int | None, Parameter(help="The request's retries, over every policy.")] = None
    timeout_ms: Annotated[int | None, Parameter(help="The request's time for all attempts and waits.")] = None

    def request(self) -> Request:
        from reefknot.config.book import request_of

        return request_of(retry_count=self.retry_count, timeout_ms=self.timeout_ms)


_TYPES = {kind.value: kind for kind in FailureType}


def _code(given: str) -> ErrorCode:
    names = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
    numbers = {str(code.value): code for code in names.values()}
    return numbers.get(given) or one_of("--error", given, names)


class InForce(NamedTuple):
    """What policy commands ask: the book, and whether a worker obeys it."""

    book: Book
    gate: Gate


def in_force(config: str | None) -> InForce:
    """The book and the gate. Where nothing is configured, what reads configuration is not loaded: it takes a while."""
    from reefknot.config.layers import PREFIX, QUEUE, RETRIES, find, gate

    silent = config is None and not any(name.startswith(PREFIX) for name in os.environ)
    if silent and find(None, environ=os.environ, cwd=Path.cwd()) is None:
        from reefknot.core.retry.defaults import builtin_book

        gate(QUEUE, os.environ, None)  # only to hear of a word that it does not know
        return InForce(builtin_book(), gate(RETRIES, os.environ, None))
    found = settings(config)
    return InForce(found.book, found.retries_gate)


def known_target(book: Book, target: str | None, source: str | None = None) -> str:
    """The target as the book spells it. A block may have any name; connectors and operations are known, or refused."""
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
    known = all_targets(book)
    if kind != "block" and target not in known:
        raise unknown("--target", target, sorted(one for one in known if one.startswith(f"{kind}:")), prefix=f"{kind}:")
    return target


def all_targets(book: Book) -> set[str]:
    """Every target that is built in, configured, or read by a configured source."""
    return {*book.targets, *(f"connector:{connector}" for connector, _ in book.sources.values())}


app = App(
    name="policy",
    help="Ask the policy book: who is retried, why, and when.",
    help_epilogue="Example:\n\n    reefknot policy explain --target block:http --status 429",
)

Kind = Annotated[
    Literal["block", "connector", "operation"] | None, Parameter(help="Only blocks, connectors or operations.")
]
EXPLAIN = "reefknot policy explain --target"


@app.command(name="list", help_epilogue="Example:\n\n    reefknot policy list --kind connector")
def list_policies(*, kind: Kind = None, config: Config = None, json: Json = False) -> int:
    """Every target and source with its policy, and where that comes from."""
    from reefknot.cli.policy_view import listed, put_list

    found = in_force(config)
    rows = listed(found.book, kind)
    if json:
        gate = "on" if found.gate else "off"
        put_json({"gate": gate, "policies": [row.as_json() for row in rows]})
    else:
        put_list(rows)
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot policy show connector:imap_mailbox")
def show(target: Target = None, *, source: Source = None, config: Config = None, json: Json = False) -> int:
    """One target's policy, field by field: what it is, which layer said so, and instead of what."""
    from reefknot.cli import output as wording
    from reefknot.cli import policy_view as explaining
    from reefknot.cli.policy_view import condition_name, overrides_of

    found = in_force(config)
    name = known_target(found.book, target, source)
    policy = found.book.resolve(name, source=source)
    particular = overrides_of(found.book, name, source)
    if json:
        document: dict[str, Any] = {
            "target": name,
            "source": source,
            "gate": "on" if found.gate else "off",
            "policy": explaining.policy_json(policy, policy.provenance),
            "overrides": {
                condition_name(condition): {
                    field: {"value": said.value, "layer": said.layer, "source": said.source}
                    for field, said in fields.items()
                }
                for condition, fields in particular.items()
            },
        }
        put_json(document)
        return Exit.FINE
    put(f"{name}: {wording.attempts(policy.max_attempts)}, {wording.growth(policy)}; {wording.limits(policy)}")
    put()
    explaining.put_policy(policy, policy.provenance)
    rows = [
        (condition_name(condition), field, wording.field_value(field, said.value), where(said.source))
        for condition, fields in particular.items()
        for field, said in fields.items()
    ]
    if rows:
        put()
        put_table(("for failures", "field", "value", "where"), rows, styles=("cyan", "", "bold"))
    return Exit.FINE


@app.command(
    help_epilogue=f"Examples:\n\n    {EXPLAIN} block:http --status 429 --retry-count 2\n"
    f"    {EXPLAIN} connector:imap_mailbox --message timeout\n"
    f"    {EXPLAIN} operation:nats.publish --seed 7 --json"
)
def explain(
    target: Target = None,
    *,
    source: Source = None,
    happened: Happened | None = None,
    asked: Asked | None = None,
    seed: Seed = None,
    baseline: Annotated[bool, Parameter(help="Answer for the baseline, the behaviour while the gate is off.")] = False,
    config: Config = None,
    json: Json = False,
) -> int:
    """
    Would this failure be retried, why, and when?

    The answer "stop" is an answer: the exit code is 0.
    """
    from reefknot.cli.policy_view import answer_json, put_answer

    found = in_force(config)
    happened, asked = happened or Happened(), asked or Asked()
    name = known_target(found.book, target, source)
    failure = happened.failure()
    if failure is None:
        failure = _unknown_failure()
    if baseline:
        answer = _baseline_answer(found, name, happened, asked, failure, seed)
    else:
        policy = found.book.resolve(name, failure, source=source, request=asked.request())
        answer = _answer(found, name, happened, failure, policy, policy.provenance, seed)
    if json:
        put_json(answer_json(answer))
    else:
        put_answer(answer)
    return Exit.FINE


def _unknown_failure() -> Failure:
    from reefknot.config.book import failure_of

    say(
        "No failure was given, so this is the answer for an unknown one; say more with --error, --status, --exception …"
    )
    return failure_of()


def _answer(
    found: InForce,
    name: str,
    happened: Happened,
    failure: Failure,
    policy: RetryPolicy,
    provenance: Mapping[str, FieldOrigin],
    seed: int | None,
) -> Answer:
    from reefknot.cli.policy_view import CONTROL_FLOW, RETRYABLE, Answer
    from reefknot.core.retry.explain import explain as decided

    explanation = decided(name, policy, failure, seed=seed)
    reason = RETRYABLE if explanation.reason is None else explanation.reason.value
    schedule = explanation.schedule
    if happened.is_control_flow:
        reason, schedule = CONTROL_FLOW, ()
    gate = found.gate
    return Answer(name, failure, policy, provenance, reason, schedule, gate.on, gate.said_by)


def _baseline_answer(
    found: InForce, name: str, happened: Happened, asked: Asked, failure: Failure, seed: int | None
) -> Answer:
    from reefknot.cli.policy_view import baseline_provenance
    from reefknot.core.failure import ErrorCategory
    from reefknot.core.retry.defaults import BASELINE_RETRIES, DEFAULT_TIMEOUT, baseline, without_retry_after

    if not name.startswith("block:"):
        raise CommandError(f"--baseline: {name} has none; the gate worker.retries.v2 governs blocks alone")
    request = asked.request()
    failure = without_retry_after(failure)
    policy = baseline(
        BASELINE_RETRIES if request.retries is None else request.retries,
        timeout=DEFAULT_TIMEOUT if request.time_budget is None else request.time_budget,
        retryable=failure.category is not ErrorCategory.CANCELLATION,
    )
    provenance = baseline_provenance(policy, counted=request.retries is not None, timed=request.time_budget is not None)
    return _answer(found, name, happened, failure, policy, provenance, seed)


@app.command(help_epilogue="Example:\n\n    reefknot policy schedule connector:github_repository --seed 7")
def schedule(
    target: Target = None,
    *,
    source: Source = None,
    happened: Happened | None = None,
    asked: Asked | None = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Draw the waits of a target: where chance may put each, and how much time has gone by then."""
    from reefknot.cli import output as wording
    from reefknot.cli import policy_view as explaining
    from reefknot.cli.policy_view import put_waits
    from reefknot.core.retry.explain import explain as decided
    from reefknot.core.retry.explain import schedule as planned

    found = in_force(config)
    name = known_target(found.book, target, source)
    failure = (happened or Happened()).failure()
    policy = found.book.resolve(name, failure, source=source, request=(asked or Asked()).request())
    if failure is None:
        waits = tuple(planned(policy, seed=seed, key=name)) if policy.retryable else ()
    else:
        waits = decided(name, policy, failure, seed=seed).schedule
    if json:
        put_json({"target": name, "max_attempts": policy.max_attempts, "schedule": explaining.schedule_json(waits)})
        return Exit.FINE
    put(f"{name}: {wording.attempts(policy.max_attempts)}, {wording.growth(policy)}; {wording.limits(policy)}")
    put()
    if waits:
        put_waits(waits)
    else:
        put("It is not retried, so there is no wait.")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot policy check reefknot.yaml staging.yaml")
def check(*files: str, config: Config = None, json: Json = False) -> int:
    """Check the policies of files: every mistake with its line. Exits with 78 when there is one."""
    from reefknot.cli.config import check_files

    named = [*files, *(() if config is None else (config,))]
    return check_files(named or [None], json=json, policies_only=True)


@app.command(help_epilogue="Examples:\n\n    reefknot policy templates\n    reefknot policy templates mailbox")
def templates(
    name: Annotated[str | None, Parameter(help="Print this template, ready to be kept in a file.")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Ready-made policies for common situations: list them, or print one."""
    from reefknot.cli.config import TEMPLATES, template_text

    if name is None:
        if json:
            put_json({"templates": [{"name": one, "about": about} for one, about in TEMPLATES.items()]})
        else:
            put_table(("template", "when"), TEMPLATES.items(), styles=("cyan",))
        return Exit.FINE
    known = name.lower().replace("_", "-")
    if known not in TEMPLATES:
        raise unknown("NAME", name, TEMPLATES)
    text = template_text(known)
    if json:
        put_json({"name": known, "about": TEMPLATES[known], "text": text})
    else:
        put(text.rstrip("\n"))
    return Exit.FINE
