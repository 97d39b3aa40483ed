"""
Deliveries on their way in.

What has arrived by the time the store is free goes in together: one reading, one admission each, one step of the store
for all. Whatever needs more than that (a refusal, a victim, something known already) goes beside the group, several at
once and never more. Nothing is acked before it is kept, and a message that fails harms no other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from reefknot.core.messages import ExecAssignment, InvalidMessage, read_assignment
from reefknot.execution.crew import Crew
from reefknot.ports.transport import Delivery
from reefknot.worker.intake import Admitted, Intake, Taken

MOST_WAITING = 256
"""Deliveries that were read and are not being taken in yet; beyond that the transport waits."""
_FAILED = "an assignment could not be taken in"

Tell = Callable[[Taken, Delivery], Coroutine[Any, Any, None]]


class Door:
    """Brings a worker's deliveries to its intake."""

    def __init__(self, intake: Intake, crew: Crew, tell: Tell) -> None:
        self._intake = intake
        self._crew = crew
        self._tell = tell
        self._arrived: list[Delivery] = []
        self._come = asyncio.Event()
        self._room = asyncio.Event()

    async def listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Read what is sent, as far as there is room for it."""
        async for delivery in deliveries:
            while len(self._arrived) >= MOST_WAITING:
                self._room.clear()
                await self._room.wait()
            self._arrived.append(delivery)
            self._come.set()

    async def serve(self) -> None:
        """Take in what has arrived, group by group."""
        while True:
            await self._come.wait()
            self._come.clear()
            group, self._arrived = self._arrived, []
            self._room.set()
            await self._crew.survive(_FAILED, self._take_group, group)

    async def _take_group(self, group: list[Delivery]) -> None:
        plain: list[tuple[Admitted, Delivery]] = []
        again: list[tuple[ExecAssignment, Delivery]] = []
        seen: set[str] = set()
        for delivery in group:
            read = read_assignment(delivery.body, delivery.headers)
            if isinstance(read, ExecAssignment) and read.assignment_id in seen:
                again.append((read, delivery))
                continue
            admitted = self._intake.at_once(read)
            if admitted is None:
                await self._crew.run(_FAILED, self._take_alone, read, delivery)
            else:
                seen.add(admitted.item.id)
                plain.append((admitted, delivery))
        if plain:
            await self._keep(plain)
        for known, delivery in again:  # now that the first of the same name is kept
            await self._crew.run(_FAILED, self._take_alone, known, delivery)

    async def _keep(self, plain: list[tuple[Admitted, Delivery]]) -> None:
        try:
            taken = await self._intake.keep([admitted for admitted, _ in plain])
        except Exception:
            if len(plain) == 1:
                raise
            for admitted, delivery in plain:  # one by one: perhaps only one of them is bad
                await self._crew.run(_FAILED, self._take_alone, admitted.assignment, delivery)
            return
        told = [(one, delivery) for one, (_, delivery) in zip(taken, plain, strict=True)]
        await self._crew.run("acks could not be sent", self._tell_all, told)

    async def _tell_all(self, told: list[tuple[Taken, Delivery]]) -> None:
        for taken, delivery in told:
            await self._crew.survive(_FAILED, self._tell, taken, delivery)

    async def _take_alone(self, read: ExecAssignment | InvalidMessage, delivery: Delivery) -> None:
        await self._tell(await self._intake.take(read), delivery)
