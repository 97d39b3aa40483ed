"""The locks on a store that is open: no look at its files, by whatever part of the process, gives them back."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.ingest.connectors.file_selection import FolderSettings, Patterns
from reefknot.ingest.connectors.folders import Folder
from reefknot.runtime.files import is_open_here, whole_file
from reefknot.steps.fs import BlobGet, Folders, FsSettings
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from reefknot.stores.port.engines import ExamineOptions, engine_of
from tests.integration.stepping import step

CLIENT = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM work'); c.close()"
NAMES = ("state.db", "state.db-wal", "state.db-shm", "state.db-wait")


async def keeps_its_log(path: Path, look: Callable[[Store], object]) -> bool:
    """Whether the log is there after a look from within, and a client of another process that came and went."""
    async with open_store(f"sqlite:{path}", tidy=False) as store:
        await store.work.snapshot()
        found = look(store)
        if asyncio.iscoroutine(found):
            await found
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CLIENT, str(path)], check=True, timeout=60)
        return await asyncio.to_thread(Path(f"{path}-wal").exists)


def open_and_close(store: Store) -> None:
    path = store.identity.removeprefix("sqlite:")
    for name in (path, f"{path}-shm"):
        os.close(os.open(name, os.O_RDONLY))


def test_a_client_takes_the_log_of_a_store_whose_file_was_opened_beside_sqlite(tmp_path: Path) -> None:
    """The control: this is how the locks are lost."""
    assert not asyncio.run(keeps_its_log(tmp_path / "state.db", open_and_close))


def test_an_examination_leaves_the_locks(tmp_path: Path) -> None:
    async def examine(store: Store) -> None:
        found = {one.check: one.level for one in await engine_of(store.identity).examine_open(store, ExamineOptions())}
        assert found["durability"] == "ok", found

    assert asyncio.run(keeps_its_log(tmp_path / "state.db", examine))


def test_steps_and_connectors_do_not_read_the_store_that_is_open(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    (tmp_path / "plain.txt").write_text("plain")

    async def look(_: Store) -> None:
        block = BlobGet(Folders(FsSettings((tmp_path,), 10_000_000)))
        for name in NAMES:
            refused = await step(block, path=name)
            assert refused.error_code is ErrorCode.permission_denied, refused
        folder = Folder(FolderSettings(path=tmp_path), Patterns(("**",)))
        with folder.opened() as root:
            assert [root.read((name,)) for name in NAMES] == [None] * len(NAMES)
            assert root.read(("plain.txt",)) is not None
        for name in NAMES:
            assert is_open_here((tmp_path / name).stat())
            with pytest.raises(FileExistsError), whole_file(tmp_path / name):
                pass

    assert asyncio.run(keeps_its_log(path, look))
