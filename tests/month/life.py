"""
Chapters of a month in virtual time: a whole system with sources, schedules, retention and an open dashboard.

Jobs come at an ordinary rate, the sources change every hour, and every page is asked for once an hour. The `Record`
keeps what a month is judged by: each accepted job with its results, sizes, memory, and the time of each page.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from reefknot.app import stores
from reefknot.app.sources import documents_path, open_documents
from reefknot.app.system import System, running_system
from reefknot.clock import wall
from reefknot.config.settings import Settings, load_settings
from reefknot.core.messages import ResultStatus
from reefknot.core.redaction import Redactor
from reefknot.dashboard.server import build_app
from reefknot.dashboard.site import Site
from reefknot.router.client import Handle
from tests.month.clockwork import PULSE_S, live
from tests.month.world import World
from tests.security.site_client import HOST, access, ask, login

JOBS_AN_HOUR = 12
ENDS_WITHIN_S = 6 * 3600.0
PAGES = ("/", "/alerts", "/work", "/quarantine", "/workers", "/sources", "/audit", "/health")
STEPS = """
from collections import Counter

import reefknot as rk

EXECUTIONS = Counter()


@rk.block("month.count")
async def count(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    return {"executions": EXECUTIONS[context.assignment_id]}


@rk.block("month.flaky")
async def flaky(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    if context.attempt < 3:
        raise ConnectionError("refused for now")
    return {}


@rk.block("month.poison")
async def poison(inputs, context):
    EXECUTIONS[context.assignment_id] += 1
    raise ValueError("cannot be processed")
"""


@dataclass
class Record:
    """What happened, for the judgement at the end."""

    accepted: Counter[str] = field(default_factory=Counter)
    """Accepted jobs by the status they should end with."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ends of jobs by expected and actual status; one that has no end in time counts as `none`."""
    again: int = 0
    """Executions of jobs that ran although they had succeeded."""
    nights: list[str] = field(default_factory=list)
    """Ids of the jobs of the nightly schedule."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the store's files at the end of each chapter."""
    memory: list[int] = field(default_factory=list)
    """Resident bytes of this process at the end of each chapter."""
    pages: list[dict[str, float]] = field(default_factory=list)
    """For each chapter the shortest CPU time in which a page was answered."""
    refused: list[str] = field(default_factory=list)
    """Pages that were not answered with 200."""
    live_messages: int = 0


class Chapter:
    """A part of the month in one process."""

    def __init__(self, world: World, record: Record, begin: datetime, hours: range) -> None:
        self._world = world
        self._record = record
        self._begin = begin
        self._hours = hours
        self._waiting: set[asyncio.Task[None]] = set()

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
            _dashboard(system, settings, self._record) as app,
        ):
            headers = await login(app)
            for hour in self._hours:
                await self._one_hour(system, hour, app, headers)
            if self._waiting:
                await asyncio.wait(self._waiting, timeout=ENDS_WITHIN_S)
            for late in self._waiting:
                late.cancel()
                self._record.ends[f"{late.get_name()}: none"] += 1
            self._record.nights = sorted(one for one in steps().EXECUTIONS if one.startswith("nightly@"))

    async def _one_hour(self, system: System, hour: int, app: Any, headers: list[tuple[str, str]]) -> None:
        self._world.trouble(datetime.fromtimestamp(wall(), UTC))
        self._world.hour(hour)
        if hour % 24 == 1:
            self._world.add_poison(hour // 24)
        for number in range(JOBS_AN_HOUR):
            kind, expected = "month.count", "success"
            if number % 4 == 1:
                kind = "month.flaky"
            if hour % 24 == 2 and number == 0:
                kind, expected = "month.poison", "error"
            handle = await system.client.submit(kind, {}, assignment_id=f"job-{hour:04d}-{number:02d}")
            self._record.accepted[expected] += 1
            task = asyncio.create_task(self._followed(handle, expected), name=expected)
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            await asyncio.sleep(3600 / JOBS_AN_HOUR)
        await self._look(hour, app, headers)

    async def _followed(self, handle: Handle, expected: str) -> None:
        result = await handle.result(ENDS_WITHIN_S)
        actual = "success" if result.status is ResultStatus.SUCCESS else "error"
        self._record.ends[f"{expected}: {actual}"] += 1
        self._record.again += steps().EXECUTIONS.pop(handle.assignment_id, 1) - 1 - (result.retries_used or 0)

    async def _look(self, hour: int, app: Any, headers: list[tuple[str, str]]) -> None:
        """Ask for every page."""
        taken = self._record.pages[-1]
        for page in PAGES:
            began = time.process_time()
            answered = await ask(app, "GET", page, headers)
            took = time.process_time() - began
            taken[page] = min(took, taken.get(page, took))
            if answered.status != 200:
                self._record.refused.append(f"hour {hour} {page}: {answered.status}")


@asynccontextmanager
async def _retained(system: System, settings: Settings) -> AsyncIterator[None]:
    """Retention as a store in real time has it."""
    options = stores.options_of(settings)
    given = stores.retention_given(options["audit_retention"], options["work_retention"])
    job = stores._retention_job(system.store, system.store.clock, given)
    job.start()
    try:
        yield
    finally:
        await job.close()


@asynccontextmanager
async def _dashboard(system: System, settings: Settings, record: Record) -> AsyncIterator[Any]:
    """The dashboard's application, with one page open all the while."""
    site = Site(system.store, access=access(), redactor=Redactor(()), settings=settings, shown="the store of a month")
    app = build_app(site)
    watching = asyncio.create_task(_watch(app, record))
    try:
        yield app
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(app: Any, record: Record) -> None:
    """Hold the live stream of the overview open, and count its messages."""
    given = [("Host", HOST), *await login(app)]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/live",
        "raw_path": b"/live",
        "query_string": b"view=overview",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given],
        "client": ("127.0.0.1", 50001),
        "server": ("127.0.0.1", 8321),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        record.live_messages += bool(message.get("body"))

    while True:  # as a browser, which asks again when a stream has ended
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


def steps() -> Any:
    """The module of the system's steps, which counts executions."""
    return sys.modules["month_steps"]


def size_of(home: Path) -> int:
    """The bytes of all files of the store and of the documents."""
    return sum(file.stat().st_size for file in home.glob("*.db*"))


def resident_bytes() -> int:
    """The memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
