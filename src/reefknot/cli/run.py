"""
How assignments ended, counted.

Every assignment has exactly one of six ends. `recovered` are among those that succeeded, `quarantined` among those that
failed. What no worker ever took in was rejected; what one gave up to make room was dropped.

`reefknot run FILE`: a file of assignments through router, queue, worker and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from json import dumps
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from msgspec import UNSET

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Config, EngineOrMemory, Json, Modules, Workers
from reefknot.cli.output import printable, put, say
from reefknot.cli.serve import Ready, ready, signals
from reefknot.core.messages import ExecResult, ResultStatus
from reefknot.core.overload.admission import RejectReason
from reefknot.core.work import WorkState

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.cli.assignments import Mistake, Numbered
    from reefknot.cli.serve import Ending
    from reefknot.core.messages import ExecResult
    from reefknot.ports.store import Store

ENDS = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")
_BY_STATUS = {
    ResultStatus.SUCCESS: "succeeded",
    ResultStatus.TIMEOUT: "timed_out",
    ResultStatus.CANCELLED: "cancelled",
}


class Tally:
    """Counts ends."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(ENDS, 0)
        self.recovered = 0
        self.quarantined = 0
        self.retries = 0

    @property
    def total(self) -> int:
        return sum(self.ends.values())

    @property
    def all_succeeded(self) -> bool:
        return self.total == self.ends["succeeded"]

    def rejected(self) -> None:
        """A line that is no assignment: it ends here."""
        self.ends["rejected"] += 1

    async def count(self, result: ExecResult, store: Store) -> str:
        """Count one result; answers which end it was."""
        end = _BY_STATUS.get(result.status) or await self._failure(result, store)
        self.ends[end] += 1
        retries = 0 if result.retries_used is UNSET else result.retries_used
        self.retries += retries
        self.recovered += end == "succeeded" and retries > 0
        return end

    async def _failure(self, result: ExecResult, store: Store) -> str:
        """The worker's own record says whether it was ever taken in, and what became of it."""
        item = await store.work.get(result.assignment_id)
        if item is None:
            return "rejected"
        if item.state is WorkState.CANCELLED and item.reason == RejectReason.DROPPED_OLDEST.value:
            return "dropped"
        self.quarantined += item.state is WorkState.QUARANTINED
        return "failed"

    def summary(self, elapsed: float) -> dict[str, Any]:
        return {
            "total": self.total,
            **self.ends,
            "recovered": self.recovered,
            "quarantined": self.quarantined,
            "retries": self.retries,
            "elapsed_s": round(elapsed, 3),
        }

    def sentence(self, elapsed: float) -> str:
        """The same for people, without what did not happen."""
        asides = {
            "succeeded": f" ({self.recovered} after retries)" if self.recovered else "",
            "failed": f" ({self.quarantined} in quarantine)" if self.quarantined else "",
        }
        told = [f"{n} {end.replace('_', ' ')}{asides.get(end, '')}" for end, n in self.ends.items() if n]
        noun = "assignment" if self.total == 1 else "assignments"
        retries = f"; {self.retries} {'retry' if self.retries == 1 else 'retries'}"
        return f"{self.total} {noun} in {elapsed:.1f} s: {', '.join(told) or 'nothing to do'}{retries}"


AT_ONCE = 200
MOST_SHOWN = 20
LONGEST_WAIT_S = 5.0
DRAIN_S = 5.0

app = App(
    name="run",
    help="Send a file of assignments through router, queue, worker and back. The exit code is 1 unless all succeeded.",
    help_epilogue="Examples:\n\n    reefknot run assignments.jsonl\n"
    "    reefknot run assignments.jsonl --results out.jsonl --json\n    cat more.jsonl | reefknot run - --workers 2",
)


@app.default
def run(
    file: Annotated[str, Parameter(help="One assignment a line, as JSON; - is stdin.", allow_leading_hyphen=True)],
    /,
    *,
    engine: EngineOrMemory = None,
    workers: Workers = 1,
    module: Modules = None,
    results: Annotated[str | None, Parameter(help="Write one ExecResult a line to this file.")] = None,
    seed: Annotated[int | None, Parameter(help="Draw waits and workers with this seed.")] = None,
    in_flight: Annotated[
        int, Parameter(help=f"How many may be on their way at once, {AT_ONCE} unless said.")
    ] = AT_ONCE,
    config: Config = None,
    json: Json = False,
) -> int:
    """Send a file of assignments through router, queue, worker and back, with a progress bar."""
    from reefknot.cli.assignments import existing_file

    if not 1 <= in_flight <= 10_000:
        raise CommandError(f"--in-flight: {in_flight} is not accepted: a whole number from 1 to 10000")
    existing_file(file)
    from_here = ready(engine, config, workers)
    with _results_file(results) as write:
        batch = Batch(file, write, in_flight, secrets=from_here.secrets)
        return asyncio.run(_run(batch, from_here, workers, tuple(module or ()), seed, json))


async def _run(batch: Batch, start: Ready, workers: int, modules: tuple[str, ...], seed: int | None, json: bool) -> int:
    from reefknot.app.system import running_system

    began = monotonic()
    with signals() as ending:
        async with running_system(
            start.url,
            start.settings,
            workers=workers,
            modules=modules,
            drain=DRAIN_S,
            seed=seed,
            secrets=start.secrets,
        ) as system:
            await batch.through(system, ending)
    elapsed = monotonic() - began
    batch.tell_rest()
    if json:
        print(dumps(batch.tally.summary(elapsed)))
    else:
        put(batch.tally.sentence(elapsed))
    if ending.code is not None:
        return ending.code
    return Exit.FINE if batch.tally.all_succeeded else Exit.FAILED


Write = Callable[[bytes], None]


class Batch:
    """One file on its way."""

    def __init__(self, file: str, write: Write, in_flight: int, *, secrets: tuple[str, ...] = ()) -> None:
        from reefknot.core.redaction import Redactor

        self.tally: Tally = Tally()
        self._file = file
        self._safe = Redactor(secrets)
        self._lines: AsyncIterator[Numbered | Mistake]
        self._reading = asyncio.Lock()
        self._began_ms = 0
        self._write = write
        self._in_flight = in_flight
        self._door = asyncio.Lock()
        self._freed = asyncio.Event()
        self._told = 0
        self._untold = 0
        self._earlier = 0
        self._unfinished = 0

    async def through(self, system: System, ending: Ending) -> None:
        """All of it, several at a time, until it is done or somebody asks for the end."""
        from reefknot.cli.assignments import assignments, count_lines
        from reefknot.cli.output import progress

        self._began_ms = system.snapshot()["at"]
        self._lines = assignments(self._file)
        slots = sum(pool.slots for worker in system.workers for pool in worker.pools.values())
        side_by_side = min(self._in_flight, system.routing.rules.size + slots)
        with progress("assignments", await asyncio.to_thread(count_lines, self._file)) as advance:
            feeders = asyncio.gather(*(self._feed(system, advance) for _ in range(side_by_side)))
            asked = asyncio.ensure_future(ending.asked.wait())
            either: list[asyncio.Future[Any]] = [feeders, asked]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if feeders.done():
                    feeders.result()
            finally:
                asked.cancel()
                feeders.cancel()
                await asyncio.gather(feeders, asked, return_exceptions=True)

    async def _feed(self, system: System, advance: Callable[[int], None]) -> None:
        """One after the other, as long as there are lines."""
        from reefknot.cli.assignments import Mistake

        while (line := await self._next_line()) is not None:
            mistake = line.message if isinstance(line, Mistake) else self._nobody_takes(system, line)
            if isinstance(line, Mistake) or mistake:
                say(f"{self._name()}:{line.line}: {printable(self._safe(mistake))}")
                self.tally.rejected()
            else:
                self._unfinished += 1
                await self._send(system, line)
                self._unfinished -= 1
            advance(1)

    async def _next_line(self) -> Numbered | Mistake | None:
        async with self._reading:
            return await anext(self._lines, None)

    def _nobody_takes(self, system: System, line: Numbered) -> str:
        """Without this an assignment of a class that no worker here has would wait for ever."""
        from reefknot.core.messages import resource_class

        wanted, known = resource_class(line.assignment), sorted({name for one in system.workers for name in one.pools})
        return "" if wanted in known else f"resource_class: {wanted!r} is not known; accepted: {', '.join(known)}"

    async def _send(self, system: System, line: Numbered) -> None:
        from reefknot.errors import KeyConflictError

        try:
            result = await (await self._taken(system, line))
        except KeyConflictError as error:
            say(f"{self._name()}:{line.line}: assignment_id: {printable(self._safe(str(error)))}")
            self.tally.rejected()
            return
        self._freed.set()
        end = await self.tally.count(result, system.store)
        self._earlier += result.timestamp is not None and result.timestamp < self._began_ms
        self._write_result(result)
        if end != "succeeded":
            self._tell(line, end, result)

    async def _taken(self, system: System, line: Numbered) -> asyncio.Future[ExecResult]:
        """A full queue is no failure. One of us waits at its door, and the others behind that one."""
        from reefknot.errors import QueueFullError

        if not self._door.locked():
            with suppress(QueueFullError):
                return await system.submit(line.assignment)
        async with self._door:
            while True:
                self._freed.clear()
                try:
                    return await system.submit(line.assignment)
                except QueueFullError as error:
                    await self._until_freed(min(error.retry_after, LONGEST_WAIT_S))

    async def _until_freed(self, seconds: float) -> None:
        """As long as we were told to wait, or until a result of ours says that there is a place."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._freed.wait()

    def _write_result(self, result: ExecResult) -> None:
        from reefknot.core.messages import encode

        self._write(encode(result) + b"\n")

    def _tell(self, line: Numbered, end: str, result: ExecResult) -> None:
        """The first failures are told one by one; the results file has them all."""
        if self._told >= MOST_SHOWN:
            self._untold += 1
            return
        self._told += 1
        why = f"{result.error_code or result.status.value}: {(result.error_message or '')[:300]}".rstrip(": ")
        told = self._safe(f"{result.assignment_id} {end.replace('_', ' ')}: {why}")
        say(f"{self._name()}:{line.line}: {told}")

    def tell_rest(self) -> None:
        if self._untold:
            say(f"… and {self._untold} more that did not succeed; --results FILE keeps them all")
        if self._earlier:
            say(f"{self._earlier} had ended in an earlier run: the same id is the same work, and its result was kept")
        if self._unfinished:
            say(f"{self._unfinished} were handed in and have not ended; the next `run` or `up` on this store ends them")

    def _name(self) -> str:
        return "<stdin>" if self._file == "-" else self._file


@contextmanager
def _results_file(name: str | None) -> Iterator[Write]:
    """Where results go, line by line."""
    if name is None:
        yield lambda _: None
        return
    try:
        file = open(name, "wb")  # noqa: SIM115 - closed below
    except OSError as error:
        code = Exit.FORBIDDEN if isinstance(error, PermissionError) else Exit.USAGE
        raise CommandError(f"--results: {name}: {(error.strerror or 'cannot be written').lower()}", code) from None
    with file:

        def write(line: bytes) -> None:
            file.write(line)

        yield write
