"""Who gets it: the table of health, the coin, probes, and who counts as gone."""

import random
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import structs

from reefknot.queue.model import routing
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.routing import (
    MOST_UNACKED,
    NO_RUN,
    RUN_S,
    Chosen,
    Nobody,
    Run,
    Why,
    WorkerHealth,
    WorkerRanking,
)
from tests.rows import for_each_row

NOW = 100.0
HEALTHY, DEGRADED, OVERLOADED, CRITICAL = OverloadStatus


def choose_worker(workers: Iterable[WorkerHealth], draw: float, now: float, after: str = "") -> Chosen | Nobody:
    """The worker for a single assignment."""
    return WorkerRanking(workers, now, after).choose(draw)


@for_each_row(
    ("draining", "leaving", "gone", "state"),
    [
        (False, False, False, "running"),
        (True, False, False, "paused"),
        (True, True, False, "draining"),
        (True, True, True, "gone"),
    ],
)
def test_a_worker_has_one_state(draining: bool, leaving: bool, gone: bool, state: str) -> None:
    assert routing.worker_state(draining=draining, leaving=leaving, gone=gone) == state


def test_the_documented_times_words_and_defaults() -> None:
    assert (routing.HEARTBEAT_S, routing.MISSED_UNTIL_GONE, routing.PROBE_EVERY_S, MOST_UNACKED) == (1.0, 3, 2.0, 64)
    assert WorkerHealth("w") == WorkerHealth("w", HEALTHY, 0, 0, 1, 0.0, None, float("-inf"), 0)
    assert Chosen("w").probe is False
    assert [why.value for why in Why] == [
        "no worker is there",
        "every worker is critical",
        "every worker is overloaded, and this one waits",
        "enough is on its way without an answer",
    ]


def worker(name: str, status: OverloadStatus = HEALTHY, **known: object) -> WorkerHealth:
    facts = {"heartbeat_at": NOW, "probed_at": NOW, **known}
    return WorkerHealth(name, status, **facts)  # type: ignore[arg-type]


def chosen(*workers: WorkerHealth, draw: float = 0.9) -> str | Why:
    answer = choose_worker(workers, draw, NOW)
    return answer.worker_id if isinstance(answer, Chosen) else answer.why


@for_each_row(("expected", "statuses"), [("a", "hd do oo h d o"), ("b", "dh od oh ch cd co"), (Why.CRITICAL, "c cc")])
def test_healthy_before_degraded_before_overloaded_and_never_critical(expected: str, statuses: str) -> None:
    known = {status.value[0]: status for status in OverloadStatus}
    for words in statuses.split():
        assert chosen(*(worker(name, known[word]) for name, word in zip("ab", words, strict=False))) == expected, words
    assert chosen() == Why.NO_WORKER


def test_an_overloaded_worker_alone_is_passed_over_half_of_the_time() -> None:
    passed = [chosen(worker("a", OVERLOADED), draw=draw) for draw in (0.0, 0.4999, 0.5, 0.99)]
    assert passed == [Why.PASSED_OVER, Why.PASSED_OVER, "a", "a"]
    assert [chosen(worker("a", status), draw=0.0) for status in (HEALTHY, DEGRADED)] == ["a", "a"]


@for_each_row(
    ("one", "other", "expected"),
    [
        ({"queue_depth": 5}, {"queue_depth": 4}, "b"),
        ({"queue_depth": 5, "capacity": 10}, {"queue_depth": 4, "capacity": 1}, "a"),
        ({"active": 2}, {"active": 1}, "b"),
        ({"unacked": 2}, {"unacked": 1}, "b"),
        ({}, {}, "a"),
        ({"capacity": 0, "active": 1}, {"active": 1}, "a"),
    ],
)
def test_among_equals_the_least_loaded_for_its_size(one: dict[str, Any], other: dict[str, Any], expected: str) -> None:
    """The load is what waits, runs and is on its way."""
    assert chosen(worker("b", **other), worker("a", **one)) == expected
    assert worker("a", queue_depth=3, active=2, unacked=1, capacity=4).load == 1.5
    assert [worker("a", active=3, capacity=capacity).load for capacity in (0, 1)] == [3.0, 3.0]


def test_a_worker_that_was_sent_much_without_an_answer_is_left_alone() -> None:
    assert [chosen(worker("a", unacked=number)) for number in (63, 64)] == ["a", Why.UNACKED]
    assert chosen(worker("a", unacked=64), worker("b", DEGRADED)) == "b"
    assert names(WorkerRanking([worker("a", unacked=MOST_UNACKED - 2)], NOW), 3) == ["a", "a", Why.UNACKED]


@for_each_row(("heartbeat", "is_gone"), [(97.0, False), (96.999, True), (0.0, True), (None, False)])
def test_after_three_missed_heartbeats_a_worker_is_gone(heartbeat: float | None, is_gone: bool) -> None:
    one = worker("a", heartbeat_at=heartbeat)
    assert one.gone(NOW) is is_gone
    assert chosen(one) == (Why.NO_WORKER if is_gone else "a")
    assert one.gone_after == (float("inf") if heartbeat is None else heartbeat + 3.0)
    critical = choose_worker([structs.replace(one, status=CRITICAL, probed_at=0.0)], 0.9, NOW)
    assert critical == (Nobody(Why.NO_WORKER) if is_gone else Chosen("a", probe=True)), "who is gone is not probed"


@for_each_row(("probed", "probe"), [(98.0, True), (98.001, False), (float("-inf"), True)])
def test_a_critical_worker_is_probed_every_two_seconds_the_least_loaded_first(probed: float, probe: bool) -> None:
    sick, busier = (worker(name, CRITICAL, probed_at=probed, queue_depth=depth) for name, depth in (("b", 3), ("a", 9)))
    expected = Chosen("b", probe=True) if probe else Chosen("well")
    assert choose_worker([busier, sick, worker("well")], 0.9, NOW) == expected


def names(lineup: WorkerRanking, number: int, draw: float = 0.9) -> list[str | Why]:
    answers = [lineup.choose(draw) for _ in range(number)]
    return [one.worker_id if isinstance(one, Chosen) else one.why for one in answers]


def test_each_choice_is_load_for_the_next_one() -> None:
    lineup = WorkerRanking([worker("a", capacity=1), worker("b", capacity=3)], NOW)
    assert names(lineup, 8) == ["a", "b", "b", "b", "a", "b", "b", "b"]


def test_short_work_goes_to_a_healthy_worker_in_a_row_and_counts_as_its_load() -> None:
    three = [worker("a"), worker("b"), worker("c", unacked=1)]
    assert "".join(map(str, names(WorkerRanking(three, NOW, together=3), 9))) == "aaabbbccc"
    assert "".join(map(str, names(WorkerRanking(three, NOW), 9))) == "ababcabca"
    nearly = [worker("a", unacked=MOST_UNACKED - 2)]
    assert names(WorkerRanking(nearly, NOW, together=3), 3) == ["a", "a", Why.UNACKED]
    unwell = [worker("a", DEGRADED), worker("b", DEGRADED)]
    assert names(WorkerRanking(unwell, NOW, together=3), 4) == ["a", "b", "a", "b"]
    sick = [worker("a"), worker("b", CRITICAL, probed_at=0.0)]
    assert names(WorkerRanking(sick, NOW, together=3), 3) == ["b", "a", "a"], "a probe comes first, and alone"


def test_a_run_goes_on_at_its_worker_as_far_as_it_has_room_and_then_the_least_loaded_is_next() -> None:
    three, run = [worker("a", active=9), worker("b"), worker("c")], Run("a", 7, NOW)
    going_on = WorkerRanking(three, NOW, "a", together=3, run=run, room=2)
    recorded = [(going_on.inputs().together, going_on.choose(0.9)) for _ in range(4)]
    assert recorded == [(7, Chosen("a")), (8, Chosen("a")), (0, Chosen("b")), (1, Chosen("b"))]
    assert names(WorkerRanking(three, NOW, "a", together=3, run=run), 2) == ["b", "b"], "control: no room"
    almost = [worker("a", unacked=MOST_UNACKED - 1), worker("b")]
    assert names(WorkerRanking(almost, NOW, "a", run=run, room=9), 2) == ["a", "b"]
    assert names(WorkerRanking([worker("a", unacked=MOST_UNACKED)], NOW, "a", run=run, room=9), 1) == [Why.UNACKED]
    for unwell in (worker("a", DEGRADED), worker("a", CRITICAL), worker("a", heartbeat_at=0.0), worker("gone")):
        assert names(WorkerRanking([unwell, worker("b")], NOW, "a", run=run, room=9), 1) == ["b"]
    probed = [worker("a"), worker("b", CRITICAL, probed_at=0.0)]
    assert names(WorkerRanking(probed, NOW, "a", run=run, room=9), 2) == ["b", "a"], "a probe comes first"


@for_each_row(
    ("together", "held", "seconds", "room"),
    [
        (64, 0, 0.0, 64),
        (64, 60, RUN_S - 0.001, 4),
        (64, 64, 0.0, 0),
        (5, 9, 0.0, 0),
        (64, 0, RUN_S, 0),  # also a lone caller's next assignment goes to another worker then
        (1, 0, 0.0, 0),  # what takes longer is spread
    ],
)
def test_a_run_has_room_for_what_its_worker_does_soon_and_for_a_while(
    together: int, held: int, seconds: float, room: int
) -> None:
    assert Run("a", 3, NOW).room(together, held, NOW + seconds) == room


def test_a_choice_in_a_run_counts_and_any_other_begins_a_new_one() -> None:
    first = NO_RUN.after(Chosen("a"), 1.0, is_next=False)
    assert (first, NO_RUN.room(64, 0, 1.0)) == (Run("a", 1, 1.0), 0)
    assert first.after(Chosen("a"), 2.0, is_next=True) == Run("a", 2, 1.0)
    assert first.after(Chosen("a"), 2.0, is_next=False) == Run("a", 1, 2.0)


def test_a_choice_of_many_is_the_choice_of_one_after_the_other() -> None:
    known = [worker("a", DEGRADED), worker("b", capacity=2, queue_depth=1), worker("c", queue_depth=2, capacity=4)]
    lineup, one_by_one = WorkerRanking(known, NOW), []
    for _ in range(40):
        answer = choose_worker(known, 0.9, NOW)
        assert isinstance(answer, Chosen)
        one_by_one.append(answer.worker_id)
        known = [
            structs.replace(one, unacked=one.unacked + 1) if one.worker_id == answer.worker_id else one for one in known
        ]
    assert names(lineup, 40) == one_by_one


def test_each_sick_worker_gets_one_probe_and_then_nothing() -> None:
    lineup = WorkerRanking([worker("a", CRITICAL, probed_at=0.0), worker("b", CRITICAL, probed_at=0.0, active=1)], NOW)
    probes = [lineup.choose(0.9) for _ in range(3)]
    assert probes == [Chosen("a", probe=True), Chosen("b", probe=True), Nobody(Why.CRITICAL)]


def test_equals_take_turns_from_the_one_after_the_last_and_less_load_comes_first() -> None:
    equals = [worker("a"), worker("b"), worker("c")]
    turns = [""]
    for _ in range(6):
        answer = choose_worker(equals, 0.9, NOW, after=turns[-1])
        assert isinstance(answer, Chosen)
        turns.append(answer.worker_id)
    assert turns[1:] == ["a", "b", "c", "a", "b", "c"]
    assert choose_worker([worker("a"), worker("b", active=1)], 0.9, NOW, after="a") == Chosen("a")


@for_each_row(
    ("refused_by", "is_too_late"), [({"a", "b"}, True), ({"a", "b", "c"}, True), ({"a"}, False), (set(), False)]
)
def test_work_is_too_late_when_every_worker_that_is_there_has_said_so(refused_by: set[str], is_too_late: bool) -> None:
    assert routing.too_late_everywhere([worker("a"), worker("b")], refused_by, NOW) is is_too_late
    assert routing.too_late_everywhere([worker("a"), worker("b", heartbeat_at=0.0)], {"a"}, NOW), "b is gone"


def test_chance_is_asked_only_where_it_decides() -> None:
    critical = worker("c", CRITICAL, probed_at=float("-inf"))
    for workers, needs in (
        ((), False),
        ((worker("a"),), False),
        ((worker("a", DEGRADED),), False),
        ((worker("a", OVERLOADED),), True),
        ((worker("a", OVERLOADED), worker("b")), False),
        ((worker("a", OVERLOADED), critical), False),
    ):
        assert WorkerRanking(workers, 0.0).needs_draw is needs, workers


def test_every_choice_of_any_fleet_comes_out_the_same_from_its_recorded_inputs() -> None:
    """Three of a thousand workers are recorded, and they are the best three."""
    dice = random.Random(20261115)
    for _ in range(200):
        fleet = [
            worker(
                f"w{number}",
                dice.choice(list(OverloadStatus)),
                queue_depth=dice.randint(0, 4),
                capacity=dice.randint(1, 4),
                unacked=dice.choice([0, 0, 1, MOST_UNACKED - 1, MOST_UNACKED]),
                probed_at=dice.choice([NOW, 0.0]) if dice.random() < 0.1 else NOW,
            )
            for number in range(dice.randint(0, 40))
        ]
        run = Run(f"w{dice.randint(0, 40)}", dice.randint(1, 900), NOW)
        together, room = dice.choice([1, 1, 5]), dice.choice([0, 0, 1, 70])
        ranking = WorkerRanking(fleet, NOW, run.worker_id, together=together, run=run, room=room)
        for _ in range(30):
            draw = dice.random()
            inputs = structs.replace(ranking.inputs(), draw=draw)
            read_back = msgspec.convert(inputs.recorded(), routing.RoutingInputs)
            choice, again = ranking.choose(draw), read_back.choose()
            assert isinstance(choice, Chosen) == isinstance(again, Chosen)
            if isinstance(choice, Chosen):
                assert again == choice
            assert len(inputs.best) <= routing.MOST_RECORDED


def test_inputs_of_another_choice_give_another_answer() -> None:
    """The control."""
    inputs = WorkerRanking([worker("a"), worker("b", queue_depth=1)], NOW).inputs()
    forged = structs.replace(inputs, best=(routing.Candidate("a", taken=5), routing.Candidate("b", taken=1)))
    assert (inputs.choose(), forged.choose()) == (Chosen("a"), Chosen("b"))
