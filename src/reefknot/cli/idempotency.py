"""
`reefknot idempotency`: keys, what is recorded for them, telling what came of one, and forgetting one.

What a person tells or forgets goes on record. What came of a key is told only where nobody else knows it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Actor, Config, DryRun, Engine, Json
from reefknot.cli.output import printable, put, put_json, put_table
from reefknot.cli.stores import opened, operator_event, place, run, who

if TYPE_CHECKING:
    from reefknot.cli.stores import Place
    from reefknot.core.idempotency import Done, Failed, KeyRecord, Released

app = App(
    name="idempotency",
    help="See, resolve and forget idempotency keys.",
    help_epilogue="Example:\n\n    reefknot idempotency stats",
)

Key = Annotated[str, Parameter(help="The idempotency key.")]


@app.command(help_epilogue="Example:\n\n    reefknot idempotency show order-7")
def show(key: Key, /, *, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """What is recorded for a key. Configured secrets, and values beside telling names, are hidden."""
    where = place(engine, config)

    async def work() -> KeyRecord | None:
        async with opened(where) as store:
            return await store.idempotency.get(key)

    record = run(work())
    if record is None:
        raise _absent(key)
    fields = _fields(record, where)
    if json:
        put_json(fields)
    else:
        put_table(("field", "value"), [(name, _text(value)) for name, value in fields.items()], whole=("field",))
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot idempotency stats --json")
def stats(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """How many keys there are in each state. Unknown outcomes wait for a person."""
    from reefknot.core.idempotency import KeyState

    async def work() -> dict[str, int]:
        async with opened(place(engine, config)) as store:
            found = await store.idempotency.counts()
        return {state.value: found.get(state, 0) for state in KeyState}

    counts = run(work())
    total = sum(counts.values())
    if json:
        put_json({**counts, "total": total})
    else:
        rows = [(state, str(number)) for state, number in counts.items()]
        put_table(("state", "keys"), [*rows, ("total", str(total))], styles=("cyan",))
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot idempotency forget order-7 --dry-run")
def forget(
    key: Key,
    /,
    *,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Remove a key, so that its work may happen again. A key that somebody holds is refused (exit code 75)."""
    where = place(engine, config)
    actor = who(as_)

    async def work() -> KeyRecord | None:
        async with opened(where) as store:
            record = await store.idempotency.get(key)
            if record is None or dry_run:
                return record
            events = [operator_event(where, actor, "idempotency.forget", key, state=record.state.value)]
            return record if await store.idempotency.forget(key, events=events) else None

    record = run(work())
    if record is None:
        raise _absent(key)
    if json:
        put_json({"key": where.redactor(key), "state": record.state, "forgotten": not dry_run, "actor": actor})
    else:
        done = "would be forgotten" if dry_run else "is forgotten"
        put(f"{where.redactor(key)} ({record.state}) {done}; its work may happen again")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot idempotency resolve charge:order-7 --done '{\"id\": 7}'")
def resolve(
    key: Key,
    /,
    *,
    done: Annotated[str | None, Parameter(help="It happened: its result as JSON.")] = None,
    failed: Annotated[str | None, Parameter(help="It failed for good: why.")] = None,
    released: Annotated[bool, Parameter(negative="", help="It never happened: whoever comes next may try.")] = False,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Tell what came of a guarded key whose outcome nobody knows. One of --done, --failed and --released says it."""
    ending = _ending(done, failed, released)
    where = place(engine, config)
    actor = who(as_)

    async def work() -> tuple[KeyRecord | None, bool]:
        async with opened(where) as store:
            record = await store.idempotency.get(key)
            if record is None or dry_run:
                return record, False
            events = [operator_event(where, actor, "idempotency.resolve", key, outcome=_outcome(ending))]
            return record, await store.idempotency.resolve(key, ending, events=events)

    record, told = run(work())
    if record is None:
        raise _absent(key)
    if not told and (not dry_run or record.state != "unknown"):
        raise _not_unknown(key, record)
    shown, outcome = where.redactor(key), _outcome(ending)
    if json:
        put_json({"key": shown, "outcome": outcome, "resolved": told, "actor": actor, "dry_run": dry_run})
    else:
        put(f"{shown} (unknown) {'would be' if dry_run else 'is'} {outcome}; later callers hear that")
    return Exit.FINE


def _ending(done: str | None, failed: str | None, released: bool) -> Done | Failed | Released:
    import msgspec

    from reefknot.core.canonical import canonical
    from reefknot.core.idempotency import Done, Failed, Released

    if (done is not None) + (failed is not None) + released != 1:
        raise CommandError("say what came of it, with one of --done JSON, --failed TEXT and --released")
    if done is not None:
        try:
            return Done(canonical(msgspec.json.decode(done)).decode())
        except msgspec.DecodeError as error:
            raise CommandError(f"--done: not JSON: {error}; a text is written as '\"…\"', nothing as null") from None
    return Released() if failed is None else Failed(canonical({"message": failed}).decode())


def _outcome(ending: Done | Failed | Released) -> str:
    """The state that this ending leads to."""
    return type(ending).__name__.lower()


def _not_unknown(key: str, record: KeyRecord) -> CommandError:
    held = record.state == "in_progress"
    why = "somebody holds it; ask again when its lease is over" if held else "what came of it is on record"
    text = f"key {printable(key[:200])!r} is {record.state.value}, not unknown: {why} (reefknot idempotency show)"
    return CommandError(text, Exit.TEMPORARY if held else Exit.FAILED)


def _absent(key: str) -> CommandError:
    return CommandError(f"there is no record for key {printable(key[:200])!r}, or its retention is over", Exit.FAILED)


def _fields(record: KeyRecord, where: Place) -> dict[str, Any]:
    return {
        "key": where.redactor(record.key),
        "state": record.state.value,
        "owner": where.redactor(record.owner),
        "fence": record.fence,
        "guard": record.guard,
        "fingerprint": record.fingerprint or None,
        **_lease(record),
        "result": _shown(record.result, where),
        "failure": _shown(record.failure, where),
        "metadata": _shown(record.metadata, where),
        "created_at": _time(record.created_at),
        "updated_at": _time(record.updated_at),
        "expires_at": _time(record.expires_at),
    }


def _lease(record: KeyRecord) -> dict[str, Any]:
    """When whoever holds the key loses it; leases are measured by the machine's steady clock, as here."""
    from reefknot.core.idempotency import KeyState
    from reefknot.engines.clocks import SystemClock

    if record.state is not KeyState.IN_PROGRESS:
        return {"lease_ends_at": None, "lease_seconds_left": None}
    clock = SystemClock()
    left_ms = max(0, record.lease_until - int(clock.now() * 1000))
    return {
        "lease_ends_at": _time(int(clock.wall() * 1000) + left_ms) if left_ms else None,
        "lease_seconds_left": left_ms / 1000,
    }


def _shown(text: str | None, where: Place) -> Any:
    """Recorded JSON as it may be shown."""
    import msgspec

    return None if text is None else where.redactor.tree(msgspec.json.decode(text))


def _time(at: int) -> str:
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    from json import dumps

    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
