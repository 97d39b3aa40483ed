"""
Real HTTP clients against a real server on this machine.

What they raise is understood by shape and name: httpx2, requests, aiohttp and urllib, with the default judge and with
`rk.http_errors`. The waits are virtual; nothing here waits but for a read that times out.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Unpack

import aiohttp
import httpx2
import pytest
import requests

import reefknot as rk
from reefknot import clock as timing
from reefknot.retrying.types import RetryKeywords
from reefknot.runtime.clocks import VirtualClock

READ_TIMEOUT = 10.0
TLS = ssl.create_default_context()  # made once: it takes longer than everything else here
Reply = tuple[int, dict[str, str]]
Fetch = Callable[[str], str]


class Server(ThreadingHTTPServer):
    """Gives the prepared replies in their order, then 200. A reply of 0 is never sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = []
        self.requests = 0
        self.let_go = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        status, headers = self.server.replies.pop(0) if self.server.replies else (200, {})
        if status == 0:
            self.server.let_go.wait(10)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "2")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.let_go.set()
        running.shutdown()
        thread.join(5)


def by_httpx2(url: str) -> str:
    response = httpx2.get(url, timeout=READ_TIMEOUT, trust_env=False, verify=TLS)
    response.raise_for_status()
    return response.text


def by_requests(url: str) -> str:
    with requests.Session() as session:
        session.trust_env = False
        response = session.get(url, timeout=READ_TIMEOUT)
        response.raise_for_status()
        return response.text


def by_urllib(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=READ_TIMEOUT) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise


async def by_httpx2_async(url: str) -> str:
    async with httpx2.AsyncClient(timeout=READ_TIMEOUT, trust_env=False, verify=TLS) as client:
        response = await client.get(url)
        response.raise_for_status()
        return response.text


async def by_aiohttp(url: str) -> str:
    limit = aiohttp.ClientTimeout(sock_read=READ_TIMEOUT)
    async with aiohttp.ClientSession(timeout=limit) as session, session.get(url, raise_for_status=True) as response:
        return await response.text()


def awaited(fetch: Callable[[str], Awaitable[str]], **options: Unpack[RetryKeywords]) -> Fetch:
    """An async client's function under retry, from plain code; the virtual clock goes along in the context."""
    call = rk.retry(**options)(fetch)

    async def run(url: str) -> str:
        return await call(url)

    return lambda url: asyncio.run(run(url))


CLIENTS: dict[str, Callable[..., Fetch]] = {
    "httpx2": lambda **options: rk.retry(**options)(by_httpx2),
    "requests": lambda **options: rk.retry(**options)(by_requests),
    "urllib": lambda **options: rk.retry(**options)(by_urllib),
    "httpx2 async": lambda **options: awaited(by_httpx2_async, **options),
    "aiohttp": lambda **options: awaited(by_aiohttp, **options),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Callable[..., Fetch]:
    return CLIENTS[request.param]


@pytest.mark.parametrize("on", [None, rk.http_errors], ids=["default", "http_errors"])
def test_503_is_retried_and_then_it_works(
    client: Callable[..., Fetch], on: Any, server: Server, virtual_time: VirtualClock
) -> None:
    server.replies = [(503, {}), (500, {})]
    assert client(on=on)(server.url) == "ok"
    assert (server.requests, len(virtual_time.waits)) == (3, 2)


@pytest.mark.parametrize("on", [None, rk.http_errors], ids=["default", "http_errors"])
def test_404_is_not_retried(client: Callable[..., Fetch], on: Any, server: Server, virtual_time: VirtualClock) -> None:
    server.replies = [(404, {})] * 4
    with pytest.raises(Exception, match="404") as raised:
        client(on=on)(server.url)
    assert server.requests == 1
    assert "not retryable" in raised.value.__notes__[0]


def test_429_waits_as_many_seconds_as_it_says(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock
) -> None:
    server.replies = [(429, {"Retry-After": "40"})]
    assert client()(server.url) == "ok"
    assert [40 <= wait <= 41 for wait in virtual_time.waits] == [True]


def test_429_waits_until_the_date_it_says(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock
) -> None:
    date = format_datetime(datetime.fromtimestamp(timing.wall() + 90, UTC), usegmt=True)
    server.replies = [(429, {"Retry-After": date})]
    assert client(on=rk.http_errors)(server.url) == "ok"
    assert [89 <= wait <= 91 for wait in virtual_time.waits] == [True]


def test_429_with_a_hint_beyond_the_bound_ends_at_once(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock
) -> None:
    server.replies = [(429, {"Retry-After": "301"})]
    with pytest.raises(Exception, match="429") as raised:
        client()(server.url)
    assert (server.requests, virtual_time.waits) == (1, [])
    assert "the server asked for 301 s" in raised.value.__notes__[0]


def test_403_with_a_spent_rate_limit_waits_until_its_reset(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock
) -> None:
    reset = str(int(timing.wall()) + 60)
    server.replies = [(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset})]
    assert client()(server.url) == "ok"
    assert [59 <= wait <= 61 for wait in virtual_time.waits] == [True]


def test_control_403_without_it_is_not_retried(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock
) -> None:
    server.replies = [(403, {"X-RateLimit-Remaining": "3"})]
    with pytest.raises(Exception, match="403"):
        client()(server.url)
    assert server.requests == 1


@pytest.mark.parametrize("on", [None, rk.http_errors], ids=["default", "http_errors"])
def test_a_refused_connection_is_retried(client: Callable[..., Fetch], on: Any, virtual_time: VirtualClock) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else gets the port
        with pytest.raises(Exception) as raised:  # noqa: PT011 - each client has its own
            client(on=on)(f"http://127.0.0.1:{nobody.getsockname()[1]}/")
    assert len(virtual_time.waits) == 3
    assert "all attempts are spent (4 attempts" in raised.value.__notes__[0]


def test_a_read_that_times_out_is_retried(
    client: Callable[..., Fetch], server: Server, virtual_time: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a good answer may take too long as well; the next attempt gets it."""
    monkeypatch.setitem(globals(), "READ_TIMEOUT", 0.05)
    server.replies = [(0, {})]
    assert client(attempts=10)(server.url) == "ok"
    assert server.requests == len(virtual_time.waits) + 1 >= 2
