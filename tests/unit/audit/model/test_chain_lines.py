"""Events as lines of text."""

from collections.abc import Callable

import pytest

from reefknot.audit.model.chain import (
    EXPORT_FORMAT,
    FORMATS,
    LOG_FORMAT,
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


def written(
    bodies: list[bytes] = BODIES, *, start: Head | None = None, more: bool = False, form: int = EXPORT_FORMAT
) -> tuple[list[bytes], Head]:
    head = start or Head("c1")
    lines = [header_line(head, form)]
    for number, body in enumerate(bodies):
        head, _ = link(head, body)
        lines.append(event_line(head, body, more=len(bodies) - 1 - number if more else 0, form=form))
    return lines, head


def problems(lines: list[bytes], head: Head | None = None) -> list[str]:
    return [mismatch.problem for mismatch in verify_lines(lines, head)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("more", [False, True])
def test_what_is_written_verifies_with_and_without_its_head(more: bool, form: int) -> None:
    lines, head = written(more=more, form=form)

    assert problems(lines) == []
    assert problems(lines, head) == []
    assert [line.body for line in map(read_line, lines) if isinstance(line, LogLine)] == BODIES


def test_a_line_of_an_export_has_its_hash_in_base64url() -> None:
    head = Head("c1", 7, "fb" * 32)
    short = "-_v7" * 10 + "-_s"

    assert event_line(head, b"{}") == b'{"event":{},"hash":"%s","seq":7}\n' % short.encode()
    assert event_line(head, b"{}", form=LOG_FORMAT) == b'{"event":{},"hash":"%s","sequence":7}\n' % (b"fb" * 32)
    assert header_line(head) == header_line(head, LOG_FORMAT).replace(b'"format":1', b'"format":2')


@pytest.mark.parametrize("hashed", ["", "ab", "FB" * 32, "x" * 64, "fb" * 33, "é" * 43, "-_v7" * 10 + "-_t"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_hash_that_is_none_is_written_as_it_is_and_does_not_fit(hashed: str, form: int) -> None:
    """A store may have been changed; its export shows where."""
    lines, head = written(form=form)
    lines[2] = event_line(Head("c1", 2, hashed), BODIES[1], form=form)
    line = read_line(lines[2])

    assert isinstance(line, LogLine)
    assert line.hash == hashed
    assert [one.sequence for one in verify_lines(lines, head)] == [2, 3]


@pytest.mark.parametrize("form", FORMATS)
def test_a_line_says_again_what_it_was_made_of(form: int) -> None:
    head, _ = link(Head("c1"), BODIES[0])
    text = event_line(head, BODIES[0], at=7, filed=EventIndex("b", "c"), more=2, form=form)
    line = read_line(text)

    assert isinstance(line, LogLine)
    assert (line.body, line.hash, line.sequence, line.at, line.filed, line.more, line.format) == (
        BODIES[0], head.hash, 1, 7, EventIndex("b", "c"), 2, form,
    )  # fmt: skip
    opening = read_line(header_line(head, form))
    assert isinstance(opening, LogHeader)
    assert (opening.head, opening.format) == (head, form)


@pytest.mark.parametrize("body", [b"{", b"", b'{"a":\n1}'])
def test_what_is_not_one_line_of_json_is_refused(body: bytes) -> None:
    with pytest.raises(NotJsonError):
        event_line(Head("c1"), body)


@for_each_row(
    "damage",
    [
        *(lambda text: text.replace(b'"hash"', b' "hash"'), lambda text: text.rstrip(b"\n")),
        *(lambda text: b"\x00" + text, lambda text: text.replace(b'"hash":"', b'"hash":"\xff')),
        *(
            lambda text, more=more: text.replace(b"}\n", more)
            for more in (b',"more":0}\n', b',"sequence":1}\n', b',"seq":1}\n')
        ),
        lambda text: text.replace(b'"seq', b'"sEq'),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_a_line_is_accepted_to_the_byte_only(damage: Callable[[bytes], bytes], form: int) -> None:
    lines, _ = written(form=form)
    lines[1] = damage(lines[1])

    assert read_line(lines[1]) is None
    assert "a line that is not in this format, or was changed" in problems(lines)


def test_a_line_has_the_number_and_the_hash_of_one_format() -> None:
    (_, log, *_), head = written(form=LOG_FORMAT)
    (_, export, *_), _ = written(form=EXPORT_FORMAT)

    assert read_line(log.replace(b'"sequence"', b'"seq"')) is None, "the digits of format 1, the number of format 2"
    mixed = read_line(export.replace(b'"seq"', b'"sequence"'))
    assert isinstance(mixed, LogLine)
    assert problems([header_line(Head("c1"), LOG_FORMAT), export.replace(b'"seq"', b'"sequence"')], head) != []


def test_a_file_has_the_format_that_its_header_names_and_a_log_may_go_on_from_an_export() -> None:
    (header, *log), head = written(form=LOG_FORMAT)
    (export_header, *export), _ = written(form=EXPORT_FORMAT)
    assert problems([export_header, *log], head) == ["a line of format 1, after one of 2"], "once, not for every line"
    mixed = verify_lines([header, *log[:3], *export[3:]], head)
    assert [(one.sequence, one.problem) for one in mixed] == [(4, "a line of format 2, after one of 1")]
    first, middle = written(form=EXPORT_FORMAT)
    second, end = written(start=middle, form=LOG_FORMAT)
    assert problems([*first, *second], end) == []


def test_a_file_that_opens_no_log_is_one_finding() -> None:
    lines, head = written()
    for first in (b"", b"nonsense\n", b'{"chain":"c","format":3,"hash":"00","sequence":0}\n'):
        found = problems([first, *lines[1:]] if first else [], head)
        assert found == ["the first line does not open a log of format 1 or 2"]


def test_a_cut_off_end_shows_only_against_a_head_and_a_cut_off_batch_by_itself() -> None:
    lines, head = written()
    assert problems(lines[:-1]) == []
    assert problems(lines[:-1], head) == ["cut off: the head is at 5"]
    assert problems(lines, Head("c2")) == ["this is chain c1, the head is of chain c2"]
    lines, _ = written(more=True)
    assert problems(lines[:-1]) == ["cut off in the middle of a batch"]
    lines[3] = lines[3].replace(b'"more":2', b'"more":9')
    assert problems(lines) == ["the line does not belong to the batch before it"] * 2


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


def test_an_event_filed_under_what_it_is_not_shows_and_what_it_says_itself_is_not_said_twice() -> None:
    head, _ = link(Head("c1"), BODIES[0])
    lines = [header_line(Head("c1")), event_line(head, BODIES[0], filed=EventIndex("b"))]
    assert problems(lines) == ["the event is filed under another event_type than its own"]
    assert b"filed" not in event_line(head, BODIES[0], filed=EventIndex("a"))


AT = b'"timestamp":"1970-01-01T00:00:01.500Z"'
SAID = b'{"correlation_id":"c","event_type":"a"}'
EMPTY = b'{"event_type":"a",' + AT + b',"trace_id":null,"work_id":""}'
LEFT = b'{"event_type":"routing",' + AT + b',"work_id":"w"}'


@for_each_row(
    ("body", "index", "at", "wrong"),
    [
        (SAID, EventIndex("a", "c", "t", "w"), None, None),
        (SAID, EventIndex("a", "d"), None, "correlation_id"),
        (EMPTY, EventIndex("a", "c", None, ""), 1500, None),
        (EMPTY, EventIndex("a", "c", "t", ""), 1500, "trace_id"),
        (EMPTY, EventIndex("a", "c", None, None), 1500, "work_id"),
        (EMPTY, EventIndex("a", "c", None, ""), 1501, "time"),
        (b"no json", EventIndex("a"), 7, None),
        (b'{"timestamp":"soon"}', EventIndex("a"), 7, None),
        (LEFT, EventIndex("routing", "c", "t", "w"), 1500, None),
        (LEFT, EventIndex("routing", "c", "t", "x"), 1500, "work_id"),
        (LEFT.replace(b"routing", b"submitted"), EventIndex("submitted", "c", None, "w"), 1500, "correlation_id"),
    ],
)
def test_only_what_an_event_says_and_does_not_leave_to_its_submission_can_be_misfiled(
    body: bytes, index: EventIndex, at: int | None, wrong: str | None
) -> None:
    assert wrong_index_field(body, index, at) == wrong
    assert index_of(b"[1]") == EventIndex()


def test_the_time_of_a_line_is_that_of_its_event() -> None:
    times = {b'{"timestamp":"1970-01-01T00:00:01.500Z"}': 1500, b'{"timestamp":"soon"}': 7, b"{}": 7}
    for body, at in times.items():
        line = read_line(event_line(Head("c", 1, "ab"), body, at=7))
        assert isinstance(line, LogLine)
        assert time_of(line) == at
