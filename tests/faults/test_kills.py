"""kill -9 at every storage call of claim → effect → record → settle, and what the next process makes of it."""

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.faults.carrying_out import KILLED, MODES, Life, Plan, at_every_call, carried_out, plan
from tests.faults.dying import SCENARIOS
from tests.faults.judging import judge
from tests.faults.points import either, spread
from tests.faults.story import EARLIER

FEW = 100


def complaints(lives: list[Life], *, mode: str | None = None) -> list[str]:
    """What the judge says of each, with its place; `mode` asks for another mode's promise than the one worked under."""
    said = []
    for life in lives:
        assert life["second"] == 0, (life["plan"], life["evidence"])
        words = [(what, order, value) for what, order, value in life["said"] if what not in ("calls", "error")]
        earlier = 0 if life["plan"]["scenario"] == "new" else EARLIER
        wrong = judge(life["evidence"], words, mode or life["plan"]["mode"], earlier=earlier)
        said += [f"{one} ({life['plan']})" for one in wrong]
    return said


def every_point(folder: Path) -> list[Plan]:
    """Each call of each scenario and mode; a write also half done."""
    whole = carried_out(folder, [plan(scenario, mode, None) for scenario in SCENARIOS for mode in MODES])
    assert complaints(whole) == []
    ways = [(life, life["plan"]["scenario"], life["plan"]["mode"]) for life in whole]
    return [one for life, scenario, mode in ways for one in at_every_call(life, partial(plan, scenario, mode))]


@pytest.mark.slow
def test_a_worker_killed_at_any_storage_call_loses_nothing_and_records_nothing_twice(tmp_path: Path) -> None:
    points = every_point(tmp_path / "counting")
    tried = spread(points, FEW)
    lives = carried_out(tmp_path, tried)

    assert complaints(lives) == []
    died = Counter(life["ended"] for life in lives)
    # A point near the end may lie behind it when a page more or less was written.
    assert died[KILLED] >= 0.99 * len(tried), died
    assert len(points) > 2000
    assert len(lives) == len(tried) >= FEW
    assert {life["evidence"]["found"]["items"].get("order-2", [""])[0] for life in lives} >= {"", "pending", "running"}
    print(f"{len(lives)} of {len(points)} points, {died[KILLED]} deaths, 0 lost")


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_loses_nothing_either(tmp_path: Path) -> None:
    """Between the calls that can be counted lie those to shared memory; a clock reaches them too."""
    dice = random.Random(4)
    moments = [dice.randrange(1, 25_000) for _ in range(either(40, 1000))]
    plans = [plan("checkpointing", dice.choice(MODES), None, after_us=moment) for moment in moments]
    lives = carried_out(tmp_path, plans)
    assert complaints(lives) == []
    assert sum(life["ended"] == KILLED for life in lives) > len(plans) / 4


def some_points(flaw: str, mode: str, most: int = 20) -> list[Plan]:
    """A control needs no more points than it takes to be caught."""
    return [plan("used", mode, at, flaw=flaw) for at in range(30, 150, 120 // most)]


CAUGHT = {
    "a promise before the commit": (some_points("promises too early", "retry"), ["lost: order-1 was accepted"]),
    "a log that was not read back": (
        [plan("interrupted", "retry", 40, flaw="throws the log away")],
        ["that were done before"],
    ),
    "a second result for one order": (some_points("forgets the key", "retry"), ["twice:", "differing:"]),
    "no deduplication": (some_points("a sink that does not deduplicate", "dedup"), ["happened 2 times"]),
}


@pytest.mark.parametrize("wrong", CAUGHT)
def test_the_judge_catches_each_wrong_way(tmp_path: Path, wrong: str) -> None:
    plans, words = CAUGHT[wrong]
    said = complaints(carried_out(tmp_path, plans))
    assert [word for word in words if not any(word in one for one in said)] == []


def test_mode_retry_does_not_keep_the_promise_of_mode_guard(tmp_path: Path) -> None:
    """The points do lie between effect and record: at least once is not at most once."""
    lives = carried_out(tmp_path, some_points("", "retry"))
    assert complaints(lives) == []
    assert any("happened 2 times" in one for one in complaints(lives, mode="guard"))


def test_mode_guard_leaves_unknown_outcomes_to_a_person(tmp_path: Path) -> None:
    """Between the claim and the effect there are two storage calls: every one is tried."""
    lives = carried_out(tmp_path, [plan("used", "guard", at) for at in range(80, 150)])
    assert complaints(lives) == []
    quarantined = [life for life in lives if "quarantined" in str(life["evidence"]["ended"]["items"])]
    times = {len(life["evidence"]["effects"].get("order-1", ())) for life in quarantined}
    assert times == {0, 1}, "an unknown outcome is one that may have happened, or not"
