"""The live feed: audited events in words, at most so many lines a second."""

import asyncio
from collections.abc import Collection

import pytest

from reefknot.audit.model import event as audited
from reefknot.audit.model.event import Admission, AnyEvent, Completed, Dropped, Quarantined, Routing, TimeoutOccurred
from reefknot.audit.port import AuditQuery, KeptEntry
from reefknot.console.cli import live_output
from reefknot.console.cli.live_output import LevelChanges, LiveFeed
from reefknot.console.operations.values import queue_depth
from reefknot.console.words.events import describe
from reefknot.errors import StoreUnavailableError
from reefknot.stores.opening import open_store
from tests.unit.console.cli.audit_events import STORY, attempt, entry

AT = "2026-01-25T12:00:00.000Z"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (STORY[0], "retry"),
        (STORY[2], "given up"),
        (STORY[4], "recovered"),
        (Quarantined(timestamp=AT, reason="attempts_spent"), "quarantined"),
        (Admission(timestamp=AT, status="rejected", reason="queue_full", queue_depth=3), "rejected"),
        (Admission(timestamp=AT, status="accepted", inputs={"message": "Assignment deferred for 9ms"}), "deferred"),
        (Dropped(timestamp=AT, reason="dropped_oldest"), "dropped"),
        (audited.BreakerEvent(timestamp=AT, name="x", state="open"), "breaker"),
        (audited.OperatorAction(timestamp=AT, actor="ann", action="worker.drain"), "operator"),
        (TimeoutOccurred(timestamp=AT, attempt_number=1, timeout_seconds=1, whole=True), "timed out"),
        (Routing(timestamp=AT, reason="unknown_job_type"), "rejected"),
        (Admission(timestamp=AT, status="accepted", inputs={"message": "Assignment queued"}), None),
        (Routing(timestamp=AT, worker_id="w", reason="chosen"), None),
        (TimeoutOccurred(timestamp=AT, attempt_number=1, timeout_seconds=1), None),
        (audited.IdempotencyEvent(timestamp=AT, idempotency_key="k", action="record"), None),
    ],
)
def test_an_event_is_described_by_its_kind_or_not_at_all(event: AnyEvent, kind: str | None) -> None:
    found = describe(event)
    assert (found and found[0]) == kind


def followed(events: list[AnyEvent], workers: Collection[str] = ()) -> tuple[list[str], LiveFeed]:
    lines: list[str] = []

    async def main() -> LiveFeed:
        async with open_store("memory:") as store:
            feed = LiveFeed(store.audit, lines.append, after=0, workers=workers)
            await store.audit.append([entry(event) for event in events])
            await feed.catch_up()
            feed.end()
        return feed

    return lines, asyncio.run(main())


@pytest.mark.parametrize("more", [0, 475])
def test_events_that_fit_are_all_printed_and_a_flood_is_counted(more: int) -> None:
    fit = live_output.LINES_A_SECOND
    lines, feed = followed([attempt(number) for number in range(fit + more)])
    assert all("attempt 1 failed: ConnectionError: it broke; again in 1.00 s" in line for line in lines[:fit])
    assert [line.split()[1:] for line in lines[fit:]] == [["more", str(more), "retry"]][: more and 1]
    assert feed.kinds["retry"] == fit + more


def completed(work: str, status: str, worker: str | None = None, attempts: int = 0) -> Completed:
    return Completed(timestamp=AT, work_id=work, status=status, worker_id=worker, attempts=attempts)


def test_every_end_is_counted_by_what_the_log_says_of_it() -> None:
    """At a worker of this system, or at none; what another system's worker ended is that system's."""
    ends: list[AnyEvent] = [
        completed("a", "success", "w", 1),
        completed("b", "timeout", "w", 1),
        completed("c", "success", "of-another-system", 1),
        completed("d", "cancelled"),
        completed("e", "timeout"),
        completed("f", "error"),
        Quarantined(timestamp=AT, work_id="g", reason="unknown_job_type"),
        completed("g", "error"),
        Dropped(timestamp=AT, work_id="h", reason="dropped_oldest"),
        completed("h", "error"),
        Quarantined(timestamp=AT, work_id="i", reason="crashes"),
        completed("j", "error"),
    ]
    _, feed = followed(ends, workers=["w"])
    assert feed.ends == {"success": 1, "timeout": 2, "cancelled": 1, "rejected": 2, "error": 1, "dropped": 1}


def test_what_comes_back_for_a_retry_is_counted_apart_from_the_queue_depth() -> None:
    assert [queue_depth(4, 5), queue_depth(5, 5), queue_depth(9, None)] == ["4 of 5", "5 of 5", "9, unbounded"]
    assert queue_depth(6, 5) == "5 of 5 and 1 back for a retry"


def test_a_level_is_printed_when_it_changes_and_only_then() -> None:
    lines: list[str] = []
    levels = LevelChanges(lines.append)
    for status in ("healthy", "critical", "critical", "healthy"):
        state = {"status": status, "depth": 4, "size": 5, "active": 2}
        levels.update({"workers": [{"worker_id": "w", "classes": {"io": state}}]})
    assert ["healthy → critical" in lines[0], "critical → healthy" in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.real_time
async def test_a_read_that_fails_once_does_not_end_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    printed = asyncio.Event()

    def print_line(line: str) -> None:
        lines.append(line)
        printed.set()

    async with open_store("memory:") as store:
        feed = LiveFeed(store.audit, print_line, after=0)
        read, failures = store.audit.read, iter([StoreUnavailableError("a", "a read has not finished", "again")])

        async def once_late(query: AuditQuery) -> list[KeptEntry]:
            for failure in failures:
                raise failure
            return await read(query)

        monkeypatch.setattr(store.audit, "read", once_late)
        await store.audit.append([entry(attempt(1))])
        task = asyncio.create_task(feed.follow())
        async with asyncio.timeout(30):
            await printed.wait()
        task.cancel()
    assert len(lines) == 1
