"""
`reefknot up`, and what every command that runs a system shares: its start-up, its shutdown, and one part on its own.

A system starts from settings that are checked, and explained to the user, before anything runs. The first signal asks
for an orderly shutdown, the second ends the process at once: accepted work is in the store either way. `worker start`
and `router start` run one part of `up` over the same store; a store that only this process can see is refused there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from json import dumps
from signal import SIGINT, SIGTERM, Signals
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit, noun
from reefknot.cli.live_feed import LevelChanges, LiveFeed, PrintLine
from reefknot.cli.options import (
    SYSTEM,
    StoreFlags,
    SystemFlags,
    check_seconds,
    check_whole,
    settings,
)
from reefknot.cli.output import put, relative, say
from reefknot.cli.stores import has_part
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.config.settings import Settings

MOST_WORKERS = 64
LEVELS_EVERY_S = 0.2

For = Annotated[float | None, Parameter(name="--for", help="Shut down after this many seconds.")]
DrainSeconds = Annotated[float | None, Parameter(help="Seconds that running steps get at shutdown. Default: 30.")]
Seed = Annotated[int | None, Parameter(help="Seed of jitter.")]

# ---- start-up --------------------------------------------------------------------------------------------------------


class Startup(Struct, frozen=True):
    """Inputs of a system's start: settings, the URL of its store, and the secrets to hide."""

    settings: Any
    url: str
    secrets: tuple[str, ...]

    def system(self, *, drain: float | None, **parts: Any) -> AbstractAsyncContextManager[System]:
        """The running system with these parts. `drain` is None for the configured time."""
        from reefknot.app.system import running_system, worker_settings

        seconds = worker_settings(self.settings).drain if drain is None else drain
        return running_system(self.url, self.settings, drain=seconds, secrets=self.secrets, **parts)

    @property
    def store_name(self) -> str:
        return relative(self.url.removeprefix("sqlite:"))


def startup(engine: str | None, config: str | None, workers: int = 1) -> Startup:
    """Read and check everything, print warnings, and refuse what cannot work before anything is started."""
    from reefknot.app.stores import store_url
    from reefknot.config.secrets import secret_texts

    check_whole("--workers", workers, MOST_WORKERS)
    found = settings(config, forgiving=True)
    _warn_of_baseline(found)
    secrets, problems = secret_texts(found.tree, found.path, environ=os.environ)
    for problem in problems:  # a secret that cannot be read here cannot leak from here either
        say(f"warning: {relative(str(problem))}")
    return Startup(found, store_url(found, engine), secrets)


def _warn_of_baseline(found: Settings) -> None:
    """Name each gate that is off, what that means, and how to turn it on."""
    linear = "linear backoff of 100 ms, every failure retried"
    gates = (
        ("retries", found.retries_gate, linear, "WORKER_RETRIES_V2_ENABLED"),
        ("queue", found.queue_gate, "an unbounded queue", "WORKER_QUEUE_V2_ENABLED"),
    )
    for name, gate, behaviour, variable in gates:
        if not gate:
            way = _way_out(name, variable, gate.origin, found)
            origin = relative(gate.origin)
            say(f"The baseline is in force ({name}: {behaviour}; set by {origin}). To leave it: {way}.")


def _way_out(name: str, variable: str, origin: str, found: Settings) -> str:
    """Advice on turning a gate on, given what has turned it off."""
    if origin.startswith("missing file"):
        return "create the file, or do not name it"
    if origin.startswith("environment"):
        return f"{variable}=true; the environment overrides the file"
    file = "reefknot.yaml (`reefknot init` writes one)" if found.path is None else relative(str(found.path))
    return f"worker.{name}.v2.enabled: true in {file}, or {variable}=true"


# ---- shutdown --------------------------------------------------------------------------------------------------------


class Shutdown:
    """Shutdown request by a signal, and the exit code that follows from it."""

    def __init__(self, requested: asyncio.Event) -> None:
        self.requested = requested
        self.code: Exit | None = None

    def on_signal(self, signal: Signals) -> None:
        if self.code is not None:
            say("stopped at once; accepted work is in the store")
            os._exit(self.code)
        self.code = Exit.INTERRUPTED if signal == SIGINT else Exit.TERMINATED
        say("shutting down; running steps may finish (a second signal stops at once)")
        self.requested.set()

    async def wait(self, seconds: float | None) -> None:
        """Wait until the shutdown is requested, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.requested.wait()


@contextmanager
def shutdown_on_signals() -> Iterator[Shutdown]:
    """Inside, SIGINT and SIGTERM request a shutdown instead of ending the process."""
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(asyncio.Event())
    handled = []
    for signal in (SIGINT, SIGTERM):
        try:
            loop.add_signal_handler(signal, shutdown.on_signal, signal)
            handled.append(signal)
        except (RuntimeError, ValueError):  # no main thread, or a system without signals
            break
    try:
        yield shutdown
    finally:
        for signal in handled:
            loop.remove_signal_handler(signal)


# ---- up --------------------------------------------------------------------------------------------------------------

app = noun(
    "up",
    "up",
    "up --for 60 --workers 2 --module app",
    help="Start a router and workers in one process, over one store. Ctrl-C shuts them down in order.",
)

Beside = Callable[["System"], Awaitable[None]]
"""Runs beside a system and ends it by returning: the demo, a test."""


@app.default
def up(*, seconds: For = None, drain: DrainSeconds = None, options: SystemFlags = SYSTEM) -> int:
    """Run a router and workers until Ctrl-C or SIGTERM, and print retries, rejections and overload as they happen."""
    check_seconds("--for", seconds)
    check_seconds("--drain", drain)
    start = startup(options.engine, options.config, options.workers)
    session = UpSession(
        start,
        workers=options.workers,
        modules=tuple(options.module or ()),
        seed=options.seed,
        as_json=options.json,
    )
    return asyncio.run(session.serve(seconds, drain=drain))


class UpSession:
    """Run of a whole system with its live feed."""

    def __init__(
        self,
        start: Startup,
        *,
        workers: int = 1,
        modules: tuple[str, ...] = (),
        seed: int | None = None,
        as_json: bool = False,
        print_line: PrintLine | None = None,
        welcome: bool = True,
    ) -> None:
        self._start = start
        self._parts: dict[str, Any] = {"workers": workers, "modules": modules, "seed": seed}
        self._as_json = as_json
        self._has_welcome = welcome
        self._print_line: PrintLine = print_line or self._print

    async def serve(self, seconds: float | None, *, drain: float | None = None, beside: Beside | None = None) -> int:
        """Run until the time is over, a signal comes, or `beside` returns; the result is the exit code."""
        began = monotonic()
        with shutdown_on_signals() as shutdown:
            async with self._start.system(drain=drain, **self._parts) as system:
                head = await system.store.audit.head()
                feed = LiveFeed(system.store.audit, self._print_line, after=head.sequence, as_json=self._as_json)
                if self._has_welcome:
                    self._welcome(system, seconds)
                await self._until_first_ends(system, feed, shutdown, seconds, beside)
                await feed.catch_up()
                feed.end()
                summary = _summary(system, feed, monotonic() - began)
        self._put_summary(summary)
        return Exit.FINE if shutdown.code is None else shutdown.code

    async def _until_first_ends(
        self, system: System, feed: LiveFeed, shutdown: Shutdown, seconds: float | None, beside: Beside | None
    ) -> None:
        """Run the feed, the levels and `beside` until one of them ends; an exception is the caller's."""
        running: list[Awaitable[Any]] = [feed.follow(), self._print_levels(system), shutdown.requested.wait()]
        if beside is not None:
            running.append(beside(system))
        tasks = [asyncio.ensure_future(one) for one in running]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _print_levels(self, system: System) -> None:
        levels = LevelChanges(self._print_line)
        while True:
            if not self._as_json:
                levels.update(system.snapshot())
            await asyncio.sleep(LEVELS_EVERY_S)

    def _welcome(self, system: System, seconds: float | None) -> None:
        names = ", ".join(worker.worker_id for worker in system.workers)
        say(f"up {_until(seconds)}: {names} on {self._start.store_name}")
        say(f"steps: {', '.join(sorted(system.snapshot()['blocks']))}")
        if not self._start.url.startswith("memory"):
            say('submit work from another terminal: reefknot submit --type fs.blob_get --inputs \'{"path": "a"}\'')

    def _print(self, kind: str, line: str) -> None:
        with suppress(BrokenPipeError):
            print(line if self._as_json else printable(line))
            sys.stdout.flush()

    def _put_summary(self, summary: dict[str, Any]) -> None:
        if self._as_json:
            print(dumps({"summary": summary}))
            return
        parts = [
            f"{number} {name.replace('_', ' ')}" for name, number in summary.items() if name != "elapsed_s" and number
        ]
        put(f"up for {summary['elapsed_s']:.1f} s: {', '.join(parts) or 'nothing was submitted'}")


def _until(seconds: float | None) -> str:
    return "until Ctrl-C" if seconds is None else f"for {seconds:g} s"


def _summary(system: System, feed: LiveFeed, elapsed: float) -> dict[str, Any]:
    """The counts of this system since its start, and what it leaves to the next one."""
    counts = [worker.snapshot().retries for worker in system.workers]
    kinds, ended = feed.kinds, system.router.ended
    return {
        "succeeded": sum(one.succeeded for one in counts),
        "failed": max(0, ended.get("error", 0) - kinds["dropped"]),
        "timed_out": ended.get("timeout", 0),
        "cancelled": ended.get("cancelled", 0),
        "recovered": sum(one.recovered for one in counts),
        "retries": sum(one.retries for one in counts),
        "rejected": ended.get("rejected", 0),
        "dropped": kinds["dropped"],
        "quarantined": kinds["quarantined"],
        "unfinished": len(system.router.table),
        "elapsed_s": round(elapsed, 3),
    }


# ---- one part as a process of its own --------------------------------------------------------------------------------


class SystemPart(Struct, frozen=True):
    """A worker or a router, and its name. Without a name it takes a free one."""

    kind: str
    name: str | None = None
    modules: tuple[str, ...] = ()
    drain: float | None = None
    seed: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `running_system`."""
        if self.kind == "router":
            return {"workers": (), "router": self.name or "", "seed": self.seed}
        workers = (self.name,) if self.name else 1
        return {"workers": workers, "router": None, "modules": self.modules, "seed": self.seed}

    def name_in(self, system: System) -> str:
        return system.router.router_id if self.kind == "router" else system.workers[0].worker_id

    def summary(self, system: System) -> dict[str, Any]:
        if self.kind == "router":
            return {"unfinished": len(system.router.table)}
        counts = system.workers[0].snapshot().retries
        return {
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "recovered": counts.recovered,
            "retries": counts.retries,
        }


def start_part(part: SystemPart, options: StoreFlags, seconds: float | None) -> int:
    """Run one part until the time is over or a signal comes; the result is the exit code."""
    from reefknot.core.messages import PART_NAME, can_name_a_part

    check_seconds("--for", seconds)
    check_seconds("--drain", part.drain)
    if part.name is not None and not can_name_a_part(part.name):
        raise CommandError(f"--{part.kind}-id: {printable(part.name) or 'nothing'} is not accepted: {PART_NAME}")
    start = startup(options.engine, options.config)
    if start.url.rstrip(":") == "memory":
        origin = "--engine" if options.engine is not None else relative(str(start.settings.path))
        text = (
            f"{origin}: a memory: store is visible to one process only, and a {part.kind} alone needs others; "
            "accepted: sqlite:PATH (for everything in one process: reefknot up --engine memory:)"
        )
        raise CommandError(text, Exit.USAGE if origin == "--engine" else Exit.MISCONFIGURED)
    return asyncio.run(_serve_part(part, start, seconds, json=options.json))


async def _serve_part(part: SystemPart, start: Startup, seconds: float | None, *, json: bool) -> int:
    began = monotonic()
    with shutdown_on_signals() as shutdown:
        async with start.system(drain=part.drain, **part.arguments()) as system:
            name = part.name_in(system)
            say(f"{part.kind} {name} is ready, {_until(seconds)}, on {start.store_name}")
            await _say_missing_part(part, system, start.url)
            await shutdown.wait(seconds)
            summary = {f"{part.kind}_id": name, **part.summary(system)}
    summary["elapsed_s"] = round(monotonic() - began, 3)
    if json:
        print(dumps({"summary": summary}))
    else:
        counts = [f"{number} {name}" for name, number in summary.items() if isinstance(number, int) and number]
        idle = "nothing is left" if part.kind == "router" else "nothing arrived"
        put(f"{part.kind} {name} ran for {summary['elapsed_s']:.1f} s: {', '.join(counts) or idle}")
    return Exit.FINE if shutdown.code is None else shutdown.code


async def _say_missing_part(part: SystemPart, system: System, url: str) -> None:
    """Print which other part is missing: a router waits for workers, and a worker for a router."""
    from reefknot.app.presence import living_systems

    missing = "worker" if part.kind == "router" else "router"
    if not has_part(await living_systems(system.store), missing):
        say(f"no {missing} is running on this store yet; start one with: reefknot {missing} start --engine {url}")
