"""
What the blocks may reach, as the configuration's `blocks` says it.

Every mistake is found at once, named by its path, with what is accepted. Nothing is applied when anything is wrong.
Without a word, `http.request` reaches public addresses, and files and databases are closed.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from reefknot.blocks.addresses import Allowed, read_allowed
from reefknot.errors import ConfigurationError, shown

Read = TypeVar("Read")
Where = tuple[str | int, ...]
"""The keys and list indexes that lead to a setting."""
MEGABYTE = 1024 * 1024
LARGEST = 64 * MEGABYTE


class Access(StrEnum):
    """What a connection may do."""

    READ = "read"
    WRITE = "write"


class HttpSettings(Struct, frozen=True):
    allow: tuple[Allowed, ...] = ()
    max_response_bytes: int = MEGABYTE
    ca_file: str = ""
    """Certificates to trust instead of the well-known ones."""


class FsSettings(Struct, frozen=True):
    roots: tuple[Path, ...] = ()
    max_bytes: int = MEGABYTE


class SqlConnection(Struct, frozen=True):
    """One database: a file of SQLite or a server of PostgreSQL."""

    url: str
    access: Access = Access.READ
    role: str = ""
    """PostgreSQL: the role to become, with fewer rights than the one that logs in."""

    @property
    def sqlite_path(self) -> str | None:
        """The file, if it is one."""
        return self.url.removeprefix("sqlite:").removeprefix("//") if self.url.startswith("sqlite:") else None


class SqlSettings(Struct, frozen=True):
    connections: Mapping[str, SqlConnection] = {}
    allow: Mapping[str, SqlConnection] = {}
    """URLs that an assignment may name, as it has to write them; they are opened for reading."""
    max_rows: int = 10_000
    max_bytes: int = MEGABYTE


class BlockSettings(Struct, frozen=True):
    http: HttpSettings = HttpSettings()
    fs: FsSettings = FsSettings()
    sql: SqlSettings = SqlSettings()


def read_settings(
    blocks: Mapping[str, Any] | None, *, folder: Path | None = None, place: Callable[[Where], object] = lambda path: ""
) -> BlockSettings:
    """
    From the configuration's mapping. Relative paths are beneath `folder`, the configuration's own.

    `place` knows where a path was written, and that stands before the mistake: file, line, column.
    """
    reading = _Reading(folder or Path.cwd(), place)
    given = reading.section(("blocks",), {} if blocks is None else blocks, "http", "fs", "sql")
    settings = BlockSettings(
        reading.http(given.get("http", {})), reading.fs(given.get("fs", {})), reading.sql(given.get("sql", {}))
    )
    if reading.problems:
        raise ConfigurationError(reading.problems)
    return settings


class _Reading:
    """One pass over the mapping that collects what is wrong with it."""

    def __init__(self, folder: Path, place: Callable[[Where], object]) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._place = place

    def http(self, given: object) -> HttpSettings:
        part = self.section(("blocks", "http"), given, "allow", "max_response_bytes", "ca_file")
        return HttpSettings(
            self._each(("blocks", "http", "allow"), part.get("allow", []), read_allowed),
            self._size(("blocks", "http", "max_response_bytes"), part.get("max_response_bytes", MEGABYTE), LARGEST),
            self._file(("blocks", "http", "ca_file"), part.get("ca_file")),
        )

    def fs(self, given: object) -> FsSettings:
        part = self.section(("blocks", "fs"), given, "roots", "max_bytes")
        return FsSettings(
            self._each(("blocks", "fs", "roots"), part.get("roots", []), self._root),
            self._size(("blocks", "fs", "max_bytes"), part.get("max_bytes", MEGABYTE), LARGEST),
        )

    def sql(self, given: object) -> SqlSettings:
        part = self.section(("blocks", "sql"), given, "connections", "allow", "max_rows", "max_bytes")
        named = part.get("connections", {})
        if not isinstance(named, Mapping):
            self._wrong(("blocks", "sql", "connections"), named, "a mapping of names to connections")
            named = {}
        connections = {}
        for name, one in named.items():
            connection = self._connection(("blocks", "sql", "connections", str(name)), one)
            if connection is not None:
                connections[str(name)] = connection
        return SqlSettings(
            connections,
            dict(self._each(("blocks", "sql", "allow"), part.get("allow", []), self._listed)),
            self._size(("blocks", "sql", "max_rows"), part.get("max_rows", 10_000), 1_000_000),
            self._size(("blocks", "sql", "max_bytes"), part.get("max_bytes", MEGABYTE), LARGEST),
        )

    def section(self, path: Where, given: object, *known: str) -> Mapping[str, Any]:
        """A mapping with only these keys."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self._wrong(path, given, f"a mapping with {', '.join(known)}")
            return {}
        for key in given:
            if key not in known:
                self._tell((*path, str(key)), f"no such key; accepted: {', '.join(known)}")
        return given

    def _connection(self, path: Where, given: object) -> SqlConnection | None:
        if isinstance(given, str):
            given = {"url": given}
        part = self.section(path, given, "url", "access", "role")
        url, access, role = part.get("url"), part.get("access", "read"), part.get("role", "")
        if access not in (Access.READ, Access.WRITE):
            self._wrong((*path, "access"), access, "read or write")
            access = "read"
        if not isinstance(role, str):
            self._wrong((*path, "role"), role, "the name of a role")
            role = ""
        if not isinstance(url, str):
            self._wrong((*path, "url"), url, "sqlite:PATH or postgresql://…")
            return None
        try:
            return SqlConnection(self._database(url), Access(access), role)
        except ValueError as error:
            self._wrong((*path, "url"), url.partition("@")[0][:12], str(error))
            return None

    def _listed(self, url: str) -> tuple[str, SqlConnection]:
        return url, SqlConnection(self._database(url))

    def _database(self, url: str) -> str:
        if url.startswith("sqlite:"):
            path = url.removeprefix("sqlite:").removeprefix("//")
            if not path or path.startswith(":") or "\0" in path:
                raise ValueError("sqlite:PATH with the path of a file")
            return f"sqlite:{self._folder / path}"
        if url.startswith(("postgresql://", "postgres://")) or "dbname=" in url:
            return url
        raise ValueError("sqlite:PATH or postgresql://…")

    def _root(self, text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError("the path of a folder")
        return self._folder / Path(text).expanduser()

    def _file(self, path: Where, given: object) -> str:
        if given is None:
            return ""
        if not isinstance(given, str) or not given:
            self._wrong(path, given, "the path of a file")
            return ""
        return str(self._folder / given)

    def _each(self, path: Where, given: object, read: Callable[[str], Read]) -> tuple[Read, ...]:
        if not isinstance(given, list | tuple):
            self._wrong(path, given, "a list")
            return ()
        found = []
        for index, one in enumerate(given):
            try:
                if not isinstance(one, str):
                    raise ValueError("a text")
                found.append(read(one))
            except ValueError as error:
                self._wrong((*path, index), one, str(error))
        return tuple(found)

    def _size(self, path: Where, given: object, most: int) -> int:
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
            self._wrong(path, given, f"a whole number from 1 to {most}")
            return 1
        return given

    def _wrong(self, path: Where, given: object, accepted: str) -> None:
        self._tell(path, f"{shown(given)} is not accepted; accepted: {accepted}")

    def _tell(self, path: Where, message: str) -> None:
        place = self._place(path)
        self.problems.append(f"{place}{': ' if place else ''}{_dotted(path)}: {message}")


def _dotted(path: Where) -> str:
    """`blocks.http.allow[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
