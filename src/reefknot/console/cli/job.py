"""`reefknot job`: list, show, cancel and retry jobs. A job is an assignment with its state and its story."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.job_actions import reported
from reefknot.console.cli.options import OPERATOR, STORE, Limit, OperatorFlags, StoreFlags, Tenant, Wide, arg, time_arg
from reefknot.console.cli.output import (
    flush_stdout,
    put,
    put_document,
    put_fields,
    put_jobs,
    put_json,
    reader_is_gone,
    say,
    show,
)
from reefknot.console.cli.store import address_of, address_to_read, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations.job_notes import progress_in_words
from reefknot.console.operations.jobs import (
    CANCEL,
    RETRY,
    CancelQuery,
    JobQuery,
    RetryQuery,
    cancel_job,
    cancel_jobs,
    find_job,
    job_logs,
    list_jobs,
    retry_jobs,
    show_job,
)
from reefknot.console.operations.values import age, plural

if TYPE_CHECKING:
    from reefknot.audit.port import KeptEntry
    from reefknot.stores.port import Store

app = noun("job", "job list --state pending")

Id = Annotated[str, arg("Assignment id.")]


Because = Annotated[str, arg("Reason, for the job's history and the audit log.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """Filter of jobs, the same for a list and for an action. A job must match every given flag."""

    state: Annotated[str | None, arg("Only this state: pending, running, succeeded, failed, quarantined, …")] = None
    type: Annotated[str | None, arg("Only steps of this type.")] = None
    tenant: Annotated[str | None, arg("Only jobs of this tenant; of named jobs, their tenant.")] = None
    source: Annotated[str | None, arg("Only jobs of this source.")] = None
    connector: Annotated[str | None, arg("Only jobs of sources of this connector, such as imap_mailbox.")] = None
    resource_class: Annotated[str | None, arg("Only jobs of this resource class: cpu, io, …", "--class")] = None
    error: Annotated[str | None, arg("Only jobs whose reason or last failure contains this text.")] = None
    since: Annotated[str | None, time_arg("Only jobs submitted since a time, or an age: 90s, 15m, 2h, 7d.")] = None
    before: Annotated[str | None, time_arg("Only jobs submitted before a time, or an age.")] = None
    correlation: Annotated[str | None, arg("Only jobs of this correlation id.")] = None
    trace: Annotated[str | None, arg("Only jobs of this trace id.")] = None


NO_FILTER = JobFlags()


@app.command(
    name="list",
    help_epilogue=examples("job list", "job list --state running --json", "job list --correlation checkout-7"),
)
def list_(
    *,
    flags: JobFlags = NO_FILTER,
    sort: Annotated[str, arg("Order by submission: newest or oldest first. Default: newest.")] = "newest",
    limit: Limit = 50,
    after: Annotated[str, arg("Continue after the cursor that the last page gave as `next`.")] = "",
    wide: Wide = False,
    watch: Watch = None,
    options: StoreFlags = STORE,
) -> None:
    """List jobs, the newest first; pending ones with their due time."""
    query = JobQuery(**asdict(flags), sort=sort, limit=limit, after=after)
    address = address_to_read(options)

    def draw() -> None:
        found = with_store(address, lambda store: list_jobs(address.operator(store), query))

        def text() -> None:
            _put_jobs(found["jobs"], wide=wide)
            _say_totals(found, "all jobs" if query.is_filtered else "total")
            for one in found["unserved"]:
                say(f"problem: {one['text']}; {one['remedy']}")
            if found["next"] is not None:
                is_cut = len(found["jobs"]) < limit
                why = "search limit reached" if is_cut else "there may be more"
                say(f"{why}; continue with --after {found['next']}")

        show(found, text, json=options.json)

    repeated(watch, draw)


def _put_jobs(jobs: list[dict[str, Any]], *, wide: bool) -> None:
    columns = ("job", "type", "state", "attempts", "due", "age", "worker", "reason")
    tenants = [one["tenant_id"] or "" for one in jobs]
    optional = ("worker", "attempts", "due", "reason", "age")
    styles, whole = ("cyan", "", "bold"), ("job", "tenant", "state", "due", "age")
    put_jobs(columns, map(_row, jobs), tenants, styles=styles, whole=whole, optional=optional, wide=wide)


def _say_totals(counts: dict[str, Any], name: str) -> None:
    totals = ", ".join(f"{number} {name}" for name, number in counts["states"].items() if number)
    waiting = f"; {counts['waiting_for_router']} not with a worker yet" if counts["waiting_for_router"] else ""
    oldest = f"; the oldest job has been due for {age(counts['oldest_due_s'])}" if counts["oldest_due_s"] else ""
    say(f"{name}: {totals or 'none with a worker'}{waiting}{oldest}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    due = one["due_in_s"]
    return (
        one["id"],
        one["type"],
        one["state"],
        str(one["attempts"] + (one["state"] == "running")),  # with the one that runs
        "" if due is None else "now" if due <= 0 else f"in {age(due)}",
        age(one["age_s"]),
        one["worker"] or ("router" if one["class"] is None else ""),
        (one["reason"] or "")[:80]
        if one["waiting"] is None or one["state"] == "quarantined"
        else one["waiting"]["text"],
    )


@app.command(name="show", help_epilogue=examples("job show order-7", "job show order-7 --tenant acme"))
def show_(job: Id, /, *, tenant: Tenant = None, options: StoreFlags = STORE) -> None:
    """Show everything about one job: state, attempts, history, audited events and result."""
    address = address_to_read(options)
    if options.json:
        put_json(with_store(address, lambda store: show_job(address.operator(store), job, tenant)))
        return
    found = with_store(address, lambda store: find_job(address.operator(store), job, tenant))
    fields = found.fields(address.redactor)
    if fields["state"] == "running":
        fields["attempts"] = f"{fields['attempts'] + 1} (running)"
    if fields["progress"] is not None:
        fields["progress"] = progress_in_words(fields["progress"])
    if fields["waiting"] is not None:
        fields["waiting"] = f"{fields['waiting']['text']}; {fields['waiting']['remedy']}"
    numbers = ", ".join(f"{number} {state}" for state, number in fields.pop("children_by_state").items())
    for name in ("children", "after"):
        fields[name] = ", ".join(f"{one['id']} ({one['state']})" for one in fields[name]) or None
    if fields["children"]:
        fields["children"] = f"{numbers}: {fields['children']}"
    put_details({name: value for name, value in fields.items() if name != "history"})
    for line in _timeline(fields["history"], found.kept):
        put(address.redactor(line))
    if fields["waiting"] is not None:  # what keeps every job from running is no fact of this one
        from reefknot.console.cli.doctor import configuration_problems, disk_problems

        for line in (*configuration_problems(options, address), *disk_problems(address)):
            say(address.redactor(line))


FOLLOWED_EVERY_S = 1.0


@app.command(name="logs", help_epilogue=examples("job logs order-7", "job logs order-7 --follow"))
def logs_(
    job: Id,
    /,
    *,
    follow: Annotated[bool, arg("Continue with new lines until the job has ended.", "--follow", "-f")] = False,
    tenant: Tenant = None,
    options: StoreFlags = STORE,
) -> None:
    """Show the lines that the steps of a job logged, with time and attempt. With --json, an object per line."""
    address = address_to_read(options)

    async def work(store: Store) -> None:
        after = 0
        while True:
            found = await job_logs(address.operator(store), job, tenant, after)
            if (gone := found["dropped"] - after) > 0:
                say(f"{plural(gone, 'earlier line')} not kept: a job has its last 200, or 32 kB")
            for line in found["lines"]:
                text = f"{line['at']}  attempt {line['attempt']}  {line['text']}"
                put(dumps(line) if options.json else text)
            flush_stdout()
            after = found["lines"][-1]["number"] if found["lines"] else max(after, found["dropped"])
            if not (after or follow or options.json):
                say(f"no step of {job} has logged a line")
            if not follow or found["state"] not in ("pending", "running") or reader_is_gone():
                return
            await asyncio.sleep(FOLLOWED_EVERY_S)

    with_store(address, work)


def put_details(fields: dict[str, Any]) -> None:
    """The fields of a job as a table, and below it the traceback of its last failure."""
    failure = fields["failure"]
    if not isinstance(failure, dict) or "traceback" not in failure:
        put_fields(fields)
        return
    put_fields({**fields, "failure": {name: value for name, value in failure.items() if name != "traceback"}})
    put()
    put("traceback:")
    # Indented: a line of an error's text must not look like a field above it, or like an event below it.
    put_document("\n".join(f"    {line}" for line in str(failure["traceback"]).rstrip("\n").split("\n")))
    put()


def _timeline(history: list[dict[str, Any]], kept: list[KeptEntry]) -> list[str]:
    """History and events, by time. A history entry that an event repeats is left out."""
    from reefknot.audit.model.event import decode, timestamp
    from reefknot.console.operations.timelines import untold
    from reefknot.console.words.events import describe, describe_routine

    lines = []
    for one in untold(history, (audited.entry.event_type for audited in kept)):
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
    help_epilogue=examples(
        "job cancel order-7 --because 'the order was withdrawn'",
        "job cancel order-7 --tree --dry-run",
        "job cancel --tenant acme --type http.request --dry-run",
    )
)
def cancel(
    *ids: Id,
    flags: JobFlags = NO_FILTER,
    all_: Annotated[bool, arg("Select all pending and running jobs.", "--all")] = False,
    tree: Annotated[bool, arg("Cancel what follows the named jobs, or waits for them, too.")] = False,
    because: Annotated[str, arg("Reason, for the result and the audit log.")] = "",
    reason: Annotated[str | None, arg("Old spelling of --because.", show=False)] = None,
    options: OperatorFlags = OPERATOR,
) -> int:
    """
    Cancel jobs wherever they are; their results are then `cancelled`.

    A named job that has finished is refused (exit code 1). The number of selected jobs is printed before the first is
    cancelled; after an interruption, run the command again for the rest.
    """
    if reason is not None:
        say("job cancel --reason is deprecated: it is --because now; elsewhere --reason is a filter")
        because = because or reason
    if len(ids) == 1 and replace(flags, tenant=None) == NO_FILTER and not all_ and not tree:
        return _cancel_one(ids[0], flags.tenant, because, options)
    query = CancelQuery(ids=_selected(ids, flags, all_=all_), all=all_, tree=tree, **asdict(flags))
    return reported(CANCEL, cancel_jobs, query, because=because, options=options)


def _selected(ids: tuple[str, ...], flags: JobFlags, *, all_: bool, also: bool = False) -> tuple[str, ...]:
    """The ids of an action. No selection is an error: it must not mean all jobs."""
    if not ids and flags == NO_FILTER and not all_ and not also:
        raise CommandError("select jobs by ids, a filter (--tenant, --type, --error, …), or --all")
    return ids


def _cancel_one(job: str, tenant: str | None, because: str, options: OperatorFlags) -> int:
    """Cancel one job, and say what it was and is."""
    address, dry_run = address_of(options), options.dry_run
    found = with_store(
        address,
        lambda store: cancel_job(address.operator(store), job, tenant=tenant, because=because, dry_run=dry_run),
    )
    done, before, after = found["cancelled"], found["was"], found["state"]
    if options.json:
        put_json(found)
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


# ---- retry -----------------------------------------------------------------------------------------------------------


@app.command(
    help_epilogue=examples(
        "job retry order-7 --because 'the address was corrected'",
        "job retry --reason attempts_spent --type http.request --dry-run",
    )
)
def retry(
    *ids: Id,
    flags: JobFlags = NO_FILTER,
    reason: Annotated[str | None, arg("Only jobs whose reason contains this text.")] = None,
    all_: Annotated[bool, arg("Select all failed, timed-out and cancelled jobs.", "--all")] = False,
    because: Because = "",
    options: OperatorFlags = OPERATOR,
) -> int:
    """Run failed, timed-out or cancelled jobs again, under their own ids and with a fresh retry budget."""
    chosen = _selected(ids, flags, all_=all_, also=reason is not None)
    query = RetryQuery(ids=chosen, reason=reason, all=all_, **asdict(flags))
    return reported(RETRY, retry_jobs, query, because=because, options=options)
