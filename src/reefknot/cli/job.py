"""`reefknot job`: list, show, cancel and retry jobs. A job is an assignment with its state and its story."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from cyclopts import Parameter

from reefknot.cli import job_actions
from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.job_actions import BulkAction, named, tenant_hint
from reefknot.cli.options import (
    OPERATOR,
    STORE,
    Limit,
    OperatorFlags,
    StoreFlags,
    Tenant,
    Wide,
    arg,
    check_filters,
    check_whole,
    one_of,
    time_arg,
    time_ms,
)
from reefknot.cli.output import age, put, put_document, put_fields, put_jobs, put_json, say, show, time_text
from reefknot.cli.store import StoreAddress, address_of, address_to_read, with_store
from reefknot.cli.watch import Watch, repeated
from reefknot.core.messages import Cancel, encode
from reefknot.core.results import answer_of
from reefknot.core.time import Moment
from reefknot.core.work import (
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
from reefknot.operations.systems import polled
from reefknot.runtime.log import printable
from reefknot.runtime.processes import owner_is_gone

if TYPE_CHECKING:
    from reefknot.core.redaction import Redactor
    from reefknot.ports.audit_log import KeptEntry
    from reefknot.ports.store import Store
    from reefknot.ports.work_queue import WorkSnapshot

MOST_EVENTS = 100
MOST_RUNNING = 100_000
"""Running jobs that are counted one by one; there are as many as slots."""
CANCEL_WAIT_S = 5.0
_OPEN = (WorkState.PENDING, WorkState.RUNNING)

# ---- jobs ------------------------------------------------------------------------------------------------------------


class Now(NamedTuple):
    """The moment of a look at a store, and the owners whose processes have ended by then."""

    moment: Moment
    gone: Collection[str]


async def now_in(store: Store) -> Now:
    """The moment, and the owners of running work that are gone."""
    owners = [one for one in await store.leases.owners() if owner_is_gone(one)]
    return Now(store.moment(), owners)


async def state_in_words(store: Store, item: WorkItem) -> str:
    """The visible state of a job in a message."""
    now = await now_in(store)
    return visible_state(item, now.moment, gone=now.gone).value


def job_fields(item: WorkItem, now: Now) -> dict[str, Any]:
    """The fields of a job that a list shows."""
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
        "due_at": time_text(item.due_at) if waits else None,
        "due_in_s": max(0.0, (item.due_at - now_ms) / 1000) if waits else None,
        "deadline_at": time_text(item.deadline_at),
        "age_s": max(0.0, (now_ms - item.created_at) / 1000),
        "created_at": time_text(item.created_at),
        "updated_at": time_text(item.updated_at),
    }


def job_details(item: WorkItem, redactor: Redactor) -> dict[str, Any]:
    """
    The fields of a job that a list leaves out.

    The result of an assignment is the stored one, else what its caller is told. A job of a source has no caller.
    """
    names = ("correlation_id", "trace_id", "generation", "snoozes", "interruptions", "crashes")
    ingestion = is_ingestion(item)
    answer = answer_of(item) if item.result is None and not ingestion else None
    return {
        **{name: getattr(item, name) for name in names},
        "source": item.source or None,
        "ingestion_job" if ingestion else "assignment": _decoded(item.payload or None, redactor),
        "failure": _decoded(item.failure, redactor),
        "result": _decoded(item.result if answer is None else encode(answer), redactor),
        "history": [
            {"at": time_text(entry.at), "what": entry.what, "why": redactor(entry.why), "who": entry.who}
            for entry in item.history
            if not (is_over(item) and entry.at > item.updated_at)  # due later than its end: that never came
        ],
    }


def put_details(fields: dict[str, Any]) -> None:
    """The fields of a job as a table, and below it the traceback of its last failure."""
    failure = fields["failure"]
    if not isinstance(failure, dict) or "traceback" not in failure:
        put_fields(fields)
        return
    put_fields({**fields, "failure": {name: value for name, value in failure.items() if name != "traceback"}})
    put()
    put_document(str(failure["traceback"]))
    put()


def _decoded(text: str | bytes | None, redactor: Redactor) -> Any:
    if text is None:
        return None
    try:
        return redactor.tree(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return redactor(text if isinstance(text, str) else text.decode("utf-8", "replace"))


async def visible_counts(store: Store, snapshot: WorkSnapshot, now: Now) -> dict[str, int]:
    """The number of jobs in each visible state."""
    states = {state.value: 0 for state in WorkState}
    for counts in snapshot.counts.values():
        for state, number in counts.items():
            states[state.value] += number
    running = len(await store.work.find(state=WorkState.RUNNING, gone=now.gone, limit=MOST_RUNNING))
    waiting = max(0, states["running"] - running)  # claimed, but by a router, or by a worker that is gone
    states["running"] -= waiting
    states["pending"] += waiting
    return states


async def _counts(store: Store, now: Now) -> dict[str, Any]:
    """The number of jobs in each visible state, and the age of the oldest due one."""
    snapshot = await store.work.snapshot()
    return {
        "states": await visible_counts(store, snapshot, now),
        "waiting_for_router": snapshot.counts.get(ROUTER, {}).get(WorkState.PENDING, 0),
        "oldest_due_s": snapshot.oldest_due_ms / 1000,
    }


async def job_counts(store: Store) -> dict[str, Any]:
    """The number of jobs in each visible state at this moment, and the age of the oldest due one."""
    return await _counts(store, await now_in(store))


# ---- commands --------------------------------------------------------------------------------------------------------

app = noun("job", "job list --state pending")

Id = Annotated[str, arg("Assignment id.")]


@app.command(name="list", help_epilogue=examples("job list", "job list --state running --json"))
def list_(
    *,
    state: Annotated[str | None, arg("Only this state: pending, running, succeeded, failed, quarantined, …")] = None,
    type_: Annotated[str | None, arg("Only steps of this type.", "--type")] = None,
    since: Annotated[str | None, time_arg("Only jobs submitted since a time, or an age: 90s, 15m, 2h, 7d.")] = None,
    sort: Annotated[str, arg("Order by submission: newest or oldest first. Default: newest.")] = "newest",
    limit: Limit = 50,
    after: Annotated[str, arg("Continue after the cursor that the last page gave as `next`.")] = "",
    wide: Wide = False,
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """List jobs, the newest first; pending ones with their due time."""
    check_whole("--limit", limit)
    check_filters(type=type_)
    wanted = None if state is None else one_of("--state", state, {one.value: one for one in WorkState})
    oldest_first = one_of("--sort", sort, {"newest": False, "oldest": True})
    address, since_ms = address_to_read(options), time_ms("--since", since) or 0

    async def work(store: Store) -> tuple[list[WorkItem], dict[str, Any], Now]:
        now, last = await now_in(store), unquote(after)
        if last and await store.work.get(last) is None:
            gone = named(*assignment_and_tenant(last))
            text = f"--after: there is no job {gone} any more; start again without --after"
            raise CommandError(text, Exit.FAILED)
        found = await store.work.find(
            state=wanted,
            kind=type_,
            after=last,
            limit=limit,
            since=since_ms,
            oldest_first=oldest_first,
            gone=now.gone,
        )
        return found, await _counts(store, now), now

    def draw() -> None:
        found, counts, now = with_store(address, work)
        following = quote(found[-1].id) if len(found) == limit else None
        jobs = address.redactor.tree([job_fields(item, now) for item in found])

        def text() -> None:
            _put_jobs(jobs, wide=wide)
            _say_totals(counts, following)

        show({"jobs": jobs, "next": following, **counts}, text, json=options.json)

    repeated(watch, draw)


def _put_jobs(jobs: list[dict[str, Any]], *, wide: bool) -> None:
    columns = ("job", "type", "state", "attempts", "due", "age", "worker", "reason")
    tenants = [one["tenant_id"] or "" for one in jobs]
    optional = ("worker", "attempts", "due", "reason", "age")
    styles, whole = ("cyan", "", "bold"), ("job", "tenant", "state", "due", "age")
    put_jobs(columns, map(_row, jobs), tenants, styles=styles, whole=whole, optional=optional, wide=wide)


def _say_totals(counts: dict[str, Any], following: str | None) -> None:
    totals = ", ".join(f"{number} {name}" for name, number in counts["states"].items() if number)
    waiting = f"; {counts['waiting_for_router']} waiting for a router" if counts["waiting_for_router"] else ""
    oldest = f"; the oldest due one has waited {age(counts['oldest_due_s'])}" if counts["oldest_due_s"] else ""
    say(f"total: {totals or 'none with a worker'}{waiting}{oldest}")
    if following is not None:
        say(f"there may be more: --after {following}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    due = one["due_in_s"]
    return (
        one["id"],
        one["type"],
        one["state"],
        str(one["attempts"]),
        "" if due is None else "now" if due <= 0 else f"in {age(due)}",
        age(one["age_s"]),
        one["worker"] or ("router" if one["class"] is None else ""),
        (one["reason"] or "")[:80],
    )


@app.command(name="show", help_epilogue=examples("job show order-7", "job show order-7 --tenant acme"))
def show_job(job: Id, /, *, tenant: Tenant = None, options: StoreFlags = STORE) -> None:
    """Show everything about one job: state, attempts, history, audited events and result."""
    address = address_to_read(options)

    async def work(store: Store) -> tuple[WorkItem | None, list[KeptEntry], Now]:
        found = await store.work.get(record_id(job, tenant))
        return found, await _events(store, job, tenant), await now_in(store)

    found, kept, now = with_store(address, work)
    if found is None:
        raise _absent(job, tenant)
    fields = {**job_fields(found, now), **job_details(found, address.redactor)}
    if options.json:
        from reefknot.cli.audit_events import event_fields

        bodies = [_unreadable(one) if _tenant_of(one) is ... else event_fields(one.entry.body) for one in kept]
        # Without the inputs of their decisions, which `audit tail --json` shows.
        events = [{name: one[name] for name in sorted(one) if name != "decision"} for one in bodies]
        put_json({**fields, "events": address.redactor.tree(events)})
        return
    put_details({name: value for name, value in fields.items() if name != "history"})
    for line in _timeline(fields["history"], kept):
        put(address.redactor(line))


async def _events(store: Store, job: str, tenant: str | None) -> list[KeptEntry]:
    """The first events of a job. Those of another tenant's job with the same id are left out; of a damaged event nobody
    can tell."""
    from reefknot.cli.audit_source import pages_of
    from reefknot.ports.audit_log import AuditQuery

    found: list[KeptEntry] = []
    async for page in pages_of(store.audit, AuditQuery(work_id=job)):
        found += [one for one in page if _tenant_of(one) in (tenant or None, ...)]
        if len(found) >= MOST_EVENTS:
            break
    return found[:MOST_EVENTS]


class _EventTenant(msgspec.Struct):
    """The tenant of an event."""

    tenant_id: str | None = None


_tenant = msgspec.json.Decoder(_EventTenant).decode


def _tenant_of(kept: KeptEntry) -> str | EllipsisType | None:
    """The tenant of an event; `...` for an event that was damaged."""
    try:
        return _tenant(kept.entry.body).tenant_id or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ...


def _unreadable(kept: KeptEntry) -> dict[str, Any]:
    """The fields of a damaged event that the store has beside its body, which may be another tenant's."""
    at, kind = time_text(kept.entry.at), kept.entry.event_type
    return {"timestamp": at, "event_type": kind, "sequence": kept.sequence, "unreadable": True}


def _timeline(history: list[dict[str, Any]], kept: list[KeptEntry]) -> list[str]:
    """History and events, by time."""
    from reefknot.cli.live_output import describe, describe_routine
    from reefknot.core.audit.event import decode, timestamp

    lines = []
    for one in history:
        by = f" by {one['who']}" if one["who"] else ""
        lines.append((one["at"], f"{one['what']}{by}{': ' + one['why'] if one['why'] else ''}"))
    for audited in kept:
        try:
            event = decode(audited.entry.body)
        except msgspec.DecodeError:
            text = f"{audited.entry.event_type}: event {audited.sequence} is unreadable; see `audit verify`"
            lines.append((timestamp(audited.entry.at / 1000), text))
            continue
        _, words = describe(event) or ("", describe_routine(event))
        lines.append((event.timestamp, f"{event.event_type}: {words}" if words else event.event_type))
    return [f"{at}  {text}" for at, text in sorted(lines, key=lambda line: line[0])]


@app.command(
    help_epilogue=examples("job cancel order-7 --because 'the order was withdrawn'", "job cancel order-7 --dry-run")
)
def cancel(
    job: Id,
    /,
    *,
    tenant: Tenant = None,
    because: Annotated[str, arg("Reason, for the result and the audit log.")] = "",
    reason: Annotated[str | None, arg("Old spelling of --because.", show=False)] = None,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Cancel a job wherever it is; its result is then `cancelled`. A finished job is refused (exit code 1)."""
    address, dry_run = address_of(options), options.dry_run
    if reason is not None:
        say("job cancel --reason is deprecated: it is --because now; elsewhere --reason is a filter")
        because = because or reason
    why = because.strip() or f"cancelled by {address.actor}"
    cancel = Cancel(job, why, tenant)
    before, after = with_store(address, lambda store: _cancel(store, address, cancel, dry_run=dry_run))
    done = after == "cancelled"
    if options.json:
        fields = {"id": job, "tenant_id": tenant, "was": before, "state": after, "cancelled": done}
        put_json({**fields, "actor": address.actor, "dry_run": dry_run})
    elif done or dry_run:
        put(f"{job} ({before}) {'would be ' if dry_run else ''}cancelled")
    if done or dry_run:
        return Exit.FINE
    if after == before:
        again = f"reefknot job show {job}{f' --tenant {tenant}' if tenant else ''}"
        say(f"{job} is still {after}; the command is stored and will be obeyed. Check with: {again}")
        return Exit.TEMPORARY
    say(f"{job} finished meanwhile: {after}")
    return Exit.FAILED


async def _cancel(store: Store, address: StoreAddress, cancel: Cancel, *, dry_run: bool) -> tuple[str, str]:
    """The states before and after. The router that has the job cancels it; without any, the store does at once."""
    from reefknot.app.stores import client_of

    job, work_id, reason = cancel.assignment_id, cancel.record_id, cancel.reason or ""
    found = await store.work.get(work_id)
    if found is None:
        raise _absent(job, cancel.tenant_id)
    now = await now_in(store)
    before = visible_state(found, now.moment, gone=now.gone)
    if before not in _OPEN:
        raise CommandError(f"{printable(job)} is {before.value}: there is nothing to cancel", Exit.FAILED)
    if dry_run:
        return before.value, before.value
    client = client_of(store, store.clock)
    event = address.event("job.cancel", job, tenant_id=cancel.tenant_id, reason=reason)
    if await client.cancel(job, reason, tenant_id=cancel.tenant_id, who=address.actor, events=[event]):
        return before.value, "cancelled"
    found = await polled(
        lambda: store.work.get(work_id), CANCEL_WAIT_S, enough=lambda item: item is None or item.state not in _OPEN
    )
    if found is None:
        return before.value, "gone"
    return before.value, visible_state(found, now.moment, gone=now.gone).value


# ---- retry -----------------------------------------------------------------------------------------------------------

_ENDED_BADLY = {one.value: one for one in (WorkState.FAILED, WorkState.CANCELLED)}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RetryFlags:
    """Filter of jobs that ended without success. A job must match every given flag."""

    state: Annotated[str | None, arg("Only this state: failed or cancelled.")] = None
    type: Annotated[str | None, arg("Only steps of this type.")] = None
    reason: Annotated[str | None, arg("Only jobs whose reason contains this text.")] = None
    before: Annotated[str | None, time_arg("Only jobs that ended before a time, or an age: 90s, 15m, 2h, 7d.")] = None


NO_FILTER = RetryFlags()


@app.command(
    help_epilogue=examples(
        "job retry order-7 --because 'the address was corrected'",
        "job retry --reason attempts_spent --type http.request --dry-run",
    )
)
def retry(
    *ids: Id,
    tenant: Annotated[str | None, arg("Tenant of the named jobs. Default: none.")] = None,
    flags: RetryFlags = NO_FILTER,
    all_: Annotated[bool, arg("Select all failed, timed-out and cancelled jobs.", "--all")] = False,
    because: Annotated[str, arg("Reason, for the job's history and the audit log.")] = "",
    options: OperatorFlags = OPERATOR,
) -> int:
    """Run failed, timed-out or cancelled jobs again, under their own ids and with a fresh retry budget."""
    if tenant is not None and not ids:
        raise CommandError("--tenant: accepted with the ids of jobs, whose tenant it is; give ids")
    if ids and (all_ or flags.state is not None):
        flag = "--all" if all_ else "--state"
        raise CommandError(f"{flag}: not together with ids, which name the jobs whatever their state; give one of them")
    if not ids and flags == NO_FILTER and not all_:
        raise CommandError("select jobs by ids, a filter (--state, --type, --reason, --before), or --all")
    check_filters(type=flags.type, reason=flags.reason)
    states = _ENDED_BADLY.values() if flags.state is None else [one_of("--state", flags.state, _ENDED_BADLY)]
    names, before = tuple(dict.fromkeys(record_id(one, tenant) for one in ids)), time_ms("--before", flags.before)
    action = BulkAction("job.retry", "retried", options, because=because, requeues="retried")
    return action.run(
        EndedJobs(names, tuple(states), flags.type, flags.reason, before),
        lambda store, chosen, events: store.work.retry(chosen, who=action.address.actor, why=because, events=events),
    )


class EndedJobs(msgspec.Struct, frozen=True):
    """The selected jobs that ended without success, the newest first."""

    ids: tuple[str, ...]
    states: tuple[WorkState, ...]
    """The states that a filter selects. A job that is named may also be in quarantine."""
    kind: str | None
    reason: str | None
    before: int | None

    def _matches(self, item: WorkItem) -> bool:
        return (
            (item.state in self.states or (bool(self.ids) and can_retry(item)))
            and self.kind in (None, item.kind)
            and (self.reason is None or self.reason in item.reason)
            and (self.before is None or item.updated_at < self.before)
        )

    async def count(self, store: Store) -> dict[str, int]:
        return await job_actions.counted(self.chunks(store))

    async def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        if self.ids:
            named_ones = [await store.work.get(one) for one in self.ids]
            if found := [item for item in named_ones if item is not None and self._matches(item)]:
                yield found
            return
        for state in self.states:
            after = ""
            while page := await store.work.find(state=state, kind=self.kind, after=after, limit=job_actions.CHUNK):
                after = page[-1].id
                if found := [item for item in page if self._matches(item)]:
                    yield found

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        if item is None:
            return "cannot be retried: there is no such job; `job list` lists all jobs"
        state = await state_in_words(store, item)
        if can_retry(item):
            return f"does not match the filter: it is {state}"
        return f"cannot be retried: it is {state}; accepted: failed, cancelled, quarantined"


def _absent(job: str, tenant: str | None) -> CommandError:
    text = f"there is no job {named(job, tenant)}; `reefknot job list` lists all jobs{tenant_hint(tenant)}"
    return CommandError(text, Exit.FAILED)
