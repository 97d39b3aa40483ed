"""
Kills a worker at a storage call, lets a second one carry on, and prints what both left behind.

A plan is the way, the scenario, and the number of the call (null: run to the end and count). It may freeze the worker
instead, until its leases are over and a second one has carried on, and then wake it up. The second one's clock is
ahead, so nobody waits for a lease. A worker that is frozen with the file's lock in its hand keeps the second one out
until it wakes; it is tried again afterwards.
"""

import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from reefknot.errors import StoreUnavailableError
from reefknot.idempotency import model as idempotency
from reefknot.queue.model import work
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.opening import open_store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives
from tests.faults.story import EARLIER, Way, first_life, second_life, told
from tests.faults.vfs import Counter, FaultyDisk, Fuse, Hook

SHORT_PATIENCE = 0.02
FENCELESS = "nobody looks at the fence"
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
    if plan["freezes"]:
        return frozen(past, folder, plan)
    if plan["scenario"] == "interrupted" and plan["flaw"] != "throws the log away":
        shutil.copy(past / "state.db-wal", folder)
    if plan["scenario"] != "new":
        shutil.copy(past / ("state.db" if plan["scenario"] == "interrupted" else "closed.db"), folder / "state.db")
    worker = Fork(lambda say: first(folder, plan, hook_of(plan), say))
    if plan.get("after_us"):
        time.sleep(plan["after_us"] / 1e6)
        os.kill(worker.pid, signal.SIGKILL)
    return two_lives(plan, worker, lambda _: second_life(folder, way_of(plan), FaultyDisk(Hook(), lazy=True).opener()))


def frozen(past: Path, folder: Path, plan: Plan) -> Life:
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
