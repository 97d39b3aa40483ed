"""
Settings of a worker, in the units it works with.

Resolved once from the configuration; gates arrive decided, from `config/settings.py`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from reefknot.policy.model.book import Book
from reefknot.policy.model.defaults import builtin_book
from reefknot.queue.model.admission import Degradation, OverloadStatus, RejectionPolicy, Rules, Thresholds
from reefknot.queue.model.destination_health import DestinationRules

POOLS: Mapping[str, int] = {"cpu": 4, "gpu": 1, "io": 8}
OTHER_POOL = 4


class ThrottleSettings(Struct, frozen=True):
    """Success-fed retry tokens per destination; a fleet of N workers gets 1/N each."""

    enabled: bool = True
    tokens: float = 10.0
    per_success: float = 0.1
    per_second: float = 0.1


class WorkerSettings(Struct, frozen=True):
    """Everything that steers one worker."""

    book: Book
    retries_v2: bool = True
    queue_v2: bool = True
    rules: Rules = Rules()
    queue_sizes: Mapping[str, int] = {}
    concurrency: Mapping[str, int] = field(default_factory=lambda: dict(POOLS))
    throttle: ThrottleSettings = ThrottleSettings()
    breaker: DestinationRules = DestinationRules()
    quarantine_failed: bool = False
    lease: float = 60.0
    heartbeat: float = 1.0
    drain: float = 30.0

    def rules_for(self, resource_class: str) -> Rules:
        """The rules of one class; its size may differ."""
        size = self.queue_sizes.get(resource_class)
        return self.rules if size is None else msgspec.structs.replace(self.rules, size=size)

    def slots_for(self, resource_class: str) -> int:
        return self.concurrency.get(resource_class, OTHER_POOL)


def default_settings(**changes: object) -> WorkerSettings:
    """Both gates on, everything else built in."""
    return msgspec.structs.replace(WorkerSettings(builtin_book()), **changes)


def settings_from(
    configuration: Any, book: Book, *, retries_gate: object = True, queue_gate: object = True, **changes: object
) -> WorkerSettings:
    """
    The settings that a checked configuration gives.

    `configuration` has the shape of the file (`.worker.queue.v2` and so on); a gate is anything that is true or false.
    """
    worker = configuration.worker
    queue, throttle = worker.queue.v2, worker.retries.v2.throttle
    pools = queue.resource_pools
    sizes = {name: pool.max_queue_size for name, pool in pools.items() if pool.max_queue_size is not None}
    slots = {name: pool.max_concurrency or POOLS.get(name, OTHER_POOL) for name, pool in pools.items()}
    settings = WorkerSettings(
        book,
        retries_v2=bool(retries_gate),
        queue_v2=bool(queue_gate),
        rules=rules_from(queue),
        queue_sizes=sizes,
        concurrency={**POOLS, **slots},
        throttle=ThrottleSettings(throttle.enabled, throttle.tokens, throttle.per_success, throttle.per_second),
        breaker=rules_of_breaker(worker.retries.v2.breaker),
        quarantine_failed=worker.quarantine_failed,
    )
    return msgspec.structs.replace(settings, **changes)


def rules_of_breaker(breaker: Any) -> DestinationRules:
    """The breaker's part of a checked configuration (`worker.retries.v2.breaker`) as rules."""
    return DestinationRules(
        enabled=breaker.enabled,
        failures=breaker.failures,
        jobs=breaker.jobs,
        within=breaker.within_seconds,
        rest=breaker.cooldown_seconds,
        longest_rest=breaker.max_cooldown_seconds,
        max_outage=breaker.max_outage_seconds,
    )


def rules_from(queue: object) -> Rules:
    """The queue's part of a checked configuration (`worker.queue.v2`) as rules."""
    q: Any = queue
    levels = q.policies.degrade.degradation_levels
    return Rules(
        size=q.max_queue_size,
        policy=RejectionPolicy(q.rejection_policy),
        reject_at=OverloadStatus(q.reject_at),
        thresholds=Thresholds(
            q.overload_thresholds.degraded, q.overload_thresholds.overloaded, q.overload_thresholds.critical
        ),
        max_drop_age_ms=q.policies.drop_oldest.max_drop_age_ms,
        max_defer_time_ms=q.policies.defer.max_defer_time_ms,
        max_wait_fraction=q.max_wait_fraction,
        preempt=q.preempt,
        light=_degradation(levels.light),
        medium=_degradation(levels.medium),
        heavy=_degradation(levels.heavy),
    )


def _degradation(words: Any) -> Degradation:
    return Degradation(
        skip_retries=words.skip_retries,
        timeout_factor=words.timeout_reduction_factor if words.reduce_timeout else 1.0,
        skip_circuit_breaker=words.skip_circuit_breaker,
    )
