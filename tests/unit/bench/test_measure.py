"""Taking turns, minima, batch sizes: the arithmetic of a measurement, with batches that only pretend to take time."""

import gc
from collections.abc import Iterable

import pytest

from bench.calls import sync_call
from bench.measure import Contestant, Timing, batch_size, measure, turns


def scripted(name: str, taken: Iterable[float], log: list[str] | None = None) -> Contestant:
    """One call a batch, each as long as the script says; the first is the one that does not count."""
    script = iter(taken)

    def batch(calls: int) -> float:
        assert calls == 1
        if log is not None:
            log.append(name)
        return next(script)

    return Contestant(name, batch)


def steady(name: str, seconds: float) -> Contestant:
    return Contestant(name, lambda calls: calls * seconds)


def test_each_has_one_turn_a_round_and_another_one_begins_each_round() -> None:
    a, b, c = (steady(name, 1.0) for name in "abc")
    assert "".join(one.name for one in turns([a, b, c], 4)) == "abc" + "bca" + "cab" + "abc"

    log: list[str] = []
    measure([scripted("a", [1.0] * 3, log), scripted("b", [1.0] * 3, log)], rounds=2, batch_seconds=None)
    assert "".join(log) == "ab" + "ab" + "ba", "not one after the other"


def test_the_fastest_batch_counts_and_the_middle_one_tells_the_spread() -> None:
    """0.1 s, the fastest of all, is the warm-up, which does not count."""
    timings = measure([scripted("a", [0.1, 5.0, 2.0, 3.0])], rounds=3, batch_seconds=None)
    assert timings == {"a": Timing(best=2.0, middle=3.0)}
    assert timings["a"].spread == pytest.approx(0.5)


def test_a_slow_spell_of_the_machine_does_not_change_who_is_faster() -> None:
    """All are slowed down tenfold for two rounds of three; measured apart, the slower one would have won."""
    fast, slow = scripted("fast", [1.0, 10.0, 10.0, 1.0]), scripted("slow", [2.0, 20.0, 20.0, 2.0])
    timings = measure([fast, slow], rounds=3, batch_seconds=None)
    assert timings["slow"].best / timings["fast"].best == 2.0
    assert timings["fast"].middle > timings["slow"].best


def test_figures_are_for_one_call_whatever_the_size_of_a_batch() -> None:
    timings = measure([steady("fast", 1e-6), steady("slow", 1e-3)], rounds=2, batch_seconds=0.01)

    assert timings["fast"].best == pytest.approx(1e-6)
    assert timings["slow"].best == pytest.approx(1e-3)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 10_000), (1e-3, 10), (1.0, 1), (0.0, 1 << 24)])
def test_a_batch_has_as_many_calls_as_fit_into_its_time_and_at_least_one(seconds: float, calls: int) -> None:
    """One that takes no time does not calibrate forever."""
    assert batch_size(steady("a", seconds), 0.01) == calls


def test_a_batch_that_was_held_up_does_not_make_the_others_small() -> None:
    held_up = iter([1.0, 1.0])

    def batch(calls: int) -> float:
        return 1e-6 * calls + next(held_up, 0.0)

    assert batch_size(Contestant("a", batch), 0.01) == 10_000


def test_the_collector_is_off_while_batches_run_and_on_again_afterwards_or_after_an_error() -> None:
    seen: list[bool] = []

    def batch(calls: int) -> float:
        seen.append(gc.isenabled())
        return 1.0 if len(seen) < 4 else 1 / 0

    assert gc.isenabled()
    measure([Contestant("a", batch)], rounds=2, batch_seconds=None)
    assert (seen, gc.isenabled()) == ([False, False, False], True)
    with pytest.raises(ZeroDivisionError):
        measure([Contestant("a", batch)], rounds=1, batch_seconds=None)
    assert gc.isenabled()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        measure([steady("a", 1.0), steady("a", 1.0)], rounds=1, batch_seconds=None)
    with pytest.raises(ValueError, match="accepted is 1 or more"):
        measure([steady("a", 1.0)], rounds=0, batch_seconds=None)
    with pytest.raises(ValueError, match="does not do the work"):
        sync_call("broken", lambda x: x + 1)


def test_a_contestant_that_does_a_thousand_times_the_work_is_found_slower_by_far() -> None:
    """The control of the whole: real functions, real time, and room for any noise."""

    def slow(x: int) -> int:
        for _ in range(1000):
            pass
        return x

    timings = measure([sync_call("fast", lambda x: x), sync_call("slow", slow)], rounds=3, batch_seconds=0.0005)
    assert timings["slow"].best > 3 * timings["fast"].best
