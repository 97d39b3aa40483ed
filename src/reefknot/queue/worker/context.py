"""
The context of one worker: what all of its parts share, and the messages it sends.

Only a fresh result carries a message id: a repeated one has to arrive again.
"""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from reefknot.core.redaction import Redactor
from reefknot.queue.execution.settling import OwnerContext
from reefknot.queue.model.messages import ACK, HEARTBEAT, RESULT, ExecAssignmentAck, ExecResult, encode
from reefknot.queue.port.transport import Notice, Transport
from reefknot.queue.worker.settings import WorkerSettings
from reefknot.runtime.log import error_text, logger

PUBLISH_S = 10.0
PUBLISH_BATCH = 64
"""Messages that are published within one `PUBLISH_S`."""


class WorkerMessage(Struct, frozen=True, gc=False):
    """A message of a worker: `what` it is, for the log, and its id, if a repetition is to be dropped."""

    subject: str
    body: bytes
    what: str
    message_id: str = ""
    to: str = ""
    """The end that it concerns, if it concerns one alone."""

    @classmethod
    def of_ack(cls, ack: ExecAssignmentAck, to: str = "") -> "WorkerMessage":
        return cls(ACK, encode(ack), f"the ack of {ack.assignment_id}", to=to)

    @classmethod
    def of_result(cls, work_id: str, body: bytes, generation: int, to: str = "") -> "WorkerMessage":
        """The result of this generation, as it is stored: a requeue by a person starts another one."""
        return cls(RESULT, body, f"the result of {work_id}", f"{work_id}/{generation}", to)


class WorkerContext(OwnerContext, frozen=True, kw_only=True):
    """The context of one worker, with its settings and the transport of its messages."""

    settings: WorkerSettings
    transport: Transport
    redactor: Redactor

    @property
    def worker_id(self) -> str:
        return self.name

    async def send_all(self, messages: Iterable[WorkerMessage]) -> list[bool]:
        """
        Publish these in order; returns which were sent. One that fails is logged: it is stored, and who asks again gets
        it.
        """
        waiting, sent = deque(messages), list[bool]()
        while waiting:
            try:
                with self.timeouts.timeout(PUBLISH_S):
                    for one in tuple(waiting)[:PUBLISH_BATCH]:
                        await self.transport.publish(one.subject, one.body, message_id=one.message_id, to=one.to)
                        waiting.popleft()
                        sent.append(True)
            except Exception as error:
                what = waiting.popleft().what
                sent.append(False)
                logger().error("%s: %s was not sent (%s)", self.name, what, error_text(error))
        return sent

    def notice(self, work_id: str, body: bytes, generation: int, to: str) -> Notice | None:
        """The message with a result for the store to send in the same step, if it can."""
        name = WorkerMessage.of_result(work_id, body, generation).message_id
        return self.transport.notice(RESULT, body, message_id=name, to=to)

    async def send_ack(self, ack: ExecAssignmentAck) -> None:
        await self._publish(ACK, encode(ack))

    async def send_result(self, work_id: str, body: bytes, generation: int) -> None:
        await self._publish(RESULT, body, WorkerMessage.of_result(work_id, body, generation).message_id)

    async def repeat_result(self, result: ExecResult) -> None:
        await self._publish(RESULT, encode(result))

    async def send_heartbeat(self, beat: Struct) -> None:
        await self._publish(HEARTBEAT, encode(beat))

    async def _publish(self, subject: str, body: bytes, message_id: str = "") -> None:
        with self.timeouts.timeout(PUBLISH_S):
            await self.transport.publish(subject, body, message_id=message_id)
