"""Values as people type them: what is accepted, and the refusal of everything else."""

from datetime import UTC, datetime

import pytest

from reefknot.console.operations.values import duration_s, time_ms
from reefknot.errors import ParameterError

NOON = datetime(2026, 1, 25, 12, 0, tzinfo=UTC)


def test_a_time_is_absolute_or_an_age() -> None:
    noon = int(NOON.timestamp() * 1000)
    assert time_ms("since", None) is None
    assert time_ms("since", "90s", now=NOON) == noon - 90_000
    assert time_ms("since", "1.5h", now=NOON) == noon - 5_400_000
    assert time_ms("since", "2026-01-25T12:00:00Z") == noon
    assert time_ms("since", "999999999d", now=NOON) == 0
    with pytest.raises(ParameterError) as refused:
        time_ms("since", "90x")
    assert refused.value.problem.startswith("'90x' is not accepted: a time such as ")


def test_what_is_no_duration_has_no_seconds() -> None:
    for text in ("", "90", "s", "-1s", "1.2345s", "90x", "1h30m", "1234567890s", "5s\n"):
        assert duration_s(text) is None, text
