"""
Log lines of a command that runs for long: on stderr, as text or JSON, each with its date, time and zone.

The handler is on the root logger, so that lines of one's own steps look the same and obey the same level. Every line is
without configured secrets and control characters. Events that `audit.log` copies are shown whatever the level is: they
were asked for by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from json import dumps
from typing import Annotated, Any

from cyclopts import Parameter

from reefknot.cli import output
from reefknot.cli.options import arg, one_of
from reefknot.runtime.log import printable
from reefknot.runtime.redaction import redact

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = {"text": False, "json": True}
_AUDIT = "reefknot.audit"
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """Options of a command that runs for long: which log lines it prints on stderr, and in which form."""

    log_level: Annotated[str, arg("Least level of log lines: debug, info, warning, error. Default: warning.")] = (
        "warning"
    )
    log_format: Annotated[str, arg("Form of log lines: text or json. Default: text.")] = "text"

    @contextmanager
    def applied(self, *, feed: bool = False) -> Iterator[None]:
        """Print log lines on stderr while the block lasts. With a live `feed`, attempts are not logged: it has them."""
        level = one_of("--log-level", self.log_level, LEVELS)
        as_json = one_of("--log-format", self.log_format, FORMATS)
        handler = _Stderr()
        handler.setFormatter(JsonLines() if as_json else TextLines())
        if feed:
            handler.addFilter(lambda record: not hasattr(record, "retry_attempt"))
        root, audit = logging.getLogger(), logging.getLogger(_AUDIT)
        before = root.level, audit.level
        root.addHandler(handler)
        root.setLevel(level)
        audit.setLevel(min(level, logging.INFO))
        try:
            with output.messages_as(_message_line) if as_json else nullcontext():
                yield
        finally:
            root.removeHandler(handler)
            root.setLevel(before[0])
            audit.setLevel(before[1])


LOG = LogFlags()


class TextLines(logging.Formatter):
    """`2026-01-25T21:15:00.123+01:00 WARNING reefknot: …`, a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        keep = chr(10) if getattr(record, "is_traceback", False) else ""  # its lines are indented
        text = printable(redact(record.getMessage()), keep=keep)
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
            **{name: value for name, value in vars(record).items() if name not in _USUAL},
        }
        trace = _traceback(record)
        return dumps(_redacted(fields | {"traceback": trace} if trace else fields))


def _redacted(value: Any) -> Any:
    """The value as JSON has it, every text in it without configured secrets."""
    match value:
        case dict():
            return {redact(str(name)): _redacted(one) for name, one in value.items()}
        case list() | tuple():
            return [_redacted(one) for one in value]
        case None | bool() | int() | float():
            return value
        case _:
            return redact(str(value))


def stamp(seconds: float) -> str:
    """A moment as ISO 8601 in the zone of this machine, to the millisecond."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _traceback(record: logging.LogRecord) -> str:
    return redact(logging.Formatter().formatException(record.exc_info)) if record.exc_info else ""


def _message_line(text: str) -> str:
    """A message of the command itself as a line of the log: then everything on stderr is JSON."""
    record = logging.makeLogRecord({"name": "reefknot.cli", "levelname": "INFO", "msg": "%s", "args": (text,)})
    return JsonLines().format(record)


class _Stderr(logging.Handler):
    """Lines on stderr. A closed stderr is ignored: the exit code still tells how the command ended."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # logging must not end the work
            return
