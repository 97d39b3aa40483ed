"""
Exceptions by their dotted names, for questions about failures that have not happened.

A name is looked up as its class, whose ancestors decide about a retry: `httpx.ReadTimeout` is retried because it is an
`httpx.TimeoutException`. A question may come from outside, so it imports nothing but the modules in `LIBRARIES`; other
classes are found where their module is loaded already, as those of `--module` are. Any other name stands alone.
"""

import builtins
import sys
from importlib import import_module
from inspect import getattr_static
from types import ModuleType
from typing import Any

from reefknot.core.classify import KNOWN_CLASSES
from reefknot.core.policy import class_name

LIBRARIES = frozenset(
    {
        *("asyncio", "concurrent.futures", "http.client", "imaplib", "json", "poplib", "smtplib", "socket", "sqlite3"),
        *("ssl", "subprocess", "urllib.error", "zlib", "anyio", "trio", "nats.errors", "nats.js.errors"),
        *("httpx", "httpx2", "httpcore", "httpcore2", "requests", "requests.exceptions", "urllib3.exceptions"),
        *("aiohttp", "aiohttp.client_exceptions", "botocore.exceptions", "grpc", "google.api_core.exceptions"),
        *("psycopg", "psycopg.errors", "psycopg_pool", "apsw", "imap_tools", "imap_tools.errors"),
        *("reefknot", "reefknot.errors"),
    }
)
"""The modules that may be imported to look a name up: the standard library's and those of well-known clients."""

_HTTPX = {
    **dict.fromkeys(("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"), "TimeoutException"),
    **dict.fromkeys(("ConnectError", "ReadError", "WriteError", "CloseError"), "NetworkError"),
}
"""The parents of httpx's exceptions, for where it is not installed: the router of a system may have no client."""


def exception_class(name: str) -> type[BaseException] | None:
    """The exception class of this name; None when there is none, or when its module may not be imported for it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (module := _module(".".join(parts[:length]))) is not None:
            return _class_in(module, parts[length:])
    return _class_in(builtins, parts)


def exception_names(name: str) -> tuple[str, ...]:
    """The names of the class and of its ancestors, as those of an exception that is raised; else the name alone."""
    found = exception_class(name)
    if found is not None:
        return tuple(class_name(cls) for cls in found.__mro__ if cls not in (object, BaseException))
    library, _, bare = name.rpartition(".")
    if library in ("httpx", "httpx2") and bare in _HTTPX:
        return name, f"{library}.{_HTTPX[bare]}"
    return (name,)


def is_known_exception(name: str) -> bool:
    """Whether more than the bare name is known of an exception."""
    return exception_names(name) != (name,) or name in KNOWN_CLASSES


def _module(name: str) -> ModuleType | None:
    if name not in LIBRARIES:
        return sys.modules.get(name)
    try:
        return import_module(name)
    except Exception:  # not installed, or broken
        return None


def _class_in(module: ModuleType, path: list[str]) -> type[BaseException] | None:
    """The exception class at a path of names. Looking for it runs no code, but for a library's own lazy names."""
    found: Any = module
    for part in path:
        lazy = isinstance(found, ModuleType) and found.__name__ in LIBRARIES
        found = getattr(found, part, None) if lazy else getattr_static(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
