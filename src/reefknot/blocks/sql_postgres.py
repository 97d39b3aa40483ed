"""
PostgreSQL under `sql.query`: one statement in one transaction on a connection of its own.

Nothing that a statement sets outlives its connection. For reading: a read-only transaction, a
statement that only asks, and no superuser, because a superuser's functions reach files from within a `SELECT`. The
extended protocol takes one statement at a time, and parameters never become text.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import inf
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from reefknot.blocks.inputs import Refusal
from reefknot.blocks.sql_rows import Access, Parameters, Rows, SqlConnection, SqlSettings
from reefknot.core.failure import ErrorCode

_READING = frozenset(("select", "with", "values", "table", "show", "explain"))
_ROWS_FIRST = frozenset(("select", "values", "table", "show", "explain"))
_NEVER = frozenset(
    ("copy", "do", "load", "listen", "set", "reset", "discard", "begin", "start", "commit", "end", "abort", "rollback")
)
_SPACE = re.compile(r"(?:\s+|--[^\n]*(?:\n|\Z)|/\*(?:[^*/]|\*(?!/)|/(?!\*))*+\*/)*+[(\s]*+")
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_RETURNING = re.compile(r"\breturning\b", re.IGNORECASE)
_FORBIDDEN = re.compile(
    r"U&"
    r"|\b(?:lo_\w+|loread|lowrite|set_config|dblink\w*|(?:query|cursor|table|schema|database)_to_xml\w*"
    r"|pg_(?:read|ls|stat_file|file|logdir|current_logfile|reload|rotate|terminate|cancel|promote|switch|create|drop"
    r"|replication|backup|advisory|try_advisory|log|export|import|copy|logical|execute|wal)\w*)"
    r"\s*(?:\(|--|/\*)"
    r"|\"\s*(?:\(|--|/\*)",
    re.IGNORECASE,
)
"""Names of functions that reach beyond the tables, and ways to write such a name that hide it."""
_TIMEOUTS = frozenset(("57014", "55P03", "25P03", "25P04"))
_CLASSES = {
    "08": ErrorCode.network_error,
    "40": ErrorCode.resource_unavailable,
    "53": ErrorCode.resource_unavailable,
    "55": ErrorCode.resource_unavailable,
    "57": ErrorCode.resource_unavailable,
    "58": ErrorCode.resource_unavailable,
    "28": ErrorCode.permission_denied,
    "0A": ErrorCode.invalid_input,
    "21": ErrorCode.invalid_input,
    "22": ErrorCode.invalid_input,
    "23": ErrorCode.invalid_input,
    "3F": ErrorCode.invalid_input,
    "42": ErrorCode.invalid_input,
    "44": ErrorCode.invalid_input,
    "54": ErrorCode.invalid_input,
    "XX": ErrorCode.internal_error,
}
_CODES = {
    "08P01": ErrorCode.execution_failed,
    "25006": ErrorCode.permission_denied,
    "3D000": ErrorCode.invalid_input,
    "42501": ErrorCode.permission_denied,
    "57P04": ErrorCode.execution_failed,
}
"""Codes that mean something else than their class."""


async def run(
    connection: SqlConnection, query: str, parameters: Parameters, *, limits: SqlSettings, seconds: float
) -> Rows:
    """The rows of one statement in one transaction. The caller bounds it in time as well."""
    reads = connection.access is Access.READ
    word = first_word(query)
    _check(word, query, reads=reads)
    try:
        async with await _connect(connection, seconds) as server:
            await _prepare_session(server, connection, reads=reads)
            if word in _ROWS_FIRST or reads:
                return await _stream_rows(server, query, parameters, limits)
            return await _run_write(server, query, parameters, limits, word)
    except psycopg.Error as error:
        raise refusal_for(error) from error


def first_word(query: str) -> str:
    """The statement's first word in lower case, comments and brackets aside."""
    start = _SPACE.match(query)
    word = _WORD.match(query, start.end() if start else 0)
    return word[0].lower() if word else ""


def _check(word: str, query: str, *, reads: bool) -> None:
    if not word:
        text = "query: it does not begin with a word of SQL; nested comments before it are not read"
        raise Refusal(ErrorCode.invalid_input, text)
    if reads and word not in _READING:
        text = f"query: {word.upper()} is not allowed on a connection for reading; allowed: SELECT, WITH, VALUES"
        raise Refusal(ErrorCode.permission_denied, text)
    if word in _NEVER:
        raise Refusal(ErrorCode.permission_denied, f"query: {word.upper()} is not allowed on any connection")
    forbidden = _FORBIDDEN.search(query) if reads else None
    if forbidden is not None:
        text = f"query: {forbidden[0].strip()[:60]} is not allowed on a connection for reading"
        raise Refusal(ErrorCode.permission_denied, text)


async def _connect(connection: SqlConnection, seconds: float) -> AsyncConnection[tuple[Any, ...]]:
    wait = 86_400_000 if seconds == inf else max(1, int(seconds * 1000))
    bounds = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    options = [f"-c {bound}={wait}" for bound in bounds]
    if connection.access is Access.READ:
        options.append("-c default_transaction_read_only=on")
    own = str(conninfo_to_dict(connection.url).get("options") or "")
    return await AsyncConnection.connect(
        connection.url,
        connect_timeout=max(2, min(60, int(wait / 1000) + 1)),
        options=" ".join([own, *options]).strip(),  # the last one holds
        application_name="reefknot",
        row_factory=tuple_row,
    )


async def _prepare_session(server: AsyncConnection[Any], connection: SqlConnection, *, reads: bool) -> None:
    """Set the role and the bounds of the session, before the statement's transaction begins."""
    if connection.role:
        await server.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(connection.role)))
        await server.commit()
    if not reads:
        return
    await server.set_read_only(True)
    if server.info.parameter_status("is_superuser") == "on":
        text = (
            "connection: its role is a superuser, whose functions reach files even when they only read;"
            " give the connection a role with less (role: NAME), or access: write"
        )
        raise Refusal(ErrorCode.permission_denied, text)


async def _stream_rows(server: AsyncConnection[Any], query: str, parameters: Parameters, limits: SqlSettings) -> Rows:
    """The rows, read one by one, so that an answer without end is left early."""
    found = Rows(limits)
    named = False
    async with server.cursor() as cursor, aclosing(_stream(cursor, query, parameters)) as rows:
        async for row in rows:
            if not named:
                found.name([column.name for column in cursor.description or ()])
                named = True
            found.add(row)
    return found


def _stream(cursor: AsyncCursor[Any], query: str, parameters: Parameters) -> AsyncGenerator[Any, None]:
    rows: Any = cursor.stream(query.encode(), parameters)  # which is a generator, and has to be ended as one
    answered: AsyncGenerator[Any, None] = rows
    return answered


async def _run_write(
    server: AsyncConnection[Any], query: str, parameters: Parameters, limits: SqlSettings, word: str
) -> Rows:
    """The rows of a statement that may change something, read one by one if it may answer any."""
    if not may_answer(word, query):
        return await _execute(server, query, parameters, limits)
    try:
        found = await _stream_rows(server, query, parameters, limits)
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None or "didn't produce a result" not in str(error):
            raise
        await server.rollback()  # it answers nothing: only another way of asking tells how many rows it changed
        return await _execute(server, query, parameters, limits)
    found.affected = len(found.rows)
    return found


def may_answer(word: str, query: str) -> bool:
    """Whether a statement that is not plainly a query may answer rows."""
    return word == "with" or _RETURNING.search(query) is not None


async def _execute(server: AsyncConnection[Any], query: str, parameters: Parameters, limits: SqlSettings) -> Rows:
    """The outcome of a statement that changes something and answers few rows or none."""
    found = Rows(limits)
    async with server.cursor() as cursor:
        await cursor.execute(query.encode(), parameters, prepare=True)
        if cursor.description is not None:
            found.name([column.name for column in cursor.description])
            async for row in cursor:
                found.add(row)
        found.affected = max(0, cursor.rowcount)
    return found


def refusal_for(error: psycopg.Error) -> Refusal:
    """The refusal for an error of the server: its code, the input to blame, and the server's message."""
    state = error.sqlstate
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if state is None:
        if isinstance(error, psycopg.errors.ConnectionTimeout):
            return Refusal(ErrorCode.resource_unavailable, f"connection: {text}")
        if isinstance(error, psycopg.OperationalError):
            return Refusal(ErrorCode.network_error, f"connection: {text}")
        field = "params" if "parameter" in text or "placeholder" in text else "query"
        return Refusal(ErrorCode.invalid_input, f"{field}: {text}")
    code = _CODES.get(state) or _CLASSES.get(state[:2], ErrorCode.execution_failed)
    if state in _TIMEOUTS:
        code = ErrorCode.resource_unavailable
    field = "connection" if state[:2] in ("08", "28", "3D") else "query"
    return Refusal(code, f"{field}: {text}", sqlstate=state)
