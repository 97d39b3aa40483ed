"""Argument checks: an accepted value is returned, any other is refused by name with what is accepted."""

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from math import inf, nan
from typing import Any

import pytest

from reefknot.core import checks
from reefknot.errors import ParameterError, ParameterTypeError
from tests.rows import for_each_row


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


HUGE = 10**400
"""A whole number that has no float."""


@for_each_row(
    ("value", "number", "whole"),
    [
        *[(value, True, True) for value in (0, -1, 7, HUGE)],
        *[(value, True, False) for value in (0.0, -1.5, nan, inf)],
        *[(value, False, False) for value in (True, False, "1", None, 1j, [1])],
    ],
)
def test_a_bool_is_no_number_and_a_float_no_whole_one(value: object, number: bool, whole: bool) -> None:
    assert checks.is_number(value) is number
    assert checks.is_whole_number(value) is whole


FOR_EVER = {"meaning": "for ever"}
ACCEPTED: list[tuple[Callable[..., Any], dict[str, Any], list[tuple[Any, Any]]]] = [
    (checks.number, {}, [(0, 0.0), (checks.LARGEST_FLOAT, checks.LARGEST_FLOAT)]),
    (checks.number, {"least": -1.0, "most": 1.0}, [(-1, -1.0), (1, 1.0)]),
    (checks.number, {"above": True}, [(5e-324, 5e-324)]),
    (checks.number, {"most": inf}, [(inf, inf)]),
    (checks.seconds, {}, [(1, 1.0), (checks.LONGEST_S, 3_153_600_000.0), (timedelta(seconds=60.005), 60.005)]),
    (checks.seconds, {"or_zero": True}, [(0, 0.0)]),
    (checks.seconds, {"most": inf}, [(inf, inf)]),
    (checks.seconds_or_none, FOR_EVER, [(timedelta(days=1), 86_400.0), (None, None), (3, 3.0), (0.5, 0.5)]),
    (checks.seconds_or_none, FOR_EVER, [(checks.LARGEST_FLOAT, checks.LARGEST_FLOAT)]),
    (checks.whole_number, {}, [(1, 1), (HUGE, HUGE)]),
    (checks.whole_number, {"least": 0, "most": 5}, [(0, 0), (5, 5)]),
    (checks.text, {}, [("", "")]),
    (checks.flag, {}, [(False, False)]),
    (checks.choice, {"choices": Colour}, [("red", Colour.RED), (Colour.BLUE, Colour.BLUE)]),
]


@for_each_row(("check", "options", "accepted"), ACCEPTED)
def test_an_accepted_value_is_returned(
    check: Callable[..., Any], options: dict[str, Any], accepted: list[tuple[Any, Any]]
) -> None:
    for given, returned in accepted:
        found = check("x", given, **options)
        assert (found, type(found)) == (returned, type(returned))


SECONDS = "a number of seconds above 0, at most 3153600000"
RANGES: list[tuple[Callable[..., Any], dict[str, Any], str, tuple[Any, ...]]] = [
    (checks.number, {}, "a finite number, 0 or more", (-1, -0.001, nan, inf, -inf, HUGE)),
    (checks.number, {"above": True, "unit": " of s"}, "a finite number of s above 0", (0, 0.0, -1, inf)),
    (checks.number, {"most": 1.0}, "a number from 0 to 1", (-0.1, 1.1, nan, inf)),
    (checks.number, {"least": 2.0, "most": inf}, "a number, 2 or more", (1.9, nan, HUGE)),
    (checks.seconds, {}, SECONDS, (0, -1, nan, inf, 3_153_600_001, timedelta(0))),
    (checks.seconds, {"or_zero": True, "most": 5.0}, "a number of seconds from 0 to 5", (-1, 5.1)),
    (checks.seconds, {"or_zero": True, "most": inf}, "a number of seconds, 0 or more", (-1, nan)),
    (checks.seconds, {"most": inf}, "a number of seconds above 0", (0, nan)),
    (checks.seconds_or_none, FOR_EVER, "a number of seconds above 0, or None for ever", (0, -1, nan, inf, HUGE)),
    (checks.whole_number, {}, "a whole number, 1 or more", (0, -1)),
    (checks.whole_number, {"least": 0, "most": 5, "note": " (pages)"}, "a whole number from 0 to 5 (pages)", (-1, 6)),
    (checks.choice, {"choices": Colour}, "one of red, blue", ("green", "", "RED", None, 3, [])),
]

KINDS: list[tuple[Callable[..., Any], dict[str, Any], str, tuple[Any, ...]]] = [
    (checks.number, {"most": 1.0}, "a number from 0 to 1", (True, "1", None)),
    (checks.seconds, {}, SECONDS, (True, "1", None, [1])),
    (checks.seconds_or_none, {"meaning": "for x"}, "a number of seconds above 0, or None for x", (False, "1", [1])),
    (checks.whole_number, {}, "a whole number, 1 or more", (True, 1.0, "1", None)),
    (checks.text, {}, "text", (None, 1, b"x")),
    (checks.text, {"accepted": "a name"}, "a name", (None,)),
    (checks.flag, {}, "True or False", (0, 1, None, "yes")),
]


@for_each_row(
    ("check", "options", "accepted", "refused", "of_another_type"),
    [*((*row, False) for row in RANGES), *((*row, True) for row in KINDS)],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(
    check: Callable[..., Any], options: dict[str, Any], accepted: str, refused: tuple[Any, ...], of_another_type: bool
) -> None:
    for given in refused:
        with pytest.raises(ParameterTypeError if of_another_type else ParameterError) as caught:
            check("x", given, **options)
        assert isinstance(caught.value, TypeError) is of_another_type, given
        assert (caught.value.parameter, caught.value.accepted) == ("x", accepted), given


def test_nothing_is_suggested_for_an_empty_or_endless_name() -> None:
    assert checks.suggest("", ["xx"]) == checks.suggest("x" * 1000, ["xx"]) == ""


@for_each_row(
    ("value", "sent"),
    [
        ("plain", "plain"),
        ("José", None),
        ("日本; a=b", None),
        ('attachment; filename="Käse.txt"', "attachment; filename*=UTF-8''K%C3%A4se.txt"),
        ("attachment; filename=Käse.txt; size=3", "attachment; filename*=UTF-8''K%C3%A4se.txt; size=3"),
        ('a; b=c; d="\\"ü\\""', "a; b=c; d*=UTF-8''%22%C3%BC%22"),
    ],
)
def test_a_header_is_ascii_or_is_encoded_or_is_refused(value: str, sent: str | None) -> None:
    assert checks.ascii_header(value) == sent
