"""
`reefknot run FILE`: a file of assignments through router, queue and worker to their results, and a summary.

Every assignment has exactly one of six ends. `recovered` is part of `succeeded`, `quarantined` part of `failed`. An
assignment that no worker accepted is `rejected`; one that a worker gave up to make room is `dropped`. Jobs that others
have submitted to the same store are left to others, unless `--all` is given.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from json import dumps
from shlex import quote
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET

from reefknot.console.cli.app import CommandError, Exit, noun
from reefknot.console.cli.assignments import (
    STDIN,
    AssignmentLine,
    InvalidLine,
    assignments,
    display_name,
    require_file,
    survey,
)
from reefknot.console.cli.live_output import LOG, LogFlags
from reefknot.console.cli.options import SYSTEM, FileName, SystemFlags, arg, check_whole, file_arg, unwritable
from reefknot.console.cli.output import Advance, data, prints_to_stderr, progress, put, say
from reefknot.console.cli.serve import (
    Shutdown,
    Startup,
    parts_of,
    run_service,
    shutdown_on_signals,
    startup,
    unfinished,
    wait_for,
)
from reefknot.console.operations.values import plural
from reefknot.core.checks import suggest
from reefknot.core.redaction import Redactor
from reefknot.errors import KeyConflictError, QueueFullError
from reefknot.queue.model.admission import RejectReason
from reefknot.queue.model.messages import ExecResult, ResultStatus, encode, resource_class
from reefknot.queue.model.results import answer_of
from reefknot.queue.model.work import WorkState, is_workers
from reefknot.runtime.files import output_file
from reefknot.runtime.log import printable
from reefknot.runtime.tasks import until_first_ends

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.stores.port import Store

IN_FLIGHT = 200
MOST_SHOWN = 20
LONGEST_WAIT_S = 5.0
DRAIN_S = 5.0
OTHERS_EVERY_S = 0.1

app = noun(
    "run",
    "run assignments.jsonl",
    "run assignments.jsonl --results out.jsonl --json",
    "cat more.jsonl | reefknot run - --workers 2",
    "run assignments.jsonl --all",
    help="Run a file of assignments to completion and print a summary. The exit code is 1 unless all succeeded.",
)


@app.default
def run(
    file: Annotated[FileName, file_arg("One assignment per line, as JSON; - is stdin.", allow_leading_hyphen=True)],
    /,
    *,
    results: Annotated[FileName | None, file_arg("Write one ExecResult per line to this new file.")] = None,
    force: Annotated[bool, arg("Replace the file of --results if it exists.")] = False,
    new: Annotated[bool, arg("Run lines without an id again, also those that an earlier run has finished.")] = False,
    in_flight: Annotated[int, arg(f"Maximum number of assignments in flight. Default: {IN_FLIGHT}.")] = IN_FLIGHT,
    all_: Annotated[bool, arg("Also run the other jobs in this store, and end when no job is open.", "--all")] = False,
    log: LogFlags = LOG,
    options: SystemFlags = SYSTEM,
) -> int:
    """Run a file of assignments through router, queue and worker, with a progress bar."""
    check_whole("--in-flight", in_flight)
    require_file(file)
    if results is not None:
        check_results(results, file, force=force)
    with log.applied(), prints_to_stderr(), _results_file(results) as write:
        start = startup(options.engine, options.config, options.workers)
        batch = BatchRun(file, write, in_flight, new=new, takes_all=all_, secrets=start.secrets, flags=start.flags)
        return run_service(_run(batch, start, options))


async def _run(batch: BatchRun, start: Startup, options: SystemFlags) -> int:
    began = monotonic()
    with shutdown_on_signals() as shutdown:
        parts = {**parts_of(options), "own_work_only": not batch.takes_all, "stopped": batch.count_rest}
        async with start.system(drain=DRAIN_S, **parts) as system:
            shutdown.reloads(system)
            await batch.run(system, shutdown)
    elapsed = monotonic() - began
    batch.report_rest()
    if options.json:
        print(dumps(batch.tally.summary(elapsed)), file=data())
    else:
        put(batch.tally.sentence(elapsed))
    if shutdown.code is not None:
        return shutdown.code
    return Exit.FINE if batch.tally.all_succeeded else Exit.FAILED


# ---- counting --------------------------------------------------------------------------------------------------------

ENDS = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")
_BY_STATUS = {
    ResultStatus.SUCCESS: "succeeded",
    ResultStatus.TIMEOUT: "timed_out",
    ResultStatus.CANCELLED: "cancelled",
}


class Tally:
    """The number of assignments with each end."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(ENDS, 0)
        self.recovered = 0
        self.quarantined = 0
        self.retries = 0
        self.unfinished = 0
        """Submitted, and without a result at the end."""
        self.is_cut_short = False
        """Whether a shutdown came before the end of the file."""

    @property
    def total(self) -> int:
        return sum(self.ends.values())

    @property
    def all_succeeded(self) -> bool:
        return self.total == self.ends["succeeded"] and not self.unfinished

    async def count(self, result: ExecResult, store: Store) -> str:
        """Count one result and return its end."""
        end = _BY_STATUS.get(result.status) or await self._failure_end(result, store)
        self.ends[end] += 1
        retries = 0 if result.retries_used is UNSET else result.retries_used
        self.retries += retries
        self.recovered += end == "succeeded" and retries > 0
        return end

    async def _failure_end(self, result: ExecResult, store: Store) -> str:
        """The end of a failed assignment, from its record. One that no worker has accepted was rejected."""
        item = await store.work.get(result.record_id)
        if item is not None and item.state is WorkState.QUARANTINED:
            self.quarantined += 1
            return "failed"
        if item is None or not is_workers(item):
            return "rejected"
        if item.state is WorkState.CANCELLED and item.reason == RejectReason.DROPPED_OLDEST.value:
            return "dropped"
        return "failed"

    def summary(self, elapsed: float) -> dict[str, Any]:
        return {
            "total": self.total,
            **self.ends,
            "recovered": self.recovered,
            "quarantined": self.quarantined,
            "retries": self.retries,
            "unfinished": self.unfinished,
            "elapsed_s": round(elapsed, 3),
        }

    def sentence(self, elapsed: float) -> str:
        """The summary for people, without zeros."""
        asides = {
            "succeeded": f" ({self.recovered} after retries)" if self.recovered else "",
            "failed": f" ({self.quarantined} in quarantine)" if self.quarantined else "",
        }
        counted = {**self.ends, "unfinished": self.unfinished}
        ends = [f"{n} {end.replace('_', ' ')}{asides.get(end, '')}" for end, n in counted.items() if n]
        retries = plural(self.retries, "retry", "retries")
        nothing = "none was submitted" if self.is_cut_short else "nothing to do"
        number = plural(self.total + self.unfinished, "assignment")
        return f"{number} in {elapsed:.1f} s: {', '.join(ends) or nothing}; {retries}"


# ---- running ---------------------------------------------------------------------------------------------------------

Write = Callable[[bytes], object]


class BatchRun:
    """Run of one file of assignments."""

    def __init__(
        self,
        file: str,
        write: Write,
        in_flight: int,
        *,
        new: bool = False,
        takes_all: bool = False,
        secrets: tuple[str, ...] = (),
        flags: str = "",
    ) -> None:
        """`new`: lines without an id get new ones, not those of an earlier run. `takes_all`: run others' jobs too."""
        self.tally: Tally = Tally()
        self.takes_all = takes_all
        self._new = new
        self._file = file
        self._redact = Redactor(secrets)
        self._flags = flags
        """The flags with which other commands find the same store."""
        self._lines: AsyncIterator[AssignmentLine | InvalidLine]
        self._reading = asyncio.Lock()
        self._began_ms = 0
        self._write = write
        self._in_flight = in_flight
        self._submitting = asyncio.Lock()
        self._freed = asyncio.Event()
        self._failures = 0
        self._from_earlier_run = 0
        self._earlier_without_id = 0
        self._earlier_failures = 0
        """Lines with an id whose stored result is no success: only `job retry` runs them again."""
        self._to_retry: dict[str | None, list[str]] = {}
        """The ids of the first of them, by tenant."""
        self._accepted = 0
        """Assignments of this run that are open in the store."""
        self._others = 0
        """Open jobs of others that this run has left."""
        self._open: dict[str, AssignmentLine] = {}
        """Lines that are being submitted or have no result yet, by the id of their record."""
        self._line_count = 0

    async def run(self, system: System, shutdown: Shutdown) -> None:
        """Run the whole file, several lines at a time, until it is done or a shutdown is requested."""
        self._began_ms = system.snapshot()["at"]
        lines, content = await asyncio.to_thread(survey, self._file)
        self._line_count = lines
        self._lines = assignments(self._file, "" if self._new else content)
        slots = sum(pool.slots for worker in system.workers for pool in worker.pools.values())
        feeder_count = min(self._in_flight, system.routing.rules.size + slots)
        with progress("assignments", lines) as advance:
            feeders = asyncio.gather(*(self._feed(system, advance) for _ in range(feeder_count)))
            await until_first_ends(self._finish(feeders, system), shutdown.requested.wait(), system.store_failed())
        self.tally.is_cut_short = shutdown.requested.is_set()

    async def _finish(self, feeders: Awaitable[Any], system: System) -> None:
        """Wait for all lines of the file, and with --all for every other job too."""
        await feeders
        while self.takes_all and await unfinished(system):  # noqa: ASYNC110 - others may end them too
            await asyncio.sleep(OTHERS_EVERY_S)

    async def _feed(self, system: System, advance: Advance) -> None:
        """Run one line after the other, as long as there are lines."""
        while (line := await self._next_line()) is not None:
            if isinstance(line, InvalidLine):
                self._reject(line.line, line.text(self._redact))
            elif refusal := await self._refusal(system, line):
                self._reject(line.line, self._redact(refusal))
            else:
                await self._complete(system, line)
            advance(1)

    async def _next_line(self) -> AssignmentLine | InvalidLine | None:
        async with self._reading:
            return await anext(self._lines, None)

    def _reject(self, line: int, message: str) -> None:
        say(f"{display_name(self._file)}:{line}: {printable(message)}")
        self.tally.ends["rejected"] += 1

    async def _refusal(self, system: System, line: AssignmentLine) -> str:
        """Why no worker here can run a line, so that its assignment would never start; empty when one can."""
        wanted, kind = resource_class(line.assignment), line.assignment.job.type
        if not any(wanted in one.pools for one in system.workers):
            known = sorted({name for one in system.workers for name in one.pools})
            return f"resource_class: {wanted!r} is unknown; accepted: {', '.join(known)}{suggest(wanted, known)}"
        if system.has_step(kind) or any(kind in one["blocks"] for one in await self._other_systems(system)):
            return ""
        text = f"job.type: {kind!r} is not known here; known: {', '.join(system.step_types)}"
        return f"{text}. Steps of your own come from a module: --module NAME"

    async def _other_systems(self, system: System) -> list[dict[str, Any]]:
        """The other systems that run over this store."""
        from reefknot.queue.presence import living_systems

        return [one for one in await living_systems(system.store) if one["system_id"] != system.system_id]

    async def _complete(self, system: System, line: AssignmentLine) -> None:
        name = line.assignment.record_id
        self._open[name] = line
        try:
            submitted = await self._submit(system, line)
        except KeyConflictError as error:
            del self._open[name]
            self._reject(line.line, self._redact(f"assignment_id: {error}"))
            return
        self._accepted += 1
        result = await submitted
        self._accepted -= 1
        self._freed.set()
        await self._count(line, result, system.store)
        del self._open[name]

    async def _count(self, line: AssignmentLine, result: ExecResult, store: Store) -> None:
        end = await self.tally.count(result, store)
        if result.timestamp is not None and result.timestamp < self._began_ms:
            self._from_earlier_run += 1
            self._earlier_without_id += not line.has_id
            if line.has_id and end != "succeeded":
                self._earlier_failures += 1
                if self._earlier_failures <= MOST_SHOWN:
                    self._to_retry.setdefault(line.assignment.tenant_id, []).append(line.assignment.assignment_id)
        self._write(encode(result) + b"\n")
        if end != "succeeded":
            self._show_failure(line, end, result)

    async def count_rest(self, system: System) -> None:
        """Count the lines that were open at a shutdown: some of them have ended during the drain."""
        for name, line in self._open.items():
            item = await system.store.work.get(name)
            answer = answer_of(item)
            if answer is not None:
                await self._count(line, answer, system.store)
            else:
                self.tally.unfinished += item is not None
        self._others = max(0, await unfinished(system) - self.tally.unfinished)

    async def _submit(self, system: System, line: AssignmentLine) -> asyncio.Future[ExecResult]:
        """Submit, waiting while the queue is full: one feeder retries, the others wait for its lock."""
        if not self._submitting.locked():
            with suppress(QueueFullError):
                return await system.submit(line.assignment)
        async with self._submitting:
            refusals = 0
            while True:
                self._freed.clear()
                try:
                    return await system.submit(line.assignment)
                except QueueFullError as error:
                    refusals = 0 if self._accepted else refusals + 1
                    if refusals > 1:  # the first may be older than the last result of this run
                        await self._check_progress(system, error)
                    # The advised time, or less when a result of this run shows that a place is free.
                    await wait_for(self._freed, min(error.retry_after, LONGEST_WAIT_S))

    async def _check_progress(self, system: System, error: QueueFullError) -> None:
        """Stop when the places are taken by jobs of others, and no other system runs them."""
        if self.takes_all or not error.depth or await self._other_systems(system):
            return
        text = f"{error.reason}: {plural(error.depth, 'other job')} in this store, and no system that runs them"
        raise CommandError(f"{text}; start `reefknot up`, or run all together with --all", Exit.TEMPORARY)

    def _show_failure(self, line: AssignmentLine, end: str, result: ExecResult) -> None:
        """Print the first failures one by one; the results file has them all."""
        self._failures += 1
        if self._failures > MOST_SHOWN:
            return
        why = f"{result.error_code or result.status.value}: {(result.error_message or '')[:300]}".rstrip(": ")
        text = self._redact(f"{result.assignment_id} {end.replace('_', ' ')}: {why}")
        say(f"{display_name(self._file)}:{line.line}: {text}")

    def _report_retries(self) -> None:
        """Print the commands that run ids of the file again which failed in an earlier run."""
        for tenant, ids in self._to_retry.items():
            of = f" --tenant {quote(tenant)}" if tenant else ""
            say(f"to run again what failed then: reefknot job retry{self._flags}{of} {' '.join(map(quote, ids))}")
        if self._earlier_failures > MOST_SHOWN:
            say(f"… and {self._earlier_failures - MOST_SHOWN} more; `job retry --all` selects all that failed")

    def report_rest(self) -> None:
        """Print what the lines on stderr and the summary leave out."""
        if self._failures > MOST_SHOWN:
            say(f"… and {self._failures - MOST_SHOWN} more that did not succeed; --results FILE writes them all")
        if self._from_earlier_run:
            text = "had finished in an earlier run: an id identifies one job, and its stored result was used"
            way = "" if self._new or not self._earlier_without_id else "; --new runs lines without an id again"
            say(f"{self._from_earlier_run} {text}{way}")
        self._report_retries()
        unfinished = self.tally.unfinished
        if unfinished:
            text = f"{'was' if unfinished == 1 else 'were'} submitted and {'has' if unfinished == 1 else 'have'}"
            say(f"{unfinished} {text} not finished; `up`, or the same `run` again, finishes them")
        left = self._line_count - self.tally.total - unfinished
        if self.tally.is_cut_short and left > 0:
            say(f"{plural(left, 'line')} not submitted; run the file again to go on")
        if self._others:
            jobs = "1 other job is" if self._others == 1 else f"{self._others} other jobs are"
            say(f"{jobs} open in this store and left to others: `reefknot up` or `run --all` runs them")


# ---- the results file ------------------------------------------------------------------------------------------------


def check_results(name: str, file: str, *, force: bool) -> None:
    """Refuse a results file that is the input, whatever name it has, or that exists and may not be replaced."""
    try:
        found = os.stat(name)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise unwritable(f"--results: {name}", error) from None
    if stat.S_ISREG(found.st_mode) and _is_input(found, file):
        raise CommandError(f"--results: {name}: is the file that is read; name another one")
    if stat.S_ISDIR(found.st_mode):
        raise CommandError(f"--results: {name}: is a folder; accepted: a file that does not exist")
    if stat.S_ISREG(found.st_mode) and not force:
        raise CommandError(f"--results: {name}: exists already; name another file, or replace it with --force")


def _is_input(found: os.stat_result, file: str) -> bool:
    try:
        return os.path.samestat(found, os.stat(sys.stdin.fileno() if file == STDIN else file))
    except (OSError, ValueError):  # a stdin without a descriptor is no file
        return False


@contextmanager
def _results_file(name: str | None) -> Iterator[Write]:
    """
    A function that writes a line to the results file; without a file it does nothing.

    The file appears, or is replaced, when the run has ended. A pipe or a device is written as it is.
    """
    if name is None:
        yield lambda _: None
        return
    with ExitStack() as opened:
        try:
            file = opened.enter_context(output_file(name))
        except (OSError, ValueError) as error:
            raise unwritable(f"--results: {name}", error) from None
        yield file.write
