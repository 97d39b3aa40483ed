"""`reefknot quarantine`: jobs that wait for an operator's decision. Every decision is audited with its actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from json import dumps, loads
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

from cyclopts import Parameter

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.job import job_details, job_fields, named, now_in, tenant_hint
from reefknot.cli.options import (
    OPERATOR,
    STORE,
    Limit,
    OperatorFlags,
    StoreFlags,
    Tenant,
    Wide,
    arg,
    check_whole,
    time_ms,
)
from reefknot.cli.output import progress, put, put_fields, put_jobs, put_json, put_table, say, show, time_text
from reefknot.cli.stores import StoreAddress, address_of, with_store
from reefknot.core.work import WorkItem, assignment_and_tenant, record_id
from reefknot.ports.work_queue import QuarantineFilter

if TYPE_CHECKING:
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

CHUNK = 500
MOST_SHOWN = 20

app = noun("quarantine", "quarantine list")

Id = Annotated[str, arg("Assignment id.")]
TenantOfIds = Annotated[str | None, arg("Tenant of the named jobs. Default: none.")]
All = Annotated[bool, arg("Select all quarantined jobs.", "--all")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class QuarantineFlags:
    """Filter of quarantined jobs. A job must match every given flag."""

    type: Annotated[str | None, arg("Only steps of this type.")] = None
    source: Annotated[str | None, arg("Only jobs of this source.")] = None
    reason: Annotated[str | None, arg("Only jobs whose reason contains this text.")] = None
    before: Annotated[str | None, arg("Only jobs quarantined before a time, or an age: 90s, 15m, 2h, 7d.")] = None

    def filter(self, ids: tuple[str, ...] = ()) -> QuarantineFilter:
        return QuarantineFilter(ids, self.type, self.source, self.reason, time_ms("--before", self.before))


NO_FILTER = QuarantineFlags()


@app.command(name="list", help_epilogue=examples("quarantine list", "quarantine list --type http.request"))
def list_(
    flags: QuarantineFlags = NO_FILTER,
    *,
    limit: Limit = 50,
    after: Annotated[str, arg("Continue after the cursor that the last page gave as `next`.")] = "",
    wide: Wide = False,
    options: StoreFlags = STORE,
) -> None:
    """List quarantined jobs by id, each with its reason."""
    check_whole("--limit", limit)
    address, wanted = address_of(options), flags.filter()
    items = with_store(address, lambda store: store.quarantine.find(wanted, after=unquote(after), limit=limit))
    following = quote(items[-1].id) if len(items) == limit else None

    def row(item: WorkItem) -> tuple[str, ...]:
        since, reason = time_text(item.updated_at) or "", address.redactor(item.reason)
        return item.assignment_id, item.kind, str(item.attempts), since, reason

    def text() -> None:
        columns, tenants = ("job", "type", "attempts", "since", "reason"), [item.tenant_id or "" for item in items]
        whole, optional = ("job", "tenant", "since"), ("attempts", "since")
        put_jobs(columns, map(row, items), tenants, styles=("cyan",), whole=whole, optional=optional, wide=wide)
        say(f"{len(items)} shown" + (f"; there may be more: --after {following}" if following else ""))

    show({"items": [_fields(item, address) for item in items], "next": following}, text, json=options.json)


@app.command(name="show", help_epilogue=examples("quarantine show order-7", "quarantine show order-7 --tenant acme"))
def show_item(job: Id, /, *, tenant: Tenant = None, options: StoreFlags = STORE) -> None:
    """Show one quarantined job: payload, reason, failure, history. Secrets are hidden."""
    address = address_of(options)
    item = with_store(address, lambda store: store.quarantine.show(record_id(job, tenant)))
    if item is None:
        text = f"{named(job, tenant)} is not in quarantine; `quarantine list` shows what is{tenant_hint(tenant)}"
        raise CommandError(text, Exit.FAILED)
    fields = {**_fields(item, address), **job_details(item, address.redactor)}
    show(fields, lambda: put_fields(fields), json=options.json)


@app.command(help_epilogue=examples("quarantine stats --json"))
def stats(*, options: StoreFlags = STORE) -> None:
    """Count quarantined jobs by type, source and reason."""
    address = address_of(options)
    found = with_store(address, lambda store: store.quarantine.stats())
    reasons = {address.redactor(reason): number for reason, number in found.by_reason.items()}
    oldest = time_text(found.oldest_at)
    data = {
        "total": found.total,
        "by_type": found.by_kind,
        "by_source": found.by_source,
        "by_reason": reasons,
        "oldest_at": oldest,
    }

    def text() -> None:
        rows = [("type", name, str(number)) for name, number in found.by_kind.items()]
        rows += [("source", name, str(number)) for name, number in found.by_source.items() if name]
        rows += [("reason", name, str(number)) for name, number in reasons.items()]
        put_table(("by", "", "jobs"), [*rows, ("total", "", str(found.total))], styles=("cyan",))
        if oldest:
            say(f"the oldest was quarantined at {oldest}")

    show(data, text, json=options.json)


# ---- requeue, discard, purge -----------------------------------------------------------------------------------------


@app.command(
    help_epilogue=examples("quarantine requeue order-7", "quarantine requeue --reason attempts_spent --dry-run")
)
def requeue(
    *ids: Id,
    tenant: TenantOfIds = None,
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Queue jobs again, under their own ids and with a fresh retry budget."""
    action = BulkAction("requeue", "requeued", options)
    return action.run(
        lambda store, chosen, events: store.quarantine.requeue(chosen, who=action.address.actor, events=events),
        _selected(ids, tenant, flags, all_=all_),
    )


@app.command(help_epilogue=examples("quarantine discard order-7 --because 'the order was withdrawn'"))
def discard(
    *ids: Id,
    tenant: TenantOfIds = None,
    because: Annotated[str, arg("Reason, for the audit log.")] = "",
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Give jobs up for good. They stay in the store as discarded."""
    action = BulkAction("discard", "discarded", options, because)
    return action.run(
        lambda store, chosen, events: store.quarantine.discard(
            chosen, who=action.address.actor, reason=because, events=events
        ),
        _selected(ids, tenant, flags, all_=all_),
    )


@app.command(help_epilogue=examples("quarantine purge --before 30d --dry-run"))
def purge(
    *ids: Id,
    tenant: TenantOfIds = None,
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Delete jobs, payloads included. Only the audit log remembers them."""
    return BulkAction("purge", "purged", options).run(
        lambda store, chosen, events: store.quarantine.purge(chosen, events=events),
        _selected(ids, tenant, flags, all_=all_),
    )


Act = Callable[["Store", "QuarantineFilter", "list[AuditEntry]"], Awaitable[list[str]]]


def _selected(ids: tuple[str, ...], tenant: str | None, flags: QuarantineFlags, *, all_: bool) -> QuarantineFilter:
    """The selected jobs. No selection is an error: it must not mean all of them."""
    if tenant is not None and not ids:
        raise CommandError("--tenant: accepted with the ids of jobs, whose tenant it is; give ids")
    if not ids and flags == NO_FILTER and not all_:
        raise CommandError("select jobs by ids, a filter (--type, --source, --reason, --before), or --all")
    return flags.filter(tuple(dict.fromkeys(record_id(one, tenant) for one in ids)))


class ChangedJobs:
    """The records that an action has changed: the first few, their number, and all of them as lines of JSON on disk."""

    def __init__(self, wanted: tuple[str, ...], lines: IO[str]) -> None:
        self.first: list[str] = []
        self.count = 0
        self.missing = set(wanted)
        self._lines = lines

    def add(self, ids: Sequence[str]) -> None:
        self.first += ids[: MOST_SHOWN - len(self.first)]
        self.count += len(ids)
        self.missing.difference_update(ids)
        self._lines.writelines(f"{dumps(one)}\n" for one in ids)

    def as_json(self, part: int) -> Iterator[str]:
        """The assignment ids (part 0) or the tenants (part 1) as a list of JSON, in pieces."""
        self._lines.seek(0)
        before = "["
        for line in self._lines:
            yield f"{before}\n    {dumps(assignment_and_tenant(loads(line))[part])}"
            before = ","
        yield "[]" if before == "[" else "\n  ]"


class BulkAction:
    """An audited action on the selected jobs, in chunks. Their number is printed before the first is changed."""

    def __init__(self, verb: str, participle: str, options: OperatorFlags, because: str = "") -> None:
        self.address = address_of(options)
        self._verb = verb
        self._participle = participle
        self._options = options
        self._because = because

    def run(self, act: Act, wanted: QuarantineFilter) -> int:
        dry_run, done = self._options.dry_run, self._participle
        with TemporaryFile("w+", encoding="utf-8") as lines:
            changed = ChangedJobs(wanted.ids, lines)
            with_store(self.address, lambda store: self._apply(store, act, wanted, changed))
            missing = [assignment_and_tenant(one)[0] for one in sorted(changed.missing)]
            if self._options.json:
                fields = {"missing": missing, "count": changed.count, "actor": self.address.actor, "dry_run": dry_run}
                put_json(fields, first={done: changed.as_json(0), "tenant_ids": changed.as_json(1)})
        if not self._options.json:
            for name, tenant in map(assignment_and_tenant, changed.first):
                put(f"{name}{f' of {tenant}' if tenant else ''} {'would be ' if dry_run else ''}{done}")
            if changed.count > MOST_SHOWN:
                put(f"… and {changed.count - MOST_SHOWN} more")
        if self._verb == "requeue" and changed.count and not dry_run:
            say("a running system picks them up within seconds; to start one: reefknot up")
        return Exit.FAILED if missing else Exit.FINE

    async def _apply(self, store: Store, act: Act, wanted: QuarantineFilter, changed: ChangedJobs) -> None:
        """Change the jobs, or with --dry-run only collect their records."""
        dry_run = self._options.dry_run
        counts = await store.quarantine.count(wanted)
        total = sum(counts.values())
        if total:
            kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            say(f"{total} {'would be' if dry_run else 'to be'} {self._participle}: {kinds}")
        elif not wanted.ids:
            say("no job matches")
        if dry_run and not self._options.json and not wanted.ids:  # what is shown is enough
            changed.add([item.id for item in await store.quarantine.find(wanted, limit=MOST_SHOWN)])
            changed.count = total
            return
        after = ""
        with progress(self._verb, total) as advance:
            while chunk := await store.quarantine.find(wanted, after=after, limit=CHUNK):
                ids, after = tuple(item.id for item in chunk), chunk[-1].id
                done = ids if dry_run else await act(store, QuarantineFilter(ids=ids), self._events(chunk))
                changed.add(done)
                advance(len(chunk))
        await _report_missing(store, sorted(changed.missing))

    def _events(self, items: list[WorkItem]) -> list[AuditEntry]:
        """Audit entries: one for the action, and for `requeue` one per job."""
        from reefknot import clock
        from reefknot.audit.journal import Journal, about_item
        from reefknot.core.audit.event import Requeued

        subject = items[0].assignment_id if len(items) == 1 else None
        tenants = [item.tenant_id for item in items]
        tenant = tenants[0] if len(set(tenants)) == 1 else None
        details: dict[str, Any] = {"count": len(items), "ids": [item.assignment_id for item in items]}
        if any(tenants):
            details["tenant_ids"] = tenants
        if self._because:
            details["reason"] = self._because
        events = [self.address.event(f"quarantine.{self._verb}", subject, tenant_id=tenant, **details)]
        if self._verb == "requeue":
            reason, wall = f"taken out of quarantine by {self.address.actor}", clock.wall()
            returning = [
                Requeued(**about_item(item, wall), reason=reason, generation=item.generation + 1) for item in items
            ]
            events += Journal(None, redactor=self.address.redactor).entries(returning)
        return events


async def _report_missing(store: Store, names: list[str]) -> None:
    """Print the state of named jobs that are not in quarantine."""
    now = await now_in(store) if names else None
    for name in names[:MOST_SHOWN]:
        item, (job, tenant) = await store.work.get(name), assignment_and_tenant(name)
        state = "there is no such job" if item is None or now is None else f"it is {job_fields(item, now)['state']}"
        hint = tenant_hint(tenant) if item is None else ""
        say(f"{named(job, tenant)} is not in quarantine: {state}; `quarantine list` shows what is{hint}")
    if len(names) > MOST_SHOWN:
        say(f"… and {len(names) - MOST_SHOWN} more are not")


def _fields(item: WorkItem, address: StoreAddress) -> dict[str, Any]:
    return {
        "id": item.assignment_id,
        "tenant_id": item.tenant_id,
        "type": item.kind,
        "source": item.source or None,
        "class": item.resource_class.partition("@")[0],
        "attempts": item.attempts,
        "crashes": item.crashes,
        "reason": address.redactor(item.reason),
        "since": time_text(item.updated_at),
        "created_at": time_text(item.created_at),
    }
