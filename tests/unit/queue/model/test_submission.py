"""Submissions: who is kept, in whose place, who comes back later, and whose turn is next."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.queue.model import admission, submission
from reefknot.queue.model.admission import MISSES_MESSAGE, Accept, Arrival, Reject, RejectReason
from reefknot.queue.model.submission import Displace, OpenWork, ServiceTime, SubmissionRules, admit_submission, in_turns
from tests.rows import for_each_row

S, Q, R, LATER = submission.Stage
TEN = SubmissionRules(size=10)
SECOND = ServiceTime(100, 1000.0)


def submitted(*rows: tuple[int, str, int], slots: int = 0) -> OpenWork:
    """Submissions by priority, tenant and number; no worker is there."""
    return OpenWork([(S, *row) for row in rows], slots=slots)


def full(message: str = submission.FULL_MESSAGE, *, depth: int) -> Reject:
    return Reject(RejectReason.QUEUE_FULL, message, admission.UNKNOWN_WAIT_MS, depth)


def test_the_words_of_the_store_and_the_defaults() -> None:
    assert [stage.value for stage in submission.Stage] == ["submitted", "queued", "running", "scheduled"]
    assert SubmissionRules() == SubmissionRules(1000, 0.5, 0.5, preempt=True)
    assert submission.Capacity() == submission.Capacity({}, None)
    assert ServiceTime() == ServiceTime(0, submission.ASSUMED_MS)


def test_the_first_answers_outweigh_the_assumption_step_by_step() -> None:
    """The assumption is worth four answers: after four of 0 ms half of it is left."""
    mean = ServiceTime()
    for _ in range(submission.ASSUMED_WEIGHT):
        mean = mean.after(0.0)
    assert mean.known == 4
    assert mean.mean_ms == pytest.approx(submission.ASSUMED_MS / 2)


def test_a_known_mean_follows_a_change_within_some_twenty_answers() -> None:
    mean = ServiceTime(10_000, 1000.0)
    assert mean.after(0.0).mean_ms == pytest.approx(1000.0 * (1 - submission.SMOOTHING))
    for _ in range(22):
        mean = mean.after(100.0)
    assert mean.mean_ms < 200


@given(st.lists(st.floats(0, 1e7), max_size=60))
def test_a_mean_lies_between_the_answers_and_the_assumption(times: list[float]) -> None:
    mean = ServiceTime()
    for took in times:
        mean = mean.after(took)
    seen = [submission.ASSUMED_MS, *times]
    assert min(seen) - 1e-6 <= mean.mean_ms <= max(seen) + 1e-6
    assert mean.known == len(times)


def test_only_submissions_take_places_and_rows_without_number_are_left_out() -> None:
    work = OpenWork([(S, 0, "a", 3), (Q, 0, "a", 4), (R, 0, "b", 2), (S, 5, "b", 1), (S, 9, "c", 0)])
    assert (work.submitted, work.submitted_by_tenant()) == (4, {"a": 3, "b": 1})
    work.add(S, 9, "c", 2)
    work.add(S, 0, "a", -1)
    work.add(Q, 0, "c")
    assert (work.submitted, work.submitted_by_tenant()) == (5, {"a": 2, "b": 1, "c": 2})
    work.add(S, 0, "a", -2)
    assert work.lowest() == (5, "b"), "what was displaced is not the lowest any more"


@for_each_row(
    ("rows", "tenant", "lowest"),
    [
        ([], None, None),
        ([(Q, -9, "a", 1), (R, -9, "a", 1)], None, None),
        ([(S, 0, "a", 5), (S, -1, "b", 1)], None, (-1, "b")),
        ([(S, 0, "a", 5), (S, 0, "b", 6)], None, (0, "b")),
        ([(S, 0, "b", 5), (S, 0, "a", 5)], None, (0, "a")),
        ([(S, 0, "a", 5), (S, -1, "b", 1)], "a", (0, "a")),
        ([(S, 0, "a", 5)], "b", None),
        ([(S, 0, "", 5), (S, -1, "b", 5)], "", (0, "")),
    ],
)
def test_the_lowest_is_of_the_lowest_priority_and_there_of_who_holds_most(rows: Any, tenant: Any, lowest: Any) -> None:
    assert OpenWork(rows).lowest(tenant) == lowest


@for_each_row(
    ("rows", "ahead"),
    [
        ([], 0),
        ([(R, -9, "b", 3)], 3),  # a slot is a slot
        ([(S, 1, "b", 3), (Q, 2, "c", 4)], 7),  # higher ones
        ([(S, -1, "b", 3), (Q, -1, "a", 4)], 0),  # lower ones
        ([(S, 0, "a", 3), (Q, 0, "a", 4)], 7),  # its own
        ([(S, 0, "b", 100)], 1),  # one turn of another tenant
        ([(S, 0, "a", 2), (S, 0, "b", 2), (Q, 0, "b", 98), (S, 0, "c", 1)], 2 + 3 + 1),
    ],
)
def test_the_turns_before_an_arrival(rows: list[tuple[str, int, str, int]], ahead: int) -> None:
    assert OpenWork(rows).ahead(0, "a") == ahead


def test_the_wait_is_nothing_while_a_slot_is_free_or_nothing_is_known() -> None:
    def wait(running: int, slots: int) -> float:
        return OpenWork([(R, 0, "a", running)], slots=slots, service=SECOND).wait_ms(0, "a")

    assert [wait(100, 0), wait(3, 4), wait(4, 4), wait(7, 4)] == [0.0, 0.0, 250.0, 1000.0]


counts = st.lists(
    st.tuples(st.sampled_from(["submitted", "queued", "running"]), st.integers(-2, 2), st.sampled_from("abc")),
    max_size=30,
).map(lambda rows: [(*row, number) for row, number in Counter(rows).items()])


@given(counts, st.integers(0, 10_000), st.integers(-2, 2))
def test_a_flood_delays_others_by_its_turns(rows: list[tuple[str, int, str, int]], flood: int, priority: int) -> None:
    """However many of the same priority `z` sends, `a` waits as behind one more than it has itself."""
    quiet = OpenWork(rows, slots=2, service=SECOND)
    own = sum(number for stage, one, name, number in rows if stage != R and (one, name) == (priority, "a"))
    before = quiet.ahead(priority, "a")
    work = OpenWork([*rows, ("submitted", priority, "z", flood)], slots=2, service=SECOND)
    assert work.ahead(priority, "a") == before + min(flood, own + 1)
    work.add(S, priority - 1, "z", flood)
    assert work.ahead(priority, "a") == before + min(flood, own + 1), "and nothing for a lower priority"
    assert work.ahead(priority, "z") >= flood, "it delays itself"


def test_a_tenth_of_the_places_is_for_work_above_the_default_priority() -> None:
    eight, nine = submitted((0, "", 8)), submitted((0, "", 9))
    assert admit_submission(eight, Arrival(), TEN) == Accept()
    assert [admit_submission(nine, Arrival(priority), TEN) for priority in (0, -1)] == [full(depth=9)] * 2
    assert admit_submission(nine, Arrival(1), TEN) == Accept()
    assert admit_submission(submitted((1, "", 10)), Arrival(1), TEN) == full(depth=10)
    assert admit_submission(eight, Arrival(), SubmissionRules(size=9)) == Accept(), "a small queue reserves nothing"
    assert admit_submission(OpenWork(), Arrival(9), SubmissionRules(size=0)) == full(depth=0)


def test_a_higher_priority_displaces_the_lowest_unless_that_is_switched_off() -> None:
    work = submitted((0, "", 5), (-10, "", 3), (5, "", 2))
    answers = [admit_submission(work, Arrival(priority), TEN) for priority in (20, 0, -10)]
    assert answers == [Displace(-10, ""), Displace(-10, ""), full(depth=10)]
    assert admit_submission(work, Arrival(20), SubmissionRules(size=10, preempt=False)) == full(depth=10)


TINY, FIFTH = SubmissionRules(size=3, tenant_share=0.1), SubmissionRules(size=10, tenant_share=0.2)


@for_each_row(
    ("rows", "tenant", "rules", "answer"),
    [
        ([(0, "a", 5)], "a", TEN, Accept()),  # it is alone
        ([(0, "a", 5), (0, "b", 1)], "a", TEN, full(submission.SHARE_MESSAGE, depth=6)),
        ([(0, "a", 5), (0, "b", 1)], "b", TEN, Accept()),
        ([(0, "a", 4), (0, "b", 1)], "a", TEN, Accept()),
        ([(0, "b", 1)], "a", TINY, Accept()),  # a share is one place at least
        ([(0, "b", 1), (0, "a", 1)], "a", TINY, full(submission.SHARE_MESSAGE, depth=2)),
        # both hold more than theirs: the share refuses before another one is displaced
        ([(0, "a", 5), (0, "b", 5)], "b", FIFTH, full(submission.SHARE_MESSAGE, depth=10)),
    ],
)
def test_while_others_wait_no_tenant_holds_more_than_its_share(rows: Any, tenant: str, rules: Any, answer: Any) -> None:
    assert admit_submission(submitted(*rows), Arrival(0, tenant=tenant), rules) == answer


def test_a_tenant_with_its_share_displaces_its_own_lower_work_and_nobody_elses() -> None:
    work = submitted((-5, "a", 2), (0, "a", 3), (-10, "b", 1))
    assert admit_submission(work, Arrival(0, tenant="a"), TEN) == Displace(-5, "a")
    assert admit_submission(work, Arrival(-5, tenant="a"), TEN) == full(submission.SHARE_MESSAGE, depth=6)
    off = SubmissionRules(size=10, preempt=False)
    assert admit_submission(work, Arrival(0, tenant="a"), off) == full(submission.SHARE_MESSAGE, depth=6)


@for_each_row(
    ("rows", "priority", "answer"),
    [
        ([(0, "a", 9)], 0, Displace(0, "a")),  # a has more than half, and b nothing
        ([(0, "a", 5), (-1, "a", 4)], 0, Displace(-1, "a")),
        ([(0, "a", 5), (-1, "a", 4)], -1, Displace(-1, "a")),
        ([(1, "a", 9)], 0, full(depth=9)),  # all of it matters more
        ([(0, "a", 5), (0, "c", 4)], 0, Displace(0, "a")),  # a third of the places is b's
        ([(0, "a", 3), (0, "b", 3), (0, "c", 3)], 0, full(depth=9)),  # nobody has more than its share
        ([(0, "b", 9)], 0, full(depth=9)),  # b itself is the greedy one
    ],
)
def test_a_greedy_tenant_makes_room(rows: list[tuple[int, str, int]], priority: int, answer: Displace | Reject) -> None:
    for preempt in (True, False):
        rules = SubmissionRules(size=10, preempt=preempt)
        assert admit_submission(submitted(*rows), Arrival(priority, tenant="b"), rules) == answer


def behind(number: int, *, slots: int = 2) -> OpenWork:
    """So many of the same tenant, each of a second."""
    return OpenWork([(Q, 0, "", number)], slots=slots, service=SECOND)


def test_work_whose_turn_would_come_too_late_is_refused_with_the_time_to_come_back() -> None:
    """Of ten seconds 0.7 · 0.5 may pass: seven turns of two slots take exactly that."""
    kept, refused = (admit_submission(behind(turns), Arrival(0, 10_000), SubmissionRules()) for turns in (8, 9))
    assert (kept, refused) == (Accept(), Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES_MESSAGE, 2000, 9))


def test_work_that_would_begin_in_time_and_end_too_late_is_refused_as_well() -> None:
    """Half a second of waiting and twice a second of service do not fit into 2.499 s, whatever share may be waited."""
    rules = SubmissionRules(max_wait_fraction=1.0)
    refused = admit_submission(behind(2), Arrival(0, 2499), rules)
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.WOULD_MISS_DEADLINE
    assert admit_submission(behind(2), Arrival(0, 2500), rules) == Accept()


@for_each_row(
    ("work", "arrival", "rules"),
    [
        (behind(1000), Arrival(0, None), SubmissionRules()),
        (behind(1000), Arrival(0, 1.0), SubmissionRules(max_wait_fraction=None)),
        (behind(1000, slots=0), Arrival(0, 1.0), SubmissionRules()),
        (behind(1), Arrival(0, 1.0), SubmissionRules()),  # a free slot: the worker judges
        (behind(1000), Arrival(1, 1000.0), SubmissionRules()),  # nothing of its priority is before it
    ],
)
def test_none_is_refused_for_time_without_a_deadline_rule_worker_or_wait(work: Any, arrival: Any, rules: Any) -> None:
    assert admit_submission(work, arrival, rules) == Accept()


@for_each_row(
    ("mean_ms", "after"), [(1.0, admission.SHORTEST_WAIT_MS), (200.0, 1000), (100_000.0, admission.LONGEST_WAIT_MS)]
)
def test_the_time_to_come_back_is_half_of_the_wait_within_bounds(mean_ms: float, after: int) -> None:
    """Ten turns of one slot."""
    work = OpenWork([(Q, 0, "", 10)], slots=1, service=ServiceTime(9, mean_ms))
    answer = admit_submission(work, Arrival(0, 1.0), SubmissionRules())
    assert answer == Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES_MESSAGE, after, 10)


def test_a_full_queue_tells_the_time_to_come_back_by_what_is_ahead() -> None:
    work = OpenWork([(S, 0, "", 9)], slots=1, service=SECOND)
    assert admit_submission(work, Arrival(), TEN) == Reject(RejectReason.QUEUE_FULL, submission.FULL_MESSAGE, 4500, 9)


arrivals = st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(["", "a", "b"])), max_size=60)
some_rules = st.builds(
    SubmissionRules, size=st.integers(1, 20), tenant_share=st.sampled_from([0.1, 0.3, 0.5, 1.0]), preempt=st.booleans()
)


def keep(work: OpenWork, priority: int, tenant: str, rules: SubmissionRules) -> Accept | Displace | Reject:
    verdict = admit_submission(work, Arrival(priority, tenant=tenant), rules)
    if not isinstance(verdict, Reject):
        work.add(S, priority, tenant)
    if isinstance(verdict, Displace):
        work.add(S, verdict.priority, verdict.tenant, -1)
    return verdict


@given(arrivals, some_rules)
def test_a_crowd_never_gets_more_places_than_there_are(crowd: list[tuple[int, str]], rules: SubmissionRules) -> None:
    work = OpenWork()
    for priority, tenant in crowd:
        keep(work, priority, tenant, rules)
        held = work.submitted_by_tenant()
        assert work.submitted <= rules.size
        assert min(held.values(), default=0) >= 0, "who is displaced was there"
        assert sum(held.values()) == work.submitted


@given(arrivals, some_rules, st.integers(-2, 2), st.sampled_from(["", "a", "b"]))
def test_nobody_is_refused_while_less_important_work_waits_that_may_go(
    crowd: list[tuple[int, str]], rules: SubmissionRules, priority: int, tenant: str
) -> None:
    """Preemption looks at everybody's work; at the tenant's own, when that tenant has its share."""
    work = OpenWork()
    for one, name in crowd:
        keep(work, one, name, rules)
    verdict = admit_submission(work, Arrival(priority, tenant=tenant), rules)
    if rules.preempt and isinstance(verdict, Reject):
        lowest = work.lowest(tenant if verdict.message == submission.SHARE_MESSAGE else None)
        assert lowest is None or lowest[0] >= priority
    if isinstance(verdict, Displace):
        assert verdict.priority < priority or (verdict.priority == priority and verdict.tenant != tenant)
        assert work.submitted_by_tenant()[verdict.tenant] > 0


@given(st.integers(2, 50), st.sampled_from([0.1, 0.5, 0.8]), st.integers(-2, 2))
def test_a_tenant_without_work_is_not_refused_for_the_flood_of_another(size: int, share: float, priority: int) -> None:
    rules, work = SubmissionRules(size=size, tenant_share=share), OpenWork()
    for _ in range(3 * size):
        keep(work, priority, "flood", rules)
    assert not isinstance(keep(work, priority, "late", rules), Reject)


def test_tenants_take_turns_within_a_priority_beginning_behind_the_last() -> None:
    queues: dict[str, list[submission.Waiting]] = {
        "a": [(5, 0, 1), (0, 0, 2), (0, 1, 3), (0, 2, 4)],
        "b": [(0, 0, 5)],
        "c": [(9, 9, 6), (0, 0, 7)],
    }
    assert [waiting[2] for _, waiting in in_turns(queues, 99)] == [6, 1, 2, 5, 7, 3, 4]
    assert [name for name, _ in in_turns(queues, 99, after="a")] == ["c", "a", "b", "c", "a", "a", "a"]
    assert [name for name, _ in in_turns(queues, 3, after="c")] == ["c", "a", "a"]
    assert in_turns(queues, 0) == []
    assert in_turns({}, 5) == []


lines = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 9)), max_size=8).map(lambda rows: sorted(rows, reverse=True)),
)


@given(lines, st.integers(0, 40), st.sampled_from(["", "a", "b", "c", "d", "z"]))
def test_turns_are_a_permutation_with_priorities_descending_and_nobody_twice_before_another(
    given_lines: dict[str, list[tuple[int, int]]], n: int, after: str
) -> None:
    queues: dict[str, list[submission.Waiting]] = {
        name: [(priority, due, number) for number, (priority, due) in enumerate(line)]
        for name, line in given_lines.items()
    }
    everything = in_turns(queues, 99, after)
    assert Counter(everything) == Counter((name, one) for name, queue in queues.items() for one in queue)
    assert in_turns(queues, n, after) == everything[:n], "the next few are the first of all"
    priorities = [waiting[0] for _, waiting in everything]
    assert priorities == sorted(priorities, reverse=True)
    for name, queue in queues.items():
        assert [waiting for one, waiting in everything if one == name] == queue, "each queue in its own order"
    for level in set(priorities):
        turns = [name for name, waiting in everything if waiting[0] == level]
        left = Counter(turns)
        had: Counter[str] = Counter()
        for name in turns:
            assert all(had[name] <= had[other] or not left[other] for other in left), "a turn each"
            had[name] += 1
            left[name] -= 1


def test_work_for_later_holds_no_place_and_is_ahead_of_nobody() -> None:
    later = OpenWork([(LATER, 9, "a", 5000), (S, 0, "a", 1)], slots=1)
    assert (later.submitted, later.ahead(0, "a"), later.lowest()) == (1, 1, (0, "a"))
    assert admit_submission(later, Arrival(deadline_ms=10_000), TEN) == Accept()


def test_work_for_later_is_bounded_by_count_and_by_tenant() -> None:
    def answer(*held: tuple[str, int]) -> object:
        rows = [(LATER, 0, tenant, number) for tenant, number in held]
        return submission.admit_scheduled(OpenWork([*rows, (S, 0, "a", 10)]), "a", TEN)

    assert answer(("a", 99)) == Accept(), "alone it may have all of the schedule; a full queue is another matter"
    assert isinstance(answer(("a", 100)), Reject)
    assert isinstance(answer(("a", 50), ("b", 1)), Reject), "beside others no more than its share"
    assert answer(("a", 49), ("b", 1)) == Accept()


def test_each_arrival_of_a_batch_counts_for_those_after_it_and_a_class_is_read_once() -> None:
    read: list[str] = []

    def opened(pool: str) -> tuple[OpenWork, SubmissionRules | None]:
        read.append(pool)
        return submitted((0, "", 2)), SubmissionRules(size=2) if pool == "io" else None

    batch, three = submission.BatchAdmission(opened), SubmissionRules(size=3)
    answers = [batch.admit("cpu", None, Arrival(priority), three) for priority in (0, 0, 9, 9)]
    assert answers == [Accept(), full(depth=3), Displace(0, ""), Displace(0, "")]
    assert batch.admit("io", S, Arrival(), three) == full(depth=2), "the rules that a router has published come first"
    assert [batch.admit("cpu", LATER, Arrival(), TINY) for _ in range(31)].count(Accept()) == 30, (
        "with a bound of its own"
    )
    assert read == ["cpu", "io"]
