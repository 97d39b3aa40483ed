"""
An audit log in files of JSON lines, with one writer and a chain of its own.

Files are rotated by size. Beyond the configured number of files the oldest is removed, and an anchor event says so.
The engine keeps no work and no keys: it is a log, not a store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from reefknot.audit.jsonlines.log import JsonLinesLog
from reefknot.audit.jsonlines.writer import Fsync
from reefknot.runtime.clocks import clock_of_this_loop, in_virtual_loop
from reefknot.runtime.event_loops import require_asyncio

if TYPE_CHECKING:
    from reefknot.audit.port import AuditLog
    from reefknot.core.clock import Clock

__all__ = ["Fsync", "JsonLinesLog", "open_audit_log"]


@asynccontextmanager
async def open_audit_log(
    path: str,
    *,
    clock: Clock | None = None,
    largest: int = 64 << 20,
    keep: int | None = None,
    fsync: str = "always",
) -> AsyncIterator[AuditLog]:
    """
    An audit log in files of JSON lines, for as long as the block lasts, to be given as `audit=`.

    A new file begins after `largest` bytes. With `keep`, the oldest files are removed beyond that number, and an anchor
    event says so. `fsync` is `always`, `rotate` or `never`. One process writes a log.
    """
    require_asyncio("open_audit_log")
    log = await JsonLinesLog.open(
        path, clock or clock_of_this_loop(), largest=largest, keep=keep, fsync=fsync, inline=in_virtual_loop()
    )
    try:
        yield log
    finally:
        await log.close()
