"""Waits of the caller's choice (`wait=`), and waits that an event ends (`stop=`)."""

import asyncio
import threading
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, Flaky

# ---- wait= -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "waits"),
    [([1, 2.5, 4], [1.0, 2.5, 4.0, 4.0, 4.0]), (lambda attempt: attempt * 10, [10.0, 20.0, 30.0, 30.0, 30.0])],
)
def test_a_sequence_or_a_function_gives_the_waits(wait: Any, waits: list[float], virtual_time: VirtualClock) -> None:
    """The last one of a sequence repeats; 30 s is the policy's own cap."""
    outcome = rk.Retrier(wait=wait, attempts=6).run(Always())
    assert virtual_time.waits == waits
    assert [record.delay for record in outcome.history] == [*waits, None]


def test_a_wait_is_capped_bounded_and_prolonged_by_a_hint_like_any_other(virtual_time: VirtualClock) -> None:
    assert rk.Retrier(wait=lambda attempt: 1e9, attempts=2, max_delay=7).run(Always()).attempts == 2
    assert virtual_time.waits == [7.0]
    outcome = rk.Retrier(wait=[5, 5, 5], attempts=9, deadline=8).run(Always())
    assert (outcome.attempts, outcome.reason) == (2, rk.Reason.BUDGET_SPENT)
    rk.Retrier(wait=[2], attempts=2).using(max_delay=1, base_delay=0).run(Always())
    assert virtual_time.waits[-1] == 1.0
    rk.Retrier(wait=[1], attempts=2).run(Flaky(rk.RetryAfter(20)))
    assert 20 <= virtual_time.waits[-1] <= 21


def test_a_function_that_fails_leaves_the_wait_to_the_policy(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    waits: list[Any] = [lambda n: 1 / 0, lambda n: "soon", lambda n: -1.0, lambda n: float("nan")]
    for wait in waits:
        rk.Retrier(wait=wait, attempts=2, base_delay=3, jitter="none").run(Always())
    assert virtual_time.waits == [3.0] * 4
    assert [line.split(" raised ")[0] for line in caplog.messages if "raised" in line] == ["wait="] * 4


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (5, r"^wait=5 .*for the same wait each time: wait=\[5\]"),
        ("1s", r"^wait='1s' .*a sequence of seconds"),
        ([], r"^wait=\[\] .*says nothing"),
        ([1, -2], r"^wait\[1\]=-2 "),
        ([1, 99], r"^wait\[1\]=99 .*max_delay, which is 30"),
        ([1, "2"], r"^wait\[1\]='2' "),
        ([float("nan")], r"^wait\[0\]=nan "),
        ([True], r"^wait\[0\]=True "),
        (asyncio.sleep, "would not be awaited"),
    ],
)
def test_waits_that_cannot_be_are_refused_with_their_place(wait: Any, message: str) -> None:
    with pytest.raises(rk.ParameterError, match=message):
        rk.retry(wait=wait)


# ---- stop= -----------------------------------------------------------------------------------------------------------


def test_a_thread_in_a_long_wait_stops_when_it_is_asked_to() -> None:
    """In real time: the wait of 30 s would be the failure."""
    stop, waiting = threading.Event(), threading.Event()
    outcomes: list[rk.Outcome[object]] = []
    retrier = rk.Retrier(stop=stop, wait=[30], on_retry=lambda event: waiting.set())
    thread = threading.Thread(target=lambda: outcomes.append(retrier.run(Always())))
    thread.start()
    assert waiting.wait(10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    (outcome,) = outcomes
    assert (outcome.reason, outcome.attempts) == (rk.Reason.STOPPED, 1)
    assert outcome.history[-1].delay is None
    assert "gave up: asked to stop (1 attempt" in outcome.error.__notes__[0]  # type: ignore[union-attr]


def test_an_event_that_is_set_ends_a_call_after_its_attempt_and_an_outer_retry_with_it(no_wait: VirtualClock) -> None:
    stop = threading.Event()
    stop.set()
    fn = Always()
    assert rk.Retrier(stop=stop).run(fn).reason is rk.Reason.STOPPED
    assert fn.calls == 1
    with pytest.raises(ConnectionError):
        rk.retry(attempts=3)(rk.retry(stop=stop)(fn))()
    assert fn.calls == 2
    assert rk.Retrier(stop=stop).call(int, "7") == 7
    assert no_wait.waits == []


def test_a_loop_ends_with_the_last_error_when_it_is_asked_to_stop(virtual_time: VirtualClock) -> None:
    stop = threading.Event()
    with pytest.raises(ConnectionError, match="turn 1") as raised:  # noqa: PT012 - a loop is a block
        for attempt in rk.Retrier(stop=stop, wait=[30], on_retry=lambda event: stop.set()).attempts():
            with attempt:
                raise ConnectionError(f"turn {attempt.number}")
    assert "asked to stop" in raised.value.__notes__[0]


@pytest.mark.parametrize("kind", [asyncio.Event, threading.Event])
async def test_an_async_wait_ends_when_the_event_is_set(kind: Any) -> None:
    stop, loop = kind(), asyncio.get_running_loop()
    loop.call_later(5, stop.set)
    outcome = await rk.Retrier(stop=stop, wait=[30]).arun(AsyncAlways())
    assert outcome.reason is rk.Reason.STOPPED
    assert 4.999 <= loop.time() < 5.1
    assert len(asyncio.all_tasks()) == 1


async def test_an_async_wait_that_no_event_ends_takes_its_time() -> None:
    await rk.Retrier(stop=asyncio.Event(), wait=[3], attempts=2).arun(AsyncAlways())
    assert 3 <= asyncio.get_running_loop().time() < 3.01


@pytest.mark.parametrize(("value", "hint"), [(5, "attempts="), ("now", "an event"), (True, "an event")])
def test_what_is_no_event_or_one_that_plain_code_cannot_wait_for_is_refused(value: Any, hint: str) -> None:
    with pytest.raises(rk.ParameterTypeError, match=f"^stop=.*{hint}"):
        rk.retry(stop=value)
    uses: list[Any] = [lambda r: r.call(int), lambda r: r.run(int), lambda r: next(iter(r.attempts()))]
    for use in uses:
        with pytest.raises(rk.ParameterTypeError, match=r"^stop=.*threading\.Event"):
            use(rk.Retrier(stop=asyncio.Event()))
