"""Jobs as operators see them: list, show, cancel and retry. A job is an assignment with its state and its story."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from reefknot.console.operations.bulk import SILENT, BulkListener, BulkVerb, absent_job, change_jobs, located, named
from reefknot.console.operations.job_filters import JobChoice, JobFilter, Now, now_in, state_in_words
from reefknot.console.operations.job_notes import checkpoint_fields, kept_parts, log_fields, progress_fields
from reefknot.console.operations.operator import in_slices, polled
from reefknot.console.operations.values import ParameterUseError, check_limit, check_texts, one_of, time_text
from reefknot.console.operations.waits import family_fields, waits_of
from reefknot.errors import KeyConflictError, OperationError, QueueFullError
from reefknot.idempotency.model import header_key
from reefknot.queue.client import Client
from reefknot.queue.family import open_family
from reefknot.queue.model.message_schema import written_assignment
from reefknot.queue.model.messages import InvalidMessage, encode
from reefknot.queue.model.results import answer_of, assignment_of
from reefknot.queue.model.transitions import Requeue
from reefknot.queue.model.unique import NOT_UNIQUE, Unique
from reefknot.queue.model.work import (
    ROUTER,
    WorkItem,
    WorkState,
    assignment_and_tenant,
    can_retry,
    is_ingestion,
    is_over,
    record_id,
    visible_state,
)
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.presence import has_router, living_systems, unserved_work, visible_work
from reefknot.runtime.log import printable
from reefknot.runtime.seeds import new_id

if TYPE_CHECKING:
    from reefknot.audit.model.event import AnyEvent
    from reefknot.audit.port import AuditEntry, AuditLog, KeptEntry
    from reefknot.console.operations.operator import Operator
    from reefknot.core.redaction import Redactor
    from reefknot.queue.model.wait_reasons import Wait
    from reefknot.queue.port.work_queue import WorkSnapshot
    from reefknot.stores.port import Store

MOST_EVENTS = 100
MOST_FOUND = 50
"""The jobs of one id, one correlation or one trace that are shown."""
CANCEL_WAIT_S = 5.0
CANCEL_ALL_WAIT_S = 30.0
"""How long a chunk of jobs is waited for that routers were asked to cancel."""
CLOCKS_APART_MS = 60_000
"""How far the times of a job and of its events may lie apart."""
_OPEN = (WorkState.PENDING, WorkState.RUNNING)
_ORDERS = {"newest": False, "oldest": True}

# ---- fields ----------------------------------------------------------------------------------------------------------


def job_fields(item: WorkItem, now: Now, wait: Wait | None = None) -> dict[str, Any]:
    """The fields of a job that a list shows; `waiting` has why it waits and what to do."""
    state, now_ms = visible_state(item, now.moment, gone=now.gone), now.moment.wall
    waits = state is WorkState.PENDING
    is_lost = waits and item.state is WorkState.RUNNING and item.resource_class != ROUTER
    name, _, worker = item.resource_class.partition("@")
    gone = "its orchestrator is gone" if is_ingestion(item) else "its worker is gone"
    return {
        "id": item.assignment_id,
        "tenant_id": item.tenant_id,
        "type": item.kind,
        "state": state.value,
        "class": None if item.resource_class == ROUTER else name,
        "worker": worker or None,
        "attempts": item.attempts,
        "priority": item.priority,
        "reason": gone if is_lost else item.reason or None,
        "progress": progress_fields(item),
        "waiting": None if wait is None else msgspec.to_builtins(wait),
        "due_at": time_text(item.due_at) if waits else None,
        "due_in_s": max(0.0, (item.due_at - now_ms) / 1000) if waits else None,
        "deadline_at": time_text(item.deadline_at),
        "age_s": max(0.0, (now_ms - item.created_at) / 1000),
        "created_at": time_text(item.created_at),
        "updated_at": time_text(item.updated_at),
    }


def safe_job_fields(item: WorkItem, now: Now, redactor: Redactor, wait: Wait | None = None) -> dict[str, Any]:
    """The fields of a job in a list, without secrets. An id is for use: only configured secrets are taken out of it."""
    hidden: Any = redactor.tree(job_fields(item, now, wait))
    return {**hidden, **safe_ids(item, redactor)}


def safe_ids(item: WorkItem, redactor: Redactor) -> dict[str, str | None]:
    """The id and the tenant of a job, by which it is asked for."""
    tenant = item.tenant_id
    return {
        "id": redactor.values_out_of(item.assignment_id),
        "tenant_id": None if tenant is None else redactor.values_out_of(tenant),
    }


def job_details(item: WorkItem, redactor: Redactor) -> dict[str, Any]:
    """
    The fields of a job that a list leaves out.

    The result of an assignment is the stored one, else the answer to its caller. A job of a source has no caller.
    """
    names = ("correlation_id", "trace_id", "generation", "snoozes", "interruptions", "crashes")
    ingestion = is_ingestion(item)
    answer = answer_of(item) if item.result is None and not ingestion else None
    payload = encode(assignment_of(item)) if item.extra.gathers else item.payload  # without its children's
    return {
        **{name: redactor.tree(getattr(item, name)) for name in names},
        "source": item.source or None,
        "ingestion_job" if ingestion else "assignment": _decoded(payload or None, redactor),
        "failure": _decoded(item.failure, redactor),
        "result": _decoded(item.result if answer is None else encode(answer), redactor),
        "history": [
            {"at": time_text(entry.at), "what": entry.what, "why": redactor(entry.why), "who": entry.who}
            for entry in item.history
            if not (is_over(item) and entry.at > item.updated_at)  # due later than its end: that never came
        ],
    }


def _decoded(text: str | bytes | None, redactor: Redactor) -> Any:
    if text is None:
        return None
    try:
        return redactor.tree(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return redactor(text if isinstance(text, str) else text.decode("utf-8", "replace"))


# ---- counts and lists ------------------------------------------------------------------------------------------------


def counts_of(snapshot: WorkSnapshot) -> dict[str, Any]:
    """The number of jobs in each visible state, of those that no worker has accepted, and the age of the oldest due."""
    states = {state.value: 0 for state in WorkState}
    for counts in snapshot.counts.values():
        for state, number in counts.items():
            states[state.value] += number
    return {
        "states": states,
        "waiting_for_router": snapshot.counts.get(ROUTER, {}).get(WorkState.PENDING, 0),
        "oldest_due_s": snapshot.oldest_due_ms / 1000,
    }


async def job_counts(operator: Operator) -> dict[str, Any]:
    """The number of jobs in each visible state at this moment, and how long the oldest job has been due."""
    return counts_of(await visible_work(operator.store))


class JobQuery(JobFilter, frozen=True, kw_only=True):
    """A page of the list of jobs, as a person asks for it."""

    sort: str = "newest"
    limit: int = 50
    after: str = ""
    """The `next` of the page before."""

    def __post_init__(self) -> None:
        check_limit(self.limit)
        one_of("sort", self.sort, _ORDERS)
        JobFilter.__post_init__(self)

    @property
    def is_filtered(self) -> bool:
        """Whether there may be jobs that are on no page of this list."""
        return bool(self.filters())


async def list_jobs(operator: Operator, query: JobQuery) -> dict[str, Any]:
    """
    A page of jobs, and the number of all jobs in each state.

    With fewer jobs than asked for and a `next`, the search has reached its limit for one page; `next` continues it.
    """
    store, last = operator.store, unquote(query.after)
    now = await now_in(store)
    if last and await store.work.get(last) is None:
        text = f"there is no job {named(*assignment_and_tenant(last))} any more"
        raise OperationError(text, "not_found", advice="start again without", parameter="after")
    oldest_first = one_of("sort", query.sort, _ORDERS)
    page = await store.work.search(query.filter(now), after=last, limit=query.limit, oldest_first=oldest_first)
    waits = await waits_of(store, page.items, now.moment, now.gone)
    jobs = await in_slices(lambda item: safe_job_fields(item, now, operator.redactor, waits.get(item.id)), page.items)
    work = await store.work.snapshot(now.gone)
    lacking = msgspec.to_builtins(await unserved_work(store, await living_systems(store), work))
    return {"jobs": jobs, "next": quote(page.after) or None, **counts_of(work), "unserved": lacking}


async def find_jobs(operator: Operator, text: str) -> dict[str, Any]:
    """
    The jobs whose id, correlation id or trace id this is, of all tenants, each with the field that has it.

    `is_cut` says that there are more than are shown.
    """
    check_texts(text=text)
    store, now = operator.store, await now_in(operator.store)
    found, is_cut = dict[str, dict[str, Any]](), False
    for by, name in (("id", "assignment_id"), ("correlation", "correlation_id"), ("trace", "trace_id")):
        which = msgspec.structs.replace(WorkFilter(gone=tuple(now.gone)), **{name: text})
        page = await store.work.search(which, limit=MOST_FOUND)
        is_cut = is_cut or bool(page.after)
        for item in page.items:
            found.setdefault(item.id, {**safe_job_fields(item, now, operator.redactor), "found_by": by})
    return {"text": operator.redactor.values_out_of(text), "jobs": list(found.values()), "is_cut": is_cut}


# ---- one job ---------------------------------------------------------------------------------------------------------


class FoundJob(NamedTuple):
    """A job with its first audited events, and the moment of the look."""

    item: WorkItem
    kept: list[KeptEntry]
    now: Now
    wait: Wait | None = None
    checkpoint: dict[str, Any] | None = None
    family: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def fields(self, redactor: Redactor) -> dict[str, Any]:
        """Everything about the job but its events."""
        fields = safe_job_fields(self.item, self.now, redactor, self.wait)
        return {**fields, "checkpoint": self.checkpoint, **job_details(self.item, redactor), **self.family}


async def find_job(operator: Operator, job: str, tenant: str | None = None) -> FoundJob:
    """A job and its events; an unknown one is refused."""
    item, store = await _item(operator, job, tenant), operator.store
    kept, now = await _events(store.audit, item), await now_in(store)
    checkpoint = checkpoint_fields(operator, item, await kept_parts(store, item))
    family = await family_fields(store, item, now, operator.redactor)
    return FoundJob(item, kept, now, await _wait(store, item, kept, now), checkpoint, family)


async def _wait(store: Store, item: WorkItem, kept: list[KeptEntry], now: Now) -> Wait | None:
    """Why the job waits, if it does; the attempts that it gets at most are in the event of its last retry."""
    retries = [one.entry.body for one in kept if one.entry.event_type == "retry_attempt"]
    most = {item.id: number} if retries and (number := _retried(retries[-1]).max_attempts) else {}
    return (await waits_of(store, [item], now.moment, now.gone, most=most)).get(item.id)


async def show_job(operator: Operator, job: str, tenant: str | None = None) -> dict[str, Any]:
    """Everything about one job: state, attempts, history, audited events and result. Secrets are hidden."""
    found = await find_job(operator, job, tenant)
    return {**found.fields(operator.redactor), "events": _shown(found.kept, operator.redactor)}


async def job_logs(operator: Operator, job: str, tenant: str | None = None, after: int = 0) -> dict[str, Any]:
    """
    The lines that the steps of one job logged, behind line number `after`, and the state of the job.

    The job is read first: once it has ended, these are all of its lines.
    """
    item, store = await _item(operator, job, tenant), operator.store
    found, state = log_fields(operator, await kept_parts(store, item), after), await state_in_words(store, item)
    return {**safe_ids(item, operator.redactor), "state": state, "progress": progress_fields(item), **found}


async def job_story(operator: Operator, job: str, tenant: str | None = None) -> dict[str, Any]:
    """
    The whole story of one job for a timeline: its attempts, each with its decision and its wait, and its events.

    It is read from the first `MOST_EVENTS` events; `is_cut` says that there are more. A value that the events do not
    have is None: see `reefknot.console.operations.timelines`. Secrets are hidden.
    """
    from reefknot.console.operations.timelines import attempts_of, cancellation_of, key_of, lines_of, versions_of

    store, redactor, settings = operator.store, operator.redactor, operator.settings
    item = await _item(operator, job, tenant)
    kept = await _events(store.audit, item, MOST_EVENTS + 1)
    now, is_cut, parts = await now_in(store), len(kept) > MOST_EVENTS, await kept_parts(store, item)
    kept = [*kept[:MOST_EVENTS], *await cancellation_of(store.audit, item)]
    readable = [event for one in kept if (event := _event(one)) is not None]
    fields = safe_job_fields(item, now, redactor, await _wait(store, item, kept, now))
    runs = fields["state"] == WorkState.RUNNING.value
    found = attempts_of(item, readable, None if settings is None else settings.book, runs=runs)
    ended = item.updated_at if is_over(item) else None
    names = ("id", "tenant_id", "type", "state", "class", "reason", "progress", "waiting", "created_at", "deadline_at")
    details, events = job_details(item, redactor), _shown(kept, redactor)
    key, key_from = key_of(item, found.idempotency_key, details.get("assignment"))
    sent = header_key(key or "") if key_from == "step" and item.kind == "http.request" else key
    return {
        **{name: fields[name] for name in (*names, "due_at", "age_s")},
        **details,
        "checkpoint": checkpoint_fields(operator, item, parts),
        "log": log_fields(operator, parts),
        "ended_at": time_text(ended),
        "total_s": max(0, (now.moment.wall if ended is None else ended) - item.created_at) / 1000,
        "idempotency_key": None if key is None else redactor(key),
        "idempotency_key_from": key_from,
        "idempotency_key_sent": sent if sent != key else None,
        **versions_of(item),
        **await family_fields(store, item, now, operator.redactor),
        "worker": fields["worker"] or found.worker_id,
        "attempts": redactor.tree([msgspec.to_builtins(one) for one in found.attempts]),
        "events": events,
        "lines": lines_of(details["history"], kept, events, redactor),
        "is_cut": is_cut,
    }


def _event(kept: KeptEntry) -> AnyEvent | None:
    """The event of an entry; None for a damaged one."""
    from reefknot.audit.model.event import decode

    try:
        return decode(kept.entry.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _shown(kept: list[KeptEntry], redactor: Redactor) -> list[dict[str, Any]]:
    """Events without the inputs of their decisions, which `audit tail --json` shows."""
    bodies = map(_event_fields, kept)
    shown: Any = redactor.tree([{name: one[name] for name in sorted(one) if name != "decision"} for one in bodies])
    return list(shown)


async def _events(log: AuditLog, item: WorkItem, most: int = MOST_EVENTS) -> list[KeptEntry]:
    """
    The first events of a job. Those of another tenant's job with the same id are left out; damaged events are not,
    because their tenant is unknown.

    A log with several chains has the events of many jobs in one message. There, only the time from the job's creation
    to its end is looked through.
    """
    from reefknot.audit.port import AuditQuery, MultiChainLog

    since = until = None
    if isinstance(log, MultiChainLog):
        since, until = item.created_at - CLOCKS_APART_MS, item.updated_at + CLOCKS_APART_MS if is_over(item) else None
    found: list[KeptEntry] = []
    after, size = 0, 5 * MOST_EVENTS
    while len(found) < most:
        page = await log.read(AuditQuery(work_id=item.assignment_id, after=after, since=since, until=until, limit=size))
        found += [one for one in page if _is_of(one, item.tenant_id or None)]
        if len(page) < size:
            break
        after = page[-1].sequence
    return found[:most]


class _EventTenant(Struct):
    """The tenant of an event, by its name or its hash."""

    tenant_id: str | None = None
    tenant_hash: str | None = None


_tenant = msgspec.json.Decoder(_EventTenant).decode


class _Retried(Struct):
    """The attempts that a retried job gets at most."""

    max_attempts: int | None = None


def _retried(body: bytes) -> _Retried:
    try:
        return msgspec.json.decode(body, type=_Retried)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a damaged event
        return _Retried()


def _tenant_of(kept: KeptEntry) -> _EventTenant | None:
    """The tenant of an event; None for an event that was damaged."""
    try:
        return _tenant(kept.entry.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_of(kept: KeptEntry, tenant: str | None) -> bool:
    """Whether an event is one of this tenant, or was damaged."""
    from reefknot.audit.model.event import tenant_hash

    found = _tenant_of(kept)
    if found is None:
        return True
    if found.tenant_hash is not None:
        return tenant is not None and found.tenant_hash == tenant_hash(tenant)
    return (found.tenant_id or None) == tenant


def _event_fields(kept: KeptEntry) -> dict[str, Any]:
    """The fields of an event, with the defaults that it leaves out. Those of a damaged one come from the columns of the
    store; it may be another tenant's."""
    from reefknot.console.words.events import event_fields

    if _tenant_of(kept) is None:
        at, kind = time_text(kept.entry.at), kept.entry.event_type
        return {"timestamp": at, "event_type": kind, "sequence": kept.sequence, "unreadable": True}
    return event_fields(kept.entry.body)


async def _item(operator: Operator, job: str, tenant: str | None) -> WorkItem:
    """The job with its payload, found by its id alone when one tenant has it; an unknown one is refused."""
    work = operator.store.work
    item = await work.get(await located(operator.store, record_id(job, tenant)))
    if item is None:
        raise absent_job(f"there is no job {named(job, tenant)}; `reefknot job list` lists all jobs", tenant)
    return item


# ---- submit ----------------------------------------------------------------------------------------------------------


class SubmissionRefusedError(OperationError):
    """A queue has no room for a submission; it may have in `retry_after_ms`."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message, "temporary")
        self.retry_after_ms = retry_after_ms


async def submit_job(operator: Operator, assignment: Mapping[str, Any], key: Unique = NOT_UNIQUE) -> dict[str, Any]:
    """
    Submit one assignment, with the fields that a line of a file for `reefknot submit` has.

    An id, or a key, that a job has already is that job: `created` is False. Other content under an id is refused.
    """
    found = written_assignment(assignment, new_id(), new_id())
    if isinstance(found, InvalidMessage):
        field, _, problem = operator.redactor(found.message).partition(": ")
        raise ParameterUseError(field, problem)
    try:
        handle = await operator.client().hand_in(found, unique=key.key or None, for_=key.for_ms / 1000 or None)
    except QueueFullError as error:
        raise SubmissionRefusedError(str(error), retry_after_ms=max(1, round(error.retry_after * 1000))) from None
    except KeyConflictError as error:
        raise OperationError(f"assignment_id: {error}", "conflict") from None
    about = {"tenant_id": handle.tenant_id, "state": await handle.status(), "created": handle.is_new}
    return {"id": handle.assignment_id, **about}


# ---- cancel ----------------------------------------------------------------------------------------------------------


async def cancel_job(
    operator: Operator, job: str, *, tenant: str | None = None, because: str = "", dry_run: bool = False
) -> dict[str, Any]:
    """
    Cancel a job wherever it is; a job that has ended is refused.

    The answer has its states before and after. A router that does not answer in time obeys later: both are the same
    then.
    """
    why = operator.reason(because.strip()) or f"cancelled by {operator.actor}"
    item = await _item(operator, job, tenant)
    before, tenant = await state_in_words(operator.store, item), item.tenant_id
    if before not in _OPEN:
        raise OperationError(f"{printable(job)} is {before}: there is nothing to cancel", "conflict")
    after = before if dry_run else await _cancelled(operator, job, tenant, why)
    fields = {"id": job, "tenant_id": tenant, "was": before, "state": after, "cancelled": after == "cancelled"}
    return {**fields, "actor": operator.actor, "dry_run": dry_run}


async def _cancelled(operator: Operator, job: str, tenant: str | None, why: str) -> str:
    """The state afterwards. The router that has the job cancels it; without any, the store does at once."""
    work, work_id = operator.store.work, record_id(job, tenant)
    event = operator.event("job.cancel", job, tenant_id=tenant, reason=why)
    if await operator.client().cancel(job, why, tenant_id=tenant, who=operator.actor, events=[event]):
        return WorkState.CANCELLED.value
    found = await polled(
        lambda: work.get(work_id), CANCEL_WAIT_S, enough=lambda one: one is None or one.state not in _OPEN
    )
    return "gone" if found is None else await state_in_words(operator.store, found)


# ---- cancel and retry many -------------------------------------------------------------------------------------------


async def _cancel_chunk(operator: Operator, ids: tuple[str, ...], why: str, events: list[AuditEntry]) -> list[str]:
    """
    Cancel these, by the routers that have them or, without one, in the store. Returns those that are cancelled.

    The action is audited before: a router obeys later, also after this process has ended.
    """
    store, work = operator.store, operator.store.work
    why = why or f"cancelled by {operator.actor}"
    is_routed = await has_router(store)  # once for all of them

    async def has_one(_: Store) -> bool:
        return is_routed

    client = Client(store, store.clock, has_router=has_one)
    await store.audit.append(events)

    async def cancel(record: str) -> bool:
        job, tenant = assignment_and_tenant(record)
        event = operator.event("job.cancel", job, tenant_id=tenant, reason=why)
        return await client.cancel(job, why, tenant_id=tenant, who=operator.actor, events=[event])

    done = await asyncio.gather(*map(cancel, ids))
    asked = [record for record, is_done in zip(ids, done, strict=True) if not is_done]
    ended = await asyncio.gather(*(work.ended(record, CANCEL_ALL_WAIT_S) for record in asked))
    cancelled = {item.id for item in ended if item is not None and item.state is WorkState.CANCELLED}
    return [record for record, is_done in zip(ids, done, strict=True) if is_done or record in cancelled]


CANCEL = BulkVerb("job.cancel", "cancelled", _cancel_chunk)
RETRY = BulkVerb(
    "job.retry",
    "retried",
    lambda operator, ids, why, events: operator.store.work.change(
        WorkFilter(ids=ids), Requeue(operator.actor, why), events=events
    ),
    requeues="retried",
)


class CancelQuery(JobChoice, frozen=True, kw_only=True):
    """The jobs to cancel: named ones, or those that wait or run and match every given field."""

    STATES: ClassVar[dict[str, WorkState]] = {one.value: one for one in _OPEN}
    PARTICIPLE: ClassVar[str] = "cancelled"
    ACCEPTED: ClassVar[str] = "pending, running"

    tree: bool = False
    """Whether all that follows the named jobs, or waits for them, is meant too."""

    def __post_init__(self) -> None:
        JobChoice.__post_init__(self)
        if self.tree and not self.ids:
            raise ParameterUseError("tree", "only together with ids, which name the jobs at the top")


async def _with_families(operator: Operator, query: CancelQuery) -> tuple[str, ...]:
    """The ids of the named jobs, and of all that follows them or waits for them and has not ended."""
    found = dict[str, None]()
    for name in query.ids:
        family = await open_family(operator.store.work, await _item(operator, name, query.tenant))
        found |= dict.fromkeys(one.assignment_id for one in family)
    return tuple(found) or query.ids


class RetryQuery(JobChoice, frozen=True, kw_only=True):
    """The jobs to retry: named ones, or those that ended without success and match every given field."""

    STATES: ClassVar[dict[str, WorkState]] = {one.value: one for one in (WorkState.FAILED, WorkState.CANCELLED)}
    PARTICIPLE: ClassVar[str] = "retried"
    ACCEPTED: ClassVar[str] = "failed, cancelled, quarantined"

    @classmethod
    def accepts(cls, item: WorkItem) -> bool:
        return can_retry(item)


async def cancel_jobs(
    operator: Operator, query: CancelQuery, *, because: str = "", dry_run: bool = False, listener: BulkListener = SILENT
) -> dict[str, Any]:
    """
    Cancel jobs wherever they are, some at a time. After an interruption, call it again for the rest.

    With `tree`, the jobs are named, and all that follows them or waits for them is cancelled too.
    """
    if query.tree:
        query = msgspec.structs.replace(query, ids=await _with_families(operator, query), tree=False)
    return await change_jobs(operator, CANCEL, query, because=because.strip(), dry_run=dry_run, listener=listener)


async def retry_jobs(
    operator: Operator, query: RetryQuery, *, because: str = "", dry_run: bool = False, listener: BulkListener = SILENT
) -> dict[str, Any]:
    """Run failed, timed-out or cancelled jobs again, under their own ids and with a fresh retry budget."""
    return await change_jobs(operator, RETRY, query, because=because, dry_run=dry_run, listener=listener)
