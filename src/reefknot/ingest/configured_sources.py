"""
The configured sources: their timetables, their connectors, and the file of their documents.

Nothing here reaches a source: a connector is made of its settings and connects when it is used. So a configuration is
checked by making the connectors, each of which knows its own settings. A secret is read when a connector asks for it,
and is hidden in all output of this process from then on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reefknot.core.checks import suggest
from reefknot.core.failure import FailureType
from reefknot.errors import ConfigurationError, ParameterError, ReefknotError, SourceError
from reefknot.ingest.port import Connector, ConnectorFactory, SourceContext, UnknownSettingError
from reefknot.policy.reading.session import KeyPath, Mark, Problem, dotted
from reefknot.policy.secrets import resolve
from reefknot.queue.model.schedules import Timetable, parse
from reefknot.queue.model.source_health import HealthRules
from reefknot.runtime.redactor import add_secrets, redact
from reefknot.stores.port.engines import file_of

if TYPE_CHECKING:
    from reefknot.ingest.documents import SqliteDocuments
    from reefknot.ingest.orchestrator import IngestionSettings
    from reefknot.ingest.sources import IngestionSource
    from reefknot.policy.schema import Source
    from reefknot.policy.settings import Settings

DOCUMENTS = "documents.db"
FOLDER = ".reefknot"
"""The folder of the documents where the store has no file of its own, beneath that of the configuration."""


class ConfiguredSource(Struct, frozen=True):
    """A source as it is configured: what all sources have, and the settings that are its connector's own."""

    name: str
    connector: str
    timetable: Timetable
    on_change: bool
    max_concurrency: int
    page_size: int
    timeout: float
    """Seconds for one page."""
    settings: Mapping[str, Any]
    folder: Path
    """The folder that relative paths are beneath."""
    mark: Mark
    """The place of the source in the configuration."""

    @property
    def schedule(self) -> str:
        """The times of its syncs, in words."""
        if not self.on_change:
            return str(self.timetable)
        is_timed = self.timetable.every_ms or self.timetable.cron
        return f"{self.timetable} and on change" if is_timed else "on change"

    def context(self) -> SourceContext:
        """The context that its connector is made of."""
        return SourceContext(self.name, self.settings, self.folder, _SecretReader(self))

    def for_orchestrator(self) -> IngestionSource:
        """The source as the orchestrator runs it."""
        from reefknot.ingest.sources import IngestionSource

        return IngestionSource(
            self.name,
            self.connector,
            partial(connector_for, self),
            max_concurrency=self.max_concurrency,
            page_size=self.page_size,
            page_timeout=self.timeout,
            on_change=self.on_change,
        )


class _SecretReader:
    """Resolves the references of one source at every call: a secret may be changed while a system runs."""

    def __init__(self, source: ConfiguredSource) -> None:
        self._source = source
        self._hidden: set[str] = set()

    def __call__(self, reference: str) -> str:
        source = self._source
        path = dotted(("sources", source.name))
        found = resolve(reference, environ=os.environ, folder=source.folder, mark=source.mark, path=path)
        if isinstance(found, Problem):
            why = found.message.removeprefix(f"{reference}: ")
            text = f"{path}: {why} ({reference}); provide the secret, or name another one"
            raise SourceError(text, FailureType.PERMANENT)
        secret = found.reveal()
        if secret not in self._hidden:
            self._hidden.add(secret)
            add_secrets([secret])
        return secret


def sources_of(settings: Settings) -> list[ConfiguredSource]:
    """The configured sources."""
    return [_source(name, written, settings) for name, written in settings.configuration.sources.items()]


def _source(name: str, written: Source, settings: Settings) -> ConfiguredSource:
    return ConfiguredSource(
        name,
        written.connector,
        parse(written.every, written.cron, time_zone=written.time_zone, missed=written.missed),
        on_change=written.on_change,
        max_concurrency=written.max_concurrency,
        page_size=written.page_size,
        timeout=written.timeout_seconds,
        settings=dict(written.own),
        folder=settings.folder,
        mark=settings.tree.mark(("sources", name)),
    )


def _problem(settings: Settings, at: KeyPath, error: ParameterError) -> Problem:
    """A refused setting, at its place in the file. A setting of a list or mapping is named `key[0]` or `key.name`."""
    key = error.parameter.split("[")[0].split(".")[0]
    return Problem(settings.tree.mark((*at, key)), dotted((*at, key)), error.problem)


# ---- connectors ------------------------------------------------------------------------------------------------------


def connector_for(source: ConfiguredSource) -> Connector:
    """A connector of the source, not connected yet. Raises `ParameterError` for a setting that it does not accept."""
    try:
        return _factory(source.connector)(source.context())
    except UnknownSettingError as error:
        raise _unknown_setting(error) from None


def _unknown_setting(error: UnknownSettingError) -> ParameterError:
    """The error with the keys that every source has, in addition to those of its connector."""
    from reefknot.policy.schema import Source
    from reefknot.policy.sections import keys_of

    common = tuple(keys_of(Source))
    accepted = (
        f"a setting of this connector ({', '.join(error.known)}), or one that every source has ({', '.join(common)})"
    )
    hint = suggest(error.parameter, (*error.known, *common))
    return ParameterError(error.parameter, "***", accepted + hint)


def error_in_connector(connector: str, error: Exception) -> str | None:
    """
    The error of a connector of one's own: its class and the line that raised it.

    None for the built-in connectors, and for an error that a connector raises on purpose.
    """
    from reefknot.ingest.connectors.registry import BUILTIN
    from reefknot.queue.execution.failures import raised_at

    if connector in BUILTIN or isinstance(error, ReefknotError):
        return None
    text = redact(f"{type(error).__name__}: {error}").removesuffix(": ")
    return f"the connector {connector} failed in {raised_at(error)}: {text}"


def _factory(connector: str) -> ConnectorFactory:
    from reefknot.ingest.connectors.registry import connector_named

    return connector_named(connector)


def check_sources(settings: Settings, *, only: Collection[str] | None = None, strict: bool = False) -> list[str]:
    """
    Check the settings of all sources, or `only` some, by making their connectors. Nothing is reached.

    `ConfigurationError` names every mistake with its place. A connector that is not known here may be one's own, from a
    module that is not loaded: that is a mistake when `strict`, else a warning. Returns the warnings.
    """
    problems: list[Problem] = []
    warnings: list[str] = []
    for source in sources_of(settings):
        if only is not None and source.name not in only:
            continue
        at = ("sources", source.name)
        try:
            connector = connector_for(source)
            if source.on_change and not hasattr(connector, "watch"):
                accepted = f"false, or left out: {source.connector} cannot be watched; set every or cron"
                raise ParameterError("on_change", True, accepted)
        except ParameterError as error:
            problem = _problem(settings, at, error)
            if error.parameter == "connector" and not strict:
                warnings.append(str(problem))
            else:
                problems.append(problem)
        except ConfigurationError as error:  # a package that is not installed
            problems += [Problem(source.mark, dotted(at), str(one)) for one in error.problems]
        except SourceError as error:  # such as a secret that is not there
            problems.append(Problem(source.mark, dotted(at), str(error)))
        except Exception as error:
            text = error_in_connector(source.connector, error)
            if text is None:
                raise
            problems.append(Problem(source.mark, dotted(at), text))
    if problems:
        raise ConfigurationError(problems)
    return warnings


def health_rules(settings: Settings) -> HealthRules:
    """The rules by which a source is held to be down, as they are configured."""
    breaker = settings.configuration.ingestion.breaker
    return HealthRules(
        failures=breaker.failures,
        jobs=breaker.jobs,
        source_failures=breaker.source_failures,
        rest_ms=round(breaker.cooldown_seconds * 1000),
        longest_rest_ms=round(breaker.max_cooldown_seconds * 1000),
        max_outage_ms=round(breaker.max_outage_seconds * 1000),
        enabled=breaker.enabled,
    )


def ingestion_settings(settings: Settings) -> IngestionSettings:
    """The limits of an orchestrator, as they are configured."""
    from reefknot.ingest.orchestrator import IngestionSettings
    from reefknot.ingest.sync import SyncLimits

    written = settings.configuration.ingestion
    return IngestionSettings(
        written.max_concurrency,
        {name: one.max_concurrency for name, one in written.connectors.items()},
        health_rules(settings),
        lease=written.lease_seconds,
        drain=written.drain_seconds,
        limits=SyncLimits(written.max_failed_items, written.stalled_after_seconds),
    )


# ---- documents -------------------------------------------------------------------------------------------------------


def documents_path(settings: Settings | None, url: str) -> Path:
    """The file of the documents: the configured one, or one next to the store at `url`."""
    folder = Path.cwd() if settings is None else settings.folder
    named = None if settings is None else settings.configuration.ingestion.documents
    if named is not None:
        return folder / Path(named).expanduser()
    if (file := file_of(url)) is not None:
        return Path(file).with_name(DOCUMENTS)
    return folder / FOLDER / DOCUMENTS


@asynccontextmanager
async def open_documents(
    path: Path, *, create: bool = True, for_reading: bool = False
) -> AsyncIterator[SqliteDocuments]:
    """
    The documents in this file, open for as long as the block lasts; in a virtual loop in its time and thread.

    `for_reading` opens a file that may not be written, too, and migrates none.
    """
    from reefknot.ingest.documents import SqliteDocuments
    from reefknot.runtime.clocks import clock_of_this_loop, in_virtual_loop
    from reefknot.runtime.sqlite_files import is_writable

    documents = SqliteDocuments(
        path,
        clock_of_this_loop(),
        create=create,
        read_only=for_reading and not is_writable(str(path)),
        migrates=not for_reading,
        inline=in_virtual_loop(),
    )
    await documents.start()
    try:
        yield documents
    finally:
        await documents.close()
