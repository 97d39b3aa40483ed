"""`reefknot quarantine`: jobs that wait for an operator's decision. Every decision is audited with its actor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli import job_actions
from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.job import job_details, put_details, state_in_words
from reefknot.cli.job_actions import BulkAction, PayloadEdit, named, put_payload, tenant_hint
from reefknot.cli.options import (
    OPERATOR,
    STORE,
    FileName,
    Limit,
    OperatorFlags,
    StoreFlags,
    Tenant,
    Wide,
    arg,
    check_filters,
    check_whole,
    file_arg,
    time_arg,
    time_ms,
)
from reefknot.cli.output import put_jobs, put_table, say, show, time_text
from reefknot.cli.store import StoreAddress, address_of, address_to_read, with_store
from reefknot.cli.watch import Watch, repeated
from reefknot.core.failure_groups import failure_summary
from reefknot.core.work import WorkItem, WorkState, record_id
from reefknot.ports.work_queue import ALL, QuarantineFilter

if TYPE_CHECKING:
    from reefknot.ports.store import Store

app = noun("quarantine", "quarantine list")

Id = Annotated[str, arg("Assignment id.")]
TenantOfIds = Annotated[str | None, arg("Tenant of the named jobs. Default: none.")]
All = Annotated[bool, arg("Select all quarantined jobs.", "--all")]
Because = Annotated[str, arg("Reason, for the job's history and the audit log.")]
Group = Annotated[bool, arg("Group jobs by the fingerprint of their failure: one group for one cause.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class QuarantineFlags:
    """Filter of quarantined jobs. A job must match every given flag."""

    type: Annotated[str | None, arg("Only steps of this type.")] = None
    source: Annotated[str | None, arg("Only jobs of this source.")] = None
    reason: Annotated[str | None, arg("Only jobs whose reason contains this text.")] = None
    before: Annotated[str | None, time_arg("Only jobs quarantined before a time, or an age: 90s, 15m, 2h, 7d.")] = None
    fingerprint: Annotated[str | None, arg("Only jobs of this group of `quarantine stats --group`.")] = None

    def filter(self, ids: tuple[str, ...] = ()) -> QuarantineFilter:
        check_filters(type=self.type, source=self.source, reason=self.reason, fingerprint=self.fingerprint)
        before = time_ms("--before", self.before)
        return QuarantineFilter(ids, self.type, self.source, self.reason, before, self.fingerprint)


NO_FILTER = QuarantineFlags()


@app.command(
    name="list", help_epilogue=examples("quarantine list", "quarantine list --source notes", "quarantine list --group")
)
def list_(
    *,
    flags: QuarantineFlags = NO_FILTER,
    group: Group = False,
    limit: Limit = 50,
    after: Annotated[str, arg("Continue after the cursor that the last page gave as `next`.")] = "",
    wide: Wide = False,
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """List quarantined jobs by id, each with its reason."""
    check_whole("--limit", limit)
    address, wanted = address_of(options), flags.filter()
    if group:
        repeated(watch, lambda: _put_groups(address, wanted, limit, json=options.json))
        return
    repeated(watch, lambda: _list(address, wanted, limit, after, wide=wide, json=options.json))


def _list(address: StoreAddress, wanted: QuarantineFilter, limit: int, after: str, *, wide: bool, json: bool) -> None:
    items = with_store(address, lambda store: store.quarantine.find(wanted, after=unquote(after), limit=limit))
    following = quote(items[-1].id) if len(items) == limit else None
    has_source = any(item.source for item in items)

    def row(item: WorkItem) -> tuple[str, ...]:
        since, reason = time_text(item.updated_at) or "", address.redactor(item.reason)
        failure = failure_summary(item).failure_type
        source = (item.source,) if has_source else ()
        return item.assignment_id, item.kind, *source, str(item.attempts), failure, since, reason

    def text() -> None:
        columns = ("job", "type", *(("source",) if has_source else ()), "attempts", "failure", "since", "reason")
        tenants = [item.tenant_id or "" for item in items]
        whole, optional = ("job", "tenant", "since"), ("attempts", "since", "failure", "source")
        put_jobs(columns, map(row, items), tenants, styles=("cyan",), whole=whole, optional=optional, wide=wide)
        say(f"{len(items)} shown" + (f"; there may be more: --after {following}" if following else ""))
        if not is_on and not items and wanted.source is None:  # it is not about the jobs of sources
            say(
                "worker.quarantine_failed is off here: assignments that fail are not quarantined. "
                "`job list --state failed` lists them, `job retry` runs them again"
            )

    is_on = address.settings is not None and address.settings.configuration.worker.quarantine_failed
    fields = {"items": [_fields(item, address) for item in items], "next": following, "quarantine_failed": is_on}
    show(fields, text, json=json)


def _put_groups(address: StoreAddress, wanted: QuarantineFilter, limit: int, *, json: bool) -> None:
    found = with_store(address, lambda store: store.quarantine.groups(wanted))
    groups = found.groups()
    fields = [
        {
            "fingerprint": one.fingerprint,
            "count": one.count,
            "failure_type": one.failure_type or None,
            "code": one.code or None,
            "message": address.redactor(one.message),
            "oldest_at": time_text(one.oldest_at),
            "newest_at": time_text(one.newest_at),
            "types": one.kinds,
            "sources": one.sources,
        }
        for one in groups[:limit]
    ]

    def row(one: dict[str, Any]) -> tuple[str, ...]:
        of = ", ".join(one["sources"] or one["types"])
        return one["fingerprint"], str(one["count"]), one["failure_type"] or "", of, one["newest_at"], one["message"]

    def text() -> None:
        columns = ("fingerprint", "count", "failure", "of", "newest", "message")
        put_table(columns, map(row, fields), styles=("cyan",), whole=("fingerprint",), optional=("newest", "of"))
        say(f"{len(fields)} of {len(groups)} groups shown; the jobs of one: quarantine list --fingerprint FINGERPRINT")
        if found.ungrouped:
            say(f"{found.ungrouped} more jobs are in none of them: there are too many different failures")

    show({"groups": fields, "ungrouped": found.ungrouped}, text, json=json)


@app.command(
    name="show",
    help_epilogue=examples("quarantine show order-7", "quarantine show order-7 --payload-only > order.json"),
)
def show_item(
    job: Id,
    /,
    *,
    tenant: Tenant = None,
    payload_only: Annotated[
        bool, arg("Print only the payload, to edit it and give it to `requeue --payload`.")
    ] = False,
    options: StoreFlags = STORE,
) -> None:
    """Show one quarantined job: payload, reason, failure, history. Secrets are hidden."""
    address = address_to_read(options)
    item = with_store(address, lambda store: store.quarantine.show(record_id(job, tenant)))
    if item is None:
        text = f"{named(job, tenant)} is not in quarantine; `quarantine list` shows what is{tenant_hint(tenant)}"
        raise CommandError(text, Exit.FAILED)
    if payload_only:
        put_payload(item, address)
        return
    fields = {**_fields(item, address), **job_details(item, address.redactor)}
    show(fields, lambda: put_details(fields), json=options.json)


@app.command(help_epilogue=examples("quarantine stats --json", "quarantine stats --group"))
def stats(*, group: Group = False, limit: Limit = 50, options: StoreFlags = STORE) -> None:
    """Count quarantined jobs by type, source and reason."""
    check_whole("--limit", limit)
    address = address_to_read(options)
    if group:
        _put_groups(address, ALL, limit, json=options.json)
        return
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
    help_epilogue=examples(
        "quarantine requeue order-7 --because 'the address was corrected'",
        "quarantine requeue --reason attempts_spent --dry-run",
        "quarantine requeue order-7 --payload order.json",
    )
)
def requeue(
    *ids: Id,
    tenant: TenantOfIds = None,
    because: Because = "",
    payload: Annotated[
        FileName | None,
        file_arg("Edited payload of one job, as JSON; - is stdin. It runs as ID~2.", allow_leading_hyphen=True),
    ] = None,
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Queue jobs again, under their own ids and with a fresh retry budget."""
    if payload is not None:
        if len(ids) != 1 or flags != NO_FILTER or all_:
            raise CommandError("--payload: accepted with the id of one job, whose payload it is, and without a filter")
        return PayloadEdit(_selected(ids, tenant, flags, all_=False), because, options).run(payload)
    action = BulkAction("quarantine.requeue", "requeued", options, because=because, requeues="taken out of quarantine")
    return action.run(
        _selected(ids, tenant, flags, all_=all_),
        lambda store, chosen, events: store.quarantine.requeue(
            QuarantineFilter(chosen), who=action.address.actor, why=because, events=events
        ),
    )


@app.command(help_epilogue=examples("quarantine discard order-7 --because 'the order was withdrawn'"))
def discard(
    *ids: Id,
    tenant: TenantOfIds = None,
    because: Because = "",
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Give jobs up for good, with the reason. They stay in the store as discarded."""
    selected = _selected(ids, tenant, flags, all_=all_)
    if not because.strip() and not options.dry_run:
        text = (
            "--because: a reason is required, for whoever asks later; for example: --because 'the order was withdrawn'"
        )
        raise CommandError(text)
    action = BulkAction("quarantine.discard", "discarded", options, because=because)
    return action.run(
        selected,
        lambda store, chosen, events: store.quarantine.discard(
            QuarantineFilter(chosen), who=action.address.actor, reason=because, events=events
        ),
    )


@app.command(
    help_epilogue=examples(
        "quarantine purge --before 30d --dry-run", "quarantine purge order-7 --because 'it was only a test'"
    )
)
def purge(
    *ids: Id,
    tenant: TenantOfIds = None,
    because: Annotated[str, arg("Reason, for the audit log.")] = "",
    flags: QuarantineFlags = NO_FILTER,
    all_: All = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Delete jobs, payloads included. Only the audit log remembers them."""
    return BulkAction("quarantine.purge", "purged", options, because=because).run(
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
        while chunk := await store.quarantine.find(self.which, after=after, limit=job_actions.CHUNK):
            after = chunk[-1].id
            yield chunk

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        if item is not None and item.state is WorkState.QUARANTINED:
            return "does not match the filter; `quarantine show` shows what it is"
        state = "there is no such job" if item is None else f"it is {await state_in_words(store, item)}"
        return f"is not in quarantine: {state}; `quarantine list` shows what is"


def _selected(ids: tuple[str, ...], tenant: str | None, flags: QuarantineFlags, *, all_: bool) -> QuarantinedJobs:
    """The selected jobs. No selection is an error: it must not mean all of them."""
    if tenant is not None and not ids:
        raise CommandError("--tenant: accepted with the ids of jobs, whose tenant it is; give ids")
    if ids and all_:
        raise CommandError("--all: not together with ids, which name the jobs; give one of them")
    if not ids and flags == NO_FILTER and not all_:
        raise CommandError(
            "select jobs by ids, a filter (--type, --source, --reason, --before, --fingerprint), or --all"
        )
    return QuarantinedJobs(flags.filter(tuple(dict.fromkeys(record_id(one, tenant) for one in ids))))


def _fields(item: WorkItem, address: StoreAddress) -> dict[str, Any]:
    failure = failure_summary(item)
    return {
        "id": item.assignment_id,
        "tenant_id": item.tenant_id,
        "type": item.kind,
        "source": item.source or None,
        "class": item.resource_class.partition("@")[0],
        "attempts": item.attempts,
        "crashes": item.crashes,
        "reason": address.redactor(item.reason),
        "failure_type": failure.failure_type or None,
        "message": address.redactor(failure.message),
        "fingerprint": failure.fingerprint,
        "since": time_text(item.updated_at),
        "created_at": time_text(item.created_at),
    }
