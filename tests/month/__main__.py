"""
A system lives for a month in minutes: `make month`, or `python -m tests.month --days 30`.

Days pass in virtual time (`life.py`); between them come incidents with real processes (`incidents.py`). At the end a
table says what was promised, what was found and whether it holds; the exit code is 1 when a line of it does not.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reefknot.idempotency import decorator
from tests.month.at import made_up_versions
from tests.month.incidents import Incidents
from tests.month.judgement import LEAST_HOURS, Record, judge, table
from tests.month.life import BERLIN, STEPS, Chapter, documents_of
from tests.month.world import World, living_world

CLOCKS_GO_BACK = datetime(2026, 10, 25, tzinfo=UTC)


class Month:
    """The whole story, chapter by chapter."""

    def __init__(self, world: World, record: Record) -> None:
        self._world = world
        self._begin = CLOCKS_GO_BACK - timedelta(hours=record.hours * 2 // 5)
        self.record = record
        self.incidents = Incidents(world.home, record)
        self._hour = 0

    @property
    def _now(self) -> datetime:
        return self._begin + timedelta(hours=self._hour)

    def live(self) -> None:
        """Live it from the first hour to the last."""
        record, incidents, hours = self.record, self.incidents, self.record.hours
        self._world.plan(self._begin, timedelta(hours=hours))
        story = [incidents.upgrade, incidents.killed_worker, incidents.rollback]
        story += [incidents.killed_router, incidents.full_disk, incidents.upgrade]
        is_long = hours >= LEAST_HOURS
        at_once = 1 if is_long else 3
        breaks = [story[number : number + at_once] for number in range(0, len(story), at_once)]
        first, last = min(24, hours // 6), min(24, hours // 4)
        self._pass(first)
        if is_long:
            record.commands.append(incidents.commands(self._now))
        for number, due in enumerate(breaks, 1):
            self._pass(first + number * (hours - first - last) // len(breaks) - self._hour)
            for incident in due:
                incident(self._now)
        self._mend()
        self._pass(hours - self._hour)
        if is_long:
            record.commands.append(incidents.commands(self._now))
        for words in (("audit", "verify"), ("audit", "replay"), ("store", "check")):
            incidents.check(self._now, *words)
        self._look_around()

    def live_quietly(self) -> None:
        """Live it without any trouble or incident."""
        self._pass(self.record.hours)
        self._look_around()

    def _mend(self) -> None:
        """All trouble ends, and a person sees to what could not be read."""
        record, incidents = self.record, self.incidents
        record.failed = len(self._world.repository.unreadable) + len(self._world.unmounted)
        record.failed += sum(job.status == "error" for job in record.accepted.values())
        record.quarantined = incidents.quarantined(self._now)
        self._world.calm()
        self._world.mend()
        incidents.check(self._now, "quarantine", "requeue", "--source", "code")

    def _pass(self, hours: int) -> None:
        began = time.monotonic()
        with made_up_versions(self.incidents.versions):
            Chapter(self._world, self.record, self._begin, range(self._hour, self._hour + hours)).run()
        self._hour += hours
        self.incidents.hour = self._hour
        took = time.monotonic() - began
        print(f"{self._now:%Y-%m-%d %H:%M} UTC, {hours} hours in {took:.0f} s", file=sys.stderr, flush=True)

    def _look_around(self) -> None:
        """Note what is there at the end."""
        record, world = self.record, self._world
        record.left = self.incidents.quarantined(self._now, "--source", "code")
        record.nights_due = self._nights()
        with made_up_versions(self.incidents.versions):
            for source, words in world.texts.items():
                record.wanted[source] = words
                record.found[source] = asyncio.run(documents_of(world.home, source))

    def _nights(self) -> list[str]:
        """The local days whose 02:30 is within the time that was lived."""
        days = set()
        for hour in range(self.record.hours):
            local = (self._begin + timedelta(hours=hour)).astimezone(BERLIN)
            if self._begin < local.replace(hour=2, minute=30, fold=0).astimezone(UTC) < self._now:
                days.add(str(local.date()))
        return sorted(days)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory where there is one: what a disk does in a month is not what this is about."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="reefknot-month-", dir=shared if shared.is_dir() else None) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def month(hours: int) -> Iterator[Month]:
    """A month of this many hours, about to begin."""
    retention = timedelta(hours=max(3, hours // 15))
    with _folder() as folder, living_world(folder / "home", retention=retention) as world:
        (world.home / "month_steps.py").write_text(STEPS)
        sys.path.insert(0, str(world.home))
        try:
            yield Month(world, Record(hours, retention / timedelta(hours=1)))
        finally:
            sys.path.remove(str(world.home))
            sys.modules.pop("month_steps", None)
            decorator._files.pop("effect", None)  # the next month has a file of its own


def main() -> int:
    parser = argparse.ArgumentParser(description="a system lives for a month in minutes")
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--hours", type=int, help="instead of days")
    given = parser.parse_args()
    hours = given.hours or 24 * given.days
    logging.getLogger("reefknot").setLevel(logging.CRITICAL)
    began = time.monotonic()
    with month(hours) as living:
        living.live()
    lines = judge(living.record)
    print(table(lines))
    print(f"{hours} hours in {time.monotonic() - began:.0f} s")
    return 0 if all(one.holds for one in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
