"""
The whole system in one process: a router, its workers, their blocks, over one store.

Commands from other processes come by the store's control part; what the system is doing is written there too, so that
`worker list` and `router status` can be asked from anywhere. Several systems may share a store: their workers have
different names, and what a system that is gone left behind is taken over.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from reefknot.assembly.stores import clock_of_this_loop, open_store
from reefknot.blocks.catalog import by_name, standard_blocks
from reefknot.blocks.python import load_entry_points, load_module
from reefknot.blocks.settings import read_settings
from reefknot.config.settings import Settings
from reefknot.core.messages import ExecAssignment, ExecResult
from reefknot.core.work import WorkState
from reefknot.engines.memory.transport import MemoryTransport
from reefknot.execution import report
from reefknot.execution.journal import event_id
from reefknot.ports.block import Block
from reefknot.ports.clock import Clock
from reefknot.ports.control import Command
from reefknot.ports.store import Store
from reefknot.router.client import Client
from reefknot.router.service import Router
from reefknot.worker.service import Worker
from reefknot.worker.settings import WorkerSettings, settings_from

ROUTER = "router"
OBSERVERS = "observers"
STATUS = "status"
STATUS_EVERY_S = 1.0
STATUS_KEPT_S = 5.0
LISTEN_S = 0.25
ADOPT_EVERY_S = 10.0
PAGE = 500


class System:
    """Router and workers over one store."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        settings: WorkerSettings,
        blocks: Mapping[str, Block],
        workers: Sequence[str] = ("worker-1",),
        seed: int | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self.store = store
        self.settings = settings
        self.system_id = event_id()
        self._clock = clock
        self._blocks = blocks
        self._started_at = int(clock.wall() * 1000)
        self._transport = MemoryTransport()
        self.router = Router(store=store, transport=self._transport, clock=clock, rules=settings.rules, seed=seed)
        self.workers = [
            Worker(
                name,
                settings=settings,
                store=store,
                transport=self._transport,
                blocks=blocks,
                clock=clock,
                secrets=secrets,
                seed=seed,
            )
            for name in workers
        ]
        self.client = Client(store, clock, size=settings.rules.size)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining: set[asyncio.Task[int]] = set()

    async def start(self) -> None:
        await self.router.start()
        for worker in self.workers:
            await worker.start()
        heard = await self.store.control.latest()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._obey(heard), name="system control"),
            loop.create_task(self._show(), name="system status"),
            loop.create_task(self._look_for_orphans(), name="system orphans"),
        ]

    async def stop(self, drain: float = 0.0) -> int:
        """End. With `drain`, running steps get so many seconds; answers how many went back to the queue."""
        for task in (*self._tasks, *self._draining):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._draining, return_exceptions=True)
        back = sum(await asyncio.gather(*(worker.drain(drain) for worker in self.workers)))
        for worker in self.workers:
            await worker.stop()
        await self.router.stop()
        await self._transport.close()
        for block in {id(block): block for block in self._blocks.values()}.values():
            await block.close()
        await self._say_status(ended=True)
        return back

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Take it on; the future is its result."""
        return await self.router.submit(assignment)

    def snapshot(self) -> dict[str, Any]:
        """What is going on, as JSON can carry it."""
        return {
            "system_id": self.system_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": self._started_at,
            "at": int(self._clock.wall() * 1000),
            "router": _finite(msgspec.to_builtins(self.router.snapshot())),
            "workers": [msgspec.to_builtins(worker.snapshot()) for worker in self.workers],
            "blocks": sorted(self._blocks),
            "retries_v2": self.settings.retries_v2,
            "queue_v2": self.settings.queue_v2,
        }

    # ---- for others -------------------------------------------------------------------------------------------------

    async def _show(self) -> None:
        while True:
            await self._say_status()
            await asyncio.sleep(STATUS_EVERY_S)

    async def _say_status(self, *, ended: bool = False) -> None:
        body = json.dumps({**self.snapshot(), "ended": ended}, default=str)
        try:
            async with asyncio.timeout(10.0):
                await self.store.control.post(STATUS, target=OBSERVERS, body=body, keep=STATUS_KEPT_S)
        except Exception as error:
            report.logger().error("the system's status was not written (%s)", report.printable(str(error), most=300))

    async def _obey(self, heard: int) -> None:
        """Commands of operators and other processes. Those to cancel the router hears by itself."""
        while True:
            for command in await self._heard(ROUTER, heard):
                heard = command.sequence
                try:
                    self._do(command)
                except Exception as error:
                    text = report.printable(f"{command.name}: {error}", most=300)
                    report.logger().error("a command could not be obeyed (%s)", text)
            await asyncio.sleep(LISTEN_S)

    async def _heard(self, target: str, after: int) -> list[Command]:
        try:
            async with asyncio.timeout(10.0):
                return await self.store.control.poll(target, after=after)
        except Exception as error:
            report.logger().error("commands cannot be read (%s)", report.printable(str(error), most=300))
            return []

    def _do(self, command: Command) -> None:
        body: dict[str, Any] = json.loads(command.body)
        match command.name:
            case "cancel":
                return
            case "drain":
                seconds = float(body.get("seconds", self.settings.drain))
                for worker in self.workers:
                    if body.get("worker_id") in (None, worker.worker_id):
                        self._begin_drain(worker, seconds)
            case _:
                report.logger().warning("unknown command %s", report.printable(command.name, most=80))

    def _begin_drain(self, worker: Worker, seconds: float) -> None:
        """Beside everything else: it takes as long as the longest running step."""
        task = asyncio.get_running_loop().create_task(worker.drain(seconds), name=f"drain {worker.worker_id}")
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    # ---- what others left -------------------------------------------------------------------------------------------

    async def _look_for_orphans(self) -> None:
        while True:
            try:
                await self.adopt()
            except Exception as error:
                report.logger().error("left work cannot be looked for (%s)", report.printable(str(error), most=300))
            await asyncio.sleep(ADOPT_EVERY_S)

    async def adopt(self) -> None:
        """Take over what is queued for a worker that no living system has."""
        living = {worker["worker_id"] for one in await living_systems(self.store) for worker in one["workers"]}
        living |= {worker.worker_id for worker in self.workers}
        counts = (await self.store.work.snapshot()).counts
        left = {
            name
            for name, states in counts.items()
            if "@" in name
            and name.partition("@")[2] not in living
            and (states.get(WorkState.PENDING) or states.get(WorkState.RUNNING))
        }
        for state in (WorkState.PENDING, WorkState.RUNNING) if left else ():
            await self._adopt(state, left)

    async def _adopt(self, state: WorkState, left: set[str]) -> None:
        after, number = "", 0
        while True:
            items = await self.store.work.find(state=state, after=after, limit=PAGE)
            for item in items:
                if item.resource_class not in left:
                    continue
                worker = self.workers[number % len(self.workers)]
                pool = worker.pools.get(item.resource_class.partition("@")[0])
                if pool is not None:
                    number += 1
                    await worker.endings.known_already(item.id, pool)
            if len(items) < PAGE:
                return
            after = items[-1].id


def _finite(value: Any) -> Any:
    """JSON has no infinity: never probed is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


async def living_systems(store: Store) -> list[dict[str, Any]]:
    """The last status of every system that runs over this store, oldest system first."""
    async with asyncio.timeout(10.0):
        said = await store.control.poll(OBSERVERS, limit=1000)
    last: dict[str, dict[str, Any]] = {}
    for command in said:
        if command.name == STATUS:
            status = json.loads(command.body)
            last[status["system_id"]] = status
    living = [one for one in last.values() if not one.get("ended") and not _died(one)]
    return sorted(living, key=lambda one: (one["started_at"], one["system_id"]))


def _died(status: dict[str, Any]) -> bool:
    """Killed without a word: its process was on this machine and is not there any more."""
    if status["host"] != socket.gethostname() or status["pid"] == os.getpid():
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's, and so it is there
        return False
    return False


def worker_settings(settings: Settings) -> WorkerSettings:
    """The checked configuration in the worker's words."""
    return settings_from(
        settings.configuration, settings.book, retries_gate=settings.retries_gate, queue_gate=settings.queue_gate
    )


def blocks_for(settings: Settings, modules: Sequence[str] = ()) -> dict[str, Block]:
    """The steps this process can run: the standard ones, those of other packages, and one's own."""
    folder = None if settings.path is None else settings.path.parent
    standard = standard_blocks(read_settings(settings.configuration.blocks, folder=folder))
    own: dict[str, Block] = {}
    for module in modules:
        own |= load_module(module, path=str(Path.cwd()))
    return by_name(standard, load_entry_points(), own)


@asynccontextmanager
async def running_system(
    url: str,
    settings: Settings,
    *,
    workers: Sequence[str] | int = ("worker-1",),
    modules: Sequence[str] = (),
    drain: float = 5.0,
    seed: int | None = None,
    secrets: tuple[str, ...] = (),
) -> AsyncIterator[System]:
    """A system that runs for as long as the block lasts. `workers` are names, or how many: then the names are free."""
    blocks = blocks_for(settings, modules)
    async with open_store(url) as store:
        system = System(
            store,
            clock_of_this_loop(),
            settings=worker_settings(settings),
            blocks=blocks,
            workers=await _free_names(store, workers) if isinstance(workers, int) else workers,
            seed=seed,
            secrets=secrets,
        )
        await system.start()
        try:
            yield system
        finally:
            await system.stop(drain)


async def _free_names(store: Store, count: int) -> list[str]:
    """`worker-1`, `worker-2`, …, without those that a system which runs here already has."""
    taken = {worker["worker_id"] for one in await living_systems(store) for worker in one["workers"]}
    names = (f"worker-{number}" for number in range(1, count + len(taken) + 1))
    return [name for name in names if name not in taken][:count]


@asynccontextmanager
async def connect(url: str, *, size: int = 1000) -> AsyncIterator[Client]:
    """
    A client of the system whose store this is: `async with rk.connect("sqlite:state.db") as client:`.

    `size` bounds what may wait there for a router.
    """
    async with open_store(url) as store:
        yield Client(store, clock_of_this_loop(), size=size)
