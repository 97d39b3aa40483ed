"""
Waits as bars: where chance may put each of them, and how much time has gone by then.

All policies at a glance: every target and source, one line each.

The answer to "why": one decision with the provenance of every field, for programs and for people.

Both forms come from the same record. The decision is the core's own; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from reefknot.cli import output as wording
from reefknot.cli.output import jsonable, long_seconds, put, put_table, seconds, span, where
from reefknot.cli.policy import all_targets
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.book import (
    SHOWN_FIELDS,
    Book,
    Condition,
    FieldOrigin,
    FieldValue,
    Layer,
    Patch,
    ResolvedPolicy,
    merge,
)
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.explain import PlannedWait
from reefknot.core.retry.policy import RetryPolicy

WIDTH = 36
MOST_DRAWN = 20


def bar(wait: PlannedWait, longest: float) -> str:
    """The range of one wait on a line from 0 to the longest of all; `◆` is where the seed puts it."""
    if longest <= 0:
        return "│" + " " * WIDTH
    first = min(WIDTH - 1, int(wait.min / longest * WIDTH))
    last = max(first + 1, round(wait.max / longest * WIDTH))
    cells = ["·"] * first + ["█"] * (last - first) + [" "] * (WIDTH - last)
    if wait.delay is not None:
        cells[min(WIDTH - 1, int(wait.delay / longest * WIDTH))] = "◆"
    return "│" + "".join(cells)


def put_waits(schedule: Sequence[PlannedWait]) -> None:
    """Every wait as a line: its range, its bar, and when the attempt after it would begin, were attempts instant."""
    longest = max((wait.max for wait in schedule), default=0.0)
    seeded = any(wait.delay is not None for wait in schedule)
    rows, low, high, sure = [], 0.0, 0.0, 0.0
    for wait in schedule:
        low, high, sure = low + wait.min, high + wait.max, sure + (wait.delay or 0.0)
        if wait.retry >= MOST_DRAWN:
            continue
        after = f"{long_seconds(low)} – {long_seconds(high)}" if high > low else long_seconds(high)
        row = [str(wait.retry + 1), span(wait.min, wait.max), bar(wait, longest), after]
        rows.append([*row, seconds(wait.delay), long_seconds(sure)] if seeded else row)
    columns = ["retry", "wait", f"0 … {seconds(longest)}", "after"]
    put_table([*columns, "drawn", "sum"] if seeded else columns, rows, styles=("", "", "cyan"))
    if len(schedule) > MOST_DRAWN:
        from reefknot.cli.output import put

        put(f"… and {len(schedule) - MOST_DRAWN} more, {long_seconds(low)} – {long_seconds(high)} in all")


ANY_BLOCK = "block:*"
"""Stands for every block that has no policy of its own."""

_KINDS = ("block", "connector", "operation")


class Row(Struct, frozen=True):
    """One target, or one source of it."""

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
            "overrides": sorted(condition_name(condition) for condition in self.overrides),
        }


def listed(book: Book, kind: str | None = None) -> list[Row]:
    """Every target, by kind and name, and after a connector its sources."""
    targets = sorted(
        {ANY_BLOCK, *all_targets(book)}, key=lambda target: (_KINDS.index(target.partition(":")[0]), target)
    )
    rows = []
    for target in targets:
        if kind is not None and not target.startswith(f"{kind}:"):
            continue
        rows.append(Row(target, None, book.resolve(target), overrides_of(book, target, None)))
        rows += [
            Row(target, source, book.resolve(target, source=source), overrides_of(book, target, source))
            for source, (connector, _) in sorted(book.sources.items())
            if target == f"connector:{connector}"
        ]
    return rows


def overrides_of(book: Book, target: str, source: str | None) -> dict[Condition, Patch]:
    """What is said for particular failures, the strongest saying of each."""
    entries = [*book.targets.get(target, ())]
    kind = target.partition(":")[0]
    if not entries and kind in book.others:
        entries = [book.others[kind]]
    if source is not None:
        entries.append(book.sources[source][1])
    found: dict[Condition, Patch] = {}
    for entry in entries:
        for condition, fields in entry.overrides.items():
            found[condition] = merge(found.get(condition, {}), fields)
    return found


def origins(policy: ResolvedPolicy) -> list[str]:
    """Where a policy comes from: the places that said something over the built-in, else the built-in itself."""
    said = [field for field in policy.provenance.values() if field.layer is not Layer.BUILTIN]
    if said:
        return sorted({field.source for field in said}, key=_by_place)
    return [policy.provenance["max_attempts"].source]


def _by_place(source: str) -> tuple[str, ...]:
    return tuple(part.rjust(8, "0") if part.isdigit() else part for part in source.split(":"))


def condition_name(condition: Condition) -> str:
    match condition:
        case ErrorCode():
            return condition.name
        case FailureType():
            return condition.value
        case _:
            return str(condition)


def put_list(rows: list[Row]) -> None:
    table = [
        (
            row.target if row.source is None else f"  source {row.source}",
            wording.count(row.policy.max_attempts),
            wording.growth(row.policy),
            wording.limits(row.policy),
            ", ".join(sorted(condition_name(condition) for condition in row.overrides)),
            _origin(row.policy),
        )
        for row in rows
    ]
    columns = ("target", "attempts", "waits", "time", "differs for", "from")
    put_table(columns, table, styles=("cyan", "bold"), whole=("target", "attempts"))


def _origin(policy: ResolvedPolicy) -> str:
    found = origins(policy)
    if found[0].startswith("built-in:"):
        return "built-in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{where(found[0])}{more}"


FIELDS = tuple(name for shown in SHOWN_FIELDS for name in ((shown, "retries") if shown == "max_attempts" else (shown,)))
"""A policy's fields as they are shown: `retries` stands beside the number that it follows from."""

RETRYABLE = "retryable"
CONTROL_FLOW = "control_flow"


class Answer(Struct, frozen=True):
    """Would it be retried, why, and when."""

    target: str
    failure: Failure
    policy: RetryPolicy
    provenance: Mapping[str, FieldOrigin]
    reason: str
    """`retryable`, or why not."""
    schedule: tuple[PlannedWait, ...]
    gate: bool
    gate_said_by: str

    @property
    def retried(self) -> bool:
        return self.reason == RETRYABLE


def settled_fields(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, FieldOrigin]:
    """Every shown field with the policy's own value, and where it came from."""
    fields: dict[str, FieldOrigin] = {}
    for name in FIELDS:
        known = provenance["max_attempts" if name == "retries" else name]
        if name == "retries":
            beaten = tuple(FieldValue(one.value - 1, one.layer, one.source) for one in known.overrode)
        else:
            beaten = known.overrode
        fields[name] = FieldOrigin(getattr(policy, name), known.layer, known.source, beaten)
    return fields


def baseline_provenance(policy: RetryPolicy, *, counted: bool, timed: bool) -> dict[str, FieldOrigin]:
    """The preset's fields, and what the request said over them."""
    from reefknot.core.retry.defaults import BASELINE_RETRIES, DEFAULT_TIMEOUT

    source = "built-in: baseline"
    fields = {name: FieldOrigin(getattr(policy, name), Layer.BUILTIN, source) for name in SHOWN_FIELDS}
    said = {"max_attempts": (counted, BASELINE_RETRIES + 1), "attempt_timeout": (timed, DEFAULT_TIMEOUT)}
    for name, (by_request, before) in said.items():
        if by_request:
            beaten = (FieldValue(before, Layer.BUILTIN, source),)
            fields[name] = FieldOrigin(getattr(policy, name), Layer.REQUEST, "request", beaten)
    return fields


def policy_json(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> dict[str, Any]:
    return {
        name: {
            "value": jsonable(field.value),
            "layer": field.layer.value,
            "source": field.source,
            "overrode": [
                {"value": jsonable(one.value), "layer": one.layer.value, "source": one.source} for one in field.overrode
            ],
        }
        for name, field in settled_fields(policy, provenance).items()
    }


def schedule_json(schedule: tuple[PlannedWait, ...]) -> list[dict[str, Any]]:
    return [{"retry": wait.retry, "min": wait.min, "max": wait.max, "delay": wait.delay} for wait in schedule]


def failure_json(failure: Failure) -> dict[str, Any]:
    return {
        "code": failure.code.name,
        "category": failure.category.value,
        "failure_type": failure.failure_type.value,
        "http_status": failure.http_status,
        "exception": failure.exception or None,
        "message": failure.message or None,
        "retry_after": failure.retry_after,
    }


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer as programs read it."""
    return {
        "target": answer.target,
        "failure": failure_json(answer.failure),
        "decision": "retry" if answer.retried else "stop",
        "reason": answer.reason,
        "gate": "on" if answer.gate else "off",
        "policy": policy_json(answer.policy, answer.provenance),
        "schedule": schedule_json(answer.schedule),
    }


def put_answer(answer: Answer) -> None:
    """The answer as people read it: the sentence first."""
    put(sentence(answer))
    put()
    put_policy(answer.policy, answer.provenance)
    if answer.schedule:
        put()
        put_waits(answer.schedule)
    if answer.target.startswith("block:"):
        put()
        put(gate_line(answer.gate, answer.gate_said_by))


def put_policy(policy: RetryPolicy, provenance: Mapping[str, FieldOrigin]) -> None:
    rows = [
        (
            name,
            wording.field_value(name, field.value),
            field.layer.value,
            where(field.source).removeprefix("built-in: "),
            "\n".join(instead_of(name, one) for one in field.overrode if one.value != field.value),
        )
        for name, field in settled_fields(policy, provenance).items()
        if name != "retries"  # "4 attempts (1 + 3 retries)" says it
    ]
    columns = ("field", "value", "layer", "where", "instead of")
    put_table(columns, rows, styles=("", "bold", "cyan", "", "dim"), whole=("field", "value", "layer"))


def instead_of(name: str, said: FieldValue) -> str:
    value = wording.count(said.value) if name == "max_attempts" else wording.field_value(name, said.value)
    return f"{value}, {where(said.source)}"


def gate_line(on: bool, said_by: str) -> str:
    if on:
        return f"gate worker.retries.v2: on ({where(said_by)})"
    return (
        f"gate worker.retries.v2: off ({where(said_by)}), so a worker runs the baseline, which --baseline explains;"
        " worker.retries.v2.enabled: true, or WORKER_RETRIES_V2_ENABLED=true, opens it"
    )


def sentence(answer: Answer) -> str:
    """The answer in one sentence."""
    policy = answer.policy
    if not answer.retried:
        return f"Not retried: {_why_not(answer)}."
    count = f"up to {policy.retries} {'retry' if policy.retries == 1 else 'retries'}"
    text = f"Retried: {count}, {wording.attempts(policy.max_attempts)}; {wording.failure(answer.failure)}."
    if all(wait.max == 0 for wait in answer.schedule):
        text += " It does not wait."
    else:
        text += f" It waits {wording.waits(answer.schedule)}."
    if len(answer.schedule) < min(policy.retries, 100):
        room = wording.seconds(policy.time_budget)
        text += f" The time budget of {room} has room for {len(answer.schedule)} of them."
    return text


def _why_not(answer: Answer) -> str:
    policy, provenance = answer.policy, answer.provenance
    happened = wording.failure(answer.failure)
    match answer.reason:
        case Reason.NOT_RETRYABLE.value if policy.retryable:
            return f"{happened} is not what the target's lists of exceptions retry"
        case Reason.NOT_RETRYABLE.value:
            return f"{happened} is not worth another try, says {_who(provenance['retryable'])}"
        case Reason.ATTEMPTS_SPENT.value:
            return f"the policy is {wording.attempts(policy.max_attempts)}, says {_who(provenance['max_attempts'])}"
        case Reason.HINT_TOO_LONG.value:
            asked, most = wording.seconds(answer.failure.retry_after), wording.seconds(policy.max_retry_after)
            cools = "; its source cools until then, without spending an attempt"
            told = f"the server asks to wait {asked}, longer than max_retry_after, {most}"
            return told + (cools if answer.target.startswith("connector:") else "")
        case Reason.BUDGET_SPENT.value if answer.failure.code.name == "cancelled_by_timeout":
            return f"{happened} says that the time budget is spent"
        case Reason.BUDGET_SPENT.value:
            budget = wording.seconds(policy.time_budget)
            return f"the wait would outlive the time budget, {budget}, says {_who(provenance['time_budget'])}"
        case "control_flow":
            return f"{answer.failure.exception} is control flow, which no policy retries"
        case reason:
            return reason


def _who(field: FieldOrigin) -> str:
    return f"{field.layer.value}, {where(field.source)}" if field.layer is not Layer.REQUEST else "the request"
