"""
One part of a system as a process of its own: what `worker start` and `router start` share.

The parts are those of `up`, over the same store; they end the same way. A store that only this process can see is
refused, because nobody else could ever send it anything.

What `run` and `up` share: the settings they start from, what they say about them, and how a signal ends them.

The first signal asks for an orderly end, the second ends at once: what was accepted is in the store either way.

`reefknot up`: router and workers in one process, until somebody asks for the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from json import dumps
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Config, EngineOrMemory, Json, Modules, Workers
from reefknot.cli.output import printable, put, say, where
from reefknot.cli.stores import DEFAULT, checked_url

if TYPE_CHECKING:
    import asyncio

    from reefknot.app.system import System
    from reefknot.cli.live_feed import Say, Watcher
    from reefknot.config.settings import Settings

LONGEST_S = 10 * 365 * 86_400

For = Annotated[float | None, Parameter(name="--for", help="End by itself after so many seconds.")]
Seed = Annotated[int | None, Parameter(help="Draw with this seed.")]


class Part(Struct, frozen=True):
    """Which part, under which name. Without a name it takes a free one."""

    kind: str
    name: str | None = None
    modules: tuple[str, ...] = ()
    drain: float | None = None
    seed: int | None = None

    def settings(self) -> dict[str, Any]:
        """What `running_system` takes."""
        if self.kind == "router":
            return {"workers": (), "router": self.name or ""}
        return {"workers": (self.name,) if self.name else 1, "router": None, "modules": self.modules}

    def name_in(self, system: System) -> str:
        return system.router.router_id if self.kind == "router" else system.workers[0].worker_id


def start(part: Part, engine: str | None, config: str | None, *, seconds: float | None, json: bool) -> int:
    """Serve until the time is over or a signal comes."""
    for flag, value in (("--for", seconds), ("--drain", part.drain)):
        if value is not None and not 0 <= value <= LONGEST_S:
            raise CommandError(f"{flag}: {value:g} is not accepted: seconds, 0 or more")
    from reefknot.core.messages import PART_NAME, can_name_a_part

    if part.name is not None and not can_name_a_part(part.name):
        raise CommandError(f"--{part.kind}-id: {printable(part.name) or 'nothing'} is not accepted: {PART_NAME}")
    begun = ready(engine, config)
    _refuse_private(begun.url, said_by="--engine" if engine is not None else where(str(begun.settings.path)))
    return asyncio.run(_serve(part, begun, seconds, json))


def _refuse_private(url: str, *, said_by: str) -> None:
    if url.rstrip(":") == "memory":
        text = (
            f"{said_by}: memory: is a store that no other process can see, and a part alone has nobody to talk to; "
            "accepted: sqlite:PATH (for everything in one process: reefknot up --engine memory:)"
        )
        raise CommandError(text, Exit.USAGE if said_by == "--engine" else Exit.MISCONFIGURED)


async def _serve(part: Part, begun: Ready, seconds: float | None, json: bool) -> int:
    from reefknot.app.system import running_system, worker_settings

    from_start = monotonic()
    patience = worker_settings(begun.settings).drain if part.drain is None else part.drain
    with signals() as ending:
        async with running_system(
            begun.url,
            begun.settings,
            drain=patience,
            seed=part.seed,
            secrets=begun.secrets,
            **part.settings(),
        ) as system:
            name = part.name_in(system)
            until = "until Ctrl-C" if seconds is None else f"for {seconds:g} s"
            say(f"{part.kind} {name} is ready, {until}, on {where(begun.url.removeprefix('sqlite:'))}")
            await _say_who_is_missing(part, system, begun.url)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await ending.asked.wait()
            summary = {f"{part.kind}_id": name, **_summary(part, system), "elapsed_s": 0.0}
    summary["elapsed_s"] = round(monotonic() - from_start, 3)
    _tell(part, summary, json=json)
    return Exit.FINE if ending.code is None else ending.code


async def _say_who_is_missing(part: Part, system: System, url: str) -> None:
    """A router without workers waits, and so does a worker without a router; a person should know for whom."""
    from reefknot.app.presence import living_systems

    living = await living_systems(system.store)
    missing = "worker" if part.kind == "router" else "router"
    if not any(one["workers"] if missing == "worker" else one["router"] for one in living):
        say(f"no {missing} is running on this store yet; start one with: reefknot {missing} start --engine {url}")


def _summary(part: Part, system: System) -> dict[str, Any]:
    if part.kind == "router":
        return {"unfinished": len(system.router.table)}
    counts = system.workers[0].snapshot().retries
    return {
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "recovered": counts.recovered,
        "retries": counts.retries,
    }


def _tell(part: Part, summary: dict[str, Any], *, json: bool) -> None:
    if json:
        print(dumps({"summary": summary}))
        return
    told = [f"{number} {name}" for name, number in summary.items() if isinstance(number, int) and number]
    name, idle = summary[f"{part.kind}_id"], "nothing is left" if part.kind == "router" else "nothing came"
    put(f"{part.kind} {name} ran for {summary['elapsed_s']:.1f} s: {', '.join(told) or idle}")


MOST_WORKERS = 64


class Ready(Struct, frozen=True):
    """What a system starts from."""

    settings: Any
    url: str
    secrets: tuple[str, ...]


def ready(engine: str | None, config: str | None, workers: int = 1) -> Ready:
    """Read everything, say what a person should know, and refuse what cannot work before anything is started."""
    from reefknot.config.settings import load_settings

    if not 1 <= workers <= MOST_WORKERS:
        raise CommandError(f"--workers: {workers} is not accepted: a whole number from 1 to {MOST_WORKERS}")
    settings = load_settings(config, environ=os.environ, cwd=Path.cwd(), forgiving=True)
    for warning in settings.warnings:
        say(f"warning: {warning}")
    _say_baseline(settings)
    folder = Path.cwd() if engine is not None or settings.path is None else settings.path.parent
    url = checked_url(engine or settings.configuration.engine or f"sqlite:{DEFAULT}", folder)
    return Ready(settings, url, _secrets(settings, config))


def _say_baseline(settings: Settings) -> None:
    """Which of the two gates is shut, and how to open it."""
    gates = (
        (
            "retries",
            settings.retries_gate,
            "linear waits of 100 ms, every failure retried",
            "WORKER_RETRIES_V2_ENABLED",
        ),
        ("queue", settings.queue_gate, "a queue without a bound", "WORKER_QUEUE_V2_ENABLED"),
    )
    for name, gate, what, variable in gates:
        if not gate:
            way = _way_out(name, variable, gate.said_by, settings)
            say(f"The baseline is in force ({name}: {what}; said by {where(gate.said_by)}). To leave it: {way}.")


def _way_out(name: str, variable: str, said_by: str, settings: Settings) -> str:
    """What has not been done yet: a variable that is set already is no way."""
    if said_by.startswith("missing file"):
        return "create the file, or do not name it"
    if said_by.startswith("environment"):
        return f"{variable}=true; the environment wins over the file"
    return f"worker.{name}.v2.enabled: true in {_file(settings)}, or {variable}=true"


def _file(settings: Settings) -> str:
    return "reefknot.yaml (`reefknot init` writes one)" if settings.path is None else where(str(settings.path))


def _secrets(settings: Settings, config: str | None) -> tuple[str, ...]:
    """The configured secrets. One that cannot be read here cannot leak from here either; it is told all the same."""
    from reefknot.config.layers import load_tree
    from reefknot.config.secrets import resolve_section

    if settings.path is None:
        return ()
    tree, path = load_tree(config, environ=os.environ, cwd=Path.cwd())
    found, problems = resolve_section(tree, environ=os.environ, folder=Path.cwd() if path is None else path.parent)
    for problem in problems:
        say(f"warning: {where(str(problem))}")
    return tuple(secret.reveal() for secret in found.values())


class Ending:
    """Whether somebody asked for the end, and what the exit code is then."""

    def __init__(self, asked: asyncio.Event) -> None:
        self.asked = asked
        self.code: Exit | None = None

    def heard(self, signal: Signals) -> None:
        if self.code is not None:
            say("ended at once; what was accepted is in the store")
            os._exit(self.code)
        self.code = Exit.INTERRUPTED if signal == SIGINT else Exit.TERMINATED
        say("ending; what runs may finish (a second signal ends at once)")
        self.asked.set()


@contextmanager
def signals() -> Iterator[Ending]:
    """Inside, SIGINT and SIGTERM ask for the end instead of making it."""
    import asyncio

    loop = asyncio.get_running_loop()
    ending = Ending(asyncio.Event())
    set_up = []
    for signal in (SIGINT, SIGTERM):
        try:
            loop.add_signal_handler(signal, ending.heard, signal)
            set_up.append(signal)
        except (RuntimeError, ValueError):  # no main thread, or a system without signals
            break
    try:
        yield ending
    finally:
        for signal in set_up:
            loop.remove_signal_handler(signal)


LOOK_S = 0.2
LONGEST_UP_S = 10 * 365 * 86_400

app = App(
    name="up",
    help="Run the whole system in one process: router and workers over one store. Ctrl-C ends it in order.",
    help_epilogue="Examples:\n\n    reefknot up\n    reefknot up --for 60 --workers 2 --module app",
)

Beside = Callable[["System"], Awaitable[None]]
"""What goes on beside a system while it runs: the demo, a test."""


@app.default
def up(
    *,
    seconds: Annotated[float | None, Parameter(name="--for", help="End by itself after so many seconds.")] = None,
    engine: EngineOrMemory = None,
    workers: Workers = 1,
    module: Modules = None,
    drain: Annotated[float | None, Parameter(help="Seconds that running steps get at the end, 30 unless said.")] = None,
    seed: Annotated[int | None, Parameter(help="Draw waits and workers with this seed.")] = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Run router and workers until Ctrl-C or SIGTERM, and tell what happens as it happens."""
    for flag, value in (("--for", seconds), ("--drain", drain)):
        if value is not None and not 0 <= value <= LONGEST_UP_S:
            raise CommandError(f"{flag}: {value:g} is not accepted: seconds, 0 or more")
    start = ready(engine, config, workers)
    watched = Up(start, workers=workers, modules=tuple(module or ()), seed=seed, as_json=json)
    return asyncio.run(watched.serve(seconds, drain=drain))


class Up:
    """One run of a whole system, watched."""

    def __init__(
        self,
        start: Ready,
        *,
        workers: int = 1,
        modules: tuple[str, ...] = (),
        seed: int | None = None,
        as_json: bool = False,
        tell: Say | None = None,
        welcome: bool = True,
    ) -> None:
        self._start = start
        self._workers = workers
        self._modules = modules
        self._seed = seed
        self._as_json = as_json
        self._has_welcome = welcome
        self._tell: Say = tell or self._print

    async def serve(self, seconds: float | None, *, drain: float | None = None, beside: Beside | None = None) -> int:
        """Until the time is over, a signal comes, or what goes on beside it has ended."""
        from reefknot.app.system import running_system, worker_settings
        from reefknot.cli.live_feed import Watcher

        began = monotonic()
        patience = worker_settings(self._start.settings).drain if drain is None else drain
        with signals() as ending:
            async with running_system(
                self._start.url,
                self._start.settings,
                workers=self._workers,
                modules=self._modules,
                drain=patience,
                seed=self._seed,
                secrets=self._start.secrets,
            ) as system:
                head = await system.store.audit.head()
                watcher = Watcher(system.store.audit, self._tell, after=head.sequence, as_json=self._as_json)
                if self._has_welcome:
                    self._welcome(system, seconds)
                await self._until_asked(system, watcher, ending.asked, seconds, beside)
                await watcher.catch_up()
                watcher.end()
                summary = await _summary_of_up(system, watcher, monotonic() - began)
        self._say_summary(summary)
        return Exit.FINE if ending.code is None else ending.code

    async def _until_asked(
        self, system: System, watcher: Watcher, asked: asyncio.Event, seconds: float | None, beside: Beside | None
    ) -> None:
        """The first of them that ends is the end of all; a failure is the caller's."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(watcher.follow()),
            asyncio.create_task(self._watch_levels(system)),
            asyncio.create_task(asked.wait()),
        ]
        if beside is not None:
            tasks.append(asyncio.ensure_future(_awaited(beside, system)))
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_levels(self, system: System) -> None:
        from reefknot.cli.live_feed import Levels

        levels = Levels(self._tell)
        while True:
            if not self._as_json:
                levels.look(system.snapshot())
            await asyncio.sleep(LOOK_S)

    def _welcome(self, system: System, seconds: float | None) -> None:
        names = ", ".join(worker.worker_id for worker in system.workers)
        until = "until Ctrl-C" if seconds is None else f"for {seconds:g} s"
        say(f"up {until}: {names} on {where(self._start.url.removeprefix('sqlite:'))}")
        say(f"steps: {', '.join(sorted(system.snapshot()['blocks']))}")
        if not self._start.url.startswith("memory"):
            say('hand work in from another terminal: reefknot submit --type fs.blob_get --inputs \'{"path": "a"}\'')

    def _print(self, kind: str, line: str) -> None:
        with suppress(BrokenPipeError):
            print(line if self._as_json else printable(line))
            sys.stdout.flush()

    def _say_summary(self, summary: dict[str, Any]) -> None:
        if self._as_json:
            print(dumps({"summary": summary}))
            return
        parts = [
            f"{number} {name.replace('_', ' ')}" for name, number in summary.items() if name != "elapsed_s" and number
        ]
        put(f"up for {summary['elapsed_s']:.1f} s: {', '.join(parts) or 'nothing was handed in'}")


async def _awaited(beside: Beside, system: System) -> None:
    await beside(system)


async def _summary_of_up(system: System, watcher: Watcher, elapsed: float) -> dict[str, Any]:
    """What this system did since it started, and what it leaves to the next one."""
    counts = [worker.snapshot().retries for worker in system.workers]
    kinds, ended = watcher.kinds, system.router.ended
    waiting = len(system.router.table)
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
        "unfinished": waiting,
        "elapsed_s": round(elapsed, 3),
    }
