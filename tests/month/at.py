"""
The command line at another time, of another version, over a disk that may be full.

    python -m tests.month.at SECONDS VERSIONS FLAG WORD ...

SECONDS are added to the wall clock, VERSIONS made-up versions to those of the store's files, and while a file FLAG
exists, every write to the store fails as on a full disk. The CPU seconds that this took are left in a file.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

CPU_FILE = "cpu-seconds"


@contextmanager
def made_up_versions(number: int) -> Iterator[None]:
    """A scope in which the store's files have this number of further versions, each with a table that means nothing."""
    from reefknot.ingest import documents
    from reefknot.stores.sqlite import connection, examination
    from reefknot.stores.sqlite import store as sqlite_store

    made_up = [f"CREATE TABLE made_up_{one} (one INTEGER PRIMARY KEY) STRICT;" for one in range(number)]
    with ExitStack() as stack:

        def patch(module: Any, name: str, value: object) -> None:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

        for module in (connection, documents):
            patch(module, "MIGRATIONS", (*module.MIGRATIONS, *made_up))
            patch(module, "VERSION", len(module.MIGRATIONS))
        for shown in (sqlite_store, examination):
            patch(shown, "VERSION", connection.VERSION)
        yield


def run(seconds: float, versions: int, flag: str, words: list[str]) -> int:
    _move_time(seconds)
    from reefknot.console.cli import main
    from tests.faults.vfs import FailingWhile, FaultyDisk, disk_full

    disk = FaultyDisk(FailingWhile(Path(flag), "write", disk_full), default=True) if flag else None
    with made_up_versions(versions):
        code = main(words)
    del disk
    Path(CPU_FILE).write_text(str(time.process_time()))
    return code


def _move_time(seconds: float) -> None:
    """Move the wall clock, also for modules that have taken the function when they were imported."""
    true_time = time.time

    def moved() -> float:
        return true_time() + seconds

    for module in list(sys.modules.values()):
        for name in ("time", "wall"):
            if getattr(module, name, None) is true_time:
                setattr(module, name, moved)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
