"""Charts: what is drawn, what is said in words, that no text gets out of its place; rows of a timeline from records."""

import math
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from reefknot.audit.model.event import timestamp
from reefknot.console.dashboard import charts
from reefknot.console.dashboard.charts import CUT, MOST_POINTS, MOST_ROWS, Series, Span
from reefknot.console.dashboard.views import timeline_rows

HOSTILE = '</svg><script>alert("1")</script>&\'\x1b\u202e'
DRAWN: dict[str, Callable[[str], str]] = {
    "lines": lambda text: charts.lines([Series(text, [1, None, 2])], title=text, unit=text, step_s=10),
    "stacked": lambda text: charts.stacked([Series(text, [1, 0, 2])], title=text, unit=text, step_s=10),
    "waits": lambda text: charts.waits([(1, 2), (2, 4)], title=text),
    "timeline": lambda text: charts.timeline([(text, text, [Span(0, 1, text), Span(1, 2, "waiting")])], title=text),
    "meter": lambda text: charts.meter(1, 2, title=text),
}


def elements(drawn: str) -> list[ET.Element]:
    return list(ET.fromstring(drawn).iter())


def named(drawn: str, tag: str, kind: str = "") -> list[ET.Element]:
    return [one for one in elements(drawn) if one.tag == tag and kind in one.get("class", "")]


@pytest.mark.parametrize("name", DRAWN)
def test_every_chart_escapes_its_texts_is_described_in_words_and_has_no_style_of_its_own(name: str) -> None:
    """The content policy refuses a style that is not in the sheet."""
    plain, hostile = (elements(DRAWN[name](text)) for text in ("a title", HOSTILE))
    assert [one.tag for one in hostile] == [one.tag for one in plain]
    assert "".join(text for one in hostile for text in (one.text or "", *one.attrib.values())).isprintable()
    assert not {one.tag for one in hostile} & {"style", "script"}
    assert all("style" not in one.attrib and "fill" not in one.attrib for one in plain)
    assert plain[0].get("role") == ("group" if name == "timeline" else "img")
    assert (plain[0].get("aria-label") or "").startswith("a title")


def test_each_row_of_a_timeline_and_the_last_and_the_largest_value_are_said_in_words() -> None:
    drawn = charts.timeline([("attempt 1", "", [Span(0, 2, "waiting"), Span(2, 3, "failed")])], title="")
    (bars,) = [one for one in elements(drawn) if one.get("role") == "img"]
    assert bars.get("aria-label") == "attempt 1: waiting after 0 s for 2 s; failed after 2 s for 1 s"
    drawn = charts.lines([Series("retries", [1, 5, 2])], title="Retries", unit="per second", step_s=10)
    assert elements(drawn)[0].get("aria-label") == "Retries: retries: 2 per second now, at most 5 per second"


def lines(*values: float | None) -> list[ET.Element]:
    return named(charts.lines([Series("a", values)], title="", unit="x", step_s=10), "polyline")


def test_a_gap_ends_a_line_and_a_lone_value_is_one_too() -> None:
    assert len(lines(1, 2, None, 3, 4)) == 2
    (line,) = lines(None, 3, None)
    left, right = [point.split(",") for point in (line.get("points") or "").split()]
    assert left[1] == right[1]
    assert float(right[0]) - float(left[0]) == 6.0, "wide enough to be seen: a line of no length is not drawn"


def test_nothing_recorded_is_drawn_as_an_empty_chart() -> None:
    for values in ([], [None, None], [math.nan, math.inf]):
        drawn = charts.lines([Series("a", values)], title="A", unit="", step_s=10)
        assert "nothing recorded yet" in drawn
        assert named(drawn, "polyline") == []


def test_stacked_values_stand_on_each_other() -> None:
    """1 below 3: the second begins where the first ends, at a quarter of the height."""
    drawn = named(charts.stacked([Series("a", [1]), Series("b", [3])], title="", unit="", step_s=10), "path")
    paths = [one.get("d", "") for one in drawn]
    tops = [float(path.replace("M", "").replace("h", " ").replace("v", " ").split(" ", 2)[1]) for path in paths]
    heights = [float(path.partition("v")[2].partition("h")[0]) for path in paths]
    assert tops[1] + heights[1] == pytest.approx(tops[0], abs=0.11)
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.02)


def test_an_axis_ends_at_a_round_number() -> None:
    tops = {0: 1, 0.3: 0.4, 1: 1, 1.2: 2, 3: 4, 4.5: 5, 7: 10, 11: 20, 90: 100, 950: 1000}
    for value, top in tops.items():
        drawn = charts.lines([Series("a", [value])], title="", unit="x", step_s=1)
        assert charts.number(top) in [one.text for one in named(drawn, "text")], value


def test_a_meter_is_full_at_its_limit_and_never_beyond() -> None:
    for value, limit, width in ((0, 10, 0), (5, 10, 50), (15, 10, 100), (3, 0, 0)):
        (bar,) = named(charts.meter(value, limit, title="queue"), "rect", "fill")
        assert float(bar.get("width", "-1")) == width


def test_charts_of_any_length_are_bounded() -> None:
    many = [Series("a", [float(number) for number in range(100_000)])]
    (line,) = named(charts.lines(many, title="", unit="", step_s=1), "polyline")
    assert len(line.get("points", "").split()) == MOST_POINTS
    assert len(named(charts.waits([(1.0, 2.0)] * 5000, title=""), "rect", "sure")) == MOST_ROWS
    rows = [("a", "b", [Span(0, 1, "failed")])] * 5000
    assert len(named(charts.timeline(rows, title=""), "rect", "span")) == MOST_ROWS


def test_attempts_stand_on_one_axis_of_time() -> None:
    """The second begins at the half of four seconds."""
    rows = [("attempt 1", "timeout", [Span(10, 11, "failed")]), ("attempt 2", "", [Span(12, 14, "succeeded")])]
    first, second = named(charts.timeline(rows, title="Attempts"), "rect", "span")
    (left, width), (x, twice) = place(first), place(second)
    assert x == pytest.approx(left + 2 * width, abs=0.2)
    assert twice == pytest.approx(2 * width, abs=0.2)


def place(bar: ET.Element) -> tuple[float, float]:
    return float(bar.get("x", "").removesuffix("%")), float(bar.get("width", "").removesuffix("%"))


def labels(drawn: str) -> list[str]:
    return [one.text or "" for one in named(drawn, "text", "label")]


def test_a_long_time_in_the_queue_is_cut_so_that_attempts_can_be_read() -> None:
    """Ten minutes in a queue, then two attempts of a second each, with two seconds between them."""
    rows = [
        ("attempt 1", "", [Span(100, 700, "waiting"), Span(700, 701, "failed")]),
        ("attempt 2", "", [Span(701, 703, "waiting"), Span(703, 704, "succeeded")]),
    ]
    drawn = charts.timeline(rows, title="", begins=100, ends=704)
    first, second = (place(one) for one in named(drawn, "rect", "span"))
    assert first == pytest.approx((CUT, (100 - CUT) / 4), abs=0.1)
    assert second == pytest.approx((100 - (100 - CUT) / 4, (100 - CUT) / 4), abs=0.1)
    assert len(named(drawn, "rect", "break")) == 3, "in both rows and in the axis"
    assert labels(drawn) == ["0 s", "10 min", "10 min 4 s", "//"]


def test_a_time_in_the_queue_that_leaves_room_is_not_cut_and_the_axis_ends_where_the_job_ended() -> None:
    """An attempt of a second, and the job was cancelled a second later, while it waited."""
    rows = [("attempt 1", "", [Span(0, 5, "waiting"), Span(5, 7, "failed")])]
    drawn = charts.timeline(rows, title="", begins=0, ends=7)
    assert place(*named(drawn, "rect", "span")) == pytest.approx((500 / 7, 200 / 7), abs=0.1)
    assert named(drawn, "rect", "break") == []
    drawn = charts.timeline([("attempt 1", "", [Span(10, 11, "failed")])], title="", begins=10, ends=12)
    assert place(*named(drawn, "rect", "span")) == pytest.approx((0, 50), abs=0.1)
    assert labels(drawn)[-1] == "2 s"


NOON = 1_769_342_400.0


def at(second: float | None) -> str | None:
    return None if second is None else timestamp(NOON + second)


def attempt(number: int, started: float | None, ended: float | None, **more: Any) -> dict[str, Any]:
    took = None if started is None or ended is None else ended - started
    told = {"generation": 0, "due_at": None, "code": None, "outcome": "retried", "duration_s": took, **more}
    return {"number": number, "started_at": at(started), "ended_at": at(ended), **told}


def rows(*attempts: dict[str, Any], total_s: float, **more: Any) -> list[Any]:
    story = {"created_at": at(0), "state": "succeeded", "due_at": None, "generation": 0, "history": [], **more}
    found = timeline_rows(story | {"total_s": total_s, "attempts": attempts})
    return [
        (name, words, [(one["begins"] - NOON, one["ends"] - NOON, one["kind"]) for one in spans])
        for name, words, spans in found
    ]


def test_each_attempt_has_the_wait_before_it_and_a_run_that_crashed_a_bar_of_its_own() -> None:
    found = rows(attempt(1, 8, 9, code="TIMEOUT"), attempt(2, 11, 12.5, outcome="succeeded"), total_s=12.5)
    assert found == [
        ("attempt 1", "TIMEOUT, ran 1 s, after a wait of 8 s", [(0, 8, "waiting"), (8, 9, "failed")]),
        ("attempt 2", "succeeded, ran 1.5 s, after a wait of 2 s", [(9, 11, "waiting"), (11, 12.5, "succeeded")]),
    ]
    crashed = attempt(1, 1, 9, outcome="crashed", duration_s=None)
    found = rows(crashed, attempt(1, 10, 11, due_at=at(9), outcome="succeeded"), total_s=11)
    assert found == [
        ("attempt 1", "crashed, noticed within 8 s, after a wait of 1 s", [(0, 1, "waiting"), (1, 9, "crashed")]),
        ("attempt 1", "succeeded, ran 1 s, after a wait of 1 s", [(9, 10, "waiting"), (10, 11, "succeeded")]),
    ]


def test_a_second_run_waits_from_its_requeue_on() -> None:
    second = attempt(1, 61, 62, generation=1, due_at=at(60), outcome="succeeded")
    found = rows(attempt(1, 0, 1, outcome="failed"), second, total_s=62, generation=1)
    assert [name for name, _, _ in found] == ["run 1, attempt 1", "run 2, attempt 1"]
    assert found[1][2] == [(60, 61, "waiting"), (61, 62, "succeeded")]


def test_a_start_that_is_not_on_record_is_not_made_up_and_a_running_attempt_goes_on_until_now() -> None:
    (row,) = rows(attempt(1, None, 3), total_s=3)
    assert row == ("attempt 1", "retried, start not recorded", [(0, 3, "other")])
    (row,) = rows(attempt(1, 1, None, outcome="running"), total_s=4, state="running")
    assert row == ("attempt 1", "running, for 3 s, after a wait of 1 s", [(0, 1, "waiting"), (1, 4, "running")])


def test_a_job_that_waits_for_its_retry_shows_it() -> None:
    found = rows(attempt(1, 0, 1), total_s=2, state="pending", due_at=at(5))
    assert found[-1] == ("next attempt", "waits", [(1, 5, "waiting")])
    requeued = [{"at": at(60), "what": "requeued"}]
    found = rows(attempt(1, 0, 1), total_s=61, state="pending", generation=1, history=requeued)
    assert found[-1][2] == [(60, 61, "waiting")]
