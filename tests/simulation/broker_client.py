"""
The connections of the model of a NATS server: `Client` has the surface of nats-py's client that `Connection` uses.

What is sent over a connection keeps its order, as over TCP, and stands still while its process is frozen. A client of a
dead process reaches nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nats import errors
from nats.aio.msg import Msg

from tests.simulation.sea import Crashed, Process

if TYPE_CHECKING:
    from tests.simulation.broker import Broker

Headers = Mapping[str, str]
PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The simulated process that a connection belongs to."""


class _Pipe:
    """What is on its way in one direction of a connection, in order. It stands still while its process is frozen."""

    def __init__(self, client: Client, arrive: Callable[[Any], None]) -> None:
        self._client = client
        self._arrive = arrive
        self._items: deque[tuple[float, Any]] = deque()
        self._due = 0.0

    def send(self, item: Any) -> None:
        loop, broker = self._client.loop, self._client.broker
        faults = broker.faults
        delay = broker.rng.random() * faults.latency
        if broker.rng.random() < faults.stalled:
            delay += broker.rng.random() * faults.longest_stall
        self._due = max(self._due, loop.time() + delay)
        self._items.append((self._due, item))
        self._wait_for_next(loop, self._due)

    def _wait_for_next(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_here = False
        if loop.is_closed():
            return
        if is_here:
            loop.call_at(due, self._next)
        else:
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        process = self._client.process
        if process is not None and process.dead:
            self._items.clear()
        elif process is not None and process.frozen:
            self._client.loop.call_later(0.1, self._next)
        elif self._items and self._client.is_open:
            self._arrive(self._items.popleft()[1])

    def clear(self) -> None:
        self._items.clear()

    def go_on(self) -> None:
        for _ in range(len(self._items)):
            self._wait_for_next(self._client.loop, self._client.loop.time())


class Subscription:
    """A subscription as nats-py has it, as far as `Connection` uses it."""

    def __init__(self, client: Client, subject: str, queue: str, handler: Callable[[Msg], Awaitable[None]] | None):
        self.client = client
        self.number = client.broker.next_number()
        self.subject = subject
        self.queue = queue
        self.is_known = False
        """Whether the server knows it."""
        self._pending_queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._wait_for_msgs_task = None
        self._task = client.loop.create_task(self._handle(handler)) if handler is not None else None

    async def _handle(self, handler: Callable[[Msg], Awaitable[None]]) -> None:
        while True:
            message = await self._pending_queue.get()
            try:
                await handler(message)
            except Exception as error:
                await self.client.settings["error_cb"](error)

    async def unsubscribe(self) -> None:
        if self in self.client.subscriptions:
            self.client.subscriptions.remove(self)
            self.client._subs.pop(self.number, None)
            self.client.to_server.send(lambda: setattr(self, "is_known", False))
        self.end()

    @property
    def _id(self) -> int:
        return self.number

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Client:
    """A client of the model, with the surface of nats-py's that `Connection` uses."""

    connected_server_version = SimpleNamespace(major=2, minor=12, patch=0)
    _server_info: Mapping[str, Any] = {"cluster": "model", "jetstream": True}
    max_payload = 1 << 20
    _flush_queue: asyncio.Queue[Any] | None = None
    """None: what is written is on its way at once."""
    _reconnection_task = _transport = _reading_task = _ping_interval_task = _flusher_task = None
    """It reconnects within its methods, and opens no socket."""
    is_reconnecting = False

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.process = PROCESS.get()
        self.is_open = self.is_closed = False
        self.subscriptions: list[Subscription] = []
        self.settings: dict[str, Any] = {}
        self._subs: dict[int, Subscription] = {}
        """By number: as nats-py has them, for who takes the place of `_process_msg`."""
        self._arrived: asyncio.Queue[tuple[int, bytes, bytes, bytes, bytes]] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, **settings: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.settings = settings
        self.to_server = _Pipe(self, lambda act: act())
        self.to_client = _Pipe(self, lambda act: act())
        self._reading = self.loop.create_task(self._read())
        while self.broker.is_down:
            await settings["error_cb"](ConnectionRefusedError("nobody there"))
            await asyncio.sleep(settings["reconnect_time_wait"])
        self.is_open = True
        self.broker.joined(self)

    async def _process_err(self, err_msg: str) -> None:
        """Do what nats-py does about an error that the server names: this one names none."""

    @property
    def is_connected(self) -> bool:
        if self.process is not None and self.process.dead:
            raise Crashed
        return self.is_open

    async def publish(self, subject: str, body: bytes, reply: str = "", headers: Headers | None = None) -> None:
        if self.is_closed or not self.is_connected:
            raise errors.ConnectionClosedError
        if len(body) > self.max_payload:
            raise errors.MaxPayloadError
        self.to_server.send(lambda: self.broker.receive(subject, body, dict(headers or {}), reply))

    async def subscribe(self, subject: str, queue: str = "", cb: Any = None, **limits: int) -> Subscription:
        if self.is_closed or not self.is_connected:
            raise errors.ConnectionClosedError
        made = Subscription(self, subject, queue, cb)
        self.subscriptions.append(made)
        self._subs[made.number] = made
        self.to_server.send(lambda: setattr(made, "is_known", made in self.subscriptions))
        return made

    async def _send_unsubscribe(self, number: int) -> None:
        self.to_server.send(lambda: setattr(self._subs[number], "is_known", False) if number in self._subs else None)

    async def _send_command(self, command: bytes) -> None:
        """Send messages that are written as the protocol has them."""
        while command:
            line, _, rest = command.partition(b"\r\n")
            kind, subject, *more = line.split()
            size = int(more.pop())
            head = int(more.pop()) if kind == b"HPUB" else 0
            reply = more[0].decode() if more else ""
            await self.publish(subject.decode(), rest[head:size], reply, _headers(rest[:head]))
            command = rest[size + 2 :]

    def deliver(self, to: Subscription, subject: str, body: bytes, headers: Any, reply: str) -> None:
        """Send a message to this client, for a subscription."""

        def arrive() -> None:
            if "_process_msg" in self.__dict__:  # somebody hears in its place, and may wait
                self._arrived.put_nowait((to.number, subject.encode(), reply.encode(), body, _head(headers)))
            elif to in self.subscriptions:
                to._pending_queue.put_nowait(_message(subject, reply, body, headers))

        self.to_client.send(arrive)

    async def _read(self) -> None:
        """Take what arrives, one after the other."""
        while True:
            await self._process_msg(*await self._arrived.get())

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if sid in self._subs:
            message = _message(subject.decode(), reply.decode(), data, _headers(headers))
            self._subs[sid]._pending_queue.put_nowait(message)

    def lose(self, outage: float) -> None:
        """Break the connection. It is back after so long, when the server is; what was buffered may come then."""
        if not self.is_open or (self.process is not None and self.process.dead):
            return
        self.is_open = False
        for one in self.subscriptions:
            one.is_known = False
        self.to_client.clear()
        if self.broker.rng.random() < 0.5:
            self.to_server.clear()
        self.broker.spawn(self.loop, self._come_back(outage))

    async def _come_back(self, outage: float) -> None:
        await self.settings["error_cb"](ConnectionResetError("reset"))
        await self.settings["disconnected_cb"]()
        await asyncio.sleep(self.settings["reconnect_time_wait"] + outage)
        while self.broker.is_down:  # noqa: ASYNC110 - as a client does it
            await asyncio.sleep(self.settings["reconnect_time_wait"])
        if self.is_closed or (self.process is not None and self.process.dead):
            return
        self.is_open = True
        for one in self.subscriptions:
            one.is_known = True
        self.to_server.go_on()
        await self.settings["reconnected_cb"]()

    async def close(self) -> None:
        self.is_closed, self.is_open = True, False
        self.broker.left(self)
        if self._reading is not None:
            self._reading.cancel()
        for one in self.subscriptions:
            one.end()


def _message(subject: str, reply: str, body: bytes, headers: Headers | None) -> Msg:
    return Msg(_client=None, subject=subject, reply=reply, data=body, headers=dict(headers) if headers else None)  # type: ignore[arg-type]


def _head(headers: Headers | None) -> bytes:
    """Headers as the protocol has them: the server's status is in the first line."""
    if not headers:
        return b""
    status = f" {headers['Status']}" if "Status" in headers else ""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Status")
    return f"NATS/1.0{status}\r\n{lines}\r\n".encode()


def _headers(raw: bytes) -> dict[str, str]:
    first, *lines = raw.decode().split("\r\n")
    found = {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    status = first.removeprefix("NATS/1.0").strip()
    return {"Status": status, **found} if status else found
