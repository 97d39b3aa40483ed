"""One text for one value."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from reefknot.core.canonical import DEEPEST, canonical, canonical_record, fingerprint, record_fingerprint
from reefknot.errors import NotJsonError

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


def test_a_tuple_is_a_list_and_a_big_number_stays_exact() -> None:
    assert canonical((1, [2**70])) == b"[1,[1180591620717411303424]]"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0.0, math.nan]}, "a[1]"),
        (math.inf, "the value"),
        ({"a": {"b": {1: "x"}}}, "a.b"),
        ({"a": object()}, "a"),
        ([b"bytes"], "[0]"),
        ("\ud800", "the value"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(NotJsonError) as caught:
        canonical(value)
    assert str(caught.value).startswith(f"{place} is not JSON")


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotJsonError, match=f"deeper than {DEEPEST}"):
        canonical(loop)


def test_the_deepest_allowed_value_is_written_and_one_level_more_is_not() -> None:
    value: object = 1
    for _ in range(DEEPEST):
        value = [value]
    assert canonical(value) == b"[" * DEEPEST + b"1" + b"]" * DEEPEST
    with pytest.raises(NotJsonError):
        canonical([value])


def test_a_record_is_written_sorted_and_no_limit_as_null() -> None:
    class Record(Struct):
        b: float
        a: dict[str, int]

    assert canonical_record(Record(math.inf, {"z": 1, "c": 2})) == b'{"a":{"c":2,"z":1},"b":null}'


def test_a_fingerprint_is_sha256_of_the_canonical_form() -> None:
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


class Record(Struct):
    a: dict[str, int]
    b: str = ""


def test_records_with_the_same_values_have_one_fingerprint() -> None:
    one, same, other = Record({"x": 1, "y": 2}), Record({"y": 2, "x": 1}), Record({"x": 1, "y": 3})
    assert record_fingerprint(one) == record_fingerprint(same) != record_fingerprint(other)


def test_what_is_refused_is_called_by_its_name() -> None:
    with pytest.raises(NotJsonError, match=r"^inputs\.a\[0\] is not JSON"):
        canonical({"a": [math.nan]}, "inputs")
    with pytest.raises(NotJsonError, match=r"^inputs is not JSON: half"):
        canonical({"a": "\ud800"}, "inputs")
