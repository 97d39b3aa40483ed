"""The change watcher tells commits of other processes from those of its own, whatever the order of counting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.reads import ChangeWatcher


class File:
    """A store's file, with the writer of this process and of another one, each a plain connection."""

    def __init__(self, path: Path) -> None:
        asyncio.run(self._made(path))
        self.own_count = 0
        self._path = path
        self.watcher = ChangeWatcher(
            self._connection, str(path), own_transactions=lambda: self.own_count, is_writing=lambda: False
        )
        assert self.watcher._look() is False, "what was there before is no news"

    async def _made(self, path: Path) -> None:
        store = await SqliteStore(path, VirtualClock()).start()
        await store.close()

    def _connection(self) -> apsw.Connection:
        return apsw.Connection(str(self._path))

    def commit(self) -> None:
        connection = self._connection()
        connection.execute("UPDATE counter SET transactions = transactions + 1")
        connection.close()


def test_only_commits_of_others_are_news(tmp_path: Path) -> None:
    file = File(tmp_path / "s.db")
    for _ in range(3):
        file.own_count += 1
        file.commit()
        assert not file.watcher._look()
        file.commit()
        assert file.watcher._look()
        assert not file.watcher._look()
    file.watcher.close()


def test_a_foreign_commit_beside_one_that_is_counted_and_not_yet_committed_is_not_lost(tmp_path: Path) -> None:
    """The writer counts before it commits: the foreign one may look like its own for that long, and no longer."""
    file = File(tmp_path / "s.db")
    file.own_count += 1
    file.commit()  # the other process, while ours is on its way
    first = file.watcher._look()
    file.commit()  # ours
    assert first or file.watcher._look()
    file.watcher.close()


def test_counting_after_the_commit_would_lose_one(tmp_path: Path) -> None:
    """The control: ours is seen before it is counted, is taken for foreign, and then hides the next foreign one."""
    file = File(tmp_path / "s.db")
    file.commit()  # ours, not counted yet
    assert file.watcher._look(), "a spurious wake-up"
    file.own_count += 1
    file.commit()  # the other process
    assert not file.watcher._look(), "lost: this is why the writer counts first"
    file.watcher.close()
