"""`reefknot up`: router and workers in one process, until somebody asks for the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from json import dumps
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.asking import Config, Json
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import printable, put, say, where
from reefknot.cli.running import Modules, Ready, Store, Workers, ready, signals

if TYPE_CHECKING:
    from reefknot.assembly.system import System
    from reefknot.cli.watching import Say, Watcher

LOOK_S = 0.2
LONGEST_S = 10 * 365 * 86_400

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
    engine: Store = None,
    workers: Workers = 1,
    module: Modules = None,
    drain: Annotated[float | None, Parameter(help="Seconds that running steps get at the end, 30 unless said.")] = None,
    seed: Annotated[int | None, Parameter(help="Draw waits and workers with this seed.")] = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Run router and workers until Ctrl-C or SIGTERM, and tell what happens as it happens."""
    for flag, value in (("--for", seconds), ("--drain", drain)):
        if value is not None and not 0 <= value <= LONGEST_S:
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
        from reefknot.assembly.system import running_system, worker_settings
        from reefknot.cli.watching import Watcher

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
                summary = await _summary(system, watcher, monotonic() - began)
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
        from reefknot.cli.watching import Levels

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


async def _summary(system: System, watcher: Watcher, elapsed: float) -> dict[str, Any]:
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
