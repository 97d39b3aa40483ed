"""The key of a submission: what is one, whose it is, and how long a job holds it."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model.unique import (
    LONGEST_FOR_S,
    LONGEST_KEY,
    NOT_UNIQUE,
    Unique,
    extra_of,
    holds_key,
    left_ms,
    unique_name,
    unique_of,
)
from reefknot.queue.model.work import ENDED, NO_EXTRA, Extra, WorkItem, WorkState
from tests.rows import for_each_row

KEYED = WorkItem("a", "t", created_at=1_000, extra=Extra(unique="report", unique_ms=500))


@for_each_row(
    ("options", "found"),
    [
        ({}, NOT_UNIQUE),
        ({"unique": None, "for_": None}, NOT_UNIQUE),
        ({"unique": "a"}, Unique("a", 0)),
        ({"unique": "a", "for_": 0}, Unique("a", 0)),
        ({"unique": "a", "for_": 1.5}, Unique("a", 1500)),
        ({"unique": "a", "for_": timedelta(minutes=1)}, Unique("a", 60_000)),
        ({"unique": "é" * LONGEST_KEY, "for_": LONGEST_FOR_S}, Unique("é" * LONGEST_KEY, 30 * 86_400_000)),
    ],
)
def test_a_key_is_held_for_the_milliseconds_that_its_submission_asks_for(
    options: dict[str, Any], found: Unique
) -> None:
    assert unique_of(options) == found


@for_each_row(
    ("options", "kind", "name"),
    [
        ({"unique": ""}, ParameterError, "unique"),
        ({"unique": "a" * (LONGEST_KEY + 1)}, ParameterError, "unique"),
        ({"unique": "two\nlines"}, ParameterError, "unique"),
        ({"unique": 7}, ParameterTypeError, "unique"),
        ({"for_": 60}, ParameterError, "for_"),
        ({"unique": "a", "for_": -1}, ParameterError, "for_"),
        ({"unique": "a", "for_": LONGEST_FOR_S + 1}, ParameterError, "for_"),
        ({"unique": "a", "for_": "1h"}, ParameterTypeError, "for_"),
    ],
)
def test_a_wrong_key_or_time_is_refused_by_the_name_of_its_option(
    options: dict[str, Any], kind: type[ParameterError], name: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        unique_of(options)
    assert (type(refused.value), refused.value.parameter) == (kind, name)


def test_only_work_that_has_a_key_or_waits_is_stored_with_more_than_others() -> None:
    assert extra_of((), NOT_UNIQUE) is NO_EXTRA
    assert extra_of((), Unique("report", 500)) == Extra(unique="report", unique_ms=500)
    assert extra_of(("b",), NOT_UNIQUE) == Extra(after=("b",))
    assert extra_of(("b",), Unique("report")) == Extra(after=("b",), unique="report")


def test_the_same_key_has_another_name_for_each_tenant_and_no_key_has_none() -> None:
    tenants = [None, "acme", "other"]
    assert len({unique_name(structs.replace(KEYED, tenant_id=tenant)) for tenant in tenants}) == 3
    assert unique_name(WorkItem("a", "t", tenant_id="acme")) == ""


@for_each_row("state", list(WorkState))
def test_open_work_holds_its_key_for_ever_and_ended_work_until_its_time_is_over(state: WorkState) -> None:
    item = structs.replace(KEYED, state=state)
    assert [holds_key(item, wall) for wall in (1_000, 1_499)] == [True, True]
    assert [holds_key(item, wall) for wall in (1_500, 10**12)] == [state not in ENDED] * 2


def test_the_time_left_counts_from_the_creation_and_is_never_below_0() -> None:
    assert [left_ms(KEYED, wall) for wall in (1_000, 1_499, 1_500, 9_000)] == [500, 1, 0, 0]
