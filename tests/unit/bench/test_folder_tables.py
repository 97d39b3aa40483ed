"""The table of folders measures what it says: real files, read into the real store."""

import asyncio
from pathlib import Path

import pytest

from bench.tables import folders


@pytest.mark.parametrize("connector", folders.CONNECTORS)
def test_a_sync_that_is_measured_keeps_every_file(connector: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    folders.fill(tmp_path / "folder", connector, 300)

    found = asyncio.run(folders.both(connector, tmp_path / "folder", tmp_path / "documents.db"))

    assert found["first"][2] == 300
    assert found["first"][1] >= 4
    assert found["peak_mb"] > 1
