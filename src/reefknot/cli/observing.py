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
    from reefknot.assembly.system import living_systems

    for _ in range(int(PATIENCE_S / _LOOK_S)):
        found = await living_systems(store)
        if found:
            return found
        await asyncio.sleep(_LOOK_S)
    return []


async def running(store: Store, where: Place) -> list[dict[str, Any]]:
    """The same, or an error that says what to do."""
    found = await systems(store)
    if not found:
        text = f"no system is running on {where.url}; start one with: reefknot up --engine {where.url}"
        raise CommandError(text, Exit.UNREACHABLE)
    return found


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as people and programs read it."""
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age(seconds: float) -> str:
    """`3.2 s`, `4 min`: how long ago, or how long still."""
    from reefknot.cli.wording import long_seconds

    return long_seconds(max(0.0, round(seconds, 1)))
