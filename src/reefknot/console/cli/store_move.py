"""
`reefknot store move`: a store moved to another one, the events of the old one to a file, and a move given up.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App
from msgspec import structs

from reefknot.audit.retention import Retention, RetentionNote
from reefknot.console.cli.app import CommandError, Exit, examples
from reefknot.console.cli.audit import export_log
from reefknot.console.cli.audit_files import head_file_of
from reefknot.console.cli.options import OPERATOR, OperatorFlags, arg
from reefknot.console.cli.output import progress, put, say, show
from reefknot.console.cli.store import StoreAddress, address_of, shown_url
from reefknot.console.operations.move import Move, give_up, move_store
from reefknot.errors import StoreMissingError
from reefknot.ingest.configured_sources import documents_path
from reefknot.stores.opening import store_to_move
from reefknot.stores.port.engines import accepted_urls, address_problem, is_shared

if TYPE_CHECKING:
    from reefknot.stores.port import Store


app = App(
    name="move",
    help_epilogue=examples(
        "store move --from sqlite:state.db --to nats://n1:4222 --dry-run",
        "store move --to nats://n1:4222/orders --archive events.jsonl",
    ),
)


@app.default
def move(
    *,
    to: Annotated[str, arg(f"Store to move to, which is empty: {accepted_urls(shared_only=True)}.")],
    from_: Annotated[str | None, arg("Store to move from. Default: that of --engine.", "--from")] = None,
    archive: Annotated[
        Path | None, arg("File for the events of the old store. Default: reefknot-audit-ID.jsonl in this folder.")
    ] = None,
    cancel: Annotated[bool, arg("Give up a move that has not ended: the old store may be worked on again.")] = False,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Move a store to another one, or go on with that, or give it up."""
    if from_ is not None and options.engine is not None:
        raise CommandError("name the old store with --from or with --engine, not with both")
    source, target = _end("--from", from_ or options.engine, options), _end("--to", to, options)
    done = asyncio.run(_move(source, target, archive, cancel=cancel, dry_run=options.dry_run))
    show(done, lambda: _put_move(done, source, target), json=options.json)
    return Exit.FAILED if done.get("refused") else Exit.FINE


def _end(flag: str, url: str | None, options: OperatorFlags) -> StoreAddress:
    """The store at one end of a move."""
    if url is None:
        return address_of(options)
    why = address_problem(url)
    if why is not None or not is_shared(url):
        why = "ends with the process that opened it" if why is None else why or "is no address of a store"
        raise CommandError(
            f"{flag}: {shown_url(url).rstrip(':')}: {why}; accepted here: {accepted_urls(shared_only=True)}"
        )
    return address_of(replace(options, engine=url))


async def _move(
    source: StoreAddress, target: StoreAddress, archive: Path | None, *, cancel: bool, dry_run: bool
) -> dict[str, Any]:
    """Open both stores and move, or give up."""

    async def export(store: Store, file: Path) -> list[Any]:
        return (await export_log(store, file, head_file_of(file)))[1]

    if source.has_file:
        source.require_file()
        if source.path.stat().st_size == 0:
            raise CommandError(f"{source.path}: is an empty file, not a store", Exit.UNREACHABLE)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(store_to_move(source.url, source.settings, creates=False))
        noted = RetentionNote(old.path).read().retention or Retention()
        retention = noted.work if source.settings is None else source.settings.configuration.worker.retention_seconds
        asked = Move(source.operator(old), None, export, retention, progress, archive)
        if cancel:
            return await give_up(asked)

        async def opened(*, creates: bool) -> Store:
            opening = store_to_move(target.url, target.settings, creates=creates, work_retention=retention)
            return await stack.enter_async_context(opening)

        try:
            new = None if target.has_file and not target.path.exists() else await opened(creates=False)
        except StoreMissingError:
            new = None
        if new is None:  # what speaks against it is known before a store is made
            looked = await move_store(asked, dry_run=dry_run)
            if dry_run:
                return looked
            new = await opened(creates=True)
        if new.identity == old.identity:
            raise CommandError(f"--from and --to are the same store, {source.shown}")
        return await move_store(structs.replace(asked, target=target.operator(new)), dry_run=dry_run)


def _put_move(done: dict[str, Any], source: StoreAddress, target: StoreAddress) -> None:
    old, new = source.shown, target.shown
    if done.get("cancelled"):
        put(f"the move from {old} to {done['target']} is given up: {old} may be worked on again")
        say(f"Delete {done['target']} before another move to it: it may have a part of the records.")
        return
    jobs, keys = (", ".join(f"{n} {name}" for name, n in sorted(done[one].items())) for one in ("jobs", "keys"))
    verb = "would be moved" if done["dry_run"] else "moved"
    put(f"{old} {verb} to {new}: jobs: {jobs or 'none'}; keys: {keys or 'none'}; named values: {done['values']}")
    for why in done.get("refused", ()):
        put(f"it would be refused: {why}")
    if not done["dry_run"]:
        put(f"its events are in {done['archive']}; `reefknot audit verify {done['archive']}` verifies them")
        say(f"Nothing works on {old} from now on; `engine: {new}` in the configuration names the new store.")
        _say_documents(source, target)


def _say_documents(source: StoreAddress, target: StoreAddress) -> None:
    """Say where the documents of the old store are, if the new one would look for them elsewhere."""
    old, new = (documents_path(one.settings, one.url) for one in (source, target))
    if old != new and old.is_file():
        say(f"The documents stay in {old}: name that file as `ingestion.documents`, or move it to {new}.")
