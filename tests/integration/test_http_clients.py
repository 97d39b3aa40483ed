"""
Real HTTP clients against a real server on this machine; what they raise is understood by shape and name.

The waits are virtual; nothing here waits but for a read that times out.
"""

import asyncio
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, Unpack

import aiohttp
import httpx2
import pytest
import requests

import reefknot as rk
from reefknot import clock as timing
from reefknot.retrying.types import RetryKeywords
from reefknot.runtime.clocks import VirtualClock
from tests.integration.stepping import Loopback, Reply, Seen

READ_TIMEOUT = 10.0
TLS = ssl.create_default_context()  # made once: it takes longer than everything else here
Fetch = Callable[[str], str]


class Server(Loopback):
    """Gives the prepared replies in their order, then 200. A reply of 0 does not come in time."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self.replies: list[Reply] = []
        self.let_go = threading.Event()

    def _next(self, seen: Seen) -> Reply:
        reply = self.replies.pop(0) if self.replies else Reply(body=b"ok")
        if reply.status == 0:
            self.let_go.wait(10)
            return Reply()
        return reply


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running
        running.let_go.set()


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


both_judges = pytest.mark.parametrize("on", [None, rk.http_errors], ids=["default", "http_errors"])


@both_judges
def test_503_is_retried(client: Callable[..., Fetch], on: Any, server: Server, virtual_time: VirtualClock) -> None:
    server.replies = [Reply(503), Reply(500)]
    assert client(on=on)(server.url()) == "ok"
    assert (len(server.seen), len(virtual_time.waits)) == (3, 2)


@both_judges
@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (Reply(404), "not retryable"),
        (Reply(429, {"Retry-After": "301"}), "the server asked for 301 s"),
        (Reply(403, {"X-RateLimit-Remaining": "3"}), "not retryable"),
    ],
    ids=["404", "a hint beyond the bound", "control: 403 without a spent rate limit"],
)
def test_what_a_retry_does_not_help_ends_at_once(
    client: Callable[..., Fetch], on: Any, server: Server, virtual_time: VirtualClock, reply: Reply, note: str
) -> None:
    server.replies = [reply] * 4
    with pytest.raises(Exception, match=str(reply.status)) as raised:
        client(on=on)(server.url())
    assert (len(server.seen), virtual_time.waits) == (1, [])
    assert note in raised.value.__notes__[0]


@both_judges
@pytest.mark.parametrize(
    ("reply", "bounds"),
    [
        ((429, lambda: {"Retry-After": "40"}), (40, 41)),
        ((429, lambda: {"Retry-After": later(90)}), (89, 91)),
        ((403, lambda: {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(timing.wall()) + 60)}), (59, 61)),
    ],
    ids=["seconds", "a date", "the reset of a spent rate limit"],
)
def test_a_server_that_says_when_is_waited_for(
    client: Callable[..., Fetch],
    on: Any,
    server: Server,
    virtual_time: VirtualClock,
    reply: Any,
    bounds: tuple[int, int],
) -> None:
    status, headers = reply
    server.replies = [Reply(status, headers())]
    assert client(on=on)(server.url()) == "ok"
    assert [bounds[0] <= wait <= bounds[1] for wait in virtual_time.waits] == [True]


def later(seconds: int) -> str:
    return format_datetime(datetime.fromtimestamp(timing.wall() + seconds, UTC), usegmt=True)


@both_judges
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
    server.replies = [Reply(0)]
    assert client(attempts=10)(server.url()) == "ok"
    assert len(server.seen) == len(virtual_time.waits) + 1 >= 2
