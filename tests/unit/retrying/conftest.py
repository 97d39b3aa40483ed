"""A budget of log lines for each test: budgets belong to names, and many tests use the same ones."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _budgets_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.runtime.log._budgets", {})
