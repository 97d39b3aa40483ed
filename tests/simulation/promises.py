"""What must hold in every run, whatever went wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.audit.model import event as kinds
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditQuery, MultiChainLog
from reefknot.queue.model.messages import ExecResult, ResultStatus
from reefknot.queue.model.work import ENDED, WorkItem, WorkState, record_id
from reefknot.stores.memory import MemoryStore
from reefknot.stores.work_in_memory.items import group_of

if TYPE_CHECKING:
    from tests.simulation.world import World


def check_bounds(world: World) -> None:
    """At every moment: queues and tables hold to their sizes."""
    story = world.story
    is_slow = isinstance(world.store.audit, MultiChainLog)  # a report is on its way for longer; its slot goes on
    for member in world.workers:
        for pool in [] if member.part is None else member.part.pools.values():
            most = pool.rules.size + pool.slots
            if is_slow:
                most += pool.slots + 2 * pool.ahead()
            if pool.queue.depth + pool.reserved > most:
                story.broken.append(f"{member.name} {pool.name}: {pool.queue.depth} places of at most {most}")
            if pool.active > pool.slots:
                story.broken.append(f"{member.name} {pool.name}: {pool.active} of {pool.slots} slots")
            if pool.reserved < 0:
                story.broken.append(f"{member.name} {pool.name}: {pool.reserved} are entering")
    if isinstance(world.store, MemoryStore):
        queue = world.store.work.table
        counted = Counter(one for item in queue.items.values() if (one := group_of(item)) is not None)
        if counted != queue._open:
            story.broken.append(f"open work is {dict(counted)}, and is counted as {dict(queue._open)}")
    router = world.router.part
    if router is not None and len(router.table) > world.most_pending:
        story.broken.append(f"router: {len(router.table)} pending of at most {world.most_pending}")


async def check_at_the_end(world: World) -> None:
    """Nothing accepted is lost, one answer each, every end on record, and every decision comes out the same."""
    story = world.story
    for name in story.handed_in.keys() - story.results.keys():
        item = await world.store.work.get(record_id(name, story.handed_in[name].tenant_id))
        where = "not at a worker" if item is None else f"{item.state.value} in {item.resource_class} due {item.due_at}"
        story.broken.append(f"{name} has no result; {where}")
    bodies = [entry.entry.body async for entry in _all(world)]
    seen = replay(bodies)
    story.broken += [str(difference) for difference in seen.differences]
    if seen.rules_missing:
        story.broken.append(f"some of {seen.undecided_by} have rules that are not on record: {seen.rules_missing}")
    by_work: dict[str, list[kinds.AnyEvent]] = {}
    for body in bodies:
        event = kinds.decode(body)
        by_work.setdefault(event.work_id or "", []).append(event)
    for name, events in by_work.items():
        _check_attempts(world, name, events)
    for name, result in story.results.items():
        await _check_end(world, name, result, by_work.get(name, []))
    await _check_stored_ends(world, by_work)
    _check_published(world)
    mismatches = await world.store.audit.verify()
    story.broken += [f"the chain of events: {one}" for one in mismatches]


async def _all(world: World) -> Any:
    after = 0
    while True:
        page = await world.store.audit.read(AuditQuery(after=after, limit=500))
        for entry in page:
            yield entry
        if len(page) < 500:
            return
        after = page[-1].sequence


def _check_attempts(world: World, name: str, events: list[kinds.AnyEvent]) -> None:
    """Each attempt is on record once, and at most one of them is the last: a late owner's report does not count."""
    numbers = [event.attempt_number for event in events if isinstance(event, kinds.RetryAttempt)]
    ends = [
        event for event in events if isinstance(event, kinds.RetryExhausted | kinds.RetryRefused | kinds.RetryRecovered)
    ]
    if isinstance(world.store.audit, MultiChainLog):
        numbers.sort()  # the events of a process that died come into the log when another one has found them
    if numbers != sorted(set(numbers)):
        world.story.broken.append(f"{name} has the attempts {numbers} on record")
    if len(ends) > 1:
        world.story.broken.append(f"{name} ended {len(ends)} times on record")


async def _check_end(world: World, name: str, result: ExecResult, events: list[kinds.AnyEvent]) -> None:
    """The record tells how it ended, and the store agrees."""
    story = world.story
    item = await world.store.work.get(record_id(name, story.handed_in[name].tenant_id))
    seen = {type(event) for event in events}
    if result.status is ResultStatus.SUCCESS:
        if not any(isinstance(event, kinds.Admission) and event.status == "accepted" for event in events):
            story.broken.append(f"{name} succeeded and was never admitted on record")
        if result.retries_used and kinds.RetryRecovered not in seen:
            story.broken.append(f"{name} recovered after {result.retries_used} retries, and no event says so")
        if result.output != {"id": name}:
            story.broken.append(f"{name} got the output {result.output}")
        if not story.executions.get(name):
            story.broken.append(f"{name} succeeded without having run")
    elif not any(map(_is_an_end, events)) and not _is_too_late_everywhere(result, events):
        story.broken.append(f"{name} ended as {result.status} {result.error_code}, and no event says so")
    if item is not None:
        _check_item(world, item, result)


def _is_an_end(event: kinds.AnyEvent) -> bool:
    """One attempt that ran out of time may be followed by another; that is no end."""
    if isinstance(event, kinds.TimeoutOccurred):
        return event.whole
    return isinstance(
        event, kinds.RetryExhausted | kinds.RetryRefused | kinds.OperatorAction | kinds.Dropped | kinds.Quarantined
    )


def _is_too_late_everywhere(result: ExecResult, events: list[kinds.AnyEvent]) -> bool:
    """Whether no worker took it because of its deadline, and the last event of the router says so."""
    routed = [event for event in events if isinstance(event, kinds.Routing)]
    refused = bool(routed) and routed[-1].reason == "refused: would_miss_deadline"
    return refused and result.error_code == "SYSTEM_OVERLOAD"


async def _check_stored_ends(world: World, by_work: dict[str, list[kinds.AnyEvent]]) -> None:
    """Whatever a worker's work ended as in the store, an event of that kind tells it."""
    after = ""
    while True:
        page = (await world.store.work.search(after=after, limit=500)).items
        for item in page:
            events = by_work.get(item.assignment_id, [])
            if item.state is WorkState.QUARANTINED and not any(isinstance(one, kinds.Quarantined) for one in events):
                world.story.broken.append(f"{item.id} is quarantined ({item.reason}), and no event says so")
            ended = item.state in (WorkState.FAILED, WorkState.CANCELLED) and "@" in item.resource_class
            if ended and not any(map(_is_an_end, events)):
                world.story.broken.append(f"{item.id} is {item.state.value} ({item.reason}), and no event says so")
        if len(page) < 500:
            return
        after = page[-1].id


def _check_item(world: World, item: WorkItem, result: ExecResult) -> None:
    story = world.story
    if item.state not in ENDED and item.state is not WorkState.QUARANTINED:
        story.broken.append(f"{item.id} was answered with {result.status} and is {item.state.value} at its worker")
    succeeded = result.status is ResultStatus.SUCCESS
    if succeeded != (item.state is WorkState.SUCCEEDED) and item.assignment_id not in story.cancelled:
        story.broken.append(f"{item.id} was answered with {result.status} and ended as {item.state.value}")
    if item.attempts > 7:
        story.broken.append(f"{item.id} ran {item.attempts} attempts")


def _check_published(world: World) -> None:
    """All results that were ever sent for one assignment say the same."""
    said: dict[str, set[tuple[str, str | None]]] = {}
    for subject, body in world.sea.heard:
        if subject.endswith("result.v1"):
            result = msgspec.json.decode(body, type=ExecResult)
            said.setdefault(result.assignment_id, set()).add((result.status.value, result.error_code))
    for name, answers in said.items():
        if len(answers) > 1:
            world.story.broken.append(f"{name} was told {sorted(answers, key=str)}")
