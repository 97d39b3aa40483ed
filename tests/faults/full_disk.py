"""
The command line over a disk that is full while a file exists.

    python -m tests.faults.full_disk FLAG submit --type fs.delete

While a file FLAG exists, every write to the store fails as ENOSPC makes it fail. Nothing in the product knows of this.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from reefknot.console.cli import main
from tests.faults.vfs import Call, FaultyDisk, Hook, T, disk_full


class FullWhile(Hook):
    """Fails every write while a file exists."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if call.kind == "write" and self._flag.exists():
            raise disk_full()
        return run()


if __name__ == "__main__":
    flag = Path(sys.argv.pop(1))
    disk = FaultyDisk(FullWhile(flag), name="full", default=True)
    sys.exit(main())
