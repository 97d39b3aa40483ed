"""
The context of one worker: what all of its parts share, and the messages it sends.

Only a fresh result carries a message id: a repeated one has to arrive again.
"""

from msgspec import Struct

from reefknot.audit.journal import Journal
from reefknot.core.clock import Clock
from reefknot.core.redaction import Redactor
from reefknot.queue.execution.settling import Claims
from reefknot.queue.model.messages import ACK, HEARTBEAT, RESULT, ExecAssignmentAck, ExecResult, encode
from reefknot.queue.port.transport import Transport
from reefknot.queue.port.work_queue import WorkQueue
from reefknot.queue.worker.settings import WorkerSettings
from reefknot.runtime.timeouts import Timeouts

PUBLISH_S = 10.0


class WorkerContext(Struct, frozen=True):
    """Identity, settings, store, clock and journal of one worker."""

    worker_id: str
    owner: str
    """The name under which this incarnation holds work."""
    settings: WorkerSettings
    work: WorkQueue
    transport: Transport
    journal: Journal
    clock: Clock
    timeouts: Timeouts
    redactor: Redactor
    seed: int | None = None

    @property
    def claims(self) -> Claims:
        return Claims(self.work, self.settings.lease)

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
