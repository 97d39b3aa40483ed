"""
Kills a worker at a storage call, lets a second one carry on, and prints what both left behind.

    python -m tests.faults.dying FOLDER < plans.jsonl > evidence.jsonl

A plan is one line: the way, the scenario, and the number of the call (null: run to the end and count). This process is
small, single-threaded and has everything imported; each life is a fork of it, so a death costs milliseconds and nobody
else's threads or connections are in it.
"""

import asyncio
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.queue.port.work_queue import WorkClaim
from tests.faults.story import EARLIER, Way, first_life, second_life
from tests.faults.vfs import Counter, FaultyDisk, Fuse, Hook

MOST_CALLS = 100_000
SCENARIOS: dict[str, int | None] = {"new": None, "used": None, "checkpointing": 2, "interrupted": None}
"""
A store that does not exist yet; one with a past; one that moves its log into the file after nearly every commit; one
whose last process died, so that its log has to be read back first.
"""


def in_a_process_of_its_own(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, Callable[[], list[Any]]]:
    """Start it. Answers its id, and how to wait for all that it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 70
        try:
            work(lambda said: _say(writing, said))
            code = 0
        except BaseException as error:
            _say(writing, ["error", type(error).__name__, str(error)])
        finally:
            os._exit(code)
    os.close(writing)

    def heard() -> list[Any]:
        with os.fdopen(reading, "rb") as pipe:
            return [json.loads(line) for line in pipe.read().splitlines()]

    return child, heard


def _say(writing: int, said: Any) -> None:
    """One write below the pipe's atomic size per word; what is in the pipe outlives its writer."""
    data = json.dumps(said).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]


def first(folder: Path, plan: dict[str, Any], hook: Hook, say: Callable[[Any], None]) -> None:
    disk = FaultyDisk(hook, lazy=True)
    opener = disk.opener(autocheckpoint=SCENARIOS[plan["scenario"]])
    asyncio.run(first_life(folder, way_of(plan), opener, hook, lambda *said: say(said)))
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls], len(hook.calls)])


def way_of(plan: dict[str, Any]) -> Way:
    return Way(plan["mode"], plan["flaw"])


def hook_of(plan: dict[str, Any]) -> Hook:
    if plan["at"] is None:
        return Hook() if plan.get("after_us") else Counter()
    return Fuse(plan["at"], torn=plan["torn"])


def one(folder: Path, plan: dict[str, Any], past: Path) -> dict[str, Any]:
    """One death, and the life after it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if plan["scenario"] == "interrupted" and plan["flaw"] != "throws the log away":
        shutil.copy(past / "state.db-wal", folder)
    if plan["scenario"] != "new":
        shutil.copy(past / ("state.db" if plan["scenario"] == "interrupted" else "closed.db"), folder / "state.db")
    child, heard = in_a_process_of_its_own(lambda say: first(folder, plan, hook_of(plan), say))
    if plan.get("after_us"):
        time.sleep(plan["after_us"] / 1e6)
        os.kill(child, signal.SIGKILL)
    said = heard()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def carry_on(say: Callable[[Any], None]) -> None:
        opener = FaultyDisk(Hook(), lazy=True).opener()
        say(asyncio.run(second_life(folder, way_of(plan), opener)))

    child, heard = in_a_process_of_its_own(carry_on)
    evidence = heard()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"plan": plan, "ended": ended, "said": said, "second": code, "evidence": evidence[-1] if evidence else None}


def make_past(folder: Path) -> Path:
    """A folder with a store that has seen work already: as its process left it by dying, and closed in good order."""
    folder.mkdir()

    def end_badly(say: Callable[[Any], None]) -> None:
        asyncio.run(_live_before(folder / "state.db", dies=True))

    def end_well(say: Callable[[Any], None]) -> None:
        asyncio.run(_live_before(folder / "closed.db", dies=False))

    for live, code in ((end_badly, -signal.SIGKILL), (end_well, 0)):
        child, heard = in_a_process_of_its_own(live)
        assert heard() == []
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    return folder


async def _live_before(path: Path, *, dies: bool) -> None:
    from reefknot.queue.model.work import WorkDone, WorkItem
    from reefknot.queue.port.work_queue import Settlement
    from reefknot.stores.opening import open_store
    from tests.faults.story import told

    async with open_store(f"sqlite:{path}") as store:
        names = [f"earlier-{number}" for number in range(EARLIER)]
        await store.work.enqueue([WorkItem(name, "t", payload=b"x" * 300) for name in names])
        for item in await store.work.claim(EARLIER, WorkClaim(owner="earlier")):
            await store.work.settle([Settlement(item.id, "earlier", item.fence, WorkDone(), (told("done", item.id),))])
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    past = make_past(folder / "past")
    gc.freeze()  # or every fork copies every page of what was imported, only to count references
    for line in sys.stdin:
        print(json.dumps(one(folder / "life", json.loads(line), past)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
