"""Policies in words, and waits as bars."""

from __future__ import annotations

from math import inf

import pytest

from reefknot.cli import policy_view
from reefknot.cli.output import seconds
from reefknot.cli.policy_view import BAR_WIDTH, bar, put_schedule
from reefknot.core.retry.explain import PlannedWait
from reefknot.core.retry.policy import RetryPolicy


@pytest.mark.parametrize(
    ("executions", "said"),
    [(1, "1 attempt (no retries)"), (2, "2 attempts (1 + 1 retry)"), (4, "4 attempts (1 + 3 retries)")],
)
def test_attempts_are_given_both_ways(executions: int, said: str) -> None:
    assert policy_view.attempts(executions) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 s"),
        (0.1, "100 ms"),
        (0.0005, "0.5 ms"),
        (1.0, "1 s"),
        (1.5, "1.5 s"),
        (86400.0, "86400 s"),
        (inf, "no limit"),
    ],
)
def test_a_duration_is_shown_in_the_unit_it_is_written_in(value: float, said: str) -> None:
    assert seconds(value) == said


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.0, 2.0, "1–2 s"), (0.5, 1.0, "500 ms–1 s"), (2.0, 2.0, "2 s"), (0.0, 0.1, "0 s–100 ms")],
)
def test_a_range_shows_its_unit_once_when_it_can(low: float, high: float, said: str) -> None:
    assert policy_view.span(low, high) == said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (RetryPolicy(3, 0.5, max_delay=10), "500 ms ×2 up to 10 s, ±10 %"),
        (RetryPolicy(strategy="linear", jitter="none"), "1 s more each time, up to 30 s, no jitter"),
        (RetryPolicy(strategy="fixed", jitter="full"), "1 s each, full jitter"),
        (RetryPolicy(strategy="immediate"), "at once"),
        (RetryPolicy(strategy="no_retry"), "never retried"),
    ],
)
def test_every_strategy_has_its_sentence(policy: RetryPolicy, said: str) -> None:
    assert policy_view.growth(policy) == said


def test_a_long_row_of_waits_is_cut() -> None:
    waits = tuple(PlannedWait(k, k + 1.0, k + 1.0) for k in range(5))

    assert policy_view.waits(waits) == "1 s, then 2 s, then 3 s, …"
    assert policy_view.waits(waits[:2]) == "1 s, then 2 s"


def test_a_bar_begins_at_the_shortest_wait_and_ends_at_the_longest() -> None:
    drawn = bar(PlannedWait(0, 1.0, 2.0), 4.0)

    assert drawn == "│" + "·" * (BAR_WIDTH // 4) + "█" * (BAR_WIDTH // 4) + " " * (BAR_WIDTH // 2)


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


def test_a_wait_without_choice_is_still_seen() -> None:
    assert bar(PlannedWait(0, 4.0, 4.0), 4.0).count("█") == 1


def test_the_seeds_wait_is_marked_within_the_range() -> None:
    drawn = bar(PlannedWait(0, 1.0, 3.0, 2.0), 4.0)

    assert drawn.index("◆") == 1 + BAR_WIDTH // 2


def test_time_gone_by_is_the_sum_of_the_waits(capsys: pytest.CaptureFixture[str]) -> None:
    put_schedule([PlannedWait(0, 1.0, 2.0), PlannedWait(1, 2.0, 4.0)])

    assert "3 s – 6 s" in capsys.readouterr().out


def test_a_long_schedule_is_cut_and_its_sum_shown(capsys: pytest.CaptureFixture[str]) -> None:
    put_schedule([PlannedWait(k, 1.0, 1.0) for k in range(30)])

    out = capsys.readouterr().out
    assert "… and 10 more, 30 s – 30 s in total" in out
    assert len(out.splitlines()) < 30
