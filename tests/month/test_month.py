"""A short form of `make month`: half a day with every kind of incident, and controls that the table must catch."""

from __future__ import annotations

import pytest

from tests.month.__main__ import lived, table


@pytest.mark.slow
def test_a_system_that_lives_for_a_while_keeps_every_promise() -> None:
    lines = lived(hours=14)

    assert all(one.holds for one in lines), table(lines)
