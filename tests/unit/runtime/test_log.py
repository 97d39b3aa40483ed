"""Log lines: a bounded number, printable text."""

import pytest

from reefknot.runtime.log import LogBudget, RepeatedErrors, error_text, printable, seconds


def test_a_budget_allows_a_burst_of_ten_then_one_a_second_and_counts_what_was_left_out() -> None:
    budget = LogBudget()
    assert [budget.take(5.0) for _ in range(12)] == [0] * 10 + [None, None]
    assert [budget.take(at) for at in (5.9, 6.0, 6.1, 7.0)] == [None, 3, None, 1]
    assert [budget.take(3600.0) for _ in range(11)] == [0] * 10 + [None], "no more than one burst is saved up"
    # a retrier may be used in real time and then under a virtual clock, which starts elsewhere
    assert budget.take(10.0) == 1, "a clock that goes back does not silence a budget"


def test_a_repeated_error_has_a_line_at_once_then_one_a_minute_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    errors = RepeatedErrors()
    for second in range(1000, 1130):
        errors.log("the status was not written", OSError("disk full"), float(second))
    errors.log("the status was not written", TimeoutError("no answer"), 1130.0)
    errors.log("commands cannot be read", OSError("disk full"), 1130.0)
    errors.log("commands cannot be read", OSError("disk full"), 10.0)  # by a clock that goes back

    assert [record.getMessage() for record in caplog.records] == [
        "the status was not written (OSError: disk full)",
        "the status was not written (OSError: disk full); 59 more since the last line",
        "the status was not written (OSError: disk full); 59 more since the last line",
        "the status was not written (TimeoutError: no answer)",
        "commands cannot be read (OSError: disk full)",
        "commands cannot be read (OSError: disk full)",
    ]


def test_text_errors_and_seconds_are_shown_in_one_line_of_bounded_length() -> None:
    shown = {"x" * 10: "x" * 10, "x" * 11: "x" * 9 + "…", "a\nb\x1b": r"a\nb\x1b"}
    assert {text: printable(text, most=10) for text in shown} == shown

    assert error_text(TimeoutError()) == "TimeoutError: it took too long"
    assert error_text(OSError()) == "OSError"
    assert error_text(OSError("disk\nfull")) == r"OSError: disk\nfull"
    assert len(error_text(OSError("x" * 10_000))) == 300

    durations = {0.0: "0", 0.5: "0.5", 0.07149: "0.071", 30.0: "30", 1e9: "1000000000"}
    assert {value: seconds(value) for value in durations} == durations
