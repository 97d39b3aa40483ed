"""
Timetables: the due times of a schedule, as arithmetic.

A timetable is an interval, a cron expression in a time zone, or neither: then it is due only when a person asks. The
due times of an interval are its multiples since 1970, UTC, so all processes agree on them. A cron expression is read as
Debian's cron does, local time: a time that a clock change skips is due right after the change, a time that occurs twice
is due once, and `*` in minutes or hours goes on by the hour whatever the clock shows.

`due` decides on the due times since the last one: the latest of them is submitted, the others were missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError
from msgspec import Struct

from reefknot.core.checks import suggest
from reefknot.errors import ParameterError

Missed = Literal["once", "skip"]

GRACE = timedelta(seconds=60)
"""How late a due time may be handled and still count as on time."""
MOST_COUNTED = 1000
"""Most missed due times of a cron expression that are counted; beyond that the count stays."""
SHORTEST_MS = 1000
LONGEST_MS = 366 * 86_400_000
LONGEST_CRON = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_CLOCK_CHANGE = timedelta(hours=3)
"""More than any clock change moves local time."""
_UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_EVERY = "a duration from 1s to 366d, such as 90s, 15m, 2h, 7d"
_CRON = (
    "five fields, minute hour day-of-month month day-of-week, such as '0 7 * * 1-5', that are due at least once in"
    " fifty years"
)
_ZONE = "the name of a time zone, such as UTC or Europe/Berlin"


class Timetable(Struct, frozen=True):
    """A checked timetable. Without an interval and a cron expression it is due only when a person asks."""

    every_ms: int = 0
    cron: str = ""
    time_zone: str = "UTC"
    missed: Missed = "once"

    def __str__(self) -> str:
        """The timetable in words."""
        if self.every_ms:
            unit = max((one for one in _UNITS if self.every_ms % _UNITS[one] == 0), key=_UNITS.__getitem__, default="")
            return f"every {self.every_ms // _UNITS[unit]}{unit}" if unit else f"every {self.every_ms / 1000:g}s"
        if not self.cron:
            return "by hand"
        return f"{self.cron} ({CronSim(self.cron, _EPOCH).explain()}, {self.time_zone})"


class DueTimes(Struct, frozen=True):
    """The answer of `due`: the time to submit now, if any, and the number of those that were passed over."""

    latest: datetime | None = None
    missed: int = 0


NOTHING_DUE = DueTimes()


def parse(
    every: str | None = None, cron: str | None = None, *, time_zone: str = "UTC", missed: Missed = "once"
) -> Timetable:
    """A timetable as people write it; `ParameterError` names the key and says what is accepted."""
    if every is not None and cron is not None:
        raise ParameterError("cron", cron, "either every or cron, not both")
    zone = _checked_zone(time_zone)
    if every is not None:
        return Timetable(_milliseconds(every), "", zone, missed)
    if cron is None:
        return Timetable(0, "", zone, missed)
    timetable = Timetable(0, " ".join(cron.split()), zone, missed)
    is_cron = len(cron) <= LONGEST_CRON and len(cron.split()) == len("mhdMw")
    try:
        if not is_cron or next_due(timetable, _EPOCH) is None:
            raise ParameterError("cron", cron, _CRON)
    except CronSimError as error:
        raise ParameterError("cron", cron, f"{_CRON} ({str(error).lower()})") from error
    return timetable


def _milliseconds(every: str) -> int:
    found = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])\Z", every)
    length = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not SHORTEST_MS <= length <= LONGEST_MS:
        raise ParameterError("every", every, _EVERY)
    return length


def _checked_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ParameterError("time_zone", name, _ZONE + suggest(name, sorted(available_timezones()))) from error
    return name


def next_due(timetable: Timetable, after: datetime) -> datetime | None:
    """The first due time after this one, UTC; None for a timetable that is never due by itself."""
    if timetable.every_ms:
        return _at_ms((_ms(after) // timetable.every_ms + 1) * timetable.every_ms)
    if not timetable.cron:
        return None
    # The second time through an hour that occurs twice, cronsim begins with due times of the first time through it.
    return next((one for one in _cron_times(timetable, after) if one > after), None)


def due(timetable: Timetable, last: datetime, now: datetime) -> DueTimes:
    """
    The decision on the due times after `last` up to `now`.

    With `once`, the latest is submitted, however late it is; with `skip`, only if it is no older than the grace.
    """
    first = next_due(timetable, last)
    if first is None or first > now:
        return NOTHING_DUE
    latest, number = _passed(timetable, first, now)
    if timetable.missed == "skip" and now - latest > GRACE:
        return DueTimes(None, number)
    return DueTimes(latest, number - 1)


def last_due_times(timetable: Timetable, after: datetime, until: datetime, *, most: int) -> list[datetime]:
    """The last due times after one moment and before another, at most `most`, the oldest first."""
    found: list[datetime] = []
    if timetable.every_ms:
        every = timetable.every_ms
        last = (_ms(until) - 1) // every
        first = max(_ms(after) // every + 1, last - most + 1)
        found = [_at_ms(number * every) for number in range(first, last + 1)]
    elif timetable.cron:
        backwards = (one for one in _cron_times(timetable, until + _CLOCK_CHANGE, reverse=True) if one < until)
        found = sorted(islice(takewhile(lambda one: one > after, backwards), most))
    return found


def _passed(timetable: Timetable, first: datetime, now: datetime) -> tuple[datetime, int]:
    """The latest due time up to now, and the number of those from the first one on."""
    if timetable.every_ms:
        latest = _at_ms(_ms(now) // timetable.every_ms * timetable.every_ms)
        return latest, (_ms(latest) - _ms(first)) // timetable.every_ms + 1
    counted = list(_up_to(now, islice(_cron_times(timetable, first - _MILLISECOND), MOST_COUNTED)))
    if len(counted) < MOST_COUNTED:
        return counted[-1], len(counted)
    # Far behind: a look backwards tells where the last ones are, and those count as they come forwards. It begins
    # behind now, because a clock change may put a due time later.
    near = next(one for one in _cron_times(timetable, now + _CLOCK_CHANGE, reverse=True) if one <= now)
    return max(near, *_up_to(now, _cron_times(timetable, near - _CLOCK_CHANGE))), MOST_COUNTED


def _up_to(now: datetime, times: Iterator[datetime]) -> Iterator[datetime]:
    return takewhile(lambda one: one <= now, times)


def _cron_times(timetable: Timetable, start: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """The due times of a cron expression from a moment on, or back from it, in UTC."""
    local = start.astimezone(UTC if timetable.time_zone == "UTC" else ZoneInfo(timetable.time_zone))
    return (one.astimezone(UTC) for one in CronSim(timetable.cron, local, reverse=reverse))


def due_text(due_at: datetime) -> str:
    """A due time in ids and messages: UTC, with fractions of a second only where it has some."""
    whole = "seconds" if due_at.microsecond == 0 else "milliseconds"
    return due_at.astimezone(UTC).isoformat(timespec=whole).replace("+00:00", "Z")


def _ms(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND


def _at_ms(milliseconds: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=milliseconds)
