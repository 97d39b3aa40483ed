"""
What `retry`, `Retrier` and `using` take by keyword, as types.

Nothing here runs. A typed dictionary tells "not said" from "said: none".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from reefknot.core.retry.policy import Jitter, JitterName, RetryStrategy, StrategyName
    from reefknot.core.retry.throttle import RetryThrottle
    from reefknot.execution.breaker import CircuitBreaker
    from reefknot.execution.judge import On
    from reefknot.execution.report import Hook


class PolicyFields(TypedDict, total=False):
    """What can be said about the policy, in the decorator's words. Not said is inherited."""

    attempts: int
    deadline: float | None
    base_delay: float
    max_delay: float
    multiplier: float
    jitter: JitterName | Jitter
    jitter_factor: float
    strategy: StrategyName | RetryStrategy
    attempt_timeout: float | None
    max_retry_after: float


class Options(PolicyFields, total=False):
    """All that `retry`, `Retrier.using` and `using` take by keyword."""

    on: On | None
    throttle: RetryThrottle | str | bool
    breaker: CircuitBreaker | None
    on_retry: Hook | None
    on_give_up: Hook | None
    on_recover: Hook | None
    in_thread: bool
    name: str
    seed: int
