"""
The command line over a disk that can be made to fail from outside.

    python -m tests.faults.sick_disk FLAG up --engine sqlite:state.db

While a file FLAG exists, every fsync fails as EIO makes it fail. With a FLAG named `deaf` the system does not watch its
store. Nothing in the product knows of this.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from reefknot.app.system import System
from reefknot.console.cli import main
from tests.faults.vfs import Call, FaultyDisk, Hook, T, disk_error


class FlaggedFailure(Hook):
    """Fails every fsync while a file exists."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if call.kind == "sync" and self._flag.exists():
            raise disk_error()
        return run()


async def _deaf(system: System) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    flag = Path(sys.argv.pop(1))
    disk = FaultyDisk(FlaggedFailure(flag), name="sick", default=True)
    if flag.name == "deaf":
        System.store_failed = _deaf  # type: ignore[method-assign, assignment]
    sys.exit(main())
