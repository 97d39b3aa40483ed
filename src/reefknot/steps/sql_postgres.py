"""
PostgreSQL under `sql.query`: one statement in one transaction on a connection of its own.

Nothing that a statement sets outlives its connection. For reading: a login that may do little, functions on a list, a
read-only transaction that is rolled back. The login is what confines a statement: some functions run text, and text can
undo a role. The extended protocol takes one statement at a time, and parameters never become text.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import inf
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from reefknot.core.failure import ErrorCode
from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_rows import Access, Parameters, Rows, SqlConnection, SqlSettings, StrongLogin
from reefknot.steps.sql_text import SAFE_FUNCTIONS, TOO_LARGE, SqlText, numbered, read, refuse_several

_READING = frozenset(("select", "with", "values", "table", "show", "explain"))
_COUNTED = frozenset(("with", "insert", "update", "delete", "merge"))
_NEVER = frozenset(
    ("copy", "do", "load", "listen", "set", "reset", "discard", "begin", "start", "commit", "end", "abort", "rollback")
)
_DANGEROUS_ROLES = (
    *("pg_read_server_files", "pg_write_server_files", "pg_execute_server_program"),
    *("pg_signal_backend", "pg_create_subscription"),
)
_LOGIN = """
SELECT login.rolname, login.rolsuper, login.rolcreaterole, login.rolcreatedb, login.rolreplication,
       ARRAY(SELECT more.rolname::text FROM pg_catalog.pg_roles AS more
             WHERE more.oid <> login.oid AND pg_catalog.pg_has_role(login.oid, more.oid, 'MEMBER')
               AND (more.rolsuper OR more.rolcreaterole OR more.rolcreatedb OR more.rolreplication
                    OR more.rolname = ANY($1::name[])
                    OR NOT pg_catalog.pg_has_role(current_user, more.oid, 'USAGE'))
             ORDER BY 1),
       EXISTS (SELECT FROM pg_catalog.pg_shdepend AS held
               WHERE current_user <> session_user AND held.refobjid = login.oid
                 AND held.refclassid = 'pg_catalog.pg_authid'::regclass
                 AND held.classid NOT IN ('pg_catalog.pg_database'::regclass, 'pg_catalog.pg_auth_members'::regclass)
                 AND held.dbid IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())))
FROM pg_catalog.pg_roles AS login WHERE login.rolname = session_user
"""
_FUNCTIONS = """
SELECT DISTINCT space.nspname::text, known.proname::text
FROM pg_catalog.pg_proc AS known JOIN pg_catalog.pg_namespace AS space ON space.oid = known.pronamespace
WHERE (pg_catalog.pg_function_is_visible(known.oid) OR space.nspname = ANY($3::name[]))
  AND (known.proname = ANY($1::name[])
       OR known.proname = ANY($2::name[]) AND known.pronargs >= 1 AND known.pronargs - known.pronargdefaults <= 1
          AND EXISTS (SELECT FROM pg_catalog.pg_type AS kind
                      WHERE kind.oid = known.proargtypes[0] AND kind.typtype IN ('c', 'p')))
ORDER BY 1, 2
"""
"""Functions that the statement may mean: by a name before a bracket, or, for a row, by a name behind a dot."""
_ROW_BYTES = 4
"""Bytes of a row on its way, at most, for each that `max_bytes` counts: UTF-8, quoting."""
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
    text, values = numbered(query, parameters)
    statement = read(text)
    _check_word(statement.word, reads=reads)
    try:
        async with await _connect(connection, seconds) as server:
            await _prepare_session(server, connection)
            if not reads:
                return await _answer(server, statement, values, limits)
            await _check_functions(server, connection, statement)
            found = await _answer(server, statement, values, limits)
            await server.rollback()  # whatever it did is undone, and messages of NOTIFY are not sent
            return found
    except psycopg.Error as error:
        if TOO_LARGE in str(error):
            raise Rows(limits).too_many_bytes() from error
        raise refusal_for(error) from error


async def check_login(connection: SqlConnection, seconds: float) -> None:
    """Raise `StrongLogin` if the login of a connection for reading may do more than read."""
    try:
        async with await _connect(connection, seconds) as server:
            await _prepare_session(server, connection)
    except psycopg.Error as error:
        raise refusal_for(error) from error


def _check_word(word: str, *, reads: bool) -> None:
    if not word:
        raise Refusal(ErrorCode.invalid_input, "query: it does not begin with a word of SQL")
    if reads and word not in _READING:
        text = f"query: {word.upper()} is not allowed on a connection for reading; allowed: SELECT, WITH, VALUES"
        raise Refusal(ErrorCode.permission_denied, text)
    if word in _NEVER:
        raise Refusal(ErrorCode.permission_denied, f"query: {word.upper()} is not allowed on any connection")


async def _connect(connection: SqlConnection, seconds: float) -> AsyncConnection[tuple[Any, ...]]:
    wait = 86_400_000 if seconds == inf else max(1, int(seconds * 1000))
    bounds = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    options = [f"-c {bound}={wait}" for bound in bounds]
    options.append("-c standard_conforming_strings=on")  # texts are read that way here
    if connection.access is Access.READ:
        options.append("-c default_transaction_read_only=on")
    own = str(conninfo_to_dict(connection.url).get("options") or "")
    return await AsyncConnection.connect(
        connection.url,
        connect_timeout=max(2, min(60, int(wait / 1000) + 1)),
        options=" ".join([own, *options]).strip(),  # the last one holds
        application_name="reefknot",
        client_encoding="utf8",
        row_factory=tuple_row,
        cursor_factory=AsyncRawCursor,
    )


async def _prepare_session(server: AsyncConnection[Any], connection: SqlConnection) -> None:
    """Set the role, and for reading check the login, before the statement's transaction begins."""
    if connection.role:
        await server.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(connection.role)))
        await server.commit()
    if connection.access is not Access.READ:
        return
    await server.set_read_only(True)
    cursor = await server.execute(_LOGIN, [list(_DANGEROUS_ROLES)])
    login, superuser, roles, databases, replication, memberships, holds = await cursor.fetchone() or ("?", *[True] * 6)
    found = {
        "is a superuser": superuser,
        "may create roles (CREATEROLE)": roles,
        "may create databases (CREATEDB)": databases,
        "may replicate (REPLICATION)": replication,
        f"owns or was granted objects that role: {connection.role} does not take away": holds,
    }
    privileges = [name for name, is_so in found.items() if is_so]
    if memberships and not superuser:
        privileges.append(f"is a member of {', '.join(memberships[:10])}")
    if privileges:
        raise StrongLogin(login, privileges)


async def _check_functions(server: AsyncConnection[Any], connection: SqlConnection, statement: SqlText) -> None:
    """Refuse a statement that names a function which is neither safe nor listed."""
    called, fields = sorted(statement.called), sorted(statement.fields)
    if not called and not fields:
        return
    cursor = await server.execute(_FUNCTIONS, [called, fields, sorted(statement.names)])
    for schema, name in await cursor.fetchall():
        safe = schema == "pg_catalog" and name in SAFE_FUNCTIONS
        if not safe and not {name, f"{schema}.{name}"} & set(connection.functions):
            text = (
                f"query: the function {schema}.{name} is not allowed on a connection for reading; allowed: built-in"
                " functions that only compute, and those listed under blocks.sql.connections.<name>.functions"
            )
            raise Refusal(ErrorCode.permission_denied, text)


async def _answer(server: AsyncConnection[Any], statement: SqlText, values: list[Any], limits: SqlSettings) -> Rows:
    """The rows of a statement, each bounded by the server; or how many rows it changed."""
    if statement.word in ("show", "explain"):
        return await _stream_rows(server, statement.text, values, limits)
    query = statement.bounded(_ROW_BYTES * limits.max_bytes + 1024)
    if query is None:
        return await _execute(server, statement.text, values, limits)
    refuse_several(statement)
    found = await _stream_rows(server, query, values, limits)
    found.affected = len(found.rows) if statement.word in _COUNTED and not server.read_only else 0
    return found


async def _stream_rows(server: AsyncConnection[Any], query: str, values: list[Any], limits: SqlSettings) -> Rows:
    """The rows, read one by one, so that an answer without end is left early."""
    found = Rows(limits)
    named = False
    async with server.cursor() as cursor:
        rows: Any = cursor.stream(query.encode(), values)  # which is a generator, and has to be ended as one
        answered: AsyncGenerator[Any, None] = rows
        async with aclosing(answered):
            async for row in answered:
                if not named:
                    found.name([column.name for column in cursor.description or ()])
                    named = True
                found.add(row)
    return found


async def _execute(server: AsyncConnection[Any], query: str, values: list[Any], limits: SqlSettings) -> Rows:
    """The outcome of a statement that changes something and answers few rows or none."""
    found = Rows(limits)
    async with server.cursor() as cursor:
        await cursor.execute(query.encode(), values, prepare=True)
        if cursor.description is not None:
            found.name([column.name for column in cursor.description])
            async for row in cursor:
                found.add(row)
        found.affected = max(0, cursor.rowcount)
    return found


def refusal_for(error: psycopg.Error) -> Refusal:
    """The refusal for an error of the server: its code, the input to blame, and the server's message."""
    state = error.sqlstate
    text = " ".join((error.diag.message_primary or str(error)).split())[:500] or type(error).__name__
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
