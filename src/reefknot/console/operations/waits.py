"""
`waits_of`: for each job that waits, why it does and what to do.

The facts come from the store: the records of the jobs, what running systems report, sources, keys, and the jobs ahead.
The answers are those of `reefknot.queue.model.wait_reasons`. What is read is bounded, whatever the store holds, and
nothing is read for a list of jobs that do not wait.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from reefknot.idempotency.model import KeyState
from reefknot.ingest.sources import SourceRecords
from reefknot.queue.family import awaited_by, named
from reefknot.queue.model.follow_ups import children_ids
from reefknot.queue.model.results import waits_for
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.wait_reasons import (
    AwaitedFacts,
    FleetFacts,
    JobFacts,
    KeyFacts,
    LimitFacts,
    PauseFacts,
    SourceFacts,
    Wait,
    WaitCode,
    why_waits,
)
from reefknot.queue.model.work import (
    ROUTER,
    SCHEDULED,
    WorkItem,
    WorkState,
    assignment_and_tenant,
    is_ingestion,
    is_suspect,
    visible_state,
    worker_of,
)
from reefknot.queue.pauses import Pause, read_pauses
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.presence import fleet_of, known_pool, living_systems, serving, silent_systems

if TYPE_CHECKING:
    from reefknot.console.operations.job_filters import Now
    from reefknot.core.redaction import Redactor
    from reefknot.core.time import Moment
    from reefknot.queue.presence import Status
    from reefknot.stores.port import Store

MOST_CHILDREN_SHOWN = 20
MOST_AHEAD = 1000
"""Jobs of one queue that are looked at to count those ahead of another."""
_HELD_KEY = re.compile(r"key (['\"])(?P<key>.*)\1 is in progress at (?P<owner>.*)", re.DOTALL)


async def family_fields(store: Store, item: WorkItem, now: Now, redactor: Redactor) -> dict[str, Any]:
    """The parent of a job, the first of its children and their number by state, and the jobs that it waits for."""
    children = list((await named(store.work, children_ids(item))).values())
    states = Counter(visible_state(one, now.moment, gone=now.gone).value for one in children)
    after = list((await named(store.work, item.extra.after)).values())
    return {
        "parent": redactor.values_out_of(assignment_and_tenant(item.extra.parent)[0]) or None,
        "children": [_relative(one, now, redactor) for one in children[:MOST_CHILDREN_SHOWN]],
        "children_by_state": dict(states.most_common()),
        "after": [_relative(one, now, redactor) for one in after[:MOST_CHILDREN_SHOWN]],
    }


def _relative(item: WorkItem, now: Now, redactor: Redactor) -> dict[str, str]:
    state = visible_state(item, now.moment, gone=now.gone)
    return {"id": redactor.values_out_of(item.assignment_id), "type": item.kind, "state": state.value}


class Look(NamedTuple):
    """The running systems at one moment, and the owners whose processes have ended by then."""

    moment: Moment
    gone: Sequence[str]
    living: Mapping[str, Status]
    """By the mark of their process."""
    silent: Mapping[str, Status]
    fleet: FleetFacts
    private: Mapping[str, FleetFacts]
    """The fleets of systems that run only their own work, by the mark of their process."""
    pauses: Sequence[Pause]


async def waits_of(
    store: Store,
    items: Sequence[WorkItem],
    moment: Moment,
    gone: Sequence[str],
    *,
    most: Mapping[str, int] | None = None,
) -> dict[str, Wait]:
    """
    The answer for each of these jobs that waits, and for one that a silent process holds, by the id of its record.

    `most` has the attempts that a job gets at most, where they are known.
    """
    asked = [item for item in items if _may_wait(item, moment, gone)]
    if not asked:
        return {}
    look, sources = await _look(store, moment, gone), await _sources(store, asked, moment)
    queues: dict[str, list[WorkItem]] = {}
    found = {}
    for item in asked:
        job = await _facts(store, item, look, (most or {}).get(item.id))
        if job is None:
            continue
        fleet = _fleet(item, look)
        wait = why_waits(job, fleet, sources.get(item.source) if is_ingestion(item) else None)
        if wait.code is WaitCode.POOL_FULL:
            if item.resource_class not in queues:
                queues[item.resource_class] = await _queue(store, item.resource_class)
            wait = why_waits(_with_ahead(job, item, queues[item.resource_class], look), fleet)
        found[item.id] = wait
    return found


def _may_wait(item: WorkItem, moment: Moment, gone: Sequence[str]) -> bool:
    state = visible_state(item, moment, gone=gone)
    return state in (WorkState.PENDING, WorkState.QUARANTINED) or item.state is WorkState.RUNNING


async def _look(store: Store, moment: Moment, gone: Sequence[str]) -> Look:
    systems = await living_systems(store)
    own = [one for one in systems if one.get("own_work_only")]
    return Look(
        moment,
        gone,
        {one.get("process", ""): one for one in systems},
        {one.get("process", ""): one for one in await silent_systems(store)},
        fleet_of(serving(systems)),
        {one.get("process", ""): fleet_of([one]) for one in own},
        await read_pauses(store),
    )


def _fleet(item: WorkItem, look: Look) -> FleetFacts:
    """The fleet that serves a job: that of all, or that of the one system whose own work it is."""
    owner, worker = item.owner.rpartition("@")[2], worker_of(item.resource_class)
    if owner in look.private:
        return look.private[owner]
    return next((one for one in look.private.values() if worker and one.named(worker) is not None), look.fleet)


async def _facts(store: Store, item: WorkItem, look: Look, most: int | None) -> JobFacts | None:
    """The facts about one job; None for one that really runs."""
    now, worker = look.moment, worker_of(item.resource_class)
    is_claimed = item.state is WorkState.RUNNING
    process = item.owner.rpartition("@")[2] if is_claimed and "@" in item.owner else ""
    is_gone = item.owner in look.gone
    lease_left = (item.lease_until - now.steady) / 1000
    is_leased = 0 < lease_left <= item.lease_ms / 1000
    silent_for = None
    if process and not is_gone and process not in look.living and is_leased:
        last = look.silent.get(process)
        silent_for = item.lease_ms / 1000 - lease_left if last is None else (now.wall - last["reported_at"]) / 1000
    key = await _key(store, item, look)
    is_quarantined = item.state is WorkState.QUARANTINED
    waits = is_quarantined or visible_state(item, now, gone=look.gone) is WorkState.PENDING
    if not waits and silent_for is None and key is None:
        return None
    failure = _failure(item)
    return JobFacts(
        record=item.id,
        kind=item.kind,
        pool=known_pool(item),
        worker=worker,
        holder=item.owner.partition("#")[0] if is_claimed else "",
        is_holder_gone=is_claimed and (is_gone or not is_leased),
        silent_for=None if silent_for is None else max(0.0, silent_for),
        lease_left=lease_left,
        due_in=0.0 if is_claimed else (item.due_at - now.wall) / 1000,
        is_scheduled=item.reason == SCHEDULED,
        reason=item.reason,
        attempts=item.attempts,
        max_attempts=most,
        error=str(failure.get("message") or failure.get("code") or ""),
        is_rate_limited=item.budget.failure_type == "rate_limited",
        is_alone=is_suspect(item),
        key=key,
        tenant=item.tenant_id or "",
        destination=_destination(item, look),
        waits_for=waits_for(item),
        is_quarantined=is_quarantined,
        pause=_pause(item, look),
        limit=_limit(item, look),
        awaited=await _awaited(store, item),
    )


def _pause(item: WorkItem, look: Look) -> PauseFacts | None:
    """The pause of the job's type or tenant."""
    now, tenant = look.moment.wall, item.tenant_id or ""
    found = next((one for one in look.pauses if one.holds(item.kind, tenant, now)), None)
    if found is None or is_ingestion(item):
        return None
    left = None if found.until is None else (found.until - now) / 1000
    return PauseFacts(found.what, found.name, found.who, found.why, left)


def _limit(item: WorkItem, look: Look) -> LimitFacts | None:
    """The limit that a router holds the job for; of a job in a list, whose inputs are not read, one that may be it."""
    if item.resource_class != ROUTER:
        return None
    inputs = _inputs(item)
    for one in _fleet(item, look).limits:
        rule = one.rule
        if not one.held or not rule.fits(item.kind):
            continue
        if rule.per == "destination":
            text = item.payload.decode("utf-8", "replace")
            key = next((key for key in one.held if key.partition(" ")[2].partition(":")[0] in text), None)
        else:
            key = rule.key_of(item.tenant_id or "", "", inputs)
        about = one.held.get(key or "")
        if about is not None:
            return LimitFacts(key or rule.name, str(rule), rule.place, about["waiting"], about["next_in_s"])
        if not item.payload and rule.per not in ("", "tenant"):
            return LimitFacts(rule.name, str(rule), rule.place)
    return None


def _inputs(item: WorkItem) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(item.payload or b"{}")["job"]["payload"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


async def _awaited(store: Store, item: WorkItem) -> AwaitedFacts | None:
    """The other jobs that a job waits for which no worker has."""
    if not item.extra.waits or item.resource_class != ROUTER or item.state is WorkState.QUARANTINED:
        return None
    found = await awaited_by(store.work, item)
    if found.first is None:
        return AwaitedFacts(found.number, found.left)
    first, is_aside = found.first, found.first.state is WorkState.QUARANTINED
    return AwaitedFacts(found.number, found.left, first.assignment_id, first.tenant_id or "", is_aside)


def _failure(item: WorkItem) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(item.failure or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


async def _key(store: Store, item: WorkItem, look: Look) -> KeyFacts | None:
    """The key that the job waits for, as long as another owner holds it."""
    held = _HELD_KEY.fullmatch(item.reason)
    if held is None:
        return None
    record = await store.idempotency.get(held["key"])
    if record is None or record.state is not KeyState.IN_PROGRESS or record.owner != held["owner"]:
        return None
    left = max(0.0, (record.lease_until - look.moment.steady) / 1000)
    return KeyFacts(held["key"], _named_process(record.owner, look), left)


def _named_process(owner: str, look: Look) -> str:
    """The process that holds a key, by its workers where it is a system that runs."""
    process = owner.rpartition("@")[2]
    system = look.living.get(process)
    number = process.partition(".")[2].partition(".")[0]
    if system is None:
        return f"process {number}" if number.isdecimal() else owner
    names = ", ".join(one["worker_id"] for one in system["workers"])
    return f"{names} (pid {system['pid']} on {system['host']})"


def _destination(item: WorkItem, look: Look) -> str:
    """The destination with throttled retries that the job's inputs name; empty when none of them does."""
    names = {name for one in look.fleet.workers for name in one.throttled}
    text = item.payload.decode("utf-8", "replace")
    host = (name for name in names if name in text or (":" in name and name.rpartition(":")[0] in text))
    return next((name for name in names if item.kind in name), "") or next(host, "")


# ---- sources ---------------------------------------------------------------------------------------------------------


async def _sources(store: Store, items: Sequence[WorkItem], moment: Moment) -> dict[str, SourceFacts]:
    """The sources whose jobs are among these."""
    names = {item.source: item.resource_class for item in items if is_ingestion(item)}
    if not names:
        return {}
    records, counts = SourceRecords(store), (await store.work.snapshot()).counts
    await records.refresh()
    found = {}
    for name, resource_class in names.items():
        record, now = records.known(name), moment.wall
        condition, opens_at = record.health.condition(now), record.health.opens_at(now)
        why = record.health.cooling_reason if condition is SourceCondition.COOLING else ""
        if condition is SourceCondition.PAUSED and record.paused_by:
            why = f"by {record.paused_by}{f': {record.paused_because}' if record.paused_because else ''}"
        running = counts.get(resource_class, {}).get(WorkState.RUNNING, 0)
        opens_in = None if opens_at is None else (opens_at - now) / 1000
        found[name] = SourceFacts(name, condition, opens_in, why, running)
    return found


# ---- the jobs ahead --------------------------------------------------------------------------------------------------


async def _queue(store: Store, resource_class: str) -> list[WorkItem]:
    """The oldest open jobs of a class."""
    return (await store.work.search(WorkFilter(classes=(resource_class,)), oldest_first=True, limit=MOST_AHEAD)).items


def _with_ahead(job: JobFacts, item: WorkItem, queue: Sequence[WorkItem], look: Look) -> JobFacts:
    """The facts with the number of jobs whose turn comes first: of a higher priority, or older; at the router those
    that workers have accepted too."""
    now = look.moment.wall
    waiting = [one for one in queue if one.resource_class == ROUTER or one.state is WorkState.PENDING]
    same = [one for one in waiting if one.id != item.id and one.pool == item.pool and one.due_at <= now]
    first = [
        one for one in same if (-one.priority, one.created_at, one.id) < (-item.priority, item.created_at, item.id)
    ]
    at_workers = 0 if job.worker else _queued(look, job.pool)
    own = sum(one.tenant_id == item.tenant_id for one in first)
    return msgspec.structs.replace(job, ahead=len(first) + at_workers, ahead_of_tenant=own)


def _queued(look: Look, pool: str) -> int:
    """The jobs of a class that wait in the queues of workers."""
    able = serving(list(look.living.values()))
    found = [one["classes"].get(pool, {}).get("depth", 0) for system in able for one in system["workers"]]
    return sum(found)
