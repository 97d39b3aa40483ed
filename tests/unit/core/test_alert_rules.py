"""Alert rules: an alert is raised once beyond the threshold for a while, and resolved once within `clear`."""

import pytest

from reefknot.core.alert_rules import (
    RULES,
    AlertLimits,
    AlertState,
    AlertThresholds,
    clear_is_beyond,
    next_state,
    resolved_text,
    with_limits,
)

ABOVE = AlertThresholds("rate", threshold=10, clear=5, for_seconds=30, what="retries", advice="look", unit=" a minute")
BELOW = AlertThresholds("share", threshold=0.9, clear=0.95, for_seconds=0, what="share", advice="look", below=True)


def judged(rule: AlertThresholds, *looks: tuple[float, float | None]) -> list[bool]:
    """Whether the alert is active after each look, given as time and value."""
    state, seen = AlertState(), []
    for now, value in looks:
        state = next_state(rule, state, value, now)
        seen.append(state.active)
    return seen


FLUTTERING = [(40.0 + at, 6.0 + at % 2 * 6) for at in range(10)]


@pytest.mark.parametrize(
    ("rule", "looks", "seen"),
    [
        (ABOVE, [(0, 11), (10, 11), (29, 11), (30, 11)], [False, False, False, True]),
        (ABOVE, [(0, 11), (20, 10), (31, 11), (60, 11), (61, 11)], [False, False, False, False, True]),
        (ABOVE, [(0, 10), (100, 10)], [False, False]),
        (ABOVE, [(0, 11), (30, 11), *FLUTTERING, (60, 5), (70, 6)], [False, *[True] * 11, False, False]),
        (BELOW, [(0, 0.9), (1, 0.89), (2, 0.94), (3, 0.95)], [False, True, True, False]),
        (ABOVE, [(0, 11), (10, None), (30, 11), (40, None), (50, 5)], [False, False, True, True, False]),
        (ABOVE, [(1000, 11), (500, 11), (529, 11), (530, 11)], [False, False, False, True]),
    ],
    ids=[
        *("beyond the threshold for its time", "a value that came back begins anew", "at the threshold is not beyond"),
        *("between the limits nothing changes", "a rule that wants more is raised below"),
        *("what cannot be measured changes nothing", "a clock that went back neither raises early nor waits for ever"),
    ],
)
def test_an_alert_is_raised_beyond_the_threshold_for_its_time_and_resolved_within_clear(
    rule: AlertThresholds, looks: list[tuple[float, float | None]], seen: list[bool]
) -> None:
    assert judged(rule, *looks) == seen


def test_a_look_that_changes_nothing_returns_the_same_state_and_the_text_has_value_and_threshold() -> None:
    quiet, waiting = AlertState(), AlertState(beyond_since=5.0)
    assert next_state(ABOVE, quiet, 3, 10) is quiet
    assert next_state(ABOVE, waiting, 11, 10) is waiting
    assert next_state(ABOVE, waiting, 3, 10) == quiet

    assert ABOVE.text(12345.6) == "retries: 12346 a minute (above 10 a minute)"
    assert BELOW.text(0.51234) == "share: 0.512 (below 0.9)"


@pytest.mark.parametrize("name", RULES)
def test_every_built_in_rule_is_resolved_where_it_is_not_raised(name: str) -> None:
    rule = RULES[name]

    assert rule.name == name
    assert not clear_is_beyond(rule)
    assert not rule.is_beyond(rule.clear)


@pytest.mark.parametrize(
    ("rule", "limits", "threshold", "clear", "seconds"),
    [
        (ABOVE, AlertLimits(), 10, 5, 30),
        (ABOVE, AlertLimits(threshold=100), 100, 50, 30),
        (ABOVE, AlertLimits(threshold=100, clear=99), 100, 99, 30),
        (ABOVE, AlertLimits(clear=1, for_seconds=0), 10, 1, 0),
        (BELOW, AlertLimits(threshold=0.5), 0.5, pytest.approx(0.5278, abs=0.001), 0),
        (RULES["critical_workers"], AlertLimits(threshold=2), 2, 2, 30),
        (RULES["success_rate"], AlertLimits(threshold=0.99), 0.99, 1, 60),
        (RULES["success_rate"], AlertLimits(threshold=1), 1, 1, 60),
    ],
)
def test_configured_limits_replace_the_built_in_ones(
    rule: AlertThresholds, limits: AlertLimits, threshold: float, clear: float, seconds: float
) -> None:
    """Where only the threshold is given, `clear` keeps its share of it."""
    changed = with_limits(rule, limits)

    assert (changed.threshold, changed.clear, changed.for_seconds) == (threshold, clear, seconds)
    assert not clear_is_beyond(changed)


def test_a_clear_on_the_wrong_side_is_found_and_a_whole_share_resolves_an_alert() -> None:
    assert clear_is_beyond(with_limits(ABOVE, AlertLimits(clear=11)))
    assert clear_is_beyond(with_limits(BELOW, AlertLimits(clear=0.8)))

    # of a threshold of 0.99, `clear` would be 1.045, which no share ever is
    rule = with_limits(RULES["success_rate"], AlertLimits(threshold=0.99, for_seconds=0))
    assert judged(rule, (0, 0.98), (10, 0.995), (20, 1.0)) == [True, True, False]


@pytest.mark.parametrize(
    ("name", "limits", "text"),
    [
        ("critical_workers", AlertLimits(), "at 0"),
        ("critical_workers", AlertLimits(threshold=2), "at 2 or below"),
        ("oldest_age", AlertLimits(), "at 60 s or below"),
        ("success_rate", AlertLimits(), "at 0.95 or above"),
        ("success_rate", AlertLimits(threshold=0.99), "at 1"),
    ],
)
def test_what_resolves_an_alert_is_said_in_words(name: str, limits: AlertLimits, text: str) -> None:
    assert resolved_text(with_limits(RULES[name], limits)) == text
