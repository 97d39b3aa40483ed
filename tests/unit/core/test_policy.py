"""A policy is checked when it is made, names what is wrong with it, and never changes."""

import copy
import pickle
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.policy import ALIASES, Jitter, RetryPolicy, RetryStrategy, class_name, rule_name
from reefknot.errors import ParameterError, ParameterTypeError, shown
from tests.rows import for_each_row

FIELDS: dict[str, tuple[Any, Any]] = {
    "strategy": (RetryStrategy.EXPONENTIAL_BACKOFF, RetryStrategy.FIXED_DELAY),
    "max_attempts": (3, 9),
    "base_delay": (1.0, 0.5),
    "max_delay": (30.0, 31.0),
    "multiplier": (2.0, 3.0),
    "jitter": (Jitter.PROPORTIONAL, Jitter.FULL),
    "jitter_factor": (0.1, 0.2),
    "time_budget": (inf, 60.0),
    "attempt_timeout": (inf, 7.0),
    "max_retry_after": (300.0, 10.0),
    "retryable": (True, False),
    "whole_seconds": (False, True),
    "retryable_exceptions": ((), ("builtins.OSError",)),
    "non_retryable_exceptions": ((), ("builtins.KeyError",)),
}
DEFAULTS = {name: default for name, (default, _) in FIELDS.items()}
OTHERS = {name: other for name, (_, other) in FIELDS.items()}


def made(**fields: Any) -> RetryPolicy:
    return RetryPolicy(**fields)


def test_the_defaults_are_the_documented_ones() -> None:
    """Three executions, 1 s doubling up to 30 s, ±10 %."""
    policy = RetryPolicy()

    assert {name: getattr(policy, name) for name in DEFAULTS} == DEFAULTS
    assert policy.retries == 2


@for_each_row(("name", "value"), OTHERS.items())
def test_a_field_that_is_given_is_kept(name: str, value: object) -> None:
    assert getattr(made(**{name: value}), name) == value


def test_attempts_and_base_delay_may_be_given_by_place_and_the_documented_critical_policy_in_its_own_spelling() -> None:
    assert RetryPolicy(5, 0.2) == RetryPolicy(max_attempts=5, base_delay=0.2)
    policy = RetryPolicy(time_budget=None, attempt_timeout=None)
    assert (policy.time_budget, policy.attempt_timeout) == (inf, inf)

    policy = RetryPolicy(
        max_attempts=5, base_delay=2.0, max_delay=60.0, backoff_multiplier=1.5, jitter_enabled=True, jitter_factor=0.2
    )
    assert policy == RetryPolicy(5, 2.0, max_delay=60.0, multiplier=1.5, jitter="proportional", jitter_factor=0.2)


def test_whole_numbers_become_floats_and_a_base_above_the_cap_is_refused() -> None:
    policy = RetryPolicy(base_delay=1, max_delay=2, multiplier=3, time_budget=4, attempt_timeout=5, max_retry_after=6)
    numbers = (policy.base_delay, policy.max_delay, policy.multiplier, policy.time_budget, policy.attempt_timeout)
    assert numbers == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert all(type(number) is float for number in (*numbers, policy.max_retry_after))

    with pytest.raises(ParameterError, match=r"^base_delay=31 is not accepted: at most max_delay, which is 30 s$"):
        RetryPolicy(base_delay=31)
    assert RetryPolicy(base_delay=30).base_delay == RetryPolicy().max_delay


SECONDS = r"a number of seconds from 0 to 100000000"
LIMIT = r"a number of seconds above 0, or None for no limit"
ATTEMPTS = r"a whole number from 1 to 1000000000 (executions, the first included)"
STRATEGIES = "one of exponential_backoff, linear_backoff, fixed_delay, immediate, no_retry"
JITTERS = "one of none, full, equal, proportional, decorrelated"
RULES = "a list of exception classes or their names"

BAD_VALUES: list[tuple[str, list[Any], str]] = [
    ("max_attempts", [0, -1, 1_000_000_001], ATTEMPTS),
    ("base_delay max_delay max_retry_after", [-1, -0.001, nan, inf, -inf, 100_000_001, 10**400], SECONDS),
    ("time_budget attempt_timeout", [0, 0.0, -1, nan, -inf, -(10**400)], LIMIT),
    ("jitter_factor", [-0.1, 1.1, nan, inf, -inf], "a number from 0 to 1"),
    ("multiplier backoff_multiplier", [0, 0.999, -2, nan, inf, -inf, 1000.5, 10**400], "a number from 1 to 1000"),
    ("strategy", ["quadratic", "", None, 3, [], "Exponential_Backoff"], STRATEGIES),
    ("jitter", ["some", "", 0.1, True, []], JITTERS),
]
BAD_KINDS: list[tuple[str, list[Any], str]] = [
    ("max_attempts", [True, "3", 3.0, None, inf, nan], ATTEMPTS),
    ("base_delay max_delay max_retry_after", [True, "1", None, [1], 1j], SECONDS),
    ("time_budget attempt_timeout", [False, "10", [10]], LIMIT),
    ("jitter_factor", [True, "0.1", None], "a number from 0 to 1"),
    ("multiplier backoff_multiplier", [True, "2", [2]], "a number from 1 to 1000"),
    ("retryable whole_seconds", [1, 0, "yes", None], "True or False"),
    ("jitter_enabled", [1, 0, "yes"], "True or False"),
    ("retryable_exceptions non_retryable_exceptions", ["ValueError", ValueError, None, 5], RULES),
    (
        "retryable_exceptions non_retryable_exceptions",
        [[value] for value in (int, "", None, ValueError("live"), 5)],
        "exception classes or their names",
    ),
]


def each(table: list[tuple[str, list[Any], str]]) -> list[tuple[str, Any, str]]:
    return [(name, value, accepted) for names, values, accepted in table for name in names.split() for value in values]


@for_each_row(
    ("name", "value", "accepted", "of_another_kind"),
    [*((*row, False) for row in each(BAD_VALUES)), *((*row, True) for row in each(BAD_KINDS))],
)
def test_a_value_out_of_range_or_of_another_kind_is_refused_by_name(
    name: str, value: Any, accepted: str, of_another_kind: bool
) -> None:
    with pytest.raises(ParameterError) as caught:
        made(**{name: value})

    refused = value[0] if accepted.startswith("exception classes") else value
    assert isinstance(caught.value, ParameterTypeError) is of_another_kind
    assert (caught.value.parameter, caught.value.accepted) == (name, accepted)
    assert str(caught.value) == f"{name}={shown(refused)} is not accepted: {accepted}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@for_each_row(
    ("name", "values"),
    [
        ("max_attempts", (1, 1_000_000_000)),
        ("max_delay", (1.0, 100_000_000.0)),
        ("max_retry_after", (0.0, 100_000_000.0)),
        ("base_delay", (0.0, 30.0)),
        ("jitter_factor", (0.0, 1.0)),
        ("multiplier", (1.0, 1000.0)),
        ("time_budget", (5e-324, inf)),
        ("attempt_timeout", (5e-324, inf)),
    ],
)
def test_the_ends_of_a_range_belong_to_it(name: str, values: tuple[float, ...]) -> None:
    assert [getattr(made(**{name: value}), name) for value in values] == list(values)


@for_each_row(
    ("short", "meant"),
    [
        ("exponential", RetryStrategy.EXPONENTIAL_BACKOFF),
        ("linear", RetryStrategy.LINEAR_BACKOFF),
        ("fixed", RetryStrategy.FIXED_DELAY),
        ("none", RetryStrategy.NO_RETRY),
        *((strategy.value, strategy) for strategy in RetryStrategy),
    ],
)
def test_a_strategy_has_a_long_and_a_short_name_and_a_jitter_a_name(short: Any, meant: RetryStrategy) -> None:
    assert RetryPolicy(strategy=short).strategy is meant
    assert [made(jitter=jitter.value).jitter for jitter in Jitter] == list(Jitter)


# --- the second spellings -----------------------------------------------------------------------------------------


def test_two_spellings_of_one_multiplier_may_agree_but_not_differ() -> None:
    assert RetryPolicy(multiplier=3, backoff_multiplier=3).multiplier == 3.0
    with pytest.raises(ParameterError) as caught:
        RetryPolicy(multiplier=2, backoff_multiplier=3)

    assert caught.value.parameter == "backoff_multiplier"
    assert str(caught.value) == (
        "backoff_multiplier=3 is not accepted: another spelling of multiplier; give one of them"
    )


@for_each_row(("jitter", "enabled"), [("none", True), (Jitter.NONE, True), ("full", False), (Jitter.EQUAL, False)])
def test_jitter_and_jitter_enabled_may_agree_but_not_contradict_each_other(jitter: Any, enabled: bool) -> None:
    with pytest.raises(ParameterError) as caught:
        RetryPolicy(jitter=jitter, jitter_enabled=enabled)

    assert caught.value.parameter == "jitter_enabled"
    assert str(caught.value) == (
        f"jitter_enabled={enabled} is not accepted: what agrees with jitter={str(jitter)!r}; give one of them"
    )
    assert [RetryPolicy(jitter_enabled=given).jitter for given in (True, False)] == [Jitter.PROPORTIONAL, Jitter.NONE]
    assert RetryPolicy(jitter="none", jitter_enabled=False).jitter is Jitter.NONE
    for other in (Jitter.FULL, Jitter.DECORRELATED):
        assert RetryPolicy(jitter=other, jitter_enabled=True).jitter is other


def test_exception_lists_take_classes_and_names_in_any_iterable_and_an_error_names_the_parameter() -> None:
    policy = RetryPolicy(
        retryable_exceptions=[ConnectionError, "NetworkError"],
        non_retryable_exceptions=(c for c in (ValueError, KeyError)),
    )
    assert policy.retryable_exceptions == ("builtins.ConnectionError", "NetworkError")
    assert policy.non_retryable_exceptions == ("builtins.ValueError", "builtins.KeyError")

    assert rule_name("on", TimeoutError) == "builtins.TimeoutError"
    assert rule_name("on", KeyboardInterrupt) == "builtins.KeyboardInterrupt"
    with pytest.raises(
        ParameterTypeError, match=r"^on=<class 'int'> is not accepted: exception classes or their names$"
    ):
        rule_name("on", int)


# --- a value ------------------------------------------------------------------------------------------------------


@for_each_row("name", DEFAULTS)
def test_no_field_can_be_set_or_deleted(name: str) -> None:
    policy = RetryPolicy()

    with pytest.raises(AttributeError, match=rf"^a policy does not change; use replace\({name}=…\)$"):
        setattr(policy, name, OTHERS[name])
    with pytest.raises(AttributeError, match=r"^a policy does not change$"):
        delattr(policy, name)
    assert policy == RetryPolicy()


@for_each_row("name", DEFAULTS)
def test_policies_that_differ_in_one_field_differ(name: str) -> None:
    one, other = RetryPolicy(), made(**{name: OTHERS[name]})

    assert one != other
    assert hash(one) != hash(other)
    assert one.replace(**{name: OTHERS[name]}) == other


def test_equal_policies_are_equal_and_hash_alike_and_equal_nothing_else() -> None:
    one, other = made(**OTHERS), made(**OTHERS)

    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    assert RetryPolicy() != object()
    assert RetryPolicy() != Sub()
    assert RetryPolicy().__eq__(3) is NotImplemented
    with pytest.raises(AttributeError):
        one.tries = 3


class Sub(RetryPolicy):
    __slots__ = ()


def test_replace_checks_its_result_and_keeps_the_rest_and_the_class() -> None:
    policy = made(**OTHERS)

    assert policy.replace() == policy
    assert policy.replace(max_attempts=2).base_delay == policy.base_delay
    assert type(Sub().replace(max_attempts=2)) is Sub
    with pytest.raises(ParameterError, match=r"^base_delay=99"):
        policy.replace(base_delay=99)
    with pytest.raises(TypeError, match="colour"):
        policy.replace(colour="red")


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    cap = draw(st.floats(0, 1e8))
    return RetryPolicy(
        draw(st.integers(1, 10**9)),
        draw(st.floats(0, cap)),
        max_delay=cap,
        multiplier=draw(st.floats(1, 1000)),
        jitter=draw(st.sampled_from(Jitter)),
        jitter_factor=draw(st.floats(0, 1)),
        strategy=draw(st.sampled_from(RetryStrategy)),
        time_budget=draw(st.none() | st.floats(0, exclude_min=True, allow_nan=False)),
        attempt_timeout=draw(st.none() | st.floats(0, exclude_min=True, allow_nan=False)),
        max_retry_after=draw(st.floats(0, 1e8)),
        retryable=draw(st.booleans()),
        whole_seconds=draw(st.booleans()),
        retryable_exceptions=draw(st.lists(st.sampled_from([OSError, ValueError, "NetworkError"]))),
        non_retryable_exceptions=draw(st.lists(st.sampled_from([KeyError, "a.b.C"]))),
    )


@given(policies())
def test_a_policy_comes_back_from_its_repr_from_pickle_and_from_copies(policy: RetryPolicy) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(policy, protocol)) == policy
    assert copy.copy(policy) == copy.deepcopy(policy) == policy
    assert eval(repr(policy), {"RetryPolicy": RetryPolicy, "inf": inf}) == policy
    assert type(pickle.loads(pickle.dumps(Sub()))) is Sub


def test_the_repr_names_every_field_and_a_class_is_called_by_module_and_qualified_name() -> None:
    text = repr(RetryPolicy())
    assert text.startswith("RetryPolicy(")
    assert all(f"{name}=" in text for name in DEFAULTS)
    assert "strategy='exponential_backoff'" in text

    class Inner(Exception): ...

    assert class_name(Inner).startswith(f"{__name__}.test_the_repr_names_every_field_and_a_class_is_called")
    assert class_name(Inner).endswith(".<locals>.Inner")


@for_each_row(
    ("policy", "line"),
    [
        (RetryPolicy(), "3 attempts (1 + 2 retries), 1 s x2 each time, at most 30 s, jitter proportional ±10%"),
        (RetryPolicy(1, jitter="full"), "1 attempt, 1 s x2 each time, at most 30 s, jitter full"),
        (
            RetryPolicy(2, 0.5, strategy="linear", jitter="none", time_budget=10),
            "2 attempts (1 + 1 retry), 0.5 s more each time, at most 30 s, jitter none, 10 s in all",
        ),
        (
            RetryPolicy(3, 0.5, strategy="fixed", jitter="equal"),
            "3 attempts (1 + 2 retries), 0.5 s apart, jitter equal",
        ),
        (
            RetryPolicy(4, strategy="immediate", jitter="none"),
            "4 attempts (1 + 3 retries), no wait between, jitter none",
        ),
        (RetryPolicy(4, strategy="no_retry"), "never retried"),
    ],
)
def test_a_policy_describes_itself_in_one_line(policy: RetryPolicy, line: str) -> None:
    assert policy.describe() == line


# --- other spellings ----------------------------------------------------------------------------------------------


def test_attempts_and_deadline_are_other_spellings() -> None:
    policy = RetryPolicy(attempts=5, deadline=10)
    assert policy == RetryPolicy(max_attempts=5, time_budget=10)
    assert policy == RetryPolicy(max_attempts=5, attempts=5, time_budget=10, deadline=10), "which may agree"
    assert (policy.attempts, policy.deadline) == (policy.max_attempts, policy.time_budget) == (5, 10.0)
    assert type(RetryPolicy().max_attempts) is int
    assert RetryPolicy().attempts == 3


def test_every_other_spelling_works_in_replace_and_can_be_read() -> None:
    policy = RetryPolicy(5, time_budget=10, multiplier=3, jitter="full")
    assert policy.replace(attempts=2).max_attempts == 2
    assert policy.replace(deadline=3).time_budget == 3.0
    assert policy.replace(deadline=None).time_budget == inf
    assert policy.replace(backoff_multiplier=4).multiplier == 4.0
    assert policy.replace(backoff_multiplier=5, multiplier=5).multiplier == 5.0
    assert policy.replace(jitter_enabled=False).jitter is Jitter.NONE
    assert policy.replace(jitter_enabled=False).multiplier == 3.0

    policy = RetryPolicy(multiplier=3, jitter="full")
    assert (policy.backoff_multiplier, policy.jitter_enabled) == (3.0, True)
    assert RetryPolicy(jitter="none").jitter_enabled is False
    for alias in ALIASES:
        assert getattr(policy, alias) is not None
        with pytest.raises(AttributeError):
            setattr(policy, alias, 1)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        *(({"max_attempts": most, "attempts": 5}, "attempts") for most in (3, 4)),
        ({"time_budget": 3, "deadline": 5}, "deadline"),
        *(({"attempts": wrong}, "attempts") for wrong in (0, 1.5)),
        *(({"deadline": wrong}, "deadline") for wrong in (-1, "soon")),
    ],
)
def test_two_spellings_must_agree_and_an_error_names_the_one_given(fields: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        RetryPolicy(**fields)
    assert caught.value.parameter == parameter
