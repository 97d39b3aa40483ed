"""
The command line without one of its protections: `python -m tests.acceptance.weakened PROTECTION COMMAND …`.

A test that passes here as well has not looked at the protection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import reefknot.core.work
import reefknot.worker.pool
from reefknot.cli import main
from reefknot.core.work import WorkItem


def without_isolation() -> None:
    """Let suspects run beside each other."""

    def nobody(item: WorkItem) -> bool:
        return False

    def all_of_them(suspects: Any) -> int:
        return len(suspects)

    reefknot.core.work.is_suspect = nobody
    reefknot.core.work.number_together = all_of_them
    setattr(reefknot.worker.pool, "is_suspect", nobody)  # noqa: B010 - a name that it only imports


WITHOUT: dict[str, Callable[[], None]] = {"isolation": without_isolation}

if __name__ == "__main__":
    WITHOUT[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
