"""`rk`: commands, run in process; `store`: the file of their store."""

from pathlib import Path

import pytest

from tests.unit.console.cli.running import Commands


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def store(rk: Commands) -> Path:
    return rk.folder / ".reefknot" / "state.db"
