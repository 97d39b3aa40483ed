"""kill -9 at every call of a parent with follow-ups: each of them once, a gather never without its children."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults.carrying_out import KILLED, Life, Plan, at_every_call, carried_out, plan
from tests.faults.dying import SCENARIOS
from tests.faults.following import EARLY, SHAPES, expected
from tests.faults.nats_system import servers_in_memory
from tests.faults.points import spread

carry_out = partial(carried_out, program="tests.faults.following")


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with servers_in_memory() as (found,):
        yield found


def complaints(lives: list[Life]) -> list[str]:
    """What is wrong with the jobs that are left, with the plan of that life."""
    said = []
    for life in lives:
        found, wanted = life["evidence"], expected(life["plan"]["mode"])
        assert life["second"] == 0, (life["plan"], found)
        wrong = []
        if sorted(found["items"]) != wanted:
            wrong.append(f"jobs: {sorted(found['items'])}")
        if set(found["items"].values()) != {"succeeded"}:
            wrong.append(f"not all succeeded: {found['items']}")
        if sorted(found["submitted"]) != wanted:
            wrong.append(f"submitted: {sorted(found['submitted'])}")
        reports = [one for one in found["ran"] if one[0] == "report"]
        if not reports or any(one[2:] != [3, 3] for one in reports):
            wrong.append(f"reports: {reports}")
        if not found["whole"]:
            wrong.append("the audit log is broken")
        said += [f"{one} ({life['plan']})" for one in wrong]
    return said


def points(folder: Path, ways: list[tuple[str, str]]) -> list[Plan]:
    """Each call of each of these scenarios and shapes; a write also half done."""
    whole = carry_out(folder, [plan(*way, None) for way in ways])
    assert complaints(whole) == []
    return [
        one
        for life, way in zip(sorted(whole, key=_way), sorted(ways), strict=True)
        for one in at_every_call(life, partial(plan, *way))
    ]


def _way(life: Life) -> tuple[str, str]:
    return life["plan"]["scenario"], life["plan"]["mode"]


@pytest.mark.slow
def test_follow_ups_are_stored_once_wherever_their_parent_is_killed(tmp_path: Path, server: NatsServer) -> None:
    on_disk = points(tmp_path / "counting", [(scenario, shape) for scenario in SCENARIOS for shape in SHAPES])
    on_nats = points(tmp_path / "on nats", [(server.url, shape) for shape in SHAPES])
    lives = carry_out(tmp_path, [*spread(on_disk[::6], 36), *spread(on_nats, 24)])

    assert complaints(lives) == []
    died = Counter((life["plan"]["scenario"].partition(":")[0], life["ended"] == KILLED) for life in lives)
    assert died["nats", True] >= 0.8 * sum(died["nats", one] for one in (True, False)), died
    assert sum(n for (_, killed), n in died.items() if killed) >= 0.9 * len(lives), died
    assert len(on_disk[::6]) + len(on_nats) > 2000, (len(on_disk), len(on_nats))
    print(f"{len(lives)} of {len(on_disk[::6])} + {len(on_nats)} points, {died}, 0 lost")


@pytest.mark.parametrize("engine", ["sqlite", "nats"])
def test_the_judge_catches_follow_ups_that_are_submitted_before_their_parent_settles(
    tmp_path: Path, server: NatsServer, engine: str
) -> None:
    scenario = "new" if engine == "sqlite" else server.url
    ((whole),) = carry_out(tmp_path / "counting", [plan(scenario, SHAPES[0], None)])
    every = at_every_call(whole, partial(plan, scenario, SHAPES[0], flaw=EARLY))
    few = every[:: max(1, len(every) // 24)]
    assert any("jobs:" in one for one in complaints(carry_out(tmp_path, few)))
