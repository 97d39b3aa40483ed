"""The change watcher tells commits of other processes from those of its own, whatever the order of counting."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from reefknot.stores.sqlite.reads import ChangeWatcher
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, opened


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
        async with opened(path):
            pass

    def _connection(self) -> apsw.Connection:
        return apsw.Connection(str(self._path))

    def commit(self) -> None:
        by_hand(self._path, "UPDATE counter SET transactions = transactions + 1")


@pytest.fixture
def file(path: Path) -> Iterator[File]:
    made = File(path)
    yield made
    made.watcher.close()


def test_only_commits_of_others_are_news(file: File) -> None:
    for _ in range(3):
        file.own_count += 1
        file.commit()
        assert not file.watcher._look()
        file.commit()
        assert file.watcher._look()
        assert not file.watcher._look()


def test_a_foreign_commit_beside_one_that_is_counted_and_not_yet_committed_is_not_lost(file: File) -> None:
    """The writer counts before it commits: the foreign one may look like its own for that long, and no longer."""
    file.own_count += 1
    file.commit()  # the other process, while ours is on its way
    first = file.watcher._look()
    file.commit()  # ours
    assert first or file.watcher._look()


def test_counting_after_the_commit_would_lose_one(file: File) -> None:
    """The control: ours is seen before it is counted, is taken for foreign, and then hides the next foreign one."""
    file.commit()  # ours, not counted yet
    assert file.watcher._look(), "a spurious wake-up"
    file.own_count += 1
    file.commit()  # the other process
    assert not file.watcher._look(), "lost: this is why the writer counts first"
