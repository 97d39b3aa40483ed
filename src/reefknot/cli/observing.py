"""What running systems say of themselves, seen from another process."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from reefknot.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    from reefknot.cli.engine import Place
    from reefknot.ports.store import Store

PATIENCE_S = 1.5
"""A system says how it is every second; one that has just started may not have done so yet."""
_LOOK_S = 0.1


async def systems(store: Store) -> list[dict[str, Any]]:
    """The systems that run over this store. Empty when there is none, or none that answers."""
    from reefknot.assembly.presence import living_systems

    for _ in range(int(PATIENCE_S / _LOOK_S)):
        found = await living_systems(store)
        if found:
            return found
        await asyncio.sleep(_LOOK_S)
    return []


async def has_router(store: Store) -> bool:
    """Whether somebody routes over this store, or is about to."""
    return any(one["router"] for one in await systems(store))


async def running(store: Store, where: Place, part: str) -> list[dict[str, Any]]:
    """The same, or an error that says what to do when there is no `part` (worker or router) among them."""
    found = await systems(store)
    if not any(one["workers"] if part == "worker" else one["router"] for one in found):
        ways = f"reefknot up --engine {where.url} (or, alone: reefknot {part} start --engine {where.url})"
        raise CommandError(f"no {part} is running on {where.url}; start one with: {ways}", Exit.UNREACHABLE)
    return found


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as people and programs read it."""
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def places(depth: int, size: int | None) -> str:
    """
    How many places of a queue are taken.

    A step that ran and is to be tried again comes back whether there is room or not: a queue may hold so many more as
    the class has slots, and those are told apart.
    """
    if size is None:
        return f"{depth} of no bound"
    return f"{depth} of {size}" if depth <= size else f"{size} of {size} and {depth - size} back for a retry"


def age(seconds: float) -> str:
    """`3.2 s`, `4 min`: how long ago, or how long still."""
    from reefknot.cli.wording import long_seconds

    return long_seconds(max(0.0, round(seconds, 1)))
