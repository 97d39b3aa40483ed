"""Events as log lines."""

import asyncio
import logging

import pytest

from reefknot.audit.log_sink import LogSink, one_line
from reefknot.audit.model.event import Dropped, OperatorAction, encode
from reefknot.audit.port import AuditEntry
from tests.rows import for_each_row

AT = "2026-01-25T21:15:00.000Z"


def test_every_event_is_one_line_what_needs_a_look_is_a_warning_and_a_level_that_is_off_costs_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = [OperatorAction(timestamp=AT, actor="ann", action="forget"), Dropped(timestamp=AT, reason="too old")]
    entries = [AuditEntry(encode(event), event.event_type, 0) for event in events]
    with caplog.at_level(logging.ERROR, logger="an.own.logger"):
        asyncio.run(LogSink(logging.getLogger("an.own.logger")).append(entries))
    assert caplog.records == []
    with caplog.at_level(logging.INFO, logger="reefknot.audit"):
        head = asyncio.run(LogSink().append(entries))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert [record.getMessage().encode() for record in caplog.records] == [encode(event) for event in events]
    assert head.sequence == 2


@for_each_row("text", [*"\x7f\x9b\u2028\u202e\x00\x85\ufeff\u200b\ue000\udfff", "\x1b[31m", "\r\n"])
def test_nothing_that_steers_a_terminal_comes_through(text: str) -> None:
    assert one_line(f'{{"a":"{text}"}}'.encode("utf-8", "surrogatepass"), 200).isprintable()


@for_each_row("body", [b"x" * 10_000, "é".encode() * 10_000, "\u202e".encode() * 10_000, b"\xff" * 10_000])
def test_a_line_is_never_longer_than_its_bound_and_what_fits_is_not_cut(body: bytes) -> None:
    line = one_line(body, 100)
    assert (len(line), line[-1]) == (100, "…")
    assert one_line(b"x" * 100, 100) == "x" * 100
