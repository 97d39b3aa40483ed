"""
The command line of a made-up newer reefknot, whose files have one more version: `python -m tests.acceptance.newer`.

Its tables cannot be read as this version left them, unless `READS_OLDER` is set. With `LOOKS_MIGRATE` it is broken: a
look migrates.
"""

import os
import sys

from reefknot.console.cli import main
from reefknot.ingest import documents
from reefknot.stores.sqlite import connection, examination, store

MADE_UP = "CREATE TABLE made_up (one INTEGER PRIMARY KEY) STRICT;"


def become_newer() -> None:
    for module in (connection, documents):
        module.MIGRATIONS = (*module.MIGRATIONS, MADE_UP)  # type: ignore[attr-defined]
        module.VERSION = len(module.MIGRATIONS)  # type: ignore[attr-defined]
        module.READABLE_FROM = module.VERSION - bool(os.environ.get("READS_OLDER"))  # type: ignore[attr-defined]
    for module in (examination, store):
        module.VERSION = connection.VERSION  # type: ignore[attr-defined]
    if os.environ.get("LOOKS_MIGRATE"):
        connection.is_older = lambda path, **_: False


if __name__ == "__main__":
    become_newer()
    sys.exit(main(sys.argv[1:]))
