"""
`LogSink`: audit events as lines of the standard library's logging, bounded in length, without control characters.

The lines are a projection, not a record: nothing can be read back, and the head that `append` returns only counts.
"""

import logging
from collections.abc import Sequence

from reefknot.audit.model.chain import Head
from reefknot.audit.port import AuditEntry
from reefknot.runtime.log import printable

LONGEST_LINE = 2000
WARNINGS = frozenset({"retry_exhausted", "quarantined", "dropped", "log_repaired"})
"""Events logged as warnings; all others are information."""


class LogSink:
    """Logs every event."""

    def __init__(self, logger: str | logging.Logger = "reefknot.audit", *, longest: int = LONGEST_LINE) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._longest = longest
        self._count = 0

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        for entry in entries:
            level = logging.WARNING if entry.event_type in WARNINGS else logging.INFO
            if self._logger.isEnabledFor(level):
                self._logger.log(level, "%s", one_line(entry.body, self._longest))
        self._count += len(entries)
        return Head("log", self._count)


def one_line(body: bytes, longest: int) -> str:
    """The body as one line: control characters are escaped, and a line that is too long ends in `…`."""
    text = body[: 4 * longest + 4].decode("utf-8", "replace")  # enough for one character more than fits
    return printable(printable(text, most=longest), most=longest)  # escapes are longer than what they replace
