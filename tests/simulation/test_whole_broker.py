"""
Seeded whole-system runs on a model of a NATS server: what goes wrong on every engine, and at the broker besides.

A failing seed prints itself; `BROKER_SEED=<seed>` runs it again. `BROKER_SEEDS=<n>` runs that many (`make soak`).
"""

import os

import pytest

from tests.simulation.broker_world import run_on_broker

SEEDS = int(os.environ.get("BROKER_SEEDS", "12"))
CHUNK = 6
ONE = os.environ.get("BROKER_SEED")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_promise_holds_whatever_the_broker_does(first: int) -> None:
    stories = [run_on_broker(seed) for seed in range(first, min(first + CHUNK, SEEDS))]

    assert [f"{story}\n(BROKER_SEED)" for story in stories if story.broken] == []
    assert sum(len(story.results) for story in stories) > len(stories), "the runs did not do much"


def test_the_runs_see_every_fault_of_the_broker() -> None:
    """A broker that never fails would hold every promise."""
    unseen = {"disconnect", "restart", "leaderless", "vanish"}
    unseen |= {"lost_request", "lost_answer", "lost_delivery", "twice", "redelivered"}
    for seed in range(1, 25):
        story = run_on_broker(seed)
        unseen -= {word.split()[1] for word in story.happened}
        unseen -= {fault for fault, number in story.broker.items() if number}
        if not unseen:
            return
    pytest.fail(f"nobody saw {sorted(unseen)}")


def test_the_same_seed_gives_the_same_story_on_a_broker() -> None:
    first, again = run_on_broker(5), run_on_broker(5)

    assert (first.happened, first.ended_at, first.broker) == (again.happened, again.ended_at, again.broker)
    assert dict(first.executions) == dict(again.executions)


def test_one_seed_runs_again_on_a_broker() -> None:
    """`BROKER_SEED=7 pytest tests/simulation -k one_seed`"""
    story = run_on_broker(int(ONE) if ONE else 7)

    assert not story.broken, f"{story}\n{story.happened}"
