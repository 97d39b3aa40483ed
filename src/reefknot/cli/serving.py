"""
One part of a system as a process of its own: what `worker start` and `router start` share.

The parts are those of `up`, over the same store; they end the same way. A store that only this process can see is
refused, because nobody else could ever send it anything.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from json import dumps
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import printable, put, say, where
from reefknot.cli.running import Ready, ready, signals

if TYPE_CHECKING:
    from reefknot.assembly.system import System

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
    from reefknot.assembly.system import running_system, worker_settings

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
    from reefknot.assembly.presence import living_systems

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
