"""
Messages on their way into the file.

A sender does not wait for the disk: what it hands in goes with the next transaction of this process, together with
whatever else is written then. It waits when so much is on its way that the disk cannot keep up, and when somebody who
listens to the same subject has no room. A message that could not be written is told in the log; nothing that must not
be lost is in a message alone.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from reefknot.engines.sqlite import messages as rows
from reefknot.engines.sqlite.link import Link
from reefknot.engines.sqlite.wake import until
from reefknot.errors import ReefknotError
from reefknot.execution import report

MOST = 256
"""Messages that may be on their way at once."""
AGAIN_S = 1.0
"""How soon it is tried again when nothing tells that there is room."""
TOPIC = "message"

Named = tuple[str, rows.Message]
"""What the sender calls it, and the message."""


class Outgoing:
    """What one end has sent and not yet written. `failed` hears the names of those that never will be."""

    def __init__(self, link: Link, failed: Callable[[str], None]) -> None:
        self._link = link
        self._failed = failed
        self._on_the_way = 0
        self._refused: deque[Named] = deque()
        self._full: Counter[str] = Counter()
        """By subject: how many were refused because somebody has no room."""
        self._trying: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()

    async def put(self, name: str, message: rows.Message) -> None:
        """Hand it in, as soon as there is room."""
        while self._on_the_way >= MOST or self._full[message[1]]:
            self._moved.clear()
            await self._moved.wait()
        self._send((name, message))

    def _send(self, one: Named) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = self._link.write(rows.publishes, one[1])
        self._on_the_way += 1
        future.add_done_callback(partial(self._written, one))
        return future

    def _written(self, one: Named, future: asyncio.Future[bool]) -> None:
        self._on_the_way -= 1
        self._moved.set()
        name, message = one
        error = None if future.cancelled() else future.exception()
        if error is not None:
            said = report.printable(f"to {message[1]}: {type(error).__name__}: {error}", most=300)
            report.logger().error("a message was not written (%s)", said)
            self._failed(name)
        elif future.cancelled() or not future.result():
            self._refused.append(one)
            self._full[message[1]] += 1
            if self._trying is None:
                loop = asyncio.get_running_loop()
                self._trying = loop.create_task(self._try_again(), name="messages that somebody has no room for")

    async def _try_again(self) -> None:
        try:
            while self._refused:
                with self._link.listening(TOPIC) as change:
                    again = [self._refused.popleft() for _ in range(len(self._refused))]
                    await self._sent(again)
                    for _, message in again:  # whoever was refused anew has been counted anew
                        self._full[message[1]] -= 1
                    self._full += Counter()
                    self._moved.set()
                    if self._refused:
                        await until(change, AGAIN_S)
        finally:
            self._trying = None

    async def _sent(self, again: list[Named]) -> None:
        for at, one in enumerate(again):
            try:
                future = self._send(one)
            except ReefknotError as error:  # the store is gone: for all of them alike
                for name, _ in again[at:]:
                    self._failed(name)
                said = report.printable(f"{type(error).__name__}: {error}", most=300)
                report.logger().error("%d messages were not written (%s)", len(again) - at, said)
                break
        else:
            await asyncio.wait([future])  # one transaction takes them in their order

    async def close(self, seconds: float) -> None:
        """Write what is on its way, for at most so long. What nobody has room for is dropped."""
        if self._trying is not None:
            self._trying.cancel()
        try:
            async with asyncio.timeout(seconds):
                while self._on_the_way:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return
