"""A short form of `make month`: eight hours across the end of summer time, with two upgrades, a rollback and a kill."""

from __future__ import annotations

import pytest

from tests.month.__main__ import lived, table


@pytest.mark.slow
def test_a_system_that_lives_for_a_while_keeps_every_promise() -> None:
    lines = lived(hours=8)

    assert all(one.holds for one in lines), table(lines)
