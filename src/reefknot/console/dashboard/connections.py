"""
Connections: a listening socket that bounds the number of open connections, idle ones included.

Each open connection takes a descriptor of the process, and the steps of a system need descriptors, too. So connections
are counted where they are accepted, before TLS and before HTTP. When there are too many, the oldest is closed for the
new one. A connection whose request came with a token stays open until it is answered, if its client reads the answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reefknot import clock
from reefknot.runtime.log import logger

SECURED_S = 10.0
"""Longest time from the begin of a connection to the end of the TLS handshake."""
STALLED_S = 15.0
"""Longest time for a client to take nothing of what waits for it; one that takes something may be slow."""
REPORTED_EVERY_S = 60.0


class OpenConnection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    room: ListeningSocket | None = None
    is_secured = False
    """Whether TLS, where there is any, has let it in."""
    is_answered: Callable[[], bool] = staticmethod(lambda: False)
    """Whether a request with a valid token is being answered."""
    is_behind = False
    """Whether bytes wait for the client to take others."""
    _taken = 0
    _is_watched = False

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self._noted(memoryview(data).nbytes, lambda: super(OpenConnection, self).send(data, flags))

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        given = list(buffers)
        size = sum(memoryview(one).nbytes for one in given)
        return self._noted(size, lambda: super(OpenConnection, self).sendmsg(given, *more))

    def _noted(self, given: int, send: Callable[[], int]) -> int:
        self.is_behind = True
        try:
            taken = send()
            self._taken += taken
            self.is_behind = taken < given
            return taken
        finally:
            if self.is_behind and not self._is_watched:
                self._watch()

    def _watch(self) -> None:
        """End a connection whose client takes nothing of what waits for it."""
        before, self._is_watched = self._taken, True

        def look() -> None:
            self._is_watched = False
            if self.is_behind and self._taken == before:
                self.end()
            elif self.is_behind:
                self._watch()

        asyncio.get_running_loop().call_later(STALLED_S, look)

    def close(self) -> None:
        if self.room is not None:
            self.room.forget(self)
        super().close()

    def end(self) -> None:
        """Shut the socket down; its reader or writer then closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class ListeningSocket(socket.socket):
    """A socket that listens, and its open connections, at most `most` of them."""

    most = 256

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._open: dict[int, OpenConnection] = {}
        """By descriptor, in the order in which they were accepted, or last answered a request with a token."""
        self._reported_at = -REPORTED_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, for which another one may be closed. Without room it is closed itself."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]  # as in `socket.socket.accept`
        made = OpenConnection(self.family, self.type, self.proto, fileno=descriptor)
        if len(self._open) >= self.most and not self._make_room():
            made.close()
            raise ConnectionAbortedError("too many connections")
        made.room, self._open[descriptor] = self, made
        asyncio.get_running_loop().call_later(SECURED_S, lambda: None if made.is_secured else made.end())
        return made, address

    def found(self, descriptor: int) -> OpenConnection | None:
        """The open connection with this descriptor."""
        return self._open.get(descriptor)

    def renew(self, connection: OpenConnection) -> None:
        """Put a connection behind all others, as if it were new."""
        if self.found(connection.fileno()) is connection:
            self._open[connection.fileno()] = self._open.pop(connection.fileno())

    def forget(self, connection: OpenConnection) -> None:
        if self.found(connection.fileno()) is connection:
            del self._open[connection.fileno()]

    def _make_room(self) -> bool:
        """End the oldest connection; False when all of them are being answered."""
        if clock.now() - self._reported_at >= REPORTED_EVERY_S:
            self._reported_at = clock.now()
            logger().warning("dashboard: %d connections are open; for new ones, the oldest end", self.most)
        oldest = next((one for one in self._open.values() if one.is_behind or not one.is_answered()), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.end()
        return True
