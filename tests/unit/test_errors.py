"""Every error says what is wrong in fields as well as in words, and survives the way to another process."""

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

from reefknot import errors
from reefknot.errors import (
    AttemptTimeoutError,
    BreakerOpenError,
    ConfigurationError,
    ConfigurationMissingError,
    DeadlineExceededError,
    LoopMisuseError,
    ParameterError,
    ParameterTypeError,
    ReefknotError,
    RejectedError,
    RetryAfter,
    VirtualDeadlockError,
    shown,
)

SAMPLES: list[ReefknotError] = [
    ReefknotError("plain"),
    ParameterError("attempts", 0, "1 or more"),
    ParameterTypeError("attempts", "x", "a whole number"),
    RetryAfter(2.5),
    RetryAfter(0, "come back"),
    AttemptTimeoutError(seconds=0.5),
    AttemptTimeoutError(seconds=0.5, abandoned=True),
    DeadlineExceededError(seconds=3, abandoned=True),
    RejectedError("no room"),
    BreakerOpenError(name="billing", retry_after=1.25),
    LoopMisuseError("driven twice"),
    VirtualDeadlockError("task main"),
    ConfigurationError(["a.yaml:1: one", "a.yaml:2: two"]),
    ConfigurationMissingError(["a.yaml is not there"]),
]


DECLARED = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ReefknotError)]
VALUES: dict[str, object] = {
    "str": "x",
    "int": 3,
    "float": 1.5,
    "bool": True,
    "object": "o",
    "None": None,
    "Any": "o",
    "list": ["a"],
    "tuple": ("a", "b"),
    "Sequence": ("a", "b"),
    "Iterable": ("a", "b"),
    "dict": {"a": 1},
    "Mapping": {"a": 1},
}


def value_of(annotation: object) -> object:
    return VALUES[str(annotation).partition(" |")[0].partition("[")[0]]


def made(cls: type[ReefknotError]) -> ReefknotError:
    """An error of the class, with something for every parameter by what it is annotated with."""
    arguments: list[object] = []
    named: dict[str, object] = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value_of(parameter.annotation)
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(value_of(parameter.annotation))
    return cls(*arguments, **named)


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.__name__)
def test_every_error_is_one_of_ours_says_something_and_arrives_as_it_left(cls: type[ReefknotError]) -> None:
    error = made(cls) if inspect.isfunction(cls.__init__) else cls("said")
    back = pickle.loads(pickle.dumps(error))

    assert cls.__module__ == "reefknot.errors"
    assert (type(back), str(back), back.args, back.__dict__) == (cls, str(error), error.args, error.__dict__)
    assert str(error)


def test_the_tree_at_the_top_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"[├└]── (\w+)|^    (\w+)$", errors.__doc__, re.MULTILINE))

    assert {name for pair in drawn for name in pair if name} == {cls.__name__ for cls in DECLARED}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: f"{type(e).__name__}: {e}")
@pytest.mark.parametrize("way", ["pickle 2", "pickle latest", "copy", "deepcopy"])
def test_an_error_arrives_as_it_left(error: ReefknotError, way: str) -> None:
    error.add_note("seen by a worker")
    match way:
        case "pickle 2":
            back: Any = pickle.loads(pickle.dumps(error, protocol=2))
        case "pickle latest":
            back = pickle.loads(pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL))
        case "copy":
            back = copy.copy(error)
        case _:
            back = copy.deepcopy(error)

    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args
    assert back.__dict__ == error.__dict__


def test_a_subclass_with_its_own_parameters_arrives_too() -> None:
    back = pickle.loads(pickle.dumps(ShopClosedError(9)))

    assert (type(back), str(back), back.opens_at) == (ShopClosedError, "closed", 9)


class ShopClosedError(RejectedError):
    def __init__(self, opens_at: int) -> None:
        super().__init__("closed")
        self.opens_at = opens_at


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (SAMPLES[1], (ValueError,)),
        (SAMPLES[2], (ValueError, TypeError, ParameterError)),
        (SAMPLES[5], (TimeoutError,)),
        (SAMPLES[7], (TimeoutError,)),
        (SAMPLES[9], (RejectedError,)),
        (SAMPLES[10], (RuntimeError,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_also_what_python_calls_it(error: ReefknotError, also: tuple[type, ...]) -> None:
    assert all(isinstance(error, cls) for cls in (ReefknotError, *also))


def test_a_parameter_error_names_the_parameter_what_was_given_and_what_is_accepted() -> None:
    error = ParameterError("attempts", -1, "1 or more")

    assert str(error) == "attempts=-1 is not accepted: 1 or more"
    assert (error.parameter, error.accepted) == ("attempts", "1 or more")


def test_retry_after_carries_its_seconds_and_says_them() -> None:
    error = RetryAfter(90)

    assert error.retry_after == 90.0
    assert isinstance(error.retry_after, float)
    assert str(error) == "asked to try again after 90 s"
    assert str(RetryAfter(1, "queue is long")) == "queue is long"
    assert RetryAfter(0).retry_after == 0.0


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), float("-inf"), 10**400])
def test_retry_after_refuses_seconds_that_nobody_can_wait(seconds: float) -> None:
    with pytest.raises(
        ParameterError, match=r"^seconds=.* is not accepted: a finite number of seconds, 0 or more$"
    ) as caught:
        RetryAfter(seconds)

    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize("seconds", [True, "5", None])
def test_retry_after_refuses_what_is_no_number(seconds: Any) -> None:
    with pytest.raises(ParameterTypeError, match=r"^seconds=.* is not accepted: a number of seconds, 0 or more$"):
        RetryAfter(seconds)


def test_time_outs_carry_their_limit_and_whether_a_thread_was_left_behind() -> None:
    attempt, deadline = AttemptTimeoutError(seconds=0.5), DeadlineExceededError(seconds=2)

    assert str(attempt) == "the attempt did not finish within 0.5 s"
    assert (attempt.seconds, attempt.abandoned) == (0.5, False)
    assert str(deadline) == "the deadline of 2 s passed during an attempt"
    assert (deadline.seconds, deadline.abandoned) == (2, False)


def test_an_abandoned_thread_is_said() -> None:
    tail = "; its thread was abandoned and may still be running"

    attempt = AttemptTimeoutError(seconds=0.5, abandoned=True)
    deadline = DeadlineExceededError(seconds=2, abandoned=True)
    assert str(attempt) == "the attempt did not finish within 0.5 s" + tail
    assert str(deadline) == "the deadline of 2 s passed during an attempt" + tail
    assert attempt.abandoned
    assert deadline.abandoned


def test_an_open_breaker_says_whose_and_for_how_long() -> None:
    error = BreakerOpenError(name="billing", retry_after=1.23456)

    assert str(error) == "circuit breaker 'billing' is open; it may be tried again in 1.23 s"
    assert (error.name, error.retry_after) == ("billing", 1.23456)


def test_a_configuration_error_lists_every_mistake_and_shows_fifty() -> None:
    error = ConfigurationError(f"mistake {n}\nin two lines" for n in range(51))

    assert len(error.problems) == 51
    assert str(error).splitlines()[0] == "mistake 0 in two lines"
    assert str(error).splitlines()[49:] == ["mistake 49 in two lines", "… and 1 more"]
    assert str(ConfigurationError(["one"] * 50)).splitlines() == ["one"] * 50
    assert str(ConfigurationError([])) == "the configuration cannot be used"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_value_is_shown_short_and_without_raising() -> None:
    assert shown(3) == "3"
    assert shown("x" * 58) == repr("x" * 58)
    assert shown("x" * 59) == "'" + "x" * 58 + "…"
    assert len(shown("x" * 10_000)) == 60
    assert shown("abcdef", 5) == "'abc…"
    assert shown(Unshowable()) == "<Unshowable>"
    assert shown(10**10_000) == "<int>"


def test_a_mistake_in_the_configuration_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="line 3"):
        raise errors.ConfigurationError(["line 3: nothing of that name"])
    assert issubclass(errors.ConfigurationMissingError, ValueError)
