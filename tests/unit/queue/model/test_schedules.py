"""Due times by arithmetic: intervals, cron, clock changes, leap days, and what was missed."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import ParameterError
from reefknot.queue.model import schedules
from reefknot.queue.model.schedules import GRACE, NOTHING_DUE, DueTimes, Timetable, due, due_text, next_due, parse
from tests.rows import for_each_row

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def following(timetable: Timetable, at: datetime, count: int) -> list[datetime]:
    """The due times after a moment, each after the one before."""
    times = [at]
    for _ in range(count):
        due_at = next_due(timetable, times[-1])
        assert due_at is not None
        assert due_at > times[-1]
        times.append(due_at)
    return times[1:]


def local_times(cron: str, zone: str, start: str, count: int) -> list[str]:
    """The first due times from a local time on, as that zone's clocks show them."""
    here = ZoneInfo(zone)
    at = datetime.fromisoformat(start).replace(tzinfo=here)
    times = following(parse(cron=cron, time_zone=zone), at, count)
    return [one.astimezone(here).strftime("%d %H:%M %Z") for one in times]


@for_each_row(
    ("written", "words"),
    [
        ({"every": "90s"}, "every 90s"),
        ({"every": "15m"}, "every 15m"),
        ({"every": "120m"}, "every 2h"),
        ({"every": "7d"}, "every 7d"),
        ({"every": "1.5s"}, "every 1.5s"),
        ({"cron": "0  7 * * 1-5"}, "0 7 * * 1-5 (At 07:00 on Monday through Friday, UTC)"),
        ({"cron": "*/10 * * * *", "time_zone": BERLIN}, f"*/10 * * * * (Every 10th minute, {BERLIN})"),
        ({}, "by hand"),
    ],
)
def test_a_timetable_is_told_in_words(written: dict[str, Any], words: str) -> None:
    assert str(parse(**written)).replace(" of every hour", "") == words


@for_each_row("every", ["0s", "0.9s", "367d", "15", "15 m", "m", "-5m", "1e3s", "", "99999999999s", "1m\n"])
def test_an_interval_that_cannot_be_is_refused_with_what_is_accepted(every: str) -> None:
    with pytest.raises(ParameterError, match=r"every=.* is not accepted: a duration from 1s to 366d, such as 90s"):
        parse(every)
    with pytest.raises(ParameterError, match="either every or cron, not both"):
        parse("1h", "0 * * * *")


@for_each_row(
    "cron",
    [
        *("", "* * * *", "* * * * * *", "60 * * * *", "0 24 * * *", "0 0 0 * *", "0 0 * 13 *", "0 0 * * 8", "@daily"),
        *("0 0 * * X", "*/0 * * * *", "5-1 * * * *", "x" * 300, "0 0 * * 1#6"),
    ],
)
def test_a_cron_expression_that_is_none_is_refused_with_what_is_accepted(cron: str) -> None:
    with pytest.raises(ParameterError, match=r"cron=.* is not accepted: five fields, minute hour day-of-month month"):
        parse(cron=cron)


def test_only_a_cron_expression_that_is_due_some_day_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 February never is; the fifth Sunday of a February, and the first of its days by 30, are."""
    for cron in ("0 0 */30 2 *", "0 0 * 2 7#5"):
        assert next_due(parse(cron=cron), utc("2026-01-01")) is not None
    for cron in ("0 0 30 2 *", "0 0 31 2,4,6,9,11 *"):
        with pytest.raises(ParameterError, match="due at least once in fifty years"):
            parse(cron=cron)
    monkeypatch.setattr(schedules, "CronSim", lambda *_, **__: iter(()))  # the parser gives up: it knows no such day
    with pytest.raises(ParameterError, match="due at least once in fifty years"):
        parse(cron="0 0 1 1 *")


@for_each_row("zone", ["Europe/Berln", "Europe", "../etc/passwd", "", "x" * 300, "\0"])
def test_a_zone_that_is_none_is_refused_and_the_near_one_named(zone: str) -> None:
    accepted = r"time_zone=.* is not accepted: the name of a time zone, such as UTC"
    with pytest.raises(ParameterError, match=accepted) as caught:
        parse("1h", time_zone=zone)
    assert ("did you mean 'Europe/Berlin'" in str(caught.value)) == (zone == "Europe/Berln")


def test_due_times_in_ids_are_utc_and_as_short_as_they_are() -> None:
    at = datetime(2026, 3, 29, 7, tzinfo=ZoneInfo(BERLIN))
    assert due_text(at) == "2026-03-29T05:00:00Z"
    assert due_text(at + timedelta(milliseconds=1500)) == "2026-03-29T05:00:01.500Z"


def test_intervals_are_aligned_so_that_all_processes_agree() -> None:
    timetable = parse("15m")
    for after in ("2026-01-01T10:00:00", "2026-01-01T10:00:00.001", "2026-01-01T10:14:59.999"):
        assert next_due(timetable, utc(after)) == utc("2026-01-01T10:15:00")


def test_a_timetable_by_hand_is_never_due() -> None:
    assert next_due(parse(), utc("2026-01-01")) is None
    assert due(parse(), utc("2026-01-01"), utc("2030-01-01")) == NOTHING_DUE


def test_a_time_that_the_spring_change_skips_is_due_right_after_it() -> None:
    in_berlin = local_times("30 2 * * *", BERLIN, "2026-03-28T00:00", 3)
    assert in_berlin == ["28 02:30 CET", "29 03:00 CEST", "30 02:30 CEST"]
    in_new_york = local_times("30 2 * * *", NEW_YORK, "2026-03-07T00:00", 3)
    assert in_new_york == ["07 02:30 EST", "08 03:00 EDT", "09 02:30 EDT"]


def test_a_time_that_the_autumn_change_repeats_is_due_once() -> None:
    assert local_times("30 2 * * *", BERLIN, "2026-10-24T12:00", 2) == ["25 02:30 CEST", "26 02:30 CET"]
    assert local_times("30 1 * * *", NEW_YORK, "2026-10-31T12:00", 2) == ["01 01:30 EDT", "02 01:30 EST"]


def test_the_second_time_through_the_repeated_hour_nothing_of_the_first_is_due_again() -> None:
    for zone, change in ((BERLIN, "2026-10-25T00:00"), (NEW_YORK, "2026-11-01T05:00")):
        timetable = parse(cron="30 1,2 * * *", time_zone=zone)
        for minute in range(180):
            assert following(timetable, utc(change) + timedelta(minutes=minute), 1)


def test_every_twenty_minutes_goes_on_through_both_changes() -> None:
    for zone, days in ((BERLIN, ("2026-03-28", "2026-10-24")), (NEW_YORK, ("2026-03-07", "2026-10-31"))):
        for day in days:
            noon = utc(f"{day}T12:00:00")
            times = [noon, *following(parse(cron="*/20 * * * *", time_zone=zone), noon, 144)]
            assert {later - earlier for earlier, later in pairwise(times)} == {timedelta(minutes=20)}


def test_a_leap_day_is_due_in_leap_years() -> None:
    assert [one.year for one in following(parse(cron="0 12 29 2 *"), utc("2095-01-01"), 3)] == [2096, 2104, 2108]
    assert local_times("0 0 28-29 2 *", BERLIN, "2028-01-01T00:00", 2) == ["28 00:00 CET", "29 00:00 CET"]


NIGHTLY = parse(cron="0 3 * * *")
HOURLY = parse("1h")


def test_nothing_is_due_between_due_times_nor_at_the_last_one_again() -> None:
    last = utc("2026-05-04T03:00:00")
    for timetable in (NIGHTLY, HOURLY):
        for now in (last, utc("2026-05-04T03:59:59.999")):
            assert due(timetable, last, now) == NOTHING_DUE


def test_a_due_time_is_submitted_when_it_comes() -> None:
    now = utc("2026-05-05T03:00:00")
    missing: tuple[Any, ...] = ("once", "skip")
    for missed in missing:
        assert due(parse("1h", missed=missed), utc("2026-05-05T02:00:00"), now) == DueTimes(now, 0)
        assert due(parse(cron="0 3 * * *", missed=missed), utc("2026-05-04T03:00:00"), now) == DueTimes(now, 0)


def test_all_that_was_missed_is_caught_up_once() -> None:
    now = utc("2026-05-09T10:20:00")
    assert due(NIGHTLY, utc("2026-05-04T03:00:00"), now) == DueTimes(utc("2026-05-09T03:00:00"), 4)
    assert due(HOURLY, utc("2026-05-09T02:00:00"), now) == DueTimes(utc("2026-05-09T10:00:00"), 7)


def test_or_not_at_all_beyond_the_grace() -> None:
    nightly, hourly = parse(cron="0 3 * * *", missed="skip"), parse("1h", missed="skip")
    last, now = utc("2026-05-04T03:00:00"), utc("2026-05-09T10:20:00")
    assert due(nightly, last, now) == DueTimes(None, 5)
    assert due(hourly, utc("2026-05-09T02:00:00"), now) == DueTimes(None, 8)
    late = utc("2026-05-09T03:00:00") + GRACE
    assert due(nightly, last, late) == DueTimes(utc("2026-05-09T03:00:00"), 4)
    assert due(nightly, last, late + timedelta(milliseconds=1)) == DueTimes(None, 5)


def test_a_clock_that_jumps_back_repeats_nothing() -> None:
    last = utc("2026-05-09T03:00:00")
    for timetable in (NIGHTLY, HOURLY, parse(cron="* * * * *")):
        for back in (1, 3600, 86_400 * 400):
            assert due(timetable, last, last - timedelta(seconds=back)) == NOTHING_DUE


def test_years_of_missed_minutes_cost_no_more_than_a_thousand() -> None:
    for cron, latest in (("* * * * *", "2026-05-09T10:20"), ("* * * 1 *", "2026-01-31T23:59")):
        found = due(parse(cron=cron), utc("2016-01-01"), utc("2026-05-09T10:20:30"))
        assert found == DueTimes(utc(latest), schedules.MOST_COUNTED - 1)


ZONES = (BERLIN, NEW_YORK, "Australia/Lord_Howe", "America/Santiago", "Asia/Kathmandu", "UTC")
CRONS = ("30 2 * * *", "*/20 * * * *", "0 */2 * * *", "15 1,2,3 * * *", "0,30 2 * * *", "0 0 * * *", "30 0 * * 0")
CHANGES = ("2026-03-29T01:00", "2026-10-25T01:00", "2026-03-08T07:00", "2026-11-01T06:00", "2026-04-04T15:00")


@given(
    st.sampled_from(ZONES),
    st.sampled_from(CRONS),
    st.sampled_from(CHANGES),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_at_clock_changes_both_ways_to_count_agree(zone: str, cron: str, change: str, dice: Random, far: bool) -> None:
    """The due times one by one, and the decision about many of them, whether few or too many to count."""
    timetable = parse(cron=cron, time_zone=zone)
    last, now = (utc(change) + timedelta(minutes=dice.uniform(*span)) for span in ((-2000, -200), (-180, 180)))
    times, at = [], last
    while (due_at := next_due(timetable, at)) is not None and due_at <= now:
        times.append(at := due_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "MOST_COUNTED", 1 if far else 1000)
        found = due(timetable, last, now)
    assert found.latest == (times[-1] if times else None)
    assert far or found.missed == max(0, len(times) - 1)


def test_the_last_due_times_are_those_between_two_moments() -> None:
    """Neither the one after which they begin, nor the one before which they end, and no more than are wanted."""
    after, until = utc("2026-03-01T05:00"), utc("2026-03-01T13:00")
    for timetable, hours in ((HOURLY, [10, 11, 12]), (parse(cron="0 * * * *"), [10, 11, 12]), (parse(), [])):
        expected = [utc(f"2026-03-01T{hour}:00") for hour in hours]
        assert list(schedules.last_due_times(timetable, after, until, most=3)) == expected
        assert schedules.last_due_times(timetable, until, until, most=3) == []
    assert list(schedules.last_due_times(parse(cron="0 6 * * *"), after, until, most=3)) == [utc("2026-03-01T06:00")]
