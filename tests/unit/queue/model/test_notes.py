"""Notes of a step: which are accepted, how a progress reads, what of them a record counts, and which lines stay."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from reefknot.core.time import Moment
from reefknot.errors import NotJsonError, ParameterError, ParameterTypeError
from reefknot.queue.model.notes import (
    LARGEST_CHECKPOINT,
    LARGEST_LOG,
    MOST_LINES,
    Noted,
    Notes,
    StepLine,
    StepLog,
    StepProgress,
    checkpoint_text,
)
from tests.rows import for_each_row

NOW = Moment(1_000, 50_000)
HALF = StepProgress(1, 2, "half")


def lines(*texts: str) -> list[StepLine]:
    return [StepLine(5, 1, text) for text in texts]


def texts(log: StepLog) -> list[str]:
    return [line.text for line in log.lines]


# ---- progress --------------------------------------------------------------------------------------------------------


@for_each_row(
    ("done", "of", "text", "percent", "words"),
    [
        (3, 10, "resizing", 30, "3 of 10 (30 %), resizing"),
        (3, None, "", None, "3"),
        (3, None, "resizing", None, "3, resizing"),
        (3, 0, "", None, "3 of 0"),
        (0, 10, "", 0, "0 of 10 (0 %)"),
        (999, 1000, "", 99, "999 of 1,000 (99 %)"),
        (12, 10, "", 100, "12 of 10 (100 %)"),
        (1.5, 1234.0, "", 0, "1.5 of 1,234 (0 %)"),
    ],
)
def test_a_progress_reads_as_a_sentence(done: float, of: float | None, text: str, percent: Any, words: str) -> None:
    found = StepProgress.checked(done, of, text)
    assert (found, found.percent, str(found)) == (StepProgress(done, of, text), percent, words)


@for_each_row(
    ("progress", "kind", "problem"),
    [
        (("3", None, ""), ParameterTypeError, "done='3' is not accepted: a number"),
        ((True, None, ""), ParameterTypeError, "done=True is not accepted: a number"),
        ((-1, None, ""), ParameterError, "done=-1 is not accepted: a number that is 0 or more"),
        ((float("nan"), None, ""), ParameterError, "done=nan is not accepted: a number that is 0 or more"),
        ((1, True, ""), ParameterTypeError, "of=True is not accepted: a number"),
        ((1, float("inf"), ""), ParameterError, "of=inf is not accepted: a number that is 0 or more"),
        ((1, 2, 3), ParameterTypeError, "text=3 is not accepted: a text"),
    ],
)
def test_a_progress_that_is_none_is_refused(progress: Any, kind: type[ParameterError], problem: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StepProgress.checked(*progress)
    assert (type(caught.value), str(caught.value)) == (kind, problem)


# ---- what a record has of them ---------------------------------------------------------------------------------------


def test_notes_without_a_new_checkpoint_change_the_progress_alone() -> None:
    noted = Noted(checkpoints=3, checkpoint_at=40_000, spent_ms=700, at_crash=2)
    for count in (0, 2, 3):
        found = noted.after(Notes(count, HALF), NOW, began_at=30_000)
        assert found == Noted(3, 40_000, 700, 2, HALF)


def test_notes_without_a_progress_leave_the_last_one() -> None:
    assert Noted(progress=HALF).after(Notes(), NOW, began_at=0).progress == HALF
    assert Noted(progress=HALF).after(Notes(1), NOW, began_at=0).progress == HALF


@for_each_row(
    ("checkpoint_at", "began_at", "spent_ms"),
    [
        (0, 49_000, 1_700),
        (49_500, 49_000, 1_200),
        (20_000, 49_000, 1_700),
        (51_000, 49_000, 700),
    ],
)
def test_a_checkpoint_counts_the_time_since_the_last_one_of_its_own_attempt(
    checkpoint_at: int, began_at: int, spent_ms: int
) -> None:
    """What an attempt before it ran after its last checkpoint is lost; a clock that was set back costs nothing."""
    noted = Noted(checkpoints=3, checkpoint_at=checkpoint_at, spent_ms=700, at_crash=2)
    assert noted.after(Notes(5), NOW, began_at=began_at) == Noted(5, NOW.wall, spent_ms, 2)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_kept_as_its_canonical_json() -> None:
    assert checkpoint_text({"page": 1, "done": (1, None)}) == b'{"done":[1,null],"page":1}'


def test_a_checkpoint_that_is_not_json_is_refused_with_its_place() -> None:
    with pytest.raises(NotJsonError) as caught:
        checkpoint_text({"a": [b"bytes"]})
    assert str(caught.value) == "checkpoint.a[0] is not JSON: bytes has no JSON form"


def test_a_checkpoint_may_have_so_many_bytes_and_not_one_more() -> None:
    largest = "x" * (LARGEST_CHECKPOINT - 2)
    assert len(checkpoint_text(largest)) == LARGEST_CHECKPOINT
    with pytest.raises(
        ParameterError, match="at most 65536 bytes as JSON, and it has 65537; keep large data elsewhere"
    ):
        checkpoint_text(largest + "x")


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_new_lines_come_after_the_ones_before() -> None:
    assert StepLog(tuple(lines("a")), 4).with_lines(lines("b", "c")) == StepLog(tuple(lines("a", "b", "c")), 4)


def test_of_too_many_lines_the_oldest_go_and_are_counted() -> None:
    full = StepLog().with_lines(lines(*map(str, range(MOST_LINES))))
    assert (len(full.lines), full.dropped) == (MOST_LINES, 0)
    more = full.with_lines(lines("x", "y"))
    assert (len(more.lines), more.dropped) == (MOST_LINES, 2)
    assert (texts(more)[0], texts(more)[-1]) == ("2", "y")


def test_of_too_large_lines_the_oldest_go_by_their_bytes() -> None:
    half = "ü" * (LARGEST_LOG // 4)
    full = StepLog().with_lines(lines(half, half))
    assert (len(full.lines), full.dropped) == (2, 0)
    more = full.with_lines(lines("x"))
    assert (texts(more), more.dropped) == ([half, "x"], 1)


def test_a_line_that_is_larger_than_all_may_be_leaves_none() -> None:
    assert StepLog().with_lines(lines("a", "x" * (LARGEST_LOG + 1))) == StepLog((), 2)


@given(st.lists(st.integers(0, LARGEST_LOG // 3), max_size=MOST_LINES + 20))
def test_the_lines_that_stay_are_the_latest_and_within_the_bounds(sizes: list[int]) -> None:
    log = StepLog().with_lines(lines(*("x" * size for size in sizes)))
    assert [len(text) for text in texts(log)] == sizes[log.dropped :]
    assert len(log.lines) <= MOST_LINES
    assert sum(map(len, texts(log))) <= LARGEST_LOG


def test_a_log_is_read_as_it_was_written() -> None:
    log = StepLog(tuple(lines("a", "b")), 3)
    assert StepLog.read(json.encode(log)) == log


@for_each_row("part", [None, b"", b"{damaged", b"[]", b'{"lines":5}'])
def test_where_no_log_can_be_read_there_are_no_lines(part: bytes | None) -> None:
    assert StepLog.read(part) == StepLog()
