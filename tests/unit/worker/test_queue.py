"""Order, places, due times and expiry of the bounded queue."""

from __future__ import annotations

from random import Random

import pytest

from reefknot.core.overload.admission import Oldest
from reefknot.worker.queue import BoundedQueue, Queued


def filled(*items: Queued, size: int | None = 10) -> BoundedQueue:
    queue = BoundedQueue(size)
    for item in items:
        queue.put(item, 0.0)
    return queue


def taken(queue: BoundedQueue, now: float = 0.0, *, newest_first: bool = False) -> list[str]:
    ids = []
    while (item := queue.take(now, newest_first=newest_first)) is not None:
        ids.append(item.id)
    return ids


MIXED = (Queued("a"), Queued("b", 5), Queued("c"), Queued("d", 5), Queued("e", -1))


def test_priority_first_and_then_the_oldest() -> None:
    assert taken(filled(*MIXED)) == ["b", "d", "a", "c", "e"]


def test_on_request_the_newest_of_a_priority_comes_first() -> None:
    assert taken(filled(*MIXED), newest_first=True) == ["d", "b", "c", "a", "e"]


def test_what_is_not_due_keeps_its_place_and_comes_when_it_is_time() -> None:
    queue = filled(Queued("later", 9, due=5.0), Queued("now"))

    assert (queue.depth, queue.ready) == (2, 1)
    assert taken(queue, 4.999) == ["now"]
    assert queue.depth == 1
    assert queue.next_due(2.0) == 3.0
    assert taken(queue, 5.0) == ["later"]
    assert queue.depth == 0


def test_the_next_due_time_forgets_what_left() -> None:
    queue = filled(Queued("x", due=1.0), Queued("y", due=2.0))
    queue.remove("x")

    assert queue.next_due(0.0) == 2.0
    queue.remove("y")
    assert queue.next_due(0.0) is None
    queue.put(Queued("z"), 0.0)
    assert queue.next_due(0.0) == 0.0
    assert filled(Queued("x", due=1.0)).next_due(9.0) == 0.0


def test_the_same_id_has_one_place_however_often_it_is_put() -> None:
    queue = filled(Queued("a"), Queued("a"), Queued("a", due=3.0))

    assert queue.depth == 1
    assert taken(queue, 9.0) == ["a"]
    assert queue.depth == 0


def test_a_waiting_one_that_becomes_due_earlier_moves() -> None:
    queue = filled(Queued("a", due=3.0), Queued("a"))

    assert (queue.depth, queue.ready) == (1, 1)
    assert taken(queue) == ["a"]


def test_removing_gives_up_a_place_wherever_it_is() -> None:
    queue = filled(*MIXED, Queued("later", due=9.0))

    assert queue.remove("c") == Queued("c")
    assert queue.remove("later") == Queued("later", due=9.0)
    assert queue.remove("none") is None
    assert "c" not in queue
    assert "a" in queue
    assert queue.depth == 4


def test_the_oldest_is_the_one_of_the_lowest_priority_that_has_been_here_longest() -> None:
    queue = filled(Queued("a", 5, since=0.0), Queued("b", 0, since=2.0), Queued("c", 0, since=1.0))

    assert queue.oldest(10.0) == Oldest("c", 0, 9000)
    assert filled().oldest(1.0) is None


def test_the_oldest_may_be_waiting_for_its_time() -> None:
    queue = filled(Queued("a", since=3.0), Queued("retry", since=1.0, due=50.0), Queued("b", since=4.0))

    assert queue.oldest(10.0) == Oldest("retry", 0, 9000)
    queue.remove("retry")
    assert queue.oldest(10.0) == Oldest("a", 0, 7000)
    assert filled(Queued("a"), Queued("x", -1, since=2.0, due=9.0)).oldest(3.0) == Oldest("x", -1, 1000)


def test_what_comes_back_is_as_old_as_it_was_although_it_stands_last() -> None:
    queue = filled(Queued("a", since=3.0), Queued("retry", since=1.0, due=5.0))
    queue.put(Queued("b", since=6.0), 6.0)
    woken = [queue.take(6.0, newest_first=True), queue.oldest(6.0)]

    assert woken == [Queued("retry", since=1.0, due=5.0), Oldest("a", 0, 3000)]


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_is_found_whatever_came_and_went(seed: int) -> None:
    """Against a look at everybody, after every step of a random history."""
    rng, queue, here, now = Random(seed), BoundedQueue(1000), dict[str, Queued](), 0.0
    for number in range(600):
        now += 1.0
        step = rng.random()
        if step < 0.5 or not here:
            since = now if rng.random() < 0.6 else rng.random() * now
            due = now + rng.random() * 20 if rng.random() < 0.3 else 0.0
            item = Queued(str(number), rng.choice([0, 0, 5, -5, number]), since, due)
            queue.put(item, now)
            here[item.id] = item
        elif step < 0.75:
            gone = queue.remove(rng.choice(list(here)))
            assert gone is not None
            del here[gone.id]
        else:
            taken = queue.take(now, newest_first=rng.random() < 0.5)
            if taken is not None:
                del here[taken.id]
        lowest = min((one.priority for one in here.values()), default=0)
        ages = [one.since for one in here.values() if one.priority == lowest]
        found = queue.oldest(now)
        assert (found and here[found.id].since) == min(ages, default=None)
        assert queue.oldest_age(now) == max((now - one.since for one in here.values()), default=0.0)


def test_marks_of_age_do_not_pile_up_however_often_work_comes_back() -> None:
    queue = filled(Queued("new", since=1e6))
    for number in range(10_000):
        queue.put(Queued("retry", since=1.0, due=number + 1.0), float(number))
        assert queue.take(number + 1.0) is not None
        queue.put(Queued("new", since=1e6), number + 1.0)
        queue.remove("retry")

    assert sum(len(marks) for marks in queue._old.values()) < 200


def test_lines_of_priorities_that_nobody_has_any_more_are_not_kept() -> None:
    queue = filled()
    for priority in range(5_000):
        queue.put(Queued(str(priority), priority, since=1.0, due=99.0), 1.0)
        queue.remove(str(priority))

    assert (len(queue._lines) <= 20, queue.oldest(2.0)) == (True, None)


def test_the_age_of_the_oldest_counts_everybody() -> None:
    queue = filled(Queued("a", since=5.0), Queued("b", since=2.0, due=50.0))

    assert queue.oldest_age(10.0) == 8.0
    assert filled().oldest_age(10.0) == 0.0


def test_expired_work_is_taken_out_and_told_once() -> None:
    queue = filled(
        Queued("a", expires=5.0), Queued("b"), Queued("c", due=9.0, expires=4.0), Queued("d", 3, expires=9.0)
    )

    assert [item.id for item in queue.expired(3.9)] == []
    assert [item.id for item in queue.expired(5.0)] == ["c", "a"]
    assert queue.expired(5.0) == []
    assert sorted(taken(queue, 5.0)) == ["b", "d"]


def test_marks_of_expiry_do_not_pile_up_however_often_work_comes_back() -> None:
    queue = filled()
    for number in range(10_000):
        queue.put(Queued("a", due=number + 1.0, expires=1e6), float(number))
        queue.take(number + 1.0)
        queue.put(Queued("b", expires=1e6), float(number))

    assert len(queue._expiring) < 200


def test_lines_of_priorities_that_nobody_uses_do_not_pile_up() -> None:
    queue = filled()
    for priority in range(1000):
        queue.put(Queued("a", priority), 0.0)
        queue.remove("a")

    assert len(queue._lines) < 20


def test_looking_at_what_is_due_takes_nothing() -> None:
    queue = filled(*MIXED, Queued("later", 50, due=2.0))

    assert [item.id for item in queue.due(1.0, 2)] == ["b", "d"]
    assert [item.id for item in queue.due(2.0, 99)] == ["later", "b", "d", "a", "c", "e"]
    assert queue.depth == 6


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_plain_list_whatever_is_done_to_it(seed: int) -> None:
    rng, queue, plain, now = Random(seed), BoundedQueue(None), {}, 0.0
    order: dict[str, int] = {}
    for step in range(2000):
        now += rng.random() * 0.1
        name = f"i{rng.randrange(40)}"
        match rng.choice(["put", "put", "take", "remove"]):
            case "put" if name not in plain:
                item = Queued(name, rng.randrange(3), now, now + rng.choice([0.0, 0.0, 1.0]))
                queue.put(item, now)
                plain[name] = item
                order[name] = step
            case "take":
                got = queue.take(now)
                due = [item for item in plain.values() if item.due <= now]
                assert (got is None) == (not due)
                if got is not None:
                    assert got.priority == max(item.priority for item in due)
                    del plain[got.id]
            case "remove":
                assert (queue.remove(name) is None) == (plain.pop(name, None) is None)
            case _:
                pass
        assert queue.depth == len(plain)
