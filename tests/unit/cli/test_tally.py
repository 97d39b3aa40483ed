"""Ends, counted: six of them, and nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from reefknot.app import open_store
from reefknot.cli.run import Tally
from reefknot.core.messages import ExecResult, ResultJob, ResultStatus
from reefknot.core.work import Quarantine, WorkFailed, WorkItem
from reefknot.ports.store import Store
from reefknot.ports.work_queue import Settlement


def result(status: ResultStatus, retries: int = 0) -> ExecResult:
    return ExecResult("x", "r", status, "worker-1", ResultJob("t"), retries_used=retries)


async def failed(store: Store) -> None:
    await settled(store, WorkFailed(None, None, "attempts_spent"))


async def quarantined(store: Store) -> None:
    await settled(store, Quarantine("attempts_spent"))


async def settled(store: Store, what: WorkFailed | Quarantine) -> None:
    await store.work.enqueue([WorkItem("x", "t")])
    (item,) = await store.work.claim(1, owner="me")
    await store.work.settle([Settlement(item.id, item.owner, item.fence, what)])


async def dropped(store: Store) -> None:
    await store.work.enqueue([WorkItem("x", "t")])
    await store.work.cancel("x", reason="dropped_oldest")


async def never_taken(store: Store) -> None:
    """No worker has a record of it."""


@pytest.mark.parametrize(
    ("status", "before", "end"),
    [
        (ResultStatus.SUCCESS, never_taken, "succeeded"),
        (ResultStatus.TIMEOUT, failed, "timed_out"),
        (ResultStatus.CANCELLED, never_taken, "cancelled"),
        (ResultStatus.ERROR, failed, "failed"),
        (ResultStatus.ERROR, quarantined, "failed"),
        (ResultStatus.ERROR, dropped, "dropped"),
        (ResultStatus.ERROR, never_taken, "rejected"),
    ],
)
def test_every_result_has_one_end(status: ResultStatus, before: object, end: str) -> None:
    async def main() -> Tally:
        tally = Tally()
        async with open_store("memory:") as store:
            assert callable(before)
            await before(store)
            assert await tally.count(result(status, 2), store) == end
        return tally

    tally = asyncio.run(main())
    assert (tally.total, tally.ends[end], tally.retries) == (1, 1, 2)
    assert tally.recovered == (end == "succeeded")
    assert tally.quarantined == (before is quarantined)
    assert tally.all_succeeded == (end == "succeeded")


def test_the_sentence_leaves_out_what_did_not_happen() -> None:
    tally = Tally()
    tally.ends |= {"succeeded": 3, "failed": 1}
    tally.recovered, tally.quarantined, tally.retries = 2, 1, 1

    assert tally.sentence(1.26) == (
        "4 assignments in 1.3 s: 3 succeeded (2 after retries), 1 failed (1 in quarantine); 1 retry"
    )
