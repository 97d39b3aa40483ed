"""A failure that says the same as the last of its class is not read again, and nothing else is mistaken for it."""

from __future__ import annotations

import pytest

from reefknot.retrying import failures as reading
from reefknot.retrying.failures import EXHAUSTED_MARK, read_failure


class Refused(ConnectionError):
    """A class of this module's own, so that nobody else has read it."""


@pytest.fixture(autouse=True)
def _nothing_read_before() -> None:
    reading._last_read.clear()


def test_the_same_words_give_the_same_failure_as_reading_them_anew() -> None:
    first = read_failure(Refused("connection refused"))
    again = read_failure(Refused("connection refused"))
    reading._last_read.clear()

    assert again is first
    assert again == read_failure(Refused("connection refused"))


def test_other_words_of_the_same_class_are_read() -> None:
    read_failure(Refused("connection refused"))

    assert read_failure(Refused("connection reset")).message == "connection reset"


def test_the_same_words_of_another_class_are_read() -> None:
    read_failure(Refused("no"))

    assert read_failure(ValueError("no")).exception == "ValueError"


def test_a_secret_is_hidden_every_time_and_its_text_is_not_kept() -> None:
    for _ in range(2):
        assert "hunter2" not in read_failure(Refused("login failed: password=hunter2")).message
    assert "hunter2" not in repr(reading._last_read)


def test_an_error_that_carries_a_hint_is_read_whatever_its_words() -> None:
    read_failure(Refused("busy"))
    hinted = Refused("busy")
    hinted.retry_after = 3  # type: ignore[attr-defined]

    assert read_failure(hinted).retry_after == 3.0
    assert read_failure(Refused("busy")).retry_after is None


def test_an_error_raised_from_an_exhausted_one_is_told_apart() -> None:
    read_failure(Refused("busy"))
    inner = ConnectionError("inner")
    setattr(inner, EXHAUSTED_MARK, 5)
    outer = Refused("busy")
    outer.__cause__ = inner

    assert read_failure(outer, since=4).exhausted
    assert not read_failure(Refused("busy"), since=4).exhausted


def test_no_more_classes_are_kept_than_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TYPES_KEPT", 8)
    reading._shapes.clear()
    for number in range(50):
        read_failure(type(f"Error{number}", (Exception,), {})("text"))

    assert len(reading._last_read) <= 8
