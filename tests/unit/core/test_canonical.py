"""One text for one value."""

import json
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field

from reefknot.core.canonical import (
    DEEPEST,
    canonical,
    canonical_record,
    check_returned,
    checked_result_type,
    fingerprint,
    json_value,
    record_fingerprint,
    result_from_json,
    result_to_json,
)
from reefknot.errors import NotJsonError, ParameterTypeError
from tests.rows import for_each_row

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def test_keys_are_sorted_at_every_depth_without_spaces_and_in_utf8() -> None:
    value = {"b": {"z": 1, "a": [{"y": 2, "x": "ä"}]}, "a": None}
    assert canonical(value) == '{"a":null,"b":{"a":[{"x":"ä","y":2}],"z":1}}'.encode()


@given(JSON)
def test_the_canonical_form_reads_back_as_the_value(value: object) -> None:
    assert json.loads(canonical(value)) == value


@given(st.dictionaries(TEXT, JSON, min_size=2, max_size=5))
def test_the_order_in_which_keys_were_given_does_not_matter(value: dict[str, object]) -> None:
    backwards = dict(reversed(value.items()))
    assert canonical(value) == canonical(backwards)


@for_each_row(
    ("value", "name", "message"),
    [
        ({"a": [0.0, math.nan]}, (), "a[1] is not JSON: nan has no JSON form"),
        (math.inf, (), "the value is not JSON: inf has no JSON form"),
        ({"a": {"b": {1: "x"}}}, (), "a.b is not JSON: a key is text, not int"),
        ({"a": object()}, (), "a is not JSON: object has no JSON form"),
        ([b"bytes"], (), "[0] is not JSON: bytes has no JSON form"),
        ("\ud800", (), "the value is not JSON: half a surrogate pair is not text"),
        ({"a": [math.nan]}, ("inputs",), "inputs.a[0] is not JSON: nan has no JSON form"),
        ({"a": "\ud800"}, ("inputs",), "inputs is not JSON: half a surrogate pair is not text"),
    ],
)
def test_a_value_that_is_not_json_is_refused_with_its_path(value: object, name: tuple[str, ...], message: str) -> None:
    with pytest.raises(NotJsonError) as caught:
        canonical(value, *name)
    assert str(caught.value) == message


LOOP: list[object] = []
LOOP.append(LOOP)


def test_the_deepest_allowed_value_is_written_and_one_level_more_is_not() -> None:
    lists: object = 1
    mappings: object = 1
    for _ in range(DEEPEST):
        lists, mappings = [lists], {"a": mappings}
    assert canonical(lists) == b"[" * DEEPEST + b"1" + b"]" * DEEPEST
    assert canonical(mappings) == b'{"a":' * DEEPEST + b"1" + b"}" * DEEPEST
    for deeper in ([lists], [mappings], {"a": lists}, {"a": mappings}, LOOP):
        with pytest.raises(NotJsonError, match=f"nested deeper than {DEEPEST}$"):
            canonical(deeper)


def test_a_record_is_written_sorted_and_its_fingerprint_is_sha256_of_the_canonical_form() -> None:
    class Backwards(Struct):
        b: float
        a: dict[str, int]

    assert canonical_record(Backwards(math.inf, {"z": 1, "c": 2})) == b'{"a":{"c":2,"z":1},"b":null}'
    assert canonical((1, [2**70])) == b"[1,[1180591620717411303424]]"

    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    one, same, other = Record({"x": 1, "y": 2}), Record({"y": 2, "x": 1}), Record({"x": 1, "y": 3})
    assert record_fingerprint(one) == record_fingerprint(same) != record_fingerprint(other)


class Record(Struct):
    a: dict[str, int]
    b: str = ""


# ---- results ---------------------------------------------------------------------------------------------------------


class Receipt(Struct):
    number: int
    at: datetime


RECEIPT = Receipt(7, datetime(2026, 1, 2, tzinfo=UTC))


class Order(Struct):
    number: int
    lines: list[str]


@dataclass
class Parcel:
    weight: float


@for_each_row(
    ("value", "text", "result_type"),
    [
        (None, "null", Any),
        ({"b": 1, "a": [True, "é"]}, '{"a":[true,"é"],"b":1}', Any),
        (RECEIPT, '{"at":"2026-01-02T00:00:00Z","number":7}', Receipt),
        (Order(7, ["x"]), '{"lines":["x"],"number":7}', Order),
        (Parcel(1.5), '{"weight":1.5}', Parcel),
        (datetime(2026, 11, 15, tzinfo=UTC), '"2026-11-15T00:00:00Z"', datetime),
        (Decimal("1.10"), '"1.10"', Decimal),
        ({1: "a", 2: "b"}, '{"1":"a","2":"b"}', dict[int, str]),
        ({3, 1, 2}, "[1,2,3]", set[int]),
    ],
)
def test_a_result_is_one_text_and_comes_back_as_its_type(value: object, text: str, result_type: Any) -> None:
    assert result_to_json(value) == text
    assert checked_result_type(result_type) is result_type
    assert result_from_json(text, result_type) == value
    assert result_from_json(text, Any) == json_value(value)
    for accepted in (int, list[str], dict[str, Receipt], int | None):
        assert checked_result_type(accepted) is accepted
    assert json_value({1: {"b", "a"}}) == {"1": ["a", "b"]}


@for_each_row(("value", "says"), [(object(), ".*object"), (LOOP, "."), ({"inside": [lambda: None]}, ".*function")])
def test_a_result_that_json_cannot_hold_is_refused_by_name(value: object, says: str) -> None:
    with pytest.raises(NotJsonError, match=f"^the result is not JSON: {says}") as refused:
        result_to_json(value)
    assert refused.value.path == "the result"
    with pytest.raises(NotJsonError, match=r"^the answer is not JSON: ."):
        json_value(value, "the answer")
    with pytest.raises(NotJsonError, match=r"^the value is not JSON: ."):
        json_value(value)
    with pytest.raises(NotJsonError, match="nan"):
        result_to_json(math.nan)


UNIONS = (dict[object, int] | Receipt | list[int] | set[int], int | list[int] | tuple[int, ...])


@for_each_row("refused", [object, pytest.raises, re.Pattern, "Order", "int", 7, *UNIONS])
def test_a_type_that_no_result_can_be_read_as_is_refused(refused: Any) -> None:
    with pytest.raises(ParameterTypeError, match=r"result_type.*a type that JSON can be read as") as caught:
        checked_result_type(refused)
    assert caught.value.parameter == "result_type"


@for_each_row(
    ("text", "kind", "reason"),
    [
        ('"text"', int, "Expected `int`"),
        ("[1]", Order, ""),
        ('{"number":"7","lines":[]}', Order, ""),
        ('{"at":"2026-01-02T00:00:00Z"}', "Model", "title"),
    ],
)
def test_a_recorded_result_of_another_type_is_refused_with_its_reason(text: str, kind: Any, reason: str) -> None:
    with pytest.raises(ParameterTypeError, match=f"(?s)a type that the recorded result fits: .*{reason}") as caught:
        result_from_json(text, Model if kind == "Model" else kind)
    assert caught.value.parameter == "result_type"


# ---- models of pydantic ----------------------------------------------------------------------------------------------


class Model(BaseModel):
    """Its own JSON is not what it can be read from by default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(alias="title")
    title: str | None = Field(None, alias="subtitle")
    at: datetime = datetime(2026, 1, 2, tzinfo=UTC)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"no. {self.number}"


class Open(BaseModel):
    number: int | None = Field(None, alias="no")


MODEL = Model.model_validate({"title": 7, "subtitle": "tea"})
FIELDS = {"number": 7, "title": "tea", "at": "2026-01-02T00:00:00Z"}


def test_a_model_is_written_by_pydantic_at_every_depth_unless_json_cannot_hold_its_value() -> None:
    assert json_value(MODEL) == {**FIELDS, "label": "no. 7"}
    assert json_value({"a": [MODEL]}, round_trip=True) == {"a": [FIELDS]}
    assert json_value(RootModel[list[int]]([1])) == [1]

    class Holder(BaseModel):
        value: Any

    with pytest.raises(NotJsonError, match=r"^the result is not JSON: .*object.*result_type="):
        result_to_json(Holder(value=object()))


@for_each_row(("value", "kind"), [(MODEL, Model), ([MODEL], list[Model]), ({"a": MODEL}, dict[str, Model | None])])
def test_a_model_that_was_recorded_is_given_back(value: Any, kind: Any) -> None:
    assert result_from_json(result_to_json(value), checked_result_type(kind)) == value


def test_a_result_that_was_no_model_is_read_by_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result_from_json('{"no":7}', Open).number == 7
    assert result_from_json('{"number":7}', Open).number == 7
    assert result_from_json('{"title":7,"subtitle":"tea"}', Model) == MODEL
    assert result_from_json("[7]", RootModel[list[int]]).root == [7]
    monkeypatch.delitem(ConfigDict.__annotations__, "validate_by_name")
    assert result_from_json('{"no":7}', Open).number == 7, "an early version of pydantic reads by its own rules"


# ---- annotated results -----------------------------------------------------------------------------------------------


class Named(Protocol):
    name: str


class Abstract(ABC):
    @abstractmethod
    def name(self) -> str: ...


class Parent:
    """A class whose instances JSON cannot hold, above one whose instances it can."""


class Child(Parent, Struct):
    number: int


class Unfinished(Struct):
    one: "NotDefined"  # type: ignore[name-defined]  # noqa: F821


class Words(dict[str, str]):
    pass


class Plain:
    pass


@for_each_row(
    "annotation",
    [Any, None, object, int, Receipt, Model, Named, Abstract, Parent, Unfinished, Words, Plain | None, list[Plain]],
)
def test_a_function_whose_result_may_be_kept_is_accepted(annotation: Any) -> None:
    check_returned("make", annotation)


@for_each_row("annotation", [Plain, ValueError, type(pytest)])
def test_a_function_whose_annotated_result_cannot_be_kept_is_refused(annotation: Any) -> None:
    with pytest.raises(ParameterTypeError, match=rf"make\(\) -> {annotation.__name__}.*result_type=") as caught:
        check_returned("make", annotation)

    assert caught.value.parameter == "fn"
