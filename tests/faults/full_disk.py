"""
The command line over a disk that is full while a file exists.

    python -m tests.faults.full_disk FLAG submit --type fs.delete

While a file FLAG exists, every write to the store fails as ENOSPC makes it fail. Nothing in the product knows of this.
"""

import sys
from pathlib import Path

from reefknot.console.cli import main
from tests.faults.vfs import FailingWhile, FaultyDisk, disk_full

if __name__ == "__main__":
    disk = FaultyDisk(FailingWhile(Path(sys.argv.pop(1)), "write", disk_full), default=True)
    sys.exit(main())
