"""
`EventCounters`: what a process has decided, counted from its audit events.

Every event passes the journal, so no part of the system counts by itself: totals since the start with bounded labels,
the last 15 minutes in buckets of 10 seconds, and the last two and 24 hours in coarser ones. An `ActivityRecord` is
their stored form. Records of several processes are added up; the sum has the same bounds.

A total is named `metric|label|label`. Decisions are counted, including those whose write the store then refused, as
after a lost lease.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Any

from msgspec import Struct

from reefknot.audit.model.event import (
    Admission,
    BreakerEvent,
    Completed,
    Dropped,
    Event,
    IdempotencyEvent,
    Quarantined,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TakenOver,
    TimeoutOccurred,
)
from reefknot.core.decide import Reason
from reefknot.core.failure import ErrorCode
from reefknot.runtime.log import printable

STEP_S = 10
STEPS = 90


class TimeSpan(Struct, frozen=True):
    """A span of series up to now: the seconds of a step, and the number of steps."""

    step_s: int
    steps: int


SPANS = {"15m": TimeSpan(STEP_S, STEPS), "2h": TimeSpan(120, 60), "24h": TimeSpan(900, 96)}
"""The spans that are kept, the finest first, each by itself and all in one record: about 250 steps."""
DECISIONS = ("accepted", "rejected", "dropped", "deferred", "degraded")
COUNTED = (
    *DECISIONS,
    "ended",
    "succeeded",
    "failed",
    "retries",
    "recovered",
    "given_up",
    "unrecovered",
    "throttled",
    "quarantined",
    "audit_lost",
)
"""Series that count what happened in each step. Given up are all jobs whose failure is not retried any more,
whether they failed or went to quarantine; unrecovered are those of them that had been retried."""
SAMPLED = ("queued", "oldest_s", "quarantine", "level")
"""Series of a value as it was in each step; None where no system sampled it. `level` is that of the worst worker: 0
healthy, 3 critical."""
_SAMPLED = frozenset(SAMPLED)
KEPT_S = 20
"""Seconds that are also counted one by one, for the rates of the last `RATE_S` seconds."""
RATE_S = 10
RATED = ("ended", "retries")
RECENT_STEPS = 3
MOST_BLOCKS = 50
LONGEST_LABEL = 80
OTHER = "other"
WAIT_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
JOB_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0, 3600.0)
_CODES = frozenset(one.wire for one in ErrorCode)
STATUSES = ("success", "error", "timeout", "cancelled")
KEY_ACTIONS = ("hit", "conflict", "record", "release", "in_progress", "unknown", "unrecorded", "taken_over", "forget")
_BREAKER_STATES = frozenset({"closed", "open", "half_open", "healthy", "cooling", "resting", "probing", "recovering"})

Buckets = dict[int, dict[str, float]]
COARSE = {name: span for name, span in SPANS.items() if span.step_s > STEP_S}


class ActivityRecord(Struct, frozen=True, omit_defaults=True):
    """The counters of one process, or the sum of several. `at` is when they last changed (ms UTC)."""

    at: int = 0
    totals: dict[str, float] = {}
    buckets: Buckets = {}
    """The last 15 minutes, by the number of the step since the epoch."""
    coarse: dict[str, Buckets] = {}
    """The longer spans, by their names."""
    closed: bool = False
    """Whether the process that counted this is gone, so that the record can be added to those of the ended ones."""
    folded: tuple[str, ...] = ()
    """The records that are part of this sum, as long as they may still be there by themselves."""


class EventCounters:
    """Counts events, from any thread. `wall` gives the time of a step."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = Lock()
        self._totals: dict[str, float] = {}
        self._buckets: Buckets = {}
        self._coarse: dict[str, Buckets] = {name: {} for name in COARSE}
        self._seconds: Buckets = {}
        self._step = -1
        self._current: list[dict[str, float]] = []
        """The buckets of this step, the finest first. A coarser one ends with a step."""
        self._blocks: set[str] = set()
        self.changes = 0
        """Grows with every count."""

    def observe(self, event: Event) -> None:
        """Count an event."""
        counted = _COUNTED_BY.get(type(event))
        if counted is None:
            return
        counts = counted(event)
        if counts is not None:
            self.count(*counts)

    def count(self, totals: Mapping[str, float], series: Mapping[str, float]) -> None:
        """Add to totals, and to series of this step."""
        now = self._wall()
        with self._lock:
            self.changes += 1
            known = self._totals
            for name, number in totals.items():
                if name not in known:
                    name = self._bounded(name)
                known[name] = known.get(name, 0) + number
            if not series:
                return
            if int(now // STEP_S) != self._step:
                self._begin_step(now)
            for name, number in series.items():
                for bucket in self._current:
                    bucket[name] = bucket.get(name, 0) + number
                if name in RATED:
                    second = _bucket(self._seconds, int(now), KEPT_S)
                    second[name] = second.get(name, 0) + number

    def _begin_step(self, now: float) -> None:
        self._step = int(now // STEP_S)
        longer = [_bucket(self._coarse[name], int(now // one.step_s), one.steps) for name, one in COARSE.items()]
        self._current = [_bucket(self._buckets, self._step, STEPS), *longer]

    def _bounded(self, name: str) -> str:
        """The name of a total that is new: with the block `other` when there are too many blocks already."""
        metric, *labels = name.split("|")
        if metric != "retry_attempts" or labels[0] in self._blocks:
            return name
        if len(self._blocks) >= MOST_BLOCKS:
            return "|".join((metric, OTHER, *labels[1:]))
        self._blocks.add(labels[0])
        return name

    def sample(self, values: Mapping[str, float]) -> None:
        """Note values of this step. They count as a change when the last noted ones differ."""
        with self._lock:
            now = self._wall()
            before = _last_sampled(self._buckets, int(now // STEP_S))
            self._begin_step(now)
            finest, *longer = self._current
            finest.update(values)
            for bucket in longer:
                bucket.update({name: max(value, bucket.get(name, 0)) for name, value in values.items()})
            self.changes += before != dict(values)

    def record(self) -> ActivityRecord:
        """Everything counted so far, as it is stored."""
        with self._lock:
            coarse = {name: _copied(buckets) for name, buckets in self._coarse.items() if buckets}
            return ActivityRecord(int(self._wall() * 1000), dict(self._totals), _copied(self._buckets), coarse)

    def recent(self) -> tuple[Buckets, dict[str, float]]:
        """The last steps, and what happened per second within the last `RATE_S` seconds."""
        with self._lock:
            now = self._wall()
            last = int(now // STEP_S)
            seconds = [one for second, one in self._seconds.items() if second > now - RATE_S]
            rates = {name: sum(one.get(name, 0) for one in seconds) / RATE_S for name in RATED}
            return {step: dict(one) for step, one in self._buckets.items() if step > last - RECENT_STEPS}, rates


def _copied(buckets: Buckets) -> Buckets:
    return {step: dict(bucket) for step, bucket in buckets.items()}


def _bucket(buckets: Buckets, step: int, kept: int) -> dict[str, float]:
    """The bucket of this step; buckets that are too old are removed."""
    found = buckets.get(step)
    if found is None:
        for old in [one for one in buckets if one <= step - kept]:
            del buckets[old]
        found = buckets[step] = {}
    return found


def _last_sampled(buckets: Buckets, step: int) -> dict[str, float]:
    steps = [one for one in buckets if one <= step and SAMPLED[0] in buckets[one]]
    return {name: value for name, value in buckets[max(steps)].items() if name in SAMPLED} if steps else {}


# ---- counting --------------------------------------------------------------------------------------------------------

_Counts = tuple[Mapping[str, float], Mapping[str, float]]
"""Totals and series that an event adds to."""
_DECIDED: dict[str, _Counts] = {one: ({f"admissions|{one}": 1}, {one: 1}) for one in DECISIONS}


class _Histogram:
    """The totals of a histogram: the bucket that a value falls in, and the sum."""

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._names = [f"{name}|{one:g}" for one in bounds] + [f"{name}|+Inf"]
        self._sum = f"{name}_sum"

    def observed(self, value: float) -> dict[str, float]:
        return {self._names[bisect_left(self._bounds, value)]: 1, self._sum: value}


_WAITS = _Histogram("retry_wait", WAIT_BOUNDS)
_DURATIONS = _Histogram("job_seconds", JOB_BOUNDS)


def _retry(event: RetryAttempt) -> _Counts:
    name = f"retry_attempts|{_label(event.operation)}|{_known(event.decision.failure.code, _CODES)}"
    return {name: 1, **_WAITS.observed(event.delay_seconds)}, {"retries": 1}


def _given_up(event: RetryExhausted | RetryRefused) -> _Counts:
    retried = {"unrecovered": 1.0} if event.total_attempts > 1 else {}
    throttled = {"throttled": 1.0} if event.reason is Reason.THROTTLED else {}
    return {f"retry_given_up|{event.reason.value}": 1}, {"given_up": 1.0} | retried | throttled


def _admission(event: Admission) -> _Counts:
    """The decision of an admission; a refused submission tells how many there were since the last such event."""
    inputs = event.inputs or {}
    if event.status == "accepted":
        message = inputs.get("message")
        return _DECIDED["accepted" if message is None else _decision(str(message))]
    refused = inputs.get("refused")
    number = sum(refused.values()) if isinstance(refused, dict) else 1
    return {"admissions|rejected": number}, {"rejected": number}


def _decision(message: str) -> str:
    if message.startswith("Assignment deferred"):
        return "deferred"
    return "degraded" if message.startswith("Assignment accepted with degradation") else "accepted"


def _ended(event: Completed) -> _Counts:
    status = _known(event.status, STATUSES)
    totals: dict[str, float] = {f"jobs|{status}": 1}
    if event.duration_ms is not None:
        totals |= _DURATIONS.observed(event.duration_ms / 1000)
    if status == "cancelled":
        return totals, {"ended": 1}
    return totals, {"ended": 1, "succeeded" if status == "success" else "failed": 1}


def _breaker(event: BreakerEvent) -> _Counts | None:
    """A change of state. The wait of work for an open breaker is not counted; a source's change carries its wait."""
    if event.wait_seconds is None or event.name.startswith("source:"):
        return {f"breaker_changes|{_known(event.state, _BREAKER_STATES)}": 1}, {}
    return None


_COUNTED_BY: dict[type[Event], Callable[[Any], _Counts | None]] = {
    RetryAttempt: _retry,
    RetryExhausted: _given_up,
    RetryRefused: _given_up,
    RetryRecovered: lambda _: ({"retry_recovered": 1}, {"recovered": 1}),
    Admission: _admission,
    Dropped: lambda _: _DECIDED["dropped"],
    Completed: _ended,
    Quarantined: lambda _: ({"quarantined": 1}, {"quarantined": 1}),
    IdempotencyEvent: lambda event: ({f"idempotency|{_known(event.action, KEY_ACTIONS)}": 1}, {}),
    TakenOver: lambda _: ({"idempotency|taken_over": 1}, {}),
    TimeoutOccurred: lambda _: ({"timeouts": 1}, {}),
    BreakerEvent: _breaker,
}


def _known(text: str, known: Collection[str]) -> str:
    return text if text in known else OTHER


def _label(text: str | None) -> str:
    return printable(text or "unknown", most=LONGEST_LABEL).replace("|", "_")


# ---- sums ------------------------------------------------------------------------------------------------------------


def added(records: Iterable[ActivityRecord]) -> ActivityRecord:
    """The sum of records: counts are added, of sampled values the highest counts. Blocks beyond the bound are one."""
    totals: dict[str, float] = {}
    blocks: set[str] = set()
    at = 0
    given = list(records)
    for record in given:
        at = max(at, record.at)
        for name, number in record.totals.items():
            metric, *labels = name.split("|")
            if metric == "retry_attempts" and labels:
                if labels[0] not in blocks and len(blocks) >= MOST_BLOCKS:
                    name = "|".join((metric, OTHER, *labels[1:]))
                else:
                    blocks.add(labels[0])
            totals[name] = totals.get(name, 0) + number
    coarse = {name: _sum([one.coarse.get(name, {}) for one in given], span.steps) for name, span in COARSE.items()}
    kept = {name: buckets for name, buckets in coarse.items() if buckets}
    return ActivityRecord(at, totals, _sum([one.buckets for one in given], STEPS), kept)


def _sum(given: Iterable[Buckets], steps: int) -> Buckets:
    """The sum of buckets, step by step, of the newest steps."""
    buckets: Buckets = {}
    for one in given:
        for step, bucket in one.items():
            into = buckets.get(step)
            if into is None:
                buckets[step] = dict(bucket)
                continue
            for name, number in bucket.items():
                before = into.get(name, 0)
                into[name] = before + number if name not in _SAMPLED else max(before, number)
    newest = max(buckets, default=0)
    return {step: one for step, one in buckets.items() if step > newest - steps}


def less(record: ActivityRecord, earlier: ActivityRecord) -> ActivityRecord:
    """The record without what was in an earlier one of the same process."""
    totals = {name: number - earlier.totals.get(name, 0) for name, number in record.totals.items()}
    coarse = {name: _rest(buckets, earlier.coarse.get(name, {})) for name, buckets in record.coarse.items()}
    buckets = _rest(record.buckets, earlier.buckets)
    return ActivityRecord(record.at, {name: one for name, one in totals.items() if one}, buckets, coarse)


def _rest(buckets: Buckets, earlier: Buckets) -> Buckets:
    """The buckets without what was counted earlier."""
    found: Buckets = {}
    for step, bucket in buckets.items():
        old = earlier.get(step, {})
        found[step] = {
            name: number if name in SAMPLED else number - old.get(name, 0) for name, number in bucket.items()
        }
    return found


def held(buckets: Buckets, now: float, span: TimeSpan = SPANS["15m"]) -> Buckets:
    """The steps of a system that runs: a sampled value holds until the next one, because a system at rest writes
    none."""
    last, steps = int(now // span.step_s), span.steps
    filled, values = dict(buckets), _last_sampled(buckets, last - steps)
    for step in range(last - steps + 1, last + 1):
        filled[step] = values | buckets.get(step, {})
        values = {name: value for name, value in filled[step].items() if name in _SAMPLED}
    return filled


def series(buckets: Buckets, now: float, *, steps: int = STEPS, step_s: int = STEP_S) -> dict[str, list[Any]]:
    """The last steps up to now, by name, the oldest first: numbers, and None for a value that no system sampled."""
    last = int(now // step_s)
    found = [buckets.get(step, {}) for step in range(last - steps + 1, last + 1)]
    counted = {name: [one.get(name, 0) for one in found] for name in COUNTED}
    return counted | {name: [one.get(name) for one in found] for name in SAMPLED}
