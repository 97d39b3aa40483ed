"""`AlertWatch`: systems over one store tell an alert once, together with its event, and resolve it once."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from reefknot.app import alert_watch as watching
from reefknot.app.activity import Activity, store_activity
from reefknot.app.blocks import block_settings
from reefknot.audit import metrics, port
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import Completed, Quarantined, decode
from reefknot.core.alert_rules import RULES, AlertThresholds
from reefknot.core.clock import Clock
from reefknot.errors import ConfigurationError
from reefknot.policy.schema import AlertRule, AlertsSection
from reefknot.policy.secrets import secret_texts
from reefknot.policy.settings import load_settings
from reefknot.queue import client, connect
from reefknot.queue.port.work_queue import WorkSnapshot
from reefknot.runtime.clocks import SystemClock, VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store

pytestmark = pytest.mark.real_time
RULE = AlertThresholds("oldest_age", threshold=10, clear=5, for_seconds=0, what="age", advice="look", unit=" s")


class Ages:
    """The oldest age that all systems measure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.age = 0.0

        async def measured(*_: object) -> dict[str, float | None]:
            return {**dict.fromkeys(RULES), "oldest_age": self.age}

        monkeypatch.setattr(watching, "measured_now", measured)


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> Ages:
    return Ages(monkeypatch)


def interleaved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All systems read the state before the first of them writes it."""
    get = store.values.get

    async def slow(name: str) -> Any:
        found = await get(name)
        await asyncio.sleep(0)
        return found

    monkeypatch.setattr(store.values, "get", slow)


def watch(store: Store, clock: VirtualClock | None = None, **more: Any) -> watching.AlertWatch:
    more.setdefault("rules", {"oldest_age": RULE})
    return watching.AlertWatch(store, clock or SystemClock(), journal=Journal(store.audit), **more)


async def told(store: Store) -> list[tuple[str, str]]:
    events = [decode(one.entry.body) for one in await store.audit.read(port.AuditQuery())]
    return [(event.event_type, event.text) for event in events if event.event_code in ("RK-801", "RK-802")]  # type: ignore[union-attr] # both have it


async def test_of_many_systems_one_tells_once(
    ages: Ages, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    store = MemoryStore(SystemClock())
    await store.values.put("alerts", '{"active": 7}', version=0)  # a damaged state is written again
    interleaved(store, monkeypatch)
    systems = [watch(store) for _ in range(5)]
    for ages.age in (3, 20, 20, 8, 20, 4, 4):
        await asyncio.gather(*(one.look() for one in systems))
    record, _ = await watching.stored_alerts(store)
    assert (list(record.active), [one.alert for one in record.resolved]) == ([], ["oldest_age"])
    texts = [("alert_raised", "age: 20 s (above 10 s)"), ("alert_resolved", "age: 4 s again")]
    assert await told(store) == texts
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "alert oldest_age: age: 20 s (above 10 s); reefknot alert list says what to do"),
        ("INFO", "alert oldest_age is resolved: age: 4 s again"),
    ]


async def test_without_the_version_each_system_would_tell(ages: Ages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a store that takes every write has the event once for each system."""
    store = MemoryStore(SystemClock())
    get, put = store.values.get, store.values.put
    interleaved(store, monkeypatch)

    async def careless(name: str, body: str, *, version: int, **more: Any) -> Any:
        found = await get(name)
        return await put(name, body, version=0 if found is None else found.version, **more)

    monkeypatch.setattr(store.values, "put", careless)
    systems = [watch(store) for _ in range(3)]
    ages.age = 20
    await asyncio.gather(*(one.look() for one in systems))
    assert len(await told(store)) == 3


async def test_a_system_that_starts_finds_the_state_as_it_is_and_resolves_what_was_switched_off(ages: Ages) -> None:
    store = MemoryStore(SystemClock())
    for ages.age in (20, 20, 4, 20):
        await watch(store).look()
    kinds = ["alert_raised", "alert_resolved", "alert_raised"]
    assert [kind for kind, _ in await told(store)] == kinds
    await watch(store, rules={}).run()
    assert (await told(store))[3:] == [("alert_resolved", "its rule was switched off")]


async def test_the_time_of_a_look_is_written_twice_a_minute_at_most_and_at_the_end(ages: Ages) -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    one, versions, oldest_ms = watch(store, clock), set(), 0
    await one.close()
    assert await store.values.get("alerts") is None, "it never looked"
    for _ in range(61):
        await one.look()
        record, version = await watching.stored_alerts(store)
        versions.add(version)
        oldest_ms = max(oldest_ms, one.looked_at - record.looked_at)
        clock.advance(10)
    assert (len(versions), oldest_ms) == (21, 20_000)
    clock.advance(10)
    await one.look()
    assert (await watching.stored_alerts(store))[0].looked_at < one.looked_at
    await one.close()
    assert (await watching.stored_alerts(store))[0].looked_at == one.looked_at


async def test_each_change_is_one_job_for_the_webhook_of_systems(ages: Ages, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system dies after submitting, before it is noted; another one submits the same job."""
    clock = SystemClock()
    store = MemoryStore(clock)
    webhook = watching.AlertWebhook("https://example.org/hook", connect.client_of(store, clock))
    ages.age = 20
    put = store.values.put

    async def dies(name: str, body: str, **more: Any) -> Any:
        if not more.get("events"):
            raise OSError("killed")
        return await put(name, body, **more)

    with monkeypatch.context() as patched:
        patched.setattr(store.values, "put", dies)
        with pytest.raises(OSError, match="killed"):
            await watch(store, webhook=webhook).look()
    system = watch(store, webhook=webhook)
    for ages.age in (20, 20, 3, 3):
        await system.look()
    items = [await store.work.get(one.id) for one in reversed((await store.work.search(limit=10)).items)]
    first, second = (json.loads(one.payload)["job"] for one in items if one is not None)
    assert first["type"] == second["type"] == "http.request"
    assert first["payload"]["url"] == "https://example.org/hook"
    assert (first["payload"]["body"]["state"], second["payload"]["body"]["state"]) == ("raised", "resolved")
    assert set(first["payload"]["body"]) == {"alert", "state", "value", "threshold", "since", "text"}
    assert first["payload"]["body"]["since"] == second["payload"]["body"]["since"]


async def test_a_webhook_keeps_to_the_configured_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reefknot.yaml").write_text("router: {max_queue_size: 7}\nalerts: {webhook: 'https://example.org/'}\n")
    bounds: list[int] = []

    def noted(store: Store, clock: Clock, size: int = 1000) -> client.Client:
        bounds.append(size)
        return connect.client_of(store, clock, size)

    monkeypatch.setattr(watching, "client_of", noted)
    store = MemoryStore(SystemClock())
    for watched in (load_settings(None, environ={}, cwd=tmp_path), None):
        async with watching.running_activity(store, SystemClock(), Journal(store.audit), watched=watched):
            pass
    assert bounds == [7]


def test_a_webhook_may_be_named_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://example.org/hook/xyzzy")
    (tmp_path / "hook").write_text("https://example.org/hook/xyzzy\n")
    for written in ("https://example.org/hook/xyzzy", "env:HOOK", "file:hook"):
        (tmp_path / "reefknot.yaml").write_text(f"alerts: {{webhook: '{written}'}}\n")
        settings = load_settings(None, environ={}, cwd=tmp_path)
        reference = "config:alerts.webhook" if written.startswith("https:") else written
        assert watching.webhook_of(settings) == reference, "the address is in no payload"
        read = block_settings(settings).http.references
        assert {name: one() for name, one in read.items()} == {reference: "https://example.org/hook/xyzzy"}
        texts, problems = secret_texts(settings.tree, settings.path, environ=os.environ)
        assert (texts, problems) == (("https://example.org/hook/xyzzy",), ())


@pytest.mark.parametrize(("value", "problem"), [(None, "no such environment variable"), ("xyzzy", "a URL that begins")])
def test_a_reference_to_no_webhook_is_a_mistake_that_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, problem: str
) -> None:
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    (tmp_path / "reefknot.yaml").write_text("alerts: {webhook: env:HOOK}\n")
    with pytest.raises(ConfigurationError, match=problem) as caught:
        watching.webhook_of(load_settings(None, environ={}, cwd=tmp_path))
    assert "xyzzy" not in str(caught.value)


async def test_a_look_that_fails_is_logged_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = watch(MemoryStore(SystemClock()))
    ends: list[BaseException] = [OSError("away"), asyncio.CancelledError()]

    async def look() -> None:
        raise ends.pop(0)

    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(one, "look", look)
    with pytest.raises(asyncio.CancelledError):
        await one.run()
    assert "the alerts could not be checked" in caplog.text


WORKER = {"worker_id": "w", "classes": {"io": {"status": "critical"}, "cpu": {"status": "healthy"}}}


def test_a_success_rate_needs_ends_to_say_anything() -> None:
    rates = {(0, 0): 1.0, (19, 0): 1.0, (10, 9): None, (10, 10): 0.5, (0, 20): 0.0}
    for (succeeded, failed), rate in rates.items():
        activity = metrics.ActivityRecord(buckets={100: {"succeeded": succeeded, "failed": failed}})
        assert watching.measured(activity, WorkSnapshot({}), [], 1010.0)["success_rate"] == rate, (succeeded, failed)


def test_each_value_has_its_window() -> None:
    """Steps are ten seconds: a minute of retries, fifteen of quarantine, five of ends."""
    counted = {"retries": 1.0, "quarantined": 1.0, "failed": 1.0, "audit_lost": 1.0}
    buckets = dict.fromkeys(range(1, 201), counted)
    busy = {"workers": [WORKER], "activity": {"audit_buffered": 4}}
    systems: list[dict[str, Any]] = [busy, {"workers": [], "activity": None}]
    values = watching.measured(
        metrics.ActivityRecord(buckets=buckets), WorkSnapshot({}, {"io": 12_500, "router": 500}), systems, 2005.0
    )
    expected = {"quarantine_growth": 90, "retry_rate": 6, "success_rate": 0.0, "oldest_age": 12.5}
    assert values == expected | {"critical_workers": 1, "audit_outage": 94, "no_router": 0, "no_worker": 0}


async def test_values_come_from_what_systems_counted() -> None:
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()) as one:
        ends = [Completed(**envelope(wall=1.0, work_id=str(n)), status="error") for n in range(20)]
        await Journal(store.audit).write(Quarantined(**envelope(wall=1.0), reason="spent"), *ends)
        await one.write()
        values = await watching.measured_now(store, [])
        assert (await store_activity(store)).totals["jobs|error"] == 20
    assert (values["quarantine_growth"], values["success_rate"]) == (1, 0.0)


def test_configured_rules_replace_limits_and_switch_off() -> None:
    section = AlertsSection(rules={"retry_rate": AlertRule(threshold=100), "oldest_age": AlertRule(enabled=False)})
    rules = watching.rules_of(section)
    assert set(rules) == set(RULES) - {"oldest_age"}
    assert (rules["retry_rate"].threshold, rules["retry_rate"].clear) == (100, 50)
    assert watching.rules_of(AlertsSection(enabled=False)) == {}
