"""
A system lives for a month in minutes: `make month`, or `python -m tests.month --days 30`.

Days pass in virtual time (`life.py`); between them come incidents with real processes (`incidents.py`). At the end a
table says what was promised, what was found and whether it holds; the exit code is 1 when a line of it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from tests.month.at import made_up_versions
from tests.month.incidents import Incidents
from tests.month.life import STEPS, Chapter, Record, documents_of
from tests.month.world import World, living_world

CLOCKS_GO_BACK = datetime(2026, 10, 25, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
SIZE_BOUND = 1.5
MEMORY_BOUND = 1.5
SLOWER_BOUND = 1.5
LEAST_HOURS = 72
"""Hours below which a month is a short one."""
LEAST_CPU_S = 0.02
"""CPU time below which an answer counts as quick, whatever it took on the first day."""
ROOM_BYTES = 32 << 20
"""Growth of memory that is no leak: caches and modules that are first needed later."""


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    promise: str
    figure: str
    holds: bool


class Month:
    """The whole story, chapter by chapter."""

    def __init__(self, world: World, *, hours: int) -> None:
        self._world = world
        self._hours = hours
        self._begin = CLOCKS_GO_BACK - timedelta(hours=hours * 2 // 5)
        self.record = Record()
        self.incidents = Incidents(world.home)
        self._commands: list[dict[str, float]] = []
        self._hour = 0

    @property
    def _is_long(self) -> bool:
        """Whether there is time for every incident, and for judging growth: caches fill, retention has to begin."""
        return self._hours >= LEAST_HOURS

    @property
    def _now(self) -> datetime:
        return self._begin + timedelta(hours=self._hour)

    def live(self) -> list[Line]:
        """Live it, and judge it."""
        self._world.plan(self._begin, timedelta(hours=self._hours))
        incidents = self.incidents
        chapters = [incidents.upgrade, incidents.killed_worker, incidents.rollback]
        if self._is_long:
            chapters += [incidents.killed_router, incidents.full_disk, incidents.upgrade]
        first, last = min(24, self._hours // 6), min(24, self._hours // 4)
        self._pass(first)
        if self._is_long:
            self._commands.append(incidents.commands(self._now))
        for number, incident in enumerate(chapters, 1):
            self._pass(first + number * (self._hours - first - last) // len(chapters) - self._hour)
            if incident == incidents.rollback:
                incidents.upgrade(self._now)  # and at once it is regretted
            incident(self._now)
        quarantined = self._quarantined()
        self._world.calm()
        self._world.mend()
        incidents.check(self._now, "quarantine", "requeue", "--source", "code")
        self._pass(self._hours - self._hour)
        if self._is_long:
            self._commands.append(incidents.commands(self._now))
        incidents.check(self._now, "audit", "verify")
        incidents.check(self._now, "audit", "replay")
        incidents.check(self._now, "store", "check")
        with made_up_versions(incidents.versions):
            return list(self._lines(quarantined))

    def _pass(self, hours: int) -> None:
        began = time.monotonic()
        with made_up_versions(self.incidents.versions):
            Chapter(self._world, self.record, self._begin, range(self._hour, self._hour + hours)).run()
        self._hour += hours
        took = time.monotonic() - began
        print(f"{self._now:%Y-%m-%d %H:%M} UTC, {hours} hours in {took:.0f} s", file=sys.stderr)

    def _quarantined(self) -> int:
        """Items in quarantine, as a command says it."""
        listed = self.incidents.call(self._now, "quarantine", "list", "--source", "code", "--json")
        return listed.stdout.count('"id"')

    def _lines(self, quarantined: int) -> Iterator[Line]:
        record, incidents = self.record, self.incidents
        accepted, wrong = sum(record.accepted.values()), _wrong_ends(record)
        yield Line("every accepted job ended once, as it should", f"{accepted} accepted, {wrong} not so", not wrong)
        yield Line("nothing that had succeeded ran again", f"{record.again} executions", not record.again)
        lost = incidents.accepted - incidents.ended
        yield Line("no job lost in an incident", f"{incidents.accepted} accepted, {lost} lost", not lost)
        upgrades, rollbacks = incidents.done.count("upgrade"), incidents.done.count("rollback")
        yield Line(
            "upgrades and a rollback",
            f"{upgrades} and {rollbacks}",
            (upgrades, rollbacks) == (3 if self._is_long else 2, 1),
        )
        yield Line("incidents", ", ".join(incidents.broken) or "all as promised", not incidents.broken)
        nights = sorted(_local_day(one) for one in record.nights)
        expected = [str(day) for day in self._days_of_nights()]
        yield Line("a nightly job for each night", f"{len(nights)} of {len(expected)}", nights == expected)
        for source, words in self._world.texts.items():
            found = asyncio.run(documents_of(self._world.home, source))
            absent, more = (
                set(words) - set(found),
                [one for one, number in found.items() if number > 1 or one not in words],
            )
            figure = f"{len(found)} there, {len(absent)} missing, {len(more)} too many"
            yield Line(f"every document of {source} once", figure, not absent and not more)
        poison = len(self._world.poison)
        yield Line("unreadable items wait for a person", f"{quarantined} of {poison}", quarantined == poison)
        yield from self._growth()
        yield Line("pages answered", ", ".join(record.refused[:3]) or "all with 200", not record.refused)
        yield Line("the live page went on", f"{record.live_messages} messages", record.live_messages > self._hours)

    def _days_of_nights(self) -> list[date]:
        """The local days whose 02:30 is within the time that was lived."""
        days, moment = set(), self._begin
        while moment < self._now:
            local = moment.astimezone(BERLIN)
            night = local.replace(hour=2, minute=30, fold=0)
            if self._begin < night.astimezone(UTC) < self._now:
                days.add(local.date())
            moment += timedelta(hours=1)
        return sorted(days)

    def _growth(self) -> Iterator[Line]:
        sizes, memory, pages = self.record.sizes, self.record.memory, self.record.pages
        if not self._is_long:
            return
        figure = f"{_mb(sizes[1])}, at the end {_mb(sizes[-1])}"
        yield Line(f"files at most {SIZE_BOUND} × those of the first week", figure, sizes[-1] <= sizes[1] * SIZE_BOUND)
        fits = memory[-1] <= max(memory[0] * MEMORY_BOUND, memory[0] + ROOM_BYTES)
        yield Line("memory as on the first day", f"{_mb(memory[0])}, at the end {_mb(memory[-1])}", fits)
        yield _compared("no page slower than 1.5 × the first day", pages[0], pages[-1])
        yield _compared("no command slower than 1.5 × the first day", *self._commands)


def _compared(promise: str, first: dict[str, float], last: dict[str, float]) -> Line:
    ratios = {name: last[name] / max(first[name], LEAST_CPU_S) for name in last}
    name, worst = max(ratios.items(), key=lambda one: one[1])
    figure = f"{name}: {first[name] * 1000:.0f} ms, then {last[name] * 1000:.0f} ms of CPU"
    return Line(promise, figure, worst <= SLOWER_BOUND)


def _wrong_ends(record: Record) -> int:
    right = {f"{expected}: {expected}": number for expected, number in record.accepted.items()}
    missing = sum(abs(number - record.ends[name]) for name, number in right.items())
    return missing + sum(number for name, number in record.ends.items() if name not in right)


def _local_day(name: str) -> str:
    moment = datetime.fromisoformat(name.partition("@")[2])
    return str(moment.astimezone(BERLIN).date())


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def table(lines: list[Line]) -> str:
    """The lines as people read them."""
    width = max(len(one.promise) for one in lines)
    return "\n".join(f"{'ok    ' if one.holds else 'BROKEN'}  {one.promise:<{width}}  {one.figure}" for one in lines)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory where there is one: what a disk does in a month is not what this is about."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="reefknot-month-", dir=shared if shared.is_dir() else None) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def lived(hours: int) -> list[Line]:
    """The table of a month of this many hours."""
    retention = timedelta(hours=max(4, hours / 15))
    with _folder() as folder, living_world(folder / "home", retention=retention) as world:
        (world.home / "month_steps.py").write_text(STEPS)
        sys.path.insert(0, str(world.home))
        try:
            return Month(world, hours=hours).live()
        finally:
            sys.path.remove(str(world.home))
            sys.modules.pop("month_steps", None)


def main() -> int:
    parser = argparse.ArgumentParser(description="a system lives for a month in minutes")
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--hours", type=int, help="instead of days")
    given = parser.parse_args()
    hours = given.hours or 24 * given.days
    logging.getLogger("reefknot").setLevel(logging.CRITICAL)
    began = time.monotonic()
    lines = lived(hours)
    print(table(lines))
    print(f"{hours} hours in {time.monotonic() - began:.0f} s")
    return 0 if all(one.holds for one in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
