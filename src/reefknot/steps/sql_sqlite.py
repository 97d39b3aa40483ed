"""
SQLite under `sql.query`: each statement on a connection of its own, in a helper process that `sql_process` starts.

For reading there are two locks: the file is opened read-only, and an authorizer refuses whatever is not reading,
because read-only alone still lets a statement make other files. A progress handler ends what takes too long; functions
of SQLite do not ask it, which is why the process can be killed. Values, memory and statements are bounded, and sorting
happens in that memory: there are no temporary files.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

import apsw
import msgspec
from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_rows import Rows, SqlSettings

MEMORY_BYTES = 256 << 20
"""Memory that SQLite may use in one process, for sorting and values."""
PROCESS_BYTES = 1 << 30
"""Address space of one process, with everything in it."""
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

_CODES: dict[type[Exception], ErrorCode] = {
    apsw.BusyError: ErrorCode.resource_unavailable,
    apsw.LockedError: ErrorCode.resource_unavailable,
    apsw.InterruptError: ErrorCode.resource_unavailable,
    apsw.FullError: ErrorCode.resource_unavailable,
    apsw.IOError: ErrorCode.resource_unavailable,
    apsw.NoMemError: ErrorCode.execution_failed,
    apsw.CantOpenError: ErrorCode.resource_unavailable,
    apsw.ProtocolError: ErrorCode.resource_unavailable,
    apsw.AuthError: ErrorCode.permission_denied,
    apsw.ReadOnlyError: ErrorCode.permission_denied,
    apsw.PermissionsError: ErrorCode.permission_denied,
    apsw.SQLError: ErrorCode.invalid_input,
    apsw.BindingsError: ErrorCode.invalid_input,
    apsw.ConstraintError: ErrorCode.invalid_input,
    apsw.MismatchError: ErrorCode.invalid_input,
    apsw.RangeError: ErrorCode.invalid_input,
}

_NO_MEMORY = f"query: it needs more than {MEMORY_BYTES >> 20} MiB to sort or to hold its values; ask for less"


class SqliteRequest(Struct, frozen=True):
    """Request to a helper process: a statement, its file and its bounds."""

    path: str
    query: str
    parameters: list[Any] | dict[str, Any] | None = None
    writes: bool = False
    max_rows: int = SqlSettings().max_rows
    max_bytes: int = SqlSettings().max_bytes
    seconds: float | None = None
    """The time that is left; None for no limit."""


class SqliteReply(Struct, frozen=True):
    """Reply of a helper process: the rows of the statement, or why there are no rows."""

    rows: list[dict[str, Any]] = []
    affected: int = 0
    refused: ErrorCode | None = None
    message: str = ""
    metadata: dict[str, str] = {}


class SqliteStatement:
    """A statement and its connection, from opening the file to closing it."""

    def __init__(self, request: SqliteRequest, worker: int | None = None) -> None:
        self._path = request.path
        self._writes = request.writes
        self._query = request.query
        self._parameters = request.parameters
        self._limits = SqlSettings(max_rows=request.max_rows, max_bytes=request.max_bytes)
        self._until = None if request.seconds is None else time.monotonic() + request.seconds
        self._worker = os.getppid() if worker is None else worker
        self._refused = ""
        self.cancelled = False

    def reply(self) -> SqliteReply:
        """The rows of the statement, or its refusal; it raises nothing."""
        try:
            found = self.rows()
            return SqliteReply(found.rows, found.affected)
        except Refusal as refusal:
            return SqliteReply(refused=refusal.code, message=str(refusal), metadata=refusal.metadata)
        except MemoryError:
            return SqliteReply(refused=ErrorCode.execution_failed, message=_NO_MEMORY)
        except Exception as error:  # the process goes on with the next statement
            text = f"query: {type(error).__name__}: {error}"
            return SqliteReply(refused=ErrorCode.execution_failed, message=text.encode("utf-8", "replace").decode())

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
        flags = apsw.SQLITE_OPEN_READONLY
        if self._writes:
            flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        connection = apsw.Connection(self._path, flags=flags)
        left = _LONGEST_BUSY_WAIT * 2 if self._until is None else max(0.0, self._until - time.monotonic())
        connection.set_busy_timeout(int(min(left / 2, _LONGEST_BUSY_WAIT) * 1000))
        connection.pragma("temp_store", 2)  # in memory, which is bounded
        for switch, value in _SWITCHES.items():
            connection.config(switch, value)
        for kind, value in _LIMITS.items():
            connection.limit(kind, value)
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, max(self._limits.max_bytes, 1 << 20))
        for name, trim in _TRIMS.items():
            connection.create_scalar_function(name, trim, 2, deterministic=True, flags=apsw.SQLITE_INNOCUOUS)
        connection.set_progress_handler(self._is_late, _STEPS_BETWEEN_CHECKS)
        return connection

    @contextmanager
    def _transaction(self, connection: apsw.Connection) -> Iterator[None]:
        """Commit all of the statement or nothing of it, also when its rows turn out to be too many."""
        if not self._writes:
            with self._guard(connection):
                yield
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            with self._guard(connection):
                yield
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
        found = Rows(self._limits)
        before = connection.total_changes()
        cursor = connection.cursor()
        try:
            cursor.execute(self._query, self._parameters or None, can_cache=False)
            named = False
            for row in cursor:
                if not named:
                    found.name([column[0] for column in cursor.get_description()])
                    named = True
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
            if not begun and isinstance(self._parameters, dict):
                unknown = set(self._parameters) - set(cursor.bindings_names)
                if unknown:
                    raise Refusal(ErrorCode.invalid_input, f"params: {min(unknown)!r} is given and not in the query")
            begun = True
            return True

        return begins

    def _is_late(self) -> bool:
        """Whether its caller has stopped waiting: its time is over, it was cancelled, or the worker is gone."""
        late = self._until is not None and time.monotonic() >= self._until
        return late or self.cancelled or os.getppid() != self._worker

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
        if isinstance(error, apsw.NoMemError):
            return Refusal(ErrorCode.execution_failed, _NO_MEMORY, sqlite="NoMemError")
        field = "params" if isinstance(error, apsw.BindingsError) else "query"
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), ErrorCode.execution_failed)
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


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(requests: IO[bytes], replies: IO[bytes], worker: int) -> None:
    """Answer requests of the worker, until there are no more. SIGTERM ends the statement that runs."""
    running: list[SqliteStatement] = []

    def stop(*signalled: object) -> None:
        if not running:
            sys.exit(0)
        running[0].cancelled = True

    signal.signal(signal.SIGTERM, stop)
    while (body := read_frame(requests)) is not None:
        running.append(SqliteStatement(msgspec.msgpack.decode(body, type=SqliteRequest), worker))
        reply = running[0].reply()
        write_frame(replies, reply)
        running.clear()


def read_frame(file: IO[bytes], most: int = 1 << 31) -> bytes | None:
    """The next message; None at the end of the file, or when the message is too long."""
    size = int.from_bytes(file.read(4), "big")
    if not 0 < size <= most:
        return None
    body = file.read(size)
    return body if len(body) == size else None


def write_frame(file: IO[bytes], message: Struct) -> None:
    body = msgspec.msgpack.encode(message)
    file.write(len(body).to_bytes(4, "big") + body)
    file.flush()


def limit_process() -> None:
    """Bound the memory of this process, where the system has such bounds."""
    apsw.hard_heap_limit(MEMORY_BYTES)
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))


def main(worker: int) -> None:
    limit_process()
    serve(sys.stdin.buffer, sys.stdout.buffer, worker)
