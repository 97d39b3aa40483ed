"""What the acceptance tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reefknot.runtime.seeds import new_id
from tests.acceptance.engines import runs_on_nats
from tests.acceptance.folder import Folder
from tests.unit.console.cli.running import Commands
from tests.unit.ingest.world import world
from tests.workshop import shop

__all__ = ["shop", "world"]

SQLITE, NATS = pytest.param("sqlite", id=pytest.HIDDEN_PARAM), pytest.param("nats", id="nats", marks=pytest.mark.nats)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "folder" in metafunc.fixturenames and runs_on_nats(name, metafunc.function.__name__):
        metafunc.parametrize("folder", [SQLITE, NATS], indirect=True)


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Folder]:
    """On SQLite; on a NATS server, under a name of its own, where `engines` says so."""
    engine = ""
    if getattr(request, "param", "sqlite") == "nats":
        engine = f"{request.getfixturevalue('nats_server').url}/{new_id()}"
    made = Folder(tmp_path, Commands(tmp_path, monkeypatch, capsys), engine=engine)
    yield made
    made.end()


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands in an empty folder, in this process."""
    return Commands(tmp_path, monkeypatch, capsys)
