"""
What a worker sends: acks, results, heartbeats. Each under a time limit.

Only a fresh result carries a message id: what is said again has to arrive again.
"""

from msgspec import Struct

from reefknot.core.messages import ACK, HEARTBEAT, RESULT, ExecAssignmentAck, ExecResult, encode
from reefknot.execution.limits import Limits
from reefknot.ports.transport import Transport

PUBLISH_S = 10.0


class Outbox:
    """Sends over a transport."""

    def __init__(self, transport: Transport, limits: Limits) -> None:
        self._transport = transport
        self._limits = limits

    async def ack(self, ack: ExecAssignmentAck) -> None:
        await self._send(ACK, encode(ack))

    async def result(self, assignment_id: str, body: bytes, generation: int) -> None:
        """The result of this generation, as it is kept: a person who requeues the work starts another one."""
        await self._send(RESULT, body, f"{assignment_id}/{generation}")

    async def result_again(self, result: ExecResult) -> None:
        await self._send(RESULT, encode(result))

    async def heartbeat(self, beat: Struct) -> None:
        await self._send(HEARTBEAT, encode(beat))

    async def _send(self, subject: str, body: bytes, message_id: str = "") -> None:
        with self._limits.within(PUBLISH_S):
            await self._transport.publish(subject, body, message_id=message_id)
