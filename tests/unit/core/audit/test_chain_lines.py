"""Events as lines of text."""

from collections.abc import Callable

import pytest

from reefknot.core.audit.chain import (
    EventIndex,
    Head,
    LogHeader,
    LogLine,
    anchor_body,
    event_line,
    header_line,
    index_of,
    link,
    read_line,
    time_of,
    verify_lines,
    wrong_index_field,
)
from reefknot.errors import NotJsonError
from tests.rows import for_each_row

BODIES = [b'{"event_type":"a","n":%d}' % number for number in range(5)]


def written(bodies: list[bytes] = BODIES, *, start: Head | None = None, more: bool = False) -> tuple[list[bytes], Head]:
    head = start or Head("c1")
    lines = [header_line(head)]
    for number, body in enumerate(bodies):
        head, _ = link(head, body)
        lines.append(event_line(head, body, more=len(bodies) - 1 - number if more else 0))
    return lines, head


def problems(lines: list[bytes], head: Head | None = None) -> list[str]:
    return [mismatch.problem for mismatch in verify_lines(lines, head)]


@pytest.mark.parametrize("more", [False, True])
def test_what_is_written_verifies_with_and_without_its_head(more: bool) -> None:
    lines, head = written(more=more)

    assert problems(lines) == []
    assert problems(lines, head) == []
    assert [line.body for line in map(read_line, lines) if isinstance(line, LogLine)] == BODIES


def test_a_line_says_again_what_it_was_made_of() -> None:
    head, _ = link(Head("c1"), BODIES[0])
    text = event_line(head, BODIES[0], at=7, filed=EventIndex("b", "c"), more=2)
    line = read_line(text)

    assert isinstance(line, LogLine)
    assert (line.body, line.hash, line.sequence, line.at, line.filed, line.more) == (
        BODIES[0], head.hash, 1, 7, EventIndex("b", "c"), 2,
    )  # fmt: skip
    opening = read_line(header_line(head))
    assert isinstance(opening, LogHeader)
    assert opening.head == head


def test_what_the_event_says_itself_is_not_said_twice() -> None:
    head, _ = link(Head("c1"), BODIES[0])

    assert b"filed" not in event_line(head, BODIES[0], filed=EventIndex("a"))


@pytest.mark.parametrize("body", [b"{", b"", b'{"a":\n1}'])
def test_what_is_not_one_line_of_json_is_refused(body: bytes) -> None:
    with pytest.raises(NotJsonError):
        event_line(Head("c1"), body)


@for_each_row(
    "damage",
    [
        lambda text: text.replace(b'"hash"', b' "hash"'),
        lambda text: text.rstrip(b"\n"),
        lambda text: b"\x00" + text,
        lambda text: text.replace(b'"hash":"', b'"hash":"\xff'),
        lambda text: text.replace(b'"sequence":1', b'"sequence":1,"more":0'),
    ],
)
def test_a_line_is_accepted_to_the_byte_only(damage: Callable[[bytes], bytes]) -> None:
    lines, _ = written()
    lines[1] = damage(lines[1])

    assert read_line(lines[1]) is None
    assert "a line that is not in this format, or was changed" in problems(lines)


@pytest.mark.parametrize("first", [b"", b"nonsense\n", b'{"chain":"c","format":2,"hash":"00","sequence":0}\n'])
def test_a_file_that_opens_no_log_is_one_finding(first: bytes) -> None:
    lines, head = written()

    assert problems([first, *lines[1:]] if first else [], head) == ["the first line does not open a log of format 1"]


def test_a_cut_off_end_shows_only_against_a_head() -> None:
    lines, head = written()

    assert problems(lines[:-1]) == []
    assert problems(lines[:-1], head) == ["cut off: the head is at 5"]


def test_a_cut_off_batch_shows_by_itself() -> None:
    lines, _ = written(more=True)

    assert problems(lines[:-1]) == ["cut off in the middle of a batch"]


def test_a_batch_with_a_changed_count_shows() -> None:
    lines, _ = written(more=True)
    lines[3] = lines[3].replace(b'"more":2', b'"more":9')

    assert problems(lines) == ["the line does not belong to the batch before it"] * 2


def test_the_head_of_another_chain_is_named() -> None:
    lines, _ = written()

    assert problems(lines, Head("c2")) == ["this is chain c1, the head is of chain c2"]


def test_files_that_follow_each_other_are_one_chain_and_a_gap_between_them_shows() -> None:
    first, middle = written()
    second, head = written(start=middle)

    assert problems([*first, *second], head) == []
    assert "the next file does not go on from here" in problems([*first[:-1], *second], head)


def test_a_beginning_that_was_let_go_needs_an_anchor_event() -> None:
    _, middle = written()
    without, _ = written(start=middle)
    vouched, head = written([*BODIES, anchor_body(middle, 1_800_000_000_000)], start=middle)

    assert problems(without) == ["the links before are gone, and no anchor event says so"]
    assert problems(vouched, head) == []


def test_an_event_filed_under_what_it_is_not_shows() -> None:
    head, _ = link(Head("c1"), BODIES[0])
    lines = [header_line(Head("c1")), event_line(head, BODIES[0], filed=EventIndex("b"))]

    assert problems(lines) == ["the event is filed under another event_type than its own"]


def test_only_what_the_event_says_can_be_misfiled() -> None:
    body = b'{"correlation_id":"c","event_type":"a"}'

    assert wrong_index_field(body, EventIndex("a", "c", "t", "w")) is None
    assert wrong_index_field(body, EventIndex("a", "d")) == "correlation_id"
    assert index_of(b"[1]") == EventIndex()


def test_a_field_without_a_value_can_be_misfiled_too() -> None:
    body = b'{"event_type":"a","timestamp":"1970-01-01T00:00:01.500Z","trace_id":null,"work_id":""}'
    assert wrong_index_field(body, EventIndex("a", "c", None, ""), 1500) is None
    assert wrong_index_field(body, EventIndex("a", "c", "t", ""), 1500) == "trace_id"
    assert wrong_index_field(body, EventIndex("a", "c", None, None), 1500) == "work_id"
    assert wrong_index_field(body, EventIndex("a", "c", None, ""), 1501) == "time"
    assert wrong_index_field(b"no json", EventIndex("a"), 7) is None
    assert wrong_index_field(b'{"timestamp":"soon"}', EventIndex("a"), 7) is None


@pytest.mark.parametrize(
    ("body", "at"), [(b'{"timestamp":"1970-01-01T00:00:01.500Z"}', 1500), (b'{"timestamp":"soon"}', 7), (b"{}", 7)]
)
def test_the_time_of_a_line_is_that_of_its_event(body: bytes, at: int) -> None:
    line = read_line(event_line(Head("c", 1, "ab"), body, at=7))
    assert isinstance(line, LogLine)
    assert time_of(line) == at


def test_the_correlation_of_an_event_that_leaves_it_to_the_submission_is_not_compared() -> None:
    left = b'{"event_type":"routing","timestamp":"1970-01-01T00:00:01.500Z","work_id":"w"}'
    assert wrong_index_field(left, EventIndex("routing", "c", "t", "w"), 1500) is None
    assert wrong_index_field(left, EventIndex("routing", "c", "t", "x"), 1500) == "work_id"
    submitted = left.replace(b"routing", b"submitted")
    assert wrong_index_field(submitted, EventIndex("submitted", "c", None, "w"), 1500) == "correlation_id"
