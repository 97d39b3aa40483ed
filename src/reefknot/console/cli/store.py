"""
`reefknot store`, and the store of every other command: its address, opening it, and the systems that run over it.

The address is `--engine URL`, else `engine` of the configuration, else `.reefknot/state.db` in its folder. A command
never creates a store that it only looks at: a missing file is an error that names it or, for a command that has
something else to show, the answer that nothing has run yet. Every change is audited.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Struct

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.options import (
    OPERATOR,
    STORE,
    Actor,
    OperatorFlags,
    StoreFlags,
    arg,
    check_number,
    is_unconfigured,
    settings,
    settings_to_look,
)
from reefknot.console.cli.output import Advance, progress, put, relative, say, show
from reefknot.errors import StoreMovedError, StorePermissionError
from reefknot.stores.port.engines import accepted_urls, engine_of, file_of, has_file, is_shared, located

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.policy.layers import Tree
    from reefknot.policy.settings import Settings
    from reefknot.stores.port import Store
    from reefknot.stores.port.engines import FileState, FileStore, RecordStore, StoreFiles, UnreadableRecord

R = TypeVar("R")

# ---- the store of a command ------------------------------------------------------------------------------------------


class StoreAddress(Struct, frozen=True):
    """The store of a command: its URL, the settings in force (None when nothing is configured, or nothing was checked),
    the redactor of their secrets, the value of `--as`."""

    url: str
    settings: Any
    redactor: Any
    named_actor: str | None = None
    is_named: bool = False
    """Whether `--engine` names it."""
    mistakes: tuple[str, ...] = ()
    """The mistakes in the configuration that do not matter to a command that only looks."""

    @property
    def path(self) -> Path:
        """The file of the store; raises for a store that is not a file."""
        path = file_of(self.url)
        if path is None:
            raise CommandError(f"{self.shown} {engine_of(self.url).without_file}")
        return Path(path)

    @property
    def files(self) -> StoreFiles:
        """Work on the file of the store."""
        return engine_of(self.url).files()

    @property
    def shown(self) -> str:
        """The URL for messages: without user, password or token."""
        return shown_url(self.url)

    @property
    def has_file(self) -> bool:
        return has_file(self.url)

    def require_file(self) -> None:
        """Refuse a store that is not in a file, and one whose file is missing."""
        if not self.path.is_file():
            raise CommandError(
                f"there is no store at {self.path}; name one with --engine sqlite:PATH, or with `engine` in "
                "reefknot.yaml",
                Exit.UNREACHABLE,
            )

    def is_unmade(self) -> bool:
        """Whether the store is a file that nothing has made yet. One that `--engine` names is refused then: a slip in
        the name would look like a store over which nothing has run."""
        if not self.has_file or self.path.exists():
            return False
        if self.is_named:
            self.require_file()
        return True

    @property
    def made(self) -> str:
        """The message about a store that was made because there was none."""
        return f"there was no store at {relative(str(self.path)) if self.has_file else self.shown}: a new one was made"

    @property
    def actor(self) -> str:
        """The actor of an audited action: the value of `--as`, else the user of this system."""
        from reefknot.console.operations.operator import actor_name

        return actor_name(self.named_actor)

    def operator(self, store: Store | None) -> Operator:
        """The operator of this command, at its open store; at none for what needs none."""
        from reefknot.console.operations.operator import Operator

        return Operator(store, self.redactor, self.named_actor, self.settings, self.shown)  # type: ignore[arg-type]


def shown_url(url: str) -> str:
    """A store's URL for messages: without user, password or token."""
    from reefknot.stores.opening import shown_url

    return shown_url(url)


def place_of(url: str) -> str:
    """A store in a headline: its file, seen from here, else its address."""
    return relative(file_of(url) or shown_url(url))


def address_of(options: StoreFlags, *, actor: str | None = None, looks: bool = False) -> StoreAddress:
    """
    The store that `--engine` and `--config` name. Secrets that cannot be read here are skipped: an operator need not be
    allowed to read all of them, and what was not read cannot be shown.

    A command that only `looks` at the store is not kept from it by a mistake in another section, which is a warning.
    """
    from reefknot.stores.opening import store_url

    mistakes: tuple[str, ...] = ()
    found = None
    if not is_unconfigured(options.config):
        found, mistakes = settings_to_look(options.config) if looks else (settings(options.config), ())
    url = store_url(found, options.engine)
    if found is None:
        return _address(url, options, actor=actor)
    return msgspec.structs.replace(
        _address(url, options, found.tree, found.path, found, actor=actor), mistakes=mistakes
    )


PLAIN_SECTIONS = frozenset(
    {
        *("engine", "secrets", "worker", "router", "retry_policies", "operations", "idempotency", "audit", "blocks"),
        *("sources", "schedules", "ingestion", "dashboard", "alerts", "limits"),
    }
)
"""The sections of a configuration that no warning is about, and that opening a file does not need."""


def address_to_read(options: StoreFlags) -> StoreAddress:
    """
    The store of a command that only looks at jobs and systems.

    It needs the store and the secrets of the configuration, and checking the rest would take half of the command's
    time. So a mistake elsewhere does not stop the command. If anything else is unusual, the whole configuration is
    checked: an unknown section may be a misspelt `secrets`.
    """
    from reefknot.policy.layers import load_tree

    if is_unconfigured(options.config):
        return address_of(options)
    tree, path = load_tree(options.config, environ=os.environ, cwd=Path.cwd())
    if not _is_plain(tree.value):
        return address_of(options, looks=True)
    if options.engine is not None:
        return _address(located(options.engine, Path.cwd()), options, tree, path)
    folder = Path.cwd() if path is None else path.parent
    return _address(located(tree.value.get("engine"), folder), options, tree, path)


def _is_plain(written: Mapping[str, Any]) -> bool:
    """Whether the store and the secrets of a configuration can be read without checking the rest."""
    from reefknot.policy.secrets import is_reference

    engine, secrets = written.get("engine"), written.get("secrets", {})
    return (
        PLAIN_SECTIONS.issuperset(written)
        and (engine is None or (isinstance(engine, str) and has_file(engine)))
        and isinstance(secrets, dict)
        and all(map(is_reference, secrets.values()))
    )


def _address(
    url: str,
    options: StoreFlags,
    tree: Tree | None = None,
    path: Path | None = None,
    found: Settings | None = None,
    *,
    actor: str | None = None,
) -> StoreAddress:
    """The address with the redactor of the secrets that the configuration names."""
    from reefknot.core.redaction import Redactor
    from reefknot.policy.secrets import secret_texts

    if not is_shared(url):
        accepted = accepted_urls(shared_only=True)
        raise CommandError(
            f"--engine: {url.rstrip(':')}: ends with the process that opened it; accepted here: {accepted}"
        )
    secrets = () if tree is None else secret_texts(tree, path, environ=os.environ)[0]
    name = options.actor if isinstance(options, OperatorFlags) else actor
    return StoreAddress(url, found, Redactor(secrets), name, options.engine is not None)


@asynccontextmanager
async def opened(
    address: StoreAddress, *, or_empty: bool = False, creates: bool = False, migrate: bool = False
) -> AsyncIterator[Store]:
    """
    The store, opened without retention, and for reading only where it may not be written, has an older version, or was
    moved.

    One that is missing is made with `creates`, unless `--engine` names it, and is refused otherwise. An empty file is
    refused, too: only `store migrate` may turn it into a store (`or_empty`).
    """
    from reefknot.queue.connect import opened_or_made
    from reefknot.runtime.sqlite_files import is_writable
    from reefknot.stores.opening import open_store, options_of

    creates = creates and not address.is_named
    is_unmade = creates and address.is_unmade()
    if address.has_file and not is_unmade:
        address.require_file()
        if not or_empty and address.path.stat().st_size == 0:
            text = f"{address.path}: is an empty file, not a store; `store migrate` turns it into one"
            raise CommandError(text, Exit.UNREACHABLE)
    options: Any = {} if address.settings is None else options_of(address.settings)
    nats = options.pop("nats", {})
    read_only = address.has_file and not is_unmade and not is_writable(str(address.path))
    how = {**options, "tidy": False, "migrate": migrate}
    moved = None
    async with AsyncExitStack() as stack:
        try:
            opening = opened_or_made(address.url, nats, creates=creates, **how, read_only=read_only)
            store, is_new = await stack.enter_async_context(opening)
        except StoreMovedError as error:
            moved, is_new = error, False
            say(f"{error.store}: {error.problem}")
            store = await stack.enter_async_context(
                open_store(address.url, **how, nats={**nats, "creates": False}, read_only=True)
            )
        if creates and is_new:
            say(address.made)
        try:
            yield store
        except StorePermissionError as error:
            raise error if moved is None else moved from None


def with_store(address: StoreAddress, work: Callable[[Store], Awaitable[R]], **how: bool) -> R:
    """Open the store as `opened` does, await `work(store)` in an event loop of its own, and return the result."""

    async def main() -> R:
        async with opened(address, **how) as store:
            return await work(store)

    return asyncio.run(main())


def looked(address: StoreAddress, look: Callable[[Operator], Awaitable[R]]) -> R:
    """The answer of `look(operator)`; while no store has been made, at an empty one: nothing has run yet."""
    from reefknot.stores.opening import open_store

    async def main() -> R:
        at = open_store("memory:", tidy=False) if address.is_unmade() else opened(address)
        async with at as store:
            return await look(address.operator(store))

    return asyncio.run(main())


# ---- reefknot store --------------------------------------------------------------------------------------------------

app = noun("store", "store check")
app.command(
    "reefknot.console.cli.store_move:app",
    name="move",
    help="Move a store to another one, of any engine: jobs, results, quarantine, keys, schedules, state of sources.\n\n"
    "Nothing may run over either store. A move that was interrupted goes on when the same command is given again.\n\n"
    "The events go to a file that `audit verify` verifies. The old store stays, and can only be read from then on.",
)


@app.command(help_epilogue=examples("store create --engine nats://n1:4222,n2:4222/orders --replicas 3"))
def create(
    *,
    replicas: Annotated[int | None, arg("NATS: servers that hold each record. Default: 3 in a cluster of 3.")] = None,
    max_bytes: Annotated[int | None, arg("NATS: bytes that the store may take. Default: the account's limit.")] = None,
    actor: Actor = None,
    options: StoreFlags = STORE,
) -> None:
    """
    Make a store, once, as an administrator: its streams on NATS, or its file. One that is there is left as it is.

    One that differs from what is asked for is refused (78), with the difference.
    """
    from reefknot.stores.opening import open_store, options_of

    check_number("--replicas", replicas, 1, 5, "a number from 1 to 5")
    check_number("--max-bytes", max_bytes, 1 << 20, 1 << 50, "bytes, at least 1048576")
    address = address_of(options, actor=actor)
    given = {name: one for name, one in (("replicas", replicas), ("max_bytes", max_bytes)) if one is not None}
    if given and address.has_file:
        raise CommandError(
            f"--{next(iter(given)).replace('_', '-')}: is for a store on NATS; {address.shown} is a file"
        )
    kept: Any = {} if address.settings is None else options_of(address.settings)
    kept["nats"] = nats = {**kept.get("nats", {}), **given}
    takes_shared = address.settings is None or address.settings.configuration.router.shared_subject == "ours"

    async def main() -> list[str]:
        made = await engine_of(address.url).create(address.url, nats, keeps_shared=takes_shared)
        if made:
            async with open_store(address.url, **kept, tidy=False) as store:
                await store.audit.append([address.operator(store).event("store.create", address.shown)])
        return made

    made = asyncio.run(main())
    text = f"{place_of(address.url)} made: {', '.join(made)}" if made else f"{place_of(address.url)} is there already"
    show({"store": address.shown, "made": made}, lambda: put(text), json=options.json)


@app.command(help_epilogue=examples("store check --engine sqlite:state.db"))
def check(*, options: StoreFlags = STORE) -> int:
    """
    Check the file, its index of keys and the hash chain of its events. Exits with 65 when one is damaged.

    Of a store on NATS all records are read, and those that cannot be read are named.
    """
    address = address_of(options, looks=True)
    if not address.has_file:
        return _check_records(address, json=options.json)
    address.require_file()
    report = with_store(address, lambda store: cast("FileStore", store).check())

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
        say("Restore a backup under another name and compare the two before anything else is written.")
    return Exit.FINE if report.ok else Exit.MISMATCH


def _check_records(address: StoreAddress, *, json: bool) -> int:
    """Read all records of a store on a server."""
    report = with_store(address, lambda store: cast("RecordStore", store).check_records())

    def text() -> None:
        for one in report.found:
            put(f"{one.subject} (sequence {one.sequence}) cannot be read: {one.problem}")
        verdict = f"{len(report.found)} cannot be read" if report.found else "each can be read"
        put(f"{address.shown}: {report.read} records{'' if report.is_whole else ', not all of them'}; {verdict}")

    show({"ok": not report.found, **msgspec.to_builtins(report)}, text, json=json)
    if report.found:
        say("Lists leave them out. Remove one with: reefknot store forget-record SUBJECT")
    return Exit.MISMATCH if report.found else Exit.FINE


@app.command(help_epilogue=examples("store forget-record reefknot.work.open.cpu.order-7 --dry-run"))
def forget_record(
    subject: Annotated[str, arg("The subject of the record, as `store check` names it.")],
    /,
    *,
    options: OperatorFlags = OPERATOR,
) -> None:
    """Remove one record of a store on NATS that cannot be read. A record that can be read is refused."""
    address = address_of(options)
    if address.has_file:
        raise CommandError(f"{address.shown} is a file; accepted here: a store on NATS, nats://HOST:PORT")

    async def work(store: Store) -> UnreadableRecord:
        event = address.operator(store).event("store.forget_record", subject)
        return await cast("RecordStore", store).forget_record(subject, events=[event], dry_run=options.dry_run)

    found = with_store(address, work)
    done = "would be removed" if options.dry_run else "removed"
    text = f"{subject} (sequence {found.sequence}) {done}; it could not be read: {found.problem}"
    show({**msgspec.to_builtins(found), "removed": not options.dry_run}, lambda: put(text), json=options.json)


@app.command(help_epilogue=examples("store backup state-backup.db"))
def backup(
    target: Annotated[Path, arg("File for the copy. It must not exist.")],
    /,
    *,
    actor: Actor = None,
    options: StoreFlags = STORE,
) -> None:
    """
    Copy the store as it is while others go on writing it. The copy is a complete store of the same version.

    A store of an older or a newer version is copied as well, and not migrated.
    """
    address = address_of(options, actor=actor, looks=True)
    address.require_file()
    if target.exists():
        raise CommandError(f"{target}: exists already; name a file that does not exist", Exit.FAILED)
    if not target.absolute().parent.is_dir():
        raise CommandError(f"{target}: there is no folder {target.absolute().parent}; create it, or name another")
    with progress("copying", 100) as advance:
        state = address.files.copy(str(address.path), str(target), _percent(advance))
    _note_backup(address, str(target), state)
    size = target.stat().st_size
    data = {"path": str(address.path), "target": str(target), "bytes": size, "version": state.version}
    copied = f"{address.path} copied to {target}, {size} bytes; open it with --engine sqlite:{target}"
    show(data, lambda: put(copied), json=options.json)


def _note_backup(address: StoreAddress, target: str, state: FileState) -> None:
    """Audit a backup in the store, where that can be done."""
    from reefknot.runtime.sqlite_files import is_writable

    async def work(store: Store) -> None:
        await store.audit.append([address.operator(store).event("store.backup", target)])

    if state.version != state.current:
        text = f"the store has version {state.version}, this program writes {state.current}"
        say(f"{text}: the backup is not among its events")
    elif not is_writable(str(address.path)):
        say("the store may not be written, so the backup is not among its events")
    else:
        try:
            with_store(address, work)
        except StoreMovedError:
            say("so the backup is not among its events")


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
    """
    Migrate the store and its documents to the versions of this program. A newer file is refused (exit code 78).

    Each file as it is goes to FILE.vN.bak first; to undo the migration, move that copy back.
    """
    address = address_of(options)
    address.require_file()
    state = address.files.state(str(address.path))
    found, current = state.version, state.current
    migrated = found != current and not options.dry_run

    async def work(store: Store) -> None:
        event = address.operator(store).event("store.migrate", str(address.path), old=found, new=current)
        await store.audit.append([event])

    if migrated:
        with_store(address, work, or_empty=True, migrate=True)
    if not options.dry_run:
        asyncio.run(_migrate_documents(address))

    def text() -> None:
        if found == current:
            put(f"{address.path} has version {found}, which is current")
        else:
            verb = "would be migrated" if options.dry_run else "migrated"
            put(f"{address.path} {verb} from version {found} to {current}")

    data = {"path": str(address.path), "found": found, "current": current, "migrated": migrated}
    show(data, text, json=options.json)


async def _migrate_documents(address: StoreAddress) -> None:
    """Migrate the file of the documents, if there is one: it has versions of its own, and keeps a copy as well."""
    from reefknot.ingest.configured_sources import documents_path, open_documents

    file = documents_path(address.settings, address.url)
    if file.is_file():
        async with open_documents(file, create=False):
            pass


@app.command(help_epilogue=examples("store compact --dry-run"))
def compact(*, options: OperatorFlags = OPERATOR) -> None:
    """Return unused space to the disk. Writers wait meanwhile."""
    address, dry_run = address_of(options), options.dry_run
    address.require_file()
    before = address.path.stat().st_size
    unused = address.files.state(str(address.path)).unused

    async def work(store: Store) -> int:
        freed = await cast("FileStore", store).compact()
        await store.audit.append([address.operator(store).event("store.compact", str(address.path), bytes=freed)])
        return freed

    freed = 0 if dry_run else with_store(address, work)
    text = f"about {unused} of {before} bytes would be freed" if dry_run else f"{freed} bytes freed"
    data = {"path": str(address.path), "bytes": before, "unused": unused, "freed": freed, "compacted": not dry_run}
    show(data, lambda: put(f"{address.path}: {text}"), json=options.json)
