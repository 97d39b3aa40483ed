"""
The command line without one of its protections: `python -m tests.acceptance.weakened PROTECTION COMMAND …`.

A test that passes here as well has not looked at the protection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import reefknot.app.system
import reefknot.core.work
import reefknot.worker.pool
from reefknot.cli import main
from reefknot.core.work import WorkItem
from reefknot.worker.settings import WorkerSettings, settings_from


def without_isolation() -> None:
    """Let suspects run beside each other."""

    def nobody(item: WorkItem) -> bool:
        return False

    def all_of_them(suspects: Any) -> int:
        return len(suspects)

    reefknot.core.work.is_suspect = nobody
    reefknot.core.work.number_together = all_of_them
    setattr(reefknot.worker.pool, "is_suspect", nobody)  # noqa: B010 - a name that it only imports


def with_short_leases() -> None:
    """Let leases of work end after three seconds. This is no weakness, but it saves a test minutes."""

    def shortened(*given: Any, **named: Any) -> WorkerSettings:
        return settings_from(*given, **named, lease=3.0)

    setattr(reefknot.app.system, "settings_from", shortened)  # noqa: B010 - a name that it only imports


def without_loop_watch() -> None:
    """Renew leases in the event loop alone."""
    with_short_leases()

    def nothing(*given: Any) -> Any:
        return nullcontext()

    setattr(reefknot.app.system, "LoopWatch", nothing)  # noqa: B010 - a name that it only imports


WITHOUT: dict[str, Callable[[], None]] = {
    "isolation": without_isolation,
    "long-leases": with_short_leases,
    "loop-watch": without_loop_watch,
}

if __name__ == "__main__":
    WITHOUT[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
