"""
Judgement of a month: from a `Record` of what happened to the lines of a table, each of which holds or is broken.

Nothing here touches a system. So a record that was made up shows that a line catches what it is there for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SIZE_BOUND = 1.5
MEMORY_BOUND = 1.5
SLOWER_BOUND = 1.5
LEAST_HOURS = 72
"""Hours below which growth is not judged: caches have to fill, and retention has to begin."""
LEAST_CPU_S = 0.02
"""CPU time below which an answer counts as quick, whatever it took on the first day."""
ROOM_BYTES = 32 << 20
"""Growth of memory that is no leak: caches and modules that are first needed later."""
INCIDENTS = {"upgrade": 3, "rollback": 1, "killed worker": 1, "killed router": 1, "full disk": 1}
TROUBLE = ("code down", "code limited", "code unreadable", "mail down", "folder down", "vault down")


class Job(NamedTuple):
    """An accepted job: the status that it should end with, and the hour of the month in which it came."""

    status: str
    hour: int


@dataclass
class Record:
    """What happened in a month."""

    hours: int
    retention_hours: float
    accepted: dict[str, Job] = field(default_factory=dict)
    """Accepted jobs by their ids."""
    results: dict[str, str] = field(default_factory=dict)
    """The status that the caller of each job was given."""
    ends: Counter[str] = field(default_factory=Counter)
    """How often the audit log says of each job that it ended."""
    again: Counter[str] = field(default_factory=Counter)
    """Executions of jobs beyond the first and its retries."""
    happened: Counter[str] = field(default_factory=Counter)
    """Incidents of the system, and hours in which each trouble of a source was met."""
    broken: list[str] = field(default_factory=list)
    """What did not hold in an incident, in words."""
    nights_due: list[str] = field(default_factory=list)
    nights: list[str] = field(default_factory=list)
    """Local days on which the nightly job ran."""
    wanted: dict[str, set[str]] = field(default_factory=dict)
    """By source, the documents that there should be."""
    found: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """By source, how often each document is there."""
    failed: int = 0
    """Items and jobs that cannot be processed until a person has mended them."""
    quarantined: int = 0
    """Items and jobs in quarantine before a person mends them."""
    left: int = 0
    """Items of sources that were still there after that."""
    keys: list[int] = field(default_factory=list)
    """Idempotency keys at the end of each chapter."""
    overdue: Counter[str] = field(default_factory=Counter)
    """Records that were there an hour after retention should have removed them."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the store's files at the end of each chapter, without the copies that upgrades keep."""
    memory: list[int] = field(default_factory=list)
    """Resident bytes of the system's process at the end of each chapter."""
    pages: list[dict[str, float]] = field(default_factory=list)
    """For each chapter the shortest CPU time in which a page was answered."""
    commands: list[dict[str, float]] = field(default_factory=list)
    """For the first and the last day the shortest CPU time of a command."""
    refused: list[str] = field(default_factory=list)
    """Pages that were not answered with 200."""
    live_messages: int = 0


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    promise: str
    figure: str
    holds: bool


def judge(record: Record) -> list[Line]:
    """Every promise of a month, with what was found."""
    lines = [*_jobs(record), *_events(record), *_documents(record), *_retention(record), *_pages(record)]
    return [*lines, *_growth(record)] if record.hours >= LEAST_HOURS else lines


def table(lines: Iterable[Line]) -> str:
    """The lines as people read them."""
    lines = list(lines)
    width = max(len(one.promise) for one in lines)
    return "\n".join(f"{'ok    ' if one.holds else 'BROKEN'}  {one.promise:<{width}}  {one.figure}" for one in lines)


def _jobs(record: Record) -> Iterator[Line]:
    accepted = record.accepted
    wrong = [name for name, job in accepted.items() if record.results.get(name) != job.status]
    yield _all("every accepted job ended as it should", f"{len(accepted)} jobs", wrong)
    wrong = [f"{name} ({record.ends[name]})" for name in accepted if record.ends[name] != 1]
    yield _all("the audit log has one end of each", f"{record.ends.total()} ends", wrong)
    yield _all("no job ran again that had ended", "none", [name for name, number in record.again.items() if number])
    yield Line(
        "one nightly job for each night, the long one too",
        f"{len(record.nights)} of {len(record.nights_due)}",
        sorted(record.nights) == sorted(record.nights_due),
    )


def _events(record: Record) -> Iterator[Line]:
    happened = record.happened
    figure = ", ".join(f"{name} {happened[name]}" for name in INCIDENTS)
    yield Line("incidents of the system", figure, all(happened[name] == number for name, number in INCIDENTS.items()))
    yield _all("each of them as promised", "nothing lost or locked out", record.broken)
    figure = ", ".join(f"{name} {happened[name]}" for name in TROUBLE)
    yield Line("trouble of the sources, in hours", figure, all(happened[name] for name in TROUBLE))


def _documents(record: Record) -> Iterator[Line]:
    for source, wanted in record.wanted.items():
        found = record.found[source]
        missing = [f"{one} is missing" for one in sorted(wanted - set(found))]
        more = [f"{one} {number} times" for one, number in found.items() if number > 1 or one not in wanted]
        yield _all(f"every document of {source} once", f"{len(found)} there", missing + more)
    yield Line(
        "the quarantine grew by what failed alone",
        f"{record.quarantined} for {record.failed}, {record.left} left of sources after mending",
        record.quarantined == record.failed and not record.left,
    )


def _retention(record: Record) -> Iterator[Line]:
    overdue = [f"{number} {name}" for name, number in record.overdue.items() if number]
    yield _all("nothing is kept an hour past its retention", f"{record.retention_hours:g} hours", overdue)
    since = record.hours - record.retention_hours - 1
    recent = sum(job.hour >= since for job in record.accepted.values())
    most = max(record.keys, default=0)
    figure = f"{most} at most, {record.keys[-1]} at the end, for {recent} recent jobs"
    yield Line("no more keys than retention keeps", figure, 0 < record.keys[-1] <= recent)


def _pages(record: Record) -> Iterator[Line]:
    yield _all("every page answered", "all with 200", record.refused)
    messages = record.live_messages
    yield Line("a dashboard was open all the while", f"{messages} live messages", messages > record.hours)


def _growth(record: Record) -> Iterator[Line]:
    sizes, memory = record.sizes, record.memory
    figure = f"{_mb(sizes[1])}, at the end {_mb(sizes[-1])}"
    yield Line(f"files at most {SIZE_BOUND} × those of the first week", figure, sizes[-1] <= sizes[1] * SIZE_BOUND)
    most = max(memory[0] * MEMORY_BOUND, memory[0] + ROOM_BYTES)
    figure = f"{_mb(memory[0])}, at the end {_mb(memory[-1])} of at most {_mb(int(most))}"
    yield Line("memory as on the first day", figure, memory[-1] <= most)
    yield _compared(f"no page slower than {SLOWER_BOUND} × the first day", record.pages[0], record.pages[-1])
    yield _compared(f"no command slower than {SLOWER_BOUND} × the first day", record.commands[0], record.commands[-1])


def _all(promise: str, figure: str, wrong: list[str]) -> Line:
    """A line that holds when nothing is wrong."""
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Line(promise, f"{figure}; not so: {'; '.join(wrong[:3])}{more}" if wrong else figure, not wrong)


def _compared(promise: str, first: Mapping[str, float], last: Mapping[str, float]) -> Line:
    name = max(last, key=lambda one: last[one] / max(first[one], LEAST_CPU_S))
    figure = f"{name}: {first[name] * 1000:.0f} ms, then {last[name] * 1000:.0f} ms of CPU"
    return Line(promise, figure, last[name] <= max(first[name], LEAST_CPU_S) * SLOWER_BOUND)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
