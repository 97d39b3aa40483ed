"""`reefknot quarantine`: work that waits for a person. Who decided what goes on record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Actor, Config, DryRun, Engine, Json
from reefknot.cli.output import printable, put, put_json, put_table, say
from reefknot.cli.stores import Place, opened, operator_event, place, run, time_text, who

if TYPE_CHECKING:
    from reefknot.core.work import WorkItem
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.quarantine import QuarantineFilter, QuarantineStats
    from reefknot.ports.store import Store

CHUNK = 500
MOST_SHOWN = 20

app = App(
    name="quarantine",
    help="Look after work that waits for a person.",
    help_epilogue="Example:\n\n    reefknot quarantine list",
)

Ids = Annotated[tuple[str, ...], Parameter(help="The ids of those that are meant.")]
All = Annotated[bool, Parameter(name="--all", help="All of them.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Which:
    """Which ones are meant. Everything given must hold."""

    type: Annotated[str | None, Parameter(help="Only steps of this type.")] = None
    source: Annotated[str | None, Parameter(help="Only those of this source.")] = None
    reason: Annotated[str | None, Parameter(help="Only those whose reason contains this.")] = None
    before: Annotated[str | None, Parameter(help="Only those that came before: a time, or 90s, 15m, 2h, 7d ago.")] = (
        None
    )

    def filter(self, ids: tuple[str, ...] = ()) -> QuarantineFilter:
        from reefknot.cli.audit import moment_of
        from reefknot.ports.quarantine import QuarantineFilter

        return QuarantineFilter(ids, self.type, self.source, self.reason, moment_of(self.before, flag="--before"))

    @property
    def says_something(self) -> bool:
        return self != Which()


@app.command(
    name="list",
    help_epilogue="Examples:\n\n    reefknot quarantine list\n    reefknot quarantine list --type http.request",
)
def list_(
    which: Which | None = None,
    *,
    limit: Annotated[int, Parameter(help="How many at most, 50 unless said.")] = 50,
    after: Annotated[str, Parameter(help="Go on after this id.")] = "",
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """What is there, in the order of ids, and why."""
    if not 1 <= limit <= 10_000:
        raise CommandError(f"--limit: {limit} is not accepted: a whole number from 1 to 10000")
    where, wanted = place(engine, config), (which or Which()).filter()

    async def work() -> list[WorkItem]:
        async with opened(where) as store:
            return await store.quarantine.find(wanted, after=after, limit=limit)

    items = run(work())
    following = items[-1].id if len(items) == limit else None
    if json:
        put_json({"items": [_fields(item, where) for item in items], "next": following})
        return Exit.FINE
    rows = [
        (item.id, item.kind, str(item.attempts), time_text(item.updated_at) or "", where.redactor(item.reason))
        for item in items
    ]
    columns = ("job", "type", "attempts", "since", "reason")
    put_table(columns, rows, styles=("cyan",), whole=("job", "since"))
    say(f"{len(items)} shown" + (f"; there may be more: --after {following}" if following else ""))
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot quarantine show order-7")
def show(
    job: Annotated[str, Parameter(help="Its id.")],
    /,
    *,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """One of them: payload, reason, failure, history. Secrets are hidden."""
    from reefknot.cli.job import Job

    where = place(engine, config)

    async def work() -> WorkItem | None:
        async with opened(where) as store:
            return await store.quarantine.show(job)

    item = run(work())
    if item is None:
        raise CommandError(
            f"{printable(job[:200])!r} is not in quarantine; `quarantine list` shows what is", Exit.FAILED
        )
    fields = {**_fields(item, where), **Job(item).details(where.redactor)}
    if json:
        put_json(fields)
    else:
        put_table(("field", "value"), [(name, _text(value)) for name, value in fields.items()], whole=("field",))
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot quarantine stats --json")
def stats(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """How many there are, by type, source and reason."""
    where = place(engine, config)

    async def work() -> QuarantineStats:
        async with opened(where) as store:
            return await store.quarantine.stats()

    found = run(work())
    reasons = {where.redactor(reason): number for reason, number in found.by_reason.items()}
    oldest = time_text(found.oldest_at)
    if json:
        put_json(
            {
                "total": found.total,
                "by_type": found.by_kind,
                "by_source": found.by_source,
                "by_reason": reasons,
                "oldest_at": oldest,
            }
        )
        return Exit.FINE
    rows = [("type", name, str(number)) for name, number in found.by_kind.items()]
    rows += [("source", name, str(number)) for name, number in found.by_source.items() if name]
    rows += [("reason", name, str(number)) for name, number in reasons.items()]
    put_table(("by", "", "items"), [*rows, ("total", "", str(found.total))], styles=("cyan",))
    if oldest:
        say(f"the oldest is there since {oldest}")
    return Exit.FINE


@app.command(
    help_epilogue="Examples:\n\n    reefknot quarantine requeue order-7\n"
    "    reefknot quarantine requeue --reason attempts_spent --dry-run"
)
def requeue(
    *ids: Annotated[str, Parameter(help="Their ids.")],
    which: Which | None = None,
    all_: All = False,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Give them another chance, under their own ids and with a fresh budget."""
    deed = _Deed("requeue", "requeued", "go back to the queue", place(engine, config), who(as_))

    async def act(store: Store, chosen: QuarantineFilter, events: list[AuditEntry]) -> list[str]:
        return await store.quarantine.requeue(chosen, who=deed.actor, events=events)

    return deed.done(act, _meant(ids, which, all_), dry_run=dry_run, json=json)


@app.command(help_epilogue="Example:\n\n    reefknot quarantine discard order-7 --because 'the order was withdrawn'")
def discard(
    *ids: Annotated[str, Parameter(help="Their ids.")],
    because: Annotated[str, Parameter(help="Why, for the record.")] = "",
    which: Which | None = None,
    all_: All = False,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Decide that they are not worth another try. They stay on record."""
    deed = _Deed("discard", "discarded", "are given up", place(engine, config), who(as_), because)

    async def act(store: Store, chosen: QuarantineFilter, events: list[AuditEntry]) -> list[str]:
        return await store.quarantine.discard(chosen, who=deed.actor, reason=because, events=events)

    return deed.done(act, _meant(ids, which, all_), dry_run=dry_run, json=json)


@app.command(help_epilogue="Example:\n\n    reefknot quarantine purge --before 30d --dry-run")
def purge(
    *ids: Annotated[str, Parameter(help="Their ids.")],
    which: Which | None = None,
    all_: All = False,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Remove them for good, payloads included. Only the record of events remembers them."""
    deed = _Deed("purge", "purged", "are removed for good", place(engine, config), who(as_))

    async def act(store: Store, chosen: QuarantineFilter, events: list[AuditEntry]) -> list[str]:
        return await store.quarantine.purge(chosen, events=events)

    return deed.done(act, _meant(ids, which, all_), dry_run=dry_run, json=json)


Act = Callable[["Store", "QuarantineFilter", "list[AuditEntry]"], Awaitable[list[str]]]


def _meant(ids: tuple[str, ...], which: Which | None, all_: bool) -> QuarantineFilter:
    """Nothing said means nothing, not everything."""
    chosen = which or Which()
    if not ids and not chosen.says_something and not all_:
        raise CommandError("say which: ids, a filter (--type, --source, --reason, --before), or --all")
    return chosen.filter(tuple(dict.fromkeys(ids)))


@dataclass(frozen=True, slots=True)
class _Deed:
    """What is done to those that are meant, with how many they are said first."""

    verb: str
    participle: str
    means: str
    where: Place
    actor: str
    because: str = ""

    def done(self, act: Act, wanted: QuarantineFilter, *, dry_run: bool, json: bool) -> int:
        async def work() -> list[str]:
            async with opened(self.where) as store:
                return await self._work(store, act, wanted, dry_run=dry_run)

        changed = run(work())
        missing = sorted(set(wanted.ids) - set(changed))
        if json:
            put_json(
                {
                    self.participle: changed,
                    "missing": missing,
                    "count": len(changed),
                    "actor": self.actor,
                    "dry_run": dry_run,
                }
            )
        else:
            for name in changed[:MOST_SHOWN]:
                put(f"{name} {'would be ' if dry_run else ''}{self.participle}")
            if len(changed) > MOST_SHOWN:
                put(f"… and {len(changed) - MOST_SHOWN} more")
        if self.verb == "requeue" and changed and not dry_run:
            say("a running system takes them within seconds; without one: reefknot up")
        return Exit.FAILED if missing else Exit.FINE

    async def _work(self, store: Store, act: Act, wanted: QuarantineFilter, *, dry_run: bool) -> list[str]:
        from collections import Counter

        from reefknot.cli.output import progress

        items = await self._found(store, wanted)
        kinds = Counter(item.kind for item in items)
        counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        if items or not wanted.ids:
            say(f"{len(items)} {'would be' if dry_run else 'are'} meant: {counts}" if items else "none fits")
        await self._say_missing(store, sorted(set(wanted.ids) - {item.id for item in items}))
        if dry_run:
            return [item.id for item in items]
        changed = []
        with progress(self.verb, len(items)) as advance:
            for first in range(0, len(items), CHUNK):
                chunk = items[first : first + CHUNK]
                changed += await act(store, _only(chunk), self._events(chunk))
                advance(len(chunk))
        return changed

    async def _say_missing(self, store: Store, names: list[str]) -> None:
        """What became of those that are not there."""
        from reefknot.cli.job import get_job

        for name in names[:MOST_SHOWN]:
            job = await get_job(store, name)
            state = "there is no such job" if job is None else f"it is {job.item.state.value}"
            say(f"{printable(name[:200])!r} is not in quarantine: {state}; `quarantine list` shows what is")
        if len(names) > MOST_SHOWN:
            say(f"… and {len(names) - MOST_SHOWN} more are not")

    async def _found(self, store: Store, wanted: QuarantineFilter) -> list[WorkItem]:
        items: list[WorkItem] = []
        while page := await store.quarantine.find(wanted, after=items[-1].id if items else "", limit=CHUNK):
            items += page
        return items

    def _events(self, items: list[WorkItem]) -> list[AuditEntry]:
        """Who did it, and for work that comes back, that it does."""
        from reefknot.audit.journal import Journal, event_id, now_text
        from reefknot.core.audit.event import Requeued

        subject = items[0].id if len(items) == 1 else None
        details: dict[str, Any] = {"count": len(items), "ids": [item.id for item in items]}
        if self.because:
            details["reason"] = self.because
        events = [operator_event(self.where, self.actor, f"quarantine.{self.verb}", subject, **details)]
        if self.verb == "requeue":
            back = [
                Requeued(
                    timestamp=now_text(),
                    event_id=event_id(),
                    tenant_id=item.tenant_id,
                    correlation_id=item.correlation_id,
                    trace_id=item.trace_id,
                    work_id=item.id,
                    reason=f"taken out of quarantine by {self.actor}",
                    generation=item.generation + 1,
                )
                for item in items
            ]
            events += Journal(None, redactor=self.where.redactor).entries(back)
        return events


def _only(items: list[WorkItem]) -> QuarantineFilter:
    from reefknot.ports.quarantine import QuarantineFilter

    return QuarantineFilter(ids=tuple(item.id for item in items))


def _fields(item: WorkItem, where: Place) -> dict[str, Any]:
    return {
        "id": item.id,
        "type": item.kind,
        "source": item.source or None,
        "class": item.resource_class.partition("@")[0],
        "attempts": item.attempts,
        "crashes": item.crashes,
        "reason": where.redactor(item.reason),
        "since": time_text(item.updated_at),
        "created_at": time_text(item.created_at),
    }


def _text(value: object) -> str:
    from json import dumps

    if value is None:
        return ""
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
