"""
Kills a parent with follow-ups at a storage or network call, lets a second process carry on, and prints what is left.

A plan is that of `dying`, with the shape of the follow-ups as its mode. Claims, settlements, follow-ups and looks at
waiting work are those of workers and routers; only the clock is moved, so that no pause is waited for. The wrong way is
here too: it submits the follow-ups before it settles their parent.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec import structs

from reefknot.audit.assignments import submitted_event
from reefknot.audit.journal import Journal
from reefknot.audit.port import AuditQuery
from reefknot.core.failure import ErrorCode
from reefknot.queue.execution.settling import AwaitedResults
from reefknot.queue.model.follow_ups import FollowUp, Gather, Origin, gather, items_of, then
from reefknot.queue.model.messages import ExecAssignment, Job, ResultStatus, encode
from reefknot.queue.model.results import unrun_result
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import FollowUps, Settlement
from reefknot.queue.router import waiting
from reefknot.queue.router.completion import Completion
from reefknot.queue.router.pending import PendingTable, RouterContext
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.router.submissions import Submissions
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives
from tests.faults.dying import SCENARIOS, hook_of, make_past
from tests.faults.nats_dying import hook_network
from tests.faults.story import AheadClock
from tests.faults.vfs import Call, Counter, FaultyDisk, Hook

EARLY = "submits before it settles"
SHAPES = ("three and a gather", "a gather in parts", "a chain", "two gathers")
RAN = "ran.txt"
PARENT = "order"


def follow_ups(shape: str, kind: str) -> list[FollowUp | Gather]:
    """What follows a step of this kind."""
    mails = [then("mail", {"to": one}) for one in "abc"]
    pages = gather(*(then("page", {"n": n}) for n in range(3)), then=then("report"))
    match shape, kind:
        case "three and a gather", "parent":
            return [*mails, pages]
        case "a gather in parts", "parent":
            return [pages]
        case "a chain", "parent":
            return [then("link")]
        case "a chain", "link":
            return [then("mail"), pages]
        case "two gathers", "parent":
            return [pages, pages]
        case _:
            return []


def expected(shape: str) -> list[str]:
    """The ids of all jobs at the end."""
    pages = [f":{number}" for number in (1, 2, 3)]
    gathers = {
        "three and a gather": [":1", ":2", ":3", ":4", *(f":4{one}" for one in pages)],
        "a gather in parts": [":1", *(f":1{one}" for one in pages)],
        "a chain": [":1", ":1:1", ":1:2", *(f":1:2{one}" for one in pages)],
        "two gathers": [":1", ":2", *(f":{number}{one}" for number in (1, 2) for one in pages)],
    }
    return sorted([PARENT, *(PARENT + one for one in gathers[shape])])


class Both:
    """A worker and a router in one, which does what can be claimed until nothing is left."""

    def __init__(self, store: Store, clock: AheadClock, folder: Path, plan: Plan, owner: str, hook: Hook) -> None:
        self._store, self._clock, self._folder, self._plan, self._hook = store, clock, folder, plan, hook
        self._journal = Journal(store.audit)
        rules = SubmissionRules()
        self._submissions = Submissions(store.work, clock, rules=rules, journal=self._journal)
        table = PendingTable()
        context = RouterContext(owner, owner, RouterSettings(), store.work, None, self._journal, clock, table)  # type: ignore[arg-type]
        completion = Completion(context, resolve=lambda *_: None, freed=lambda: None)
        self._waiting = waiting.WaitingWork(context, self._submissions, completion, wake=lambda: None)
        self._table, self._owner = table, owner

    async def submit(self) -> None:
        await self._submissions.submit(ExecAssignment(PARENT, PARENT, Job("parent")))

    async def work(self) -> None:
        """Until all jobs have ended."""
        while True:
            claimed = await self._submissions.claim(20, self._owner)
            for one in claimed:
                if one.waits is not None:
                    await self._waiting.look(one)
                else:
                    self._table.add(one, "cpu", 0.0)
            ready = self._table.all()
            for pending in ready:
                self._table.remove(pending)
                await self._run(pending.id, pending.held.fence)
            if not claimed and not ready:
                if not (await self._store.work.search()).items or not await self._store.work.open_classes():
                    return
                self._clock.ahead += 2.0

    async def _run(self, record: str, fence: int) -> None:
        item = await self._store.work.get(record)
        assert item is not None
        results = [one async for page in AwaitedResults(self._store.work, item) for one in page]
        seen, good = len(results), sum(one.status is ResultStatus.SUCCESS for one in results)
        self._hook.around(Call("effect", RAN), partial(self._note, item, seen, good))
        given = follow_ups(self._plan["mode"], item.kind)
        items = items_of(Origin(item, self._clock.wall()), given) if given else ()
        if self._plan["flaw"] == EARLY and items:
            for one in items:
                name = f"{one.id}-{uuid4().hex[:6]}"
                await self._store.work.enqueue(
                    [structs.replace(one, id=name, extra=structs.replace(one.extra, parent=""))]
                )
            items = ()
        result = structs.replace(
            unrun_result(ExecAssignment(item.id, item.id, Job(item.kind)), ResultStatus.SUCCESS, ErrorCode.none, ""),
            error_code=None,
        )
        follow = FollowUps(items, SubmissionRules(), self._submitted, lambda _: (WorkDone(), ())) if items else None
        done = WorkDone(encode(result).decode())
        await self._store.work.settle([Settlement(item.id, self._owner, fence, done, follow_ups=follow)])

    def _submitted(self, item: WorkItem) -> list[Any]:
        return self._journal.entries([submitted_event(item, self._clock.wall())])

    def _note(self, item: WorkItem, seen: int, good: int) -> None:
        file = os.open(self._folder / RAN, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, json.dumps([item.kind, item.id, seen, good]).encode() + b"\n")
        finally:
            os.close(file)


async def lived(
    open_store: Callable[[AheadClock], Any], folder: Path, plan: Plan, hook: Hook, *, is_second: bool
) -> Any:
    """One life: submit the parent, and do all there is to do. The second one says what is left."""
    waiting.AT_ONCE = 2 if plan["mode"] == "a gather in parts" else 200
    clock = AheadClock()
    clock.ahead = 200.0 if is_second else 0.0  # what the first held is free then
    store = await open_store(clock)
    both = Both(store, clock, folder, plan, "second" if is_second else "first", hook)
    await both.submit()
    await both.work()
    left = await left_behind(store, folder) if is_second else None
    if is_second and isinstance(store, JetStreamStore):
        await store.connection.api(f"STREAM.DELETE.{store.names.state}")
    await store.close()
    return left


async def left_behind(store: Store, folder: Path) -> dict[str, Any]:
    items = (await store.work.search(limit=500)).items
    events = await store.audit.read(AuditQuery(event_type="submitted"))
    lines = (folder / RAN).read_text().splitlines()
    return {
        "items": {one.id: one.state for one in items if not one.id.startswith("earlier-")},
        "submitted": [one.entry.work_id for one in events],
        "ran": [json.loads(line) for line in lines],
        "whole": not await store.audit.verify(),
    }


def on_nats(plan: Plan) -> bool:
    return str(plan["scenario"]).startswith("nats:")


def one(past: Path, folder: Path, plan: Plan) -> Life:
    """One death, and the life after it."""
    name = f"following-{uuid4().hex[:12]}"

    def open_nats(clock: AheadClock) -> Any:
        return JetStreamStore.open(plan["scenario"], clock, name=name, has_server_time=False)

    def open_file(opener: Any, inline: bool, clock: AheadClock) -> Any:
        return SqliteStore(folder / "state.db", clock, opener=opener, inline=inline).start()

    if plan["scenario"] != "new" and not on_nats(plan):
        if plan["scenario"] == "interrupted":
            shutil.copy(past / "state.db-wal", folder)
        shutil.copy(past / ("state.db" if plan["scenario"] == "interrupted" else "closed.db"), folder / "state.db")

    async def first(say: Say) -> None:
        hook = hook_of(plan)
        if on_nats(plan):
            hook_network(hook)
            await lived(open_nats, folder, plan, hook, is_second=False)
        else:
            disk = FaultyDisk(hook, lazy=True)
            opener = disk.opener(autocheckpoint=SCENARIOS[plan["scenario"]])
            await lived(partial(open_file, opener, False), folder, plan, hook, is_second=False)
        if isinstance(hook, Counter):
            say(["calls", [call.kind for call in hook.calls], len(hook.calls)])

    def second(_: list[Any]) -> Any:
        way = open_nats if on_nats(plan) else partial(open_file, FaultyDisk(Hook(), lazy=True).opener(), True)
        return lived(way, folder, plan, Hook(), is_second=True)

    return two_lives(plan, Fork(first), second)


if __name__ == "__main__":
    carry_out_plans(partial(one, make_past(Path(sys.argv[1]) / "past")))
