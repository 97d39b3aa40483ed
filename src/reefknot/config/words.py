"""
The words of each dialect: the field that a word speaks of, and what its value means there.

Only words whose meaning is the same wherever they stand; what depends on another word is for `dialects`.
"""

from typing import Any

from reefknot.config.strategies import strategy_named
from reefknot.core.retry.policy import Jitter


def _seconds(milliseconds: float) -> float:
    return milliseconds / 1000


def _executions(retries: int) -> int:
    return retries + 1


def _same(value: Any) -> Any:
    return value


def _jitter_switch(enabled: bool) -> Jitter:
    return Jitter.PROPORTIONAL if enabled else Jitter.NONE


BACKOFF_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", _executions),
    "base_delay_ms": ("base_delay", _seconds),
    "max_delay_ms": ("max_delay", _seconds),
    "jitter_type": ("jitter", Jitter),
    "jitter_factor": ("jitter_factor", float),
    "exponential_base": ("multiplier", float),
    "strategy": ("strategy", strategy_named),
    "max_retry_after_ms": ("max_retry_after", _seconds),
}
CONNECTOR_WORDS: dict[str, tuple[str, Any]] = {
    "strategy": ("strategy", strategy_named),
    "max_attempts": ("max_attempts", _executions),
    "base_delay_seconds": ("base_delay", float),
    "max_delay_seconds": ("max_delay", float),
    "jitter_factor": ("jitter_factor", float),
    "backoff_multiplier": ("multiplier", float),
}
OPERATION_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", _same),
    "base_delay": ("base_delay", float),
    "max_delay": ("max_delay", float),
    "backoff_multiplier": ("multiplier", float),
    "jitter_enabled": ("jitter", _jitter_switch),
    "jitter_factor": ("jitter_factor", float),
    "retryable_exceptions": ("retryable_exceptions", tuple),
    "non_retryable_exceptions": ("non_retryable_exceptions", tuple),
    "timeout": ("attempt_timeout", _same),
}
