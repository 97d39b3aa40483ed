"""A call on its way through failures: the end, the note, and what outer retries hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import reefknot as rk
from reefknot.engines.clocks import VirtualClock
from reefknot.retrying.failures import EXHAUSTED_MARK, read_failure
from tests.unit.retrying.flaky import Always, AsyncFlaky, Flaky


class Wrapped(Exception):
    """What a layer of an application raises in place of what it got."""


def nested(levels: int, work: Callable[[], object], *, wrap: bool = False) -> Callable[[], object]:
    """`work` under that many retries of three attempts each."""
    call: Callable[[], object] = work
    for level in range(levels):
        inner = call

        def layer(inner: Callable[[], object] = inner) -> object:
            try:
                return inner()
            except Exception as error:
                if wrap:
                    raise Wrapped("from below") from error
                raise

        call = rk.retry(on=Exception, attempts=3, name=f"level {level}")(layer)
    return call


# ---- layers do not multiply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
def test_three_levels_of_three_attempts_are_three_calls(wrap: bool, no_wait: VirtualClock) -> None:
    fn = Always()
    with pytest.raises(Exception, match="from below" if wrap else "call 3"):
        nested(3, fn, wrap=wrap)()
    assert fn.calls == 3


def test_control_without_the_mark_they_are_twenty_seven(no_wait: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.retrying.call._TELLS_OUTER_ONES", frozenset())
    fn = Always()
    with pytest.raises(ConnectionError):
        nested(3, fn)()
    assert fn.calls == 27


def test_the_outer_retry_says_that_an_inner_one_gave_up(no_wait: VirtualClock) -> None:
    with pytest.raises(ConnectionError) as raised:
        nested(2, Always())()
    assert [note.split(":")[0] for note in raised.value.__notes__] == ["reefknot[level 0]", "reefknot[level 1]"]
    assert "an inner retry already gave up" in raised.value.__notes__[1]


def test_a_group_of_exhausted_retries_is_not_multiplied() -> None:
    fn = AsyncFlaky(*[ConnectionError] * 99)

    @rk.retry(attempts=3)
    async def outer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(rk.retry(attempts=3)(fn)())

    with pytest.raises(ExceptionGroup) as raised:
        rk.testing.run_virtual(outer())
    assert fn.calls == 3
    assert "an inner retry already gave up" in raised.value.__notes__[0]


def test_an_inner_deadline_is_an_exhausted_inner_retry() -> None:
    calls = 0

    @rk.retry(on=TimeoutError, deadline=2)
    async def inner() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(60)

    outcome = rk.testing.run_virtual(rk.Retrier(on=TimeoutError).arun(inner))
    assert (calls, outcome.reason) == (1, rk.Reason.INNER_EXHAUSTED)


def test_an_inner_refusal_to_retry_is_not_exhaustion(no_wait: VirtualClock) -> None:
    """The inner one did not think it worth it; the outer one does, and nothing was multiplied."""
    fn = Flaky(KeyError, KeyError)
    assert rk.retry(on=KeyError)(rk.retry(on=ConnectionError)(fn))() == "ok"
    assert fn.calls == 3


def test_raise_e_from_e_does_not_hang(no_wait: VirtualClock) -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        error = ConnectionError("its own cause")
        raise error from error

    with pytest.raises(ConnectionError, match="its own cause"):
        rk.retry(attempts=2)(work)()
    assert calls == 2


def test_an_exception_object_used_again_and_again_is_not_exhausted_in_a_later_call(no_wait: VirtualClock) -> None:
    singleton = ConnectionError("always the same object")
    for _ in range(3):
        fn = Flaky(*[singleton] * 9)
        with pytest.raises(ConnectionError):
            rk.retry(attempts=4, name="x")(fn)()
        assert fn.calls == 4
    assert read_failure(singleton, 0).exhausted  # the old mark is there, and did not count
    assert getattr(singleton, EXHAUSTED_MARK) > 0


def test_notes_do_not_pile_up_on_an_exception_used_again(no_wait: VirtualClock) -> None:
    singleton = ConnectionError("always the same object")
    singleton.add_note("somebody else's")
    for _ in range(5):
        with pytest.raises(ConnectionError):
            rk.retry(attempts=2, name="x")(Flaky(*[singleton] * 9))()
    assert len(singleton.__notes__) == 2
    assert singleton.__notes__[0] == "somebody else's"


def test_an_exception_that_takes_no_attributes_still_comes_back(no_wait: VirtualClock) -> None:
    class Closed(ConnectionError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

        def add_note(self, note: str) -> None:
            raise TypeError("no notes")

    with pytest.raises(Closed):
        rk.retry(attempts=2)(Flaky(Closed("a"), Closed("b")))()


# ---- why it ended ----------------------------------------------------------------------------------------------------


def test_the_note_says_why_how_often_how_long_and_under_which_policy(virtual_time: VirtualClock) -> None:
    with pytest.raises(ConnectionError) as raised:
        rk.retry(attempts=3, base_delay=1, jitter="none", deadline=60, name="fetch")(Always())()
    (note,) = raised.value.__notes__
    assert note == (
        "reefknot[fetch]: gave up: all attempts are spent (3 attempts, 3 s; policy: 3 attempts (1 + 2 retries), "
        "1 s x2 each time, at most 30 s, jitter none, 60 s in all)"
    )


@pytest.mark.parametrize(
    ("error", "reason", "says"),
    [
        (ValueError("bug"), rk.Reason.NOT_RETRYABLE, "this failure is not one to retry"),
        (rk.RetryAfter(301), rk.Reason.HINT_TOO_LONG, "the server asked for 301 s"),
        (rk.RetryAfter(200), rk.Reason.BUDGET_SPENT, "would not fit into the deadline"),
    ],
)
def test_the_first_attempts_end_is_told(
    error: Exception, reason: rk.Reason, says: str, virtual_time: VirtualClock
) -> None:
    outcome = rk.Retrier(deadline=100).run(Flaky(error))
    assert (outcome.ok, outcome.error, outcome.attempts, outcome.reason) == (False, error, 1, reason)
    assert says in error.__notes__[0]
    assert virtual_time.waits == []


def test_retry_after_is_heard_whatever_on_says(virtual_time: VirtualClock) -> None:
    assert rk.retry(on=KeyError, base_delay=0, max_delay=0)(Flaky(rk.RetryAfter(20)))() == "ok"
    assert 20 <= virtual_time.waits[0] <= 21


def test_retry_after_of_an_attribute_or_a_response_is_heard(virtual_time: VirtualClock) -> None:
    class Busy(Exception):
        retry_after = 40

    rk.retry(on=Busy, base_delay=0, max_delay=0)(Flaky(Busy()))()
    assert 40 <= virtual_time.waits[0] <= 41


def test_the_longer_of_a_predicates_seconds_and_the_servers_hint_stands(virtual_time: VirtualClock) -> None:
    class Busy(Exception):
        retry_after = 40

    call = rk.retry(on=lambda error: 60.0 if len(virtual_time.waits) else 10.0, base_delay=0, max_delay=0)
    call(Flaky(Busy(), Busy()))()
    assert 40 <= virtual_time.waits[0] <= 41
    assert 60 <= virtual_time.waits[1] <= 61


# ---- draws -----------------------------------------------------------------------------------------------------------


def waits_of(**options: int) -> list[float]:
    with rk.testing.no_wait() as clock, pytest.raises(ConnectionError):
        rk.retry(attempts=6, policy=rk.Retrier(seed=options["seed"]) if options else None)(Always())()
    return clock.waits


def test_a_seed_makes_waits_reproducible() -> None:
    first = waits_of(seed=7)
    waits_of()  # another call in the same process moves nothing
    assert waits_of(seed=7) == first
    assert waits_of(seed=8) != first


def test_without_a_seed_no_two_calls_draw_alike() -> None:
    assert waits_of() != waits_of()


def test_the_calls_of_one_seeded_retrier_differ_from_each_other() -> None:
    retrier = rk.Retrier(seed=7, attempts=3)
    with rk.testing.no_wait() as clock:
        for _ in range(2):
            retrier.run(Always())
    assert clock.waits[:2] != clock.waits[2:]
