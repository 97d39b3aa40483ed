"""Connectors are tested as they are without the extra `text`; its own tests ask for it."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from reefknot.ingest.connectors import text_extraction


@pytest.fixture(autouse=True)
def _without_extra(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:  # one of its own: tests undo theirs in the middle
        if "text_extra" not in request.fixturenames:
            patched.setattr(text_extraction, "PACKAGES", ("no_such_package",))
        yield


@pytest.fixture
def text_extra() -> None:
    """The extra is installed, as `make test` installs it."""
    if not text_extraction.is_installed():
        pytest.fail("the extra text is not installed: pip install -e '.[dev,text]' in the checkout")


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names that this user may not open, whoever it is: permissions do not hold root back."""
    names: set[str] = set()
    opened = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.basename(os.fspath(path)) in names:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    yield names
    names.clear()
