"""The places of a resource class: one for each id, what is due, what has expired, and which is the oldest."""

from math import inf
from random import Random

import pytest

from reefknot.queue.model.admission import Oldest
from reefknot.queue.model.submission import OpenWork, Stage
from reefknot.queue.worker.pool import BoundedQueue, Queued


def filled(*items: Queued, size: int | None = 10) -> BoundedQueue:
    queue = BoundedQueue(size)
    for item in items:
        queue.put(item, 0.0)
    return queue


def due(queue: BoundedQueue, now: float = 0.0, most: int = 99) -> list[str]:
    return [item.id for item in queue.due(now, most)]


MIXED = (Queued("a"), Queued("b", 5), Queued("c"), Queued("d", 5), Queued("e", -1))


def test_clearing_gives_up_every_place() -> None:
    queue = filled(*MIXED, Queued("later", due=9.0, expires=99.0))
    queue.clear()
    assert (queue.depth, queue.oldest(1.0), queue.next_due(99.0), queue.expired(999.0)) == (0, None, None, [])


def test_of_places_that_are_equally_old_the_first_that_came_is_the_oldest() -> None:
    queue = filled(*(Queued(name, since=1.0) for name in ("old", "mid", "new")))
    for number in range(1000):  # through every sweep of entries whose places are gone
        queue.put(Queued(f"x{number}", since=2.0), 2.0)
        queue.remove(f"x{number}")
    for name in ("old", "mid", "new"):
        assert queue.oldest(2.0) == Oldest(name, 0, 1000)
        assert queue.remove(name) == Queued(name, since=1.0)


def test_the_oldest_of_the_lowest_priority_may_be_waiting_for_its_time() -> None:
    queue = filled(Queued("a", since=3.0), Queued("retry", since=1.0, due=50.0), Queued("b", 5, since=0.0))
    assert queue.oldest(10.0) == Oldest("retry", 0, 9000)
    queue.remove("retry")
    assert queue.oldest(10.0) == Oldest("a", 0, 7000)
    assert filled(Queued("a"), Queued("x", -1, since=2.0, due=9.0)).oldest(3.0) == Oldest("x", -1, 1000)


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_is_found_whatever_came_and_went(seed: int) -> None:
    """Against a look at everybody, after every step of a random history."""
    rng, queue, here, now = Random(seed), BoundedQueue(1000), dict[str, Queued](), 0.0
    for number in range(600):
        now += 1.0
        if rng.random() < 0.5 or not here:
            since = now if rng.random() < 0.6 else rng.random() * now
            later = now + rng.random() * 20 if rng.random() < 0.3 else 0.0
            item = Queued(str(number), rng.choice([0, 0, 5, -5, number]), since, later)
            queue.put(item, now)
            here[item.id] = item
        else:
            gone = queue.remove(rng.choice(list(here)))
            assert gone is not None
            del here[gone.id]
        if rng.random() < 0.3:  # as the pool looks for something to claim
            queue.next_due(now)
        lowest = min((one.priority for one in here.values()), default=0)
        ages = [one.since for one in here.values() if one.priority == lowest]
        found = queue.oldest(now)
        assert (found and here[found.id].since) == min(ages, default=None)
        assert queue.oldest_age(now) == max((now - one.due for one in here.values() if one.due <= now), default=0.0)


def test_entries_of_places_that_are_gone_do_not_pile_up_however_often_work_comes_back() -> None:
    queue = filled(Queued("new", since=1e6, expires=1e9))
    for number in range(10_000):
        queue.put(Queued("retry", since=1.0, due=number + 1.0, expires=1e9), float(number))
        assert "retry" in due(queue, number + 1.0)
        queue.put(Queued("new", since=1e6, expires=1e9), number + 1.0)
        queue.remove("retry")
    for number in range(10_000):  # given up before it was due
        queue.put(Queued("retry", due=1e6 + number), 1.0)
        queue.remove("retry")
    assert sum(len(ages._early) + len(ages.places) for ages in queue._ages.values()) < 200
    assert (len(queue._expiring) < 200, len(queue._due) < 200) == (True, True)
    assert (queue.depth, queue.oldest(1e6)) == (1, Oldest("new", 0, 0))


def test_priorities_that_nobody_has_any_more_are_not_kept() -> None:
    queue = filled()
    for priority in range(5_000):
        queue.put(Queued(str(priority), priority, since=1.0, due=99.0), 1.0)
        queue.remove(str(priority))
    assert (queue.oldest(2.0), queue.oldest_age(2.0)) == (None, 0.0)
    assert len(queue._ages) <= 20


def test_the_age_of_the_oldest_is_the_time_since_it_became_due() -> None:
    """Not since its submission: a retry, or what comes out of quarantine, does not begin with an age of hours."""
    queue = filled(Queued("a", since=1.0, due=7.0), Queued("b", since=2.0, due=50.0))
    assert [queue.oldest_age(now) for now in (6.0, 10.0)] == [0.0, 3.0]
    queue.put(Queued("c", priority=-5, since=10.0, due=5.0), 10.0)
    assert queue.oldest_age(10.0) == 5.0


def test_expired_work_is_taken_out_and_told_once() -> None:
    late = Queued("a", expires=5.0), Queued("c", due=9.0, expires=4.0), Queued("d", 3, expires=9.0)
    queue = filled(*late, Queued("b"))
    assert [[item.id for item in queue.expired(now)] for now in (3.9, 5.0, 5.0)] == [[], ["c", "a"], []]
    assert sorted(due(queue, 5.0)) == ["b", "d"]


def test_looking_at_what_is_due_takes_nothing() -> None:
    queue = filled(*MIXED, Queued("later", 50, due=2.0))
    assert len(due(queue, 1.0, 2)) == 2
    assert (sorted(due(queue, 2.0)), queue.depth) == (["a", "b", "c", "d", "e", "later"], 6)


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_plain_list_whatever_is_done_to_it(seed: int) -> None:
    """An id has one place; one that waits for its time keeps it when it is put again, unless it is due now."""
    rng, queue, plain, now = Random(seed), BoundedQueue(None), dict[str, Queued](), 0.0
    for _ in range(2000):
        now += rng.random() * 0.1
        name = f"i{rng.randrange(40)}"
        match rng.choice(["put", "put", "remove", "due", "expired", "next"]):
            case "put":
                expires = now + rng.choice([inf, 0.5, 2.0])
                item = Queued(name, rng.randrange(3), now, now + rng.choice([0.0, 0.0, 1.0]), expires)
                queue.put(item, now)
                if name not in plain or item.due <= now:
                    plain[name] = item
            case "remove":
                assert queue.remove(name) == plain.pop(name, None)
            case "due":
                ready = {one.id for one in plain.values() if one.due <= now}
                assert set(due(queue, now)) == ready
                assert (queue.ready, queue.later) == (len(ready), len(plain) - len(ready))
            case "expired":
                late = {one.id for one in plain.values() if one.expires <= now}
                assert {one.id for one in queue.expired(now)} == late
                for gone in late:
                    del plain[gone]
            case _:
                soonest = min((one.due for one in plain.values()), default=None)
                assert queue.next_due(now) == (None if soonest is None else max(0.0, soonest - now))
        assert (queue.depth, queue.get(name), name in queue) == (len(plain), plain.get(name), name in plain)


def test_an_arrival_overtakes_lower_priorities_and_the_later_turns_of_other_tenants() -> None:
    flood = [Queued(f"a{number}", tenant="a") for number in range(20)]
    queue = filled(*flood, Queued("b0", tenant="b"), Queued("low", -1), Queued("high", 5), size=None)
    assert queue.behind(0, "a") == 1, "the low one"
    assert queue.behind(0, "b") == 1 + 18, "and all but two turns of a"
    assert queue.behind(0, "c") == 1 + 19, "of b nothing: it has one turn before c"
    assert queue.behind(0, "") == queue.behind(0, "c")
    assert (queue.behind(-9, "a"), queue.behind(9, "a")) == (0, queue.depth)


def test_a_worker_counts_turns_as_the_store_does_whoever_comes_and_goes() -> None:
    """Who is admitted by the store's count should not be refused by that of the worker."""
    rng = Random(1)
    queue, there = BoundedQueue(None), OpenWork()
    here: dict[str, Queued] = {}
    for number in range(2000):
        if here and rng.random() < 0.45:
            gone = here.pop(rng.choice(list(here)))
            assert queue.remove(gone.id) == gone
            there.add(Stage.QUEUED, gone.priority, gone.tenant, -1)
        else:
            due_at = rng.choice([0.0, 0.0, 1e9])
            item = Queued(f"a{number}", rng.randint(-1, 1), float(number), due_at, tenant=rng.choice(["", "x", "y"]))
            here[item.id] = item
            queue.put(item, 0.0)
            there.add(Stage.QUEUED, item.priority, item.tenant)
        for priority in (-2, -1, 0, 1, 2):
            for tenant in ("", "x", "new"):
                assert queue.depth - queue.behind(priority, tenant) == there.ahead(priority, tenant)
