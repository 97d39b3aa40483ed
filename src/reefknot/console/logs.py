"""
The form of log lines on stderr: text for people, an object of JSON per line for programs.

The handler is on the root logger, so that lines of one's own steps look the same and obey the same level. Every line is
without configured secrets and control characters. Events that `audit.log` copies are shown whatever the level is: they
were asked for by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from json import dumps
from math import isfinite
from textwrap import dedent
from typing import Any

from reefknot.runtime.log import logger, printable
from reefknot.runtime.redactor import redact
from reefknot.runtime.tracing import current_trace_id

AUDIT = "reefknot.audit"
DEEPEST = 8
"""Levels of a field's value that are written; below them there is `…`."""
MOST_VALUES = 1000
"""Values of one mapping or list that are written."""
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def printed(level: int, *, as_json: bool, feed: bool = False, own_level: int | None = None) -> Iterator[None]:
    """
    Print log lines of this level and above on stderr while the block lasts; those of reefknot from `own_level` on.

    With a live `feed`, decisions about attempts are not logged: it has them.
    """
    handler = StderrLines()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    if feed:
        handler.addFilter(lambda record: not hasattr(record, "decision"))
    root, audit, own = logging.getLogger(), logging.getLogger(AUDIT), logger()
    before = root.level, audit.level, own.level
    root.addHandler(handler)
    root.setLevel(level)
    if own_level is not None:
        own.setLevel(own_level)
    audit.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        audit.setLevel(before[1])
        own.setLevel(before[2])


class TextLines(logging.Formatter):
    """`2026-01-25T21:15:00.123+01:00 WARNING reefknot: …`, a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        keep = chr(10) if getattr(record, "is_traceback", False) else ""  # its lines are indented
        detail = getattr(record, "detail", "")
        text = printable(redact(f"{record.getMessage()}{detail and ': '}{detail}"), keep=keep)
        line = f"{stamp(record.created)} {record.levelname} {record.name}: {text}"
        trace = _traceback(record)
        return f"{line}\n{printable(trace, keep=chr(10))}" if trace else line


class JsonLines(logging.Formatter):
    """Lines of JSON, each an object: `time`, `level`, `logger`, `message`, and what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        hidden = {*_USUAL, *fields, "is_traceback"}
        fields |= {name: value for name, value in vars(record).items() if name not in hidden}
        if fields.get("trace_id") is None and (trace_id := current_trace_id()) is not None:
            fields["trace_id"] = trace_id
        trace = _traceback(record)
        if getattr(record, "is_traceback", False):  # the message goes on with one, indented, for plain handlers
            fields["message"], _, indented = fields["message"].partition("\n")
            trace = dedent(indented)
        return dumps(_redacted(fields | {"traceback": trace} if trace else fields))


def message_line(text: str, url: str | None = None, level: str = "info") -> str:
    """
    A message of a command itself as a line of the log: then everything on stderr is JSON.

    `url` is the only field that nothing is removed from: an address whose token the command has made for this start.
    """
    fields = {"name": "reefknot.cli", "levelname": level.upper(), "msg": "%s", "args": (text,)}
    record = logging.makeLogRecord(fields)
    line = JsonLines().format(record)
    return line if url is None else f'{line[:-1]}, "url": {dumps(url)}}}'


class StderrLines(logging.Handler):
    """Lines on stderr. A closed stderr is ignored: the exit code still tells how the command ended."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # logging must not end the work
            return


def stamp(seconds: float) -> str:
    """A moment as ISO 8601 in the zone of this machine, to the millisecond."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _redacted(value: Any, depth: int = 0) -> Any:
    """The value as JSON has it, bounded, every text in it without configured secrets."""
    match value:
        case dict() | list() | tuple() if depth >= DEEPEST:
            return "…"
        case dict():
            few = list(value.items())[:MOST_VALUES]
            return {redact(str(name)): _redacted(one, depth + 1) for name, one in few}
        case list() | tuple():
            return [_redacted(one, depth + 1) for one in value[:MOST_VALUES]]
        case float() if not isfinite(value):
            return str(value)  # JSON has no such number
        case None | bool() | int() | float():
            return value
        case _:
            return redact(str(value))


def _traceback(record: logging.LogRecord) -> str:
    return redact(logging.Formatter().formatException(record.exc_info)) if record.exc_info else ""
