"""
The answer to "why": one decision with the provenance of every field, for programs and for people.

Both forms come from the same record. The decision is the core's own; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from reefknot.cli import wording
from reefknot.cli.drawing import put_waits
from reefknot.cli.output import jsonable, put, put_table, where
from reefknot.core.failure import Failure
from reefknot.core.retry.book import SHOWN_FIELDS
from reefknot.core.retry.decide import Reason
from reefknot.core.retry.explain import PlannedWait
from reefknot.core.retry.layers import Layer, Said, Settled
from reefknot.core.retry.policy import RetryPolicy

FIELDS = tuple(name for shown in SHOWN_FIELDS for name in ((shown, "retries") if shown == "max_attempts" else (shown,)))
"""A policy's fields as they are shown: `retries` stands beside the number that it follows from."""

RETRYABLE = "retryable"
CONTROL_FLOW = "control_flow"


class Answer(Struct, frozen=True):
    """Would it be retried, why, and when."""

    target: str
    failure: Failure
    policy: RetryPolicy
    provenance: Mapping[str, Settled]
    reason: str
    """`retryable`, or why not."""
    schedule: tuple[PlannedWait, ...]
    gate: bool
    gate_said_by: str

    @property
    def retried(self) -> bool:
        return self.reason == RETRYABLE


def settled_fields(policy: RetryPolicy, provenance: Mapping[str, Settled]) -> dict[str, Settled]:
    """Every shown field with the policy's own value, and where it came from."""
    fields: dict[str, Settled] = {}
    for name in FIELDS:
        known = provenance["max_attempts" if name == "retries" else name]
        if name == "retries":
            beaten = tuple(Said(one.value - 1, one.layer, one.source) for one in known.overrode)
        else:
            beaten = known.overrode
        fields[name] = Settled(getattr(policy, name), known.layer, known.source, beaten)
    return fields


def baseline_provenance(policy: RetryPolicy, *, counted: bool, timed: bool) -> dict[str, Settled]:
    """The preset's fields, and what the request said over them."""
    from reefknot.core.retry.builtin import BASELINE_RETRIES, DEFAULT_TIMEOUT

    source = "built-in: baseline"
    fields = {name: Settled(getattr(policy, name), Layer.BUILTIN, source) for name in SHOWN_FIELDS}
    said = {"max_attempts": (counted, BASELINE_RETRIES + 1), "attempt_timeout": (timed, DEFAULT_TIMEOUT)}
    for name, (by_request, before) in said.items():
        if by_request:
            beaten = (Said(before, Layer.BUILTIN, source),)
            fields[name] = Settled(getattr(policy, name), Layer.REQUEST, "request", beaten)
    return fields


def policy_json(policy: RetryPolicy, provenance: Mapping[str, Settled]) -> dict[str, Any]:
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


def put_policy(policy: RetryPolicy, provenance: Mapping[str, Settled]) -> None:
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


def instead_of(name: str, said: Said) -> str:
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


def _who(field: Settled) -> str:
    return f"{field.layer.value}, {where(field.source)}" if field.layer is not Layer.REQUEST else "the request"
