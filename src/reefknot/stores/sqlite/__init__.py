"""
The engine of a durable store in one SQLite file: WAL, `synchronous=FULL`, one writer thread with group commit.

`SqliteStore` and what it needs, asyncio with it, are imported on use: an address is checked without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reefknot.runtime.database_urls import sqlite_path
from reefknot.stores.port.engines import Engine, Examination, ExamineOptions, Finding, OpenOptions, StoreFiles

if TYPE_CHECKING:
    from reefknot.stores.port import Store
    from reefknot.stores.sqlite.store import SqliteStore

__all__ = ["ENGINE", "SqliteStore"]

T = TypeVar("T")


class SqliteEngine:
    """The engine of `sqlite:PATH`."""

    magic = b"SQLite format 3\x00"
    without_file = ""
    hears_peers = False
    extra = ""

    def path(self, url: str) -> str:
        return sqlite_path(url)

    def files(self) -> StoreFiles:
        from reefknot.stores.sqlite import examination

        return examination

    async def open(self, url: str, options: OpenOptions) -> Store:
        from reefknot.stores.sqlite.connection import is_older
        from reefknot.stores.sqlite.store import SqliteStore

        path, read_only, inline = sqlite_path(url), options.read_only, options.inline
        if not options.migrate and not read_only:
            read_only = is_older(path) if inline else await _apart(is_older, path)
        return await SqliteStore(path, options.clock, **options.limits, inline=inline, read_only=read_only).start()

    async def create(self, url: str, settings: Mapping[str, Any], *, keeps_shared: bool) -> list[str]:
        path = sqlite_path(url)
        return [] if await _apart(Path(path).is_file) else [path]  # opening it makes it

    async def examine(self, url: str, options: ExamineOptions) -> Examination:
        from reefknot.stores.sqlite.examination import examination_of

        return await _apart(examination_of, sqlite_path(url), is_named=options.is_named)

    async def examine_open(self, store: Store, options: ExamineOptions) -> list[Finding]:
        from reefknot.stores.sqlite import examination

        return await _apart(examination.file_findings, sqlite_path(store.identity), examination.OPEN_CHECK_S)


async def _apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The result of a function that blocks."""
    import asyncio

    return await asyncio.to_thread(function, *arguments, **named)


ENGINE: Engine = SqliteEngine()


def __getattr__(name: str) -> Any:
    if name == "SqliteStore":
        from reefknot.stores.sqlite.store import SqliteStore

        return SqliteStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
