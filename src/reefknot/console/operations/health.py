"""
`examine_store`: everything that `reefknot doctor` checks, each finding with its remedy.

The findings are about this interpreter and the extras in it, the configuration and its secrets, the store
(which its engine examines), and what the processes over the store left behind. Nothing is made, changed or repaired,
and no finding holds a secret. A warning is something to look at; only a problem makes the answer not `ok`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import stat
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.app.activity import reported, store_activity
from reefknot.app.alert_watch import rules_of
from reefknot.audit.metrics import series
from reefknot.audit.port import AuditQuery, MultiChainLog, end_of
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.sources import stopped_sources
from reefknot.console.operations.systems import RELIEF, open_breakers, workers_of
from reefknot.console.operations.values import age, plural
from reefknot.console.words.events import last_words, part_name
from reefknot.core.alert_rules import OLDEST_AGE, RULES
from reefknot.core.redaction import Redactor
from reefknot.errors import ConfigurationError, StoreError
from reefknot.policy.reading.session import KeyPath, Problem, dotted
from reefknot.policy.secrets import NATS_SECRETS, WEBHOOK, is_reference, resolve_at
from reefknot.queue.model.routing import WorkerState
from reefknot.queue.model.work import ROUTER, WorkState, worker_of
from reefknot.queue.pauses import read_pauses
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.presence import dead_owners, gone_parts, living_systems, unserved_work, visible_work
from reefknot.runtime.addresses import is_loopback, is_wildcard
from reefknot.runtime.database_urls import database_file
from reefknot.runtime.log import error_text, printable
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import move_mark
from reefknot.stores.port.engines import ExamineOptions, Finding, Level, engine_of, problem_of

if TYPE_CHECKING:
    from reefknot.policy.schema import DashboardSection
    from reefknot.policy.settings import Settings
    from reefknot.queue.port.work_queue import WorkSnapshot
    from reefknot.stores.port import Store

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "dashboard": ("jinja2", "starlette", "uvicorn"),
    "http": ("httpx2",),
    "ingest": ("httpx2", "watchfiles"),
    "metrics": ("prometheus_client",),
    "nats": ("nats", "nkeys"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "sql": ("psycopg",),
    "text": ("pypdf", "docx", "selectolax", "charset_normalizer"),
}
"""By extra: the modules that it brings."""
BEHIND = 1000
"""Events that a copy of the audit log may be behind without a warning."""
MOST_NAMED = 5
MOST_LOOKED_AT = 100
"""Waiting jobs whose types are compared with those of the running systems."""
SECRET_FILES: tuple[KeyPath, ...] = (("nats", "credentials"), ("nats", "tls_key"), ("dashboard", "tls_key"))
"""Places of the configuration that name a file which is a secret itself."""

LOOK_S = 3.0
"""How long an open store is looked at."""


async def examine_store(operator: Operator, *, monitor: str | None = None, logins: bool = False) -> dict[str, Any]:
    """
    The findings about the open store of an operator, and about all around it; others go on working meanwhile.

    That the store does not answer is a finding, too.

    `monitor` is the URL of a NATS server's monitoring port; with `logins`, the SQL connections of the configuration are
    tried as well.
    """
    settings = operator.settings
    findings = await _surroundings(settings, logins=logins)
    try:
        async with asyncio.timeout(LOOK_S):
            look = ExamineOptions(monitor=monitor, takes_shared=_takes_shared(settings))
            findings += await engine_of(operator.store.identity).examine_open(operator.store, look)
            findings += await _activity(operator.store, settings)
    except StoreError as error:
        findings.append(Finding("store", "problem", error.problem, error.way_out, "unreachable"))
    except TimeoutError:
        text, way_out = f"it did not answer within {LOOK_S:g} s", "check its disk or its server, and look again"
        findings.append(Finding("store", "problem", text, way_out, "unreachable"))
    return _report(findings, operator.shown, operator.redactor)


async def examine_address(
    url: str,
    settings: Settings | None,
    *,
    shown: str,
    redactor: Redactor,
    monitor: str | None = None,
    logins: bool = False,
    is_named: bool = False,
) -> dict[str, Any]:
    """
    The findings of `examine_store` about a store that is not open, and that perhaps cannot be opened.

    One that `is_named` by the operator and is missing is a problem: elsewhere it means that nothing has run yet.

    It is opened only when nothing speaks against it, and for reading: to see who holds leases.
    """
    from reefknot.stores.opening import open_store, options_of

    options: Any = {} if settings is None else options_of(settings)
    look = ExamineOptions(options.get("nats", {}), monitor, takes_shared=_takes_shared(settings), is_named=is_named)
    findings = await _surroundings(settings, logins=logins)
    found = await engine_of(url).examine(url, look)
    findings += found.findings
    if found.is_ready:
        try:
            async with open_store(url, **options, tidy=False, read_only=True) as store:
                findings += await _activity(store, settings, silence="warning")  # the server was examined already
                if (mark := (await move_mark(store))[0]) is not None and mark.forbids_work:
                    findings.append(problem_of("move", mark.error()))
        except StoreError as error:
            findings.append(Finding("leases", "warning", f"not known: {error.problem}", error.way_out))
    return _report(findings, shown, redactor)


def _takes_shared(settings: Settings | None) -> bool:
    return settings is None or settings.configuration.router.shared_subject == "ours"


def _report(findings: list[Finding], shown: str, redactor: Redactor) -> dict[str, Any]:
    safe = [msgspec.structs.replace(one, text=redactor(one.text), way_out=redactor(one.way_out)) for one in findings]
    ok = not any(one.level == "problem" for one in safe)
    return {"ok": ok, "store": shown, "findings": msgspec.to_builtins(safe)}


async def _surroundings(settings: Settings | None, *, logins: bool) -> list[Finding]:
    """Findings about the interpreter, the extras, and the configuration."""
    findings = [_python(), extras_finding(settings)]
    if settings is not None:
        findings += await asyncio.to_thread(lambda: list(_configuration(settings)))
        if logins:
            findings.append(await _logins(settings))
    return findings


# ---- interpreter and extras ------------------------------------------------------------------------------------------


def _python() -> Finding:
    from reefknot import __version__

    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    return Finding("python", "ok", f"{text}; reefknot {__version__}")


def extras_finding(settings: Settings | None, *, is_there: Any = None) -> Finding:
    """The extras that are installed, and those that are not; a warning when the configuration needs one of them."""
    is_there = is_there or _is_installed
    missing = [extra for extra, modules in EXTRAS.items() if not all(map(is_there, modules))]
    installed = [extra for extra in EXTRAS if extra not in missing]
    text = f"installed: {', '.join(installed) or 'none'}"
    if not missing:
        return Finding("extras", "ok", text)
    text += f"; not installed: {', '.join(missing)}"
    needed = {} if settings is None else {one: why for one, why in _needed(settings).items() if one in missing}
    if needed:
        text += f"; {' and '.join(f'{why} needs {one}' for one, why in needed.items())}"
        return Finding("extras", "warning", text, f"pip install '.[{','.join(needed)}]' in a checkout")
    return Finding("extras", "ok", text, f"pip install '.[{','.join(missing)}]' in a checkout adds them")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _needed(settings: Settings) -> dict[str, str]:
    """By extra: what in the configuration needs it."""
    configuration = settings.configuration
    needed: dict[str, str] = {}
    if configuration.engine is not None and (extra := engine_of(configuration.engine).extra):
        needed[extra] = "engine"
    if "dashboard" in configuration.written and configuration.dashboard.enabled:
        needed["dashboard"] = "dashboard"
    for name, source in configuration.sources.items():
        if source.connector == "github_repository":
            needed.setdefault("ingest", f"sources.{name}")
    sql = configuration.blocks.sql
    for name, entry in ({} if sql is None else sql.connections).items():
        if database_file(entry if isinstance(entry, str) else entry.url) is None:
            needed.setdefault("sql", f"blocks.sql.connections.{name}")
    return needed


# ---- configuration and secrets ---------------------------------------------------------------------------------------


def _configuration(settings: Settings) -> Iterator[Finding]:
    """Findings about the checked configuration: its warnings, its secrets, its dashboard."""
    from reefknot.app.blocks import block_settings
    from reefknot.ingest.configured_sources import check_sources

    warnings, mistake = list(settings.warnings), ""
    try:
        block_settings(settings)
        warnings += check_sources(settings, strict=False) if settings.configuration.sources else []
    except ConfigurationError as error:
        mistake = "; ".join(str(error).splitlines())
        yield Finding("config", "problem", mistake, "`reefknot config check` shows each with its line", "misconfigured")
    for warning in warnings:
        yield Finding("config", "warning", warning)
    if not warnings and not mistake:
        shown = "no file: built-in values" if settings.path is None else f"{settings.path}, no warnings"
        yield Finding("config", "ok", shown)
    yield from _secrets(settings)
    yield from _dashboard(settings)


def _secret_places(settings: Settings) -> Iterator[KeyPath]:
    """The places of the configuration that refer to a secret."""
    yield from (("secrets", name) for name in settings.configuration.secrets)
    yield from (("nats", key) for key in NATS_SECRETS)
    yield from (("dashboard", key) for key in ("operator_token", "reader_token"))
    if is_reference(settings.configuration.alerts.webhook):
        yield WEBHOOK
    for name, source in settings.tree.value.get("sources", {}).items():
        yield from (("sources", name, key) for key, written in source.items() if is_reference(written))


def _secrets(settings: Settings) -> Iterator[Finding]:
    """Whether every secret can be read from here, and whether others can read its file."""
    number, unread = 0, set()
    for path in _secret_places(settings):
        found = resolve_at(settings.tree, tuple(map(str, path)), environ=os.environ, folder=settings.folder)
        if found is None:
            continue
        number += 1
        if isinstance(found, Problem):
            unread.add(found.path)
            way_out = "set it for the processes that need it; this one may be another user's"
            reference, _, reason = found.message.rpartition(": ")
            # In parentheses, also below: behind the name of a secret and a colon, the redactor takes out what follows.
            yield Finding("secrets", "warning", f"{found.path} ({reference}): {reason}", way_out)
    for name, file in _secret_files(settings):
        if name not in unread:
            yield from _exposed(name, file)
    if number:
        yield Finding("secrets", "ok", f"{number} {'reference' if number == 1 else 'references'} in the configuration")


def _secret_files(settings: Settings) -> Iterator[tuple[str, Path]]:
    """The files of secrets, with the places that name them."""
    for path in (*_secret_places(settings), *SECRET_FILES):
        written: Any = settings.tree.value
        for name in path:
            written = written.get(name) if isinstance(written, dict) else None
        if isinstance(written, str):
            if path in SECRET_FILES:
                yield dotted(path), settings.folder / written
            elif written.startswith("file:"):
                yield dotted(path), settings.folder / written.removeprefix("file:")


def _exposed(name: str, file: Path) -> Iterator[Finding]:
    """A finding for a file that cannot be read, or that every user of this host can read."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        text = f"{name} ({file}) cannot be read: {error_text(error)}"
        yield Finding("secrets", "warning", text, "make it, or correct its path")
        return
    if not stat.S_ISREG(mode):
        yield Finding("secrets", "warning", f"{name} ({file}) is not a regular file", "correct its path")
    elif mode & stat.S_IROTH:
        text = f"{name} ({file}) can be read by every user of this host"
        yield Finding("secrets", "warning", text, f"chmod 600 {file}")


def _dashboard(settings: Settings) -> Iterator[Finding]:
    """Whether the dashboard may be reached from elsewhere, and is then protected."""
    section = settings.configuration.dashboard
    if not section.enabled:
        yield Finding("dashboard", "ok", "switched off")
        return
    if is_loopback(section.host):
        yield Finding("dashboard", "ok", f"on {section.host}, for this host alone")
        return
    lacks = missing_protection(section, section.host)
    if lacks:
        text = f"{section.host} is reached from other hosts, and {' and '.join(lacks)} are missing"
        way_out = "set them in the section dashboard, or set host to 127.0.0.1: it is not served like this"
        yield Finding("dashboard", "problem", text, way_out, "misconfigured")
    else:
        yield Finding("dashboard", "ok", f"on {section.host}, with TLS and a token")


def missing_protection(section: DashboardSection, host: str) -> list[str]:
    """The settings of the section `dashboard` without which it is not served on an address that other hosts reach."""
    has_tls = section.tls_certificate is not None and section.tls_key is not None
    has_token = section.operator_token is not None or section.reader_token is not None
    has_name = bool(section.allowed_hosts) or not is_wildcard(host)
    lacks = [] if has_tls else ["tls_certificate", "tls_key"]
    lacks += [] if has_token else ["operator_token or reader_token"]
    return lacks if has_name else [*lacks, "allowed_hosts"]


async def _logins(settings: Settings) -> Finding:
    """The logins of the SQL connections for reading, tried at their servers."""
    from reefknot.app.blocks import check_logins

    try:
        await check_logins(settings)
    except ConfigurationError as error:
        text = "; ".join(str(error).splitlines())
        return Finding("logins", "problem", text, "grant the login less, or give it `access: write`", "misconfigured")
    return Finding("logins", "ok", "no connection for reading may do more than read, as far as its server answers")


# ---- what processes left behind --------------------------------------------------------------------------------------


async def _activity(store: Store, settings: Settings | None, *, silence: Level = "problem") -> list[Finding]:
    """Findings about the processes over an open store: leases of dead ones, and events that were not written.

    `silence` is the level of a store that does not answer."""
    try:
        async with asyncio.timeout(STORE_S):
            systems = await living_systems(store)
            work = await visible_work(store)
            findings = [*await _waiting(store, work, systems, settings), *await _gone(store, systems)]
            findings += [*_troubles(work, workers_of(systems)), await _leases(store, systems)]
            findings.append(await _events(store, systems))
            findings += await _paused(store)
            findings += await _copies(store, settings)
            findings += [Finding("sources", "problem", one) for one in await stopped_sources(store)]
    except (StoreError, TimeoutError) as error:
        text, way_out = f"the store does not answer ({error_text(error)})", "look at the load of its disk or server"
        return [Finding("leases", silence, text, way_out, "unreachable")]
    return findings


async def _waiting(
    store: Store, work: WorkSnapshot, systems: list[dict[str, Any]], settings: Settings | None
) -> list[Finding]:
    """Whether every part runs that jobs wait for, and whether the workers keep up."""
    lacking = await unserved_work(store, systems, work)
    if lacking:
        return [Finding("systems", "problem", one.text, one.remedy, "unserved") for one in lacking]
    return [await _kept_up(store, work, systems, settings)]


async def _paused(store: Store) -> list[Finding]:
    """The job types and tenants of which nothing begins, because they are paused."""
    now, found = store.moment().wall, []
    for one in await read_pauses(store):
        if one.is_on(now):
            until = "" if one.until is None else f" for {age((one.until - now) / 1000)}"
            text = f"the {one} is paused by {one.who or 'unknown'}{until}{f': {one.why}' if one.why else ''}"
            way_out = f"reefknot queue resume --{one.what} {quote(one.name)}"
            found.append(Finding("queue", "warning", printable(text, most=400), way_out))
    return found[:MOST_NAMED]


async def _gone(store: Store, systems: list[dict[str, Any]]) -> list[Finding]:
    """The workers and routers that died within 15 minutes, with what they held."""
    found, now = await gone_parts(store, systems), store.moment().wall
    texts = [
        f"{part_name(one.part, one.name)} (pid {one.pid} on {one.host}) {'died' if one.is_dead else 'fell silent'} "
        f"{age((now - one.last_seen) / 1000)} ago; {last_words(one.held)}"
        for one in found[:MOST_NAMED]
    ]
    way_out = "look at its log, then start it again; what it held goes on at a living worker"
    return [Finding("gone", "warning", printable(one, most=400), way_out) for one in texts]


def _troubles(work: WorkSnapshot, workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Warnings about full queues, destinations that are down, and jobs that wait for a decision."""
    full = [(one["worker_id"], name, pool) for one in workers for name, pool in one["classes"].items()]
    for worker, name, pool in [one for one in full if one[2]["status"] == "critical"][:MOST_NAMED]:
        text = f"{worker} {name} is critical: {pool['reason'] or 'its queue is full'}"
        yield Finding("load", "warning", text, RELIEF)
    for one in open_breakers(workers)[:MOST_NAMED]:
        text = f"{one['name']} is down: its breaker at {one['worker_id']} is {one['state']}, and jobs wait for it"
        yield Finding("breakers", "warning", text, "repair the destination; jobs that wait for it spend no attempts")
    number = sum(states.get(WorkState.QUARANTINED, 0) for states in work.counts.values())
    if number:
        text = f"{plural(number, 'job')} in quarantine {'waits' if number == 1 else 'wait'} for a decision"
        way_out = "`reefknot quarantine stats --group` shows the causes; requeue them once these are gone"
        yield Finding("quarantine", "warning", text, way_out)


async def _kept_up(
    store: Store, work: WorkSnapshot, systems: list[dict[str, Any]], settings: Settings | None
) -> Finding:
    """Whether the workers that run begin what is due."""
    number = sum(
        states.get(one, 0) for states in work.counts.values() for one in (WorkState.PENDING, WorkState.RUNNING)
    )
    jobs = plural(number, "job")
    if number and not systems:
        text = f"{jobs} {'waits' if number == 1 else 'wait'} for later, and no system is running"
        return Finding("systems", "warning", text, "`reefknot up` starts a system that runs them")
    paused, age_s = _stopped_workers(work, systems), age(work.oldest_due_ms / 1000)
    if paused:
        text = f"due jobs wait ({age_s}) for {', '.join(paused[:MOST_NAMED])}, paused or draining"
        return Finding(
            "systems", "warning", text, f"`reefknot worker resume {paused[0] if len(paused) == 1 else 'NAME'}`"
        )
    rule = (RULES if settings is None else rules_of(settings.configuration.alerts)).get(OLDEST_AGE)
    if rule is not None and work.oldest_due_ms > rule.threshold * 1000:
        text = f"due jobs wait although workers run, the oldest for {age_s}{await _unknown_types(store, systems)}"
        return Finding(
            "systems", "warning", text, "`reefknot worker list` shows whether they keep up; start more if not"
        )
    running = f"{len(systems)} running" if systems else "none is running"
    return Finding("systems", "ok", f"{running}, {jobs if number else 'no job'} open")


def _stopped_workers(work: WorkSnapshot, systems: list[dict[str, Any]]) -> list[str]:
    """The workers, paused or draining, without which due jobs cannot run: their own ones, and while all of them are
    stopped, also those that no worker has accepted."""
    workers = workers_of([one for one in systems if not one.get("own_work_only")])
    stopped = [one["worker_id"] for one in workers if one["state"] != WorkerState.RUNNING]
    needed = {worker_of(name) for name in work.oldest_ms}
    if ROUTER in work.oldest_ms and len(stopped) == len(workers):
        return stopped
    return [name for name in stopped if name in needed]


async def _unknown_types(store: Store, systems: list[dict[str, Any]]) -> str:
    """The types of the oldest waiting jobs that no running system knows, as the end of a sentence."""
    which = WorkFilter(state=WorkState.PENDING, gone=())
    found = (await store.work.search(which, oldest_first=True, limit=MOST_LOOKED_AT)).items
    known = {name for one in systems for name in one["blocks"]}
    unknown = sorted({item.kind for item in found if item.resource_class == ROUTER} - known)
    named = ", ".join(printable(kind, most=60) for kind in unknown[:MOST_NAMED])
    return f"; no running system knows the type {named}" if unknown else ""


async def _leases(store: Store, systems: list[dict[str, Any]]) -> Finding:
    """Leases whose holders are gone: the work waits until a running system takes it over, or the lease runs out."""
    owners = await store.leases.owners()
    gone = await dead_owners(store)
    if not gone:
        held = "no work is held" if not owners else f"work is held by {len(owners)}, none of them gone"
        return Finding("leases", "ok", held)
    named = ", ".join(printable(owner.rpartition("@")[0], most=60) for owner in gone[:MOST_NAMED])
    more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
    text = f"work is held by processes that are gone: {named}{more}"
    if systems:
        return Finding("leases", "warning", text, "a running system takes it over within seconds; look again")
    return Finding("leases", "warning", text, "`reefknot up` takes it over")


async def _events(store: Store, systems: list[dict[str, Any]]) -> Finding:
    """Events that running systems could not write to the log yet, and those that were lost."""
    activity = await store_activity(store, systems)
    waiting = sum(reported(one, "audit_buffered", 0) for one in systems)
    lately = int(sum(series(activity.buckets, store.moment().wall / 1000)["audit_lost"]))
    lost = max(lately, int(activity.totals.get("audit_lost", 0)))
    if lately:
        text = f"{lately} events were lost lately, because the log could not be written; {waiting} wait in memory"
        return Finding("audit", "warning", text, "look at the disk; audit.on_failure: fail_closed stops work instead")
    if waiting:
        text = f"{waiting} events wait in memory: the log cannot be written"
        return Finding("audit", "warning", text, "look at the disk or server of the store")
    return Finding(
        "audit", "ok", f"no running system holds events back; {lost or 'none'} lost since the store was made"
    )


async def _copies(store: Store, settings: Settings | None) -> list[Finding]:
    """The number of events that the file which copies the audit log does not have yet."""
    from reefknot.audit.copies import cursor_of, read_cursor

    if settings is None or settings.configuration.audit.jsonl is None:
        return []
    file = settings.folder / settings.configuration.audit.jsonl.path
    end = await end_of(store.audit)
    cursor = await asyncio.to_thread(read_cursor, cursor_of(file))
    copied = cursor.sequence if cursor is not None and cursor.chain == end.log else 0
    behind, bound = max(0, end.sequence - copied), "at most"
    if isinstance(store.audit, MultiChainLog):  # its sequences do not count its events
        behind = len(await store.audit.read(AuditQuery(after=copied, limit=BEHIND + 1)))
        bound = "at least" if behind > BEHIND else bound
    text = f"{file} is {bound} {behind} events behind the store"
    if behind > BEHIND:
        return [Finding("copies", "warning", text, "`reefknot up` copies them; if one runs, look at its log")]
    return [Finding("copies", "ok", text)]
