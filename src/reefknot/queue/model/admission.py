"""
Admission to a bounded queue: its overload level, and the decision about an arrival.

A level is a share of the queue. The raw level follows the depth; the reported one leaves a level only when the depth
has fallen well below its threshold, so that a status used for routing does not flutter. People are shown a held level,
which also has to stay lower for a while: a short queue fills and empties many times a second.

`admit` is one pure function for all four policies. It sees the queue as it stands before the arrival, and returns a
value: accept, accept by dropping another, defer, degrade, or reject with the reason that the caller receives.
"""

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from msgspec import Struct, to_builtins

from reefknot.core.canonical import fingerprint

HYSTERESIS = 0.1
_GRAIN = 1e-9
"""0.8 less 0.1 is a hair above 0.7 in floats; a queue of 1000 with 700 in it is not below 70 %."""


class OverloadStatus(StrEnum):
    """The level of a queue as a worker reports it, from healthy to full."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OVERLOADED = "overloaded"
    CRITICAL = "critical"

    severity: int
    """The place in this order, from 0."""


_ORDER = tuple(OverloadStatus)
for _place, _status in enumerate(_ORDER):
    _status.severity = _place


class Thresholds(Struct, frozen=True):
    """Shares of a full queue at which the level changes, in ascending order."""

    degraded: float = 0.5
    overloaded: float = 0.8
    critical: float = 1.0

    def of(self, status: OverloadStatus) -> float:
        """The share of the queue at which a level begins; healthy begins at 0."""
        return (0.0, self.degraded, self.overloaded, self.critical)[status.severity]


def level(depth: int, size: int, thresholds: Thresholds = Thresholds()) -> OverloadStatus:  # noqa: B008 - frozen
    """The raw level: each begins at its threshold."""
    share = depth / size
    if share >= thresholds.critical:
        return OverloadStatus.CRITICAL
    if share >= thresholds.overloaded:
        return OverloadStatus.OVERLOADED
    if share >= thresholds.degraded:
        return OverloadStatus.DEGRADED
    return OverloadStatus.HEALTHY


def reported(
    before: OverloadStatus,
    depth: int,
    size: int,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
) -> OverloadStatus:
    """The level that is reported to routers: up at once, down only below the threshold less a tenth of the queue."""
    raw = level(depth, size, thresholds)
    if raw is before or raw.severity > before.severity:
        return raw
    share = depth / size
    for status in _ORDER[before.severity : raw.severity : -1]:
        if share >= thresholds.of(status) - HYSTERESIS - _GRAIN:
            return status
    return raw


HOLD_S = 2.0
"""Seconds that a queue has to be below a level before displays show the lower one."""


class HeldStatus(Struct, frozen=True):
    """
    The level for displays, held for a while so that it does not flicker. Since `below_since` the queue has been below
    it, at most at `highest`.
    """

    status: OverloadStatus = OverloadStatus.HEALTHY
    below_since: float | None = None
    highest: OverloadStatus = OverloadStatus.HEALTHY


def held(before: HeldStatus, status: OverloadStatus, now: float) -> HeldStatus:
    """The level to display now: up at once, down after `HOLD_S` below it, to the highest level of that time."""
    if status.severity >= before.status.severity:
        return HeldStatus(status)
    if before.below_since is None:
        return HeldStatus(before.status, now, status)
    highest = max(status, before.highest, key=_ORDER.index)
    if now - before.below_since < HOLD_S:
        return HeldStatus(before.status, before.below_since, highest)
    return held(HeldStatus(highest), status, now)


KNOWN_AFTER = 20
"""Number of service times that must be known before work is refused because of them."""
UNKNOWN_WAIT_MS = 1000
SHORTEST_WAIT_MS = 100
LONGEST_WAIT_MS = 30_000
HEAVY_FROM = 0.95
DRAINING_MESSAGE = "Worker is draining, rejecting assignment"
MISSES_MESSAGE = "Assignment would miss its deadline in the queue, rejecting assignment"


class RejectionPolicy(StrEnum):
    """The action of a queue that is full."""

    REJECT_NEW = "reject_new"
    DROP_OLDEST = "drop_oldest"
    DEFER = "defer"
    DEGRADE = "degrade"


class RejectReason(StrEnum):
    """Why work was not taken, as acks carry it."""

    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    WOULD_MISS_DEADLINE = "would_miss_deadline"
    DROPPED_OLDEST = "dropped_oldest"
    INVALID = "invalid"
    UNKNOWN_JOB_TYPE = "unknown_job_type"
    DRAINING = "draining"


_UNKNOWN_TYPE = "job.type: "
_NOT_KNOWN = " is not known here; known: "


def unknown_type_message(job_type: str, known: Iterable[str]) -> str:
    """The message of a worker that cannot run steps of this type."""
    return f"{_UNKNOWN_TYPE}{job_type!r}{_NOT_KNOWN}{', '.join(sorted(known))}"


def tells_unknown_type(message: str) -> bool:
    """Whether a refusal has the text of `unknown_type_message`: an ack of the baseline has no field for its reason."""
    return message.startswith(_UNKNOWN_TYPE) and _NOT_KNOWN in message


class DegradationLevel(StrEnum):
    LIGHT = "light"
    MEDIUM = "medium"
    HEAVY = "heavy"


class Degradation(Struct, frozen=True):
    """The reductions of one level of degradation."""

    skip_retries: bool = False
    timeout_factor: float = 1.0
    skip_circuit_breaker: bool = False


class Rules(Struct, frozen=True):
    """The settings of one queue."""

    size: int = 1000
    policy: RejectionPolicy = RejectionPolicy.REJECT_NEW
    reject_at: OverloadStatus = OverloadStatus.CRITICAL
    thresholds: Thresholds = Thresholds()
    max_drop_age_ms: int = 60_000
    max_defer_time_ms: int = 30_000
    max_wait_fraction: float | None = 0.5
    preempt: bool = True
    """Whether an arrival of higher priority displaces the lowest. False applies to `reject_new` only."""
    light: Degradation = Degradation()
    medium: Degradation = Degradation(skip_retries=True, timeout_factor=0.8)
    heavy: Degradation = Degradation(skip_retries=True, timeout_factor=0.5, skip_circuit_breaker=True)


def refused_from(rules: Rules) -> int:
    """The depth from which `admit` refuses an arrival that displaces no other work."""

    def is_refused(depth: int) -> bool:
        return level(depth, rules.size, rules.thresholds).severity >= rules.reject_at.severity

    return bisect_left(range(rules.size), True, key=is_refused)


ADMISSION_VERSION = 2
"""Since version 2 the inputs of an admission hold everything that determines its load level."""
HASH_DIGITS = 16


def rules_content(rules: Rules, resource_class: str) -> dict[str, Any]:
    """Rules as audit events store them, with the class whose queue they are for."""
    return {**to_builtins(rules), "resource_class": resource_class}


def rules_hash(rules: Rules, resource_class: str) -> str:
    """The hash by which audit events refer to rules: the beginning of the SHA-256 of their content."""
    return fingerprint(rules_content(rules, resource_class))[:HASH_DIGITS]


class Oldest(Struct, frozen=True):
    """The oldest item of the lowest priority in the queue, which would be dropped first."""

    id: str
    priority: int
    waited_ms: int


class QueueView(Struct, frozen=True, gc=False, omit_defaults=True):
    """A queue as it stands before the arrival."""

    depth: int = 0
    concurrency: int = 1
    service_times_known: int = 0
    mean_service_ms: float = 0.0
    oldest: Oldest | None = None
    draining: bool = False
    behind: int = 0
    """How many of them the arrival overtakes: by priority, or because tenants take turns."""

    def for_baseline(self) -> "QueueView":
        """The view without the fields that the baseline ignores; the depth stays for display."""
        return QueueView(self.depth, draining=self.draining)


class Arrival(Struct, frozen=True, gc=False, omit_defaults=True):
    """The work to be admitted. `deadline_ms` is the time left, if a deadline was given."""

    priority: int = 0
    deadline_ms: float | None = None
    tenant: str = ""


class Accept(Struct, frozen=True):
    message: str = "Assignment queued"


class AcceptDropping(Struct, frozen=True):
    """Take it in the place of another."""

    victim: str
    message: str = "Assignment queued (dropped oldest)"


class Defer(Struct, frozen=True):
    """Take it, but run it later."""

    milliseconds: int

    @property
    def message(self) -> str:
        return f"Assignment deferred for {self.milliseconds}ms"


class Degrade(Struct, frozen=True):
    """Take it with less service."""

    level: DegradationLevel
    change: Degradation

    @property
    def message(self) -> str:
        return f"Assignment accepted with degradation: {self.level.value}"


class Reject(Struct, frozen=True):
    """Do not take it; ask again after `retry_after_ms`."""

    reason: RejectReason
    message: str
    retry_after_ms: int
    depth: int = 0
    """The work ahead, in the queue that refused this."""


Admission = Accept | AcceptDropping | Defer | Degrade | Reject


def admit(view: QueueView, arrival: Arrival, rules: Rules) -> Admission:
    """Whether, and how, the queue accepts the arrival."""
    if view.draining:
        return Reject(RejectReason.DRAINING, DRAINING_MESSAGE, LONGEST_WAIT_MS)
    status = level(view.depth, rules.size, rules.thresholds)
    full = view.depth >= rules.size or status is OverloadStatus.CRITICAL
    if full and rules.policy is RejectionPolicy.DROP_OLDEST:
        return _in_place_of(view, arrival, rules)
    if full and _preempts(view, arrival, rules) and view.oldest is not None:
        return AcceptDropping(view.oldest.id)
    if full:
        return Reject(RejectReason.QUEUE_FULL, _FULL[rules.policy], retry_after_ms(view))
    if status.severity >= rules.reject_at.severity:
        return Reject(RejectReason.OVERLOADED, "Worker overloaded, rejecting assignment", retry_after_ms(view))
    if would_miss_deadline(view, arrival, rules):
        return Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES_MESSAGE, retry_after_ms(view))
    if rules.policy is RejectionPolicy.DEFER:
        return _deferred(view, arrival, rules)
    if rules.policy is RejectionPolicy.DEGRADE:
        return _degraded(view, status, rules)
    return Accept()


_FULL = {
    RejectionPolicy.REJECT_NEW: "Queue full, rejecting assignment",
    RejectionPolicy.DROP_OLDEST: "Queue full, rejecting assignment",
    RejectionPolicy.DEFER: "Queue at capacity, cannot defer",
    RejectionPolicy.DEGRADE: "Queue at capacity, cannot degrade",
}
"""Messages of a full queue. `router/inbox._FULL` recognises workers without a `reason` by these first words."""


def _in_place_of(view: QueueView, arrival: Arrival, rules: Rules) -> Admission:
    """Drop the oldest of the lowest priority, unless its priority is higher or its waiting time protects it."""
    oldest = view.oldest
    if oldest is None or not can_displace(arrival, oldest.priority, rules) or oldest.waited_ms > rules.max_drop_age_ms:
        return Reject(RejectReason.QUEUE_FULL, _FULL[RejectionPolicy.DROP_OLDEST], retry_after_ms(view))
    return AcceptDropping(oldest.id)


def _preempts(view: QueueView, arrival: Arrival, rules: Rules) -> bool:
    """Whether the arrival has a higher priority than the lowest in the queue, and may take its place."""
    return view.oldest is not None and can_displace(arrival, view.oldest.priority, rules)


def can_displace(arrival: Arrival, priority: int, rules: Rules) -> bool:
    """Whether the arrival may displace work of this priority in a full queue, if that work has not waited long."""
    if rules.policy is RejectionPolicy.DROP_OLDEST:
        return priority <= arrival.priority
    return priority < arrival.priority and (rules.preempt or rules.policy is not RejectionPolicy.REJECT_NEW)


def would_miss_deadline(view: QueueView, arrival: Arrival, rules: Rules) -> bool:
    """Whether too much of the arrival's deadline would be gone when it starts."""
    if arrival.deadline_ms is None or rules.max_wait_fraction is None or view.service_times_known < KNOWN_AFTER:
        return False
    return expected_wait_ms(view) > rules.max_wait_fraction * arrival.deadline_ms


def expected_wait_ms(view: QueueView) -> float:
    """The time until the turn of an arrival comes."""
    return max(0, view.depth - view.behind) * view.mean_service_ms / view.concurrency


def retry_after_ms(view: QueueView) -> int:
    """The suggested pause before another try: the estimated time until half the queue is done."""
    if view.service_times_known < KNOWN_AFTER:
        return UNKNOWN_WAIT_MS
    return int(min(LONGEST_WAIT_MS, max(SHORTEST_WAIT_MS, expected_wait_ms(view) / 2)))


def defer_time_ms(depth: int, rules: Rules) -> int:
    """The time to defer: 0 at the degraded threshold, rising linearly to the configured time at a full queue."""
    share = depth / rules.size
    begin = rules.thresholds.degraded
    if share < begin or begin >= 1.0:
        return 0
    return round(min(1.0, (share - begin) / (1.0 - begin)) * rules.max_defer_time_ms)


def _deferred(view: QueueView, arrival: Arrival, rules: Rules) -> Admission:
    milliseconds = defer_time_ms(view.depth, rules)
    if arrival.deadline_ms is not None:
        milliseconds = min(milliseconds, int(arrival.deadline_ms * (rules.max_wait_fraction or 0.5)))
    return Defer(milliseconds) if milliseconds > 0 else Accept()


def _degraded(view: QueueView, status: OverloadStatus, rules: Rules) -> Admission:
    if view.depth / rules.size >= HEAVY_FROM:
        return Degrade(DegradationLevel.HEAVY, rules.heavy)
    if status is OverloadStatus.OVERLOADED:
        return Degrade(DegradationLevel.MEDIUM, rules.medium)
    if status is OverloadStatus.DEGRADED:
        return Degrade(DegradationLevel.LIGHT, rules.light)
    return Accept()
