"""
What this process wrote last, so that it need not be read back.

A key that was just claimed is about to be finished, an item that was just claimed about to be settled. As long as
`PRAGMA data_version` says that no other connection has written since, the record in memory is the record in the file.
Notes of a transaction count within it at once, and beyond it only after its commit.
"""

from typing import Generic, TypeVar

R = TypeVar("R")

LARGEST = 10_000


class Recall(Generic[R]):
    """Records by name. Dropping one is always safe: it is read from the file then."""

    __slots__ = ("_kept", "_noted")

    def __init__(self) -> None:
        self._kept: dict[str, R] = {}
        self._noted: dict[str, R | None] = {}

    def get(self, name: str) -> R | None:
        """The record as it stands inside the transaction, None when it has to be read."""
        noted = self._noted
        return noted[name] if noted and name in noted else self._kept.get(name)

    def note(self, name: str, record: R) -> None:
        self._noted[name] = record

    def drop(self, name: str) -> None:
        self._noted[name] = None

    def clear(self) -> None:
        """Somebody else has written, or what was written is not known."""
        self._kept.clear()
        self._noted.clear()

    def committed(self) -> None:
        """What was noted is in the file."""
        for name, record in self._noted.items():
            if record is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = record
        self._noted.clear()
        if len(self._kept) > LARGEST:
            self._kept.clear()
