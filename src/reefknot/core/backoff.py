"""
Backoff: the wait before retry *k* (k = 0, 1, …), as a pure function of the policy and a random draw.

The strategy says how the delay grows, jitter spreads it. The cap is applied to the range that the draw chooses from,
not to the chosen wait: waits do not pile up at the cap. Any index up to 10^9 gives a finite wait in constant time,
because growth stops in the exponent.

A draw is a function of (seed, key of the work, retry index). Nothing is remembered, so a forked child, a thousand tasks
and a replay years later each get their own number, and processes with different seeds draw different numbers.

Other packages may register strategies: pure functions of the retry's index and the policy that return seconds. A
strategy is tried out when it is registered. If it fails later, or returns an invalid wait, the wait is the cap: a
broken strategy slows work down, but cannot speed it up or stop it.
"""

import re
from collections.abc import Callable
from math import log

from reefknot.core import checks
from reefknot.core.policy import CUSTOM_STRATEGIES, SHORT_STRATEGIES, Jitter, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError, ParameterTypeError

_SAFE_INDEX = 64
"""Below this index `base * multiplier**k` cannot overflow a float: 1e8 * 1000**64 is 1e200."""

_EXPONENTIAL, _LINEAR, _FIXED = (
    RetryStrategy.EXPONENTIAL_BACKOFF,
    RetryStrategy.LINEAR_BACKOFF,
    RetryStrategy.FIXED_DELAY,
)
_NONE, _FULL, _EQUAL, _PROPORTIONAL = Jitter.NONE, Jitter.FULL, Jitter.EQUAL, Jitter.PROPORTIONAL


def delay_before(k: int, policy: RetryPolicy, draw: float, previous: float = 0.0) -> float:
    """The wait before retry `k`. `draw` is in [0, 1); `previous`, the wait before, is for decorrelated jitter."""
    if policy.base_delay == 0.0 and not policy.whole_seconds:
        return 0.0
    low, high = wait_range(k, policy, previous=previous)
    delay = low + draw * (high - low)
    return in_whole_seconds(delay, policy) if policy.whole_seconds else delay


def wait_range(k: int, policy: RetryPolicy, *, previous: float = 0.0) -> tuple[float, float]:
    """The shortest and the longest possible wait before retry `k`."""
    delay, cap = delay_without_jitter(k, policy), policy.max_delay
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


def delay_without_jitter(k: int, policy: RetryPolicy) -> float:
    """The delay before retry `k`, before jitter; 0 if retries are immediate or never happen."""
    strategy, base, cap = policy.strategy, policy.base_delay, policy.max_delay
    if strategy is _EXPONENTIAL:
        return min(cap, _grown(base, policy.multiplier, k, cap))
    if strategy is _LINEAR:
        return min(cap, base * (k + 1))
    if strategy is _FIXED:
        return base
    return _custom_delay(k, policy) if strategy in CUSTOM_STRATEGIES else 0.0


def _custom_delay(k: int, policy: RetryPolicy) -> float:
    try:
        delay = float(CUSTOM_STRATEGIES[policy.strategy](k, policy))
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


def in_whole_seconds(delay: float, policy: RetryPolicy) -> float:
    """The delay in whole seconds, at least one, unless the strategy retries at once."""
    if policy.strategy in (RetryStrategy.IMMEDIATE, RetryStrategy.NO_RETRY):
        return delay
    return float(max(1, int(delay)))


_MASK = (1 << 64) - 1
_BY_KEY = 0x9E3779B97F4A7C15
_BY_INDEX = 0xD1B54A32D192ED03


def draw(seed: int, key: int, index: int) -> float:
    """The number in [0, 1) for this retry of this work under this seed."""
    z = (seed + key * _BY_KEY + (index + 1) * _BY_INDEX) & _MASK
    # The finaliser of splitmix64: every input bit reaches every output bit.
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 9007199254740992.0


def key_number(key: str) -> int:
    """The number that stands for a text key in `draw`; the same in every process."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}\Z")
_TRIED = (0, 1, 2, 10, 63, 64, 1000, 1_000_000_000)
_ANSWER = "a function of (retry, policy) that gives seconds: a finite number, 0 or more, the same for the same input"


def register_strategy(name: str, function: Callable[[int, RetryPolicy], float]) -> None:
    """Make a strategy available to policies by its name. A second registration of a name replaces the first."""
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
        if answers[0] != answers[1] or not all(checks.is_number(one) and 0 <= one < 1e300 for one in answers):
            raise ParameterError(name, f"{answers[0]!r}, then {answers[1]!r} for retry {k}", _ANSWER)
    CUSTOM_STRATEGIES[name] = function
