"""
Connections, their settings and bounded rows: what `sql.query` shares with both databases.

Rows are named, made of JSON's kinds, and counted. A name that comes twice would lose a column, and a row too many would
cut the answer in silence; both are refused.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from enum import StrEnum
from math import isfinite
from typing import Any

from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.runtime.database_urls import database_file
from reefknot.steps.inputs import Refusal

Parameters = list[Any] | dict[str, Any] | None


class Access(StrEnum):
    """The rights of a connection."""

    READ = "read"
    WRITE = "write"


class SqlConnection(Struct, frozen=True):
    """A database: a file of SQLite or a server of PostgreSQL."""

    url: str
    access: Access = Access.READ
    role: str = ""
    """PostgreSQL: the role to become, with fewer rights than the one that logs in."""
    functions: tuple[str, ...] = ()
    """PostgreSQL, for reading: functions that statements may call beyond the safe ones, with or without a schema."""

    @property
    def sqlite_path(self) -> str | None:
        """The path of the file, None for a server."""
        return database_file(self.url)


class StrongLogin(Refusal):
    """Refusal of a login that may do more than the connection for reading that uses it."""

    def __init__(self, login: str, privileges: list[str]) -> None:
        text = (
            f"connection: its login {login} {', '.join(privileges)}; a connection for reading needs a login that may do"
            " no more than read, because a statement can become whatever its login can: revoke this, or use another one"
        )
        super().__init__(ErrorCode.permission_denied, text)


class SqlSettings(Struct, frozen=True):
    """The databases that `sql.query` may reach, and how much one answer may hold."""

    connections: Mapping[str, SqlConnection] = {}
    allow: Mapping[str, SqlConnection] = {}
    """URLs that an assignment may name, as it has to write them; they are opened for reading."""
    max_rows: int = 10_000
    max_bytes: int = 1024 * 1024


class Rows:
    """The rows that a statement answered, within the bounds of the settings."""

    def __init__(self, limits: SqlSettings) -> None:
        self.rows: list[dict[str, Any]] = []
        self.affected = 0
        self._limits = limits
        self._size = 0
        self._names_size = 0
        self._names: tuple[str, ...] = ()

    def name(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._names_size = sum(map(len, self._names))
        for index, name in enumerate(self._names):
            if name in self._names[:index]:
                text = f"query: two columns are called {name!r}; give one of them another name (AS …)"
                raise Refusal(ErrorCode.invalid_input, text)

    def add(self, values: Iterable[Any]) -> None:
        if len(self.rows) >= self._limits.max_rows:
            raise self._too_much(f"{self._limits.max_rows} rows", "max_rows")
        row = dict(zip(self._names, map(plain, values), strict=True))
        self._size += sum(_weight(value) for value in row.values()) + 8 * len(row) + self._names_size
        if self._size > self._limits.max_bytes:
            raise self.too_many_bytes()
        self.rows.append(row)

    def too_many_bytes(self) -> Refusal:
        return self._too_much(f"{self._limits.max_bytes} bytes", "max_bytes")

    def _too_much(self, most: str, setting: str) -> Refusal:
        text = f"query: the answer has more than {most}; ask for less (LIMIT …), or raise blocks.sql.{setting}"
        return Refusal(ErrorCode.execution_failed, text)


def _weight(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_weight, value)) + 8
    if isinstance(value, dict):
        return sum(len(key) + _weight(one) for key, one in value.items()) + 8
    return 8


def plain(value: Any) -> Any:
    """The value in JSON's kinds: its numbers as they are, bytes as base64, everything else as text."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    return str(value)
