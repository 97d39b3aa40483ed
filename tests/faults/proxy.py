"""
A small TCP proxy that misbehaves at a byte of one's choice, in either direction.

What goes up is the client's request, what comes down is the server's answer. Before its byte everything passes; at it
the connection is cut (an orderly end), reset, stalled (silence for ever), or made slow. Only the first `times`
connections suffer; later ones pass untouched.

A proxy can also be told at any moment, for connections that are long open: `cut` and `reset` end them, `hold` lets
nothing pass in a direction until `release`, `delay` makes each piece late. What was held is not lost: it passes later.
"""

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


NO_TROUBLE = Trouble()


class _Ended(Exception):
    """The connection is over, by our own doing."""


class Proxy:
    """Stands before one server."""

    def __init__(self, port: int, trouble: Trouble) -> None:
        self._port = port
        self._trouble = trouble
        self.connections = 0
        self.heard = bytearray()
        """What clients said, on all connections."""
        self._open = {way: asyncio.Event() for way in Way}
        self._delays = dict.fromkeys(Way, 0.0)
        self._ends: set[asyncio.StreamWriter] = set()
        self.release()
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

    def hold(self, *ways: Way) -> None:
        """From now on nothing passes these ways, on any connection; without one, neither way. None of them ends."""
        for way in ways or Way:
            self._open[way].clear()

    def release(self, *ways: Way) -> None:
        """What was held passes, and everything after it."""
        for way in ways or Way:
            self._open[way].set()

    def delay(self, seconds: float, *ways: Way) -> None:
        """Each piece of at most `CHUNK` bytes passes so much later, one after the other."""
        self._delays.update(dict.fromkeys(ways or Way, seconds))

    def cut(self) -> None:
        """End every connection, in order, towards both sides. New ones are taken."""
        for end in list(self._ends):
            end.close()

    def reset(self) -> None:
        """End every connection with a reset, towards both sides. New ones are taken."""
        for end in list(self._ends):
            _linger_not(end)
            end.transport.abort()

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        suffers = self.connections <= self._trouble.times
        task = asyncio.get_running_loop().create_task(self._between(reader, writer, suffers=suffers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of one that was stopped before it began

    async def _between(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, suffers: bool) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the server is away: so is the proxy, for this client
            return
        both = {writer, far_writer}
        self._ends |= both
        trouble = self._trouble if suffers else NO_TROUBLE
        ways = [
            asyncio.create_task(self._carry(Way.UP, reader, far_writer, writer, trouble)),
            asyncio.create_task(self._carry(Way.DOWN, far_reader, writer, writer, trouble)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ends -= both
            for way in ways:
                way.cancel()
            for end in (writer, far_writer):  # before anything is awaited, where this may be stopped
                end.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, far_writer):
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _carry(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        trouble: Trouble,
    ) -> None:
        if trouble.way is not way:
            trouble = NO_TROUBLE
        passed = 0
        if trouble.fault is not Fault.NONE and trouble.at == 0 and trouble.fault is not Fault.SLOW:
            await self._strike(trouble.fault, client)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if way is Way.UP:
                    self.heard += data
                if self._delays[way]:
                    await asyncio.sleep(self._delays[way])
                await self._open[way].wait()
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
            _linger_not(client)
        client.close()
        with contextlib.suppress(OSError):
            await client.wait_closed()
        raise _Ended


def _linger_not(end: asyncio.StreamWriter) -> None:
    """Make the end of this connection a reset."""
    plain: socket.socket = end.get_extra_info("socket")
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.asynccontextmanager
async def proxied(port: int, trouble: Trouble = NO_TROUBLE) -> AsyncIterator[Proxy]:
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
