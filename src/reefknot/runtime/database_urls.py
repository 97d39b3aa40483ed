"""
URLs of stores: `sqlite_path` returns the file that a `sqlite:` URL names, `nats_address` the servers of a `nats:` URL.

Slashes mean what they mean to SQLAlchemy: `sqlite:///state.db` is relative, `sqlite:////var/state.db` absolute. Without
two slashes the rest is the path as it stands: `sqlite:state.db`, `sqlite:/var/state.db`. `~` is the home folder.
"""

from __future__ import annotations

import os

SQLITE_PREFIX = "sqlite:"
NATS_PREFIXES = ("nats:", "tls:")
NATS_ACCEPTED = "nats://HOST:PORT, several hosts separated by commas, and /NAME behind them for one of another name"


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


def nats_address(url: str) -> tuple[tuple[str, ...], str]:
    """The servers of a `nats:` or `tls:` URL, and the store's name, which may be empty; a `ValueError` else."""
    scheme, separator, rest = url.partition("://")
    places, _, name = rest.partition("/")
    servers = [place.strip() for place in places.split(",")]
    plain = name.replace("-", "a").replace("_", "a")
    if not separator or f"{scheme}:" not in NATS_PREFIXES or not all(servers) or len(name) > 64:
        raise ValueError(NATS_ACCEPTED)
    if plain and not (plain.isascii() and plain.isalnum()):
        raise ValueError("the name of a store has letters, digits, - and _")
    for place in servers:
        port = place.rpartition("@")[2].rpartition("]")[2].partition(":")[2]
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("a port is a number from 1 to 65535")
    return tuple(f"{scheme}://{place}" for place in servers), name


def is_nats_url(url: str) -> bool:
    """Whether the URL names a store on NATS."""
    try:
        nats_address(url)
    except ValueError:
        return False
    return True
