"""`reefknot store`: check, back up, migrate and compact the file of a SQLite store. Changes are audited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.options import OPERATOR, STORE, Actor, OperatorFlags, StoreFlags, arg
from reefknot.cli.output import Advance, progress, put, say, show
from reefknot.cli.stores import StoreAddress, address_of, with_store

if TYPE_CHECKING:
    from reefknot.engines.sqlite import SqliteStore
    from reefknot.ports.store import Store

app = noun("store", "store check")


@app.command(help_epilogue=examples("store check --engine sqlite:state.db"))
def check(*, options: StoreFlags = STORE) -> int:
    """Check the file, its index of keys and the hash chain of its events. Exits with 65 when one is damaged."""
    address = address_of(options)
    report = with_store(address, lambda store: _sqlite(store, address).check())

    def text() -> None:
        for problem in report.problems:
            put(problem)
        for one in report.mismatches:
            put(f"event {one.sequence}: {one.problem}")
        verdict = "OK" if report.ok else "damaged"
        head = f"chain {report.head.chain} ends at event {report.head.sequence}"
        put(f"{address.path}: {verdict}; {head}; version {report.version}, SQLite {report.sqlite}")

    show({"ok": report.ok, "path": str(address.path), **msgspec.to_builtins(report)}, text, json=options.json)
    if not report.ok:
        say("Restore a backup beside it and compare both, before anything else is written.")
    return Exit.FINE if report.ok else Exit.MISMATCH


@app.command(help_epilogue=examples("store backup state-backup.db"))
def backup(
    target: Annotated[Path, arg("File for the copy. It must not exist.")],
    /,
    *,
    actor: Actor = None,
    options: StoreFlags = STORE,
) -> None:
    """Copy the store while others go on writing it. The copy is a complete store."""
    address = address_of(options, actor=actor)
    if target.exists():
        raise CommandError(f"{target}: exists already; name a file that does not exist", Exit.FAILED)
    if not target.absolute().parent.is_dir():
        raise CommandError(f"{target}: there is no folder {target.absolute().parent}; create it, or name another")

    async def work(store: Store) -> None:
        with progress("copying", 100) as advance:
            await _sqlite(store, address).backup(target, progress=_percent(advance))
        if _sqlite(store, address).read_only:
            say("the store may not be written, so the backup is not among its events")
        else:
            await store.audit.append([address.event("store.backup", str(target))])

    with_store(address, work)
    size = target.stat().st_size
    data = {"path": str(address.path), "target": str(target), "bytes": size}
    copied = f"{address.path} copied to {target}, {size} bytes; open it with --engine sqlite:{target}"
    show(data, lambda: put(copied), json=options.json)


def _percent(advance: Advance) -> Callable[[int, int], None]:
    """A progress callback in pages, for a bar of 100."""
    done = 0

    def report(pages: int, total: int) -> None:
        nonlocal done
        percent = 100 * pages // max(total, 1)
        advance(percent - done)
        done = percent

    return report


@app.command(help_epilogue=examples("store migrate --dry-run"))
def migrate(*, options: OperatorFlags = OPERATOR) -> None:
    """Migrate the file to the schema version of this program. A newer file is refused (exit code 78)."""
    from reefknot.engines.sqlite.connection import VERSION

    address = address_of(options)
    address.require_file()
    found, _ = _version_and_unused(address)
    migrated = found != VERSION and not options.dry_run

    async def work(store: Store) -> None:
        await store.audit.append([address.event("store.migrate", str(address.path), old=found, new=VERSION)])

    if migrated:
        with_store(address, work, or_empty=True)  # opening migrates

    def text() -> None:
        if found == VERSION:
            put(f"{address.path} has version {found}, which is current")
        else:
            verb = "would be migrated" if options.dry_run else "migrated"
            put(f"{address.path} {verb} from version {found} to {VERSION}")

    data = {"path": str(address.path), "found": found, "current": VERSION, "migrated": migrated}
    show(data, text, json=options.json)


@app.command(help_epilogue=examples("store compact --dry-run"))
def compact(*, options: OperatorFlags = OPERATOR) -> None:
    """Return unused space to the disk. Writers wait meanwhile."""
    address, dry_run = address_of(options), options.dry_run
    address.require_file()
    before = address.path.stat().st_size
    _, unused = _version_and_unused(address)

    async def work(store: Store) -> int:
        freed = await _sqlite(store, address).compact()
        await store.audit.append([address.event("store.compact", str(address.path), bytes=freed)])
        return freed

    freed = 0 if dry_run else with_store(address, work)
    text = f"about {unused} of {before} bytes would be freed" if dry_run else f"{freed} bytes freed"
    data = {"path": str(address.path), "bytes": before, "unused": unused, "freed": freed, "compacted": not dry_run}
    show(data, lambda: put(f"{address.path}: {text}"), json=options.json)


def _sqlite(store: Store, address: StoreAddress) -> SqliteStore:
    from reefknot.engines.sqlite import SqliteStore

    assert isinstance(store, SqliteStore), address.path  # .path refuses every other engine by name
    return store


def _version_and_unused(address: StoreAddress) -> tuple[int, int]:
    """The file's schema version and its unused bytes, read without changing anything."""
    import apsw

    from reefknot.engines.sqlite.connection import check_version, translated

    path = str(address.path)
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            version = check_version(connection, path)
            free, page = connection.pragma("freelist_count"), connection.pragma("page_size")
        finally:
            connection.close()
    except apsw.Error as error:
        raise translated(error, path) from error
    return version, int(free) * int(page)
