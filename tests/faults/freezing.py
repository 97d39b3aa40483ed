"""
Freezes a worker at a storage call until its leases are over and a second one has carried on, then wakes it up.

Plans are those of `dying`. The second worker's clock is ahead, so nobody waits for a lease. A worker that is frozen
with the file's lock in its hand keeps the second one out until it wakes; it is tried again afterwards.
"""

import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from reefknot.errors import StoreUnavailableError
from reefknot.idempotency import model as idempotency
from reefknot.queue.model import work
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans
from tests.faults.dying import first, make_past, way_of
from tests.faults.story import second_life
from tests.faults.vfs import FaultyDisk, Fuse, Hook

SHORT_PATIENCE = 0.02
FENCELESS = "nobody looks at the fence"


def one(past: Path, folder: Path, plan: Plan) -> Life:
    """One freeze, one takeover, one awakening."""
    shutil.copy(past / "closed.db", folder / "state.db")

    def live(say: Say) -> Any:
        if plan["flaw"] == FENCELESS:
            take_the_fences_down()
        return first(folder, plan, Fuse(plan["at"], sends=signal.SIGSTOP), say)

    zombie = Fork(live)
    _, status = os.waitpid(zombie.pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    between = _carry_on(folder, plan)
    if stopped:
        os.kill(zombie.pid, signal.SIGCONT)
        _, status = os.waitpid(zombie.pid, 0)
    seen = {"plan": plan, "stopped": stopped, "ended": os.waitstatus_to_exitcode(status), "said": zombie.heard()}
    return {**seen, "between": between, "after": _carry_on(folder, plan)}


def take_the_fences_down() -> None:
    """The broken variant: whoever writes last wins."""

    def finish(record: Any, claim: Any, ending: Any, *, now: Any, retention_ms: int) -> Any:
        assert record is not None
        return idempotency._ended(record, ending, now, retention_ms)

    idempotency.finish = finish
    work.holds = lambda item, **_: True


def _carry_on(folder: Path, plan: Plan) -> Any:
    async def live() -> dict[str, Any]:
        opener = FaultyDisk(Hook(), lazy=True).opener()
        try:
            return await second_life(folder, way_of(plan), opener, patience=SHORT_PATIENCE)
        except StoreUnavailableError as error:
            return {"kept out": str(error)}

    heir = Fork(lambda _: live())
    (evidence,), _ = heir.heard(), heir.ended()
    return evidence


if __name__ == "__main__":
    carry_out_plans(partial(one, make_past(Path(sys.argv[1]) / "past")))
