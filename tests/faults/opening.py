"""
Processes that open a store which is not there yet, all at once.

    python -m tests.faults.opening FOLDER ROUNDS PROCESSES

Prints one JSON list per round: what went wrong in each process, null where nothing did.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.queue.model.work import WorkItem
from reefknot.stores.opening import open_store
from tests.faults.dying import in_a_process_of_its_own


async def open_and_use(path: Path, name: str) -> None:
    async with open_store(f"sqlite:{path}") as store:
        await store.work.enqueue([WorkItem(name, "t")])


def one(path: Path, processes: int) -> list[Any]:
    reading, writing = os.pipe()

    def life(name: str) -> Callable[[Callable[[Any], None]], None]:
        def live(say: Callable[[Any], None]) -> None:
            os.close(writing)
            os.read(reading, 1)  # the start: everybody sees the end of the pipe at the same moment
            asyncio.run(open_and_use(path, name))

        return live

    started = [in_a_process_of_its_own(life(f"{number}")) for number in range(processes)]
    os.close(writing)
    os.close(reading)
    said = [heard() for _, heard in started]
    for child, _ in started:
        os.waitpid(child, 0)
    return [words[0] if words else None for words in said]


if __name__ == "__main__":
    for number in range(int(sys.argv[2])):
        print(json.dumps(one(Path(sys.argv[1]) / f"{number}.db", int(sys.argv[3]))), flush=True)
