"""Rows go out named, in terms of JSON, and counted."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest

from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_rows import Rows, SqlSettings, plain


@pytest.mark.parametrize(
    ("value", "out"),
    [
        *((None, None), (True, True), (2**62, 2**62), (1.5, 1.5), (float("inf"), "inf"), (b"\xff", "/w==")),
        (Decimal("1.10"), "1.10"),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(minutes=1), 60.0),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ([1, Decimal(2)], [1, "2"]),
        ({"a": b"a"}, {"a": "YQ=="}),
    ],
)
def test_a_value_goes_out_as_json_can_say_it(value: Any, out: Any) -> None:
    assert plain(value) == out
    msgspec.json.encode(plain(value))


def test_neither_a_column_nor_a_row_is_lost_without_an_error() -> None:
    with pytest.raises(Refusal, match="two columns are called 'a'"):
        Rows(SqlSettings(max_rows=10, max_bytes=1000)).name(["a", "b", "a"])

    rows = Rows(SqlSettings(max_rows=2, max_bytes=1000))
    rows.name(["a"])
    rows.add([1])
    rows.add([2])
    with pytest.raises(Refusal, match=r"more than 2 rows.*blocks\.sql\.max_rows"):
        rows.add([3])


@pytest.mark.parametrize("value", ["x" * 101, ["x" * 60, "x" * 60], {"k": "x" * 120}, b"x" * 100])
def test_bytes_are_counted_wherever_they_are(value: Any) -> None:
    rows = Rows(SqlSettings(max_rows=10, max_bytes=100))
    rows.name(["a"])

    with pytest.raises(Refusal, match=r"more than 100 bytes.*blocks\.sql\.max_bytes"):
        rows.add([value])
