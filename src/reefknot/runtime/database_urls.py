"""
URLs of databases: `sqlite_path` returns the file that a `sqlite:` URL names.

Slashes mean what they mean to SQLAlchemy: `sqlite:///state.db` is relative, `sqlite:////var/state.db` absolute. Without
two slashes the rest is the path as it stands: `sqlite:state.db`, `sqlite:/var/state.db`. `~` is the home folder.
"""

from __future__ import annotations

import os

SQLITE_PREFIX, POSTGRES_PREFIXES = "sqlite:", ("postgresql://", "postgres://")


def sqlite_path(url: str) -> str:
    """The path in a `sqlite:` URL. A URL that names no file is a `ValueError`, whose text says why."""
    rest = url.removeprefix(SQLITE_PREFIX)
    path = rest
    if rest.startswith("//"):
        host, _, path = rest[2:].partition("/")
        if host.startswith(":memory:"):
            path = host
        elif host:
            raise ValueError("two slashes begin with a host, which a file does not have")
        elif "?" in path:
            raise ValueError("options after ? are not supported")
    if path.startswith((":memory:", "file::memory:")):
        raise ValueError("a store in memory is memory:")
    if path.startswith("file:"):
        raise ValueError("SQLite's file: URLs are not supported")
    if not path.strip("/ ") or "\0" in path:
        raise ValueError("the path of a file is missing")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"no home folder is known for {path.partition('/')[0]}; a file of that name is ./~…")
    return f"/{expanded.lstrip('/')}" if expanded.startswith("/") else expanded


def database_file(url: str) -> str | None:
    """The file of a user's database, None for one on a server."""
    return sqlite_path(url) if url.startswith(SQLITE_PREFIX) else None
