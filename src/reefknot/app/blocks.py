"""
The blocks that a process can run, and the `blocks` section of a configuration as the settings of the standard ones.

The schema has checked names, kinds and bounds. This module checks the rest: addresses of `blocks.http.allow`, which
only the blocks can read; relative paths, which are resolved against the configuration's folder; and PostgreSQL logins
that may do more than a connection for reading should, which only a server knows. No folder of `blocks.fs.roots` may
contain files that this process itself uses. An assignment may write and read beneath a root; a step's module, the
store, the configuration or a secret there would be the assignment's to replace or to read.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Thread, Timer
from types import ModuleType
from typing import Any

from reefknot.errors import ConfigurationError, ParameterError, ParameterTypeError, shown
from reefknot.ingest.connectors.registry import registry as connectors
from reefknot.policy.dialects import V2
from reefknot.policy.layers import RETRIES
from reefknot.policy.model.explain import lost_retries
from reefknot.policy.reading.session import KeyPath, Problem, dotted
from reefknot.policy.schema import FsBlockSection, HttpBlockSection, SqlBlockSection, SqlConnectionEntry
from reefknot.policy.secrets import WEBHOOK, SecretText, resolve_at, webhook_reference
from reefknot.policy.settings import Settings
from reefknot.runtime.database_urls import database_file
from reefknot.runtime.log import logger, printable
from reefknot.steps.addresses import AllowEntry, HttpSettings, Unreachable, read_allowed
from reefknot.steps.fs import FsSettings, remove_spare_files
from reefknot.steps.http import HttpRequest
from reefknot.steps.inputs import Refusal
from reefknot.steps.port import Block, own_policies, own_rules
from reefknot.steps.python import (
    ALIASES,
    BlockSettings,
    by_name,
    load_entry_points,
    load_module,
    registry,
    standard_blocks,
)
from reefknot.steps.sql_rows import Access, SqlConnection, SqlSettings, StrongLogin
from reefknot.stores.opening import store_url
from reefknot.stores.port.engines import file_of

LOGIN_S = 5.0
"""The time that a server has to answer about a login when a system starts."""
LOADED_AFTER_S = 1.0
MISSPELT = 0.88
"""Likeness of two names of which one is probably the other misspelt: `order.payy` is, `order.ship` is not."""
MOST_NAMED = 5
"""Steps that the warning about ignored options names; the others are counted."""


Modules = str | ModuleType | Callable[..., Any] | Iterable[str | ModuleType | Callable[..., Any]]
"""The steps of an application: names of modules, modules, or functions under `@rk.block`."""


def block_settings(settings: Settings, *, store: str | None = None) -> BlockSettings:
    """
    The settings of the standard blocks. `store` is the address of the store in use, by default the configured one.

    `ConfigurationError` names every address that cannot be read, and every root over something that must stay out of
    reach of assignments.
    """
    written, folder = settings.configuration.blocks, settings.folder
    own = list(_own_files(settings, store_url(settings) if store is None else store))
    check_roots(settings, own)
    check_copies(settings, own)
    http = written.http or HttpBlockSection()
    fs = written.fs or FsBlockSection()
    sql = written.sql or SqlBlockSection()
    return BlockSettings(
        HttpSettings(
            _allowed(http.allow, settings),
            http.max_response_bytes,
            "" if http.ca_file is None else str(folder / http.ca_file),
            _references(settings),
        ),
        FsSettings(_roots(settings), fs.max_bytes),
        SqlSettings(
            {name: _connection(entry, folder) for name, entry in sql.connections.items()},
            {url: _connection(url, folder) for url in sql.allow},
            sql.max_rows,
            sql.max_bytes,
        ),
    )


def _references(settings: Settings) -> dict[str, Callable[[], str | None]]:
    """The references of `http.request`: the webhook of alerts, which is read again by each step."""

    def read() -> str | None:
        found = resolve_at(settings.tree, WEBHOOK, environ=os.environ, folder=settings.folder)
        return found.reveal() if isinstance(found, SecretText) else None

    reference = webhook_reference(settings.tree)
    return {} if reference is None else {reference: read}


async def check_steps(settings: Settings, blocks: Iterable[Block]) -> None:
    """Warn about steps that do not run as their decorator says, and refuse logins with too many privileges."""
    steps = list(blocks)
    warn_of_lost_retries(settings, steps)
    _warn_of_ignored_options(settings, steps)
    _warn_of_misspelt_policies(settings, {step.type for step in steps} | ALIASES.keys())
    await check_logins(settings)


async def check_logins(settings: Settings) -> None:
    """
    Refuse connections for reading whose login may do more than read; `ConfigurationError` names each privilege.

    If a server does not answer now, the steps check it later, each its own connection.
    """
    connections = list(_server_readers(settings))
    if not connections:
        return
    try:
        from reefknot.steps.sql_postgres import check_login
    except ImportError:  # the steps say what to install
        return

    async def problem(path: KeyPath, connection: SqlConnection) -> Problem | None:
        try:
            async with asyncio.timeout(LOGIN_S):
                await check_login(connection, LOGIN_S)
        except StrongLogin as refusal:
            return Problem(settings.tree.mark(path), dotted(path), str(refusal).removeprefix("connection: "))
        except (Refusal, TimeoutError) as error:
            reason = printable(str(error), most=300) or f"no answer within {LOGIN_S:g} s"
            logger().warning(
                "%s: its login could not be checked now (%s); the first step checks it", dotted(path), reason
            )
        return None

    found = await asyncio.gather(*(problem(path, connection) for path, connection in connections))
    problems = [one for one in found if one is not None]
    if problems:
        raise ConfigurationError(problems)


def _server_readers(settings: Settings) -> Iterator[tuple[KeyPath, SqlConnection]]:
    """The connections for reading on servers, with their places in the configuration."""
    sql = block_settings(settings).sql
    for name, connection in sql.connections.items():
        if connection.access is Access.READ and connection.sqlite_path is None:
            yield ("blocks", "sql", "connections", name), connection
    for index, connection in enumerate(sql.allow.values()):
        if connection.sqlite_path is None:
            yield ("blocks", "sql", "allow", index), connection


def _roots(settings: Settings) -> tuple[Path, ...]:
    fs = settings.configuration.blocks.fs or FsBlockSection()
    return tuple(settings.folder / Path(root).expanduser() for root in fs.roots)


def check_roots(settings: Settings, own: Iterable[tuple[str, str]]) -> None:
    """`ConfigurationError` for every root of `blocks.fs.roots` over one of these: what it is, and its path."""
    roots = [os.path.realpath(root) for root in _roots(settings)]
    problems: dict[int, Problem] = {}
    real_folder = cache(os.path.realpath)
    for what, path in own if roots else ():
        # A system checks a thousand modules of a few folders: what leads to a folder is looked at once.
        folder, name = os.path.split(path)
        place = os.path.join(real_folder(folder), name)
        if name in ("", os.curdir, os.pardir) or os.path.islink(place):
            place = os.path.realpath(path)
        for index, root in enumerate(roots):
            if index not in problems and os.path.commonpath([root, place]) == root:
                at = ("blocks", "fs", "roots", index)
                message = (
                    f"{root} holds {what} ({place}), which an assignment could then read or replace; "
                    "accepted: a folder for data alone, such as files"
                )
                problems[index] = Problem(settings.tree.mark(at), dotted(at), message)
    if problems:
        raise ConfigurationError([problems[index] for index in sorted(problems)])


def check_copies(settings: Settings, own: Iterable[tuple[str, str]]) -> None:
    """`ConfigurationError` for a file of the audit section that is the store or the configuration."""
    audit, problems = settings.configuration.audit, []
    taken = {os.path.realpath(path): what for what, path in own if what in (STORE, CONFIGURATION)}
    for name, file in (("heads", audit.heads), ("jsonl", audit.jsonl)):
        place = "" if file is None else os.path.realpath(settings.folder / file.path)
        if place in taken:
            at = ("audit", name, "path")
            message = f"{place} is {taken[place]}, which would be overwritten; accepted: a file of its own"
            problems.append(Problem(settings.tree.mark(at), dotted(at), message))
    if problems:
        raise ConfigurationError(problems)


STORE, CONFIGURATION = "the store", "the configuration"


def _own_files(settings: Settings, store: str) -> Iterator[tuple[str, str]]:
    """The files that are known before a module is imported: of the configuration, the store and the import paths."""
    configuration, folder = settings.configuration, settings.folder
    if settings.path is not None:
        yield CONFIGURATION, str(settings.path)
    if (file := file_of(store)) is not None:
        yield STORE, file
    if configuration.sources:
        from reefknot.ingest.configured_sources import documents_path

        yield "the documents of sources", str(documents_path(settings, store))
    if configuration.audit.jsonl is not None:
        yield "the copy of the audit log", str(folder / configuration.audit.jsonl.path)
    for name, reference in configuration.secrets.items():
        if reference.startswith("file:"):
            yield f"the secret {name}", str(folder / reference.removeprefix("file:"))
    for place in sys.path:
        yield "modules that Python imports", place


def loaded_modules() -> Iterator[tuple[str, str]]:
    """The files of all imported modules, for `check_roots`."""
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield f"the module {name}", file


def _allowed(texts: Iterable[str], settings: Settings) -> tuple[AllowEntry, ...]:
    allowed: list[AllowEntry] = []
    problems: list[Problem] = []
    for index, text in enumerate(texts):
        try:
            allowed.append(read_allowed(text))
        except ValueError as error:
            path = ("blocks", "http", "allow", index)
            message = f"{shown(text)} is not accepted; accepted: {error}"
            problems.append(Problem(settings.tree.mark(path), dotted(path), message))
    if problems:
        raise ConfigurationError(problems)
    return tuple(allowed)


def _connection(entry: str | SqlConnectionEntry, folder: Path) -> SqlConnection:
    if isinstance(entry, str):
        entry = SqlConnectionEntry(url=entry)
    file = database_file(entry.url)
    url = entry.url if file is None else f"sqlite:{folder / file}"
    return SqlConnection(url, Access(entry.access), entry.role, tuple(entry.functions))


def blocks_for(settings: Settings, modules: Sequence[str] = (), *, store: str | None = None) -> dict[str, Block]:
    """The steps this process can run: the standard ones, those of other packages, and one's own."""
    folder = str(Path.cwd())
    standard = standard_blocks(block_settings(settings, store=store))
    if modules:
        check_roots(settings, [("modules that Python imports", folder)])
    own: dict[str, Block] = {}
    for module in modules:
        own |= load_module(module, path=folder, others=connectors.homes)
    check_roots(settings, loaded_modules())
    return by_name(standard, load_entry_points(), own)


def blocks_of(settings: Settings, modules: Modules, *, store: str) -> dict[str, Block]:
    """The steps of `blocks_for`, where an application names modules, or gives modules or decorated functions."""
    accepted = "names of modules such as 'app.steps' or 'steps.py', modules, or functions under @rk.block"
    given: Iterable[Any]
    if isinstance(modules, str | ModuleType) or callable(modules):
        given = [modules]
    elif isinstance(modules, Iterable):
        given = list(modules)
    else:
        raise ParameterTypeError("modules", modules, accepted)
    names: list[str] = []
    steps: dict[str, Block] = {}
    for one in given:
        if isinstance(one, str | ModuleType):
            names.append(one if isinstance(one, str) else one.__name__)
        elif callable(one):
            step = next((block for block in registry.blocks().values() if getattr(block, "function", 0) is one), None)
            if step is None:
                raise ParameterError("modules", one, "a function under @rk.block")
            steps[step.type] = step
        else:
            raise ParameterTypeError("modules", one, accepted)
    try:
        return blocks_for(settings, names, store=store) | steps
    except ConfigurationError as error:
        problems = [str(one) for one in error.problems]
        raise ConfigurationError([one.replace("--module ", "modules: ", 1) for one in problems]) from error


def _warn_of_misspelt_policies(settings: Settings, known: Collection[str]) -> None:
    """Log policies of unknown steps whose names look like a known one. Others may belong to another worker's steps."""
    for name in settings.configuration.worker.retries.v2.block_policies:
        if name in known:
            continue
        if close := get_close_matches(name, known, n=1, cutoff=MISSPELT):
            place = dotted((*V2, "block_policies", name))
            logger().warning("%s: no step here has this type; did you mean %r?", printable(place, most=300), close[0])


def warn_of_lost_retries(settings: Settings, blocks: Iterable[Block]) -> None:
    """Log each step whose own wait does not fit into its time, so that it is not retried as its decorator says."""
    if not settings.retries_gate:
        return
    own = own_policies(blocks)
    book = settings.book.with_blocks(own)
    for target in own:
        policy = book.resolve(target)
        if problem := lost_retries(policy, policy.provenance):
            logger().warning("step %s: %s", target.removeprefix("block:"), problem)


def _warn_of_ignored_options(settings: Settings, blocks: Iterable[Block]) -> None:
    """Log which steps have options of their own about retries that the baseline ignores, and what to do."""
    if settings.retries_gate:
        return
    known = list(blocks)
    steps = sorted(name.removeprefix("block:") for name in own_policies(known).keys() | own_rules(known).keys())
    if not steps:
        return
    names = ", ".join(steps[:MOST_NAMED])
    more = f" and {len(steps) - MOST_NAMED} more" if len(steps) > MOST_NAMED else ""
    origin = settings.retries_gate.origin
    if origin.startswith("environment"):
        way = f"{RETRIES}=true"
    elif origin.startswith("missing file"):
        way = "create that file"
    elif settings.path is None:
        way = "reefknot init"
    else:
        way = f"worker.retries.v2.enabled: true in {settings.path}"
    ignored = "attempts, waits, time limits and on= of @rk.block are ignored"
    text = f"worker.retries.v2 is off ({origin}), so {ignored} for {names}{more}. To switch it on: {way}"
    logger().warning("%s", printable(text))


def start_preparing(settings: Settings, blocks: Iterable[Block]) -> Timer:
    """
    Delete unfinished files, and load slow libraries before a step needs them; a start waits for neither.

    Libraries are loaded a second later, so that a short command does not pay for them. Cancel that when the system
    ends.
    """

    def load() -> None:
        for block in blocks:
            if isinstance(block, HttpRequest):
                with suppress(Unreachable):  # its first request reports it
                    block.load()

    Thread(target=remove_spare_files, args=(block_settings(settings).fs,), name="spare files", daemon=True).start()
    timer = Timer(LOADED_AFTER_S, load)
    timer.name, timer.daemon = "libraries", True
    timer.start()
    return timer
