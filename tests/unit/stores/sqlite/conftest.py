"""`store`: a store in virtual time on the file `path`."""

from pathlib import Path

import pytest

from tests.stories import InLoop
from tests.unit.stores.sqlite.stores_on_a_file import opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def store(path: Path) -> InLoop:
    return InLoop(lambda: opened(path))
