"""`/metrics`: Prometheus reads it, its counters are the store's, its labels bounded, and what is shipped names it."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from reefknot.app.activity import ENDED, PREFIX, Activity
from reefknot.app.alert_watch import NAME as ALERTS
from reefknot.app.alert_watch import AlertsRecord, RecordedAlert
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import Admission, IdempotencyEvent, Quarantined, decode
from reefknot.console.operations import metrics, operator
from reefknot.core.redaction import Redactor
from reefknot.errors import OperationError, ParameterError, QueueFullError
from reefknot.queue.connect import client_of
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store, StoredValue
from tests.unit.audit.test_metrics import retry
from tests.unit.console.operations.statuses import running

pytestmark = pytest.mark.real_time
DEPLOY = Path(__file__).parents[4] / "deploy"
_NAME = re.compile(r"\breefknot_\w+")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


async def scraped(store: Store, *secrets: str) -> dict[str, Metric]:
    text = (await metrics.metrics_text(operator.Operator(store, Redactor(secrets)))).decode()
    return {one.name: one for one in text_string_to_metric_families(text)}


def values(metric: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(one.labels.values()): one.value for one in metric.samples}


async def worked(store: Store, *blocks: str) -> None:
    """A system that retried steps of these blocks, found a key twice, and has ended."""
    async with Activity(store, SystemClock()):
        found = [IdempotencyEvent(**envelope(wall=1.0), idempotency_key="k", action=one) for one in ("hit", "conflict")]
        gone = Quarantined(**envelope(wall=1.0), reason="spent")
        await Journal(store.audit).write(*(retry(block, 0.3) for block in blocks), *found, gone)


@pytest.mark.parametrize("is_system", [True, False])
async def test_a_refusal_is_an_event_and_counted_by_a_running_system(store: MemoryStore, is_system: bool) -> None:
    """As docs/reference/metrics.md has it."""
    async with Activity(store, SystemClock()) if is_system else nullcontext():
        client = client_of(store, store.clock, size=1)
        await client.submit("own.step")
        with pytest.raises(QueueFullError):
            await client.submit("own.step")
        with pytest.raises(ParameterError):
            await client.submit("own.step", retries=-1)
        assert [sum((one.inputs or {})["refused"].values()) for one in await admissions(store)] == [1]
    assert values((await scraped(store))["reefknot_admissions"])["rejected",] == is_system


async def admissions(store: Store) -> list[Admission]:
    """The events of admissions, as soon as there are any: who writes them does not wait for it."""
    while True:
        events = [decode(one.entry.body) for one in await store.audit.read()]
        found = [one for one in events if isinstance(one, Admission)]
        if found:
            return found
        await store.audit.wait(len(events), 30.0)


async def test_prometheus_reads_the_documented_metrics_by_name_and_label(store: MemoryStore) -> None:
    await worked(store, "http.request", "http.request", "sql.query")
    await running(store, depth=60, status="overloaded")
    found = await scraped(store)
    attempts = found["reefknot_retry_attempts"]
    assert values(attempts) == {("http.request", "NETWORK_ERROR"): 2, ("sql.query", "NETWORK_ERROR"): 1}
    assert attempts.samples[0].labels.keys() == {"block", "code"}
    assert attempts.samples[0].name == "reefknot_retry_attempts_total"
    for name in ("recovered", "budget_exhausted"):
        assert values(found[f"reefknot_retry_{name}"]) == {(): 0}
    waits = {one.labels.get("le", one.name): one.value for one in found["reefknot_retry_wait_seconds"].samples}
    assert (waits["0.25"], waits["0.5"], waits["+Inf"], waits["reefknot_retry_wait_seconds_count"]) == (0, 3, 3, 3)
    assert waits["reefknot_retry_wait_seconds_sum"] == pytest.approx(0.9)
    assert values(found["reefknot_queue_depth"]) == {("io",): 60, ("router",): 0}
    assert values(found["reefknot_worker_level"]) == {("io", "worker-1"): 2}, "by the names of the labels"
    keys = values(found["reefknot_idempotency_events"])
    assert (keys["hit",], keys["conflict",]) == (1, 1)
    admitted = {word for (word,) in values(found["reefknot_admissions"])}
    assert admitted == {"accepted", "deferred", "degraded", "dropped", "rejected"}
    assert values(found["reefknot_systems"]) == {(): 1}
    assert values(found["reefknot_alert_active"])["retry_rate",] == 0


async def test_counters_are_the_stores_and_go_on_over_the_ends_of_systems(store: MemoryStore) -> None:
    for number in (1, 2, 3):
        await worked(store, "http.request")
        assert sum(values((await scraped(store))["reefknot_retry_attempts"]).values()) == number


async def test_labels_are_bounded_whatever_blocks_there_are(store: MemoryStore) -> None:
    for first in range(0, 200, 40):
        await worked(store, *(f"mine.step_{number}" for number in range(first, first + 40)))
    found = values((await scraped(store))["reefknot_retry_attempts"])
    assert (len(found), found["other", "NETWORK_ERROR"]) == (51, 150)


async def test_a_label_can_neither_break_a_line_nor_show_a_secret(store: MemoryStore) -> None:
    await worked(store, 'a"}\nforged 1 #', "hunter2hunter2")
    found = values((await scraped(store, "hunter2hunter2"))["reefknot_retry_attempts"])
    assert len(found) == 2
    assert not any("hunter2" in label or "\n" in label for labels in found for label in labels)


async def test_a_sum_that_was_damaged_is_no_obstacle(store: MemoryStore) -> None:
    body = json.dumps({"totals": {"retry_attempts|a": 1, "unknown|x|y": 2, "retry_attempts|a|B|c": 3, "": 4}})
    await store.values.put(ENDED, body, version=0)
    assert values((await scraped(store))["reefknot_retry_attempts"]) == {}


async def test_a_scrape_reads_what_systems_counted_once(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    await worked(store, "http.request")
    raised = AlertsRecord(active={"oldest_age": RecordedAlert("oldest_age", 20.0, 10.0, 1, "it waits")})
    await store.values.put(ALERTS, msgspec.json.encode(raised).decode(), version=0)
    listed = store.values.list

    async def noted(prefix: str = "") -> Sequence[StoredValue]:
        read.append(prefix)
        return await listed(prefix)

    monkeypatch.setattr(store.values, "list", noted)
    assert (values((await scraped(store))["reefknot_alert_active"])["oldest_age",], read.count(PREFIX)) == (1, 1)


async def test_without_the_package_its_extra_is_named(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OperationError, match=r"pip install '\.\[metrics\]'") as caught:
        await metrics.metrics_text(operator.Operator(store, Redactor()))
    assert caught.value.kind == "misconfigured"


def expressions() -> list[tuple[str, str]]:
    board = json.loads((DEPLOY / "grafana" / "reefknot.json").read_text())
    found = [(f"grafana: {one['title']}", target["expr"]) for one in board["panels"] for target in one["targets"]]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "reefknot.rules.yml").read_text())
    return found + [(f"rule {one['alert']}", one["expr"]) for group in rules["groups"] for one in group["rules"]]


def unknown(shipped: list[tuple[str, str]], names: set[str]) -> list[str]:
    return [f"{where}: {name}" for where, text in shipped for name in _NAME.findall(text) if name not in names]


async def test_every_name_in_dashboard_and_rules_is_a_metric_and_hardly_any_is_in_neither(store: MemoryStore) -> None:
    families = set(await scraped(store))
    await worked(store, "http.request")
    await running(store)  # something of everything that has labels is counted now
    names = {sample.name for metric in (await scraped(store)).values() for sample in metric.samples}
    shipped = expressions()
    assert len(shipped) > 30
    assert unknown(shipped, names) == []
    assert unknown([("a panel", "rate(reefknot_retries_total[1m])")], names) == ["a panel: reefknot_retries_total"]
    shown = {name for _, text in shipped for name in _NAME.findall(text)}
    assert {name for name in families if not any(one.startswith(name) for one in shown)} <= {"reefknot_routers"}


def test_no_text_of_a_rule_prints_a_number_with_all_its_digits() -> None:
    """`increase` extrapolates: 257.4301675977654 jobs."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "reefknot.rules.yml").read_text())
    texts = [text for group in rules["groups"] for one in group["rules"] for text in one["annotations"].values()]
    values = [found for text in texts for found in re.findall(r"\{\{ *\$value[^}]*\}\}", text)]
    assert len(values) >= 3
    assert [one for one in values if "|" not in one] == []


async def test_the_reference_has_every_metric_and_no_other(store: MemoryStore) -> None:
    page = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text()
    written = set(re.findall(r"^\| `(reefknot_\w+)", page, re.MULTILINE))
    found = await scraped(store)
    assert written == {name + ("_total" if one.type == "counter" else "") for name, one in found.items()}
