"""Waits as bars."""

import pytest

from reefknot.console.cli.policy import BAR_WIDTH, bar, put_schedule
from reefknot.policy.model.explain import PlannedWait


def test_a_bar_goes_from_the_shortest_wait_to_the_longest_and_marks_the_seeds() -> None:
    quarter = BAR_WIDTH // 4
    assert bar(PlannedWait(0, 1.0, 2.0), 4.0) == "│" + "·" * quarter + "█" * quarter + " " * (BAR_WIDTH // 2)
    assert bar(PlannedWait(0, 4.0, 4.0), 4.0).count("█") == 1, "a wait without choice is still seen"
    assert bar(PlannedWait(0, 1.0, 3.0, 2.0), 4.0).index("◆") == 1 + BAR_WIDTH // 2


@pytest.mark.parametrize(
    "wait",
    [
        PlannedWait(0, 0.0, 0.0),
        PlannedWait(0, 4.0, 4.0),
        PlannedWait(0, 0.0, 4.0, 4.0),
        PlannedWait(0, 0.0, 1e-9),
        PlannedWait(0, 3.999, 4.0, 3.9995),
    ],
)
def test_every_bar_is_as_wide_as_the_others(wait: PlannedWait) -> None:
    assert len(bar(wait, 4.0)) == BAR_WIDTH + 1
    assert len(bar(wait, 0.0)) == BAR_WIDTH + 1


def test_time_gone_by_is_the_sum_of_the_waits_and_a_long_schedule_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    put_schedule([PlannedWait(0, 1.0, 2.0), PlannedWait(1, 2.0, 4.0)])
    assert "3 s – 6 s" in capsys.readouterr().out
    put_schedule([PlannedWait(k, 1.0, 1.0) for k in range(30)])
    out = capsys.readouterr().out
    assert "… and 10 more, 30 s – 30 s in total" in out
    assert len(out.splitlines()) < 30
