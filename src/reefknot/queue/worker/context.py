"""
The context of one worker: what all of its parts share, and the messages it sends.

Only a fresh result carries a message id: a repeated one has to arrive again.
"""

from msgspec import Struct

from reefknot.core.redaction import Redactor
from reefknot.queue.execution.settling import OwnerContext
from reefknot.queue.model.messages import ACK, HEARTBEAT, RESULT, ExecAssignmentAck, ExecResult, encode
from reefknot.queue.port.transport import Transport
from reefknot.queue.worker.settings import WorkerSettings

PUBLISH_S = 10.0


class WorkerContext(OwnerContext, frozen=True, kw_only=True):
    """The context of one worker, with its settings and the transport of its messages."""

    settings: WorkerSettings
    transport: Transport
    redactor: Redactor

    @property
    def worker_id(self) -> str:
        return self.name

    async def send_ack(self, ack: ExecAssignmentAck) -> None:
        await self._publish(ACK, encode(ack))

    async def send_result(self, work_id: str, body: bytes, generation: int) -> None:
        """Publish the result of this generation, as it is stored: a requeue by a person starts another one."""
        await self._publish(RESULT, body, f"{work_id}/{generation}")

    async def repeat_result(self, result: ExecResult) -> None:
        await self._publish(RESULT, encode(result))

    async def send_heartbeat(self, beat: Struct) -> None:
        await self._publish(HEARTBEAT, encode(beat))

    async def _publish(self, subject: str, body: bytes, message_id: str = "") -> None:
        with self.timeouts.timeout(PUBLISH_S):
            await self.transport.publish(subject, body, message_id=message_id)
