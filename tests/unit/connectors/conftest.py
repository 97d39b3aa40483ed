"""Connectors are tested as they are without the extra `text`; its own tests ask for it."""

import pytest

from reefknot.connectors import text_extraction


@pytest.fixture(autouse=True)
def _without_extra(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "text_extra" not in request.fixturenames:
        monkeypatch.setattr(text_extraction, "PACKAGES", ("no_such_package",))


@pytest.fixture
def text_extra() -> None:
    """The extra is installed, or the test is skipped."""
    if not text_extraction.is_installed():
        pytest.skip("the extra text is not installed")
