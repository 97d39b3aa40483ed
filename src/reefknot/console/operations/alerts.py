"""`list_alerts`: the alerts of a store that are active, those resolved lately, and the rules in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reefknot.app.activity import reported
from reefknot.app.alert_watch import AlertsRecord, RecordedAlert, looked_at, measured_now, rules_of, stored_alerts
from reefknot.console.operations.values import time_text
from reefknot.core.alert_rules import RULES, resolved_text
from reefknot.policy.schema import AlertsSection
from reefknot.queue.presence import living_systems

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.queue.presence import Status


async def list_alerts(operator: Operator) -> dict[str, Any]:
    """
    The alerts that are active, the oldest first, and the last ones that were resolved, the newest first.

    `rules` has every rule with its limits and its value at this moment. `looked_at` is when a system last looked, null
    when none ever did; `watched` is false when none is running that does.
    """
    store = operator.store
    systems = await living_systems(store)
    record, _ = await stored_alerts(store)
    values = await measured_now(store, systems)
    section = AlertsSection() if operator.settings is None else operator.settings.configuration.alerts
    rules = rules_of(section)
    now, looked = store.moment().wall, looked_at(record, systems)
    shown = {
        **active_alerts(record, systems, values),
        "resolved": [_fields(one) for one in record.resolved],
        "looked_at": time_text(looked),
        "looked_s": None if looked is None else max(0.0, (now - looked) / 1000),
        "rules": [
            {
                "alert": name,
                "enabled": name in rules,
                "value": _rounded(values[name]),
                **{one: getattr(rules.get(name, rule), one) for one in ("threshold", "clear", "for_seconds")},
                "raised_when": "below" if rule.below else "above",
                "resolved_when": resolved_text(rules.get(name, rule)),
                "what": rule.what,
            }
            for name, rule in RULES.items()
        ],
    }
    hidden: Any = operator.redactor.tree(shown)
    return dict(hidden)


def active_alerts(record: AlertsRecord, systems: list[Status], values: Mapping[str, float | None]) -> dict[str, Any]:
    """The active alerts, each with its current value and its value when it was raised, and whether a running system
    watches them."""
    active = sorted(record.active.values(), key=lambda one: (one.since, one.alert))
    watched = any(reported(one, "looked_at", 0) for one in systems)
    return {"alerts": [_fields(one) | {"now": _rounded(values.get(one.alert))} for one in active], "watched": watched}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _fields(alert: RecordedAlert) -> dict[str, Any]:
    rule = RULES.get(alert.alert)
    return {
        "alert": alert.alert,
        "state": alert.state,
        "value": alert.value,
        "threshold": alert.threshold,
        "since": time_text(alert.since),
        "resolved_at": time_text(alert.resolved_at),
        "text": alert.text,
        "advice": "" if rule is None else rule.advice,
    }
