"""
A small TCP proxy that misbehaves at a byte of one's choice, in either direction.

What goes up is the client's request, what comes down is the server's answer. Before its byte everything passes; at it
the connection is cut (an orderly end), reset, stalled (silence for ever), or made slow. Only the first `times`
connections suffer; later ones pass untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum

CHUNK = 4096
SLOW_CHUNK = 1
SLOW_S = 0.05
"""A byte, and then this pause: nothing of any size gets through in time."""


class Fault(StrEnum):
    NONE = "none"
    CUT = "cut"
    RESET = "reset"
    STALL = "stall"
    SLOW = "slow"


class Way(StrEnum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True)
class Trouble:
    """What happens, in which direction, after how many bytes, to how many connections."""

    fault: Fault = Fault.NONE
    way: Way = Way.DOWN
    at: int = 0
    times: int = 1_000_000


class _Ended(Exception):
    """The connection is over, by our own doing."""


class Proxy:
    """Stands before one server."""

    def __init__(self, port: int, trouble: Trouble) -> None:
        self._port = port
        self._trouble = trouble
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        suffers = self.connections <= self._trouble.times
        task = asyncio.get_running_loop().create_task(self._between(reader, writer, suffers=suffers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of one that was stopped before it began

    async def _between(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, suffers: bool) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        trouble = self._trouble if suffers else Trouble()
        ways = [
            asyncio.create_task(
                self._carry(reader, far_writer, writer, trouble if trouble.way is Way.UP else Trouble())
            ),
            asyncio.create_task(
                self._carry(far_reader, writer, writer, trouble if trouble.way is Way.DOWN else Trouble())
            ),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, far_writer):  # before anything is awaited, where this may be stopped
                end.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, far_writer):
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter, trouble: Trouble
    ) -> None:
        passed = 0
        if trouble.fault is not Fault.NONE and trouble.at == 0 and trouble.fault is not Fault.SLOW:
            await self._strike(trouble.fault, client)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if trouble.fault is Fault.NONE or passed + len(data) < trouble.at:
                    writer.write(data)
                    passed += len(data)
                    await writer.drain()
                    continue
                before = max(0, trouble.at - passed)
                writer.write(data[:before])
                passed += before
                await writer.drain()
                if trouble.fault is not Fault.SLOW:
                    await self._strike(trouble.fault, client)
                for start in range(before, len(data), SLOW_CHUNK):
                    writer.write(data[start : start + SLOW_CHUNK])
                    await writer.drain()
                    await asyncio.sleep(SLOW_S)
                passed += len(data) - before

    async def _strike(self, fault: Fault, client: asyncio.StreamWriter) -> None:
        if fault is Fault.STALL:
            await asyncio.Event().wait()
        if fault is Fault.RESET:
            plain: socket.socket = client.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with contextlib.suppress(OSError):
            await client.wait_closed()
        raise _Ended


@contextlib.asynccontextmanager
async def proxied(port: int, trouble: Trouble) -> AsyncIterator[Proxy]:
    proxy = Proxy(port, trouble)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


@contextlib.contextmanager
def nobody_there() -> Iterator[int]:
    """A port on which every connection is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


@contextlib.contextmanager
def nobody_accepts() -> Iterator[int]:
    """A port whose line is full: a connection is begun, and never made."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(server.getsockname())
        yield server.getsockname()[1]
