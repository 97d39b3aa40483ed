"""
The write-ahead log of a store stays small beside readers that take their time: none of ours holds a snapshot for long.

It is measured by what was written, not by time: more than twice as much as the log may ever have.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.audit.model.event import OperatorAction, encode, timestamp_ms
from reefknot.audit.port import AuditEntry
from reefknot.stores.opening import open_store
from tests.acceptance.folder import Folder

MOST_LOG_BYTES = 64 << 20
WRITTEN = 150 << 20
EVENTS = 4000
AT = "2026-01-25T21:15:00.000Z"


@pytest.fixture
def store(folder: Folder) -> Path:
    """A store with events for several pages, and a job."""

    async def main() -> None:
        async with open_store(folder.engine) as opened:
            body = encode(OperatorAction(timestamp=AT, actor="ann", action="forget", subject="x" * 200))
            entry = AuditEntry(body, "operator_action", timestamp_ms(AT) or 0)
            for _ in range(4):
                await opened.audit.append([entry] * (EVENTS // 4))

    folder.wait("waiting")
    asyncio.run(main())
    return folder.path / ".reefknot" / "state.db"


class BusyWriter:
    """Rewrites a megabyte in each transaction, as fast as it can, and notes the largest size of the log."""

    def __init__(self, path: Path) -> None:
        self._log = Path(f"{path}-wal")
        self._connection = apsw.Connection(str(path))
        self._connection.set_busy_timeout(30_000)
        self._connection.execute("PRAGMA synchronous = OFF")
        self.written = 0
        self.largest = 0

    def write(self) -> None:
        with self._connection:
            for number in range(10):
                row = (f"scratch/{number}", "x" * 100_000)
                self._connection.execute("INSERT OR REPLACE INTO value (name, body) VALUES (?, ?)", row)
        self.written += 1_000_000
        self.largest = max(self.largest, self._log.stat().st_size)

    def write_all(self, is_enough: Callable[[], bool] = lambda: True) -> None:
        """Write `WRITTEN` bytes, and go on until it is enough."""
        start = self.written
        while self.written - start < WRITTEN or not is_enough():
            self.write()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def writing(path: Path) -> Iterator[BusyWriter]:
    writer = BusyWriter(path)
    try:
        yield writer
    finally:
        writer.close()


def test_an_export_into_a_pipe_that_is_not_read_lets_the_log_begin_again(folder: Folder, store: Path) -> None:
    export: Any = folder.start("audit", "export", "-")
    export.stdout.read(1000)  # under way; the pipe is full soon
    with writing(store) as writer:
        writer.write_all()
    assert writer.largest < MOST_LOG_BYTES
    code, out, err = folder.ends(export)
    assert code == 0, err
    assert f'"seq":{EVENTS + 1}}}' in out, "the last one"


@pytest.mark.parametrize(
    "words",
    [("audit", "verify"), ("audit", "replay"), ("store", "check"), ("job", "list"), ("quarantine", "list")],
    ids=" ".join,
)
def test_commands_that_read_everything_let_the_log_restart(folder: Folder, store: Path, words: tuple[str, ...]) -> None:
    looking = folder.start(*words)
    with writing(store) as writer:
        writer.write_all(lambda: looking.poll() is not None)
    assert writer.largest < MOST_LOG_BYTES
    assert folder.ends(looking)[0] == 0


def test_the_control_one_snapshot_that_is_held_keeps_the_log_growing(store: Path) -> None:
    reader = apsw.Connection(str(store))
    reader.execute("BEGIN; SELECT count(*) FROM audit").fetchall()
    with writing(store) as writer:
        writer.write_all()
    reader.close()
    assert writer.largest > MOST_LOG_BYTES


def test_an_export_that_is_killed_leaves_nothing_behind(folder: Folder, store: Path) -> None:
    before = sorted(one.name for one in folder.path.iterdir())
    export: Any = folder.start("audit", "export", "log.jsonl", program=("-m", "tests.acceptance.slow_export"))
    assert export.stdout.readline() == "under way\n"
    folder.kill(export)
    assert sorted(one.name for one in folder.path.iterdir()) == before
    assert folder("audit", "export", "log.jsonl").code == 0
