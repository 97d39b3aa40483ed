"""
`AlertWatch`: checks a store every five seconds and reports once when a value is beyond its limits.

All systems on a store measure the same values (`measured`) and share one state, the value `alerts`. It is changed by
compare-and-set together with the event, so one of many systems reports a change, once; a system that starts finds the
current state. A webhook is an assignment like any other, submitted under an id made of the alert and its time: it is
retried, survives a crash, and is one job whichever system submits it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, structs

from reefknot.app.activity import CLOSE_S, Activity, reported, store_activity
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.metrics import ActivityRecord, series
from reefknot.audit.model.event import AlertRaised, AlertResolved, timestamp
from reefknot.core import alert_rules as core
from reefknot.core.alert_rules import AlertLimits, AlertState, AlertThresholds, next_state, with_limits
from reefknot.core.clock import Clock
from reefknot.errors import ConfigurationError, KeyConflictError
from reefknot.policy.schema import AlertsSection
from reefknot.policy.secrets import WEBHOOK, SecretText, resolve_at, webhook_reference
from reefknot.policy.sections import plain
from reefknot.policy.settings import Settings
from reefknot.queue.client import Client
from reefknot.queue.connect import client_of
from reefknot.queue.model.wait_reasons import Unserved, WaitCode
from reefknot.queue.port.work_queue import WorkSnapshot
from reefknot.queue.presence import Status, living_systems, look_for_gone, unserved_work, visible_work
from reefknot.runtime.log import RepeatedErrors, error_text, logger
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store, StoredValue

NAME = "alerts"
LOOK_EVERY_S = 5.0
NOTED_EVERY_S = 30.0
"""How often the time of a look that changed nothing is written, for questions after a crash."""
MOST_RESOLVED = 20
MINUTE_STEPS = 6
FIVE_MINUTES_STEPS = 30
WEBHOOK_DEADLINE_MS = 3_600_000


class RecordedAlert(Struct, frozen=True, omit_defaults=True):
    """An alert that was raised, perhaps resolved. Times are milliseconds UTC; `value` is that of the last change."""

    alert: str
    value: float
    threshold: float
    since: int
    text: str
    resolved_at: int | None = None
    webhook_due: bool = False

    @property
    def state(self) -> str:
        return "raised" if self.resolved_at is None else "resolved"


class AlertsRecord(Struct, frozen=True, omit_defaults=True):
    """The alerts of a store: those that are active, by name, and the last ones that were resolved, newest first."""

    looked_at: int = 0
    active: dict[str, RecordedAlert] = {}
    resolved: tuple[RecordedAlert, ...] = ()


_records = msgspec.json.Decoder(AlertsRecord)


def rules_of(section: AlertsSection) -> dict[str, AlertThresholds]:
    """The rules in force: the built-in ones with the configured limits, without those that are switched off."""
    limits = {name: AlertLimits(**plain(rule)) for name, rule in section.rules.items()}
    none = AlertLimits()
    return {
        name: with_limits(rule, limits.get(name, none))  # type: ignore[call-overload] # the names are those of a Literal
        for name, rule in core.RULES.items()
        if section.enabled and limits.get(name, none).enabled  # type: ignore[call-overload] # as above
    }


async def stored_alerts(store: Store) -> tuple[AlertsRecord, int]:
    """The alerts of a store, and the version of their value."""
    found = await store.values.get(NAME)
    return (AlertsRecord(), 0) if found is None else (_decoded(found), found.version)


def _decoded(value: StoredValue) -> AlertsRecord:
    """The alerts of a value. One that cannot be read counts as empty, and is replaced."""
    try:
        return _records.decode(value.body)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return AlertsRecord()


def looked_at(record: AlertsRecord, systems: Sequence[Status]) -> int | None:
    """The time of the last look of any system (ms UTC); None when none ever looked."""
    looks = [reported(one, "looked_at", 0) or 0 for one in systems]
    return max([record.looked_at, *looks]) or None


# ---- values ----------------------------------------------------------------------------------------------------------


async def measured_now(store: Store, systems: Sequence[Status]) -> dict[str, float | None]:
    """The value of every rule at this moment."""
    async with asyncio.timeout(STORE_S):
        activity, snapshot = await store_activity(store, systems), await visible_work(store)
        lacking = await unserved_work(store, systems, snapshot)
    return measured(activity, snapshot, systems, store.moment().wall / 1000, lacking)


def measured(
    activity: ActivityRecord,
    snapshot: WorkSnapshot,
    systems: Sequence[Status],
    now: float,
    lacking: Sequence[Unserved] = (),
) -> dict[str, float | None]:
    """The value of every rule; None where it cannot be judged yet."""
    columns = series(activity.buckets, now)
    ended = {name: sum(columns[name][-FIVE_MINUTES_STEPS:]) for name in ("succeeded", "failed")}
    waiting = sum(reported(one, "audit_buffered", 0) for one in systems)
    return {
        core.QUARANTINE_GROWTH: sum(columns["quarantined"]),
        core.RETRY_RATE: sum(columns["retries"][-MINUTE_STEPS:]),
        core.SUCCESS_RATE: _success_rate(**ended),
        core.OLDEST_AGE: snapshot.oldest_due_ms / 1000,
        core.CRITICAL_WORKERS: sum(_is_critical(worker) for one in systems for worker in one["workers"]),
        core.AUDIT_OUTAGE: waiting + sum(columns["audit_lost"]),
        **unserved_jobs(lacking),
    }


def unserved_jobs(lacking: Sequence[Unserved]) -> dict[str, float]:
    """The number of due jobs that wait for a router, and for a worker of their class."""
    no_router = [one.jobs for one in lacking if one.code in (WaitCode.NO_SYSTEM, WaitCode.NO_ROUTER)]
    return {
        core.NO_ROUTER: sum(no_router),
        core.NO_WORKER: sum(one.jobs for one in lacking if one.code is not WaitCode.NO_ROUTER),
    }


def _success_rate(succeeded: float, failed: float) -> float | None:
    """The share of jobs that succeeded: 1 without a failure, and None below the least number of finished jobs."""
    if not failed:
        return 1.0
    return succeeded / (succeeded + failed) if succeeded + failed >= core.LEAST_ENDS else None


def _is_critical(worker: Mapping[str, Any]) -> bool:
    return any(one["status"] == "critical" for one in worker["classes"].values())


# ---- watching --------------------------------------------------------------------------------------------------------


class AlertWebhook(Struct, frozen=True):
    """The reference to a URL that gets every alert, by a step that resolves the reference when it runs."""

    url: str
    client: Client

    async def submit(self, alert: RecordedAlert) -> None:
        """Submit the step. Its id is made of the alert, its time and its state, so it is one job."""
        name = f"alert-{alert.alert}-{alert.since}-{alert.state}"
        since = timestamp(alert.since / 1000)
        body = {"alert": alert.alert, "state": alert.state, "value": alert.value, "threshold": alert.threshold}
        payload = {"url": self.url, "method": "POST", "body": {**body, "since": since, "text": alert.text}}
        assignment = {
            "assignment_id": name,
            "request_id": name,
            "job": {"type": "http.request", "payload": payload},
            "options": {"deadline_ms": WEBHOOK_DEADLINE_MS},
        }
        try:
            await self.client.hand_in(assignment)
        except KeyConflictError as error:  # a system with another webhook has sent it already
            logger().warning(
                "alert %s was already sent by another system (%s); it is not sent again", alert.alert, error_text(error)
            )


class AlertWatch:
    """Looks at the values of a store, for one running system."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        rules: Mapping[str, AlertThresholds],
        journal: Journal,
        webhook: AlertWebhook | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`leads` says whether it is this process that looks, for all systems of the store."""
        self._store = store
        self._leads = leads
        self._clock = clock
        self._rules = rules
        self._journal = journal
        self._webhook = webhook
        self._errors = RepeatedErrors()
        self._beyond: dict[str, float | None] = {}
        self._is_first = True
        self.owes_webhook = webhook is not None
        self.stands_in = False
        """Whether it looks only while no running system does."""
        self.looked_at = 0
        """The time of the last look (ms UTC)."""

    async def run(self) -> None:
        """Check until cancelled, or once without rules. A failed check is logged; the next one comes on schedule."""
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    await self.look()
            except Exception as error:
                self._errors.log(
                    "the alerts could not be checked; the next check comes on schedule", error, self._clock.now()
                )
            if not self._rules and not self._is_first:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def close(self) -> None:
        """Note the time of the last look, for questions while no system is running."""
        if self._store.failure is not None or not self.looked_at:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                record, version = await stored_alerts(self._store)
                if record.looked_at < self.looked_at:
                    noted = structs.replace(record, looked_at=self.looked_at)
                    await self._store.values.put(NAME, _encoded(noted), version=version)
        except Exception as error:
            self._errors.log("the time of the last check of alerts could not be stored", error, self._clock.now())

    async def look(self) -> None:
        """Measure, judge, and record and log what changed, unless another system was faster."""
        if not self._leads():
            return
        systems = await living_systems(self._store)
        if self.stands_in and any(reported(one, "looked_at", 0) for one in systems):
            return
        values = await measured_now(self._store, systems)
        now = self._clock.wall()
        self.looked_at = int(now * 1000)
        record, version = await stored_alerts(self._store)
        changes, beyond = self._changes(record, values, now)
        if changes or self.looked_at - record.looked_at >= NOTED_EVERY_S * 1000:
            changed = _with(structs.replace(record, looked_at=self.looked_at), changes)
            entries = self._journal.entries([self._event(one) for one in changes])
            kept = await self._store.values.put(NAME, _encoded(changed), version=version, events=entries)
            if kept is None:
                return  # another system sent something: the next look measures again
            record, version = changed, kept.version
            for one in changes:
                self._log(one)
        self._beyond, self._is_first = beyond, False
        if self._webhook is not None:
            await self._submit_due(record, version, self._webhook)

    def _changes(
        self, record: AlertsRecord, values: Mapping[str, float | None], now: float
    ) -> tuple[list[RecordedAlert], dict[str, float | None]]:
        """The alerts that this look raises and resolves; and since when each value has been beyond its threshold."""
        changed, beyond = [], {}
        for name, rule in self._rules.items():
            known, value = record.active.get(name), values[name]
            state = AlertState(active=known is not None, beyond_since=self._beyond.get(name))
            after = next_state(rule, state, value, now)
            beyond[name] = after.beyond_since
            if after.active == state.active or value is None:
                continue
            shown = round(value, 4)
            due = self.owes_webhook
            if known is None:
                changed.append(RecordedAlert(name, shown, rule.threshold, int(now * 1000), rule.text(value), None, due))
            else:
                over = {"text": f"{rule.what}: {shown:g}{rule.unit} again", "resolved_at": int(now * 1000)}
                changed.append(structs.replace(known, value=shown, webhook_due=due, **over))
        if self._is_first:  # a rule that was switched off since: nothing else would ever resolve its alert
            off = [one for name, one in record.active.items() if name not in self._rules]
            text = "its rule was switched off"
            changed += [structs.replace(one, text=text, resolved_at=int(now * 1000), webhook_due=False) for one in off]
        return changed, beyond

    def _event(self, alert: RecordedAlert) -> AlertRaised | AlertResolved:
        kind = AlertRaised if alert.resolved_at is None else AlertResolved
        at = alert.since if alert.resolved_at is None else alert.resolved_at
        return kind(
            **envelope(wall=at / 1000),
            alert=alert.alert,
            value=alert.value,
            threshold=alert.threshold,
            since=timestamp(alert.since / 1000),
            text=alert.text,
        )

    def _log(self, alert: RecordedAlert) -> None:
        extra = {"alert": alert.alert, "value": alert.value, "threshold": alert.threshold, "state": alert.state}
        if alert.resolved_at is None:
            logger().warning("alert %s: %s; reefknot alert list says what to do", alert.alert, alert.text, extra=extra)
        else:
            logger().info("alert %s is resolved: %s", alert.alert, alert.text, extra=extra)

    async def _submit_due(self, record: AlertsRecord, version: int, webhook: AlertWebhook) -> None:
        """
        Submit the webhooks that are due. One stays due until its submission is noted; a second submission is the same
        job.
        """
        due = [one for one in (*record.active.values(), *record.resolved) if one.webhook_due]
        for one in due:
            await webhook.submit(one)
        if not due:
            return
        done = structs.replace(
            record,
            active={name: structs.replace(one, webhook_due=False) for name, one in record.active.items()},
            resolved=tuple(structs.replace(one, webhook_due=False) for one in record.resolved),
        )
        await self._store.values.put(NAME, _encoded(done), version=version)


def webhook_of(settings: Settings) -> str | None:
    """The reference to the configured webhook, if there is one; `ConfigurationError` when it leads to no URL."""
    found = resolve_at(settings.tree, WEBHOOK, environ=os.environ, folder=settings.folder)
    if found is None:
        return None
    if isinstance(found, SecretText) and found.reveal().lower().startswith(("http://", "https://")):
        return webhook_reference(settings.tree)
    problem = found if not isinstance(found, SecretText) else settings.tree.problem(WEBHOOK, f"is not {core.WEBHOOKS}")
    raise ConfigurationError([problem])


@asynccontextmanager
async def running_activity(
    store: Store, clock: Clock, journal: Journal, *, watched: Settings | None
) -> AsyncIterator[Activity]:
    """Count the events of this process for as long as the block lasts, and watch the rules of the `watched` settings;
    without them, no rules."""
    activity = Activity(store, clock)
    activity.leads = False  # until the system says that it does
    async with activity:
        if watched is None:
            yield activity
            return
        url = webhook_of(watched)
        webhook = None if url is None else AlertWebhook(url, client_of(store, clock, watched.queue_size))
        alerts = watched_alerts(store, clock, journal, watched, webhook=webhook, leads=lambda: activity.leads)
        async with alerts as watch:
            activity.looked_at = lambda: watch.looked_at
            yield activity


@asynccontextmanager
async def watched_alerts(
    store: Store,
    clock: Clock,
    journal: Journal,
    settings: Settings | None,
    *,
    webhook: AlertWebhook | None = None,
    stands_in: bool = False,
    leads: Callable[[], bool] = lambda: True,
) -> AsyncIterator[AlertWatch]:
    """
    Watch the rules of these settings, or the built-in ones, and the systems that are gone, for as long as the block
    lasts.

    A watch that `stands_in` looks at the rules only while no running system does. It submits no steps: what is due for
    the webhook is left to the next system. `leads` is as in `AlertWatch`.
    """
    section = AlertsSection() if settings is None else settings.configuration.alerts
    watch = AlertWatch(store, clock, rules=rules_of(section), journal=journal, webhook=webhook, leads=leads)
    watch.owes_webhook = webhook is not None or (stands_in and section.webhook is not None)
    watch.stands_in = stands_in
    services = Services("system")
    services.keep("alerts", watch.run)
    services.keep("look for systems that are gone", partial(look_for_gone, store, journal, leads))
    try:
        yield watch
    finally:
        await services.stop()
        await watch.close()


def _with(record: AlertsRecord, changed: Sequence[RecordedAlert]) -> AlertsRecord:
    """The record after these changes."""
    active = {name: one for name, one in record.active.items() if name not in {new.alert for new in changed}}
    active |= {one.alert: one for one in changed if one.resolved_at is None}
    over = [one for one in changed if one.resolved_at is not None]
    return structs.replace(record, active=active, resolved=(*over, *record.resolved)[:MOST_RESOLVED])


def _encoded(record: AlertsRecord) -> str:
    return msgspec.json.encode(record).decode()
