"""
`sql.query`: one statement, with bound parameters, on a database that the configuration names.

An assignment names a configured connection; a URL only when that URL is listed. Text is never put into a statement. A
connection for reading cannot write, whatever the statement says. Rows and bytes are bounded, and too many of them are
an error rather than a cut answer.
"""

import re
from collections.abc import Mapping
from typing import Any

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps.inputs import Inputs, Refusal, answers_refusals, invalid, time_limit
from reefknot.steps.port import BlockContext
from reefknot.steps.sql_process import SqliteQueries
from reefknot.steps.sql_rows import Parameters, Rows, SqlConnection, SqlSettings

LONGEST_QUERY = 100_000
MOST_PARAMETERS = 1000
_PARAMETERS = "a list, or a mapping of names to values: texts, numbers, true, false, null"
_PASSWORD = re.compile(r"(://[^/@\s]*)@|password=\S+", re.IGNORECASE)


class SqlQuery:
    """The block `sql.query`: runs one statement on a configured connection."""

    type = "sql.query"

    def __init__(self, settings: SqlSettings | None = None) -> None:
        self._settings = settings or SqlSettings()
        self._sqlite = SqliteQueries()

    def destination(self, inputs: Mapping[str, Any]) -> str:
        name = inputs.get("connection")
        return f"sql:{name}" if isinstance(name, str) and name in self._settings.connections else "sql"

    @answers_refusals
    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        asked = Inputs(inputs, "connection", "query", "params")
        connection = self._connection(asked.text("connection", accepted="the name of a configured connection"))
        query = _read_query(asked)
        parameters = _read_parameters(asked.value("params"))
        seconds = asked.seconds(context.seconds)
        async with time_limit(seconds, "the database did not answer"):
            rows = await self._rows(connection, query, parameters, seconds)
        return StepResult(outputs={"rows": rows.rows, "row_count": len(rows.rows), "affected_rows": rows.affected})

    async def close(self) -> None:
        self._sqlite.close()

    async def _rows(self, connection: SqlConnection, query: str, parameters: Parameters, seconds: float) -> Rows:
        if connection.sqlite_path is not None:
            return await self._sqlite.run(connection, query, parameters, limits=self._settings, seconds=seconds)
        try:
            from reefknot.steps import sql_postgres
        except ImportError:
            text = "connection: PostgreSQL needs the extra 'sql': pip install '.[sql]' in a checkout"
            raise Refusal(ErrorCode.execution_failed, text) from None
        return await sql_postgres.run(connection, query, parameters, limits=self._settings, seconds=seconds)

    def _connection(self, name: str) -> SqlConnection:
        """The connection of a configured name; a URL only when it is listed, and then for reading."""
        known = self._settings.connections.get(name) or self._settings.allow.get(name)
        if known is not None:
            return known
        accepted = ", ".join(sorted(self._settings.connections)) or "none is configured; set blocks.sql.connections"
        if ":" in name or "=" in name:
            shown = _PASSWORD.sub("…", name)[:60]
            text = f"connection: the URL {shown} is not listed in blocks.sql.allow; configured names: {accepted}"
            raise Refusal(ErrorCode.permission_denied, text)
        raise invalid("connection", name, accepted)


def _read_query(inputs: Inputs) -> str:
    query = inputs.text("query", accepted="one SQL statement")
    if not query.strip() or "\0" in query or len(query) > LONGEST_QUERY:
        raise invalid("query", query, f"one SQL statement of at most {LONGEST_QUERY} characters, without NUL")
    try:
        query.encode()
    except UnicodeEncodeError:
        raise invalid("query", query, "text that can be written as UTF-8") from None
    return query


def _read_parameters(given: object) -> Parameters:
    if given is None:
        return None
    if not isinstance(given, Mapping | list | tuple) or (
        isinstance(given, Mapping) and not all(isinstance(name, str) for name in given)
    ):
        raise invalid("params", given, _PARAMETERS)
    values: dict[str, Any] | list[Any] = dict(given) if isinstance(given, Mapping) else list(given)
    if len(values) > MOST_PARAMETERS:
        text = f"params: {len(values)} of them; accepted: at most {MOST_PARAMETERS}"
        raise Refusal(ErrorCode.invalid_input, text)
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if not isinstance(value, str | int | float | bool | None) or (isinstance(value, int) and abs(value) >= 1 << 63):
            raise invalid(f"params[{name}]", value, "a text, a number of 64 bits, true, false or null")
    return values
