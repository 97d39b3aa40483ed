"""Events as log lines."""

import asyncio
import logging

import pytest

from reefknot.audit.log_sink import LogSink, one_line
from reefknot.audit.model.event import Dropped, Event, OperatorAction, encode
from reefknot.audit.port import AuditEntry

AT = "2026-01-25T21:15:00.000Z"


def entry(event: Event) -> AuditEntry:
    return AuditEntry(encode(event), event.event_type, 0)


def test_every_event_is_one_line_and_what_needs_a_look_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = [OperatorAction(timestamp=AT, actor="ann", action="forget"), Dropped(timestamp=AT, reason="too old")]
    with caplog.at_level(logging.INFO, logger="reefknot.audit"):
        head = asyncio.run(LogSink().append([entry(event) for event in events]))

    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert [record.getMessage().encode() for record in caplog.records] == [encode(event) for event in events]
    assert head.sequence == 2


def test_a_level_that_nobody_listens_to_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    own = logging.getLogger("an.own.logger")
    with caplog.at_level(logging.ERROR, logger="an.own.logger"):
        asyncio.run(LogSink(own).append([entry(Dropped(timestamp=AT, reason="too old"))]))

    assert caplog.records == []


HOSTILE = [
    "\x7f",
    "\x1b[31m",
    "\x9b2J",
    "\u2028",
    "\u202e",
    "\r\n",
    "\x00",
    "\x85",
    "\ufeff",
    "\u200b",
    "\ue000",
    "\udfff",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_that_steers_a_terminal_comes_through(text: str) -> None:
    body = f'{{"a":"{text}"}}'.encode("utf-8", "surrogatepass")

    assert one_line(body, 200).isprintable()


@pytest.mark.parametrize("body", [b"x" * 10_000, "é".encode() * 10_000, "\u202e".encode() * 10_000, b"\xff" * 10_000])
def test_a_line_is_never_longer_than_its_bound(body: bytes) -> None:
    line = one_line(body, 100)

    assert len(line) == 100
    assert line.endswith("…")


def test_what_fits_is_not_cut() -> None:
    assert one_line(b"x" * 100, 100) == "x" * 100
