"""Statuses of systems as they report them, for tests of what operators see."""

import json
from typing import Any

from reefknot.app.system import System
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.port import Store


async def running(
    store: Store, worker_id: str = "worker-1", *, depth: int = 0, status: str = "healthy", **activity: Any
) -> str:
    """A system with one worker of the class `io` reports itself. Returns its id."""
    system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=(worker_id,))
    shown = system.snapshot()
    io = {"status": status, "depth": depth, "size": 100, "active": 1, "capacity": 4, "oldest_age_s": 2.5}
    shown["workers"][0]["classes"] = {"io": io}
    shown["activity"] = {"id": system.system_id, "buckets": {}, "rates": {}, **activity}
    await store.control.report(system.system_id, json.dumps(shown, default=str), keep=300)
    return system.system_id
