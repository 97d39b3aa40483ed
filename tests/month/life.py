"""
Chapters of a month in virtual time: a whole system with sources, schedules, retention and an open dashboard.

Jobs come at an ordinary rate, the sources change every hour, and every page is asked for every few hours. What a month
is judged by goes into its `Record`.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from reefknot import clock
from reefknot.app.system import System, running_system
from reefknot.audit.port import AuditQuery
from reefknot.audit.retention import retention_given
from reefknot.console.dashboard.server import build_app
from reefknot.console.dashboard.site import Site
from reefknot.core.redaction import Redactor
from reefknot.ingest.configured_sources import documents_path, open_documents
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.client import Handle
from reefknot.queue.model.messages import ResultStatus
from reefknot.stores import opening as stores
from reefknot.stores.port import Store
from tests.month.clockwork import PULSE_S, live
from tests.month.judgement import Job, Record
from tests.month.world import World
from tests.security.site_client import HOST, access, ask, bearer, login, request_scope

BERLIN = ZoneInfo("Europe/Berlin")
JOBS_AN_HOUR = 6
LOOK_EVERY_H = 4
ENDS_WITHIN_S = 6 * 3600.0
PAGES = ("/", "/alerts", "/work", "/quarantine", "/workers", "/sources", "/audit", "/health")
UNWELL = ("retrying", "quarantined")
"""States of a sync that a person sees while its source is down."""
STEPS = """
from collections import Counter

import reefknot as rk

EXECUTIONS = Counter()


@rk.idempotent(key=lambda name: f"effect:{name}")
async def effect(name):
    return name


@rk.block("month.count")
async def count(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    await effect(context.assignment_id)
    return {}


@rk.block("month.flaky")
async def flaky(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    if context.attempt < 3:
        raise ConnectionError("refused for now")
    await effect(context.assignment_id)
    return {}


@rk.block("month.poison")
async def poison(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    raise ValueError("cannot be processed")
"""


class Chapter:
    """A part of the month in one process."""

    def __init__(self, world: World, record: Record, begin: datetime, hours: range) -> None:
        self._world = world
        self._record = record
        self._begin = begin
        self._hours = hours
        self._waiting: set[asyncio.Task[None]] = set()
        self._executions: Counter[str] = Counter()
        """Executions that each job of this chapter should have had."""
        self._read = 0
        """The last event that was read."""

    def run(self) -> None:
        """Live from the first of these hours until the last has passed and every job has ended."""
        self._record.pages.append({})
        live(self._live(), since=self._begin + timedelta(hours=self._hours.start))
        self._record.sizes.append(size_of(self._world.home))
        self._record.memory.append(resident_bytes())

    async def _live(self) -> None:
        home = self._world.home
        settings = load_settings(str(home / "reefknot.yaml"), environ=os.environ, cwd=home)
        url = f"sqlite:{home / 'state.db'}"
        async with (
            running_system(url, settings, modules=("month_steps",), drain=5.0, ingestion=True) as system,
            _retained(system, settings),
            _dashboard(system, settings, url, self._record) as app,
        ):
            self._read = system.started_after
            for hour in self._hours:
                await self._one_hour(system, hour, app)
            if self._waiting:
                await asyncio.wait(self._waiting, timeout=ENDS_WITHIN_S)
            for late in self._waiting:
                late.cancel()
            await self._count(system.store)

    async def _one_hour(self, system: System, hour: int, app: Any) -> None:
        self._world.trouble(datetime.fromtimestamp(clock.wall(), UTC))
        self._world.hour(hour)
        while self._world.mounted:  # a person has seen to the disk, and says so
            run = f"/api/v1/sources/{self._world.mounted.pop()}/run"
            asked = await ask(app, "POST", run, [bearer(), ("Content-Type", "application/json")], b"{}")
            assert asked.status < 300, asked
        if hour % 24 == 1:
            self._world.add_poison(hour // 24)
        for number in range(JOBS_AN_HOUR):
            kind, expected = "month.count", "success"
            if number % 4 == 1:
                kind = "month.flaky"
            if hour % 24 == 2 and number == 0:
                kind, expected = "month.poison", "error"
            handle = await system.client.submit(kind, {}, assignment_id=f"job-{hour:04d}-{number:02d}")
            self._record.accepted[handle.assignment_id] = Job(expected, hour)
            task = asyncio.create_task(self._followed(handle))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            await asyncio.sleep(3600 / JOBS_AN_HOUR)
        await self._look(hour, app)
        await self._read_ends(system.store)

    async def _followed(self, handle: Handle) -> None:
        result = await handle.result(ENDS_WITHIN_S)
        self._record.results[handle.assignment_id] = "success" if result.status is ResultStatus.SUCCESS else "error"
        self._executions[handle.assignment_id] = 1 + (result.retries_used or 0)

    async def _look(self, hour: int, app: Any) -> None:
        """Ask for the states of the sources, and every few hours for every page."""
        taken, headers = self._record.pages[-1], await login(app)  # a login ends some day
        for page in PAGES if hour % LOOK_EVERY_H == LOOK_EVERY_H - 1 else ():
            began = time.thread_time()
            answered = await ask(app, "GET", page, headers)
            took = time.thread_time() - began
            taken[page] = min(took, taken.get(page, took))
            if answered.status != 200:
                self._record.refused.append(f"hour {hour} {page}: {answered.status}")
        for source in (await ask(app, "GET", "/api/v1/sources", headers)).json["sources"]:
            self._record.happened[f"{source['name']} down"] += source["sync_state"] in UNWELL
        for trouble in self._world.repository.met:
            self._record.happened[trouble] += 1
        self._world.repository.met.clear()

    async def _read_ends(self, store: Store) -> None:
        """Count the ends of jobs that the audit log has since the last look, before retention removes them."""
        while events := await store.audit.read(AuditQuery(after=self._read, event_type="completed")):
            self._record.ends.update(one.entry.work_id for one in events if one.entry.work_id)
            self._read = events[-1].sequence

    async def _count(self, store: Store) -> None:
        """What is there at the end of a chapter: executions, keys, and records that retention should have removed."""
        record, executions = self._record, steps().EXECUTIONS
        record.nights += [local_day(name) for name in executions if name.startswith("nightly@")]
        record.again += Counter({name: n for name, n in executions.items() if "@" not in name}) - self._executions
        executions.clear()
        await self._read_ends(store)
        record.keys.append(sum((await store.idempotency.counts()).values()))
        before = store.moment().wall - int((record.retention_hours + 1) * 3_600_000)
        record.overdue["ended jobs"] += await store.work.purge(before)
        record.overdue["events"] += await store.audit.trim(before)


@asynccontextmanager
async def _retained(system: System, settings: Settings) -> AsyncIterator[None]:
    """Retention as a store in real time has it."""
    options = stores.options_of(settings)
    given = retention_given(options["audit_retention"], options["work_retention"])
    job = stores._retention_job(system.store, system.store.clock, given)
    job.start()
    try:
        yield
    finally:
        await job.close()


@asynccontextmanager
async def _dashboard(system: System, settings: Settings, url: str, record: Record) -> AsyncIterator[Any]:
    """The dashboard's application, with one page open all the while."""
    site = Site(system.store, access=access(), redactor=Redactor(()), settings=settings, shown=url)
    app = build_app(site)
    watching = asyncio.create_task(_watch(app, record))
    try:
        yield app
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(app: Any, record: Record) -> None:
    """Hold the live stream of the overview open, as a browser that asks again, and count the states that it shows."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        record.live_messages += message.get("body", b"").startswith(b"event: ")

    while True:
        scope = request_scope("GET", "/live?view=overview", [("Host", HOST), *await login(app)])
        await app(scope, receive, send)
        await asyncio.sleep(PULSE_S)


async def documents_of(home: Path, source: str) -> dict[str, int]:
    """How often each text of a source is there, by the word it begins with."""
    found: Counter[str] = Counter()
    settings = load_settings(str(home / "reefknot.yaml"), environ=os.environ, cwd=home)
    async with open_documents(documents_path(settings, f"sqlite:{home / 'state.db'}")) as documents:
        after = ""
        while page := await documents.page(source, after=after, limit=500):
            for one in page:
                found[word_of(one.location, one.text)] += 1
            after = page[-1].id
    return dict(found)


def word_of(location: str, text: str) -> str:
    """The word by which the world knows a document."""
    return "always" if Path(location).stem == "always" else text.split(maxsplit=1)[0]


def local_day(name: str) -> str:
    """The day in Berlin of a schedule's job."""
    return str(datetime.fromisoformat(name.partition("@")[2]).astimezone(BERLIN).date())


def steps() -> Any:
    """The module of the system's steps, which counts executions."""
    return sys.modules["month_steps"]


def size_of(home: Path) -> int:
    """The bytes of all files of the store and of the documents, without the copies that upgrades keep."""
    return sum(file.stat().st_size for file in home.glob("*.db*") if file.suffix != ".bak")


def resident_bytes() -> int:
    """The memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
