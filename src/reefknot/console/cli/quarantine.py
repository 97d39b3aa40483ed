"""`reefknot quarantine`: jobs that wait for an operator's decision. Every decision is audited with its actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.job import put_details
from reefknot.console.cli.job_actions import put_edit, put_payload, read_payload, reported
from reefknot.console.cli.options import (
    OPERATOR,
    STORE,
    FileName,
    Limit,
    OperatorFlags,
    StoreFlags,
    Tenant,
    Wide,
    arg,
    file_arg,
    time_arg,
)
from reefknot.console.cli.output import put_jobs, put_table, say, show
from reefknot.console.cli.store import StoreAddress, address_of, address_to_read, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations.quarantine import (
    DISCARD,
    FILTERS,
    PURGE,
    REQUEUE,
    QuarantineQuery,
    check_reason,
    discard_jobs,
    edit_and_requeue,
    editable_payload,
    list_quarantined,
    purge_jobs,
    quarantine_groups,
    quarantine_stats,
    requeue_jobs,
    show_quarantined,
)

app = noun("quarantine", "quarantine list")

Id = Annotated[str, arg("Assignment id.")]
TenantOfIds = Annotated[str | None, arg("Tenant of the named jobs; without ids, all quarantined jobs of it.")]
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
    error: Annotated[str | None, arg("Only jobs whose reason or failure contains this text.")] = None
    since: Annotated[str | None, time_arg("Only jobs quarantined since a time, or an age: 90s, 15m, 2h, 7d.")] = None
    before: Annotated[str | None, time_arg("Only jobs quarantined before a time, or an age: 90s, 15m, 2h, 7d.")] = None
    fingerprint: Annotated[str | None, arg("Only jobs of this group of `quarantine stats --group`.")] = None

    def query(self, ids: tuple[str, ...] = (), tenant: str | None = None, **more: Any) -> QuarantineQuery:
        return QuarantineQuery(
            ids=ids,
            tenant=tenant,
            type=self.type,
            source=self.source,
            reason=self.reason,
            error=self.error,
            since=self.since,
            before=self.before,
            fingerprint=self.fingerprint,
            **more,
        )

    def selected(self, ids: tuple[str, ...], tenant: str | None, *, all_: bool) -> QuarantineQuery:
        """The selected jobs of an action. No selection is an error: it must not mean all of them."""
        if not ids and tenant is None and self == NO_FILTER and not all_:
            raise CommandError(f"select jobs by ids, a filter ({', '.join(f'--{name}' for name in FILTERS)}), or --all")
        return self.query(ids, tenant, all=all_)


NO_FILTER = QuarantineFlags()


@app.command(
    name="list", help_epilogue=examples("quarantine list", "quarantine list --source notes", "quarantine list --group")
)
def list_(
    *,
    flags: QuarantineFlags = NO_FILTER,
    tenant: Annotated[str | None, arg("Only jobs of this tenant.")] = None,
    group: Group = False,
    limit: Limit = 50,
    after: Annotated[str, arg("Continue after the cursor that the last page gave as `next`.")] = "",
    wide: Wide = False,
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """List quarantined jobs by id, each with its reason."""
    query, address = flags.query(tenant=tenant, limit=limit, after=after), address_of(options, looks=True)
    if group:
        repeated(watch, lambda: _put_groups(address, query, json=options.json))
        return
    repeated(watch, lambda: _list(address, query, wide=wide, json=options.json))


def _list(address: StoreAddress, query: QuarantineQuery, *, wide: bool, json: bool) -> None:
    answer = with_store(address, lambda store: list_quarantined(address.operator(store), query))
    items, following = answer["items"], answer["next"]
    has_source = any(item["source"] for item in items)

    def row(item: dict[str, Any]) -> tuple[str, ...]:
        source = (item["source"] or "",) if has_source else ()
        failure, since = item["failure_type"] or "", item["since"] or ""
        return item["id"], item["type"], *source, str(item["attempts"]), failure, since, item["reason"]

    def text() -> None:
        columns = ("job", "type", *(("source",) if has_source else ()), "attempts", "failure", "since", "reason")
        tenants = [item["tenant_id"] or "" for item in items]
        whole, optional = ("job", "tenant", "since"), ("attempts", "since", "failure", "source")
        put_jobs(columns, map(row, items), tenants, styles=("cyan",), whole=whole, optional=optional, wide=wide)
        say(f"{len(items)} shown" + (f"; there may be more: --after {following}" if following else ""))
        if not answer["quarantine_failed"] and not items and query.source is None:  # it is not about jobs of sources
            say(
                "worker.quarantine_failed is off here: assignments that fail are not quarantined. "
                "`job list --state failed` lists them, `job retry` runs them again"
            )

    show(answer, text, json=json)


def _put_groups(address: StoreAddress, query: QuarantineQuery, *, json: bool) -> None:
    answer = with_store(address, lambda store: quarantine_groups(address.operator(store), query))
    total, groups, ungrouped = answer.pop("total"), answer["groups"], answer["ungrouped"]

    def row(one: dict[str, Any]) -> tuple[str, ...]:
        of = ", ".join(one["sources"] or one["types"])
        return one["fingerprint"], str(one["count"]), one["failure_type"] or "", of, one["newest_at"], one["message"]

    def text() -> None:
        columns = ("fingerprint", "count", "failure", "of", "newest", "message")
        put_table(columns, map(row, groups), styles=("cyan",), whole=("fingerprint",), optional=("newest", "of"))
        say(f"{len(groups)} of {total} groups shown; the jobs of one: quarantine list --fingerprint FINGERPRINT")
        if ungrouped:
            say(f"{ungrouped} more jobs are in none of them: there are too many different failures")

    show(answer, text, json=json)


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
    if payload_only:
        put_payload(with_store(address, lambda store: editable_payload(address.operator(store), job, tenant)))
        return
    fields = with_store(address, lambda store: show_quarantined(address.operator(store), job, tenant))
    show(fields, lambda: put_details(fields), json=options.json)


@app.command(help_epilogue=examples("quarantine stats --json", "quarantine stats --group"))
def stats(*, group: Group = False, limit: Limit = 50, options: StoreFlags = STORE) -> None:
    """Count quarantined jobs by type, source and reason."""
    query, address = QuarantineQuery(limit=limit), address_to_read(options)
    if group:
        _put_groups(address, query, json=options.json)
        return
    found = with_store(address, lambda store: quarantine_stats(address.operator(store)))

    def text() -> None:
        rows = [("type", name, str(number)) for name, number in found["by_type"].items()]
        rows += [("source", name, str(number)) for name, number in found["by_source"].items() if name]
        rows += [("reason", name, str(number)) for name, number in found["by_reason"].items()]
        put_table(("by", "", "jobs"), [*rows, ("total", "", str(found["total"]))], styles=("cyan",))
        if found["oldest_at"]:
            say(f"the oldest was quarantined at {found['oldest_at']}")

    show(found, text, json=options.json)


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
        return _edit(ids[0], tenant, read_payload(payload), because, options)
    query = flags.selected(ids, tenant, all_=all_)
    return reported(REQUEUE, requeue_jobs, query, because=because, options=options)


def _edit(job: str, tenant: str | None, payload: dict[str, Any], because: str, options: OperatorFlags) -> int:
    address, dry_run = address_of(options), options.dry_run
    answer = with_store(
        address,
        lambda store: edit_and_requeue(
            address.operator(store), job, tenant=tenant, payload=payload, because=because, dry_run=dry_run
        ),
    )
    put_edit(answer, json=options.json)
    return Exit.FINE


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
    query = flags.selected(ids, tenant, all_=all_)
    if not options.dry_run:
        check_reason(because)
    return reported(DISCARD, discard_jobs, query, because=because, options=options)


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
    query = flags.selected(ids, tenant, all_=all_)
    return reported(PURGE, purge_jobs, query, because=because, options=options)
