"""
Output of a command that runs for long: log lines on stderr, and the live feed of its system on stdout.

Lines of the feed come from the audit log, so nothing is shown that is not audited: events in words, as they are
written, and changes of a worker's load level. At most `LINES_A_SECOND` are printed; the rest is counted by kind, and
the counts are printed instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated, Any, TextIO

import msgspec
from cyclopts import Parameter

from reefknot.audit.model import event as events
from reefknot.audit.model.analysis import epoch_seconds
from reefknot.audit.port import AuditLog, AuditQuery, KeptEntry
from reefknot.console.cli import output
from reefknot.console.cli.options import arg
from reefknot.console.cli.output import data
from reefknot.console.operations.values import one_of, queue_depth
from reefknot.console.words.events import describe
from reefknot.errors import StoreError
from reefknot.queue.model.messages import ResultStatus

# ---- the log ---------------------------------------------------------------------------------------------------------

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORM_VARIABLE = "REEFKNOT_LOG_FORMAT"
FORMATS = {form: form for form in ("auto", "text", "json")}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """Options of a command that runs for long: which log lines it prints on stderr, and in which form."""

    log_level: Annotated[str, arg("Minimum level of log lines: debug, info, warning, error. Default: warning.")] = (
        "warning"
    )
    log_format: Annotated[
        str | None,
        arg(
            "Form of log lines: text, json, or auto: text on a terminal, else json. Default: REEFKNOT_LOG_FORMAT, or "
            "auto."
        ),
    ] = None

    @property
    def form(self) -> str:
        """The form that is asked for: by the option, else by the environment."""
        if self.log_format is None:
            return one_of(FORM_VARIABLE, os.environ.get(FORM_VARIABLE) or "auto", FORMATS)
        return one_of("--log-format", self.log_format, FORMATS)

    @property
    def is_json(self) -> bool:
        """Whether log lines are JSON: as asked for, else where stderr is no terminal."""
        form = self.form
        return form == "json" or (form == "auto" and not is_terminal(sys.stderr))

    @contextmanager
    def applied(self, *, feed: bool = False, is_service: bool = False) -> Iterator[None]:
        """
        Print log lines on stderr while the block lasts, and export traces if the environment asks for them.

        With a live `feed`, attempts are not logged as text: it has them. Where lines of a service are JSON, its own
        messages are, too; those of other commands only when JSON is asked for by name.
        """
        from reefknot.console.logs import message_line, printed
        from reefknot.console.traces import exported

        level = one_of("--log-level", self.log_level, LEVELS)
        as_json = self.is_json
        own = output.messages_as(message_line) if self.form == "json" or (as_json and is_service) else nullcontext()
        with printed(level, as_json=as_json, feed=feed and not as_json), own, exported():
            yield


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


LOG = LogFlags()


# ---- the live feed ---------------------------------------------------------------------------------------------------

PAGE = 1000
LINES_A_SECOND = 20
LONGEST_WAIT_S = 0.25

PrintLine = Callable[[str], None]


def feed_line(event: events.AnyEvent, kind: str, words: str) -> str:
    """`2026-01-25T12:00:01+01:00  retry        a1 (http.request): attempt 1 failed: …`"""
    seconds = epoch_seconds(event.timestamp)
    at = event.timestamp if seconds is None else local_time(datetime.fromtimestamp(seconds, UTC))
    subject = event.work_id or ""
    if subject and event.tenant_id:
        subject = f"{subject} of {event.tenant_id}"
    operation = getattr(event, "operation", None)
    if operation:
        subject = f"{subject} ({operation})".lstrip()
    return f"{at}  {kind:<12} {subject + ': ' if subject else ''}{words}"


def local_time(moment: datetime) -> str:
    """Date, time and zone, as this machine has it."""
    return moment.astimezone().isoformat(timespec="seconds")


class LiveFeed:
    """Follows an audit log and prints its events."""

    def __init__(
        self,
        log: AuditLog,
        print_line: PrintLine,
        *,
        after: int,
        as_json: bool = False,
        workers: Collection[str] = (),
    ) -> None:
        """`workers` are those whose ends are counted; there may be more of them later."""
        self.kinds: Counter[str] = Counter()
        """The number of events of each kind, printed or not."""
        self.ends: Counter[str] = Counter()
        """The number of assignments that ended at these workers or at none: by status, `rejected` or `dropped`."""
        self._workers = workers
        self._before: events.AnyEvent | None = None
        """The event before: quarantined or dropped, it says which end the next one is."""
        self._log = log
        self._print = print_line
        self._after = after
        self._as_json = as_json
        self._second = 0.0
        self._lines = 0
        self._left_out: Counter[str] = Counter()

    async def follow(self) -> None:
        """Print events until cancelled. A failed read is made again: a store that is gone ends the system itself."""
        while True:
            try:
                await self._log.wait(self._after, LONGEST_WAIT_S)
                await self.catch_up()
            except StoreError:
                await asyncio.sleep(LONGEST_WAIT_S)

    async def catch_up(self) -> None:
        """Print every event that is in the log by now."""
        while entries := await self._log.read(AuditQuery(after=self._after, limit=PAGE)):
            for kept in entries:
                self._show(kept)
            self._after = entries[-1].sequence
        self._flush_counts()
        data().flush()

    def end(self) -> None:
        """Print the counts of what is still left out."""
        self._second = 0.0
        self._flush_counts()

    def _show(self, kept: KeptEntry) -> None:
        try:
            event = events.decode(kept.entry.body)
        except msgspec.DecodeError:  # written by another version; `audit verify` is for that
            return
        self._count(event)
        described = describe(event)
        if described is None:
            return
        kind, words = described
        self.kinds[kind] += 1
        if self._has_room():
            self._print(kept.entry.body.decode() if self._as_json else feed_line(event, kind, words))
        else:
            self._left_out[kind] += 1

    def _count(self, event: events.AnyEvent) -> None:
        """
        Count an end at a worker of this system, or at none: cancelled, expired or refused before one had it.

        The log is the only source: of jobs that were run again, or ended during the drain, a router hears nothing. It
        does not say whose router made an end without a worker, so all systems over one store count it.
        """
        before, self._before = self._before, event
        if not isinstance(event, events.Completed):
            return
        if event.worker_id is not None:
            self.ends[event.status] += event.worker_id in self._workers
            return
        is_same = before is not None and (before.work_id, before.tenant_id) == (event.work_id, event.tenant_id)
        if is_same and isinstance(before, events.Dropped):
            self.ends["dropped"] += 1
        elif is_same and isinstance(before, events.Quarantined):
            self.ends[event.status] += 1
        else:
            was_refused = event.status == ResultStatus.ERROR and event.attempts == 0
            self.ends["rejected" if was_refused else event.status] += 1

    def _has_room(self) -> bool:
        now = monotonic()
        if now - self._second >= 1.0:
            self._flush_counts(now)
            self._second, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES_A_SECOND or self._as_json

    def _flush_counts(self, now: float | None = None) -> None:
        """Print what was left out, once its second has passed."""
        if self._left_out and (now or monotonic()) - self._second >= 1.0:
            counts = ", ".join(f"{number} {kind}" for kind, number in self._left_out.most_common())
            self._print(f"{local_time(datetime.now(UTC))}  {'more':<12} {counts}")
            self._left_out.clear()


class LevelChanges:
    """Prints a line when the load level of a worker's resource class changes."""

    def __init__(self, print_line: PrintLine) -> None:
        self._print = print_line
        self._last: dict[tuple[str, str], str] = {}

    def update(self, snapshot: dict[str, Any]) -> None:
        for worker in snapshot["workers"]:
            for name, state in worker["classes"].items():
                key, status = (worker["worker_id"], name), str(state["status"])
                before = self._last.get(key, "healthy")
                if status != before:
                    self._last[key] = status
                    queue = f"queue: {queue_depth(state['depth'], state['size'])}; {state['active']} running"
                    words = f"{key[0]} {name}: {before} → {status}; {queue}"
                    self._print(f"{local_time(datetime.now(UTC))}  {'overload':<12} {words}")
