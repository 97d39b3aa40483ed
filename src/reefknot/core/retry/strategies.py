"""
Strategies that other packages bring.

A strategy says how the undisturbed delay grows: a pure function of the retry's index (0, 1, …) and the policy, in
seconds. What it answers is bounded by the policy's cap, jitter is laid over it, and the server's hint and the budgets
hold as ever. It is tried out when it is registered. If it fails later on, or answers what is no wait, the wait is the
cap: a strategy can make work slower, but neither faster than it says nor endless.
"""

import re
from collections.abc import Callable
from math import isfinite

from reefknot.core.retry.policy import OWN_STRATEGIES, SHORT_STRATEGIES, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError, ParameterTypeError

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}\Z")
_TRIED = (0, 1, 2, 10, 63, 64, 1000, 1_000_000_000)
_ANSWER = "a function of (retry, policy) that gives seconds: a finite number, 0 or more, the same for the same input"


def register(name: str, function: Callable[[int, RetryPolicy], float]) -> None:
    """From now on policies may name it. The same name again replaces it."""
    if not _NAME.match(name) or name in SHORT_STRATEGIES or name in set(RetryStrategy):
        raise ParameterError("strategy", name, "a lower-case name of its own, at most 64 of a-z, 0-9, _ . -")
    if not callable(function):
        raise ParameterTypeError(name, function, _ANSWER)
    policy = RetryPolicy()
    for k in _TRIED:
        try:
            answers = [function(k, policy), function(k, policy)]
        except Exception as error:
            raise ParameterError(name, f"{type(error).__name__} for retry {k}", _ANSWER) from error
        if answers[0] != answers[1] or not all(_is_wait(answer) for answer in answers):
            raise ParameterError(name, f"{answers[0]!r}, then {answers[1]!r} for retry {k}", _ANSWER)
    OWN_STRATEGIES[name] = function


def _is_wait(answer: object) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool) and 0 <= answer < 1e300 and isfinite(answer)
