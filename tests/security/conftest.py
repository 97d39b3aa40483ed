"""`scene`: an operator over a store in virtual time; `site`: a dashboard over an empty one in memory."""

from pathlib import Path

import pytest

from tests.security.site_client import new_site, stored_work
from tests.stories import InLoop
from tests.unit.console.operations.operator_scene import scene

__all__ = ["scene"]


@pytest.fixture
def site() -> InLoop:
    return InLoop(new_site)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store with a job in each state that a look can meet."""
    stored_work(tmp_path / "state.db")
    return tmp_path / "state.db"
