"""
How long to wait before retry *k* (k = 0, 1, …).

The cap is applied to the range that chance draws from, not to what it drew: waits do not pile up at the cap. Any index
up to 10^9 gives a finite wait in constant time, because growth stops in the exponent.
"""

from math import log

from reefknot.core.retry.policy import OWN_STRATEGIES, Jitter, RetryPolicy, RetryStrategy

_SAFE_INDEX = 64
"""Below it `base * multiplier**k` cannot overflow a float: 1e8 * 1000**64 is 1e200."""


_EXPONENTIAL, _LINEAR, _FIXED = (
    RetryStrategy.EXPONENTIAL_BACKOFF,
    RetryStrategy.LINEAR_BACKOFF,
    RetryStrategy.FIXED_DELAY,
)
_NONE, _FULL, _EQUAL, _PROPORTIONAL = Jitter.NONE, Jitter.FULL, Jitter.EQUAL, Jitter.PROPORTIONAL


def undisturbed(k: int, policy: RetryPolicy) -> float:
    """The delay before retry `k`, as it were without jitter. Immediate, or never retried, is 0."""
    strategy, base, cap = policy.strategy, policy.base_delay, policy.max_delay
    if strategy is _EXPONENTIAL:
        return min(cap, _grown(base, policy.multiplier, k, cap))
    if strategy is _LINEAR:
        return min(cap, base * (k + 1))
    if strategy is _FIXED:
        return base
    return _own(k, policy) if strategy in OWN_STRATEGIES else 0.0


def _own(k: int, policy: RetryPolicy) -> float:
    """What another package's strategy says. What is no wait counts as the longest one."""
    try:
        delay = float(OWN_STRATEGIES[policy.strategy](k, policy))
    except Exception:
        return policy.max_delay
    return min(policy.max_delay, delay) if delay >= 0.0 else policy.max_delay


def _grown(base: float, multiplier: float, k: int, cap: float) -> float:
    if k < _SAFE_INDEX:
        return base * multiplier**k
    if base == 0.0 or multiplier == 1.0:
        return base
    if k * log(multiplier) >= log(cap) - log(base):
        return cap
    return base * multiplier**k


def wait_range(k: int, policy: RetryPolicy, *, previous: float = 0.0) -> tuple[float, float]:
    """The shortest and the longest wait that chance may choose before retry `k`."""
    delay, cap = undisturbed(k, policy), policy.max_delay
    if delay == 0.0:
        return 0.0, 0.0
    jitter = policy.jitter
    if jitter is _FULL:
        return 0.0, delay
    if jitter is _NONE:
        return delay, delay
    if jitter is _EQUAL:
        return delay / 2, delay
    if jitter is _PROPORTIONAL:
        return delay * (1 - policy.jitter_factor), min(cap, delay * (1 + policy.jitter_factor))
    base = policy.base_delay
    return base, min(cap, max(base, 3 * previous if k else 3 * base))


def delay_before(k: int, policy: RetryPolicy, *, draw: float, previous: float = 0.0) -> float:
    """
    The wait before retry `k`.

    `draw` is in [0, 1); `previous` is the wait before, which only decorrelated jitter looks at.
    """
    if policy.base_delay == 0.0 and not policy.whole_seconds:
        return 0.0
    low, high = wait_range(k, policy, previous=previous)
    delay = low + draw * (high - low)
    return whole(delay, policy) if policy.whole_seconds else delay


def whole(delay: float, policy: RetryPolicy) -> float:
    """Connectors wait whole seconds and at least one, unless they retry at once."""
    if policy.strategy in (RetryStrategy.IMMEDIATE, RetryStrategy.NO_RETRY):
        return delay
    return float(max(1, int(delay)))
