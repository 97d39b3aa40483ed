"""
The documents of sources for commands: opened for reading, exported as lines of JSON, and removed.

A source of which nothing is kept is refused with what to do: one that was never synced, or that nobody knows.
"""

from __future__ import annotations

import json as json_module
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.ingestion import source_view as view
from reefknot.cli.options import unknown
from reefknot.cli.output import relative
from reefknot.cli.store import StoreAddress, opened
from reefknot.core.work import WorkState
from reefknot.ports.work_queue import QuarantineFilter

if TYPE_CHECKING:
    from reefknot.engines.documents import SqliteDocuments
    from reefknot.ports.connector import Document
    from reefknot.ports.store import Store

EXPORTED_AT_ONCE = 100
ENDED_AT_ONCE = 200


def documents_file(address: StoreAddress) -> Path:
    from reefknot.app.sources import documents_path

    return documents_path(address.settings, address.url)


@asynccontextmanager
async def open_for_reading(address: StoreAddress, wanted: str | None = None) -> AsyncIterator[SqliteDocuments]:
    """The documents, for reading: a file that is not there is an error that says how it comes to be."""
    from reefknot.app.sources import open_documents

    file = documents_file(address)
    if not file.is_file():
        check_kept("NAME", wanted, (), address)
        text = f"there are no documents yet ({relative(str(file))}); `source run NAME` syncs a source"
        raise CommandError(text, Exit.UNREACHABLE)
    async with open_documents(file, create=False) as documents:
        yield documents


def configured_names(address: StoreAddress) -> list[str]:
    return [] if address.settings is None else list(address.settings.configuration.sources)


def check_kept(flag: str, name: str | None, kept: Sequence[str], address: StoreAddress) -> None:
    """Refuse a source of which nothing is kept: one that was never synced, or that nobody knows."""
    if name is None or name in kept:
        return
    configured = configured_names(address)
    if name in configured:
        raise CommandError(f"{name} has no documents yet: reefknot source run {name}", Exit.FAILED)
    raise unknown(flag, name, dict.fromkeys([*configured, *kept]))


async def export_lines(address: StoreAddress, name: str | None, write: Any) -> int:
    """Write a line for every document, page by page. Returns how many."""
    number = 0
    async with open_for_reading(address, name) as documents:
        known = sorted(await documents.counts())
        check_kept("NAME", name, known, address)
        for source in known if name is None else [name]:
            after = ""
            while page := await documents.page(source, after=after, limit=EXPORTED_AT_ONCE):
                for one in page:
                    write(_line(source, one))
                number += len(page)
                after = page[-1].id
    return number


def _line(source: str, document: Document) -> str:
    """A document as a line of JSON. Names of files that are no text are escaped, which JSON allows."""
    fields = view.document_fields(source, document)
    line = json_module.dumps(fields, ensure_ascii=False)
    return line if line.isascii() or _is_text(line) else json_module.dumps(fields)


def _is_text(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


class LeftOfSource(NamedTuple):
    """The number of documents, and of jobs that have not ended or are in quarantine."""

    documents: int
    jobs: int


async def forget_source(address: StoreAddress, name: str, reason: str, *, dry_run: bool) -> LeftOfSource:
    """End the jobs, then delete the record, then the documents: cut off, the command finds the rest again."""
    from reefknot.ingestion.sources import PREFIX, statuses

    async with AsyncExitStack() as stack:
        has_documents = documents_file(address).is_file()
        documents = await stack.enter_async_context(open_for_reading(address)) if has_documents else None
        store = await stack.enter_async_context(opened(address))
        counts = {} if documents is None else await documents.counts()
        records = {one.name.removeprefix(PREFIX): one for one in await store.values.list(PREFIX)}
        found = {one.name: one for one in await statuses(store, [], with_others=True)}
        known = counts.keys() | records.keys() | found.keys()
        if name not in known:
            left_of = ", ".join(sorted(known - set(configured_names(address)))) or "none"
            text = f"NAME: nothing is left of a source {name!r}; accepted: a source that is not configured any more"
            raise CommandError(f"{text} ({left_of})")
        number = sum((found[name].open_jobs, found[name].quarantined)) if name in found else 0
        left = LeftOfSource(counts[name].documents if name in counts else 0, number)
        if dry_run:
            return left
        await _end_jobs(store, name, who=address.actor, reason=reason)
        event = address.event("source.forget", name, reason=reason, documents=left.documents, jobs=left.jobs)
        record = records.get(name)
        if record is None:
            await store.audit.append([event])
        elif not await store.values.delete(record.name, version=record.version, events=[event]):
            raise CommandError(f"{name} was changed meanwhile: a system still runs it; try again", Exit.TEMPORARY)
        if documents is not None:
            await documents.forget(name, documents=True)
        return left


async def _end_jobs(store: Store, name: str, *, who: str, reason: str) -> None:
    """Cancel the open jobs of a source, and discard those in quarantine."""
    from reefknot.ingestion.jobs import JobQueue, class_of

    jobs = JobQueue(store)
    for state in (WorkState.PENDING, WorkState.RUNNING):
        while page := await store.work.find(state=state, classes=(class_of(name),), limit=ENDED_AT_ONCE):
            ended = [await jobs.cancel(one.assignment_id, reason=reason, who=who) for one in page]
            if not any(ended):
                break
    while page := await store.quarantine.find(QuarantineFilter(source=name), limit=ENDED_AT_ONCE):
        which = QuarantineFilter(ids=tuple(one.id for one in page))
        if not await store.quarantine.discard(which, who=who, reason=reason):
            break
