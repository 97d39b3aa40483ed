"""
A real PostgreSQL for the tests: one server for the session, a schema of its own for every test.

`tools/postgres_server.py` starts and stops it. A server that does not start is an error, never a skip.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tools import postgres_server

SETTINGS = ("fsync=off", "max_connections=60", "shared_buffers=16MB")
"""Clients are killed here, never the server: it does not have to sync."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Every test asks for a schema of its own: making a database takes longer than most tests."""

    folder: Path

    def dsn(self, schema: str = "public") -> str:
        return postgres_server.dsn(self.folder, schema)

    def new_schema(self, name: str) -> str:
        with psycopg.connect(self.dsn()) as conn:
            conn.execute(f'CREATE SCHEMA "{name}"'.encode())
        return self.dsn(name)

    def drop_schema(self, name: str) -> None:
        with psycopg.connect(self.dsn()) as conn:
            conn.execute("SET LOCAL lock_timeout = '10s'")
            conn.execute(f'DROP SCHEMA "{name}" CASCADE'.encode())


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Started once, stopped at the end, nothing left behind."""
    with postgres_server.running(SETTINGS) as folder:
        yield Server(folder)
