"""`reefknot quarantine`: jobs that wait for an operator's decision. Every decision is audited with its actor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli import bulk_actions
from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.bulk_actions import BulkAction, named, tenant_hint
from reefknot.cli.job import job_details, put_details, state_in_words
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
    time_arg,
    time_ms,
)
from reefknot.cli.output import put_jobs, put_table, say, show, time_text
from reefknot.cli.store import StoreAddress, address_of, address_to_read, with_store
from reefknot.cli.watch import Watch, repeated
from reefknot.core.work import WorkItem, record_id
from reefknot.ports.work_queue import QuarantineFilter

if TYPE_CHECKING:
    from reefknot.ports.store import Store

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
    before: Annotated[str | None, time_arg("Only jobs quarantined before a time, or an age: 90s, 15m, 2h, 7d.")] = None

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
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """List quarantined jobs by id, each with its reason."""
    check_whole("--limit", limit)
    address, wanted = address_of(options), flags.filter()
    repeated(watch, lambda: _list(address, wanted, limit, after, wide=wide, json=options.json))


def _list(address: StoreAddress, wanted: QuarantineFilter, limit: int, after: str, *, wide: bool, json: bool) -> None:
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
        if not is_on:
            say(
                "worker.quarantine_failed is off here: jobs that fail are not quarantined. `job list --state failed` "
                "lists them, `job retry` runs them again"
            )

    is_on = address.settings is not None and address.settings.configuration.worker.quarantine_failed
    fields = {"items": [_fields(item, address) for item in items], "next": following, "quarantine_failed": is_on}
    show(fields, text, json=json)


@app.command(name="show", help_epilogue=examples("quarantine show order-7", "quarantine show order-7 --tenant acme"))
def show_item(job: Id, /, *, tenant: Tenant = None, options: StoreFlags = STORE) -> None:
    """Show one quarantined job: payload, reason, failure, history. Secrets are hidden."""
    address = address_to_read(options)
    item = with_store(address, lambda store: store.quarantine.show(record_id(job, tenant)))
    if item is None:
        text = f"{named(job, tenant)} is not in quarantine; `quarantine list` shows what is{tenant_hint(tenant)}"
        raise CommandError(text, Exit.FAILED)
    fields = {**_fields(item, address), **job_details(item, address.redactor)}
    show(fields, lambda: put_details(fields), json=options.json)


@app.command(help_epilogue=examples("quarantine stats --json"))
def stats(*, options: StoreFlags = STORE) -> None:
    """Count quarantined jobs by type, source and reason."""
    address = address_to_read(options)
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
    action = BulkAction("quarantine.requeue", "requeued", options, requeues="taken out of quarantine")
    return action.run(
        _selected(ids, tenant, flags, all_=all_),
        lambda store, chosen, events: store.quarantine.requeue(
            QuarantineFilter(chosen), who=action.address.actor, events=events
        ),
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
    action = BulkAction("quarantine.discard", "discarded", options, because=because)
    return action.run(
        _selected(ids, tenant, flags, all_=all_),
        lambda store, chosen, events: store.quarantine.discard(
            QuarantineFilter(chosen), who=action.address.actor, reason=because, events=events
        ),
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
    return BulkAction("quarantine.purge", "purged", options).run(
        _selected(ids, tenant, flags, all_=all_),
        lambda store, chosen, events: store.quarantine.purge(QuarantineFilter(chosen), events=events),
    )


class QuarantinedJobs(Struct, frozen=True):
    """The selected jobs of a quarantine, in the order of their ids."""

    which: QuarantineFilter

    @property
    def ids(self) -> tuple[str, ...]:
        return self.which.ids

    async def count(self, store: Store) -> dict[str, int]:
        return await store.quarantine.count(self.which)

    async def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        after = ""
        while chunk := await store.quarantine.find(self.which, after=after, limit=bulk_actions.CHUNK):
            after = chunk[-1].id
            yield chunk

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        state = "there is no such job" if item is None else f"it is {await state_in_words(store, item)}"
        return f"is not in quarantine: {state}; `quarantine list` shows what is"


def _selected(ids: tuple[str, ...], tenant: str | None, flags: QuarantineFlags, *, all_: bool) -> QuarantinedJobs:
    """The selected jobs. No selection is an error: it must not mean all of them."""
    if tenant is not None and not ids:
        raise CommandError("--tenant: accepted with the ids of jobs, whose tenant it is; give ids")
    if not ids and flags == NO_FILTER and not all_:
        raise CommandError("select jobs by ids, a filter (--type, --source, --reason, --before), or --all")
    return QuarantinedJobs(flags.filter(tuple(dict.fromkeys(record_id(one, tenant) for one in ids))))


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
