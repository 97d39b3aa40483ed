"""
Statistics from audit events: how much succeeds, how many retries a minute, how often they help, how many attempts it
takes.

Events are added one by one and not kept, so a log of any length needs the same memory: sixty counters for a window, one
row for each category, a bounded list of alerts. Every assignment has a `completed` event, so the rates of steps are
those of all assignments that ended. An operation of the retry library that succeeds at once is not audited: the rate of
its category is that of operations which failed at least once, and says so (`success_of`).
"""

from collections import Counter
from datetime import UTC, datetime
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from reefknot.audit.model.event import (
    AnyEvent,
    Completed,
    IdempotencyEvent,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
    timestamp,
)
from reefknot.core import checks
from reefknot.policy.model.defaults import RetryCategory

WINDOW = 60
"""Seconds. A rate counts the retries in the window that ends with the latest event."""
MOST_CATEGORIES = 200
MOST_ALERTS = 100
OTHERS = "(others)"
"""The row of all categories beyond the first 200."""
UNNAMED = "(none)"
SUCCESS = "success"
_COUNTED = (
    RetryAttempt | RetryExhausted | RetryRefused | RetryRecovered | IdempotencyEvent | TimeoutOccurred | Completed
)
_NOT_LISTED = -1
"""The number of an alert beyond the first hundred."""


ASSIGNMENTS = "assignments"
FAILED_ONCE = "operations that failed at least once"


class Pattern(Struct, frozen=True):
    """The statistics of one category. Attempts and rates are those of `success_of`."""

    success_of: str
    """`assignments`: all that ended; else `operations that failed at least once`."""
    ended: dict[str, int]
    """Assignments that ended, by the status of their results."""
    total_attempts: int
    retries: int
    recovered: int
    exhausted: int
    refused: int
    timeouts: int
    idempotency_hits: int
    idempotency_records: int
    success_rate: float | None
    avg_attempts: float | None
    peak_per_minute: int


class Alert(Struct, frozen=True):
    """A period with a rate above the threshold. `category` is None for all together, `until` while it lasts."""

    category: str | None
    since: str
    until: str | None
    peak_per_minute: int
    threshold: float


class Analysis(Struct, frozen=True):
    """The statistics of a whole log."""

    events: int
    first: str | None
    last: str | None
    by_type: dict[str, int]
    retries_per_minute: int
    """In the minute that ends with the last event."""
    peak_per_minute: int
    overall: Pattern
    categories: dict[str, Pattern]
    alerts: tuple[Alert, ...]
    alerts_left_out: int


class Window:
    """A sliding count of the last minute, in sixty counters."""

    __slots__ = ("_counts", "_latest", "peak", "total")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW
        self._latest = 0
        self.total = 0
        self.peak = 0

    def move(self, second: int) -> None:
        """Advance to this second; counts older than the window are dropped."""
        if second - self._latest >= WINDOW:
            self._counts = [0] * WINDOW
            self.total = 0
        else:
            for passed in range(self._latest + 1, second + 1):
                self.total -= self._counts[passed % WINDOW]
                self._counts[passed % WINDOW] = 0
        self._latest = max(self._latest, second)

    def add(self, second: int) -> None:
        """Count one more at this second, unless it is already older than the window."""
        self.move(second)
        if second > self._latest - WINDOW:
            self._counts[second % WINDOW] += 1
            self.total += 1
            self.peak = max(self.peak, self.total)


class _Tally:
    """The running sums of one category, or of all."""

    __slots__ = ("alert", "attempts", "counts", "ends", "executions", "window")

    def __init__(self) -> None:
        self.window = Window()
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.attempts = 0
        """Of assignments that ended."""
        self.executions = 0
        """Of operations that failed at least once."""
        self.alert: int | None = None

    def add(self, event: AnyEvent) -> None:
        if isinstance(event, Completed):
            self.ends[event.status] += 1
            self.attempts += event.attempts or 0
            return
        name = f"idempotency_{event.action}" if isinstance(event, IdempotencyEvent) else event.event_type
        self.counts[name] += 1
        if isinstance(event, RetryRecovered | RetryExhausted | RetryRefused):
            self.executions += event.total_attempts

    def pattern(self) -> Pattern:
        counts = self.counts
        retries, recovered = counts["retry_attempt"], counts["retry_recovered"]
        exhausted, refused = counts["retry_exhausted"], counts["retry_refused"]
        ended = recovered + exhausted + refused
        total, succeeded, executions, of = ended, recovered, self.executions, FAILED_ONCE
        attempts = retries + ended
        if self.ends:
            total, succeeded, executions, of = self.ends.total(), self.ends[SUCCESS], self.attempts, ASSIGNMENTS
            attempts = executions
        return Pattern(
            success_of=of,
            ended=dict(sorted(self.ends.items())),
            total_attempts=attempts,
            retries=retries,
            recovered=recovered,
            exhausted=exhausted,
            refused=refused,
            timeouts=counts["timeout_occurred"],
            idempotency_hits=counts["idempotency_hit"],
            idempotency_records=counts["idempotency_record"],
            success_rate=succeeded / total if total else None,
            avg_attempts=executions / total if total else None,
            peak_per_minute=self.window.peak,
        )


class Analyser:
    """Sums up events in the order of the log. More than `threshold` retries a minute raise an alert."""

    def __init__(self, *, threshold: float | None = None) -> None:
        if threshold is not None:
            checks.number("threshold", threshold, most=inf, unit=" of retries a minute")
        self._threshold = threshold
        self._all = _Tally()
        self._by_category: dict[str, _Tally] = {}
        self._by_type: Counter[str] = Counter()
        self._events = 0
        self._first: float | None = None
        self._last: float | None = None
        self._alerts: list[Alert] = []
        self._left_out = 0

    def add(self, event: AnyEvent) -> None:
        """Add the next event of the log."""
        at = epoch_seconds(event.timestamp)
        self._events += 1
        self._by_type[event.event_type] += 1
        if at is not None:
            self._first = at if self._first is None else min(self._first, at)
            self._last = at if self._last is None else max(self._last, at)
        if not isinstance(event, _COUNTED):
            return
        name, tally = self._tally(_category_of(event))
        for category, one in ((None, self._all), (name, tally)):
            one.add(event)
            if at is not None:
                self._measure(category, one, int(at), isinstance(event, RetryAttempt))

    def _tally(self, category: str | None) -> tuple[str, _Tally]:
        name = canonical_category(category)
        found = self._by_category.get(name)
        if found is None:
            if len(self._by_category) >= MOST_CATEGORIES:
                name = OTHERS
            found = self._by_category.setdefault(name, _Tally())
        return name, found

    def _measure(self, category: str | None, tally: _Tally, second: int, is_retry: bool) -> None:
        window = tally.window
        if is_retry:
            window.add(second)
        else:
            window.move(second)
        if self._threshold is not None:
            self._watch(category, tally, second, self._threshold)

    def _watch(self, category: str | None, tally: _Tally, second: int, threshold: float) -> None:
        """Begin, raise or end the alert of a category."""
        rate, number = tally.window.total, tally.alert
        if number is not None and number >= 0:
            known = self._alerts[number]
            until = None if rate > threshold else timestamp(second)
            self._alerts[number] = replace(known, until=until, peak_per_minute=max(known.peak_per_minute, rate))
        if rate <= threshold:
            tally.alert = None
        elif number is None and len(self._alerts) < MOST_ALERTS:
            tally.alert = len(self._alerts)
            self._alerts.append(Alert(category, timestamp(second), None, rate, threshold))
        elif number is None:
            tally.alert = _NOT_LISTED
            self._left_out += 1

    def result(self) -> Analysis:
        """The statistics of everything added so far."""
        return Analysis(
            events=self._events,
            first=None if self._first is None else timestamp(self._first),
            last=None if self._last is None else timestamp(self._last),
            by_type=dict(sorted(self._by_type.items())),
            retries_per_minute=self._all.window.total,
            peak_per_minute=self._all.window.peak,
            overall=self._all.pattern(),
            categories={name: self._by_category[name].pattern() for name in sorted(self._by_category)},
            alerts=tuple(self._alerts),
            alerts_left_out=self._left_out,
        )


def _category_of(event: AnyEvent) -> str | None:
    """The category of an operation; `block:TYPE` for a worker's step, which has none."""
    category: str | None = getattr(event, "retry_category", None)
    operation: str | None = getattr(event, "operation", None)
    return f"block:{operation}" if not category and operation else category


def canonical_category(category: str | None) -> str:
    """The canonical name of a category, whichever of its spellings was recorded."""
    if not category:
        return UNNAMED
    try:
        return RetryCategory(category).value
    except ValueError:
        return category


def epoch_seconds(text: str) -> float | None:
    """Seconds since the epoch of an event's timestamp, UTC when it has no zone; None when it is no time."""
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
