"""
The `blocks` section of a configuration as the settings of the standard blocks.

The schema has checked names, kinds and bounds. Left for here is what only the blocks can read, the addresses of
`blocks.http.allow`, and what only the file's place tells: relative paths are beneath the configuration's folder.
"""

from collections.abc import Iterable
from pathlib import Path

from reefknot.blocks.addresses import AllowEntry, HttpSettings, read_allowed
from reefknot.blocks.fs import FsSettings
from reefknot.blocks.python import BlockSettings
from reefknot.blocks.sql_rows import Access, SqlConnection, SqlSettings
from reefknot.config.reading.session import Problem, dotted
from reefknot.config.schema import FsBlockSection, HttpBlockSection, SqlBlockSection, SqlConnectionEntry
from reefknot.config.settings import Settings
from reefknot.errors import ConfigurationError, shown


def block_settings(settings: Settings) -> BlockSettings:
    """The settings of the standard blocks; `ConfigurationError` names every address that cannot be read."""
    written, folder = settings.configuration.blocks, settings.folder
    http = written.http or HttpBlockSection()
    fs = written.fs or FsBlockSection()
    sql = written.sql or SqlBlockSection()
    return BlockSettings(
        HttpSettings(
            _allowed(http.allow, settings),
            http.max_response_bytes,
            "" if http.ca_file is None else str(folder / http.ca_file),
        ),
        FsSettings(tuple(folder / Path(root).expanduser() for root in fs.roots), fs.max_bytes),
        SqlSettings(
            {name: _connection(entry, folder) for name, entry in sql.connections.items()},
            {url: _connection(url, folder) for url in sql.allow},
            sql.max_rows,
            sql.max_bytes,
        ),
    )


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
    url = entry.url
    if url.startswith("sqlite:"):
        url = f"sqlite:{folder / url.removeprefix('sqlite:').removeprefix('//')}"
    return SqlConnection(url, Access(entry.access), entry.role)
