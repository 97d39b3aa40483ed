"""
The whole system in one process: a router, its workers, their blocks, over one store.

Commands from other processes come by the store's control part; what the system is doing is written there too, so that
`worker list` and `router status` can be asked from anywhere.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from reefknot.assembly.stores import clock_of_this_loop, open_store
from reefknot.blocks.catalog import by_name, standard_blocks
from reefknot.blocks.python import load_entry_points, load_module
from reefknot.blocks.settings import read_settings
from reefknot.config.settings import Settings
from reefknot.core.messages import ExecAssignment, ExecResult
from reefknot.engines.memory.transport import MemoryTransport
from reefknot.execution import report
from reefknot.ports.block import Block
from reefknot.ports.clock import Clock
from reefknot.ports.control import Command
from reefknot.ports.store import Store
from reefknot.router.client import Client
from reefknot.router.service import Router
from reefknot.worker.service import Worker
from reefknot.worker.settings import WorkerSettings, settings_from

OBSERVERS = "observers"
STATUS = "status"
STATUS_EVERY_S = 1.0
STATUS_KEPT_S = 5.0
LISTEN_S = 0.25


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
        self._clock = clock
        self._blocks = blocks
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

    async def start(self) -> None:
        await self.router.start()
        for worker in self.workers:
            await worker.start()
        heard = await self.store.control.latest()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._obey(heard), name="system control"),
            loop.create_task(self._show(), name="system status"),
        ]

    async def stop(self, drain: float = 0.0) -> int:
        """End. With `drain`, running steps get so many seconds; answers how many went back to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        back = sum([await worker.drain(drain) for worker in self.workers])
        for worker in self.workers:
            await worker.stop()
        await self.router.stop()
        await self._transport.close()
        for block in {id(block): block for block in self._blocks.values()}.values():
            await block.close()
        return back

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Take it on; the future is its result."""
        return await self.router.submit(assignment)

    def snapshot(self) -> dict[str, Any]:
        """What is going on, as JSON can carry it."""
        return {
            "at": int(self._clock.wall() * 1000),
            "router": msgspec.to_builtins(self.router.snapshot()),
            "workers": [msgspec.to_builtins(worker.snapshot()) for worker in self.workers],
            "blocks": sorted(self._blocks),
            "retries_v2": self.settings.retries_v2,
            "queue_v2": self.settings.queue_v2,
        }

    async def _show(self) -> None:
        while True:
            try:
                await self.store.control.post(
                    STATUS, target=OBSERVERS, body=json.dumps(self.snapshot(), default=str), keep=STATUS_KEPT_S
                )
            except Exception as error:
                report.logger().error(
                    "the system's status was not written (%s)", report.printable(str(error), most=300)
                )
            await asyncio.sleep(STATUS_EVERY_S)

    async def _obey(self, heard: int) -> None:
        """Commands of operators and other processes."""
        while True:
            for command in await self._heard("router", heard):
                heard = command.sequence
                try:
                    await self._do(command)
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

    async def _do(self, command: Command) -> None:
        body: dict[str, Any] = json.loads(command.body)
        match command.name:
            case "cancel":
                await self.router.cancel(str(body["assignment_id"]), body.get("reason"))
            case "drain":
                for worker in self.workers:
                    if body.get("worker_id") in (None, worker.worker_id):
                        await worker.drain(float(body.get("seconds", self.settings.drain)))
            case _:
                report.logger().warning("unknown command %s", report.printable(command.name, most=80))


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
    workers: Sequence[str] = ("worker-1",),
    modules: Sequence[str] = (),
    drain: float = 5.0,
    seed: int | None = None,
) -> AsyncIterator[System]:
    """A system that runs for as long as the block lasts."""
    kept = settings.configuration.idempotency
    async with open_store(
        url, retention=kept.retention_seconds, largest_result=kept.largest_result_bytes, most_keys=kept.max_keys
    ) as store:
        system = System(
            store,
            clock_of_this_loop(),
            settings=worker_settings(settings),
            blocks=blocks_for(settings, modules),
            workers=workers,
            seed=seed,
        )
        await system.start()
        try:
            yield system
        finally:
            await system.stop(drain)


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    """A client of the system whose store this is: `async with rk.connect("sqlite:state.db") as client:`."""
    async with open_store(url) as store:
        yield Client(store, clock_of_this_loop())
