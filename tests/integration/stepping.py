"""One step of one block, and a server on this machine for it to talk to."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps.port import Block, BlockContext


def context(seconds: float = 10.0, key: str = "assignment-1/0") -> BlockContext:
    return BlockContext("assignment-1", 1, key, seconds)


async def step(block: Block, seconds: float = 10.0, /, **inputs: Any) -> StepResult:
    return await block.run(inputs, context(seconds))


def run(block: Block, seconds: float = 10.0, /, **inputs: Any) -> StepResult:
    """One step in a loop of its own; the block is closed after it."""

    async def main() -> StepResult:
        try:
            return await step(block, seconds, **inputs)
        finally:
            await block.close()

    return asyncio.run(main())


def refused(result: StepResult, code: ErrorCode, words: str = "") -> None:
    """Check that a step was refused with this code, and that these words are in its message."""
    assert result.error_code is code, result
    assert words in result.error_message


@dataclass(slots=True)
class Seen:
    """A request as the server got it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"fine"


class Loopback(ThreadingHTTPServer):
    """Answers by a function of the request, and remembers what it was asked."""

    daemon_threads = True
    request_queue_size = 256  # with five, a sixth caller at once waits seconds for its connection

    def __init__(self, answer: Callable[[Seen], Reply], *, trust: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.seen: list[Seen] = []
        self.connections = 0
        self.scheme = "http"
        if trust is not None:
            self.scheme = "https"
            self.socket = trust.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Loopback
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        names = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, self.path, names, self.rfile.read(length))
        self.server.seen.append(seen)
        reply = self.server.answer(seen)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _any

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the standard library's
        """The test tells what happened."""
