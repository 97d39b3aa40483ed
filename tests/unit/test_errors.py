"""Every error says what is wrong in fields as well as in words, and survives the way to another process."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from reefknot import errors
from reefknot.errors import (
    AttemptTimeoutError,
    BreakerOpenError,
    ConfigurationError,
    ConfigurationMissingError,
    DeadlineExceededError,
    LimitReachedError,
    LoopMisuseError,
    ParameterError,
    ParameterTypeError,
    ReefknotError,
    RejectedError,
    RetryAfter,
    shown,
)

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
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return VALUES[name.partition(" |")[0].partition("[")[0]]


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


class ShopClosedError(RejectedError):
    """A subclass with parameters of its own."""

    def __init__(self, opens_at: int) -> None:
        super().__init__("closed")
        self.opens_at = opens_at


WAYS: list[Callable[[Any], Any]] = [
    lambda error: pickle.loads(pickle.dumps(error, protocol=2)),
    lambda error: pickle.loads(pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL)),
    copy.copy,
    copy.deepcopy,
]


@pytest.mark.parametrize("cls", [*DECLARED, ShopClosedError], ids=lambda cls: cls.__name__)
def test_every_error_is_one_of_ours_says_something_and_arrives_as_it_left(cls: type[ReefknotError]) -> None:
    error = made(cls) if inspect.isfunction(cls.__init__) else cls("said")
    error.add_note("seen by a worker")
    assert (cls.__module__ == "reefknot.errors") is (cls is not ShopClosedError)
    assert str(error)
    for way in WAYS:
        back = way(error)
        assert (type(back), str(back), back.args, back.__dict__) == (cls, str(error), error.args, error.__dict__)


def test_the_tree_at_the_top_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"[├└]── (\w+)|^    (\w+)$", errors.__doc__, re.MULTILINE))

    assert {name for pair in drawn for name in pair if name} == {cls.__name__ for cls in DECLARED}


def test_an_error_is_also_what_python_calls_it() -> None:
    also: dict[type, tuple[type, ...]] = {
        ParameterError: (ValueError,),
        ParameterTypeError: (ValueError, TypeError, ParameterError),
        AttemptTimeoutError: (TimeoutError,),
        DeadlineExceededError: (TimeoutError,),
        BreakerOpenError: (RejectedError,),
        LimitReachedError: (RejectedError,),
        LoopMisuseError: (RuntimeError,),
        ConfigurationError: (ValueError,),
        ConfigurationMissingError: (ValueError,),
    }
    assert [(one, base) for one, bases in also.items() for base in bases if not issubclass(one, base)] == []


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), float("-inf"), 10**400, True, "5", None])
def test_retry_after_refuses_seconds_that_cannot_be_waited_and_what_is_no_number(seconds: Any) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    what = "a finite number of seconds" if is_number else "a number of seconds"
    with pytest.raises(ParameterError, match=rf"^seconds=.* is not accepted: {what}, 0 or more$") as caught:
        RetryAfter(seconds)
    assert isinstance(caught.value, TypeError) is not is_number


LEFT = "; its thread was abandoned and may still be running"


@pytest.mark.parametrize(
    ("error", "text", "fields"),
    [
        (
            ParameterError("attempts", -1, "1 or more"),
            "attempts=-1 is not accepted: 1 or more",
            {"parameter": "attempts", "accepted": "1 or more"},
        ),
        (RetryAfter(90), "asked to try again after 90 s", {"retry_after": 90.0}),
        (RetryAfter(1, "queue is long"), "queue is long", {"retry_after": 1.0}),
        (RetryAfter(0), "asked to try again after 0 s", {"retry_after": 0.0}),
        (
            AttemptTimeoutError(seconds=0.5),
            "the attempt did not finish within 0.5 s",
            {"seconds": 0.5, "abandoned": False},
        ),
        (
            AttemptTimeoutError(seconds=0.5, abandoned=True),
            f"the attempt did not finish within 0.5 s{LEFT}",
            {"abandoned": True},
        ),
        (
            DeadlineExceededError(seconds=2),
            "the deadline of 2 s passed during an attempt",
            {"seconds": 2, "abandoned": False},
        ),
        (
            DeadlineExceededError(seconds=2, abandoned=True),
            f"the deadline of 2 s passed during an attempt{LEFT}",
            {"abandoned": True},
        ),
        (
            BreakerOpenError(name="billing", retry_after=1.23456),
            "circuit breaker 'billing' is open; it may be tried again in 1.23 s",
            {"name": "billing", "retry_after": 1.23456},
        ),
        (
            LimitReachedError(name="billing", retry_after=1.23456),
            "limit 'billing' is reached; a call may begin in 1.23 s at the earliest",
            {"name": "billing", "retry_after": 1.23456},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_says_what_is_wrong_in_words_and_in_fields(
    error: ReefknotError, text: str, fields: dict[str, Any]
) -> None:
    assert str(error) == text
    assert {name: getattr(error, name) for name in fields} == fields
    assert all(isinstance(given, float) for name, given in vars(error).items() if name == "retry_after")


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
