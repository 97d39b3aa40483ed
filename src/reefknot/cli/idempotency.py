"""`reefknot idempotency`: keys, what is recorded for them, and forgetting one. What is forgotten goes on record."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.asking import Config, Json
from reefknot.cli.engine import Actor, DryRun, Engine, opened, operator_event, place, run, who
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import printable, put, put_json, put_table

if TYPE_CHECKING:
    from reefknot.cli.engine import Place
    from reefknot.core.idempotency import KeyRecord

app = App(
    name="idempotency",
    help="See and forget idempotency keys.",
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
        "result": _shown(record.result, where),
        "failure": _shown(record.failure, where),
        "metadata": _shown(record.metadata, where),
        "created_at": _time(record.created_at),
        "updated_at": _time(record.updated_at),
        "expires_at": _time(record.expires_at),
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
