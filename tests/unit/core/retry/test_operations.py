"""How operations are spelled."""

from typing import Any

import pytest

from reefknot.core.retry.defaults import OPERATIONS, UNLISTED, RetryCategory, operation_target


def test_every_category_has_a_row() -> None:
    assert list(OPERATIONS) == list(RetryCategory)
    assert len(RetryCategory) == 17


def test_what_is_not_listed_gets_three_executions() -> None:
    assert tuple(UNLISTED) == (3, 1.0, 30.0, 30.0)


@pytest.mark.parametrize(
    ("category", "spelled"),
    [
        (RetryCategory.NATS_STREAM_CREATE, "nats.stream_create"),
        (RetryCategory.KV_GET, "kv.get"),
        (RetryCategory.REPLAY_PROCESSING, "replay.processing"),
    ],
)
def test_a_target_spells_the_group_and_then_the_rest(category: RetryCategory, spelled: str) -> None:
    assert category.spelled == spelled
    assert category.target == f"operation:{spelled}"


@pytest.mark.parametrize("category", RetryCategory)
@pytest.mark.parametrize("change", [str.lower, str.upper, str.title, str])
def test_every_spelling_in_any_case_is_the_category(category: RetryCategory, change: type[str]) -> None:
    for spelling in (category.value, category.name, category.spelled, f"RETRY_{category.name}"):
        assert RetryCategory(change(spelling)) is category
        assert operation_target(change(spelling)) == category.target


@pytest.mark.parametrize("name", ["PROCESSING", "VALIDATION"])
def test_the_value_that_says_replay_twice_is_kept_as_it_was_given(name: str) -> None:
    category = RetryCategory[f"REPLAY_{name}"]

    assert category.value == f"REPLAY_REPLAY_{name}"
    assert RetryCategory(f"RETRY_REPLAY_{name}") is category


@pytest.mark.parametrize("value", ["RETRY_NATS_CONECT", "", 7, None, ["RETRY_KV_GET"]])
def test_what_is_no_spelling_is_no_category(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid RetryCategory"):
        RetryCategory(value)


def test_a_name_of_ones_own_is_a_target_in_lower_case() -> None:
    assert operation_target("Billing.Charge") == "operation:billing.charge"
