"""Log lines as programs and terminals get them: valid JSON, one line each, nothing hostile, nothing secret."""

import json
import logging
import sys
from io import StringIO
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from reefknot.console import traces
from reefknot.console.cli.live_output import LogFlags
from reefknot.console.logs import JsonLines, TextLines
from reefknot.runtime.redactor import add_secrets, remove_secrets
from reefknot.runtime.tracing import current_trace_id, tracing

OURS = logging.getLogger("reefknot")
CONTROLS = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))]
HOSTILE = [
    *(f"a{control}b" for control in CONTROLS),
    *("\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\link", "\r2026-01-01 INFO forged", "a\u2028b"),
    *("\u202egnp.exe", "\u2066hidden\u2069", "\u200b", "\ufeff", "a\u0085b", '\n{"level": "error"}', "\ud800"),
    *("'; DROP TABLE", "<script>alert(1)</script>", "${jndi:ldap://x}", "%s%n%d", "\\x1b", '"', "\\"),
    *(
        f"a{chr(code)}b"
        for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0x200C, 0x2010), 0x2029, 0x061C)
    ),
    *("x" * 10_000, "\x1b[31m" * 1000, "🪢 fine", "naïve", "\t", "\x9b31m", "\x00"),
]


class Terminal(StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def record(message: str, **extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "reefknot", "levelname": "WARNING", "msg": "%s", "args": (message,), **extra})


@pytest.mark.parametrize("form", [TextLines(), JsonLines()], ids=["text", "json"])
def test_no_hostile_text_reaches_a_terminal_or_begins_a_line_of_its_own(form: logging.Formatter) -> None:
    for text in HOSTILE:
        line = form.format(record(text, work_id=text, detail=text, nested={text: [text]}))
        assert line.isprintable(), ascii(line)
        assert line.encode("utf-8", "strict")


def test_the_control_is_caught_as_it_would_be_printed_without_escaping() -> None:
    """The same check fails for the formatter of the standard library."""
    plain = [logging.Formatter("%(message)s").format(record(text)) for text in HOSTILE]
    assert (len(plain) >= 100, sum(not line.isprintable() for line in plain) >= 75) == (True, True)


def test_every_line_of_json_can_be_read_and_says_what_was_given_as_far_as_it_is_bounded() -> None:
    odd = {"nan": float("nan"), "inf": float("inf"), "bytes": b"x", "object": object, 7: {1, 2}, "none": None}
    line = json.loads(JsonLines().format(record("told", odd=odd, wait_s=0.5, level="forged", time="forged")))
    assert (line["level"], line["wait_s"], line["message"], line["logger"]) == ("warning", 0.5, "told", "reefknot")
    assert (line["odd"]["nan"], line["odd"]["inf"], line["odd"]["none"]) == ("nan", "inf", None)
    assert line["time"] != "forged"
    endless: dict[str, Any] = {"many": list(range(10_000))}
    endless["self"] = endless
    text = JsonLines().format(record("told", endless=endless))
    assert len(json.loads(text)["endless"]["many"]) == 1000
    assert len(text) < 100_000


@pytest.mark.parametrize("form", [TextLines(), JsonLines()], ids=["text", "json"])
def test_a_secret_is_hidden_in_messages_fields_names_and_tracebacks(form: logging.Formatter) -> None:
    secret = "zander-Trockenfisch_9!"
    try:
        raise ConnectionError(f"the shop refused {secret}")
    except ConnectionError:
        raised = sys.exc_info()
    more = {secret: [secret], "headers": [f"Bearer {secret}", 7]}
    shown = record(f"refused {secret}", work_id=secret, detail=secret, more=more, token=secret, exc_info=raised)
    assert secret in form.format(shown)  # the control
    add_secrets([secret])
    try:
        assert secret not in form.format(shown)
        assert "ConnectionError: the shop refused [redacted]" in form.format(shown)
    finally:
        remove_secrets([secret])


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("form", ["auto", "text", "json"])
def test_lines_are_text_on_a_terminal_alone(form: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    with LogFlags(log_format=form).applied():
        OURS.warning("Scheduling retry", extra={"decision": "retry", "wait_s": 2.0, "detail": "notes: 1 failed"})
    (line,) = stderr.getvalue().splitlines()
    if form == "json" or (form == "auto" and not is_terminal):
        assert (json.loads(line)["decision"], json.loads(line)["wait_s"]) == ("retry", 2.0)
    else:
        assert line.endswith(" WARNING reefknot: Scheduling retry: notes: 1 failed")


def test_a_stderr_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr in (None, Terminal(is_terminal=False)):
        if stderr is not None:
            stderr.close()
        monkeypatch.setattr(sys, "stderr", stderr)
        with LogFlags().applied():
            OURS.error("nobody hears")


def test_a_line_that_is_written_in_a_span_names_its_trace() -> None:
    traces.enable(TracerProvider())
    try:
        tracer = tracing.tracer
        assert tracer is not None
        span = tracer.start("own", {})
        span.enter()
        inside, given = (JsonLines().format(record("told", **more)) for more in ({}, {"trace_id": "order-7"}))
        trace_id = current_trace_id()
        span.end()
    finally:
        traces.disable()
    assert (json.loads(inside)["trace_id"], json.loads(given)["trace_id"]) == (trace_id, "order-7")
    assert "trace_id" not in json.loads(JsonLines().format(record("told")))
