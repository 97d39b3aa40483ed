"""
SQLite under `sql.query`: each statement on a connection of its own, in a thread.

For reading there are two locks: the file is opened read-only, and an authorizer refuses whatever is not reading,
because read-only alone still lets a statement make other files. A progress handler ends what takes too long, and limits
bound what one value or one statement can be.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import apsw

from reefknot.blocks.inputs import Refusal
from reefknot.blocks.sql_rows import Rows, SqlRequest
from reefknot.core.failure import ErrorCode

_STEPS_BETWEEN_CHECKS = 2000
_LONGEST_BUSY_WAIT = 1.0
_ONLY_COMMENTS = re.compile(r"(?:[\s;]++|--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?)*+")
_LIMITS = {
    apsw.SQLITE_LIMIT_SQL_LENGTH: 400_000,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_COLUMN: 500,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 200,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
    apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 20,
    apsw.SQLITE_LIMIT_VDBE_OP: 250_000,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_SWITCHES = {
    apsw.SQLITE_DBCONFIG_DEFENSIVE: 1,
    apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_CREATE: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_WRITE: 0,
    apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_FKEY: 1,
}
_READING = frozenset((apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_RECURSIVE, apsw.SQLITE_FUNCTION))
_WRITING = _READING | {
    *(apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE, apsw.SQLITE_ALTER_TABLE, apsw.SQLITE_ANALYZE),
    *(apsw.SQLITE_CREATE_TABLE, apsw.SQLITE_CREATE_INDEX, apsw.SQLITE_CREATE_VIEW, apsw.SQLITE_CREATE_TRIGGER),
    *(apsw.SQLITE_DROP_TABLE, apsw.SQLITE_DROP_INDEX, apsw.SQLITE_DROP_VIEW, apsw.SQLITE_DROP_TRIGGER),
    apsw.SQLITE_REINDEX,
}
_TABLE_ACTIONS = frozenset((apsw.SQLITE_READ, apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE))
_SAFE_PRAGMAS = frozenset(
    ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list")
)
_FORBIDDEN_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "sqlite_log"))
_FORBIDDEN_TABLES = frozenset(("sqlite_dbpage", "carray", "sqlite_stmt", "bytecode", "tables_used"))

_CODES = {
    ErrorCode.resource_unavailable: (
        *(apsw.BusyError, apsw.LockedError, apsw.InterruptError, apsw.FullError, apsw.IOError, apsw.NoMemError),
        *(apsw.CantOpenError, apsw.ProtocolError),
    ),
    ErrorCode.permission_denied: (apsw.AuthError, apsw.ReadOnlyError, apsw.PermissionsError),
    ErrorCode.invalid_input: (
        *(apsw.SQLError, apsw.BindingsError, apsw.ConstraintError, apsw.MismatchError, apsw.RangeError),
    ),
}


async def run(request: SqlRequest, threads: ThreadPoolExecutor) -> Rows:
    """The rows of one statement, run in a thread, and interrupted when the caller is cancelled."""
    statement = _Statement(request)
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, statement.rows)
    except asyncio.CancelledError:
        statement.cancelled = True
        raise


class _Statement:
    """A statement and its connection, from opening the file to closing it."""

    def __init__(self, request: SqlRequest) -> None:
        assert request.connection.sqlite_path is not None
        self._path = request.connection.sqlite_path
        self._writes = not request.reads
        self._request = request
        self._until = time.monotonic() + request.seconds
        self._refused = ""
        self.cancelled = False

    def rows(self) -> Rows:
        if not self._writes and not os.path.exists(self._path):
            raise Refusal(ErrorCode.execution_failed, f"connection: not found: {self._path}")
        try:
            with closing(self._open()) as connection, self._transaction(connection):
                return self._run(connection)
        except KeyError as missing:
            raise Refusal(ErrorCode.invalid_input, f"params: {missing} is in the query and not given") from None
        except apsw.Error as error:
            raise self._refusal(error) from error

    def _open(self) -> apsw.Connection:
        writing = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        connection = apsw.Connection(self._path, flags=writing if self._writes else apsw.SQLITE_OPEN_READONLY)
        left = max(0.0, self._until - time.monotonic())
        connection.set_busy_timeout(int(min(left / 2, _LONGEST_BUSY_WAIT) * 1000))
        for switch, value in _SWITCHES.items():
            connection.config(switch, value)
        for kind, value in _LIMITS.items():
            connection.limit(kind, value)
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, max(self._request.limits.max_bytes, 1 << 20))
        for name, trim in _TRIMS.items():
            connection.create_scalar_function(name, trim, 2, deterministic=True, flags=apsw.SQLITE_INNOCUOUS)
        connection.set_progress_handler(self._is_late, _STEPS_BETWEEN_CHECKS)
        return connection

    @contextmanager
    def _transaction(self, connection: apsw.Connection) -> Iterator[None]:
        """Commit all of the statement or nothing of it, also when its rows turn out to be too many."""
        if self._writes:
            connection.execute("BEGIN IMMEDIATE")
        try:
            with self._guard(connection):
                yield
            if self._writes:
                connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _guard(self, connection: apsw.Connection) -> Iterator[None]:
        connection.authorizer = self._authorize
        connection.exec_trace = self._only_one()
        try:
            yield
        finally:
            connection.authorizer = None
            connection.exec_trace = None

    def _run(self, connection: apsw.Connection) -> Rows:
        found = Rows(self._request.limits)
        before = connection.total_changes()
        cursor = connection.cursor()
        try:
            cursor.execute(self._request.query, self._request.parameters or None, can_cache=False)
            for row in cursor:
                if not found.rows:
                    found.name([column[0] for column in cursor.get_description()])
                found.add(row)
        finally:
            cursor.close(True)
        found.affected = connection.total_changes() - before if self._writes else 0
        return found

    def _only_one(self) -> Callable[[Any, str, Any], bool]:
        """A hook that lets one statement begin, with its parameters and no others. Comments are no statements."""
        begun = False

        def begins(cursor: Any, statement: str, bindings: Any) -> bool:
            nonlocal begun
            if begun and not _ONLY_COMMENTS.fullmatch(statement):
                text = "query: more than one statement; accepted: one, without another after it"
                raise Refusal(ErrorCode.invalid_input, text)
            parameters = self._request.parameters
            if not begun and isinstance(parameters, dict):
                unknown = set(parameters) - set(cursor.bindings_names)
                if unknown:
                    raise Refusal(ErrorCode.invalid_input, f"params: {min(unknown)!r} is given and not in the query")
            begun = True
            return True

        return begins

    def _is_late(self) -> bool:
        return self.cancelled or time.monotonic() >= self._until

    def _authorize(
        self, action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
    ) -> int:
        if self._allowed(action, (first or "").lower(), (second or "").lower()):
            return apsw.SQLITE_OK
        name = apsw.mapping_authorizer_function.get(action, str(action))
        self._refused = self._refused or f"{name} {first or ''} {second or ''}".rstrip()
        return apsw.SQLITE_DENY

    def _allowed(self, action: int, first: str, second: str) -> bool:
        if action == apsw.SQLITE_PRAGMA:
            return first in _SAFE_PRAGMAS
        if action == apsw.SQLITE_FUNCTION:
            return second not in _FORBIDDEN_FUNCTIONS
        if action in _TABLE_ACTIONS and first in _FORBIDDEN_TABLES:
            return False
        return action in (_WRITING if self._writes else _READING)

    def _refusal(self, error: apsw.Error) -> Refusal:
        if self._refused:
            how = "this connection is for reading" if not self._writes else "no connection may do this"
            return Refusal(ErrorCode.permission_denied, f"query: not allowed: {self._refused} ({how})")
        if isinstance(error, apsw.InterruptError):
            text = "the statement took longer than the attempt has, and was ended"
            return Refusal(ErrorCode.resource_unavailable, text)
        field = "params" if isinstance(error, apsw.BindingsError) else "query"
        code = next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), ErrorCode.execution_failed)
        return Refusal(code, f"{field}: {error}", sqlite=type(error).__name__)


def _trimming(*, left: bool, right: bool) -> Callable[..., str | None]:
    """A trim in linear time: SQLite's own takes the product of both lengths, and nothing can interrupt it."""

    def trim(value: Any, characters: Any) -> str | None:
        if value is None or characters is None:
            return None
        text, unwanted = _text(value), frozenset(_text(characters))
        start, end = 0, len(text)
        while left and start < end and text[start] in unwanted:
            start += 1
        while right and end > start and text[end - 1] in unwanted:
            end -= 1
        return text[start:end]

    return trim


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_TRIMS = {
    "trim": _trimming(left=True, right=True),
    "ltrim": _trimming(left=True, right=False),
    "rtrim": _trimming(left=False, right=True),
}
