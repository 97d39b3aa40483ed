"""
The command line over a disk that can be made to fail from outside.

    python -m tests.faults.sick_disk FLAG up --engine sqlite:state.db

While a file FLAG exists, every fsync fails as EIO makes it fail. With a FLAG named `deaf` the system does not watch its
store. Nothing in the product knows of this.
"""

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

from reefknot.app.system import System
from reefknot.console.cli import main
from tests.faults.vfs import FailingWhile, FaultyDisk, disk_error


async def _deaf(system: System) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    flag = Path(sys.argv.pop(1))
    disk = FaultyDisk(FailingWhile(flag, "sync", disk_error), default=True)
    if flag.name == "deaf":
        System.store_failed = _deaf  # type: ignore[method-assign, assignment]
    sys.exit(main())
