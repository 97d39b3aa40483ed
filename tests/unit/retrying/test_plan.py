"""What a retrier may be asked to do. Mistakes are told at decoration, with the caller's own words."""

import pydoc
import re
from typing import Any

import pytest
import tenacity

import reefknot as rk
from reefknot.retrying.plan import LIBRARY_DEFAULT, OTHER_FIELDS, POLICY_FIELDS, Plan
from tests.unit.retrying.flaky import Flaky

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("attempts", value) for value in (0, -1, 1.5, True, "3")),
        *(("deadline", value) for value in (0, -1, NAN, "10")),
        *(("base_delay", value) for value in (-0.1, NAN, INF, 31)),
        *(("max_delay", value) for value in (-1, NAN, INF)),
        *(("multiplier", value) for value in (0.5, NAN)),
        *(("jitter_factor", value) for value in (1.5, NAN)),
        *(("attempt_timeout", value) for value in (0, NAN)),
        *(("max_retry_after", value) for value in (-1, NAN)),
        *(("throttle", value) for value in (5, "")),
        *(("seed", value) for value in ("x", True, 1.5)),
        *(("jitter", "wild"), ("strategy", "quadratic"), ("breaker", "billing"), ("on_retry", 5), ("on_give_up", "x")),
        *(("on_recover", []), ("in_thread", 1), ("name", 5), ("atempts", 5)),
    ],
)
def test_a_bad_option_is_an_error_at_decoration_that_names_it(option: str, value: object) -> None:
    options: Any = {option: value}
    for use in (rk.retry, rk.Retrier, rk.Retrier().using, rk.retry(Flaky()).using):
        with pytest.raises(rk.ParameterError, match=f"^{option}=") as raised:
            use(**options)
        assert raised.value.parameter == option
        assert raised.value.accepted


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"max_attempts": 3}, "attempts="),
        ({"tries": 3}, "attempts="),
        ({"timeout": 3}, "deadline= for the whole call, or attempt_timeout= for one attempt"),
        ({"time_budget": 3}, "deadline="),
        ({"wiat": [1]}, "wait="),
        ({"waits": [1]}, "wait="),
        ({"stopp": 1}, "stop="),
        ({"stop": 3}, "attempts="),
        ({"wait": 3}, r"wait=\[3\]"),
        ({"before_sleep": print}, "on_retry="),
        ({"reraise": True}, "the original error is always raised"),
        ({"stop": tenacity.stop_after_attempt(3)}, "here it is attempts= or deadline="),
        ({"wait": tenacity.wait_fixed(3)}, r"here it is wait=\[1, 2, 5\], base_delay="),
        ({"atempts": 5}, r"no such option; perhaps you meant attempts=; accepted are .*attempts"),
        ({"xyzzy": 5}, "no such option; accepted are after, attempt_timeout"),
    ],
)
def test_a_misspelt_option_is_told_which_one_was_meant(options: Any, meant: str) -> None:
    for use in (rk.retry, rk.Retrier, rk.Retrier().using):
        with pytest.raises(rk.ParameterTypeError, match=meant):
            use(**options)
    assert issubclass(rk.ParameterTypeError, TypeError), "a mistake is also what Python calls it"
    assert issubclass(rk.ParameterError, ValueError)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (3, r"retry\(attempts=3\)"),
        (ConnectionError, r"retry\(on=ConnectionError\)"),
        ((ConnectionError, TimeoutError), r"retry\(on=\(…\)\)"),
        (rk.RetryPolicy(), r"retry\(policy=…\)"),
        (rk.Retrier(), r"retry\(policy=…\)"),
        ("fetch", r"retry\(name='fetch'\)"),
    ],
)
def test_an_argument_without_a_name_is_told_which_parameter_was_meant(value: Any, meant: str) -> None:
    with pytest.raises(rk.ParameterTypeError, match=f"^fn=.*for this: {meant}"):
        rk.retry(value)
    with pytest.raises(rk.ParameterTypeError, match=r"^fn=.*a function to call for every attempt$"):
        rk.retry(dict)
    if not isinstance(value, rk.RetryPolicy | rk.Retrier):
        with pytest.raises(rk.ParameterTypeError, match=f"^policy=.*for this: {meant.replace('retry', 'Retrier')}"):
            rk.Retrier(value)


def test_help_lists_every_option() -> None:
    text = pydoc.render_doc(rk.retry)
    for option in POLICY_FIELDS | OTHER_FIELDS | {"policy"}:
        assert re.search(rf"^ +{option} +\S|`?{option}=", text, re.MULTILINE), option


def test_a_throttle_is_made_given_or_shared_by_one_of_a_bounded_number_of_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def throttle_of(value: Any) -> rk.RetryThrottle | None:
        return rk.Retrier(throttle=value).plan.throttle

    own = rk.RetryThrottle()
    assert throttle_of(False) is None
    assert throttle_of(True) is not throttle_of(True)
    assert throttle_of("billing") is throttle_of("billing") is not throttle_of("search")
    assert throttle_of(own) is own
    assert rk.Retrier(throttle=own).using(attempts=2).plan.throttle is own
    assert rk.Retrier(throttle=own).using(throttle=False).plan.throttle is None

    monkeypatch.setattr("reefknot.retrying.plan._shared_throttles", {})
    monkeypatch.setattr("reefknot.retrying.plan._MAX_SHARED", 2)
    rk.Retrier(throttle="a").using(throttle="b").using(throttle="a")
    with pytest.raises(rk.ParameterError, match="at most 2 destinations"):
        rk.Retrier(throttle="c")


def test_an_override_wins_over_a_book_and_lists_of_a_policy_over_the_documented_default() -> None:
    resolved = rk.RetryPolicy(9)
    retrier = rk.Retrier.following(lambda failure: resolved, rk.RetryPolicy(7)).using(attempts=2, base_delay=0)
    assert retrier.run(Flaky(KeyError, KeyError)).attempts == 2
    assert retrier.policy.max_attempts == 2

    policy = rk.RetryPolicy(2, 0, retryable_exceptions=[KeyError])
    assert rk.Retrier(policy).run(Flaky(KeyError())).ok
    assert not rk.Retrier(policy).run(Flaky(ConnectionError())).ok
    assert rk.Retrier(policy, on=ConnectionError).run(Flaky(ConnectionError())).ok

    policy = Plan(LIBRARY_DEFAULT).policy
    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.multiplier) == (4, 0.1, 30.0, 2.0)
    assert policy.jitter is rk.Jitter.FULL
