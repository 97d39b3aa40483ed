"""
The command line without one of its protections: `python -m tests.acceptance.weakened PROTECTION COMMAND …`.

A test that passes here as well has not looked at the protection.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import reefknot.app.alert_watch
import reefknot.app.system
import reefknot.audit.metrics
import reefknot.queue.execution.slots
import reefknot.queue.model.work
import reefknot.queue.router.health
import reefknot.queue.worker.loop_watch
from reefknot.app.system import System
from reefknot.console.cli import main
from reefknot.queue.model.work import WorkItem
from reefknot.queue.worker.settings import WorkerSettings, settings_from
from reefknot.steps.threads import FunctionThreads, _FunctionCall


def without_isolation() -> None:
    """Let suspects run beside each other."""

    def nobody(item: WorkItem) -> bool:
        return False

    def all_of_them(suspects: Any) -> int:
        return len(suspects)

    reefknot.queue.model.work.is_suspect = nobody
    reefknot.queue.model.work.number_together = all_of_them
    setattr(reefknot.queue.execution.slots, "is_suspect", nobody)  # noqa: B010 - a name that it only imports


def with_short_leases() -> None:
    """Let leases of work end after three seconds. This is no weakness, but it saves a test minutes."""

    def shortened(*given: Any, **named: Any) -> WorkerSettings:
        return settings_from(*given, **named, lease=3.0)

    setattr(reefknot.app.system, "settings_from", shortened)  # noqa: B010 - a name that it only imports


def without_loop_watch() -> None:
    """Renew leases in the event loop alone."""
    with_short_leases()

    def nothing(*given: Any, **more: Any) -> Any:
        return nullcontext()

    setattr(reefknot.app.system, "LoopWatch", nothing)  # noqa: B010 - a name that it only imports


def with_quick_looks() -> None:
    """Look at alerts five times a second, with a minute of two steps of three seconds: this saves tests minutes."""
    reefknot.app.alert_watch.LOOK_EVERY_S = 0.2
    reefknot.app.alert_watch.MINUTE_STEPS = 2
    reefknot.audit.metrics.STEP_S = 3
    reefknot.audit.metrics.series.__kwdefaults__ = {"steps": reefknot.audit.metrics.STEPS, "step_s": 3}


WITHOUT: dict[str, Callable[[], None]] = {
    "isolation": without_isolation,
    "long-leases": with_short_leases,
    "loop-watch": without_loop_watch,
    # Let a suspect begin although functions run on whose attempts are over.
    "overdue-functions": partial(setattr, FunctionThreads, "overdue", 0),
    # Let a process that is stopped at once keep its claims.
    "giving-back": partial(setattr, System, "give_back_now", lambda _: None),
    # Let a router count workers by their heartbeats alone.
    "living-processes": partial(setattr, reefknot.queue.router.health, "owner_exists", lambda _: False),
    # Let a time-out count when the event loop gets to it.
    "return-times": partial(setattr, _FunctionCall, "returned_by", lambda *_: False),
    # Renew the leases of idempotency keys in the event loop alone.
    "held-keys": partial(setattr, reefknot.queue.worker.loop_watch, "extend_keys", lambda *_: None),
    "slow-looks": with_quick_looks,
}

if __name__ == "__main__":
    WITHOUT[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
