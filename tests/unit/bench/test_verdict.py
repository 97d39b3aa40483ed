"""A slow contestant is flagged, a fast one is not, and the limit itself is met."""

import pytest

from bench.verdict import AheadOf, AtMost, AtMostSeconds, AtMostTimes, Target, judge

FIGURES = {"hand loop": 2e-6, "ours": 2.6e-6, "peer": 3e-6, "other peer": 9e-6}


@pytest.mark.parametrize(
    ("target", "missed"),
    [
        (AtMostTimes(1.3, "hand loop"), None),
        (AtMostTimes(1.29, "hand loop"), "1.30 × hand loop"),
        (AtMostTimes(1.0, "peer"), None),
        (AtMostSeconds(2.6e-6), None),
        (AtMostSeconds(2.5e-6), "2.6 µs"),
        (AtMost(2.6e-6, "messages"), None),
        (AtMost(2.5e-6, "messages"), "2.6e-06"),
        (AheadOf(("peer", "other peer")), None),
        (AheadOf(("peer", "hand loop")), "behind hand loop"),
        (AheadOf(("ours",)), "behind ours"),
    ],
)
def test_a_target_is_met_at_its_limit_and_missed_beyond(target: Target, missed: str | None) -> None:
    assert judge(target, "ours", FIGURES).missed == missed


def test_a_contestant_made_ten_times_slower_misses_every_target_and_the_one_ahead_is_named() -> None:
    slow = FIGURES | {"ours": 26e-6}
    targets: list[Target] = [AtMostTimes(1.3, "hand loop"), AtMostSeconds(5e-6), AheadOf(("peer", "other peer"))]
    assert [judge(target, "ours", FIGURES).missed for target in targets] == [None, None, None]
    assert None not in [judge(target, "ours", slow).missed for target in targets]
    assert str(judge(AheadOf(("peer", "other peer")), "ours", FIGURES | {"ours": 5e-6})) == "MISSED: behind peer"


def test_a_target_reads_as_it_is_promised() -> None:
    targets: list[Target] = [AtMostTimes(1.3, "hand loop"), AtMostTimes(1.0, "import tenacity"), AtMostSeconds(5e-6)]
    words = ["≤ 1.3 × hand loop", "≤ import tenacity", "≤ 5 µs", "≤ 8 messages", "ahead of every peer"]
    assert [str(target) for target in [*targets, AtMost(8, "messages"), AheadOf(("peer",))]] == words
