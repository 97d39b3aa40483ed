"""Results as text: what was recorded comes back as the type that is asked for, or is refused by name."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from reefknot.core.canonical import checked_result_type, json_value, result_from_json, result_to_json
from reefknot.errors import NotJsonError, ParameterTypeError


class Order(msgspec.Struct):
    number: int
    lines: list[str]


@dataclass
class Parcel:
    weight: float


MOMENT = dt.datetime(2026, 11, 15, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "text", "result_type"),
    [
        (None, "null", Any),
        ({"b": 1, "a": [True, "é"]}, '{"a":[true,"é"],"b":1}', Any),
        (Order(7, ["x"]), '{"lines":["x"],"number":7}', Order),
        (Parcel(1.5), '{"weight":1.5}', Parcel),
        (MOMENT, '"2026-11-15T00:00:00Z"', dt.datetime),
        (Decimal("1.10"), '"1.10"', Decimal),
        ({1: "a", 2: "b"}, '{"1":"a","2":"b"}', dict[int, str]),
        ({3, 1, 2}, "[1,2,3]", set[int]),
    ],
)
def test_a_result_is_one_text_and_comes_back_as_its_type(value: object, text: str, result_type: Any) -> None:
    assert result_to_json(value) == text
    assert checked_result_type(result_type) is result_type
    assert result_from_json(text, result_type) == value


def circle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize("value", [object(), circle(), {"inside": [lambda: None]}])
def test_a_value_without_a_json_form_is_refused_with_the_name_of_what_it_is(value: object) -> None:
    with pytest.raises(NotJsonError, match="the answer"):
        json_value(value, "the answer")
    with pytest.raises(NotJsonError, match="the result"):
        result_to_json(value)


@pytest.mark.parametrize("result_type", [object, re.Pattern, "Order", 7, int | list[int] | tuple[int, ...]])
def test_a_type_that_no_json_can_be_read_as_is_refused_before_anything_is_recorded(result_type: Any) -> None:
    with pytest.raises(ParameterTypeError, match=r"result_type.*a type that JSON can be read as"):
        checked_result_type(result_type)


@pytest.mark.parametrize(("text", "result_type"), [("[1]", Order), ('"x"', int), ('{"number":"7","lines":[]}', Order)])
def test_a_recorded_result_that_does_not_fit_the_type_is_refused(text: str, result_type: Any) -> None:
    with pytest.raises(ParameterTypeError, match=r"result_type.*a type that the recorded result fits"):
        result_from_json(text, result_type)
