"""`rk`: commands, run in process; `store`: the file of their store; `own`: their folder with steps to run."""

from pathlib import Path

import pytest

from tests.unit.console.cli.running import Commands
from tests.unit.console.cli.steps import Folder, prepared


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def store(rk: Commands) -> Path:
    return rk.folder / ".reefknot" / "state.db"


@pytest.fixture
def own(rk: Commands) -> Folder:
    return prepared(rk)
