"""
PostgreSQL under `sql.query`: one statement in one transaction on a connection of its own.

Nothing that a statement sets outlives its connection. For reading: a read-only transaction, a statement that only asks,
and no superuser, because a superuser's functions reach files from within a `SELECT`. The extended protocol takes one
statement at a time, and parameters never become text.
"""

import re
from contextlib import aclosing
from math import inf
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from reefknot.blocks.inputs import Refusal
from reefknot.blocks.sql_rows import Rows, SqlRequest
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
_CLASSES = {
    "08": ErrorCode.network_error,
    "28": ErrorCode.permission_denied,
    "XX": ErrorCode.internal_error,
    **dict.fromkeys(("40", "53", "55", "57", "58"), ErrorCode.resource_unavailable),
    **dict.fromkeys(("0A", "21", "22", "23", "3F", "42", "44", "54"), ErrorCode.invalid_input),
}
_CODES = {
    "08P01": ErrorCode.execution_failed,
    "25006": ErrorCode.permission_denied,
    "3D000": ErrorCode.invalid_input,
    "42501": ErrorCode.permission_denied,
    "57P04": ErrorCode.execution_failed,
    **dict.fromkeys(("57014", "55P03", "25P03", "25P04"), ErrorCode.resource_unavailable),  # time-outs
}
"""Codes that mean something else than their class."""


async def run(request: SqlRequest) -> Rows:
    """The rows of one statement in one transaction. The caller bounds it in time as well."""
    word = first_word(request.query)
    _check(word, request)
    try:
        async with await _connect(request) as server:
            await _prepare_session(server, request)
            if word in _ROWS_FIRST or request.reads:
                return await _stream_rows(server, request)
            return await _run_write(server, request, word)
    except psycopg.Error as error:
        raise refusal_for(error) from error


def first_word(query: str) -> str:
    """The statement's first word in lower case, comments and brackets aside."""
    start = _SPACE.match(query)
    word = _WORD.match(query, start.end() if start else 0)
    return word[0].lower() if word else ""


def _check(word: str, request: SqlRequest) -> None:
    if not word:
        text = "query: it does not begin with a word of SQL; nested comments before it are not read"
        raise Refusal(ErrorCode.invalid_input, text)
    if request.reads and word not in _READING:
        text = f"query: {word.upper()} is not allowed on a connection for reading; allowed: SELECT, WITH, VALUES"
        raise Refusal(ErrorCode.permission_denied, text)
    if word in _NEVER:
        raise Refusal(ErrorCode.permission_denied, f"query: {word.upper()} is not allowed on any connection")
    forbidden = _FORBIDDEN.search(request.query) if request.reads else None
    if forbidden is not None:
        text = f"query: {forbidden[0].strip()[:60]} is not allowed on a connection for reading"
        raise Refusal(ErrorCode.permission_denied, text)


async def _connect(request: SqlRequest) -> AsyncConnection[tuple[Any, ...]]:
    url, seconds = request.connection.url, request.seconds
    wait = 86_400_000 if seconds == inf else max(1, int(seconds * 1000))
    bounds = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    options = [f"-c {bound}={wait}" for bound in bounds]
    if request.reads:
        options.append("-c default_transaction_read_only=on")
    own = str(conninfo_to_dict(url).get("options") or "")
    return await AsyncConnection.connect(
        url,
        connect_timeout=max(2, min(60, int(wait / 1000) + 1)),
        options=" ".join([own, *options]).strip(),  # the last one holds
        application_name="reefknot",
        row_factory=tuple_row,
    )


async def _prepare_session(server: AsyncConnection[Any], request: SqlRequest) -> None:
    """Set the role and the bounds of the session, before the statement's transaction begins."""
    if role := request.connection.role:
        await server.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        await server.commit()
    if not request.reads:
        return
    await server.set_read_only(True)
    if server.info.parameter_status("is_superuser") == "on":
        text = (
            "connection: its role is a superuser, whose functions reach files even when they only read;"
            " give the connection a role with less (role: NAME), or access: write"
        )
        raise Refusal(ErrorCode.permission_denied, text)


async def _stream_rows(server: AsyncConnection[Any], request: SqlRequest) -> Rows:
    """The rows, read one by one, so that an answer without end is left early."""
    found = Rows(request.limits)
    async with server.cursor() as cursor:
        stream: Any = cursor.stream(request.query.encode(), request.parameters)
        async with aclosing(stream) as rows:  # a generator, which has to be ended as one
            async for row in rows:
                if not found.rows:
                    found.name([column.name for column in cursor.description or ()])
                found.add(row)
    return found


async def _run_write(server: AsyncConnection[Any], request: SqlRequest, word: str) -> Rows:
    """The rows of a statement that may change something, read one by one if it may answer any."""
    if not may_answer(word, request.query):
        return await _execute(server, request)
    try:
        found = await _stream_rows(server, request)
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None or "didn't produce a result" not in str(error):
            raise
        await server.rollback()  # it answers nothing: only another way of asking tells how many rows it changed
        return await _execute(server, request)
    found.affected = len(found.rows)
    return found


def may_answer(word: str, query: str) -> bool:
    """Whether a statement that is not plainly a query may answer rows."""
    return word == "with" or _RETURNING.search(query) is not None


async def _execute(server: AsyncConnection[Any], request: SqlRequest) -> Rows:
    """The outcome of a statement that changes something and answers few rows or none."""
    found = Rows(request.limits)
    async with server.cursor() as cursor:
        await cursor.execute(request.query.encode(), request.parameters, prepare=True)
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
    field = "connection" if state[:2] in ("08", "28", "3D") else "query"
    return Refusal(code, f"{field}: {text}", sqlstate=state)
