"""
Connections: a listening socket that holds no more than so many open, whoever connects and then says nothing.

Each open connection takes a descriptor of the process, and the steps of a system need descriptors, too. So connections
are counted where they are accepted, before TLS and before HTTP. When there are too many, the one that has waited
longest without a whole request is closed for the new one; one that is being answered stays.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

from reefknot import clock
from reefknot.runtime.log import logger

SECURED_S = 10.0
"""Longest time from the begin of a connection to the end of the TLS handshake."""
REPORTED_EVERY_S = 60.0


class OpenConnection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    room: ListeningSocket | None = None
    is_secured = False
    """Whether TLS, where there is any, has let it in."""

    def close(self) -> None:
        if self.room is not None:
            self.room.forget(self)
        super().close()

    def end(self) -> None:
        """End it from below: whoever reads or writes it closes it then."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class ListeningSocket(socket.socket):
    """A socket that listens, and its open connections, at most `most` of them."""

    most = 256

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._waiting: dict[int, OpenConnection] = {}
        """Those without a whole request, the longest waiting first."""
        self._answered: dict[int, OpenConnection] = {}
        self._reported_at = -REPORTED_EVERY_S

    @property
    def connections(self) -> int:
        return len(self._waiting) + len(self._answered)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, for which another one may be closed. Without room it is closed itself."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]  # as in `socket.socket.accept`
        made = OpenConnection(self.family, self.type, self.proto, fileno=descriptor)
        if self.connections >= self.most and not self._make_room():
            made.close()
            raise ConnectionAbortedError("too many connections")
        made.room, self._waiting[descriptor] = self, made
        asyncio.get_running_loop().call_later(SECURED_S, lambda: None if made.is_secured else made.end())
        return made, address

    def found(self, descriptor: int) -> OpenConnection | None:
        """The open connection with this descriptor."""
        return self._waiting.get(descriptor) or self._answered.get(descriptor)

    def mark(self, connection: OpenConnection, *, is_answered: bool) -> None:
        """Note whether a connection has brought a whole request that is being answered."""
        number = connection.fileno()
        if self.found(number) is connection and (number in self._answered) != is_answered:
            self.forget(connection)
            (self._answered if is_answered else self._waiting)[number] = connection

    def forget(self, connection: OpenConnection) -> None:
        for known in (self._waiting, self._answered):
            if known.get(connection.fileno()) is connection:
                del known[connection.fileno()]

    def _make_room(self) -> bool:
        """End the connection that has waited longest; False when all of them are being answered."""
        if clock.now() - self._reported_at >= REPORTED_EVERY_S:
            self._reported_at = clock.now()
            logger().warning("dashboard: %d connections are open; for new ones, those without a request end", self.most)
        if not self._waiting:
            return False
        oldest = next(iter(self._waiting.values()))
        self.forget(oldest)
        oldest.end()
        return True
