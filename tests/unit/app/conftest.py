"""The stores that effects are guarded by: every such test runs on each."""

from pathlib import Path

import pytest

from tests.workshop import shop

__all__ = ["shop"]


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'state.db'}"
