"""
Messages between routers, workers and callers.

Delivery is at least once, in any order: the receiver acknowledges (`Delivery.done`), and not before its own result is
stored. A transport that cannot deliver raises an error for the sender.

Every live subscription gets everything that is sent to its subjects. Messages are not kept for absent receivers: a
receiver that comes back asks again, and what must not be lost is in the store.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from msgspec import Struct


class Delivery(Struct, frozen=True):
    """A message as it arrived."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = {}
    done: Callable[[], Awaitable[None]] | None = None
    """Acknowledge the message, where the transport has acknowledgements."""
    back: Callable[[float], Coroutine[Any, Any, None]] | None = None
    """Give the message back, where the transport keeps it for one of several receivers: after these seconds any of them
    gets it."""
    sender: str = ""
    """The end that sent it, for answers that concern it alone; empty where the transport does not tell."""


class Room(Protocol):
    """
    The room of a receiver for messages that a transport keeps, each for one of several receivers.

    Such a transport fetches no more than there is room for, and keeps the rest. The receiver calls `changed` when its
    room may have grown, and when it closes or opens.
    """

    changed: Callable[[], None]
    """Set by the transport that fetches."""

    def free(self) -> int:
        """The number of messages that the receiver has room for, in addition to all that it has read."""

    @property
    def is_open(self) -> bool:
        """Whether the receiver takes anything at all; if not, the transport also takes back what it has asked for."""


class Notice(Struct):
    """A message that a store can write in the same step as what it tells of."""

    message: Any
    """As the transport and its store know it."""
    is_sent: bool = False


class Transport(Protocol):
    """Publishes and listens."""

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = "", to: str = ""
    ) -> None:
        """
        Send without waiting for the arrival. Where the engine supports it, a repeated `message_id` is delivered once.

        `to` is the `sender` of a delivery, when the message concerns that end alone: others may get it, or not.
        """

    def notice(self, subject: str, body: bytes, *, message_id: str, to: str) -> Notice | None:
        """
        The message for `Settlement.notice`, instead of `publish` after the report.

        None where messages are not in the store, or where one of its listeners does not read them there.
        """

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        """
        Receive everything sent to these subjects from now on; while `limit` messages wait unread, senders are held
        back. Of messages that the transport keeps for one of several receivers it delivers what `room` is free for.
        """

    async def ready(self) -> None:
        """Return when every subscription is active. Raises the error that prevents it."""

    async def close(self) -> None: ...
