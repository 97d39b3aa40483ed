"""
`Commands`: a running system's obedience to commands of operators and other processes.

Commands come by the control port of the store. Those to cancel are handled by the router.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reefknot.core.clock import Clock
from reefknot.queue.port.control import Command
from reefknot.queue.worker.service import Worker
from reefknot.runtime.log import RepeatedErrors, logger, printable
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from reefknot.app.reload import ReloadOutcome

CONTROL_S = 5.0
STORE_PAUSE_S = 0.25


class Commands:
    """The commands of one store, as one system obeys them, from those after its start on."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        workers: Sequence[Worker],
        look: Callable[[], None],
        *,
        router: str | None,
        reload: Callable[[str, int], asyncio.Task[ReloadOutcome] | None],
    ) -> None:
        """
        `router` is the name of this system's router; `reload` gets who asked, and the number of the command.

        `look` is called when the pauses of the queue have changed.
        """
        self._look = look
        self._store = store
        self._clock = clock
        self._workers = workers
        self._router = router
        self._reload = reload
        self._errors = RepeatedErrors()
        self._obeyed = 0  # the sequence of the last command that was looked at
        self.draining: dict[str, asyncio.Task[int]] = {}
        """By worker: its drain that is under way."""

    async def start(self) -> None:
        """Leave out what was posted before."""
        self._obeyed = await self._store.control.latest()

    async def obey(self) -> None:
        """Carry out commands, until cancelled."""
        control, latest = self._store.control, self._obeyed
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    commands = await control.poll("router", after=self._obeyed)
                latest = await control.wait(CONTROL_S, after=latest) if not commands else latest
            except Exception as error:
                self._errors.log("commands cannot be read", error, self._clock.now())
                await asyncio.sleep(STORE_PAUSE_S)
                continue
            for command in commands:
                self._obeyed = command.sequence
                try:
                    self._do(command)
                except Exception as error:
                    text = printable(f"{command.name}: {error}", most=300)
                    logger().error("a command could not be carried out (%s)", text)

    def _do(self, command: Command) -> None:
        body: dict[str, Any] = json.loads(command.body)
        match command.name:
            case "cancel":
                return
            case "queue":
                self._look()
            case "reload" if self._is_addressed(body):
                self._reload(command.sender, command.sequence)
            case "reload":
                return
            case "drain" | "pause" | "resume":
                for worker in self._workers:
                    if body.get("worker_id") in (None, worker.worker_id):
                        seconds = float(body.get("seconds", worker.settings.drain))
                        self._command_worker(worker, command.name, seconds)
            case _:
                logger().warning("unknown command %s", printable(command.name, most=80))

    def _is_addressed(self, body: dict[str, Any]) -> bool:
        """Whether a command to a worker, a router, or all of one kind, is for a part of this system."""
        names = [worker.worker_id for worker in self._workers]
        if body.get("part") == "router":
            names = [] if self._router is None else [self._router]
        return bool(names) and body.get("name") in (None, *names)

    def _command_worker(self, worker: Worker, what: str, seconds: float) -> None:
        """Carry out a command to a worker. A drain takes as long as the longest step, so it runs in the background."""
        name = worker.worker_id
        earlier = self.draining.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        logger().info("%s: %s", name, {"drain": "draining", "pause": "paused", "resume": "running again"}[what])
        if what == "drain":
            task = asyncio.get_running_loop().create_task(worker.drain(seconds), name=f"drain {name}")
            self.draining[name] = task
        else:
            (worker.pause if what == "pause" else worker.resume)()
