"""
A whole system in virtual time: a router, workers and schedules over a store in memory, whose time moves when asked.

Time moves in two ways. While a step runs, it goes from timer to timer, so that sleeps and time limits of steps are
exact. While all jobs wait, it jumps to the moment at which the next one is due: the parts that report themselves every
second need not do so for the hours in between.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

from reefknot.app.system import System, worker_settings
from reefknot.audit.port import pages_of
from reefknot.clock import SteadyClock, using_clock
from reefknot.console.operations.audit import EventFilter, EventQuery
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.quarantine import QuarantineQuery, list_quarantined
from reefknot.console.operations.waits import waits_of
from reefknot.console.words.events import event_fields
from reefknot.core.redaction import Redactor
from reefknot.errors import JobsStuckError, ResultPendingError
from reefknot.ingest.configured_schedules import running_schedules, timetable_of
from reefknot.policy.settings import Settings
from reefknot.queue.model.messages import ExecResult
from reefknot.queue.model.results import answer_of
from reefknot.queue.model.schedules import next_due
from reefknot.queue.model.wait_reasons import span
from reefknot.queue.model.work import ROUTER, SCHEDULED, WorkItem, WorkState, is_over
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.router.settings import settings_from as router_settings
from reefknot.runtime.clocks import LoopClock, VirtualLoop
from reefknot.steps.port import Block
from reefknot.stores.opening import open_store, options_of
from reefknot.stores.port import Store

STEP_S = 0.05
"""Virtual time between two looks at the jobs, while one of them is at work."""
LONGEST_STEP_S = 0.5
STILL_S = 10.0
"""Virtual time, beyond a router's patience, after which jobs that are due and do not begin are stuck."""
WAITING_S = 100.0
"""Virtual time after which jobs are stuck that all wait for others, none of which is open."""
LONGEST_RUN_S = 3600.0
"""Virtual time after which a step that runs without an end is stuck."""
TURNS = 20
"""Turns of the loop in which messages between the parts arrive."""
OPEN = (WorkState.PENDING, WorkState.RUNNING)
PAGE = 500
MOST_NAMED = 5

IsDone = Callable[[Sequence[WorkItem]], bool]
"""Whether time need not pass any more, given the jobs that have not ended."""


class Simulation:
    """The system under test, seen from inside its loop."""

    def __init__(
        self, loop: VirtualLoop, settings: Settings, blocks: Mapping[str, Block], *, workers: int, start: float
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._blocks = blocks
        self._names = [f"worker-{number}" for number in range(1, workers + 1)]
        self._clock = LoopClock(loop, start)
        self._opened = AsyncExitStack()
        self._seen: list[tuple[str, WorkState, int, int, int, int]] = []
        """The jobs as they were when they last changed."""
        self._seen_at = 0.0
        self._waits_since: float | None = None
        """Since when all open jobs wait for others: since a look that found no other one."""

    async def open(self) -> None:
        """Start the system. It lives in the context of the task that calls this."""
        working, opened = worker_settings(self._settings), self._opened
        opened.enter_context(using_clock(self._clock))
        options: Any = {**options_of(self._settings), "nats": None}
        self.store: Store = await opened.enter_async_context(open_store("memory:", clock=self._clock, **options))
        self.system = System(
            self.store,
            SteadyClock(self.store.clock),
            settings=working,
            blocks=self._blocks,
            workers=self._names,
            routing=router_settings(self._settings.configuration, working.rules, self._settings.limits),
            seed=0,
        )
        await self.system.start()
        opened.push_async_callback(self.system.stop)
        await opened.enter_async_context(running_schedules(self.store, self._settings, self.system.client))
        self._timetables = [timetable_of(one) for one in self._settings.configuration.schedules.values()]
        self.operator = Operator(self.store, Redactor(), "test", self._settings, "memory:")
        await self.settle()

    async def close(self) -> None:
        """End the system. Steps that run are cancelled."""
        await self._opened.aclose()

    def now(self) -> datetime:
        """The wall time of the system, UTC."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.store.moment().wall)

    # ---- time -------------------------------------------------------------------------------------------------------

    async def advance(self, seconds: float) -> None:
        """Let this much time pass, with everything that is due meanwhile."""
        await self._pass_time(lambda _: False, self._loop.time() + seconds)

    async def drain(self, within: float) -> None:
        """Let time pass until every job has ended. `within` counts from the last moment a job is scheduled for."""
        await self._expect(lambda items: not items, within)

    async def ended(self, item: WorkItem, timeout: float | None, within: float) -> WorkItem:
        """The job once it has ended, with time passing until then; `ResultPendingError` after `timeout` seconds."""
        record = item.id

        def is_done(items: Sequence[WorkItem]) -> bool:
            return all(one.id != record for one in items)

        if timeout is None:
            await self._expect(is_done, within)
        elif not await self._pass_time(is_done, self._loop.time() + timeout):
            raise ResultPendingError(assignment_id=item.assignment_id, seconds=timeout)
        found = await self.store.work.get(record)
        assert found is not None
        assert is_over(found)
        return found

    async def _expect(self, is_done: IsDone, within: float) -> None:
        """Let time pass until `is_done`; jobs that do not move, and those left after `within`, are stuck."""
        began = self._loop.time()
        while True:
            items = await self._open_items()
            later = [one.due_at for one in items if one.reason == SCHEDULED and not one.attempts]
            ends = max([began, *map(self._at, later)]) + within
            if await self._pass_time(is_done, ends, is_stuck=self._is_stuck):
                return
            items = await self._open_items()
            if not is_done(items):
                raise await self._stuck(items, self._loop.time() - began)

    async def _pass_time(self, is_done: IsDone, ends: float, *, is_stuck: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until `is_done`, True, or until it `ends` or everything `is_stuck`, False."""
        while True:
            items = await self._open_items()
            if is_done(items):
                return True
            if self._loop.time() >= ends or is_stuck():
                return False
            if self._is_at_work(items):
                await asyncio.sleep(min(self._step(), ends - self._loop.time()))
            else:
                await self._jump(min(ends, self._next_at(items)))

    def _is_at_work(self, items: Sequence[WorkItem]) -> bool:
        """Whether a step runs, or a job is due and likely to begin."""
        if any(worker.steps.running for worker in self.system.workers):
            return True
        wall = self.store.moment().wall
        is_due = any(one.state is WorkState.RUNNING or one.due_at <= wall for one in items)
        return is_due and self._still_for() < self._patience

    async def _jump(self, to: float) -> None:
        """Move the time to this moment of the loop. The workers count as heard of then, as they would have been."""
        seconds = max(0.001, to - self._loop.time())
        then = self._clock.now() + seconds
        for worker in self.system.workers:
            self.system.router.health.record_heartbeat(worker.heartbeat(), then)
        self._loop.advance(seconds)
        self._seen_at = self._loop.time()
        await self.settle()

    def _next_at(self, items: Sequence[WorkItem]) -> float:
        """The next moment of the loop at which a job or a schedule is due, or a deadline ends."""
        wall, now = self.store.moment().wall, self.now()
        moments = [one.due_at for one in items] + [one.deadline_at for one in items if one.deadline_at is not None]
        due = [self._at(one) for one in moments if one > wall]
        planned = (next_due(one, now) for one in self._timetables)
        due += [self._at(one.timestamp() * 1000) for one in planned if one is not None]
        return min(due, default=inf)

    def _at(self, wall_ms: float) -> float:
        """The moment of the loop for a wall time; a millisecond later, because the store counts whole ones."""
        return self._loop.time() + (wall_ms - self.store.moment().wall) / 1000 + 0.001

    async def settle(self) -> None:
        """Let what is under way between the parts arrive. No time passes."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    # ---- jobs -------------------------------------------------------------------------------------------------------

    async def _open_items(self) -> list[WorkItem]:
        """The jobs that have not ended, with a note of when they last changed."""
        found = [one for state in OPEN for one in await self._all(state)]
        seen = [(one.id, one.state, one.attempts, one.due_at, one.updated_at, one.fence) for one in found]
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._loop.time()
        if not found or not all(one.extra.waits and one.resource_class == ROUTER for one in found):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self._loop.time()
        return found

    async def _all(self, state: WorkState) -> list[WorkItem]:
        found, after = list[WorkItem](), ""
        while True:
            page = await self.store.work.search(WorkFilter(state=state), after=after, limit=PAGE)
            found += page.items
            if not (after := page.after):
                return found

    def _still_for(self) -> float:
        return self._loop.time() - self._seen_at

    def _step(self) -> float:
        """The time until the next look: longer where nothing has changed for a while."""
        return min(LONGEST_STEP_S, max(STEP_S, self._still_for() / 10))

    @property
    def _patience(self) -> float:
        return self.system.routing.patience + STILL_S

    def _is_stuck(self) -> bool:
        """Whether no job moves, and none will be due later that would."""
        runs = any(worker.steps.running for worker in self.system.workers)
        if self._waits_since is not None and not runs and self._loop.time() - self._waits_since >= WAITING_S:
            return True
        wall = self.store.moment().wall
        due = [one[1] is WorkState.RUNNING or one[3] <= wall for one in self._seen]
        if runs:
            return self._still_for() >= LONGEST_RUN_S
        return bool(due) and all(due) and self._still_for() >= self._patience

    async def _stuck(self, items: Sequence[WorkItem], passed: float) -> JobsStuckError:
        """The error that names the jobs which do not end, and for each why it waits."""
        waits = await waits_of(self.store, items[:PAGE], self.store.moment(), ())
        running = (
            "it has been running for {}, and waits for something that virtual time does not bring; give the step an "
            "attempt_timeout, or use answer() in its place"
        )
        why = {
            one.assignment_id: waits[one.id].sentence if one.id in waits else running.format(span(self._still_for()))
            for one in items
        }
        return JobsStuckError(why, seconds=round(passed, 3), most=MOST_NAMED)

    # ---- records ----------------------------------------------------------------------------------------------------

    async def events(self, query: EventQuery) -> list[dict[str, Any]]:
        """The audited events that match, the oldest first."""
        wanted = EventFilter.of(query)
        found: list[dict[str, Any]] = []
        async for page in pages_of(self.store.audit, wanted.query):
            found += [event_fields(one.entry.body) for one in page if wanted.matches(one)]
        return found

    async def results(self) -> dict[str, ExecResult]:
        """The results of all jobs that have ended, by their ids."""
        found: dict[str, ExecResult] = {}
        for state in WorkState:
            for item in await self._all(state) if state not in OPEN else ():
                whole = await self.store.work.get(item.id)
                result = answer_of(whole)
                if result is not None:
                    found[item.assignment_id] = result
        return found

    async def quarantine(self) -> list[dict[str, Any]]:
        """All quarantined jobs, as `reefknot quarantine list --json` shows them."""
        found: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = await list_quarantined(self.operator, QuarantineQuery(after=after))
            found += page["items"]
            after = page["next"]
        return found
