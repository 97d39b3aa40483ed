"""Two readings of one moment."""

from reefknot.core.time import Moment, Timeline, agreed_boot_time, milliseconds
from tests.rows import for_each_row


def test_wall_time_goes_on_with_the_steady_clock_from_where_it_stood() -> None:
    timeline = Timeline(steady=100.0, wall=1_700_000_000.0)
    assert timeline.at(100.0) == Moment(100_000, 1_700_000_000_000)
    assert timeline.at(101.5) == Moment(101_500, 1_700_000_001_500)


@for_each_row(("seconds", "expected"), [(0, 0), (-1, 0), (0.0001, 1), (1.5, 1500), (60, 60_000)])
def test_a_duration_is_never_rounded_down_to_nothing(seconds: float, expected: int) -> None:
    assert milliseconds(seconds) == expected


@for_each_row(
    ("known", "believed", "in_use", "agreed"),
    [
        (None, 5_000, False, 5_000),
        (None, 5_000, True, 5_000),
        (4_500, 5_000, False, 4_500),
        (4_500, 5_000, True, 4_500),
        (5_000, 65_000, True, 5_000),
        (65_000, 5_000, True, 65_000),
        (5_000, 65_000, False, 65_000),
        (6_000, 5_000, False, 5_000),
    ],
)
def test_a_boot_began_when_its_first_process_said_as_long_as_that_is_in_use(
    known: int | None, believed: int, in_use: bool, agreed: int
) -> None:
    assert agreed_boot_time(known, believed, in_use=in_use) == agreed
