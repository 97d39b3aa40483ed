"""
`up --processes`: workers as processes of their own, kept running by `up`, and the socket between it and each of them.

Such a worker is `reefknot worker start` with a socket to its parent. The parent writes what is to be done, a word a
line: `end` in order, `stop` at once, `reload`. A word is no signal: that a process group or a supervisor has sent the
same signal to all does not count as the second one. The worker writes a report when it is ready, and whenever its load
level or its retries have changed. When the parent is gone, however it ended, the socket says so, and the worker ends in
order. Log lines come through a pipe, and are written to stderr whole.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from signal import Signals
from socket import MSG_DONTWAIT, SHUT_RDWR, socket, socketpair
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from reefknot.console.cli.app import CommandError, Exit
from reefknot.console.cli.output import say
from reefknot.errors import StoreError
from reefknot.runtime.log import logger
from reefknot.runtime.tasks import until_first_ends
from reefknot.stores.port.engines import accepted_urls, is_shared

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.console.cli.live_output import LogFlags
    from reefknot.console.cli.options import SystemFlags
    from reefknot.queue.worker.service import Worker
    from reefknot.stores.port import Store

END, STOP, RELOAD = "end", "stop", "reload"
"""The words from a parent to its workers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses before a worker that has died is started again: twice as long each time."""
STABLE_S = 60.0
"""A worker that has lived for at least this time is started again after the first pause."""
STOP_S = 10.0
"""Time beyond the drain after which a worker that has not ended is stopped at once, and then killed."""
AT_ONCE_S = 1.5
"""Time that a worker which is stopped at once has to give its running steps back."""
LAST_LINES_S = 0.5
REPORT_EVERY_S = 0.2
LONGEST_LINE = 1_000_000
"""Bytes without a line break after which they are written as they are."""
_NOT_AGAIN = (Exit.USAGE, Exit.MISCONFIGURED)
"""Exit codes of mistakes that another start does not correct."""

Report = dict[str, Any]
"""A worker's snapshot, as JSON has it."""


def worker_processes(url: str, options: SystemFlags, log: LogFlags, *, drain: float) -> WorkerProcesses:
    """The workers of an `up` with these options. `CommandError` for a store that other processes cannot open."""
    if not is_shared(url):
        text = "--processes: a memory: store is visible to one process only, and cannot be shared with its workers"
        raise CommandError(f"{text}; accepted: {accepted_urls(shared_only=True)}")
    given = {
        "config": options.config,
        "engine": options.engine,
        "seed": options.seed,
        "drain": drain,
        "log-level": log.log_level,
        "log-format": "json" if log.is_json else "text",
    }
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags += [f"--module={one}" for one in options.module or ()]
    return WorkerProcesses(["worker", "start", *flags], options.workers, drain=drain)


def next_pause(pause: float, lived: float) -> float:
    """The pause before the next start of a worker that `lived` for these seconds; `pause` is the one before, or 0."""
    return FIRST_PAUSE_S if not pause or lived >= STABLE_S else min(LONGEST_PAUSE_S, 2 * pause)


# ---- the parent ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class RunningProcess:
    """A worker's process, its socket, and the threads that read what it writes."""

    process: asyncio.subprocess.Process
    link: socket
    readers: list[Thread] = field(default_factory=list)
    report: Report | None = None

    def send(self, word: str) -> None:
        """Write a word to the worker. One that has ended hears none."""
        with suppress(OSError):
            self.link.send(f"{word}\n".encode(), MSG_DONTWAIT)

    def close(self) -> None:
        """Close the socket, also where a process that the worker has left behind keeps its other end."""
        with suppress(OSError):
            self.link.shutdown(SHUT_RDWR)
        self.link.close()


class WorkerProcesses:
    """A number of workers in processes of their own. One that dies is started again after a pause."""

    def __init__(self, words: Sequence[str], count: int, *, drain: float) -> None:
        """`words` are the command of a worker, without its id; `drain` is the time that its steps get at the end."""
        self._words = list(words)
        self._count = count
        self._drain = drain
        self._names: list[str] = []
        self.all_names: set[str] = set()
        """Every name that a worker of these has had. It changes when another system was faster to take a name."""
        self._running: dict[int, RunningProcess] = {}
        self._starting = set(range(count))
        """The places of the workers that have neither been ready yet nor ended."""
        self._started = asyncio.Event()
        self._ending = asyncio.Event()
        self._kept: list[asyncio.Task[None]] = []
        self._ended_counts: Counter[str] = Counter()

    @property
    def reports(self) -> list[Report]:
        """The last report of each worker that runs."""
        return [one.report for one in self._running.values() if one.report is not None]

    @property
    def counts(self) -> Counter[str]:
        """The `retries` of all workers, and how many jobs `recovered`, those included that have ended."""
        return sum(map(_counts, self.reports), self._ended_counts)

    @property
    def names(self) -> list[str]:
        """The workers with the numbers of their processes."""
        pids = {place: f" (pid {one.process.pid})" for place, one in self._running.items()}
        return [f"{name}{pids.get(place, '')}" for place, name in enumerate(self._names)]

    @asynccontextmanager
    async def running(self, system: System, asked: asyncio.Event) -> AsyncIterator[None]:
        """
        Start the workers under free names, keep them running while the block lasts, and end them in order.

        The block begins when each worker has been ready, or has ended once, which the log says; or when the
        command is `asked` to end.
        """
        from reefknot.queue.presence import chosen_names

        store = system.store
        names, _ = await chosen_names(store, self._count, None, own_work_only=False)
        self._names = list(names)
        self.all_names.update(names)
        for place, name in enumerate(self._names):
            self._kept.append(asyncio.create_task(self._keep(place, store, asked), name=f"process of {name}"))
        try:
            await until_first_ends(self._started.wait(), asked.wait(), self.failed(), system.store_failed())
            yield
        finally:
            await self._end()

    async def failed(self) -> NoReturn:
        """Raise the error of a worker that cannot be started again."""
        waiting = set(self._kept)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    def pass_on(self, word: str) -> None:
        """Write a word to every worker. With `stop`, wait until all have ended, and kill those that do not. That blocks
        this thread: it is for a process that ends at once."""
        running = list(self._running.values())
        for one in running:
            one.send(word)
        until = monotonic() + AT_ONCE_S
        for one in running if word == STOP else ():
            for reader in one.readers:
                reader.join(max(0.0, until - monotonic()))
            if any(reader.is_alive() for reader in one.readers):
                _kill(one)

    async def _keep(self, place: int, store: Store, asked: asyncio.Event) -> None:
        """Run a worker until the end, and start it again whenever it has died."""
        pause = 0.0
        while not self._ending.is_set():
            if pause:
                await self._choose_name(place, store)
            name, began = self._names[place], monotonic()
            ended, code = await self._run(place, name, is_again=pause > 0)
            self._is_settled(place)
            if self._ending.is_set() or asked.is_set():  # a signal for all processes ends some before others
                return
            if code in _NOT_AGAIN:
                raise CommandError(f"{name} {ended}: its message is above; another start would not help", Exit(code))
            pause = next_pause(pause, monotonic() - began)
            what = "it starts again in %g s, and goes on with its work"
            logger().warning("%s %s; " + what, name, ended, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _choose_name(self, place: int, store: Store) -> None:
        """Another name, where a worker of another system has this one by now."""
        from reefknot.queue.presence import free_names, living_systems, worker_names

        with suppress(StoreError, TimeoutError):
            taken = worker_names(await living_systems(store))
            if self._names[place] in taken:
                self._names[place] = free_names("worker", 1, taken | set(self._names))[0]
                self.all_names.add(self._names[place])

    async def _run(self, place: int, name: str, *, is_again: bool) -> tuple[str, int]:
        """Run a worker until its process ends: how it ended, in words, and its exit code."""
        try:
            one = await self._start(place, name, is_again=is_again)
        except OSError as error:
            return f"could not be started ({error.strerror or error})", Exit.TEMPORARY
        self._running[place] = one
        if self._ending.is_set():
            one.send(END)
        code = await one.process.wait()
        for reader in one.readers:  # a process that the worker has left behind may keep its streams open
            await asyncio.to_thread(reader.join, LAST_LINES_S)
        one.close()
        del self._running[place]
        if one.report is not None:
            self._ended_counts += _counts(one.report)
        return f"(pid {one.process.pid}) {_how_ended(code)}", code

    async def _start(self, place: int, name: str, *, is_again: bool) -> RunningProcess:
        """Start the process of a worker, in a process group of its own: a terminal's Ctrl-C is for `up` alone."""
        ours, theirs = socketpair()
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "reefknot", *self._words),
                *(f"--worker-id={name}", f"--parent-socket={theirs.fileno()}"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        one, loop = RunningProcess(process, ours), asyncio.get_running_loop()

        def reported(report: Report) -> None:
            if one.report is None and is_again:
                say(f"{name} (pid {process.pid}) is ready again")
            one.report = report
            self._is_settled(place)

        def read_reports() -> None:
            with ours.makefile("rb") as lines, suppress(OSError, msgspec.DecodeError, RuntimeError):
                for line in lines:  # a loop that has ended takes no more
                    loop.call_soon_threadsafe(reported, msgspec.json.decode(line))

        one.readers += [
            Thread(target=read_reports, name=f"reports of {name}", daemon=True),
            Thread(target=_pass_on, args=(reading,), name=f"log of {name}", daemon=True),
        ]
        for reader in one.readers:
            reader.start()
        return one

    def _is_settled(self, place: int) -> None:
        self._starting.discard(place)
        if not self._starting:
            self._started.set()

    async def _end(self) -> None:
        """End the workers in order within their drain, stop those that have not ended at once, and kill the rest."""
        self._ending.set()
        try:
            for word, patience in ((END, self._drain + STOP_S), (STOP, AT_ONCE_S)):
                for one in self._running.values():
                    one.send(word)
                _, left = await asyncio.wait(self._kept, timeout=patience)
                if not left:
                    break
        finally:
            for one in self._running.values():
                logger().warning("the worker with pid %d has not ended in time, and is killed", one.process.pid)
                _kill(one)
            await asyncio.wait(self._kept, timeout=STOP_S)
            for task in self._kept:
                task.cancel()
            await asyncio.gather(*self._kept, return_exceptions=True)


def _counts(report: Report) -> Counter[str]:
    return Counter({name: int(report["retries"][name]) for name in ("recovered", "retries")})


def _how_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {Signals(-code).name if -code in list(Signals) else f'signal {-code}'}"


def _kill(one: RunningProcess) -> None:
    with suppress(ProcessLookupError):
        one.process.kill()


def _pass_on(reading: int) -> None:
    """Write the lines that come through a pipe to stderr, each of them whole, until its other end is closed."""
    rest = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65_536):
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, end, rest = lines + end + rest, b"\n", b""
            _write(lines + end)
    _write(rest + b"\n" if rest else b"")


def _write(lines: bytes) -> None:
    with suppress(OSError, ValueError):  # stderr was closed
        sys.stderr.write(lines.decode(errors="backslashreplace"))
        sys.stderr.flush()


# ---- the worker ------------------------------------------------------------------------------------------------------


class ParentLink:
    """The worker's end of the socket. Its thread obeys the parent, also while a step blocks the event loop."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._actions: Mapping[str, Callable[[], object]] | None = None
        self._drain = 0.0
        self._shown: object = None
        Thread(target=self._obey, name="parent", daemon=True).start()

    def follow(
        self, end: Callable[[], object], reload: Callable[[], object], stop: Callable[[], object], *, drain: float
    ) -> None:
        """
        Obey with these from now on. `end` and `reload` are called in the event loop, `stop` in a thread.

        Without its parent the worker has the time of a drain to end in order.
        """
        self._drain = drain
        call = asyncio.get_running_loop().call_soon_threadsafe
        self._actions = {END: lambda: call(end), RELOAD: lambda: call(reload), STOP: stop}

    async def report(self, worker: Worker) -> NoReturn:
        """Report now, and whenever the load level or the number of retries has changed."""
        while True:
            self.report_now(worker)
            await asyncio.sleep(REPORT_EVERY_S)

    def report_now(self, worker: Worker) -> None:
        """Write a report, unless nothing has changed. A parent that does not read does not hold the worker up."""
        snapshot = worker.snapshot()
        shown = [one.status for one in snapshot.classes.values()], snapshot.retries.recovered, snapshot.retries.retries
        if shown != self._shown:
            self._shown = shown
            with suppress(OSError):
                self._socket.send(msgspec.json.encode(snapshot) + b"\n", MSG_DONTWAIT)

    def _obey(self) -> None:
        with suppress(OSError), self._socket, self._socket.makefile("r") as words:
            for word in words:
                self._do(word.strip())
        self._do(END)  # the parent is gone
        sleep(self._drain + STOP_S)
        self._do(STOP)

    def _do(self, word: str) -> None:
        if self._actions is None:
            if word != RELOAD:
                os._exit(Exit.TERMINATED)  # nothing has begun yet
            return
        with suppress(RuntimeError):  # the event loop has ended
            self._actions[word]()
