"""
Retry policies and decisions in words.

Attempts are always given both ways, "4 attempts (1 + 3 retries)", because the documents that people bring count
differently. Nothing is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reefknot.console.operations.values import long_seconds, plural, seconds
from reefknot.core.decide import Reason
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.limits import LimitRule
from reefknot.core.policy import Jitter, RetryPolicy, RetryStrategy
from reefknot.policy.model.book import Condition, FieldOrigin, Layer
from reefknot.policy.model.explain import PlannedWait, lost_retries
from reefknot.queue.model.source_health import LONGEST_COOLING_MS, HealthRules

if TYPE_CHECKING:
    from reefknot.policy.layers import Gate

# ---- a policy --------------------------------------------------------------------------------------------------------


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


def condition_name(condition: Condition) -> str:
    """The name of the failures that an override is for."""
    match condition:
        case ErrorCode():
            return condition.name
        case FailureType():
            return condition.value
        case _:
            return str(condition)


def near(source: str) -> str:
    """A path or source position, without the current folder in front."""
    return source.removeprefix(os.getcwd() + os.sep)


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
    throttled: bool = False
    """Whether workers throttle the retries of a busy destination."""
    asked_at: str = ""
    """Of a step with `on=`: the file and line of its decorator."""
    limits: tuple[LimitRule, ...] = ()
    """Of a step: the limits of the fleet under which it begins."""

    @property
    def retried(self) -> bool:
        return self.reason == RETRYABLE


def limit_text(rule: LimitRule) -> str:
    """A limit in words: `limit billing.*: 10/s, burst 20, for each tenant`."""
    each = f", for each {rule.per}" if rule.per and not rule.only else ""
    return f"limit {rule.name}: {rule}{each}"


def sentence(answer: PolicyAnswer) -> str:
    """The decision in a sentence or two."""
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


def by_step(answer: PolicyAnswer) -> str:
    """The part that the step's own `on=` has in the answer, in a sentence; empty where the step has none."""
    if not answer.asked_at:
        return ""
    return (
        f"The step has on= ({near(answer.asked_at)}), which decides for each exception that the step raises whether it "
        "is retried, and is not asked here: the answer above is that for time limits and results without an exception."
    )


def short_of_time(answer: PolicyAnswer) -> str:
    """The time that the step's own waits lack, in a sentence; empty where they fit."""
    problem = lost_retries(answer.policy, answer.provenance, near=near)
    return f"Short of time: {problem}." if problem else ""


def under_load(answer: PolicyAnswer) -> str:
    """The effect of the throttle on these retries, in a sentence; empty where there is none."""
    if not (answer.throttled and answer.retried):
        return ""
    return (
        "Under load: when a destination that gets 100 calls or more in 10 s keeps failing, a worker throttles its "
        "retries (worker.retries.v2.throttle), and a job that would have been retried is given up, as throttled."
    )


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
    return f"set by {'the request' if by_request else f'{field.layer.value}, {near(field.source)}'}"


# ---- what ingestion does in addition to retrying ---------------------------------------------------------------------


def ingestion_json(answer: PolicyAnswer, health: HealthRules) -> dict[str, Any]:
    return {
        **in_ingestion(answer, health),
        "breaker": {
            "enabled": health.enabled,
            "failures": health.failures,
            "jobs": health.jobs,
            "source_failures": health.source_failures,
            "cooldown_seconds": health.rest_ms / 1000,
            "max_cooldown_seconds": health.longest_rest_ms / 1000,
            "max_outage_seconds": health.max_outage_ms / 1000,
        },
        "longest_cooling_seconds": LONGEST_COOLING_MS // 1000,
    }


def in_ingestion(answer: PolicyAnswer, health: HealthRules) -> dict[str, str]:
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
    if kind is FailureType.RATE_LIMITED:
        outage = long_seconds(health.max_outage_ms / 1000)
        wait = "it waits for the time that the source asks for, up to 24 h, or its policy's, and spends no attempt"
        return f"{wait}; without an answer for {outage} it goes to quarantine"
    text = f"each failure spends an attempt; after {attempts(answer.policy.max_attempts)} it goes to quarantine"
    if kind is FailureType.TRANSIENT and health.enabled:
        return f"{text}; while the source rests or recovers, failures spend none, unless it answered others meanwhile"
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
                f"{plural(health.failures, 'such failure')} in a row, of {plural(health.jobs, 'job')} or more, or "
                f"{health.source_failures} of the source itself, open its breaker: it rests for {first}, after each "
                f"failed probe twice as long, up to {longest}; then one job at a time probes it, and with each further "
                "success one more may run at once"
            )
        case FailureType.PERMANENT:
            return "nothing changes for its other jobs: it has answered, which is no sign of an outage"
        case _:
            return "nothing changes for its other jobs: a failure without a type tells nothing about the source"
