"""
What a worker sends: acks, results, heartbeats. Each under a time limit.

Only a fresh result carries a message id: what is said again has to arrive again.
"""

import asyncio

from msgspec import Struct

from reefknot.core.messages import ACK, HEARTBEAT, RESULT, ExecAssignmentAck, ExecResult, encode
from reefknot.ports.transport import Transport

PUBLISH_S = 10.0


class Outbox:
    """Sends over a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def ack(self, ack: ExecAssignmentAck) -> None:
        await self._send(ACK, ack)

    async def result(self, result: ExecResult, generation: int) -> None:
        """The result of this generation: a person who requeues the work starts another one."""
        await self._send(RESULT, result, f"{result.assignment_id}/{generation}")

    async def result_again(self, result: ExecResult) -> None:
        await self._send(RESULT, result)

    async def heartbeat(self, beat: Struct) -> None:
        await self._send(HEARTBEAT, beat)

    async def _send(self, subject: str, message: Struct, message_id: str = "") -> None:
        async with asyncio.timeout(PUBLISH_S):
            await self._transport.publish(subject, encode(message), message_id=message_id)
