"""
Kills a worker at a storage call, lets a second one carry on, and prints what both left behind.

A plan is the way, the scenario, and the number of the call (null: run to the end and count).
"""

import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives
from tests.faults.story import EARLIER, Way, first_life, second_life, told
from tests.faults.vfs import Counter, FaultyDisk, Fuse, Hook

MOST_CALLS = 100_000
SCENARIOS: dict[str, int | None] = {"new": None, "used": None, "checkpointing": 2, "interrupted": None}
"""
A store that does not exist yet; one with a past; one that moves its log into the file after nearly every commit; one
whose last process died, so that its log has to be read back first.
"""


async def first(folder: Path, plan: Plan, hook: Hook, say: Say) -> None:
    disk = FaultyDisk(hook, lazy=True)
    opener = disk.opener(autocheckpoint=SCENARIOS[plan["scenario"]])
    await first_life(folder, way_of(plan), opener, hook, lambda *said: say(said))
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls], len(hook.calls)])


def way_of(plan: Plan) -> Way:
    return Way(plan["mode"], plan["flaw"])


def hook_of(plan: Plan) -> Hook:
    if plan["at"] is None:
        return Hook() if plan.get("after_us") else Counter()
    return Fuse(plan["at"], torn=plan["torn"])


def one(past: Path, folder: Path, plan: Plan) -> Life:
    """One death, and the life after it."""
    if plan["scenario"] == "interrupted" and plan["flaw"] != "throws the log away":
        shutil.copy(past / "state.db-wal", folder)
    if plan["scenario"] != "new":
        shutil.copy(past / ("state.db" if plan["scenario"] == "interrupted" else "closed.db"), folder / "state.db")
    worker = Fork(lambda say: first(folder, plan, hook_of(plan), say))
    if plan.get("after_us"):
        time.sleep(plan["after_us"] / 1e6)
        os.kill(worker.pid, signal.SIGKILL)
    return two_lives(plan, worker, lambda _: second_life(folder, way_of(plan), FaultyDisk(Hook(), lazy=True).opener()))


def make_past(folder: Path) -> Path:
    """A folder with a store that has seen work already: as its process left it by dying, and closed in good order."""
    folder.mkdir()
    for name, dies in (("state.db", True), ("closed.db", False)):
        before = Fork(partial(_live_before, folder / name, dies))
        assert (before.heard(), before.ended()) == ([], -signal.SIGKILL if dies else 0)
    return folder


async def _live_before(path: Path, dies: bool, _: Say) -> None:
    async with open_store(f"sqlite:{path}") as store:
        names = [f"earlier-{number}" for number in range(EARLIER)]
        await store.work.enqueue([WorkItem(name, "t", payload=b"x" * 300) for name in names])
        for item in await store.work.claim(EARLIER, WorkClaim(owner="earlier")):
            await store.work.settle([Settlement(item.id, "earlier", item.fence, WorkDone(), (told("done", item.id),))])
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    carry_out_plans(partial(one, make_past(Path(sys.argv[1]) / "past")))
