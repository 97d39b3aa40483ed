"""
`reefknot source`: the sources of documents: added, listed, tested, synced, paused, searched and exported.

A sync on the command line is a job like any other: it has its retries, its place in the store and its events, and a
system that runs on the same store may take it over. Documents are read from their own file, without a lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from logging import INFO, WARNING
from math import isinf
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import IO, TYPE_CHECKING, Annotated, Any

from msgspec import structs, to_builtins

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.ingestion import source_view as view
from reefknot.console.cli.live_output import LOG
from reefknot.console.cli.options import (
    COMMON,
    OPERATOR,
    STORE,
    CommonFlags,
    FileName,
    OperatorFlags,
    StoreFlags,
    Wide,
    arg,
    file_arg,
    settings,
    unwritable,
)
from reefknot.console.cli.output import data, prints_to_stderr, put, put_document, put_json, relative, say, show
from reefknot.console.cli.store import StoreAddress, address_of, looked, opened, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations import sources as operations
from reefknot.console.operations.sources import named_source
from reefknot.console.operations.values import plural
from reefknot.console.words.sources import Here, sync_refusal
from reefknot.errors import OperationError
from reefknot.policy.model.defaults import JobType
from reefknot.queue.model.work import WorkItem, WorkState

if TYPE_CHECKING:
    from reefknot.ingest.configured_sources import ConfiguredSource
    from reefknot.ingest.orchestrator import IngestionOrchestrator
    from reefknot.policy.settings import Settings

app = noun(
    "source",
    "source add notes --connector local_files --path ~/notes --every 15m",
    "source run notes",
    "source search 'reef knot'",
)

Name = Annotated[str, arg("Name of the source.")]
_MODULES = "Module (app.sources) or file (sources.py) that defines connectors with @reefknot.connector; repeatable."
ConnectorModules = Annotated[list[FileName] | None, file_arg(_MODULES, "--module")]
Because = Annotated[str, arg("Reason, for the list of sources and the audit log.")]
_POLL_S = 0.05
WAITING_S = 5.0
MOST_ITEMS = 1000
DRAIN_S = 5.0


def _check_name(address: StoreAddress, name: str) -> None:
    """Refuse the name of no source before the store is opened: there may be none yet."""
    named_source(operations.configured_sources(address.operator(None)), name)


def _load_modules(modules: Sequence[str] | None) -> None:
    """Import the modules of one's own connectors."""
    if modules:
        from reefknot.ingest.connectors.registry import load_connectors

        with prints_to_stderr():  # a module may print when it is imported
            for name in modules:
                load_connectors(name, path=os.getcwd())


# ---- add -------------------------------------------------------------------------------------------------------------


@app.command(
    help_epilogue=examples(
        "source add notes --connector local_files --path ~/notes --every 15m --on-change",
        "source add mail --connector imap_mailbox --set host=imap.example.org --set user=me@example.org "
        "--set password=env:MAIL_PASSWORD --cron '0 7 * * 1-5' --time-zone Europe/Berlin",
    )
)
def add(
    name: Name,
    /,
    *,
    connector: Annotated[str, arg(f"Type of the source: {', '.join(JobType)}.")],
    path: Annotated[FileName | None, file_arg("Folder of the source; short for --set path=PATH.")] = None,
    set_: Annotated[list[str] | None, arg("Setting of the connector, KEY=VALUE; repeatable.", "--set")] = None,
    every: Annotated[str | None, arg("Interval between two syncs: 90s, 15m, 2h, 7d.")] = None,
    cron: Annotated[str | None, arg("Times of syncs as a cron expression, such as '0 7 * * 1-5'.")] = None,
    time_zone: Annotated[str | None, arg("Time zone of --cron. Default: UTC.")] = None,
    on_change: Annotated[bool, arg("Sync when the source reports changes, where it can be watched.")] = False,
    module: ConnectorModules = None,
    dry_run: Annotated[bool, arg("Show what would be written, and write nothing.")] = False,
    common: CommonFlags = COMMON,
) -> None:
    """Add a source to the configuration file and keep the rest of the file. After a mistake nothing is written."""
    from reefknot.console.cli.ingestion.source_add import check_name, extended, own_settings, replace_file

    check_name(name)
    if time_zone is not None and cron is None:
        raise CommandError("--time-zone: accepted with --cron, whose time zone it is")
    values: dict[str, Any] = {"connector": connector, **own_settings(path, set_ or [])}
    times = {"every": every, "cron": cron, "time_zone": time_zone, "on_change": on_change or None}
    values |= {key: one for key, one in times.items() if one is not None}
    _load_modules(module)
    file, text, added = extended(name, values, common.config, path=path)
    if not dry_run:
        replace_file(file, text)
    fields = {"name": name, "path": str(file), "written": not dry_run, "added": added, "source": values}
    show(fields, lambda: put_document(added + "\n"), json=common.json)
    where = relative(str(file))
    if dry_run:
        say(f"Nothing was written; without --dry-run this goes to {where}.")
    else:
        words = "".join(f" --module {one}" for one in module or ())
        say(f"Added to {where}. Next: reefknot source test {name}{words}, then reefknot source run {name}{words}.")
        if path is not None and not Path(path).expanduser().is_dir():
            say(f"There is no folder {path} yet: create it before the first sync.")
        if every or cron or on_change:
            say(f"Syncs by themselves need a system that runs: start or restart `reefknot up{words}`.")


# ---- list and test ---------------------------------------------------------------------------------------------------


@app.command(name="list", help_epilogue=examples("source list", "source list --watch", "source list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List the sources: schedule, state, documents, last and next sync, and what to do where something needs it."""
    address = address_of(options, looks=True)

    def draw() -> None:
        view.put_sources(looked(address, operations.list_sources), wide=wide, json=options.json)

    repeated(watch, draw)


@app.command(name="show", help_epilogue=examples("source show notes"))
def show_source(
    name: Name,
    /,
    *,
    limit: Annotated[int, arg("Maximum number of documents with a problem. Default: 20.")] = 20,
    options: StoreFlags = STORE,
) -> None:
    """Show a source: settings, state, and the documents that could be read only in part. Secrets are hidden."""
    address = address_of(options, looks=True)
    _check_name(address, name)
    fields = looked(address, lambda at: operations.show_source(at, name, limit=limit))
    view.put_source(fields, json=options.json)


@app.command(name="test", help_epilogue=examples("source test", "source test mail"))
def try_sources(
    *names: Annotated[str, arg("Sources to test. Default: all.")],
    module: ConnectorModules = None,
    common: CommonFlags = COMMON,
) -> int:
    """
    Connect to sources without reading documents, and report the results. Exits with 0 when no source fails.

    For a connector without a `test` method only the settings are checked, and its source is NOT TESTED.
    """
    from reefknot.ingest.configured_sources import sources_of

    configured = settings(common.config)
    _load_modules(module)
    sources = sources_of(configured)
    chosen = [named_source(sources, name) for name in dict.fromkeys(names)] or sources
    if not chosen:
        raise CommandError("no source is configured; `source add` adds one", Exit.MISCONFIGURED)

    async def work() -> list[view.TestResult]:
        return [await _tested(one, configured) for one in chosen]

    results = asyncio.run(work())

    def text() -> None:
        for one in results:
            put(f"{one.name}: {'FAILED' if not one.ok else 'OK' if one.tested else 'NOT TESTED'}: {one.answer}")

    fields = {"ok": all(one.ok for one in results), "sources": to_builtins(results)}
    show(fields, text, json=common.json)
    codes = {one.exit for one in results if not one.ok}
    return Exit.FINE if not codes else codes.pop() if len(codes) == 1 else Exit.FAILED


async def _tested(source: ConfiguredSource, configured: Settings) -> view.TestResult:
    from reefknot.errors import ConfigurationError
    from reefknot.ingest.configured_sources import check_sources, connector_for, error_in_connector
    from reefknot.ingest.connectors.registry import BUILTIN
    from reefknot.ingest.connectors.text_extraction import installation_note
    from reefknot.runtime.redactor import redact

    try:
        check_sources(configured, only={source.name}, strict=True)
        connector = connector_for(source)
        try:
            async with asyncio.timeout(source.timeout):
                answer = await connector.test()
        finally:
            async with asyncio.timeout(source.timeout):
                await connector.close()
    except ConfigurationError as error:
        text = redact("; ".join(relative(str(one)) for one in error.problems))
        return view.TestResult(source.name, False, text, Exit.MISCONFIGURED)
    except Exception as error:
        return view.failed_test(source.name, error, source.timeout, error_in_connector(source.connector, error))
    tested = getattr(connector, "is_testable", True)
    note = installation_note() if source.connector in BUILTIN else ""
    return view.TestResult(source.name, True, redact(answer) + note, Exit.FINE, tested=tested)


# ---- syncs -----------------------------------------------------------------------------------------------------------


@app.command(help_epilogue=examples("source run notes", "source run notes --full"))
def run(
    name: Name,
    /,
    *,
    full: Annotated[bool, arg("Read the whole source again, not only what is new.")] = False,
    module: ConnectorModules = None,
    options: OperatorFlags = OPERATOR,
) -> int:
    """
    Sync a source now, in this process, and print a summary.

    Exits with 75 when a retry is scheduled, and with 1 when the sync has failed for good.
    """
    from reefknot.console.logs import printed
    from reefknot.ingest.configured_sources import check_sources, sources_of

    address = address_of(options)
    if address.settings is None:
        raise CommandError("no source is configured; `source add` adds one", Exit.MISCONFIGURED)
    _load_modules(module)
    source = named_source(sources_of(address.settings), name)
    check_sources(address.settings, only={name}, strict=True)
    if options.dry_run:
        put(f"{name} would be synced{' from the beginning' if full else ''}: {source.connector}, {source.schedule}")
        return Exit.FINE
    try:
        again = f"reefknot source run {name}" + "".join(f" --module {quote(one)}" for one in module or ())
        with printed(WARNING, as_json=LOG.form == "json", own_level=INFO):
            outcome, left = asyncio.run(_unless_interrupted(_synced(address, source, full=full), address))
    except KeyboardInterrupt:
        say(f"{name}: interrupted; the sync goes on at the next `{again}`, or by `reefknot up`")
        return Exit.INTERRUPTED
    return view.put_outcome(outcome, left, again=again, json=options.json)


async def _unless_interrupted(
    sync: Awaitable[view.SyncOutcome], address: StoreAddress
) -> tuple[view.SyncOutcome, view.ItemsLeft]:
    """The outcome of a sync, and what is left of it. After Ctrl-C there is none, however the sync took it."""
    task = asyncio.current_task()
    assert task is not None
    try:
        outcome = await sync
        left = await _items_left(address, outcome)
    except Exception:
        if task.cancelling():
            raise asyncio.CancelledError from None
        raise
    if task.cancelling():
        raise asyncio.CancelledError
    return outcome, left


async def _items_left(address: StoreAddress, outcome: view.SyncOutcome) -> view.ItemsLeft:
    """The jobs of items that a sync could not read: those that wait for a retry, and those in quarantine."""
    from reefknot.ingest.sources import statuses

    if not outcome.failed:
        return view.ItemsLeft()
    async with opened(address) as store:
        (status,) = await statuses(store, [outcome.source])
    return view.ItemsLeft(status.open_jobs, status.quarantined)


async def _synced(address: StoreAddress, source: ConfiguredSource, *, full: bool) -> view.SyncOutcome:
    from reefknot.ingest.configured_sources import ingestion_settings, open_documents
    from reefknot.ingest.jobs import JobQueue
    from reefknot.ingest.orchestrator import IngestionOrchestrator
    from reefknot.queue.presence import release_dead_leases
    from reefknot.stores.opening import open_store, options_of

    limits = ingestion_settings(address.settings)
    async with (
        open_store(address.url, **options_of(address.settings), tidy=False) as store,
        open_documents(operations.documents_file(address.operator(store))) as documents,
    ):
        orchestrator = IngestionOrchestrator(
            job_queue=JobQueue(store),
            sources=[source.for_orchestrator()],
            documents=documents,
            book=address.settings.book,
            settings=structs.replace(limits, watch=False, drain=DRAIN_S),
            secrets=tuple(address.redactor.secrets),
            name="source run",
        )
        await orchestrator.records.refresh()
        record = orchestrator.records.known(source.name)
        here = Here(await documents.identity(), isinf(store.reached_for))
        if (refused := sync_refusal(source, record, here, full=full)) is not None:
            raise OperationError(*refused)
        if full:
            await documents.forget(source.name, documents=record.is_of_other(source.connector))
            await orchestrator.records.change(
                source.name, lambda record: structs.replace(record, documents="", connector="")
            )
        await store.audit.append([address.operator(store).event("source.run", source.name, full=full)])
        await release_dead_leases(store)  # a process that was killed holds nothing up
        before = monotonic()
        progress = view.Progress(source.name)
        orchestrator.on_page(lambda _, summary: progress.page(summary))
        async with orchestrator:
            item = await _until_over(orchestrator, source, address.actor)
        counts = (await documents.counts()).get(source.name)
        record = await orchestrator.records.read(source.name)
        now = store.moment().wall
        return view.outcome(source.name, item, record, counts, monotonic() - before, now, address.redactor)


async def _until_over(orchestrator: IngestionOrchestrator, source: ConfiguredSource, who: str) -> WorkItem:
    """The job of a sync, when it has ended, waits for a later time, or the source lets none of its jobs begin."""
    job_id = await orchestrator.request_sync(source.name, trigger="manual", who=who)
    assert job_id is not None, "a person's request is never refused"
    printed_at = monotonic()
    while True:
        item = await orchestrator.jobs.get(job_id)
        if item is None:
            raise CommandError(f"the job {job_id} was removed meanwhile", Exit.FAILED)
        if (error := orchestrator.report_error) is not None:  # the lease runs out, and the next run goes on
            raise error
        if not await _is_busy(orchestrator, source.name, item):
            return item
        if not orchestrator.running and monotonic() - printed_at > WAITING_S:
            printed_at = monotonic()
            say(f"{source.name}: the job waits for its turn; Ctrl-C leaves it to `reefknot up`")
        await asyncio.sleep(_POLL_S)


async def _is_busy(orchestrator: IngestionOrchestrator, name: str, sync: WorkItem) -> bool:
    """Whether the sync goes on, or the first attempt of an item that it could not read."""
    now = orchestrator.jobs.store.moment().wall
    if orchestrator.running or sync.state is WorkState.RUNNING:
        return True
    if orchestrator.records.known(name).health.opens_at(now) is not None:  # nothing of this source begins now
        return False
    return any(operations.is_under_way(one, now) for one in await orchestrator.jobs.list(name, limit=MOST_ITEMS))


@app.command(help_epilogue=examples("source pause mail --because 'the server moves'"))
def pause(name: Name, /, *, because: Because = "", options: OperatorFlags = OPERATOR) -> None:
    """Pause a source: its jobs do not start until it is resumed. Its documents stay."""
    _set_paused(operations.pause_source, name, because, options)


@app.command(help_epilogue=examples("source resume mail"))
def resume(name: Name, /, *, because: Because = "", options: OperatorFlags = OPERATOR) -> None:
    """Resume a paused source."""
    _set_paused(operations.resume_source, name, because, options)


def _set_paused(
    change: Callable[..., Awaitable[dict[str, Any]]], name: str, because: str, options: OperatorFlags
) -> None:
    address, dry_run = address_of(options), options.dry_run
    _check_name(address, name)
    fields = with_store(address, lambda store: change(address.operator(store), name, because=because, dry_run=dry_run))
    paused, is_new = fields["paused"], fields["paused"] != fields["was_paused"]
    done = "would be" if dry_run else "is" if is_new else "was already"
    state = "paused" if paused else "running" if not is_new else "resumed"
    show(fields, lambda: put(f"{name} {done} {state}"), json=options.json)


@app.command(help_epilogue=examples("source forget notes --because 'the folder is gone' --dry-run"))
def forget(name: Name, /, *, because: Because, options: OperatorFlags = OPERATOR) -> int:
    """Remove what is left of a source that is not configured any more: documents, cursor, jobs. It is audited."""
    address, dry_run = address_of(options), options.dry_run
    fields = with_store(
        address, lambda store: operations.forget_source(address.operator(store), name, because=because, dry_run=dry_run)
    )
    done = "would be" if dry_run else "is"
    jobs = f" and {plural(fields['jobs'], 'job')}" if fields["jobs"] else ""
    text = f"{name} {done} forgotten, with {plural(fields['documents'], 'document')}{jobs}"
    show(fields, lambda: put(text), json=options.json)
    return Exit.FINE


# ---- documents -------------------------------------------------------------------------------------------------------


@app.command(
    help_epilogue=examples(
        "source search reef knot",
        "source search '\"reef knot\" tie*' --source notes --limit 5",
        "source search from:anna tag:work after:2026-03 budget",
    )
)
def search(
    *words: Annotated[str, arg('Words that must all occur; "quoted words" as a phrase, wor* as a prefix.')],
    source: Annotated[str | None, arg("Only documents of this source.")] = None,
    limit: Annotated[int, arg("Maximum number of documents. Default: 20.")] = 20,
    options: StoreFlags = STORE,
) -> int:
    """
    Search the documents, best first: title, text, location, senders, recipients, attachments, tags and aliases.

    A field narrows it: title:, text:, file:, from:, to:, tag:, alias:, source:, before: and after: (a date).
    Exits with 1 when nothing is found.
    """
    address = address_of(options, looks=True)
    search = operations.search_documents(address.operator(None), " ".join(words), source=source, limit=limit)
    found = asyncio.run(search)
    view.put_hits(found, limit, json=options.json)
    if not found["hits"] and not options.json:
        say(f"nothing is found in {', '.join(found['searched']) or 'no documents: none are kept yet'}")
    return Exit.FINE if found["hits"] else Exit.FAILED


@app.command(
    help_epilogue=examples(
        "source changes --json > changes.jsonl", "source changes --after 1760000000042 --follow --json"
    )
)
def changes(
    *,
    after: Annotated[str, arg("Cursor of the last change that was taken over. Default: 0, the beginning.")] = "0",
    source: Annotated[str | None, arg("Only documents of this source.")] = None,
    follow: Annotated[bool, arg("Continue with new changes, until interrupted.", "--follow", "-f")] = False,
    no_text: Annotated[bool, arg("Leave out the texts of documents.")] = False,
    options: StoreFlags = STORE,
) -> None:
    """
    List the documents that were kept or deleted, each once with its latest change, in order.

    With --json, one line for each with the whole document; its `cursor` is the next --after.
    Exits with 1 when deletions behind --after are forgotten (after 30 days): then start over, without --after.
    """
    operator = address_of(options, looks=True).operator(None)
    asyncio.run(view.put_changes(operator, after, source, follow=follow, text=not no_text, json=options.json))


@app.command(help_epilogue=examples("source export > documents.jsonl", "source export notes --output notes.jsonl"))
def export(
    name: Annotated[str | None, arg("Source to export. Default: all that have documents.")] = None,
    /,
    *,
    output: Annotated[FileName | None, file_arg("File to write, complete or not at all. Default: stdout.")] = None,
    options: StoreFlags = STORE,
) -> None:
    """Export documents with their text as lines of JSON, one for each document, with or without --json."""
    from reefknot.runtime.files import output_file

    operator = address_of(options, looks=True).operator(None)
    if output is None or output == "-":
        stream = data()
        asyncio.run(view.export_lines(operator, name, lambda line: stream.write(line + "\n")))
        return

    def to_file(file: IO[bytes]) -> int:
        return asyncio.run(view.export_lines(operator, name, lambda line: file.write(line.encode() + b"\n")))

    try:
        with output_file(output) as file:
            number = to_file(file)
    except OSError as error:
        raise unwritable(output, error) from None
    if options.json:
        put_json({"path": output, "documents": number})
    else:
        say(f"{plural(number, 'document')} written to {output}")
