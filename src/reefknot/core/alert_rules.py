"""
Alert rules, and the judgement of a measured value: pure, with hysteresis.

An alert is raised when its value has been beyond the threshold for a while, and resolved as soon as the value is back
within `clear`. Between the two nothing changes, so a value that flutters around the threshold is reported once. A value
that cannot be measured changes nothing either.
"""

from msgspec import Struct, structs

QUARANTINE_GROWTH = "quarantine_growth"
RETRY_RATE = "retry_rate"
SUCCESS_RATE = "success_rate"
OLDEST_AGE = "oldest_age"
CRITICAL_WORKERS = "critical_workers"
AUDIT_OUTAGE = "audit_outage"
NO_ROUTER = "no_router"
NO_WORKER = "no_worker"

WEBHOOKS = "a URL that begins with https:// or http://"
"""The addresses that can be notified of alerts."""
LEAST_ENDS = 20
"""Least number of finished jobs for which a success rate is meaningful."""


class AlertThresholds(Struct, frozen=True):
    """The rule of one alert. `unit` follows its value in messages; with `below`, lower values are the worse ones."""

    name: str
    threshold: float
    clear: float
    for_seconds: float
    what: str
    """The value in words."""
    advice: str
    """What the recipient of the alert should do next."""
    unit: str = ""
    below: bool = False
    most: float | None = None
    """The greatest possible value; None if there is no bound."""

    def is_beyond(self, value: float) -> bool:
        """Whether the value is worse than the threshold."""
        return value < self.threshold if self.below else value > self.threshold

    def is_clear(self, value: float) -> bool:
        """Whether the value is as good as `clear`, or better."""
        return value >= self.clear if self.below else value <= self.clear

    def text(self, value: float) -> str:
        """The value and the threshold, in words."""
        side = "below" if self.below else "above"
        return f"{self.what}: {_shown(value)}{self.unit} ({side} {_shown(self.threshold)}{self.unit})"


RULES: dict[str, AlertThresholds] = {
    rule.name: rule
    for rule in (
        AlertThresholds(
            QUARANTINE_GROWTH,
            threshold=10,
            clear=2,
            for_seconds=0,
            what="jobs that went to quarantine within 15 minutes",
            advice="reefknot quarantine list --group shows the failures; requeue them once their cause is gone",
        ),
        AlertThresholds(
            RETRY_RATE,
            threshold=60,
            clear=30,
            for_seconds=60,
            what="retries per minute",
            advice="reefknot audit analyse --since 15m shows which operations are retried, and after which errors",
        ),
        AlertThresholds(
            SUCCESS_RATE,
            threshold=0.9,
            clear=0.95,
            for_seconds=60,
            what="share of jobs that succeeded within 5 minutes",
            advice="reefknot quarantine list --group and reefknot job list --state failed show the last failures",
            below=True,
            most=1,
        ),
        AlertThresholds(
            OLDEST_AGE,
            threshold=300,
            clear=60,
            for_seconds=30,
            what="age of the oldest job that is due",
            advice="reefknot worker list shows whether workers run and keep up; start more if they do not",
            unit=" s",
        ),
        AlertThresholds(
            CRITICAL_WORKERS,
            threshold=0,
            clear=0,
            for_seconds=30,
            what="workers with a full queue",
            advice="reefknot worker list shows the queues; add workers, or submit less",
        ),
        AlertThresholds(
            AUDIT_OUTAGE,
            threshold=0,
            clear=0,
            for_seconds=30,
            what="events that the audit log did not take",
            advice="reefknot doctor looks at the store; events that were lost are counted in its log",
        ),
        AlertThresholds(
            NO_ROUTER,
            threshold=0,
            clear=0,
            for_seconds=4,
            what="due jobs that wait while no router runs",
            advice="start one with reefknot up, or reefknot router start; reefknot doctor shows what runs",
        ),
        AlertThresholds(
            NO_WORKER,
            threshold=0,
            clear=0,
            for_seconds=4,
            what="due jobs that wait for a class that no running worker has",
            advice="start one with reefknot worker start; reefknot doctor names the class",
        ),
    )
}
"""The built-in rules, by name."""


class AlertLimits(Struct, frozen=True):
    """The changes of a configuration to one rule; None leaves a limit as it is."""

    enabled: bool = True
    threshold: float | None = None
    clear: float | None = None
    for_seconds: float | None = None


def with_limits(rule: AlertThresholds, limits: AlertLimits) -> AlertThresholds:
    """
    The rule with other limits.

    Without a `clear`, that of a changed threshold keeps its share of it; it is never beyond the threshold, nor beyond
    the greatest value that there can be.
    """
    threshold = rule.threshold if limits.threshold is None else limits.threshold
    clear = limits.clear
    if clear is None and limits.threshold is None:
        clear = rule.clear
    elif clear is None:
        clear = threshold * rule.clear / rule.threshold if rule.threshold else threshold
        clear = max(clear, threshold) if rule.below else min(clear, threshold)
        clear = clear if rule.most is None else min(clear, rule.most)
    seconds = rule.for_seconds if limits.for_seconds is None else limits.for_seconds
    return structs.replace(rule, threshold=threshold, clear=clear, for_seconds=seconds)


def clear_is_beyond(rule: AlertThresholds) -> bool:
    """Whether the alert of a rule would be resolved by values that raise it."""
    return rule.clear < rule.threshold if rule.below else rule.clear > rule.threshold


def resolved_text(rule: AlertThresholds) -> str:
    """The values that resolve the alert of a rule, in words."""
    at = f"at {_shown(rule.clear)}{rule.unit}"
    if rule.clear == (rule.most if rule.below else 0):
        return at
    return f"{at} or {'above' if rule.below else 'below'}"


class AlertState(Struct, frozen=True):
    """The state of one alert. `since` is when it was raised, or resolved (seconds since the epoch)."""

    active: bool = False
    since: float | None = None
    beyond_since: float | None = None
    """Since when the value has been beyond the threshold; None while it is not, and once the alert is active."""


def next_state(rule: AlertThresholds, state: AlertState, value: float | None, now: float) -> AlertState:
    """The state after one check; the same object when nothing changed."""
    if value is None:
        return state
    if state.active:
        return AlertState(active=False, since=now) if rule.is_clear(value) else state
    if not rule.is_beyond(value):
        return state if state.beyond_since is None else structs.replace(state, beyond_since=None)
    began = now if state.beyond_since is None else min(state.beyond_since, now)
    if now - began >= rule.for_seconds:
        return AlertState(active=True, since=now)
    return state if began == state.beyond_since else structs.replace(state, beyond_since=began)


def _shown(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
