"""
The options of `@rk.block`: checked where they are written, and kept as the policy, rule, class and destination of a
step.

An option that is not given is not in the policy: it is left to the other layers of the book. Numbers are checked by
`RetryPolicy` itself, so that a step, a decorator of the library and a configuration accept the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from msgspec import Struct

from reefknot.core import checks
from reefknot.core.backoff import delay_without_jitter
from reefknot.core.policy import LONGEST_WAIT, RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model.messages import LONGEST_ID
from reefknot.retrying.functions import rule_for
from reefknot.steps.port import StepRule

if TYPE_CHECKING:
    from reefknot.core.checks import Seconds
    from reefknot.core.policy import Jitter, JitterName, RetryStrategy, StrategyName
    from reefknot.retrying.functions import On

_FIELDS = {
    **dict.fromkeys(("base_delay", "max_delay", "multiplier", "jitter", "jitter_factor", "strategy")),
    **dict.fromkeys(("attempt_timeout", "max_retry_after")),
    "attempts": "max_attempts",
    "timeout": "time_budget",
}
"""Options that are fields of a policy, with the field's name where it is another one."""
_LIMITS = ("timeout", "attempt_timeout")
_OTHERS = ("destination", "on", "resource_class")
_MEANT = {
    **dict.fromkeys(("max_attempts", "tries", "retries", "max_retries", "retry_count"), "attempts"),
    **dict.fromkeys(("deadline", "time_budget", "total_timeout"), "timeout"),
    **dict.fromkeys(("time_limit", "soft_time_limit"), "attempt_timeout"),
    **dict.fromkeys(("delay", "retry_delay", "default_retry_delay"), "base_delay"),
    **dict.fromkeys(("retry_backoff_max", "max_wait"), "max_delay"),
    **dict.fromkeys(("retry_backoff", "backoff"), "multiplier"),
    "retry_jitter": "jitter",
    **dict.fromkeys(("queue", "pool", "resource"), "resource_class"),
    **dict.fromkeys(("autoretry_for", "retry_on", "retry", "exceptions", "retryable_exceptions"), "on"),
}
"""Names that other libraries and `RetryPolicy` use, and the option of ours that is meant."""
_ACCEPTED_CLASS = "the name of a class of work without blanks and without @: emails"


class BlockOptions(TypedDict, total=False):
    """
    Keyword options of `@rk.block`.

    `on` says which exceptions of the step are retried, as in `retry`: classes, or a function of the exception.
    `attempts` counts executions, the first included. `timeout` is the time of all executions and waits,
    `attempt_timeout` that of one. `resource_class` names the slots that the step runs in, `destination` what it talks
    to, for the throttle and the breaker.
    """

    on: On | None
    attempts: int
    base_delay: Seconds
    max_delay: Seconds
    multiplier: float
    jitter: JitterName | Jitter
    jitter_factor: float
    strategy: StrategyName | RetryStrategy
    timeout: Seconds | None
    attempt_timeout: Seconds | None
    max_retry_after: Seconds
    resource_class: str
    destination: str


class StepOptions(Struct, frozen=True):
    """The checked options of one step, and the file and line that they are written at."""

    policy: Mapping[str, Any] = {}
    resource_class: str = ""
    destination: str = ""
    place: str = ""
    rule: StepRule | None = None
    """Whether an exception of the step is retried; None leaves that to the policies."""


def checked_options(given: BlockOptions, place: str) -> StepOptions:
    """The options of a step; a wrong one is a `ParameterError` that names it."""
    for name, value in given.items():
        if name not in _FIELDS and name not in _OTHERS:
            raise ParameterTypeError(name, value, _no_such_option(name))
    policy = {name: value for name, value in given.items() if name in _FIELDS and value is not None}
    destination = checks.text("destination", given.get("destination", ""), "the name of what the step talks to")
    fields, resource_class = _policy_fields(policy), _resource_class(given.get("resource_class"))
    return StepOptions(fields, resource_class, destination, place, rule_for(given.get("on")))


def _policy_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy. A delay alone is not held against the built-in cap, which it moves."""
    named = {
        _FIELDS[name] or name: checks.seconds(name, one) if name in _LIMITS else one for name, one in given.items()
    }
    whole: dict[str, Any] = {"base_delay": 0.0, "max_delay": LONGEST_WAIT, **named}
    try:
        policy = RetryPolicy(**whole)
    except ParameterError as error:
        option = next((one for one, field in _FIELDS.items() if (field or one) == error.parameter), error.parameter)
        raise type(error)(option, given.get(option), error.accepted) from None
    if {"timeout", "base_delay"} <= given.keys() and policy.retries:
        _check_room(given["base_delay"], policy)
    return {field: getattr(policy, field) for field in named}


def _check_room(base_delay: object, policy: RetryPolicy) -> None:
    """Refuse a delay that the step's own time cannot hold once: none of the retries that it is for would happen."""
    if delay_without_jitter(0, policy) >= policy.time_budget:
        least = f"less than timeout, which is {policy.time_budget:g} s for all executions and the waits between them"
        raise ParameterError("base_delay", base_delay, f"{least}; attempts=1 for no retries")


def _resource_class(given: object) -> str:
    if given is None:
        return ""
    name = checks.text("resource_class", given, _ACCEPTED_CLASS)
    if not 0 < len(name) <= LONGEST_ID or not name.isprintable() or set(name) & set(" @"):
        raise ParameterError("resource_class", given, _ACCEPTED_CLASS)
    return name


def _no_such_option(name: str) -> str:
    options = sorted((*_FIELDS, *_OTHERS))
    meant = _MEANT.get(name)
    hint = f"; did you mean {meant!r}?" if meant else checks.suggest(name, options)
    return f"no such option{hint}; accepted are {', '.join(options)}"


def caller_place(depth: int) -> str:
    """The file and line of a caller, `frames` above the function that asks."""
    frame = sys._getframe(depth + 1)
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
