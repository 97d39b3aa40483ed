"""
`reefknot up`, and what every command that runs a system shares: its start-up and its shutdown.

A system starts from settings that are checked, and explained to the user, before anything runs. The first signal asks
for an orderly shutdown, the second ends the process at once, also while a step blocks the event loop: accepted work is
in the store either way, and running steps are given back, so that they do not count as crashed. SIGHUP means that the
terminal was closed, and shuts down; to a process without a terminal it means: reload the policies.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from datetime import UTC, datetime
from json import dumps
from shlex import quote
from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, Signals, getsignal
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from msgspec import Struct

from reefknot.console.cli.app import CommandError, Exit, noun
from reefknot.console.cli.live_output import LOG, LevelChanges, LiveFeed, LogFlags, is_terminal, local_time
from reefknot.console.cli.options import (
    SYSTEM,
    StoreFlags,
    SystemFlags,
    arg,
    check_seconds,
    check_whole,
    load,
    settings,
    warn_of_baseline,
)
from reefknot.console.cli.output import data, prints_to_stderr, put, relative, say
from reefknot.console.cli.store import place_of, shown_url
from reefknot.console.cli.worker_processes import WorkerProcesses, worker_processes
from reefknot.queue.model.work import WorkState
from reefknot.runtime.log import error_text, printable
from reefknot.runtime.tasks import until_first_ends
from reefknot.stores.port.engines import is_shared

if TYPE_CHECKING:
    from reefknot.app.reload import ReloadOutcome
    from reefknot.app.system import System
    from reefknot.console.dashboard.server import Serving
    from reefknot.ingest.sources import IngestionSource
    from reefknot.ingest.sync import SyncSummary
    from reefknot.policy.schema import BlocksSection
    from reefknot.policy.settings import Settings

MOST_WORKERS = 64
LEVELS_EVERY_S = 0.2

For = Annotated[float | None, arg("Shut down after this many seconds.", "--for")]
DrainSeconds = Annotated[float | None, arg("Seconds that running steps get at shutdown. Default: 30.")]
_RELOAD = "For development: restart the steps when a file of their modules changes. --drain is then 2 by default."
Reload = Annotated[bool, arg(_RELOAD)]
_PROCESSES = "Run each worker in a process of its own: for steps that compute, or more work than one core can do."
Processes = Annotated[bool, arg(_PROCESSES)]

# ---- start-up --------------------------------------------------------------------------------------------------------


class Startup(Struct, frozen=True):
    """Inputs of a system's start: settings, the URL of its store, and the secrets to hide."""

    settings: Any
    url: str
    secrets: tuple[str, ...]
    flags: str = ""
    """The flags with which other commands find the same store."""
    config: str | None = None
    """The value of `--config`."""

    def system(self, *, drain: float | None, **parts: Any) -> AbstractAsyncContextManager[System]:
        """The running system with these parts. `drain` is None for the configured time."""
        from reefknot.app.system import running_system

        parts |= {"drain": self.drain(drain), "secrets": self.secrets, "reread": self.reread}
        return running_system(self.url, self.settings, **parts)

    def drain(self, seconds: float | None) -> float:
        """The seconds that running steps get at the end: the configured ones where none are given."""
        from reefknot.app.system import worker_settings

        return worker_settings(self.settings).drain if seconds is None else seconds

    def reread(self) -> Any:
        """The settings as they are written now, from the file that was found at the start."""
        return load(self.config if self.settings.path is None else str(self.settings.path))


def startup(engine: str | None, config: str | None, workers: int = 1, *, warns: bool = True) -> Startup:
    """Read and check everything, print warnings, and refuse what cannot work before anything is started."""
    from reefknot.policy.secrets import secret_texts
    from reefknot.stores.opening import store_url

    check_whole("--workers", workers, MOST_WORKERS)
    found = settings(config, forgiving=True) if warns else load(config, forgiving=True)
    if warns:
        warn_of_baseline(found)
    secrets, problems = secret_texts(found.tree, found.path, environ=os.environ)
    for problem in problems if warns else ():  # a secret that cannot be read here cannot leak from here either
        say(f"warning: {relative(str(problem))}", level="warning")
    named = {"--engine": None if engine is None else shown_url(engine), "--config": config}
    flags = "".join(f" {flag} {quote(value)}" for flag, value in named.items() if value is not None)
    return Startup(found, store_url(found, engine), secrets, flags, config)


# ---- shutdown --------------------------------------------------------------------------------------------------------


_CODES = {SIGINT: Exit.INTERRUPTED, SIGTERM: Exit.TERMINATED, SIGHUP: Exit.HUNG_UP}
LAST_MOMENT_S = 1.0
"""How long a process that is stopped at once may take to give its running steps back."""


class Shutdown:
    """Shutdown request by a signal, and the exit code that follows from it; and reloads by SIGHUP."""

    def __init__(self, requested: asyncio.Event, *, runs_steps: bool = True, is_quiet: bool = False) -> None:
        self.requested = requested
        self._say: Callable[[str], object] = (lambda _text: None) if is_quiet else say
        self._is_asked_by_parent = False
        self._runs_steps = runs_steps
        self.code: Exit | None = None
        self._system: System | None = None
        self._is_asked = False
        """Whether a signal came, though the event loop may not have heard of it yet."""
        self._reloading: asyncio.Task[ReloadOutcome] | None = None
        self._again = False
        self.pass_on: Callable[[str], None] = lambda _word: None
        """Hands `reload` and `stop` on to the worker processes of this one; after `stop` they have ended."""
        # Asked for now: a terminal that was closed does not count as one any more.
        self._has_terminal = any(stream is not None and stream.isatty() for stream in (sys.stdin, data()))

    def reloads(self, system: System) -> None:
        """From now on, signals are for this system: SIGHUP reloads its policies, unless there is a terminal."""
        self._system = system

    def on_signal(self, signal: Signals) -> None:
        if signal == SIGHUP and not self._has_terminal and self._runs_steps:
            self.reload()
            return
        if self.code is not None:
            if signal == SIGHUP:  # a terminal that closes may send it twice
                return
            if not self._is_asked_by_parent:
                self.stop_at_once(self.code)
            self._is_asked_by_parent = False
            return
        self.code = _CODES[signal]
        self._say("shutting down" + "; running steps may finish (a second signal stops at once)" * self._runs_steps)
        self.requested.set()

    def request(self) -> None:
        """Ask for an orderly shutdown for the parent of this process. A supervisor may signal both: the first signal
        after this is not the second one."""
        if self.code is None:
            self.code = Exit.TERMINATED
            self._is_asked_by_parent = True
            self.requested.set()

    def on_repeated_signal(self, number: int, _frame: object) -> None:
        """Stop at once at the second signal, in the main thread: the event loop may be blocked and hear of none."""
        if self._is_asked:
            self.stop_at_once(self.code or _CODES[Signals(number)])
        self._is_asked = True

    def stop_at_once(self, code: Exit = Exit.TERMINATED) -> NoReturn:
        """End the process. A thread gives its work back: the lock it needs may be held where the signal came."""
        last = Thread(target=self._give_back, name="give back", daemon=True)
        last.start()
        self.pass_on("stop")
        last.join(LAST_MOMENT_S)
        os._exit(code)

    def _give_back(self) -> None:
        with suppress(Exception):  # then it counts as a crash
            if self._system is not None:
                self._system.give_back_now()
        self._say("stopped at once" + "; accepted work is in the store" * self._runs_steps)

    def reload(self) -> None:
        """Reload now. However many signals come during a reload, one more follows it, which sees the last change."""
        if self._reloading is not None:
            self._again = True
            return
        self._again = False
        self._reloading = None if self._system is None or self.code is not None else self._system.reload("SIGHUP")
        if self._reloading is None:
            self._say("SIGHUP: nothing is reloaded while the system starts or ends")
        else:
            self.pass_on("reload")
            self._reloading.add_done_callback(self._reloaded)

    def _reloaded(self, task: asyncio.Task[ReloadOutcome]) -> None:
        self._reloading = None
        if task.cancelled():  # the system ends
            return
        if not task.result().problems:  # a refusal is in the log, with its lines
            self._say(f"SIGHUP: {task.result().sentence()}")
        if self._again:
            self.reload()


@contextmanager
def shutdown_on_signals(*, runs_steps: bool = True, is_quiet: bool = False) -> Iterator[Shutdown]:
    """Inside, SIGINT, SIGTERM and SIGHUP go to `Shutdown`. A SIGHUP that is ignored, as by `nohup`, stays ignored. A
    command that runs no steps has none to wait for, and nothing to reload."""
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(asyncio.Event(), runs_steps=runs_steps, is_quiet=is_quiet)
    handled = []
    for signal in _CODES:
        try:
            if signal == SIGHUP and getsignal(signal) == SIG_IGN:
                continue
            loop.add_signal_handler(signal, shutdown.on_signal, signal)
            handled.append(signal)
            if signal != SIGHUP:  # in addition to the handler of the loop
                signals.signal(signal, shutdown.on_repeated_signal)
        except (RuntimeError, ValueError):  # no main thread, or a system without signals
            break
    try:
        yield shutdown
    finally:
        for signal in handled:
            loop.remove_signal_handler(signal)


async def wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def run_service(main: Coroutine[Any, Any, int]) -> int:
    """
    Run a system to its end. A step can cancel every task of its process, the main one included: an error.

    A step that ignores its cancellation does not keep the process: its event loop is then left open.
    """
    runner = asyncio.Runner()
    try:
        return runner.run(main)
    except asyncio.CancelledError:
        raise _half_dead("the main task of this process was cancelled by a step") from None
    finally:
        if runner.run(_all_end()):
            runner.close()


async def _all_end() -> bool:
    """Whether all tasks of the loop end when they are cancelled, in a bounded time."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=LAST_MOMENT_S)
    if left:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)  # which names them at the end
    return not left


async def _cancelled(*tasks: asyncio.Task[None]) -> NoReturn:
    """Raise the error about one of these that was cancelled by a step, and cannot begin again as services do."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                raise _half_dead(f"the service `{task.get_name()}` was cancelled by a step")
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")


def _half_dead(cause: str) -> CommandError:
    """The error that ends a process which lacks a part, so that its supervisor starts a whole one."""
    text = f"{cause}, so this process ends instead of going on with a part of it; start it again: accepted work is kept"
    return CommandError(text, Exit.TEMPORARY)


# ---- up --------------------------------------------------------------------------------------------------------------

app = noun(
    "up",
    "up",
    "up --for 60 --workers 2 --module app",
    "up --workers 4 --processes --module app",
    "up --reload --module steps.py",
    help="Start a router and workers over one store, with a dashboard: its address is printed, and the section "
    "`dashboard` of the configuration sets its port. Ctrl-C shuts them down in order.",
)

Beside = Callable[["System"], Awaitable[None]]
"""Runs while a system runs, and ends it by returning: for tests."""


@app.default
def up(
    *,
    seconds: For = None,
    drain: DrainSeconds = None,
    reload: Reload = False,
    processes: Processes = False,
    log: LogFlags = LOG,
    options: SystemFlags = SYSTEM,
) -> int:
    """Run a router and workers until Ctrl-C or SIGTERM, and print retries, rejections and overload as they happen."""
    check_seconds("--for", seconds)
    check_seconds("--drain", drain)
    if reload:
        with log.applied(is_service=True):
            return restarting(options.module, options, seconds=seconds, drain=drain)
    with log.applied(feed=True, is_service=True), prints_to_stderr():
        start = startup(options.engine, options.config, options.workers)
        has_feed = options.json or log.form != "json" or is_terminal(data())  # else the log has it
        others = worker_processes(start.url, options, log, drain=start.drain(drain)) if processes else None
        with dashboard_socket(start.settings) as served:
            parts = {**parts_of(options), "as_json": options.json, "dashboard": served, "feed": has_feed}
            session = UpSession(start, **parts, processes=others)
            return run_service(session.serve(seconds, drain=drain))


def restarting(module: Sequence[str] | None, options: StoreFlags | SystemFlags, **times: float | None) -> int:
    """Run this command in a child that is started again when a file of its modules changes."""
    from reefknot.console.cli.reloading import run_reloading

    with prints_to_stderr():
        return run_reloading(tuple(module or ()), config=options.config, engine=options.engine, **times)


@contextmanager
def dashboard_socket(found: Settings) -> Iterator[Serving | None]:
    """The socket of the dashboard, bound before the system starts, so that a port in use is reported at once; None when
    the dashboard is switched off, or its packages are missing, which is logged."""
    from reefknot.console.dashboard.server import missing_extra, prepare

    lacking = missing_extra()
    if not found.configuration.dashboard.enabled or lacking:
        if found.configuration.dashboard.enabled and lacking:
            say(f"no dashboard: {lacking}")
        yield None
        return
    served = prepare(found, has_flags=False)
    try:
        yield served
    finally:
        served.socket.close()


def say_address(served: Serving, store: str) -> None:
    """
    Say where the pages are, and with which token.

    One that was made for this start is part of the address on a terminal, and in a private file elsewhere: stderr of a
    service is a log. Of a configured one its setting is named.
    """
    if served.is_moved:
        say("the dashboard's usual port is in use, so it has a free one")
    is_seen = is_terminal(sys.stderr)
    say("dashboard", url=served.link if is_seen else served.url)
    if served.token is None:
        say(f"log in with the token of {served.token_from}")
    elif not is_seen:
        say(f"log in with the address in {served.keep_link(store)}, which only this user can read")


def parts_of(options: SystemFlags) -> dict[str, Any]:
    """The parts of the system that a command runs, as arguments of `Startup.system`."""
    return {"workers": options.workers, "modules": tuple(options.module or ()), "seed": options.seed}


class UpSession(Struct, frozen=True):
    """Run of a whole system with its live feed."""

    start: Startup
    workers: int = 1
    modules: tuple[str, ...] = ()
    seed: int | None = None
    as_json: bool = False
    dashboard: Serving | None = None
    feed: bool = True
    """Whether events are printed; changes of load, syncs and the summary are messages then."""
    processes: WorkerProcesses | None = None
    """The workers, where they are processes of their own."""

    async def serve(self, seconds: float | None, *, drain: float | None = None, beside: Beside | None = None) -> int:
        """Run until the time is over, a signal comes, or `beside` returns; the result is the exit code."""
        began = monotonic()
        counts: dict[str, int] = {}

        async def stopped(system: System) -> None:
            for one in (following, dashboard):
                one.cancel()
            await asyncio.gather(following, dashboard, return_exceptions=True)
            await feed.catch_up()
            feed.end()
            counts.update(await _summary(system, feed, self.processes.counts if self.processes else Counter()))

        parts = {"modules": self.modules, "seed": self.seed, "ingestion": True, "checks_steps": True}
        parts["workers"] = () if self.processes else self.workers
        with shutdown_on_signals() as shutdown:
            async with self.start.system(drain=drain, stopped=stopped, **parts) as system, AsyncExitStack() as opened:
                shutdown.reloads(system)
                if self.processes:
                    shutdown.pass_on = self.processes.pass_on
                    await opened.enter_async_context(self.processes.running(system, shutdown.requested))
                own = self.processes.all_names if self.processes else {one.worker_id for one in system.workers}
                feed = LiveFeed(
                    system.store.audit, self._print, after=system.started_after, as_json=self.as_json, workers=own
                )
                if system.ingestion is not None and not self.as_json:
                    system.ingestion.on_sync(self._print_sync)
                self._welcome(system, seconds)
                following = asyncio.create_task(feed.follow(), name="live feed")  # goes on during the drain
                dashboard = asyncio.create_task(self._serve_dashboard(system), name="dashboard")  # so does this
                ends = [system.store_failed(), _cancelled(following, dashboard)]
                ends += [self.processes.failed()] if self.processes else []
                others = [self._print_levels(system), shutdown.requested.wait(), *ends]
                guests = [beside(system)] if beside else []
                try:
                    await until_first_ends(asyncio.shield(following), *others, *guests, timeout=seconds)
                except BaseException:
                    following.cancel()
                    dashboard.cancel()
                    raise
        self._put_summary({**counts, "elapsed_s": round(monotonic() - began, 3)})
        return Exit.FINE if shutdown.code is None else shutdown.code

    async def _serve_dashboard(self, system: System) -> None:
        """Serve pages and API until this is cancelled. Whatever goes wrong with them, the system goes on."""
        if self.dashboard is None:
            return
        from reefknot.console.dashboard.server import serving
        from reefknot.console.dashboard.site import Site
        from reefknot.core.redaction import Redactor

        site = Site(
            system.store,
            access=self.dashboard.access,
            redactor=Redactor(self.start.secrets),
            settings=self.start.settings,
            shown=shown_url(self.start.url),
        )
        try:
            async with serving(site, self.dashboard) as server:
                say_address(self.dashboard, self.start.url)
                await asyncio.shield(server)
        except Exception as error:
            say(f"the dashboard is not served any more: {error_text(error)}")

    async def _print_levels(self, system: System) -> None:
        levels = LevelChanges(self._print if self.feed else say)
        while True:
            if not self.as_json:
                levels.update({"workers": self.processes.reports} if self.processes else system.snapshot())
            await asyncio.sleep(LEVELS_EVERY_S)

    def _print_sync(self, source: IngestionSource, summary: SyncSummary) -> None:
        counts = {"kept": summary.kept, "deleted": summary.deleted, "could not be read": summary.failed}
        words = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        line = f"{local_time(datetime.now(UTC))}  {'synced':<12} {source.name}: documents: {words}"
        if self.feed:
            self._print(line)
        else:
            say(line)

    def _welcome(self, system: System, seconds: float | None) -> None:
        names = self.processes.names if self.processes else [worker.worker_id for worker in system.workers]
        say(f"up {until_text(seconds)}: {', '.join(names)} on {place_of(self.start.url)}")
        say(f"steps: {', '.join(system.step_types)}")
        if system.ingestion is not None:
            say(f"sources: {', '.join(system.ingestion.sources)}")
        if is_shared(self.start.url):
            step = _example(self.start.settings.configuration.blocks)
            say(f"submit work from another terminal: reefknot submit{self.start.flags} {step} --wait")

    def _print(self, line: str) -> None:
        if not self.feed:
            return
        with suppress(BrokenPipeError):
            print(line if self.as_json else printable(line), file=data(), flush=True)

    def _put_summary(self, summary: dict[str, Any]) -> None:
        if self.as_json:
            print(dumps({"summary": summary}), file=data())
            return
        parts = [
            f"{number} {name.replace('_', ' ')}" for name, number in summary.items() if name != "elapsed_s" and number
        ]
        announce = put if self.feed else say
        announce(f"up for {summary['elapsed_s']:.1f} s: {', '.join(parts) or 'nothing was submitted'}")


def _example(reach: BlocksSection) -> str:
    """The flags of a step that works with this configuration: a file, where a folder is open to steps, or a request."""
    if reach.fs is not None and reach.fs.roots:
        return """--type fs.blob_put --inputs '{"path": "a.txt", "content": "hello", "overwrite": true}'"""
    return """--type http.request --inputs '{"url": "https://example.org"}'"""


def until_text(seconds: float | None) -> str:
    return "until Ctrl-C" if seconds is None else f"for {seconds:g} s"


async def _summary(system: System, feed: LiveFeed, others: Counter[str]) -> dict[str, int]:
    """The counts of a system that has stopped, those of its workers in `others` processes, and what it leaves."""
    counts, ends = [worker.snapshot().retries for worker in system.workers], feed.ends
    return {
        "succeeded": ends["success"],
        "failed": ends["error"],
        "timed_out": ends["timeout"],
        "cancelled": ends["cancelled"],
        "recovered": sum(one.recovered for one in counts) + others["recovered"],
        "retries": sum(one.retries for one in counts) + others["retries"],
        "rejected": ends["rejected"],
        "dropped": ends["dropped"],
        "quarantined": feed.kinds["quarantined"],
        "unfinished": await unfinished(system),
    }


async def unfinished(system: System) -> int:
    """The number of jobs in the system's store that have not ended."""
    counts = (await system.store.work.snapshot()).counts.values()
    return sum(states.get(one, 0) for states in counts for one in (WorkState.PENDING, WorkState.RUNNING))
