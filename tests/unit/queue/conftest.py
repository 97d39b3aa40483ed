"""A router and workers in one loop of virtual time: in memory, or on what the test's parameter `shop` names."""

from functools import partial
from pathlib import Path

import pytest

from tests.stories import InLoop
from tests.workshop import opened


@pytest.fixture
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> InLoop:
    engine = getattr(request, "param", "memory")
    return InLoop(partial(opened, None if engine == "memory" else str(tmp_path / "s.db")))
