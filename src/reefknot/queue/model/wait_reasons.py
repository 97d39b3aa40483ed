"""
The reason why a job waits: `why_waits` returns a code, one sentence and the remedy.

It is the only place that decides this: the command line, the pages, the HTTP API, `doctor` and the alerts show its
answers. The facts can be read from the store by any process: the job's record, the reports of running systems, and the
state of sources and keys. Times are seconds from now.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from shlex import quote
from typing import Any

from msgspec import Struct

from reefknot.core.limits import LimitRule
from reefknot.queue.model.results import WaitsFor
from reefknot.queue.model.routing import WorkerState
from reefknot.queue.model.source_health import SourceCondition

MOST_NAMED = 5
LONGEST_ERROR = 160


class WaitCode(StrEnum):
    """Cause for which a job waits. Programs compare codes; the sentence is for people."""

    NO_SYSTEM = "no_system"
    NO_ROUTER = "no_router"
    NO_WORKER = "no_worker"
    NO_CLASS = "no_class"
    NO_TYPE = "no_type"
    PAUSED = "paused"
    DRAINING = "draining"
    OWNER_GONE = "owner_gone"
    OWNER_SILENT = "owner_silent"
    UNACKNOWLEDGED = "unacknowledged"
    POOL_FULL = "pool_full"
    TENANT_TURN = "tenant_turn"
    SCHEDULED = "scheduled"
    OTHER_WORK = "other_work"
    RETRY = "retry"
    RATE_LIMITED = "rate_limited"
    QUEUE_PAUSED = "queue_paused"
    LIMITED = "limited"
    THROTTLED = "throttled"
    DESTINATION_DOWN = "destination_down"
    KEY_HELD = "key_held"
    RUNS_ALONE = "runs_alone"
    PUT_OFF = "put_off"
    SOURCE_PAUSED = "source_paused"
    SOURCE_COOLING = "source_cooling"
    SOURCE_RESTING = "source_resting"
    SOURCE_PROBED = "source_probed"
    SOURCE_BUSY = "source_busy"
    NO_SYNC = "no_sync"
    QUARANTINED = "quarantined"
    SOON = "soon"


class Wait(Struct, frozen=True):
    """The answer about one job: the cause, one sentence that states it, and what to do."""

    code: WaitCode
    text: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.text}; {self.remedy}"


# ---- facts -----------------------------------------------------------------------------------------------------------


class PoolFacts(Struct, frozen=True):
    """The slots of one resource class of a worker."""

    active: int
    capacity: int


class WorkerFacts(Struct, frozen=True):
    """
    A running worker as it reports itself. `types` are the steps that it knows, None where it does not report them.
    """

    name: str
    state: WorkerState = WorkerState.RUNNING
    pools: Mapping[str, PoolFacts] = {}
    types: frozenset[str] | None = None
    throttled: tuple[str, ...] = ()
    """Destinations whose retries are throttled."""


class HeldLimit(Struct, frozen=True):
    """A limit of the fleet, and what its router holds: by key, what `RouterLimits.snapshot` tells of it."""

    rule: LimitRule
    held: Mapping[str, Mapping[str, Any]] = {}


class FleetFacts(Struct, frozen=True):
    """The routers, workers and sources of the running systems that take any work."""

    routers: int = 0
    workers: tuple[WorkerFacts, ...] = ()
    sources: frozenset[str] = frozenset()
    """Sources that a running system syncs."""
    unanswered: Mapping[str, tuple[str, float]] = {}
    """By record: the worker that it was sent to without an ack, and for how long."""
    is_shared: bool = False
    """Whether a router also sends to workers that do not report themselves."""
    limits: tuple[HeldLimit, ...] = ()

    def named(self, name: str) -> WorkerFacts | None:
        return next((one for one in self.workers if one.name == name), None)

    def of_class(self, pool: str) -> list[WorkerFacts]:
        """The workers of a class; all of them when the class is not known."""
        return [one for one in self.workers if pool in one.pools or not pool]


class SourceFacts(Struct, frozen=True):
    """A source at this moment. `opens_in` is the time until its jobs may begin again."""

    name: str
    condition: SourceCondition = SourceCondition.HEALTHY
    opens_in: float | None = None
    why: str = ""
    """The limit that it asked for, or who paused it and why."""
    running: int = 0


class KeyFacts(Struct, frozen=True):
    """An idempotency key that another owner holds. `until` is the time until its lease ends."""

    key: str
    owner: str
    until: float | None = None


class PauseFacts(Struct, frozen=True):
    """The pause of a job type or a tenant, in words for people. `until` is the time until its end."""

    what: str
    name: str
    by: str = ""
    why: str = ""
    until: float | None = None


class LimitFacts(Struct, frozen=True):
    """The limit that a router holds a job for: how much else waits, and the time until the next start."""

    name: str
    text: str
    place: str
    waiting: int | None = None
    next_in: float | None = None


class JobFacts(Struct, frozen=True, kw_only=True):
    """The record of a job that waits, or that a silent process holds."""

    record: str
    kind: str
    pool: str
    """The class whose slots run it; empty when it is not known."""
    worker: str = ""
    """The worker whose queue it is in; empty when no worker has accepted it."""
    holder: str = ""
    """The process that has claimed it: a worker or a router, by name; empty when none has."""
    is_holder_gone: bool = False
    silent_for: float | None = None
    """How long the holder has been silent, if it is not known whether it is gone or alive."""
    lease_left: float = 0.0
    due_in: float = 0.0
    is_scheduled: bool = False
    reason: str = ""
    attempts: int = 0
    max_attempts: int | None = None
    error: str = ""
    is_rate_limited: bool = False
    is_alone: bool = False
    """Whether it may have killed the process that ran it, and so runs alone."""
    key: KeyFacts | None = None
    tenant: str = ""
    ahead: int | None = None
    """Jobs whose turn comes before it; None when they were not counted."""
    ahead_of_tenant: int = 0
    destination: str = ""
    """The destination of its step whose retries are throttled, where it is known."""
    waits_for: WaitsFor | None = None
    """The destination that is down and that it waits for."""
    is_quarantined: bool = False
    pause: PauseFacts | None = None
    limit: LimitFacts | None = None
    awaited: "AwaitedFacts | None" = None
    """The other jobs that it waits for."""


class AwaitedFacts(Struct, frozen=True):
    """The jobs that a job waits for: the number of all, the number left, and the first of these."""

    number: int
    left: int
    name: str = ""
    tenant: str = ""
    is_quarantined: bool = False


# ---- the answer ------------------------------------------------------------------------------------------------------


def why_waits(job: JobFacts, fleet: FleetFacts, source: SourceFacts | None = None) -> Wait:
    """The cause why the job does not run now; of several, the one to remove first."""
    if job.is_quarantined:
        error = f"; the last failure: {_cut(job.error)}" if job.error else ""
        remedy = (
            "fix the cause, then `reefknot quarantine requeue ID`; or give it up with `reefknot quarantine discard ID`"
        )
        return Wait(WaitCode.QUARANTINED, f"it waits for a decision of an operator ({job.reason}){error}", remedy)
    if job.silent_for is not None:
        text = f"{job.holder} holds it and has been silent for {span(job.silent_for)}; its lease ends"
        text += f" in {span(job.lease_left)}, then it goes on elsewhere"
        remedy = f"look at the host and the log of {job.holder}; `reefknot doctor` tells whether its process is gone"
        return Wait(WaitCode.OWNER_SILENT, text, remedy)
    if source is not None:
        return _at_source(job, fleet, source)
    if job.pause is not None:
        return _paused(job.pause)
    later = _put_off(job, fleet)
    if later is not None:
        return later
    if job.limit is not None and not job.worker:
        return _limited(job.limit)
    return _at_worker(job, fleet) if job.worker else _at_router(job, fleet)


def _paused(pause: PauseFacts) -> Wait:
    subject, why = f"the {pause.what} {pause.name}", f" ({_cut(pause.why)})" if pause.why else ""
    by, until = f" by {pause.by}" if pause.by else "", f" for {span(pause.until)}" if pause.until is not None else ""
    remedy = f"resume it with `reefknot queue resume --{pause.what} {quote(pause.name)}`"
    return Wait(WaitCode.QUEUE_PAUSED, f"{subject} is paused{by}{until}{why}", remedy)


def _limited(limit: LimitFacts) -> Wait:
    place = f"; {limit.place}" if limit.place else ""
    text = f"it waits for the limit {limit.name} ({limit.text}{place})"
    if limit.waiting and limit.waiting > 1:
        text += f", as {limit.waiting} jobs do"
    if limit.next_in is not None:
        text += f"; the next one starts in {span(limit.next_in)}"
    where = f" in {limit.place}" if limit.place else ""
    remedy = "waiting is right: it keeps its place and spends nothing; "
    remedy += f"or raise the limit{where}, then `reefknot router reload`"
    return Wait(WaitCode.LIMITED, text, remedy)


def _put_off(job: JobFacts, fleet: FleetFacts) -> Wait | None:
    """The answer about a job that is due later, or waits for a key; None when it is due."""
    if job.key is not None:
        until = "" if job.key.until is None else f", whose lease ends in {span(job.key.until)}"
        text = f"the idempotency key {job.key.key} is held by {job.key.owner}{until}"
        remedy = f"it goes on once the key is free; `reefknot idempotency show {quote(job.key.key)}` tells its state"
        return Wait(WaitCode.KEY_HELD, text, remedy)
    if job.awaited is not None and job.awaited.left:
        return _other_work(job.awaited, has_router=fleet.routers > 0)
    if job.due_in <= 0:
        return None
    again = f"in {span(job.due_in)}"
    if job.is_scheduled:
        text = f"it is scheduled for later and is due {again}"
        remedy = "nothing to do; `reefknot job cancel` cancels it"
        return Wait(WaitCode.SCHEDULED, text, remedy)
    if job.is_alone:
        text = f"a process died while it ran, so it runs alone; it is tried again {again}"
        return Wait(WaitCode.RUNS_ALONE, text, "nothing to do while other jobs end; its history tells of the crashes")
    if job.waits_for is not None:
        since = datetime.fromtimestamp(job.waits_for.since / 1000, UTC)
        down = f"destination {job.waits_for.destination} has been down since {since:%Y-%m-%d %H:%M:%S} UTC"
        text = f"{down}; next probe {again}"
        remedy = "repair the destination: jobs that wait for it spend no attempts; `reefknot top` names open breakers"
        return Wait(WaitCode.DESTINATION_DOWN, text, remedy)
    if not job.attempts:
        text = f"it was put off ({job.reason})" if job.reason else "it was put off"
        return Wait(WaitCode.PUT_OFF, f"{text} and is due {again}", "nothing to do; it continues by itself")
    return _retry(job, fleet, again)


def _other_work(awaited: AwaitedFacts, *, has_router: bool) -> Wait:
    name, of = quote(awaited.name), f" of {awaited.number}" if awaited.number > 1 else ""
    text = f"it waits for {awaited.left}{of} jobs" if of else "it waits for another job"
    idle = "no router is running, start a system with `reefknot up`"
    if not awaited.name:
        remedy = "nothing to do; they begin as there is room" if has_router else idle
        return Wait(WaitCode.OTHER_WORK, text, remedy)
    tenant = f" --tenant {quote(awaited.tenant)}" if awaited.tenant else ""
    if awaited.is_quarantined:
        remedy = (
            f"fix the cause, then `reefknot quarantine requeue {name}{tenant}`; or give that one up with "
            f"`reefknot quarantine discard {name}{tenant}`"
        )
        return Wait(WaitCode.OTHER_WORK, f"{text}: {awaited.name}, which is in quarantine", remedy)
    remedy = f"nothing to do; it goes on when they end: `reefknot job show {name}{tenant}`" if has_router else idle
    return Wait(WaitCode.OTHER_WORK, f"{text}{', the first of them' if of else ','} {awaited.name}", remedy)


def _retry(job: JobFacts, fleet: FleetFacts, again: str) -> Wait:
    most = "" if job.max_attempts is None else f" of {job.max_attempts}"
    error = f"; the last one failed: {_cut(job.error)}" if job.error else ""
    text = f"attempt {job.attempts + 1}{most} begins {again}{error}"
    worker = fleet.named(job.worker)
    if job.is_rate_limited:
        remedy = "its destination limits the rate: send it less, or raise its limit; waiting is right"
        return Wait(WaitCode.RATE_LIMITED, f"its destination asked to wait; {text}", remedy)
    if worker is not None and job.destination in worker.throttled:
        text = f"retries of {job.destination} are throttled, because most of its calls fail; {text}"
        return Wait(WaitCode.THROTTLED, text, "repair the destination; `reefknot top --json` shows its tokens")
    return Wait(WaitCode.RETRY, text, "nothing to do if the error passes; otherwise fix its cause, or cancel the job")


def _at_router(job: JobFacts, fleet: FleetFacts) -> Wait:
    """The answer about a job that no worker has accepted."""
    if not fleet.routers:
        return _no_router("no router is running, so no worker is given this job") if fleet.workers else _no_system()
    if job.is_holder_gone:
        text = f"{job.holder}, the router that had it, died; another router takes it over within seconds"
        return Wait(WaitCode.OWNER_GONE, text, "look again; `reefknot router status` lists the routers")
    if job.record in fleet.unanswered:
        return _unacknowledged(*fleet.unanswered[job.record])
    if not fleet.workers and not fleet.is_shared:
        return _no_worker("no worker is running")
    having = fleet.of_class(job.pool)
    if not having and not fleet.is_shared:
        return _no_class(job.pool, fleet)
    if having and all(one.types is not None and job.kind not in one.types for one in having):
        text = f"no running worker of the class {job.pool} knows the type {job.kind}"
        remedy = "start a worker with the module of this step: `reefknot worker start --module NAME`"
        return Wait(WaitCode.NO_TYPE, text, remedy)
    return _stopped(having, f"of the class {job.pool}") or _full(job, having, f"the class {job.pool}") or _soon(job)


def _at_worker(job: JobFacts, fleet: FleetFacts) -> Wait:
    """The answer about a job in the queue of a worker."""
    worker = fleet.named(job.worker)
    if worker is None and not fleet.routers and not fleet.workers:
        return _no_system()
    if worker is None and not fleet.routers:
        return _no_router(f"{job.worker}, which had it, is gone, and no router is running to give it to another worker")
    if worker is None or job.is_holder_gone:
        text = f"the process of {job.worker} that had it is gone; it goes on at a living worker within seconds"
        remedy = "look again; if it stays, `reefknot worker list` shows whether a worker has its class"
        return Wait(WaitCode.OWNER_GONE, text, remedy)
    if job.is_alone:
        text = "a process died while it ran, so it waits until it can run alone"
        return Wait(WaitCode.RUNS_ALONE, text, "nothing to do while other jobs end; its history tells of the crashes")
    return _stopped([worker], "") or _full(job, [worker], f"{job.pool} at {worker.name}") or _soon(job)


def _stopped(workers: list[WorkerFacts], which: str) -> Wait | None:
    """The answer when all of these workers are paused or draining; else None."""
    if not workers or any(one.state is WorkerState.RUNNING for one in workers):
        return None
    is_paused = any(one.state is WorkerState.PAUSED for one in workers)
    names, word = [one.name for one in workers], "paused" if is_paused else "draining"
    every = f"every worker {which} is {word}: {_named(names)}" if len(names) > 1 else f"{names[0]} is {word}"
    resume = f"`reefknot worker resume {names[0]}`" if len(names) == 1 else "`reefknot worker resume`"
    if is_paused:
        return Wait(WaitCode.PAUSED, every, f"resume with {resume}")
    return Wait(WaitCode.DRAINING, every, f"start another worker, `reefknot worker start`, or end the drain, {resume}")


def _full(job: JobFacts, workers: list[WorkerFacts], where: str) -> Wait | None:
    """The answer when all slots of these workers are taken, or others come first; else None."""
    pools = [one.pools[job.pool] for one in workers if one.state is WorkerState.RUNNING and job.pool in one.pools]
    slots = sum(one.capacity for one in pools)
    if not slots or sum(one.active for one in pools) < slots:
        return None
    text = f"all {slots} slots of {where} are busy" if slots > 1 else f"the one slot of {where} is busy"
    if job.ahead:
        text += f", and {_jobs(job.ahead)} {'is' if job.ahead == 1 else 'are'} ahead of it"
    key = f"worker.queue.v2.resource_pools.{job.pool}.max_concurrency"
    remedy = f"wait, start another worker (`reefknot worker start`), or give it more slots ({key})"
    if job.ahead and job.tenant and 2 * job.ahead_of_tenant > job.ahead:
        text += f", {job.ahead_of_tenant} of them of its own tenant {job.tenant}: tenants take turns"
        return Wait(WaitCode.TENANT_TURN, text, remedy)
    return Wait(WaitCode.POOL_FULL, text, remedy)


def _soon(job: JobFacts) -> Wait:
    where = f"{job.worker} is about to begin it" if job.worker else "a router is about to send it to a worker"
    return Wait(WaitCode.SOON, where, "look again in a second; if it stays so, see `reefknot doctor`")


def _unacknowledged(worker: str, seconds: float) -> Wait:
    to = worker or "the subject that workers share"
    text = f"it was sent to {to} {span(seconds)} ago and is not acknowledged yet"
    remedy = f"a router sends it again; if that goes on, look at the log of {worker or 'the workers that listen there'}"
    return Wait(WaitCode.UNACKNOWLEDGED, text, remedy)


def _at_source(job: JobFacts, fleet: FleetFacts, source: SourceFacts) -> Wait:
    """The answer about a job of a source."""
    name, opens = source.name, "" if source.opens_in is None else f" for {span(source.opens_in)}"
    why = f" ({_cut(source.why)})" if source.why else ""
    match source.condition:
        case SourceCondition.PAUSED:
            text, remedy = f"the source {name} is paused{why}", f"resume it with `reefknot source resume {quote(name)}`"
            return Wait(WaitCode.SOURCE_PAUSED, text, remedy)
        case SourceCondition.COOLING:
            remedy = "waiting is right: it limits the rate, and that spends no attempt"
            return Wait(WaitCode.SOURCE_COOLING, f"the source {name} cools{opens}{why}", remedy)
        case SourceCondition.RESTING:
            text = f"the source {name} does not answer and rests{opens}, then one job tries it{why}"
            return Wait(
                WaitCode.SOURCE_RESTING, text, f"repair the source; `reefknot source test {quote(name)}` tries it now"
            )
        case _:
            pass
    if name not in fleet.sources:
        text = f"no running system syncs the source {name}"
        return Wait(WaitCode.NO_SYNC, text, "start one whose configuration has it: `reefknot up`")
    later = _put_off(job, fleet)
    if later is not None:
        return later
    if source.condition is SourceCondition.PROBING:
        text = f"the source {name} did not answer, and one job tries whether it is back"
        return Wait(WaitCode.SOURCE_PROBED, text, "wait for the outcome; `reefknot source list` shows it")
    if source.running:
        text = f"{_jobs(source.running)} of the source {name} {'runs' if source.running == 1 else 'run'}"
        return Wait(WaitCode.SOURCE_BUSY, text, f"wait, or raise sources.{name}.max_concurrency")
    return Wait(WaitCode.SOON, "it is about to begin", "look again in a second; if it stays so, see `reefknot doctor`")


# ---- work that no part serves ----------------------------------------------------------------------------------------


class Unserved(Struct, frozen=True):
    """Jobs that wait for a part of the system that is not running: how many, why, and what to do."""

    code: WaitCode
    jobs: int
    text: str
    remedy: str


def unserved(waiting: Mapping[str, int], left: int, fleet: FleetFacts) -> list[Unserved]:
    """
    The missing parts that due jobs wait for: a router, any worker, or a worker of their class.

    `waiting` has the number of due jobs that no worker has accepted, by class; `left` is the number of jobs in the
    queues of workers that no longer run, which only a router can bring back.
    """
    found, number = [], sum(waiting.values())
    if number + left and not fleet.routers and not fleet.workers:
        return [_counted(number + left, _no_system())]
    if number + left and not fleet.routers:
        found.append(_counted(number + left, _no_router("no router is running, so no worker is given any")))
    if fleet.is_shared:
        return found
    if number and not fleet.workers:
        found.append(_counted(number, _no_worker("no worker is running")))
        return found
    lacking = {pool: jobs for pool, jobs in waiting.items() if not fleet.of_class(pool)}
    return found + [_counted(jobs, _no_class(pool, fleet)) for pool, jobs in sorted(lacking.items())]


def _counted(number: int, wait: Wait) -> Unserved:
    text = f"{_jobs(number)} {'waits' if number == 1 else 'wait'}: {wait.text}"
    return Unserved(wait.code, number, text, wait.remedy)


# ---- sentences -------------------------------------------------------------------------------------------------------


def _no_system() -> Wait:
    return Wait(WaitCode.NO_SYSTEM, "no system is running, neither router nor worker", "start one with `reefknot up`")


def _no_router(text: str) -> Wait:
    return Wait(
        WaitCode.NO_ROUTER, text, "start one with `reefknot up`, or `reefknot router start` in addition to the workers"
    )


def _no_worker(text: str) -> Wait:
    return Wait(
        WaitCode.NO_WORKER, text, "start one with `reefknot up`, or `reefknot worker start` in addition to the router"
    )


def _no_class(pool: str, fleet: FleetFacts) -> Wait:
    there = sorted({name for one in fleet.workers for name in one.pools})
    text = f"no running worker has the class {pool}; there are: {_named(there)}"
    remedy = f"start a worker with the pool {pool} in its configuration (worker.queue.v2.resource_pools)"
    return Wait(WaitCode.NO_CLASS, text, remedy)


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return f"{', '.join(listed[:MOST_NAMED])}{more}"


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def span(seconds: float) -> str:
    """A time in words, in the unit that people would choose."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s" if seconds >= 1 or seconds <= 0 else "1 s"
