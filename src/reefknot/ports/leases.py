"""
Who holds work, and what becomes of it when a holder is known to be gone.

A lease runs out by itself. Whoever can tell that its holder will never come back need not wait for that. Saying so of
one that lives costs a second run, never a second result: its fence is still its own until somebody else claims.
"""

from collections.abc import Collection
from typing import Protocol


class Leases(Protocol):
    """The leases of all work in a store."""

    async def owners(self) -> list[str]:
        """Whoever holds work now, each once."""

    async def end(self, owners: Collection[str]) -> int:
        """These are gone for good: their leases are over, and the next claim counts a crash. Answers how many."""
