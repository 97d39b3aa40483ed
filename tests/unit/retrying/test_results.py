"""Retries because of a result: `on_result=`, and `raise_result=` for the last one."""

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Answers, AsyncAnswers, Flaky, async_ways, ways


def is_none(value: object) -> bool:
    return value is None


@pytest.mark.parametrize(
    ("options", "answers", "value"),
    [({}, (None, None, "ready"), "ready"), ({"attempts": 3}, (None,), None)],
    ids=["until one is accepted", "the last one comes back though it is refused"],
)
def test_a_refused_result_is_tried_again(
    options: Any, answers: tuple[object, ...], value: object, no_wait: VirtualClock
) -> None:
    for call in ways(on_result=is_none, **options):
        fn = Answers(*answers)
        assert (call(fn), fn.calls) == (value, 3)
    for acall in async_ways(on_result=is_none, **options):
        afn = AsyncAnswers(*answers)
        assert (rk.testing.run_virtual(acall(afn)), afn.calls) == (value, 3)


def test_the_last_result_is_raised_where_that_is_asked_for(no_wait: VirtualClock) -> None:
    causes: list[BaseException | None] = []
    for call in ways(on_result=is_none, attempts=2, raise_result=True, name="poll"):
        with pytest.raises(rk.RetryError, match=r"^poll was given up after 2 attempts, attempts_spent") as raised:
            call(Answers(None))
        error = raised.value
        assert (error.value, error.category, error.reason, len(error.attempts)) == (None, None, "attempts_spent", 2)
        causes.append(error.__cause__)
        assert pickle.loads(pickle.dumps(error)).value is None
    told = [str(cause.__notes__) for cause in causes if cause is not None]
    assert len(told) == len(causes) - 1, "the error of an outcome has not been raised"
    assert all("gave up: all attempts are spent" in one for one in told)
    for acall in async_ways(on_result=is_none, attempts=2, raise_result=True):
        with pytest.raises(rk.RetryError):
            rk.testing.run_virtual(acall(AsyncAnswers(None)))


def test_an_error_after_a_refused_result_is_raised_as_it_is(no_wait: VirtualClock) -> None:
    for error in (ConnectionError("gone"), ValueError("not retried")):
        fn = Flaky(error)
        with pytest.raises(type(error), match=str(error)):
            rk.retry(on_result=is_none, attempts=2)(lambda answers, fn=fn: answers.pop() if answers else fn())([None])
        assert fn.calls == 1


def test_results_are_tried_again_whatever_on_says_about_errors_until_what_is_in_them_is_false(
    no_wait: VirtualClock,
) -> None:
    assert rk.retry(on=KeyError, on_result=is_none)(Answers(None, 1))() == 1
    listed = rk.RetryPolicy(3, 0, retryable_exceptions=[KeyError])
    assert rk.Retrier(listed, on_result=is_none).call(Answers(None, 1)) == 1
    fn = Answers({"errors": ["busy"]}, {"errors": []})
    assert rk.retry(on_result=lambda value: value["errors"])(fn)() == {"errors": []}
    assert fn.calls == 2
    assert rk.retry(on_result=lambda seconds: seconds or False)(Answers(12.0, 0.0))() == 0.0
    assert 12 <= no_wait.waits[-1] <= 13


def test_a_predicate_that_raises_or_answers_nonsense_accepts_the_result(caplog: pytest.LogCaptureFixture) -> None:
    def broken(value: object) -> bool:
        raise ZeroDivisionError

    assert rk.retry(on_result=broken)(Answers(7))() == 7
    assert rk.retry(on_result=lambda value: -1.0)(Answers(7))() == 7
    assert [record.getMessage().split(" raised ")[0] for record in caplog.records] == ["on_result=", "on_result="]


def test_an_outcome_has_the_refused_result_and_the_reason(no_wait: VirtualClock) -> None:
    outcome = rk.Retrier(on_result=is_none, attempts=2).run(Answers(None))
    assert (outcome.ok, outcome.error, outcome.attempts) == (False, None, 2)
    assert outcome.reason is rk.Reason.ATTEMPTS_SPENT
    assert outcome.unwrap() is None

    raising = rk.Retrier(on_result=lambda value: value == 3, raise_result=True, attempts=2)
    outcome = rk.testing.run_virtual(raising.arun(AsyncAnswers(3)))
    assert (outcome.ok, outcome.value, type(outcome.error)) == (False, 3, rk.RetryError)


def test_a_loop_asks_about_the_value_that_its_block_set(no_wait: VirtualClock) -> None:
    for attempt in rk.Retrier(on_result=is_none, attempts=4).attempts():
        with attempt:
            attempt.value = None if attempt.number < 3 else "third"
    assert (attempt.number, attempt.value) == (3, "third")

    with pytest.raises(rk.RetryError):  # noqa: PT012 - a loop is a block
        for attempt in rk.Retrier(on_result=is_none, raise_result=True, attempts=2).attempts():
            with attempt:
                pass
    for attempt in rk.Retrier(on_result=is_none, attempts=2).attempts():
        with attempt:
            pass
    assert attempt.number == 2


def test_a_result_is_neither_logged_nor_in_the_notes(caplog: pytest.LogCaptureFixture, no_wait: VirtualClock) -> None:
    caplog.set_level(logging.DEBUG, "reefknot")
    retrier = rk.Retrier(on_result=lambda value: True, attempts=2, raise_result=True, name="poll")
    outcome = retrier.run(Answers("CANARY"))
    assert caplog.records
    assert "CANARY" not in f"{caplog.text} {outcome.history!r} {outcome.error}"


def test_hooks_see_the_refused_result_and_no_error_and_a_breaker_an_answer(no_wait: VirtualClock) -> None:
    events: list[rk.RetryEvent] = []
    breaker = rk.CircuitBreaker("billing", failures=1)
    hooks: Any = {"on_retry": events.append, "on_give_up": events.append}
    rk.retry(on_result=is_none, attempts=2, breaker=breaker, **hooks)(Answers(None))()
    assert [(event.value, event.error, event.failure is None) for event in events] == [(None, None, False)] * 2
    assert breaker.state is rk.BreakerState.CLOSED


def test_an_outer_retry_does_not_multiply_a_raised_result(no_wait: VirtualClock) -> None:
    fn = Answers(None)
    inner = rk.retry(on_result=is_none, raise_result=True, attempts=3)(fn)
    with pytest.raises(rk.RetryError):
        rk.retry(on=Exception, attempts=3)(inner)()
    assert fn.calls == 3


@pytest.mark.parametrize("value", [5, "x", bool, [1]])
def test_what_is_no_predicate_is_refused_and_a_generator(value: Any) -> None:
    def items() -> Iterator[int]:
        yield 1

    with pytest.raises(rk.ParameterTypeError, match=r"^on_result=.* a function that takes the result"):
        rk.retry(on_result=value)
    with pytest.raises(rk.ParameterError, match="a generator is retried by its errors"):
        rk.retry(on_result=is_none)(items)
