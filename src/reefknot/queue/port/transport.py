"""
Messages between routers, workers and callers.

At least once, in any order: whoever receives says when it is done (`Delivery.done`), and not before its own result is
kept. A transport that cannot deliver says so to the sender.

Every subscription that lives hears everything that is sent to its subjects. Nobody may rely on messages to remember:
one who comes back asks again, and what must not be lost is in the store.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from msgspec import Struct


class Delivery(Struct, frozen=True):
    """A message as it arrived."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = {}
    done: Callable[[], Awaitable[None]] | None = None
    """Acknowledge it to the transport, where there is something to acknowledge."""


class Transport(Protocol):
    """Publishes and listens."""

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = ""
    ) -> None:
        """Send, not wait for its arrival. The same `message_id` twice is delivered once, where the engine can tell."""

    def subscribe(self, *subjects: str, limit: int = 1024) -> AsyncIterator[Delivery]:
        """Everything sent to these subjects from now on; while `limit` wait unread, a sender gets no further ahead."""

    async def ready(self) -> None:
        """Return when everything that was subscribed to is heard. Raises what is in the way."""

    async def close(self) -> None: ...
