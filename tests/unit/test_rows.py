"""A table of rows is one test, and a row that fails is named."""

import pytest

from tests.rows import for_each_row


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_every_row_is_run_with_its_values() -> None:
    seen: list[tuple[int, str]] = []

    @for_each_row(("number", "word"), [(1, "a"), (2, "b")])
    def body(number: int, word: str) -> None:
        seen.append((number, word))

    body()
    assert seen == [(1, "a"), (2, "b")]


def test_control_one_failing_row_is_raised_as_it_is_and_several_together_each_named() -> None:
    @for_each_row("number", [1, 2, 3])
    def one_fails(number: int) -> None:
        assert number != 2

    @for_each_row("number", [1, 2, 3])
    def two_fail(number: int) -> None:
        assert number == 2

    with pytest.raises(AssertionError) as caught:
        one_fails()
    assert notes(caught.value) == ["row: number=2"]
    with pytest.raises(ExceptionGroup, match="2 of 3 rows failed") as both:
        two_fail()
    assert [notes(one) for one in both.value.exceptions] == [["row: number=1"], ["row: number=3"]]


@for_each_row("left", [1, 2])
@for_each_row("right", [3, 4])
def test_tables_multiply_and_fixtures_pass_through(left: int, right: int, tmp_path: object) -> None:
    assert left < right
    assert tmp_path is not None


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        for_each_row("x", [])
