"""A budget of log lines for each test: budgets belong to names, and many tests use the same ones."""

import pytest


@pytest.fixture(autouse=True)
def _budgets_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.runtime.log._budgets", {})
