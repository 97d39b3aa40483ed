"""What the acceptance tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.folder import Folder
from tests.unit.cli.running import Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    made = Folder(tmp_path, Commands(tmp_path, monkeypatch, capsys))
    yield made
    made.end()
