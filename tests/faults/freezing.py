"""
Freezes a worker at a storage call until its leases are over and a second one has carried on, then wakes it up.

    python -m tests.faults.freezing FOLDER < plans.jsonl > evidence.jsonl

Plans are those of `dying`. The second worker's clock is ahead, so nobody waits for a lease. A worker that is frozen
with the file's lock in its hand keeps the second one out until it wakes; it is tried again afterwards.
"""

import asyncio
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.errors import StoreUnavailableError
from reefknot.idempotency import model as idempotency
from reefknot.queue.model import work
from tests.faults.dying import first, in_a_process_of_its_own, make_past, way_of
from tests.faults.story import second_life
from tests.faults.vfs import FaultyDisk, Fuse, Hook

SHORT_PATIENCE = 0.02
FENCELESS = "nobody looks at the fence"


def one(folder: Path, plan: dict[str, Any], past: Path) -> dict[str, Any]:
    """One freeze, one takeover, one awakening."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(past / "closed.db", folder / "state.db")
    hook = Fuse(plan["at"], sends=signal.SIGSTOP)

    def live(say: Callable[[Any], None]) -> None:
        if plan["flaw"] == FENCELESS:
            take_the_fences_down()
        first(folder, plan, hook, say)

    zombie, heard = in_a_process_of_its_own(live)
    _, status = os.waitpid(zombie, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    between = _carry_on(folder, plan)
    if stopped:
        os.kill(zombie, signal.SIGCONT)
        _, status = os.waitpid(zombie, 0)
    said = heard()
    after = _carry_on(folder, plan)
    return {
        "plan": plan,
        "stopped": stopped,
        "ended": os.waitstatus_to_exitcode(status),
        "said": said,
        "between": between,
        "after": after,
    }


def take_the_fences_down() -> None:
    """The broken variant: whoever writes last wins."""

    def finish(record: Any, claim: Any, ending: Any, *, now: Any, retention_ms: int) -> Any:
        assert record is not None
        return idempotency._ended(record, ending, now, retention_ms)

    idempotency.finish = finish
    work.holds = lambda item, **_: True


def _carry_on(folder: Path, plan: dict[str, Any]) -> Any:
    def live(say: Callable[[Any], None]) -> None:
        opener = FaultyDisk(Hook(), lazy=True).opener()
        try:
            say(asyncio.run(second_life(folder, way_of(plan), opener, patience=SHORT_PATIENCE)))
        except StoreUnavailableError as error:
            say({"kept out": str(error)})

    child, heard = in_a_process_of_its_own(live)
    (evidence,) = heard()
    os.waitpid(child, 0)
    return evidence


def main(folder: Path) -> None:
    past = make_past(folder / "past")
    gc.freeze()  # or every fork copies every page of what was imported, only to count references
    for line in sys.stdin:
        print(json.dumps(one(folder / "life", json.loads(line), past)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
