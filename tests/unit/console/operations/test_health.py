"""`examine_store`: what is found around a store and in it, beside those who work on it."""

import asyncio
import json
import os
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

import reefknot as rk
from reefknot.app.system import System
from reefknot.audit import copies, metrics
from reefknot.console.operations.health import EXTRAS, examine_address, examine_store, extras_finding
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.policy.schema import DashboardSection
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.work import ROUTER, WorkItem
from reefknot.queue.port.work_queue import Enqueue, WorkClaim
from reefknot.queue.presence import living_systems
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.processes import process_mark
from reefknot.stores.port import Store
from reefknot.stores.sqlite import examination
from reefknot.testing.conformance.harness import event
from tests.rows import for_each_row
from tests.unit.queue.shops import gone_process
from tests.unit.queue.test_presence import ELSEWHERE, reported

ROOT = Path(__file__).resolve().parents[4]
Found = dict[str, dict[str, Any]]
Work = Callable[[Store], Awaitable[None]]


def written(folder: Path, text: str) -> Settings:
    (folder / "reefknot.yaml").write_text(text)
    return load_settings(environ={}, cwd=folder)


def by_check(report: dict[str, Any]) -> Found:
    order = ("ok", "warning", "problem")
    findings = sorted(report["findings"], key=lambda one: order.index(one["level"]))
    return {one["check"]: one for one in findings}


def examined(folder: Path, settings: Settings | None = None, work: Work | None = None) -> Found:
    """The findings about an open store in this folder, after some work on it."""

    async def main() -> Found:
        async with rk.open_store(f"sqlite:{folder / 'state.db'}", tidy=False) as store:
            if work is not None:
                await work(store)
            return by_check(await examine_store(Operator(store, Redactor(()), settings=settings)))

    return asyncio.run(main())


def test_the_extras_are_the_packages_and_a_missing_one_is_a_warning_when_it_is_needed(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"all", "dev", "bench"}
    assert (extras_finding(None).level, "not installed" in extras_finding(None).text) == ("ok", False)

    def without_nats(module: str) -> bool:
        return module != "nats"

    unused = extras_finding(written(tmp_path, ""), is_there=without_nats)
    needed = extras_finding(written(tmp_path, "engine: nats://127.0.0.1:4222\n"), is_there=without_nats)
    assert (unused.level, unused.way_out) == ("ok", "pip install '.[nats]' in a checkout adds them")
    assert (needed.level, needed.way_out) == ("warning", "pip install '.[nats]' in a checkout")
    assert "engine needs nats" in needed.text

    text = (
        "dashboard: {port: 0}\n"
        "sources: {repo: {connector: github_repository, settings: {repository: a/b}, enabled: true}}\n"
        "blocks: {sql: {connections: {shop: 'postgresql://shop@db/shop'}}}\n"
    )
    found = extras_finding(written(tmp_path, text), is_there=lambda module: False).text
    for one in ("dashboard needs dashboard", "sources.repo needs ingest", "blocks.sql.connections.shop needs sql"):
        assert one in found


@for_each_row(
    ("version", "level"),
    [("3.51.2", "warning"), ("3.9.3", "warning"), ("3.51.3", "ok"), ("3.54.1", "ok"), ("4.0", "ok")],
)
def test_a_library_with_the_race_that_damages_files_is_a_warning(version: str, level: str) -> None:
    found = examination.library_finding(version)
    assert found.level == level
    assert ("apsw" in found.way_out) is (level == "warning")


def test_a_secret_of_a_source_that_cannot_be_read_here_is_a_warning(tmp_path: Path) -> None:
    source = "{connector: github_repository, repository: a/b, token: 'env:NO_TOKEN'}"
    found = examined(tmp_path, written(tmp_path, f"sources: {{product: {source}}}\n"))["secrets"]
    assert found["level"] == "warning"
    assert "sources.product.token (env:NO_TOKEN): there is no such environment variable" in found["text"]


def test_a_secret_in_a_text_that_is_found_is_hidden(tmp_path: Path) -> None:
    url, redactor = f"sqlite:{tmp_path / 'xyzzy-the-password' / 'a.db'}", Redactor(("xyzzy-the-password",))
    report = json.dumps(asyncio.run(examine_address(url, None, shown="", redactor=redactor)))
    assert ("there is no store" in report, "xyzzy" in report) == (True, False)


TLS = {"tls_certificate": "a", "tls_key": "b"}


@for_each_row(
    ("section", "lacks"),
    [
        ({}, ""),
        ({"enabled": False, "host": "0.0.0.0"}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "::1"}, ""),
        ({"host": "ops.lan", **TLS, "operator_token": "env:T"}, ""),
        ({"host": "::", **TLS, "reader_token": "env:T", "allowed_hosts": ("ops.lan",)}, ""),
        ({"host": "0.0.0.0"}, "tls_certificate and tls_key and operator_token or reader_token"),
        ({"host": "::", "operator_token": "env:T"}, "tls_certificate and tls_key and allowed_hosts are"),
        ({"host": "ops.example.org", **TLS}, "reader_token are missing"),
    ],
)
def test_a_public_dashboard_needs_tls_and_a_token(tmp_path: Path, section: dict[str, Any], lacks: str) -> None:
    settings = written(tmp_path, "")
    configuration = msgspec.structs.replace(settings.configuration, dashboard=DashboardSection(**section))
    found = examined(tmp_path, msgspec.structs.replace(settings, configuration=configuration))["dashboard"]
    assert found["level"] == ("problem" if lacks else "ok")
    if lacks:
        assert found["cause"] == "misconfigured"
        assert lacks in found["text"]
        assert "127.0.0.1" in found["way_out"]


def test_a_warning_of_the_configuration_is_a_finding_and_a_mistake_for_steps_is_a_problem(tmp_path: Path) -> None:
    settings = written(tmp_path, "worker: {queue: {v2: {enabled: true, rejection_policy: degrade}}}\n")
    assert settings.warnings, "the control: this configuration has a warning"
    found = examined(tmp_path, settings)["config"]
    assert (found["level"], found["text"]) == ("warning", settings.warnings[0])
    found = examined(tmp_path, written(tmp_path, "blocks: {fs: {roots: [.]}}\n"))["config"]
    assert (found["level"], found["cause"], "blocks.fs.roots" in found["text"]) == ("problem", "misconfigured", True)


def test_an_open_store_is_examined_while_somebody_else_writes_it(tmp_path: Path) -> None:
    """A writer that holds its lock keeps no finding back, and is kept back by none."""
    writer = []

    async def begin(store: Store) -> None:
        writer.append(apsw.Connection(str(tmp_path / "state.db")))
        writer[0].execute("BEGIN IMMEDIATE")

    found = examined(tmp_path, work=begin)
    writer[0].execute("CREATE TABLE another (x); COMMIT")
    assert {one["level"] for one in found.values()} == {"ok"}
    assert {"python", "extras", "library", "schema", "durability", "content", "leases", "audit"} <= set(found)


def locks_on(file: Path) -> int:
    """The locks that this process holds on a file, as the system lists them."""
    wanted = f":{file.stat().st_ino} "
    return sum(wanted in line and f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_look_at_an_open_store_keeps_the_locks_of_this_process(tmp_path: Path) -> None:
    """Without them, others may take the file for one that nobody has open, and remove its log."""
    file = tmp_path / "state.db"

    async def main() -> tuple[int, int, int]:
        async with rk.open_store(f"sqlite:{file}", tidy=False) as store:
            before = locks_on(file)
            await examine_store(Operator(store, Redactor(())))
            after = locks_on(file)
            os.close(os.open(file, os.O_RDONLY))
            return before, after, locks_on(file)

    before, after, closed = asyncio.run(main())
    assert before == after > 0
    assert closed == 0, "the control: whoever opens the file and closes it drops the locks of all"


def test_a_check_of_the_content_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "OPEN_CHECK_S", -1.0)
    monkeypatch.setattr(examination, "CHECK_STEPS", 1)
    found = examined(tmp_path)["content"]
    assert found["level"] == "ok"
    assert "then stopped; `reefknot store check` runs to the end" in found["text"]


@pytest.mark.real_time
async def test_a_store_in_memory_promises_nothing() -> None:
    async with rk.open_store("memory:") as store:
        found = by_check(await examine_store(Operator(store, Redactor(()))))
    assert found["durability"]["level"] == "warning"


@pytest.mark.parametrize("gone", [True, False])
def test_work_of_a_dead_process_is_a_warning_with_the_command_that_takes_it_over(tmp_path: Path, gone: bool) -> None:
    async def work(store: Store) -> None:
        await store.work.enqueue([WorkItem("a", "x", "c")])
        owner = f"worker-1#5@{gone_process() if gone else process_mark()}"
        await store.work.claim(1, WorkClaim(owner=owner, classes=("c",), lease=600))

    opened = examined(tmp_path, work=work)["leases"]
    address = f"sqlite:{tmp_path / 'state.db'}"
    closed = by_check(asyncio.run(examine_address(address, None, shown="", redactor=Redactor(()))))["leases"]
    assert opened == closed
    if gone:
        assert (opened["level"], opened["way_out"]) == ("warning", "`reefknot up` takes it over")
        assert "worker-1#5" in opened["text"]
    else:
        assert (opened["level"], opened["text"]) == ("ok", "work is held by 1, none of them gone")


async def test_work_of_a_silent_process_on_another_host_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rk.open_store("memory:") as store:
        monkeypatch.setattr(type(store), "reached_for", 60.0)
        await store.work.enqueue([WorkItem("a", "x", "c")])
        await store.work.claim(1, WorkClaim(owner=f"worker-9#1@{ELSEWHERE}", classes=("c",), lease=600))

        async def leases() -> Any:
            return by_check(await examine_store(Operator(store, Redactor(()))))["leases"]

        assert (await leases())["level"] == "ok"
        await asyncio.sleep(10)
        late = await leases()
        assert (late["level"], "worker-9#1" in late["text"]) == ("warning", True)
        await reported(store, process=ELSEWHERE)
        assert (await leases())["level"] == "ok", "it was heard"


HELD = {"draining": True, "leaving": False}
LEFT = {"draining": True, "leaving": True}


@for_each_row(
    ("waits_at", "worker", "warned"),
    [
        (ROUTER, {}, False),
        (ROUTER, HELD, True),
        (ROUTER, LEFT, True),
        ("io@worker-1", HELD, True),
        ("io@worker-2", HELD, False),
    ],
)
def test_due_jobs_that_wait_for_a_worker_that_takes_nothing_are_a_warning(
    tmp_path_factory: pytest.TempPathFactory, waits_at: str, worker: dict[str, Any], warned: bool
) -> None:
    async def work(store: Store) -> None:
        owner = Enqueue(owner="router-1" if waits_at == ROUTER else "")
        await store.work.enqueue([WorkItem("a", "t", waits_at)], owner)
        await changed_worker(store, **worker)

    found = examined(tmp_path_factory.mktemp("row"), work=work)["systems"]
    expected = ("warning", "worker-1, paused or draining", "`reefknot worker resume worker-1`")
    level, text, way_out = expected if warned else ("ok", "1 running, 1 job open", "")
    assert (found["level"], found["way_out"], text in found["text"]) == (level, way_out, True)


def test_a_paused_worker_is_well_while_another_runs_or_nothing_is_due(tmp_path: Path) -> None:
    async def later(store: Store) -> None:
        await store.work.enqueue([WorkItem("later", "t", ROUTER, due_at=store.moment().wall + 60_000)])
        await changed_worker(store, **HELD)

    async def beside(store: Store) -> None:
        await store.work.enqueue([WorkItem("now", "t", ROUTER)])
        await reported(store, worker="worker-2")

    assert examined(tmp_path, work=later)["systems"]["level"] == "ok"
    assert examined(tmp_path, work=beside)["systems"]["level"] == "ok"


def test_due_jobs_that_wait_too_long_beside_workers_that_run_are_a_warning(tmp_path: Path) -> None:
    """A type that no running system knows is named; the limit is that of the alert, and goes with it."""

    async def work(store: Store) -> None:
        an_hour_ago = store.moment().wall - 3_600_000
        await store.work.enqueue([WorkItem(one, one, ROUTER, due_at=an_hour_ago) for one in ("own.known", "own.lost")])
        await reported(store, blocks=["own.known"])

    found = examined(tmp_path, work=work)["systems"]
    assert (found["level"], "`reefknot worker list`" in found["way_out"]) == ("warning", True)
    assert "the oldest for 60 min; no running system knows the type own.lost" in found["text"]
    silent = written(tmp_path, "alerts: {rules: {oldest_age: {enabled: false}}}\n")
    assert examined(tmp_path, silent)["systems"]["level"] == "ok"


async def changed_worker(store: Store, **changes: Any) -> None:
    system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=("worker-1",))
    await reported(store, workers=[msgspec.to_builtins(system.workers[0].snapshot()) | changes])


@for_each_row(
    ("activity", "level", "said"),
    [
        ({}, "ok", "no running system holds events back; none lost"),
        ({"activity": None}, "ok", "no running system holds events back; none lost"),
        ({"activity": {"audit_buffered": 7}}, "warning", "7 events wait in memory"),
        ({"activity": {"id": "s", "audit_buffered": 7, "buckets": {"NOW": {"audit_lost": 3}}}}, "warning", "3 events"),
    ],
)
def test_events_held_back_or_lost_are_a_warning(tmp_path: Path, activity: Any, level: str, said: str) -> None:
    async def work(store: Store) -> None:
        for system in await living_systems(store):
            await store.control.withdraw(system["system_id"])
        step = str(int(store.moment().wall / 1000 // metrics.STEP_S))
        await reported(store, **json.loads(json.dumps(activity).replace("NOW", step)))

    found = examined(tmp_path, work=work)["audit"]
    assert (found["level"], said in found["text"]) == (level, True)


def test_a_copy_that_is_far_behind_is_a_warning_until_a_system_has_copied(tmp_path: Path) -> None:
    settings = written(tmp_path, "audit: {jsonl: {path: copies/events.jsonl}}\n")

    async def many(store: Store) -> None:
        await store.audit.append([event(str(number)) for number in range(1200)])

    async def copy(store: Store) -> None:
        async with copies.kept_events(store, settings):
            pass

    behind = examined(tmp_path, settings, many)["copies"]
    assert (behind["level"], "1200 events behind" in behind["text"]) == ("warning", True)
    assert examined(tmp_path, settings, copy)["copies"]["level"] == "ok"
