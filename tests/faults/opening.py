"""Processes that open a store which is not there yet, all at once: a plan is a file and their number."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from reefknot.queue.model.work import WorkItem
from reefknot.stores.opening import open_store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans


def one(folder: Path, plan: Plan) -> Life:
    """What was said by each process: nothing, unless something went wrong in it."""
    reading, writing = os.pipe()

    async def open_and_use(name: str) -> None:
        async with open_store(f"sqlite:{plan['file']}") as store:
            await store.work.enqueue([WorkItem(name, "t")])

    def live(name: str, _: Say) -> Any:
        os.close(writing)
        os.read(reading, 1)  # the start: everybody sees the end of the pipe at the same moment
        return open_and_use(name)

    started = [Fork(partial(live, str(number))) for number in range(plan["processes"])]
    os.close(writing)
    os.close(reading)
    return {"said": [fork.heard() for fork in started], "ended": [fork.ended() for fork in started]}


if __name__ == "__main__":
    carry_out_plans(one)
