"""
Jobs in quarantine, which wait for an operator's decision: list, group, requeue, discard, purge, edit.

A job whose payload was edited is discarded and keeps its payload byte for byte; the edited one has the next version of
its id. Both happen in one step, so a request that was cut off is made again as it was. What may be edited are the
inputs of an assignment's step, or what a job of a source asks its connector for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from difflib import unified_diff
from json import dumps
from shlex import quote as shell_quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from reefknot.console.operations import bulk
from reefknot.console.operations.bulk import (
    SILENT,
    BulkListener,
    BulkVerb,
    UnclaimedJobs,
    absent_job,
    action_event,
    change_jobs,
    located,
    named,
)
from reefknot.console.operations.job_filters import state_in_words
from reefknot.console.operations.jobs import job_details, safe_ids
from reefknot.console.operations.operator import in_slices
from reefknot.console.operations.values import ParameterUseError, check_limit, check_texts, time_ms, time_text
from reefknot.core.redaction import HIDDEN
from reefknot.errors import OperationError
from reefknot.queue.model.edited_work import is_replaced, next_record, next_version
from reefknot.queue.model.failure_groups import failure_summary
from reefknot.queue.model.messages import InvalidMessage, read_assignment
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, assignment_and_tenant, is_ingestion, record_id
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.audit.port import AuditEntry
    from reefknot.console.operations.operator import Operator
    from reefknot.stores.port import Store

# ---- selection -------------------------------------------------------------------------------------------------------


FILTERS = ("type", "source", "tenant", "reason", "error", "since", "before", "fingerprint")
"""The fields of a choice that select jobs which are not named."""


class QuarantineChoice(Struct, frozen=True, kw_only=True):
    """Jobs in quarantine, as a person asks for them: named ones, or those that match every given field."""

    ids: tuple[str, ...] = ()
    tenant: str | None = None
    """The tenant of the named jobs; without ids, that of every job."""
    type: str | None = None
    source: str | None = None
    reason: str | None = None
    """A text in the reason."""
    error: str | None = None
    """A text in the reason or in the failure, in capital or small letters."""
    since: str | None = None
    """The earliest quarantining: a time, or an age."""
    before: str | None = None
    """The latest quarantining: a time, or an age."""
    fingerprint: str | None = None
    all: bool = False
    """Whether an action without ids and filter is meant for all jobs."""

    def __post_init__(self) -> None:
        if self.ids and self.all:
            raise ParameterUseError("all", "not together with ids, which name the jobs; give one of them")
        self.filter()

    def filters(self) -> dict[str, str]:
        """The given fields of `FILTERS`."""
        given = {name: getattr(self, name) for name in FILTERS if getattr(self, name) is not None}
        if self.ids:
            given.pop("tenant", None)  # it belongs to the ids then
        return given

    def filter(self) -> WorkFilter:
        """The filter of the store at this moment."""
        texts = {"type": self.type, "source": self.source, "reason": self.reason, "fingerprint": self.fingerprint}
        check_texts(**texts, tenant=self.tenant, error=self.error)
        return WorkFilter(
            ids=tuple(dict.fromkeys(record_id(one, self.tenant) for one in self.ids)) or None,
            kind=self.type,
            source=self.source,
            reason=self.reason,
            changed_since=time_ms("since", self.since),
            changed_before=time_ms("before", self.before),
            fingerprint=self.fingerprint,
            tenant_id=None if self.ids else self.tenant,
            error=self.error,
        )

    def selection(self) -> QuarantinedJobs:
        """The jobs of an action. No selection is an error: it must not mean all of them."""
        if not self.ids and not self.all and not self.filters():
            text = f"select jobs by ids, a filter ({', '.join(FILTERS)}), or all"
            raise OperationError(text, "invalid")
        return QuarantinedJobs(self.filter())


class QuarantineQuery(QuarantineChoice, frozen=True, kw_only=True):
    """A page of the jobs in quarantine. An action knows no pages: it is for all jobs that it names."""

    limit: int = 50
    after: str = ""
    """The `next` of the page before."""

    def __post_init__(self) -> None:
        check_limit(self.limit)
        QuarantineChoice.__post_init__(self)


class QuarantinedJobs(Struct, frozen=True):
    """The selected jobs of a quarantine, in the order of their ids."""

    which: WorkFilter

    @property
    def ids(self) -> tuple[str, ...]:
        return self.which.ids or ()

    def of(self, ids: tuple[str, ...]) -> QuarantinedJobs:
        return QuarantinedJobs(msgspec.structs.replace(self.which, ids=ids))

    async def count(self, store: Store) -> dict[str, int]:
        return await store.quarantine.count(self.which)

    async def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        after = ""
        while chunk := await store.quarantine.find(self.which, after=after, limit=bulk.CHUNK):
            after = chunk[-1].id
            yield chunk

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        if item is not None and item.state is WorkState.QUARANTINED:
            return "does not match the filter; `quarantine show` shows what it is"
        state = "there is no such job" if item is None else f"it is {await state_in_words(store, item)}"
        return f"is not in quarantine: {state}; `quarantine list` shows what is"


# ---- lists -----------------------------------------------------------------------------------------------------------


async def list_quarantined(operator: Operator, query: QuarantineQuery) -> dict[str, Any]:
    """A page of quarantined jobs by id, each with its reason; and whether failed assignments are quarantined here."""
    items = await operator.store.quarantine.find(query.filter(), after=unquote(query.after), limit=query.limit)
    settings = operator.settings
    return {
        "items": await in_slices(lambda item: _fields(item, operator), items),
        "next": quote(items[-1].id) if len(items) == query.limit else None,
        "quarantine_failed": settings is not None and settings.configuration.worker.quarantine_failed,
    }


async def quarantine_groups(operator: Operator, query: QuarantineQuery) -> dict[str, Any]:
    """The first groups of quarantined jobs by the fingerprint of their failure, and the numbers of all groups and of
    the jobs in them."""
    found = await operator.store.quarantine.groups(query.filter())
    groups = found.groups()
    jobs = sum(one.count for one in groups) + found.ungrouped
    fields = [
        {
            "fingerprint": one.fingerprint,
            "count": one.count,
            "failure_type": one.failure_type or None,
            "code": one.code or None,
            "message": operator.redactor(one.message),
            "oldest_at": time_text(one.oldest_at),
            "newest_at": time_text(one.newest_at),
            "types": one.kinds,
            "sources": one.sources,
        }
        for one in groups[: query.limit]
    ]
    return {"groups": fields, "ungrouped": found.ungrouped, "total": len(groups), "jobs": jobs}


async def quarantine_stats(operator: Operator) -> dict[str, Any]:
    """The number of quarantined jobs by type, source and reason."""
    found = await operator.store.quarantine.stats()
    return {
        "total": found.total,
        "by_type": found.by_kind,
        "by_source": found.by_source,
        "by_reason": {operator.redactor(reason): number for reason, number in found.by_reason.items()},
        "oldest_at": time_text(found.oldest_at),
    }


async def show_quarantined(operator: Operator, job: str, tenant: str | None = None) -> dict[str, Any]:
    """Everything about a quarantined job: payload, reason, failure, history. Secrets are hidden."""
    item = await _in_quarantine(operator, job, tenant)
    return {**_fields(item, operator), **job_details(item, operator.redactor)}


async def _in_quarantine(operator: Operator, job: str, tenant: str | None) -> WorkItem:
    item = await operator.store.quarantine.show(await located(operator.store, record_id(job, tenant)))
    if item is None:
        raise absent_job(f"{named(job, tenant)} is not in quarantine; `quarantine list` shows what is", tenant)
    return item


def _fields(item: WorkItem, operator: Operator) -> dict[str, Any]:
    failure = failure_summary(item)
    return {
        **safe_ids(item, operator.redactor),
        "type": item.kind,
        "source": item.source or None,
        "class": item.resource_class.partition("@")[0],
        "attempts": item.attempts,
        "crashes": item.crashes,
        "reason": operator.redactor(item.reason),
        "failure_type": failure.failure_type or None,
        "message": operator.redactor(failure.message),
        "fingerprint": failure.fingerprint,
        "since": time_text(item.updated_at),
        "created_at": time_text(item.created_at),
    }


# ---- requeue, discard, purge -----------------------------------------------------------------------------------------

REQUEUE = BulkVerb(
    "quarantine.requeue",
    "requeued",
    lambda operator, ids, why, events: operator.store.quarantine.requeue(
        WorkFilter(ids=ids), who=operator.actor, why=why, events=events
    ),
    requeues="taken out of quarantine",
)
DISCARD = BulkVerb(
    "quarantine.discard",
    "discarded",
    lambda operator, ids, why, events: operator.store.quarantine.discard(
        WorkFilter(ids=ids), who=operator.actor, reason=why, events=events
    ),
)
PURGE = BulkVerb(
    "quarantine.purge",
    "purged",
    lambda operator, ids, _, events: operator.store.quarantine.purge(WorkFilter(ids=ids), events=events),
)


async def requeue_jobs(
    operator: Operator,
    query: QuarantineChoice,
    *,
    because: str = "",
    dry_run: bool = False,
    listener: BulkListener = SILENT,
) -> dict[str, Any]:
    """Queue jobs again, under their own ids and with a fresh retry budget."""
    return await change_jobs(operator, REQUEUE, query, because=because, dry_run=dry_run, listener=listener)


async def discard_jobs(
    operator: Operator,
    query: QuarantineChoice,
    *,
    because: str = "",
    dry_run: bool = False,
    listener: BulkListener = SILENT,
) -> dict[str, Any]:
    """Give jobs up for good, with the reason. They stay in the store as discarded."""
    if not dry_run:
        check_reason(operator.reason(because))
    return await change_jobs(operator, DISCARD, query, because=because, dry_run=dry_run, listener=listener)


def check_reason(because: str) -> None:
    """Refuse a discard without a reason."""
    if not because.strip():
        text = "a reason is required and audited; for example: 'the order was withdrawn'"
        raise ParameterUseError("because", text)


async def purge_jobs(
    operator: Operator,
    query: QuarantineChoice,
    *,
    because: str = "",
    dry_run: bool = False,
    listener: BulkListener = SILENT,
) -> dict[str, Any]:
    """Delete jobs, payloads included. Only the audit log remembers them."""
    return await change_jobs(operator, PURGE, query, because=because, dry_run=dry_run, listener=listener)


# ---- an edited payload -----------------------------------------------------------------------------------------------


async def editable_payload(operator: Operator, job: str, tenant: str | None = None) -> dict[str, Any]:
    """
    The part of a quarantined job's payload that an operator may edit, with notes about the edit.

    Secrets in it are hidden; their values have to be filled in before it is given back.
    """
    item = await _in_quarantine(operator, job, tenant)
    payload = _payload_of(item)
    shown, why = operator.redactor.tree(payload), _nothing_to_edit(item)
    notes = [] if why is None else [why]
    if shown != payload:
        notes.append(
            f"parts are hidden as {HIDDEN}; write their values in place of that before you give the payload back"
        )
    return {"id": item.assignment_id, "tenant_id": item.tenant_id, "payload": shown, "notes": notes}


async def edit_and_requeue(
    operator: Operator,
    job: str,
    *,
    tenant: str | None = None,
    payload: dict[str, Any],
    because: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Replace a quarantined job by its next version, with this payload; a dry run shows the difference."""
    item, unclaimed = await _to_edit(operator, record_id(job, tenant))
    body, redacted = _with_payload(item, payload), operator.redactor.tree
    old, successor = item.assignment_id, next_version(item.assignment_id)
    if not dry_run:
        await _replace(operator, item, body, operator.reason(because))
    lines = payload_text(redacted(_payload_of(item))).splitlines(), payload_text(redacted(payload)).splitlines()
    return {
        "requeued": [successor],
        "tenant_ids": [item.tenant_id],
        "replaces": old,
        "diff": list(unified_diff(*lines, old, successor, lineterm="")),
        "count": 1,
        "actor": operator.actor,
        "dry_run": dry_run,
        "unconfigured_sources": sorted(unclaimed.sources),
        "hints": unclaimed.hints(1, dry_run=dry_run),
    }


def payload_text(payload: object) -> str:
    """A payload as a person edits it."""
    return dumps(payload, indent=2, ensure_ascii=False)


def _payload_of(item: WorkItem) -> dict[str, Any]:
    """The part of a job's payload that a person may edit."""
    try:
        body = msgspec.json.decode(item.payload)
        found = body.get("payload", {}) if is_ingestion(item) else body["job"].get("payload", {})
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        text = "what is stored cannot be read as a job, so there is no payload to edit; `quarantine show` prints it"
        raise OperationError(f"{item.assignment_id}: {text}", "conflict")
    return found


def _nothing_to_edit(item: WorkItem) -> str | None:
    """Why a job of a source has no payload to edit, and what to do instead; None for a job that has one."""
    if not is_ingestion(item):
        return None
    location = msgspec.json.decode(item.payload).get("item")
    if location:
        text = f"{item.assignment_id} only fetches {location!r} again, and has no payload to edit"
        return f"{text}; to run it again: reefknot quarantine requeue {shell_quote(printable(item.assignment_id))}"
    if not _payload_of(item):
        text = f"{item.assignment_id} is a sync of {item.source} and has no payload to edit"
        return f"{text}; change the settings of the source, then: reefknot source run {item.source}"
    return None


def _with_payload(item: WorkItem, payload: dict[str, Any]) -> bytes:
    """The stored form of the next version of a job: the same with this payload, checked as a submission is."""
    before = _payload_of(item)
    if (why := _nothing_to_edit(item)) is not None:
        raise ParameterUseError("payload", why)
    if payload == before and dumps(payload) == dumps(before):
        again = f"to run it again as it is: quarantine requeue {item.assignment_id}"
        raise ParameterUseError("payload", f"it is the payload that {item.assignment_id} has already; {again}")
    if HIDDEN in dumps(payload) and HIDDEN not in dumps(before):
        raise ParameterUseError("payload", f"{HIDDEN} stands for a part that was hidden; write its value instead")
    body = msgspec.json.decode(item.payload)
    if is_ingestion(item):
        if not payload:
            text = f"without a payload {item.assignment_id} would be a sync of {item.source}"
            raise ParameterUseError("payload", f"{text}; to sync it: reefknot source run {item.source}")
        return msgspec.json.encode({**body, "payload": payload})
    successor = next_version(item.assignment_id)
    body |= {"assignment_id": successor, "job": {**body["job"], "payload": payload}}
    written = msgspec.json.encode(body)
    found = read_assignment(written)
    if isinstance(found, InvalidMessage):
        raise ParameterUseError("payload", found.message)
    return written


async def _to_edit(operator: Operator, record: str) -> tuple[WorkItem, UnclaimedJobs]:
    """The job with its payload: in quarantine, or replaced by an earlier request of the same. `UnclaimedJobs` has its
    next version if no system knows its source."""
    item = await operator.store.work.get(record)
    if item is not None and (item.state is WorkState.QUARANTINED or is_replaced(item)):
        unclaimed = await UnclaimedJobs.over(operator)
        unclaimed.add([msgspec.structs.replace(item, id=next_record(item.id))])
        return item, unclaimed
    why = await QuarantinedJobs(WorkFilter(ids=(record,))).missing(operator.store, item)
    raise OperationError(f"{named(*assignment_and_tenant(record))} {why}", "not_found" if item is None else "conflict")


async def _replace(operator: Operator, item: WorkItem, body: bytes, because: str) -> None:
    store, successor = operator.store, next_record(item.id)
    events = _edit_events(operator, item, body, because)
    done = await store.quarantine.replace(item.id, body, who=operator.actor, why=because, events=events)
    if done is not None:
        return
    old, new = await store.work.get(item.id), await store.work.get(successor)
    if old is not None and is_replaced(old) and new is not None and new.payload == body:
        return  # by this request, which was cut off before it was answered
    name = assignment_and_tenant(successor)[0]
    if new is None:
        raise OperationError(f"{item.assignment_id} was taken out of quarantine meanwhile", "conflict")
    text = f"there is a job {name} already, with another payload; `job show {name}` shows it"
    raise OperationError(f"{item.assignment_id} cannot be replaced: {text}", "conflict")


def _edit_events(operator: Operator, item: WorkItem, body: bytes, because: str) -> list[AuditEntry]:
    """Audit entries: the operator's action, and the submission of the next version."""
    from reefknot import clock
    from reefknot.audit.assignments import submitted_event
    from reefknot.audit.journal import Journal

    action = action_event(operator, REQUEUE, [item], because, replaced_by=next_version(item.assignment_id))
    new = msgspec.structs.replace(item, id=next_record(item.id), resource_class=ROUTER, payload=body)
    journal = Journal(None, redactor=operator.redactor)
    return [action, *journal.entries([submitted_event(new, clock.wall())])]
