"""
Assignments as one thing.

The store has two pieces of work for an assignment: what a caller handed in, and what a worker took on. A person asks
about one job: the worker's word counts as soon as there is one.

`reefknot job`: pieces of work: where they are, what happened to them, and calling one off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Actor, Config, DryRun, Engine, Json, one_of
from reefknot.cli.output import printable, put, put_json, put_table, say
from reefknot.cli.stores import Place, age, has_router, opened, operator_event, place, run, time_text, who
from reefknot.core.messages import encode
from reefknot.core.results import answer_of
from reefknot.core.work import ROUTER, WorkItem, WorkState

if TYPE_CHECKING:
    from reefknot.core.redaction import Redactor
    from reefknot.ports.audit_log import KeptEntry
    from reefknot.ports.store import Store

PAGE = 500


class Job(Struct, frozen=True):
    """One assignment, as a person asks about it."""

    item: WorkItem

    def as_json(self, now_ms: int) -> dict[str, Any]:
        item = self.item
        waits = item.state is WorkState.PENDING
        created = item.created_at
        place = item.resource_class
        return {
            "id": item.id,
            "type": item.kind,
            "state": item.state.value,
            "class": None if place == ROUTER else place.partition("@")[0],
            "worker": place.partition("@")[2] or None,
            "attempts": item.attempts,
            "priority": item.priority,
            "reason": item.reason or None,
            "due_at": time_text(item.due_at) if waits else None,
            "due_in_s": max(0.0, (item.due_at - now_ms) / 1000) if waits else None,
            "deadline_at": time_text(item.deadline_at),
            "age_s": max(0.0, (now_ms - created) / 1000),
            "created_at": time_text(created),
            "updated_at": time_text(item.updated_at),
        }

    def details(self, redactor: Redactor) -> dict[str, Any]:
        """What a list leaves out."""
        item = self.item
        history = [
            {"at": time_text(one.at), "what": one.what, "why": redactor(one.why), "who": one.who}
            for one in item.history
        ]
        return {
            "tenant_id": item.tenant_id,
            "correlation_id": item.correlation_id,
            "trace_id": item.trace_id,
            "generation": item.generation,
            "snoozes": item.snoozes,
            "interruptions": item.interruptions,
            "crashes": item.crashes,
            "assignment": _json_of(item.payload or None, redactor),
            "failure": _json_of(item.failure, redactor),
            "result": _json_of(self._result(), redactor),
            "history": history,
        }

    def _result(self) -> str | bytes | None:
        """The stored result; else what the caller is told."""
        if self.item.result is not None:
            return self.item.result
        answer = answer_of(self.item)
        return None if answer is None else encode(answer)


def _json_of(text: str | bytes | None, redactor: Redactor) -> Any:
    if text is None:
        return None
    try:
        return redactor.tree(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return redactor(text if isinstance(text, str) else text.decode("utf-8", "replace"))


async def get_job(store: Store, name: str) -> Job | None:
    """One job by its id."""
    item = await store.work.get(name)
    return None if item is None else Job(item)


async def find_jobs(
    store: Store, *, state: WorkState | None, kind: str | None, after: str, limit: int
) -> AsyncIterator[tuple[str, Job]]:
    """Jobs with the mark from which the next page goes on."""
    told, after = 0, unquote(after)
    while told < limit:
        items = await store.work.find(state=state, kind=kind, after=after, limit=min(PAGE, max(limit - told, 1)))
        for item in items:
            after, told = item.id, told + 1
            yield quote(after), Job(item)
        if not items:
            return


async def overview(store: Store) -> dict[str, Any]:
    """How many jobs are in each state, and how long the oldest due one waits."""
    snapshot = await store.work.snapshot()
    states = {state.value: 0 for state in WorkState}
    for counts in snapshot.counts.values():
        for state, number in counts.items():
            states[state.value] += number
    handed_in = snapshot.counts.get(ROUTER, {})
    return {
        "states": states,
        "waiting_for_router": handed_in.get(WorkState.PENDING, 0),
        "oldest_due_s": max(snapshot.oldest_due_ms.values(), default=0) / 1000,
    }


HEARD_S = 5.0
MOST_EVENTS = 100
_LOOK_S = 0.1

app = App(
    name="job",
    help="See and call off pieces of work.",
    help_epilogue="Example:\n\n    reefknot job list --state pending",
)

Id = Annotated[str, Parameter(help="The assignment's id.")]


@app.command(
    name="list", help_epilogue="Examples:\n\n    reefknot job list\n    reefknot job list --state running --json"
)
def list_(
    *,
    state: Annotated[
        str | None, Parameter(help="Only these: pending, running, succeeded, failed, quarantined, …")
    ] = None,
    type_: Annotated[str | None, Parameter(name="--type", help="Only steps of this type.")] = None,
    limit: Annotated[int, Parameter(help="How many at most, 50 unless said.")] = 50,
    after: Annotated[str, Parameter(help="Go on after the mark that the last page gave as `next`.")] = "",
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Jobs that wait for a worker, then the others, in the order of their ids; when those that wait are due."""
    from reefknot.core.work import WorkState

    if not 1 <= limit <= 10_000:
        raise CommandError(f"--limit: {limit} is not accepted: a whole number from 1 to 10000")
    wanted = None if state is None else one_of("--state", state, {one.value: one for one in WorkState})
    where = place(engine, config)

    async def work() -> tuple[list[Job], str | None, dict[str, Any]]:

        async with opened(where) as store:
            found = [one async for one in find_jobs(store, state=wanted, kind=type_, after=after, limit=limit)]
            jobs = [job for _, job in found]
            return jobs, found[-1][0] if len(found) == limit else None, await overview(store)

    jobs, following, counts = run(work())
    now = int(time() * 1000)
    fields = [job.as_json(now) for job in jobs]
    if json:
        put_json({"jobs": where.redactor.tree(fields), "next": following, **counts})
        return Exit.FINE
    rows = [_row(one, where) for one in fields]
    columns = ("job", "type", "state", "attempts", "due", "age", "worker", "reason")
    put_table(columns, rows, styles=("cyan", "", "bold"), whole=("job", "state"))
    told = ", ".join(f"{number} {name}" for name, number in counts["states"].items() if number)
    waiting = f"; {counts['waiting_for_router']} wait for a router" if counts["waiting_for_router"] else ""
    oldest = f"; the oldest that is due waits {age(counts['oldest_due_s'])}" if counts["oldest_due_s"] else ""
    say(f"in all: {told or 'none with a worker'}{waiting}{oldest}")
    if following is not None:
        say(f"there may be more: --after {following}")
    return Exit.FINE


def _row(one: dict[str, Any], where: Place) -> tuple[str, ...]:
    due = one["due_in_s"]
    return (
        one["id"],
        one["type"],
        one["state"],
        str(one["attempts"]),
        "" if due is None else "now" if due <= 0 else f"in {age(due)}",
        age(one["age_s"]),
        one["worker"] or ("router" if one["class"] is None else ""),
        where.redactor(one["reason"] or "")[:80],
    )


@app.command(help_epilogue="Example:\n\n    reefknot job show order-7")
def show(job: Id, /, *, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Everything about one job: state, attempts, history, what is on record about it, its result."""
    where = place(engine, config)

    async def work() -> tuple[Job | None, list[KeptEntry]]:
        from reefknot.ports.audit_log import AuditQuery

        async with opened(where) as store:
            kept = await store.audit.read(AuditQuery(work_id=job, limit=MOST_EVENTS))
            return await get_job(store, job), kept

    found, kept = run(work())
    if found is None:
        raise _absent(job)
    fields = {**found.as_json(int(time() * 1000)), **found.details(where.redactor)}
    if json:
        put_json({**fields, "events": where.redactor.tree(_without_inputs(kept))})
        return Exit.FINE
    rows = [(name, _text(value)) for name, value in fields.items() if name != "history"]
    put_table(("field", "value"), [row for row in rows if row[1]], whole=("field",))
    for line in _story(fields["history"], kept):
        put(where.redactor(line))
    return Exit.FINE


def _without_inputs(kept: list[KeptEntry]) -> list[dict[str, Any]]:
    """The events, without the inputs of their decisions: `audit tail --json` has those."""
    import msgspec

    events: list[dict[str, Any]] = [msgspec.json.decode(one.entry.body) for one in kept]
    return [{name: value for name, value in one.items() if name != "decision"} for one in events]


def _story(history: list[dict[str, Any]], kept: list[KeptEntry]) -> list[str]:
    """What happened, in its order."""
    from reefknot.cli.live_feed import in_words
    from reefknot.core.audit.event import decode

    lines = []
    for one in history:
        by = f" by {one['who']}" if one["who"] else ""
        lines.append((one["at"], f"{one['what']}{by}{': ' + one['why'] if one['why'] else ''}"))
    for event in (decode(one.entry.body) for one in kept):
        words = in_words(event)
        lines.append((event.timestamp, f"{event.event_type}: {words[1]}" if words else event.event_type))
    return [f"{at}  {text}" for at, text in sorted(lines)]


@app.command(help_epilogue="Examples:\n\n    reefknot job cancel order-7\n    reefknot job cancel order-7 --dry-run")
def cancel(
    job: Id,
    /,
    *,
    reason: Annotated[str, Parameter(help="Why, for its result and the record.")] = "",
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Call a job off, wherever it is. Its result then says `cancelled`. One that has ended is refused (exit code 1)."""
    where = place(engine, config)
    actor = who(as_)
    why = reason.strip() or f"cancelled by {actor}"

    async def work() -> tuple[str, str]:
        async with opened(where) as store:
            return await _cancel(store, where, job, why, actor, dry_run=dry_run)

    before, after = run(work())
    done = after == "cancelled"
    if json:
        put_json({"id": job, "was": before, "state": after, "cancelled": done, "actor": actor, "dry_run": dry_run})
    elif dry_run:
        put(f"{job} ({before}) would be cancelled")
    elif done:
        put(f"{job} ({before}) is cancelled")
    if done or dry_run:
        return Exit.FINE
    if after == before:
        say(f"{job} is still {after}; the command is kept. Look again with: reefknot job show {job}")
        return Exit.TEMPORARY
    say(f"{job} ended meanwhile: {after}")
    return Exit.FAILED


async def _cancel(store: Store, where: Place, job: str, reason: str, actor: str, *, dry_run: bool) -> tuple[str, str]:
    """By the router that has it; in the store itself when nobody runs."""
    from reefknot.core.work import WorkState
    from reefknot.engines.clocks import SystemClock
    from reefknot.router.client import Client

    found = await get_job(store, job)
    if found is None:
        raise _absent(job)
    before = found.item.state
    if before not in (WorkState.PENDING, WorkState.RUNNING):
        raise CommandError(f"{printable(job)} is {before.value}: there is nothing to call off", Exit.FAILED)
    if dry_run:
        return before.value, before.value
    event = operator_event(where, actor, "job.cancel", job, reason=reason)
    client = Client(store, SystemClock(), routed=has_router)
    if await client.cancel(job, reason, who=actor, events=[event]):
        return before.value, "cancelled"
    for _ in range(int(HEARD_S / _LOOK_S)):
        found = await get_job(store, job)
        if found is None or found.item.state not in (WorkState.PENDING, WorkState.RUNNING):
            break
        await asyncio.sleep(_LOOK_S)
    return before.value, "gone" if found is None else found.item.state.value


def _absent(job: str) -> CommandError:
    return CommandError(
        f"there is no job {printable(job[:200])!r}; `reefknot job list` shows those there are", Exit.FAILED
    )


def _text(value: object) -> str:
    from json import dumps

    if value is None:
        return ""
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
