"""
Policies and decisions as text and as JSON: in sentences, as a list, field by field with provenance, and as bars.

Both forms come from the same record; nothing is decided here. Attempts are always given both ways, "4 attempts (1 + 3
retries)", because the documents that people bring count differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.cli.output import GAP, jsonable, long_seconds, plural, put, put_table, relative, seconds, table_width
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.overload.source_health import LONGEST_COOLING_MS, HealthRules
from reefknot.core.retry.book import (
    SHOWN_FIELDS,
    Book,
    Condition,
    FieldOrigin,
    FieldValue,
    Layer,
    Patch,
    ResolvedPolicy,
    TargetEntry,
    merge,
)
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.explain import PlannedWait
from reefknot.core.retry.policy import Jitter, RetryPolicy, RetryStrategy

if TYPE_CHECKING:
    from reefknot.config.layers import Gate

# ---- words -----------------------------------------------------------------------------------------------------------


def headline(target: str, policy: RetryPolicy) -> str:
    """A policy in one line."""
    return f"{target}: {attempts(policy.max_attempts)}, {growth(policy)}; {limits(policy)}"


def attempts(executions: int) -> str:
    """`4 attempts (1 + 3 retries)`."""
    number, _, rest = count(executions).partition(" ")
    return f"{number} {'attempt' if executions == 1 else 'attempts'} {rest}"


def count(executions: int) -> str:
    """`4 (1 + 3 retries)`, for a column whose head names the attempts."""
    return "1 (no retries)" if executions == 1 else f"{executions} (1 + {_retries(executions - 1)})"


def _retries(number: int) -> str:
    return plural(number, "retry", "retries")


def growth(policy: RetryPolicy) -> str:
    """The waits in words: `100 ms ×2 up to 30 s, full jitter`."""
    match policy.strategy:
        case RetryStrategy.NO_RETRY:
            return "never retried"
        case RetryStrategy.IMMEDIATE:
            return "at once"
        case RetryStrategy.FIXED_DELAY:
            shape = f"{seconds(policy.base_delay)} each"
        case RetryStrategy.LINEAR_BACKOFF:
            shape = f"{seconds(policy.base_delay)} more each time, up to {seconds(policy.max_delay)}"
        case RetryStrategy.EXPONENTIAL_BACKOFF:
            shape = f"{seconds(policy.base_delay)} ×{policy.multiplier:g} up to {seconds(policy.max_delay)}"
        case own:
            shape = f"strategy {own}, up to {seconds(policy.max_delay)}"
    return f"{shape}, {_jitter(policy)}"


def _jitter(policy: RetryPolicy) -> str:
    if policy.jitter is Jitter.NONE:
        return "no jitter"
    if policy.jitter is Jitter.PROPORTIONAL:
        return f"±{policy.jitter_factor * 100:g} %"
    return f"{policy.jitter.value} jitter"


def limits(policy: RetryPolicy) -> str:
    """The limits in time: per attempt, and in total."""
    parts = []
    if policy.attempt_timeout != inf:
        parts.append(f"{seconds(policy.attempt_timeout)} per attempt")
    if policy.time_budget != inf:
        parts.append(f"{seconds(policy.time_budget)} in total")
    return ", ".join(parts) or "no limit"


def field_text(name: str, value: object) -> str:
    """The value of one field of a policy, as a table shows it."""
    if name == "max_attempts" and isinstance(value, int):
        return attempts(value)
    if name in ("base_delay", "max_delay", "time_budget", "attempt_timeout", "max_retry_after"):
        return seconds(value if isinstance(value, int | float) else None)
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def failure_text(failure: Failure) -> str:
    """`http_error 429 (rate_limited)`."""
    status = "" if failure.http_status is None else f" {failure.http_status}"
    name = f"{failure.exception}, " if failure.exception else ""
    return f"{name}{failure.code.name}{status} ({failure.failure_type.value})"


def span(low: float, high: float) -> str:
    """`0.5–1 s`, or one number when both ends are equal."""
    if low == high:
        return seconds(low)
    first, second = seconds(low), seconds(high)
    number, _, unit = first.rpartition(" ")
    return f"{number if unit == second.rpartition(' ')[2] else first}–{second}"


def waits(schedule: Sequence[PlannedWait]) -> str:
    """The first waits in a row: `0.5–1 s, then 1–2 s, …`."""
    shown = [span(wait.min, wait.max) for wait in schedule[:3]]
    return ", then ".join(shown) + (", …" if len(schedule) > 3 else "")


# ---- the list of policies --------------------------------------------------------------------------------------------

ANY_BLOCK = "block:*"
"""Stands for every block without a policy of its own."""
_KINDS = ("block", "connector", "operation")
FIELDS = tuple(name for shown in SHOWN_FIELDS for name in ((shown, "retries") if shown == "max_attempts" else (shown,)))
"""The shown fields of a policy: `retries` stands beside the number that it follows from."""


class PolicyRow(Struct, frozen=True):
    """The policy of one target, or of one source of it."""

    target: str
    source: str | None
    policy: ResolvedPolicy
    overrides: Mapping[Condition, Patch]

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "source": self.source,
            "policy": {name: jsonable(getattr(self.policy, name)) for name in FIELDS},
            "from": origins(self.policy),
            "overrides": sorted(map(condition_name, self.overrides)),
        }


def all_targets(book: Book) -> set[str]:
    """Every target that is built in, configured, or read by a configured source."""
    return {*book.targets, *(f"connector:{connector}" for connector, _ in book.sources.values())}


def policy_rows(book: Book, kind: str | None = None) -> list[PolicyRow]:
    """Every target, by kind and name, and after a connector its sources."""
    targets = sorted(
        {ANY_BLOCK, *all_targets(book)}, key=lambda target: (_KINDS.index(target.partition(":")[0]), target)
    )
    rows = []
    for target in targets:
        if kind is not None and not target.startswith(f"{kind}:"):
            continue
        rows.append(PolicyRow(target, None, book.resolve(target), overrides_of(book, target, None)))
        rows += [
            PolicyRow(target, source, book.resolve(target, source=source), overrides_of(book, target, source))
            for source, (connector, _) in sorted(book.sources.items())
            if target == f"connector:{connector}"
        ]
    return rows


def overrides_of(book: Book, target: str, source: str | None) -> dict[Condition, Patch]:
    """The overrides for particular failures that are in force, merged from all layers: what a source sets for all
    failures beats what its connector sets for some of them."""
    entries = [*book.targets.get(target, ())]
    kind = target.partition(":")[0]
    if not entries and kind in book.others:
        entries = [book.others[kind]]
    found = _merged(entries)
    if source is None:
        return found
    own = book.sources[source][1]
    left = {
        condition: {name: one for name, one in fields.items() if name not in own.policy}
        for condition, fields in found.items()
    }
    return _merged([TargetEntry(overrides={condition: fields for condition, fields in left.items() if fields}), own])


def _merged(entries: Sequence[TargetEntry]) -> dict[Condition, Patch]:
    found: dict[Condition, Patch] = {}
    for entry in entries:
        for condition, fields in entry.overrides.items():
            found[condition] = merge(found.get(condition, {}), fields)
    return found


def origins(policy: ResolvedPolicy) -> list[str]:
    """The sources that changed something over the built-in policy, else the built-in one itself."""
    changed = [field for field in policy.provenance.values() if field.layer is not Layer.BUILTIN]
    if changed:
        return sorted({field.source for field in changed}, key=_by_position)
    return [policy.provenance["max_attempts"].source]


def _by_position(source: str) -> tuple[str, ...]:
    return tuple(part.rjust(8, "0") if part.isdigit() else part for part in source.split(":"))


def condition_name(condition: Condition) -> str:
    match condition:
        case ErrorCode():
            return condition.name
        case FailureType():
            return condition.value
        case _:
            return str(condition)


def put_policies(rows: list[PolicyRow], *, wide: bool = False) -> None:
    """A table with a line per target and source."""
    table = [
        (
            row.target if row.source is None else f"  source {row.source}",
            count(row.policy.max_attempts),
            growth(row.policy),
            limits(row.policy),
            ", ".join(sorted(map(condition_name, row.overrides))),
            _origin(row.policy),
        )
        for row in rows
    ]
    columns = ("target", "attempts", "waits", "time limit", "overrides for", "defined in")
    whole, optional = ("target", "attempts"), ("overrides for", "defined in")
    put_table(columns, table, styles=("cyan", "bold"), whole=whole, optional=optional, wide=wide)


def _origin(policy: ResolvedPolicy) -> str:
    found = origins(policy)
    if found[0].startswith("built-in:"):
        return "built-in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{relative(found[0])}{more}"


# ---- one policy with its provenance ----------------------------------------------------------------------------------


def _with_provenance(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, FieldOrigin]:
    """Every shown field with the policy's own value, and its origin."""
    fields: dict[str, FieldOrigin] = {}
    for name in FIELDS:
        known = provenance["max_attempts" if name == "retries" else name]
        overrode = known.overrode
        if name == "retries":
            overrode = tuple(FieldValue(one.value - 1, one.layer, one.source) for one in overrode)
        fields[name] = FieldOrigin(getattr(policy, name), known.layer, known.source, overrode)
    return fields


_BASELINE = "built-in: baseline"


def baseline_time(book: Book, target: str) -> FieldOrigin:
    """The time for a step in the baseline: that of the book, as for a worker, else the preset."""
    from reefknot.core.retry.defaults import DEFAULT_TIMEOUT

    found = book.resolve(target).provenance["time_budget"]
    preset = FieldOrigin(DEFAULT_TIMEOUT, Layer.BUILTIN, _BASELINE)
    return preset if found.value in (None, inf, DEFAULT_TIMEOUT) else found


def baseline_provenance(
    policy: RetryPolicy, time: FieldOrigin, *, counted: bool, timed: bool
) -> dict[str, FieldOrigin]:
    """The provenance of the baseline's fields: the preset, overridden by what the request set."""
    from reefknot.core.retry.defaults import BASELINE_RETRIES

    fields = {name: FieldOrigin(getattr(policy, name), Layer.BUILTIN, _BASELINE) for name in SHOWN_FIELDS}
    fields["max_attempts"] = FieldOrigin(BASELINE_RETRIES + 1, Layer.BUILTIN, _BASELINE)
    fields["attempt_timeout"] = time
    requested = {"max_attempts": counted, "attempt_timeout": timed}
    for name in (name for name, by_request in requested.items() if by_request):
        fields[name] = fields[name].overridden_by(FieldValue(getattr(policy, name), Layer.REQUEST, "request"))
    return fields


def policy_json(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, Any]:
    return {
        name: {**value_json(field), "overrode": [value_json(one) for one in field.overrode]}
        for name, field in _with_provenance(policy, provenance).items()
    }


def value_json(field: FieldValue | FieldOrigin) -> dict[str, Any]:
    """A value with the layer and the source that set it."""
    return {"value": jsonable(field.value), "layer": field.layer.value, "source": field.source}


def put_policy(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin], *, wide: bool = False) -> None:
    """A table with a line per field: value, layer, source, and what was overridden."""
    rows = [
        (
            name,
            field_text(name, field.value),
            field.layer.value,
            relative(field.source).removeprefix("built-in: "),
            [_overridden(name, one) for one in field.overrode if one.value != field.value],
        )
        for name, field in _with_provenance(policy, provenance).items()
        if name != "retries"  # "4 attempts (1 + 3 retries)" has it
    ]
    columns = ("field", "value", "layer", "source", "overrides")
    styles = ("", "bold", "cyan", "", "dim")
    put_table(columns, rows, styles=styles, whole=("field", "layer"), optional=("overrides",), wide=wide)


def _overridden(name: str, one: FieldValue) -> str:
    value = count(one.value) if name == "max_attempts" else field_text(name, one.value)
    return f"{value}, {relative(one.source)}"


# ---- one decision ----------------------------------------------------------------------------------------------------

RETRYABLE = "retryable"
CONTROL_FLOW = "control_flow"


class PolicyAnswer(Struct, frozen=True):
    """The answer of `policy explain`: whether a failure is retried, why, and when."""

    target: str
    failure: Failure
    policy: RetryPolicy
    provenance: Mapping[str, FieldOrigin]
    reason: str
    """`retryable`, or why not."""
    schedule: tuple[PlannedWait, ...]
    gate: Gate
    health: HealthRules | None = None
    """Of a connector: the rules by which its sources are held to be down."""

    @property
    def retried(self) -> bool:
        return self.reason == RETRYABLE


def answer_json(answer: PolicyAnswer) -> dict[str, Any]:
    failure = answer.failure
    ingestion = {} if answer.health is None else {"ingestion": _ingestion_json(answer, answer.health)}
    return {
        "target": answer.target,
        "failure": {
            "code": failure.code.name,
            "category": failure.category.value,
            "failure_type": failure.failure_type.value,
            "http_status": failure.http_status,
            "exception": failure.exception or None,
            "message": failure.message or None,
            "retry_after": failure.retry_after,
        },
        "decision": "retry" if answer.retried else "stop",
        "reason": answer.reason,
        "gate": "on" if answer.gate else "off",
        "policy": policy_json(answer.policy, answer.provenance),
        "schedule": msgspec.to_builtins(answer.schedule),
        **ingestion,
    }


def put_answer(answer: PolicyAnswer, *, wide: bool = False) -> None:
    """The answer for people: the sentence first, then the policy, the waits and the gate."""
    put(_sentence(answer))
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
    if answer.health is not None:
        put()
        rows = _in_ingestion(answer, answer.health).items()
        put_table(("in ingestion", "what happens"), rows, styles=("cyan",), whole=("in ingestion",))


def _sentence(answer: PolicyAnswer) -> str:
    policy = answer.policy
    if not answer.retried:
        return f"Not retried: {_why_not(answer)}."
    text = (
        f"Retried: up to {_retries(policy.retries)}, {attempts(policy.max_attempts)}; {failure_text(answer.failure)}."
    )
    if all(wait.max == 0 for wait in answer.schedule):
        text += " No waits."
    else:
        text += f" Waits: {waits(answer.schedule)}."
    if len(answer.schedule) < min(policy.retries, 100):
        text += f" The time budget of {seconds(policy.time_budget)} has room for {len(answer.schedule)} of them."
    return text


def _why_not(answer: PolicyAnswer) -> str:
    policy, provenance = answer.policy, answer.provenance
    failure = failure_text(answer.failure)
    match answer.reason:
        case Reason.NOT_RETRYABLE.value if policy.retryable:
            return f"{failure} does not match the exceptions that the target retries"
        case Reason.NOT_RETRYABLE.value:
            return f"{failure} is not retryable, {_set_by(provenance['retryable'])}"
        case Reason.ATTEMPTS_SPENT.value:
            return f"the policy is {attempts(policy.max_attempts)}, {_set_by(provenance['max_attempts'])}"
        case Reason.HINT_TOO_LONG.value:
            asked = seconds(answer.failure.retry_after)
            most, cap = seconds(policy.max_retry_after), seconds(policy.max_delay)
            return f"the server asks to wait {asked}, longer than max_retry_after, {most}, and the longest wait, {cap}"
        case Reason.BUDGET_SPENT.value if answer.failure.code.name == "cancelled_by_timeout":
            return f"{failure} means that the time budget is spent"
        case Reason.BUDGET_SPENT.value:
            budget = seconds(policy.time_budget)
            return f"the wait would exceed the time budget, {budget}, {_set_by(provenance['time_budget'])}"
        case "control_flow":
            return f"{answer.failure.exception} is control flow, which no policy retries"
        case reason:
            return reason


def _set_by(field: FieldOrigin) -> str:
    by_request = field.layer is Layer.REQUEST
    return f"set by {'the request' if by_request else f'{field.layer.value}, {relative(field.source)}'}"


# ---- what ingestion does beside retrying -----------------------------------------------------------------------------


def _ingestion_json(answer: PolicyAnswer, health: HealthRules) -> dict[str, Any]:
    return {
        **_in_ingestion(answer, health),
        "breaker": {
            "enabled": health.enabled,
            "failures": health.failures,
            "jobs": health.jobs,
            "cooldown_seconds": health.rest_ms / 1000,
            "max_cooldown_seconds": health.longest_rest_ms / 1000,
        },
        "longest_cooling_seconds": LONGEST_COOLING_MS // 1000,
    }


def _in_ingestion(answer: PolicyAnswer, health: HealthRules) -> dict[str, str]:
    """The effect of this failure on its job and on its source, and the way out of quarantine; in sentences."""
    kind = answer.failure.failure_type
    is_too_long = answer.reason == Reason.HINT_TOO_LONG.value
    requeue = "a person requeues it"
    if kind is not FailureType.PERMANENT:
        requeue += ", or the next due time does if it is a sync"
    return {
        "job": _job_sentence(answer, health),
        "source": _source_sentence(FailureType.RATE_LIMITED if is_too_long else kind, health),
        "quarantine": f"{requeue}; a requeued job has all its retries again",
    }


def _job_sentence(answer: PolicyAnswer, health: HealthRules) -> str:
    kind, is_too_long = answer.failure.failure_type, answer.reason == Reason.HINT_TOO_LONG.value
    if is_too_long:
        return "it waits for the time that the source asked for, up to 24 h, and spends no attempt"
    if not answer.retried:
        return "it goes to quarantine at once"
    text = f"each failure spends an attempt; after {attempts(answer.policy.max_attempts)} it goes to quarantine"
    if kind is FailureType.TRANSIENT and health.enabled:
        return f"{text}; while the source rests or recovers, failures spend none, unless it answered others meanwhile"
    if kind is FailureType.RATE_LIMITED:
        most = seconds(max(answer.policy.max_retry_after, answer.policy.max_delay))
        return f"{text}; a source that asks for more than {most} is waited for up to 24 h, at no cost"
    return text


def _source_sentence(kind: FailureType, health: HealthRules) -> str:
    match kind:
        case FailureType.RATE_LIMITED:
            return "it cools: until that wait is over, none of its jobs begins, and jobs that wait for it spend nothing"
        case FailureType.TRANSIENT if not health.enabled:
            return "nothing changes for its other jobs: ingestion.breaker.enabled is false"
        case FailureType.TRANSIENT:
            first, longest = seconds(health.rest_ms / 1000), long_seconds(health.longest_rest_ms / 1000)
            return (
                f"{plural(health.failures, 'such failure')} in a row, of {plural(health.jobs, 'job')} or more, open "
                f"its breaker: it rests for {first}, after each failed probe twice as long, up to {longest}; then one "
                "job at a time probes it, and with each further success one more may run at once"
            )
        case FailureType.PERMANENT:
            return "nothing changes for its other jobs: it has answered, which is no sign of an outage"
        case _:
            return "nothing changes for its other jobs: a failure without a type tells nothing about the source"


# ---- the waits -------------------------------------------------------------------------------------------------------

BAR_WIDTH = 36
NARROWEST_BAR = 10
MOST_DRAWN = 20


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
        row = [str(wait.retry + 1), span(wait.min, wait.max), elapsed]
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
