"""
Kills a process at every call of its driver, restarts it, and counts: `ledger_dying.py VARIANT DRIVER TARGET`.

Prints a JSON list with one `[effects, records]` for each place of death. A small process forks for every death, so that
nobody else's threads or connections are in it. VARIANT is `txn`, or one of the two ways to get it wrong:
`effect_first` and `record_first` commit the two one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from reefknot.idempotency.ledger import ledger

KEY = "order-7"
MOST_POINTS = 200


class Fuse:
    """Ends the process, with no chance to tidy up, instead of the call with this number."""

    def __init__(self, at: int | None) -> None:
        self._left = at

    def burn(self) -> None:
        if self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def sqlite_conn(path: str, fuse: Fuse) -> sqlite3.Connection:
    class Cursor(sqlite3.Cursor):
        def execute(self, *given: Any) -> Cursor:
            fuse.burn()
            super().execute(*given)
            return self

    class Connection(sqlite3.Connection):
        def cursor(self, *given: Any) -> Any:
            return super().cursor(Cursor)

        def execute(self, *given: Any) -> Any:
            return self.cursor().execute(*given)

        def commit(self) -> None:
            fuse.burn()
            super().commit()

    return sqlite3.connect(path, factory=Connection)


def postgres_conn(dsn: str, fuse: Fuse) -> Any:
    import psycopg

    class Connection(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, Any], *given: Any, **named: Any) -> Any:
            """Every exchange with the server goes through here."""
            fuse.burn()
            return super().wait(gen, *given, **named)

    return Connection.connect(dsn)


def connect(driver: str, target: str, fuse: Fuse) -> Any:
    return sqlite_conn(target, fuse) if driver == "sqlite" else postgres_conn(target, fuse)


def txn(conn: Any) -> None:
    with ledger(conn).once(KEY) as claim:
        if claim.done:
            return
        conn.execute("INSERT INTO effect VALUES (1)")
        claim.result = {"paid": 20}


def apart(conn: Any, *statements: str) -> None:
    """The control: effect and record do not share a transaction."""
    if conn.execute(f"SELECT key FROM reefknot_ledger WHERE key = '{KEY}'").fetchone():
        return
    for statement in statements:
        conn.execute(statement)
        conn.commit()


RECORD = f"INSERT INTO reefknot_ledger (key, fingerprint, result) VALUES ('{KEY}', '', 'null')"
EFFECT = "INSERT INTO effect VALUES (1)"
VARIANTS: dict[str, Callable[[Any], None]] = {
    "txn": txn,
    "effect_first": lambda conn: apart(conn, EFFECT, RECORD),
    "record_first": lambda conn: apart(conn, RECORD, EFFECT),
}


def in_a_process_of_its_own(work: Callable[[], None]) -> int:
    """The exit code of a process, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def prepare(variant: str, driver: str, target: str) -> None:
    if driver == "sqlite":
        for file in Path(target).parent.glob(Path(target).name + "*"):
            file.unlink()
    with closing(connect(driver, target, Fuse(None))) as conn:
        conn.execute("DROP TABLE IF EXISTS effect")
        conn.execute("DROP TABLE IF EXISTS reefknot_ledger")
        conn.execute("CREATE TABLE effect (n INTEGER)")
        if variant != "txn":  # which makes its own
            conn.execute("CREATE TABLE reefknot_ledger (key TEXT PRIMARY KEY, fingerprint TEXT, result TEXT)")
        conn.commit()


def count(driver: str, target: str) -> tuple[int, int]:
    with closing(connect(driver, target, Fuse(None))) as conn:
        (effects,) = conn.execute("SELECT count(*) FROM effect").fetchone()
        (records,) = conn.execute("SELECT count(*) FROM reefknot_ledger WHERE result IS NOT NULL").fetchone()
    return effects, records


def live(variant: str, driver: str, target: str, *, dies_at: int | None) -> int:
    """Run the program once, in a process of its own. Returns how it ended."""

    def work() -> None:
        with closing(connect(driver, target, Fuse(dies_at))) as conn:
            VARIANTS[variant](conn)

    return in_a_process_of_its_own(work)


def main(variant: str, driver: str, target: str) -> None:
    counts = []
    for point in range(1, MOST_POINTS):
        prepare(variant, driver, target)
        ended = live(variant, driver, target, dies_at=point)
        if ended == 0:  # it never came to that call: every place has been tried
            break
        assert ended == -signal.SIGKILL, ended
        assert live(variant, driver, target, dies_at=None) == 0
        counts.append(count(driver, target))
    else:
        raise AssertionError("it never ran to its end")
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
