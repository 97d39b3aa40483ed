"""
Families of jobs: what follows a job or waits for it, and what a job waits for itself.

Children have ids that follow from their parent's, so they are read by their ids. What waits for a job by `after` is
found among the work that waits.
"""

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import Struct

from reefknot.queue.model.follow_ups import awaited, children_ids
from reefknot.queue.model.transitions import is_replaced, next_record
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, is_over
from reefknot.queue.port.work_queue import WorkFilter, WorkQueue
from reefknot.runtime.timeouts import STORE_S

PAGE = 500
MOST_OF_FAMILY = 100_000
"""Jobs of one family that are looked at."""
MOST_AWAITED = 500
"""Jobs of those that a job waits for that are looked at, from the first that has not succeeded on."""


async def named(work: WorkQueue, records: Sequence[str]) -> dict[str, WorkItem]:
    """The items of these records, as far as there are any, without payloads: each in its latest version."""
    found: dict[str, WorkItem] = {}
    for at in range(0, len(records), PAGE):
        async with asyncio.timeout(STORE_S):
            known = {one.id: one for one in await work.named(records[at : at + PAGE])}
        found |= {record: known[record] for record in records[at : at + PAGE] if record in known}
    for record, item in list(found.items()):
        while is_replaced(item) and (later := await work.named([next_record(item.id)])):
            found[record] = item = later[0]
    return found


async def family_of(work: WorkQueue, root: WorkItem) -> list[WorkItem]:
    """The job and all that follows it or waits for it, those nearest to it first."""
    found, new = {root.id: root}, [root]
    waiting = await _after(work)
    while new and len(found) < MOST_OF_FAMILY:
        children = (await named(work, [record for one in new for record in children_ids(one)])).values()
        ids = {one.id for one in new} | {one.family_id for one in new}
        later = [one for one in waiting if not ids.isdisjoint(one.extra.after)]
        new = [one for one in _distinct([*children, *later]) if one.id not in found]
        found |= {one.id: one for one in new}
    return list(found.values())


async def open_family(work: WorkQueue, root: WorkItem) -> list[WorkItem]:
    """
    Jobs of the family that have not ended, in the order in which to cancel them.

    What waits comes before what it waits for, because of which it would fail otherwise.
    """
    states = (WorkState.PENDING, WorkState.RUNNING)
    left = [one for one in await family_of(work, root) if one.state in states]
    waiting = [one for one in reversed(left) if one.extra.waits]
    return [*waiting, *(one for one in left if not one.extra.waits)]


def _distinct(items: Iterable[WorkItem]) -> list[WorkItem]:
    return list({one.id: one for one in items}.values())


async def _after(work: WorkQueue) -> list[WorkItem]:
    """All jobs that wait for others by `after`."""
    found, after = list[WorkItem](), ""
    while True:
        page = await work.search(WorkFilter(classes=(ROUTER,)), after=after, limit=PAGE)
        found += [one for one in page.items if one.extra.after]
        if not (after := page.after):
            return found


class Awaited(Struct, frozen=True):
    """Jobs that a job waits for: the number of all, and of those that are not over."""

    number: int
    left: int
    first: WorkItem | None = None
    """The first one that is in quarantine, else the first one that is not over."""


async def awaited_by(work: WorkQueue, item: WorkItem) -> Awaited:
    """The jobs that a waiting job waits for at this moment."""
    unstored = item.extra.gathers - min(item.extra.children, item.extra.gathers)
    records = awaited(item)[item.extra.over :]
    found = await named(work, records[:MOST_AWAITED])
    waits = [one for one in found.values() if not is_over(one) or one.state is WorkState.QUARANTINED]
    aside = [one for one in waits if one.state is WorkState.QUARANTINED]
    unread = max(0, len(records) - MOST_AWAITED - unstored)
    return Awaited(item.extra.waits, unstored + unread + len(waits), next(iter(aside or waits), None))
