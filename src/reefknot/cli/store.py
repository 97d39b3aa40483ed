"""`reefknot store`: is the file whole, a copy of it, its version, and giving space back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Actor, Config, DryRun, Engine, Json
from reefknot.cli.output import put, put_json, say
from reefknot.cli.stores import Place, existing, opened, operator_event, place, run, who

if TYPE_CHECKING:
    from reefknot.engines.sqlite import SqliteStore
    from reefknot.engines.sqlite.upkeep import CheckReport
    from reefknot.ports.store import Store

app = App(
    name="store",
    help="Look after a store: check, back up, migrate, compact.",
    help_epilogue="Example:\n\n    reefknot store check",
)


@app.command(help_epilogue="Example:\n\n    reefknot store check --engine sqlite:state.db")
def check(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Is the file whole, and does the chain of events hold? The exit code is 65 when not."""
    where = place(engine, config)

    async def work() -> CheckReport:
        async with opened(where) as store:
            return await _sqlite(store, where).check()

    report = run(work())
    if json:
        put_json({"ok": report.ok, "path": str(where.path), **msgspec.to_builtins(report)})
    else:
        for problem in report.problems:
            put(problem)
        for one in report.mismatches:
            put(f"event {one.sequence}: {one.problem}")
        verdict = "OK" if report.ok else "damaged"
        head = f"chain {report.head.chain} stands at event {report.head.sequence}"
        put(f"{where.path}: {verdict}; {head}; version {report.version}, SQLite {report.sqlite}")
    if not report.ok:
        say("Restore a backup beside it and compare, before anything else is written.")
    return Exit.FINE if report.ok else Exit.MISMATCH


@app.command(help_epilogue="Example:\n\n    reefknot store backup state-backup.db")
def backup(
    target: Annotated[Path, Parameter(help="Where the copy goes. The file must not exist.")],
    /,
    *,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Copy the store as it stands, while others go on writing it. The copy is a store of its own."""
    from reefknot.cli.output import progress

    where = place(engine, config)
    if target.exists():
        raise CommandError(f"{target}: exists already; name a file that does not exist", Exit.FAILED)
    if not target.absolute().parent.is_dir():
        raise CommandError(f"{target}: there is no folder {target.absolute().parent}; make it, or name another")

    async def work() -> None:
        async with opened(where) as store:
            with progress("copying", 100) as advance:
                done = 0

                def told(pages: int, of: int) -> None:
                    nonlocal done
                    percent = 100 * pages // max(of, 1)
                    advance(percent - done)
                    done = percent

                await _sqlite(store, where).backup(target, progress=told)
            await store.audit.append([operator_event(where, who(as_), "store.backup", str(target))])

    run(work())
    size = target.stat().st_size
    if json:
        put_json({"path": str(where.path), "target": str(target), "bytes": size})
    else:
        put(f"{where.path} is copied to {target}, {size} bytes; open it with --engine sqlite:{target}")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot store migrate --dry-run")
def migrate(
    *, dry_run: DryRun = False, as_: Actor = None, engine: Engine = None, config: Config = None, json: Json = False
) -> int:
    """Bring the file to the version of this program. A newer file is refused (exit code 78)."""
    from reefknot.engines.sqlite.connection import VERSION

    where = place(engine, config)
    existing(where)
    found = _looked_at(where)["version"]

    async def work() -> None:
        async with opened(where, or_empty=True) as store:  # opening migrates
            event = operator_event(where, who(as_), "store.migrate", str(where.path), old=found, new=VERSION)
            await store.audit.append([event])

    if found != VERSION and not dry_run:
        run(work())
    if json:
        migrated = found != VERSION and not dry_run
        put_json({"path": str(where.path), "found": found, "current": VERSION, "migrated": migrated})
    elif found == VERSION:
        put(f"{where.path} has version {found}, which is current")
    else:
        done = "would go" if dry_run else "went"
        put(f"{where.path} {done} from version {found} to {VERSION}")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot store compact --dry-run")
def compact(
    *, dry_run: DryRun = False, as_: Actor = None, engine: Engine = None, config: Config = None, json: Json = False
) -> int:
    """Give unused space back to the disk. Writers wait meanwhile."""
    where = place(engine, config)
    existing(where)
    before = where.path.stat().st_size
    unused = _looked_at(where)["unused"]

    async def work() -> int:
        async with opened(where) as store:
            freed = await _sqlite(store, where).compact()
            event = operator_event(where, who(as_), "store.compact", str(where.path), bytes=freed)
            await store.audit.append([event])
            return freed

    freed = 0 if dry_run else run(work())
    if json:
        put_json({"path": str(where.path), "bytes": before, "unused": unused, "freed": freed, "compacted": not dry_run})
    elif dry_run:
        put(f"{where.path}: about {unused} of {before} bytes would be given back")
    else:
        put(f"{where.path}: {freed} bytes given back")
    return Exit.FINE


def _sqlite(store: Store, where: Place) -> SqliteStore:
    from reefknot.engines.sqlite import SqliteStore

    assert isinstance(store, SqliteStore), where.path  # .path refuses every other engine by name
    return store


def _looked_at(where: Place) -> dict[str, Any]:
    """The file's version and unused bytes, without changing anything."""
    import apsw

    from reefknot.engines.sqlite.connection import check_version, translated

    path = str(where.path)
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            version = check_version(connection, path)
            free, page = connection.pragma("freelist_count"), connection.pragma("page_size")
        finally:
            connection.close()
    except apsw.Error as error:
        raise translated(error, path) from error
    return {"version": version, "unused": int(free) * int(page)}
