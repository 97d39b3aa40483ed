"""
A short form of `make month`: eight hours across the end of summer time, with every incident and every trouble.

Files, memory, pages and commands have to be compared over days: here they are judged in records that were made up. The
controls show that each line of the table catches what it is there for.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from reefknot.ingest.documents import SqliteDocuments
from reefknot.stores import retention
from tests.month.__main__ import month
from tests.month.judgement import INCIDENTS, TROUBLE, Job, Record, judge, table
from tests.rows import for_each_row


@pytest.mark.slow
def test_a_system_that_lives_for_a_while_keeps_every_promise() -> None:
    with month(8) as living:
        living.live()

    lines = judge(living.record)
    assert all(one.holds for one in lines), table(lines)


@pytest.mark.slow
def test_a_system_that_removes_nothing_and_loses_a_document_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = SqliteDocuments.keep

    async def lossy(self: SqliteDocuments, source: str, page: Any, **more: Any) -> Any:
        kept = [one for one in page.documents if source != "folder" or "hour0003" not in one.text]
        return await keep(self, source, structs.replace(page, documents=kept), **more)

    async def idle(_: retention.RetentionJob) -> retention.Removed:
        return retention.Removed()

    monkeypatch.setattr(SqliteDocuments, "keep", lossy)
    monkeypatch.setattr(retention.RetentionJob, "once", idle)
    with month(5) as living:
        living.live_quietly()

    held = {one.promise: one.holds for one in judge(living.record)}
    assert not held["every document of folder once"]
    assert not held["nothing is kept an hour past its retention"]
    assert held["every document of vault once"]
    assert held["every accepted job ended as it should"]


# ---- records that were made up ---------------------------------------------------------------------------------------


def fine() -> Record:
    """A month in which every promise was kept."""
    names = [f"job-{number}" for number in range(100)]
    return Record(
        hours=100,
        retention_hours=24,
        accepted={name: Job("success", hour) for hour, name in enumerate(names)},
        results=dict.fromkeys(names, "success"),
        ends=Counter(names),
        happened=Counter({**INCIDENTS, **dict.fromkeys(TROUBLE, 1)}),
        nights_due=["2026-10-25"],
        nights=["2026-10-25"],
        wanted={"folder": {"a", "b"}},
        found={"folder": {"a": 1, "b": 1}},
        failed=2,
        quarantined=2,
        keys=[10, 20, 20],
        sizes=[500_000, 1_000_000, 1_400_000],
        memory=[80_000_000, 90_000_000, 100_000_000],
        pages=[{"/work": 0.04}, {"/work": 0.05}],
        commands=[{"job list": 0.04}, {"job list": 0.05}],
        live_messages=200,
    )


def test_a_month_in_which_every_promise_was_kept_holds() -> None:
    lines = judge(fine())

    assert all(one.holds for one in lines), table(lines)
    assert table(lines).count("\n") == len(lines) - 1


@for_each_row(
    ("change", "broken"),
    [
        (lambda one: one.results.pop("job-7"), "every accepted job ended as it should"),
        (lambda one: one.results.update({"job-7": "error"}), "every accepted job ended as it should"),
        (lambda one: one.ends.update(["job-7"]), "the audit log has one end of each"),
        (lambda one: one.ends.pop("job-7"), "the audit log has one end of each"),
        (lambda one: one.again.update(["job-7"]), "no job ran again that had ended"),
        (lambda one: one.nights.append("2026-10-25"), "one nightly job for each night, the long one too"),
        (lambda one: one.nights.clear(), "one nightly job for each night, the long one too"),
        (lambda one: one.happened.pop("upgrade"), "incidents of the system"),
        (lambda one: one.happened.pop("code limited"), "trouble of the sources, in hours"),
        (lambda one: one.broken.append("a router did not start"), "each of them as promised"),
        (lambda one: one.found["folder"].pop("a"), "every document of folder once"),
        (lambda one: one.found["folder"].update(a=2), "every document of folder once"),
        (lambda one: one.found["folder"].update(c=1), "every document of folder once"),
        (lambda one: setattr(one, "quarantined", 3), "the quarantine grew by what failed alone"),
        (lambda one: setattr(one, "left", 1), "the quarantine grew by what failed alone"),
        (lambda one: one.overdue.update({"events": 3}), "nothing is kept an hour past its retention"),
        (lambda one: one.keys.append(90), "no more keys than retention keeps"),
        (lambda one: one.keys.append(0), "no more keys than retention keeps"),
        (lambda one: one.refused.append("hour 7 /work: 503"), "every page answered"),
        (lambda one: setattr(one, "live_messages", 20), "a dashboard was open all the while"),
        (lambda one: one.sizes.append(1_600_000), "files at most 1.5 × those of the first week"),
        (lambda one: one.memory.append(125_000_000), "memory as on the first day"),
        (lambda one: one.pages.append({"/work": 0.07}), "no page slower than 1.5 × the first day"),
        (lambda one: one.commands.append({"job list": 0.07}), "no command slower than 1.5 × the first day"),
    ],
)
def test_a_broken_month_breaks_its_line(change: Callable[[Record], object], broken: str) -> None:
    record = fine()
    change(record)

    assert [one.promise for one in judge(record) if not one.holds] == [broken]
