"""
Limits of the fleet, as the router that leads counts them; and work that waits for a limit or a pause.

    look → may it start? → granted with the assignment → the worker begins it and says so → counted → ended
             └ no: it is held, in its place, until there is room under the limit

Each start is granted here, and spent when the worker has begun it, wherever that is. What is granted and not begun is
reserved: so a worker that begins it late allows nothing more. A retry that is due comes back from its worker, and is
granted like a first attempt. The keys that were used lately are noted in the store once a second: a router that takes
the lead begins without tokens for them, and counts what runs at workers.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

import msgspec

from reefknot.core.limits import Grant, LimitRule, LimitState, LimitTable
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.model.results import assignment_of
from reefknot.queue.model.work import WorkItem, WorkState, is_workers
from reefknot.queue.pauses import Pauses
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.router.pending import Pending, RouterContext
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store

VALUE = "queue.limits"
"""The value of the store that names the keys which were used lately."""
NOTE_EVERY_S = 1.0
MOST_NOTED = 2000
FROZEN_S = 2.0
"""A pause of the router after which another one may lead: what it could have granted is gone."""
CHECK_EVERY_S = 1.0
"""How often it is looked whether what ran before this router led still runs."""
MOST_CHECKED = 200
MOST_LISTED = 10_000
PAGE = 500
MOST_SHOWN = 100
"""Keys with waiting work that a status names."""
SHORTEST_S = 0.002
_PAUSE = "pause "
NO_INPUTS: Mapping[str, Any] = {}

DestinationOf = Callable[[str, Mapping[str, Any]], str]


class RouterLimits:
    """The limits of one router, its pauses, and what runs under each limit."""

    def __init__(
        self,
        context: RouterContext,
        store: Store,
        pauses: Pauses | None = None,
        destination_of: DestinationOf | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `destination_of` gives the destination of a step by its type and inputs; empty where it is not known. `wake` is
        called when something that is paused may begin.
        """
        self._store = store
        self._table = context.table
        self._clock = context.clock
        self._limits = LimitTable(context.settings.limits)
        self._pauses = Pauses() if pauses is None else pauses
        self._pauses.changed.append(wake)
        self._destination_of = destination_of
        self.leads = False
        """Whether it has taken the lead; see `take_lead`."""
        self._looked_at = inf
        self._noted: tuple[float, frozenset[str]] = (-inf, frozenset())
        self._before: dict[str, Grant] = {}
        """Work that ran at workers when this router took the lead, by its record."""
        self._checked_at = -inf

    @property
    def is_on(self) -> bool:
        """Whether anything is limited or paused, or was a moment ago."""
        return bool(self._limits.rules or self._pauses.all or self._table.held)

    def follow(self, rules: Iterable[LimitRule]) -> None:
        """Change the limits; what is held is looked at again."""
        self._limits.follow(rules)

    # ---- grants -----------------------------------------------------------------------------------------------------

    def held_by(self, pending: Pending, now: float) -> str:
        """The limit or the pause that this assignment waits for; empty when it may start."""
        assignment = pending.assignment
        if self._pauses.all:
            pause = self._pauses.of(assignment.job.type, assignment.tenant_id, self._wall_ms())
            if pause is not None:
                return f"{_PAUSE}{pause}"
        return next((state.key for state in self._states(assignment, now) if state.wait(now) > 0), "")

    def grant(self, pending: Pending, now: float) -> None:
        """Grant the start of an assignment that is being sent."""
        states = self._states(pending.assignment, now)
        if states:
            pending.grant = Grant(states, pending.id)

    def _states(self, assignment: ExecAssignment, now: float) -> tuple[LimitState, ...]:
        kind, inputs = assignment.job.type, assignment.job.payload or NO_INPUTS
        rules = self._limits.of_type(kind)
        if not rules:
            return ()
        destination, destination_of = "", self._destination_of
        if destination_of is not None and any(rule.per == "destination" for rule in rules):
            destination = destination_of(kind, inputs)
        tenant = assignment.tenant_id or ""
        return self._limits.states(kind, now, tenant=tenant, destination=destination, inputs=inputs)

    def _wall_ms(self) -> int:
        return int(self._clock.wall() * 1000)

    def release(self, now: float) -> None:
        """Let what was held take its place among the waiting again, as far as there is room for it."""
        self._tick(now)
        if not self._table.held:
            return
        wall_ms = self._wall_ms()
        paused = {f"{_PAUSE}{one}" for one in self._pauses.all if one.is_on(wall_ms)}
        for key in list(self._table.held):
            state = self._limits.get(key)
            if key not in paused:
                self._table.release(key, MOST_LISTED if state is None else state.room(now))

    def _tick(self, now: float) -> None:
        """Begin without tokens after a time in which this process stood still: another router may have led."""
        if now - self._looked_at > FROZEN_S:
            self._limits.empty(now)
        self._looked_at = now

    def next_in(self, now: float) -> float:
        """Seconds until a token comes for something that is held; infinity when none is awaited."""
        states = (self._limits.get(key) for key in self._table.held)
        waits = (state.wait(now) for state in states if state is not None)
        return max(SHORTEST_S, min((wait for wait in waits if wait > 0), default=inf))

    # ---- what others know -------------------------------------------------------------------------------------------

    async def take_lead(self, leads: bool) -> None:
        """Begin where another router, or an earlier run of this one, may have been a moment ago; or lead no more."""
        self._looked_at, self.leads = self._clock.now(), leads
        if not leads or not self._limits.rules:
            return
        now, wall_ms = self._clock.now(), self._wall_ms()
        async with asyncio.timeout(STORE_S):
            kept = await self._store.values.get(VALUE)
        if kept is not None:
            noted = _noted.decode(kept.body)
            ago = max(0.0, (wall_ms - noted.at) / 1000 - NOTE_EVERY_S)
            self._limits.spent_before, self._limits.since = set(noted.keys), now - ago
        if any(rule.running is not None for rule in self._limits.rules):
            await self._count_running(now)

    async def _count_running(self, now: float) -> None:
        """Count what runs at workers, which another router has sent there."""
        async with asyncio.timeout(STORE_S):
            classes = tuple(name for name in await self._store.work.open_classes() if "@" in name)
        which, after = WorkFilter(state=WorkState.RUNNING, classes=classes), ""
        while classes and len(self._before) < MOST_LISTED:
            async with asyncio.timeout(STORE_S):
                page = await self._store.work.search(which, after=after, limit=PAGE)
            for found in page.items:
                if self._limits.of_type(found.kind) and self._table.get(found.id) is None:
                    await self._count_before(found.id, now)
            if not (after := page.after):
                break

    async def _count_before(self, work_id: str, now: float) -> None:
        item = await self._item(work_id)
        states = () if item is None else self._states(assignment_of(item), now)
        if states:
            self._before[work_id] = Grant(states, work_id)
            self._before[work_id].refused()  # its start was counted by the router that sent it

    async def look_after(self, now: float) -> None:
        """Note the keys in use, and forget what has ended that ran before this router led."""
        self._tick(now)
        if not self._limits.rules:
            return
        if self._before and now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            for work_id, grant in list(self._before.items())[:MOST_CHECKED]:
                item = await self._item(work_id)
                del self._before[work_id]
                if item is not None and is_workers(item) and item.state is WorkState.RUNNING:
                    self._before[work_id] = grant  # behind the others
                else:
                    grant.ended()
        at, before = self._noted
        if now - at >= NOTE_EVERY_S:
            keys = frozenset([one.key for one in self._limits.all() if not one.is_full(now)][:MOST_NOTED])
            self._noted = now, keys
            if keys or keys != before:
                await self._note(keys)

    async def _note(self, keys: frozenset[str]) -> None:
        body = msgspec.json.encode(_NotedKeys(self._wall_ms(), sorted(keys))).decode()
        async with asyncio.timeout(STORE_S):
            kept = await self._store.values.get(VALUE)
            await self._store.values.put(VALUE, body, version=0 if kept is None else kept.version)

    async def _item(self, work_id: str) -> WorkItem | None:
        async with asyncio.timeout(STORE_S):
            return await self._store.work.get(work_id)

    def snapshot(self, now: float) -> list[dict[str, Any]]:
        """The limits and, for each key with waiting work, how much waits, runs, and how long until the next start."""
        found = {rule.name: {**msgspec.to_builtins(rule), "text": str(rule), "held": {}} for rule in self._limits.rules}
        for key, line in list(self._table.held.items())[:MOST_SHOWN]:
            state = self._limits.get(key)
            if state is not None and state.rule.name in found:
                wait = state.wait(now)
                next_in = None if wait == inf else round(wait, 3)
                about = {"waiting": line.waiting, "running": len(state.running), "next_in_s": next_in}
                found[state.rule.name]["held"][key] = about
        return list(found.values())


class _NotedKeys(msgspec.Struct):
    """The keys that were used at this time (ms UTC) or shortly before."""

    at: int
    keys: list[str]


_noted = msgspec.json.Decoder(_NotedKeys)
