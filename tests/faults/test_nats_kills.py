"""
kill -9 over a store on NATS: at every network call of a worker, and of a whole system at every stage of a step.

The stories, the judges and the wrong ways are those of the other engines.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults import test_kills, test_system_kills
from tests.faults.carrying_out import KILLED, MODES, Life, Plan, at_every_call, carried_out, plan
from tests.faults.nats_system import servers_in_memory
from tests.faults.points import ALL, either, spread
from tests.faults.system_child import STAGES, VICTIM


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """Its files are in memory: it is not the server that is killed here."""
    with servers_in_memory() as (found,):
        yield found


def died(folder: Path, plans: list[Plan]) -> list[Life]:
    return carried_out(folder, plans, program="tests.faults.nats_dying")


def complaints(lives: list[Life]) -> list[str]:
    """What the judge of killed workers says; no store has a past here."""
    return test_kills.complaints([life | {"plan": life["plan"] | {"scenario": "new"}} for life in lives])


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, server: NatsServer) -> list[Plan]:
    """Each network call in each mode; a write also half done."""
    whole = died(tmp_path_factory.mktemp("counting"), [plan(server.url, mode, None) for mode in MODES])
    assert complaints(whole) == []
    return [one for life in whole for one in at_every_call(life, partial(plan, server.url, life["plan"]["mode"]))]


def some_points(points: list[Plan], flaw: str) -> list[Plan]:
    """Every point of one mode: a life has few of them between a promise and its commit."""
    last = max(one["at"] for one in points)
    return [plan(points[0]["scenario"], "retry", at, flaw=flaw) for at in range(10, last)]


@pytest.mark.slow
def test_a_worker_killed_at_any_network_call_loses_and_repeats_nothing(tmp_path: Path, points: list[Plan]) -> None:
    tried = spread(points, 24)
    lives = died(tmp_path, tried)

    assert complaints(lives) == []
    ends = Counter(life["ended"] for life in lives)
    assert ends[KILLED] >= 0.8 * len(tried), ends  # how many calls a life takes is not the same in every run
    print(f"{len(lives)} of {len(points)} points, {ends[KILLED]} deaths, 0 lost")


@pytest.mark.slow
def test_the_judge_catches_a_promise_that_is_given_before_the_commit(tmp_path: Path, points: list[Plan]) -> None:
    said = complaints(died(tmp_path, some_points(points, "promises too early")))
    assert any("was accepted" in one for one in said)


def system_plan(server: NatsServer, stage: str, flaw: str = "") -> Plan:
    """A plan with a store of its own. Its neighbours on the server have workers and assignments of the same names."""
    return test_system_kills.plan(stage, flaw) | {"engine": f"{server.url}/s{uuid4().hex[:12]}"}


@pytest.mark.slow
def test_a_system_killed_at_any_stage_gives_what_it_accepted_one_result(tmp_path: Path, server: NatsServer) -> None:
    plans = [system_plan(server, stage) for _ in range(either(1, 20)) for stage in spread(STAGES, 5)]
    lives = test_system_kills.lived(tmp_path, plans)
    assert [one for life in lives for one in test_system_kills.judge(life)] == []


if ALL:

    @pytest.mark.slow
    def test_the_judge_catches_a_second_result_for_one_order(tmp_path: Path, points: list[Plan]) -> None:
        said = complaints(died(tmp_path, some_points(points, "forgets the key")))
        assert any(one.startswith("twice:") for one in said)

    @pytest.mark.slow
    def test_the_judge_catches_what_each_wrong_way_of_a_system_breaks(tmp_path: Path, server: NatsServer) -> None:
        flaws = [("submitted", "promises too early"), ("settled", "forgets the result")]
        lives = test_system_kills.lived(tmp_path, [system_plan(server, *one) for one in flaws])
        said = {life["plan"]["stage"]: test_system_kills.judge(life) for life in lives}
        assert f"submitted: lost: {VICTIM}" in said["submitted"]
        assert "settled: done 2 times, not 1" in said["settled"]
