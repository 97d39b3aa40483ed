"""
A fleet of workers of one router in virtual time: the product's own objects, over one store in memory.

A fifth of them dies at once, the router with them, and messages get lost: every promise holds. `make test` runs a
hundred workers, `make soak` a thousand. The run measures decisions, not a machine: what one store carries is measured
in `docs/performance.md`.
"""

import asyncio
import os
from collections import Counter

import pytest

from reefknot.core.clock import Clock
from reefknot.errors import QueueFullError
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.router.submissions import Submissions
from reefknot.stores.memory import MemoryStore
from tests.simulation.sea import JumpingClock
from tests.simulation.world import Story, World, simulated

WORKERS = int(os.environ.get("FLEET_WORKERS", "100"))
ASSIGNMENTS = 2 * WORKERS
LOAD_S = 6.0
DYING = 0.2


class Fleet(World):
    """Many workers, and a load that needs all of them."""

    most_pending = 10 * WORKERS

    async def _callers(self) -> None:
        for number in range(ASSIGNMENTS):
            await asyncio.sleep(LOAD_S / ASSIGNMENTS)
            assignment = self._assignment(number)
            try:
                await self.submissions.submit(assignment)
            except QueueFullError:
                self.story.refused += 1
            else:
                self.story.handed_in[assignment.assignment_id] = assignment

    async def _troubles(self) -> None:
        """In the middle of it a fifth of the workers dies, and the router; most of them come back, some later."""
        await asyncio.sleep(LOAD_S / 2)
        dying = [self.router, *self.rng.sample(self.workers, int(DYING * WORKERS))]
        for member in dying:
            member.crash()
        self.story.happened.append(f"{len(dying)} processes died")
        await asyncio.sleep(1.0)
        for member in dying[: len(dying) // 2]:
            await member.start()


def run_fleet(seed: int) -> Story:
    async def main(clock: Clock, jumping: JumpingClock) -> Story:
        fleet = Fleet(seed, MemoryStore(clock), clock, jumping, workers=WORKERS)
        fleet.rules = SubmissionRules(fleet.most_pending)
        fleet.submissions = Submissions(fleet.store.work, clock, rules=fleet.rules)
        return await fleet.run()

    return simulated(main)


@pytest.mark.slow
def test_a_fleet_of_workers_holds_every_promise() -> None:
    story = run_fleet(1)
    ends = Counter(result.status.value for result in story.results.values())

    assert not story.broken, str(story)
    assert len(story.handed_in) + story.refused == ASSIGNMENTS
    assert len(story.results) == len(story.handed_in) > 0.9 * ASSIGNMENTS
    assert ends["success"] > 0.3 * ASSIGNMENTS
    assert len({result.worker_id for result in story.results.values()}) > WORKERS / 2, "few of them did all the work"
