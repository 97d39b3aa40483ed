"""
Seeded whole-system runs: router, workers, network and store in virtual time, with crashes, freezes and clock jumps.

A failing seed prints itself; `SIMULATION_SEED=<seed>` runs it again, exactly. `SIMULATION_SEEDS=<n>` runs that many
(`make soak`).
"""

import os

import pytest

from tests.simulation.world import run

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "50"))
CHUNK = 25
ONE = os.environ.get("SIMULATION_SEED")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_promise_holds_whatever_goes_wrong(first: int) -> None:
    stories = [run(seed) for seed in range(first, min(first + CHUNK, SEEDS))]

    assert [str(story) for story in stories if story.broken] == []
    assert sum(len(story.results) for story in stories) > len(stories), "the runs did not do much"


def test_the_runs_see_every_kind_of_end_and_every_kind_of_trouble() -> None:
    """A harness in which nothing happens would hold every promise."""
    stories = [run(seed) for seed in range(1, 13)]
    ends = {result.status.value for story in stories for result in story.results.values()}
    troubles = {word.split()[1] for story in stories for word in story.happened}

    assert ends == {"success", "error", "timeout", "cancelled"}
    assert troubles == {"crash", "freeze", "stop", "drain", "rest", "jump", "nothing"}
    assert sum(result.retries_used > 0 for story in stories for result in story.results.values()) > 20  # type: ignore[operator]


def test_runs_with_few_places_refuse_and_displace() -> None:
    stories = [run(seed) for seed in range(3, 150, 4)]
    codes = [result.error_code for story in stories for result in story.results.values()]

    assert [str(story) for story in stories if story.broken] == []
    assert sum(story.refused for story in stories) > 20
    assert codes.count("SYSTEM_OVERLOAD") > 5


def test_the_same_seed_gives_the_same_story() -> None:
    first, again = run(11), run(11)

    assert first.happened == again.happened
    assert first.ended_at == again.ended_at
    assert [(r.status, r.retries_used) for r in first.results.values()] == [
        (r.status, r.retries_used) for r in again.results.values()
    ]
    assert dict(first.executions) == dict(again.executions)


def test_one_seed_runs_again() -> None:
    """`SIMULATION_SEED=7 pytest tests/simulation -k one_seed`"""
    story = run(int(ONE) if ONE else 7)

    assert not story.broken, f"{story}\n{story.happened}"
