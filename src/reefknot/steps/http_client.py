"""
`HttpClient`: one request and its response, over a connection to a checked address.

`CheckedBackend` alone makes connections: it resolves the name once, checks all answers and connects to a checked one;
Host and the TLS name stay the original. So there is no second look-up to lie to. No cookies, no proxies, no redirects,
no retries, and nothing is read from the environment.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any

import httpcore2
import httpx2
from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.steps.addresses import Address, AddressRules, Forbidden, Unreachable, Url, ipv4_of, literal_address

Resolve = Callable[[str, int], Awaitable[list[str]]]
MOST_ANSWERS = 64
MOST_ADDRESSES_TRIED = 4
CONNECT_S = 3.0
"""How long a connection may take to be made: a host that does not answer by then is down."""
MOST_CONNECTIONS = 64


class HttpResponse(Struct, frozen=True):
    """Status and headers, and the body as it comes over the wire."""

    status: int
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes]

    def header(self, name: str) -> str:
        return ", ".join(value for key, value in self.headers if key == name)


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """The network under the client: every connection is made here, to a checked address."""

    def __init__(self, rules: AddressRules, resolve: Resolve | None = None) -> None:
        self._rules = rules
        self._resolve = resolve or self._ask_system
        self._net = httpcore2.AnyIOBackend()
        # Threads of its own: a name that hangs delays nothing else.
        self._threads = ThreadPoolExecutor(8, "reefknot-resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception | None = None
        for address in (await self._checked_addresses(host, port))[:MOST_ADDRESSES_TRIED]:
            try:
                return await self._net.connect_tcp(str(address), port, timeout)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _checked_addresses(self, host: str, port: int) -> list[Address]:
        """The addresses of a host; `Forbidden` unless all of them are allowed."""
        self._rules.check_host(host, port)
        known = literal_address(host)
        if known is not None:
            return [known]
        try:
            answers = await self._resolve(host, port)
            addresses = list(dict.fromkeys(ipv4_of(ip_address(one)) for one in answers[:MOST_ANSWERS]))
        except (OSError, UnicodeError, ValueError) as error:
            raise Unreachable(f"{host} could not be resolved: {error}") from error
        if not addresses:
            raise Unreachable(f"{host} has no address")
        for address in addresses:
            self._rules.check_address(host, address, port)
        return addresses

    async def _ask_system(self, host: str, port: int) -> list[str]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return [str(entry[4][0]) for entry in found]

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise Forbidden("no Unix sockets")

    async def sleep(self, seconds: float) -> None:
        await self._net.sleep(seconds)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class HttpClient:
    """A client that keeps and reuses its connections."""

    def __init__(self, rules: AddressRules, *, resolve: Resolve | None = None, ca_file: str = "") -> None:
        self._backend = CheckedBackend(rules, resolve)
        self._tls = _tls_context(ca_file)
        self._pool: httpcore2.AsyncConnectionPool | None = None

    def _connections(self) -> httpcore2.AsyncConnectionPool:
        if self._pool is None:
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=self._tls,
                max_connections=MOST_CONNECTIONS,
                max_keepalive_connections=MOST_CONNECTIONS,
                keepalive_expiry=10.0,
                network_backend=self._backend,
            )
        return self._pool

    @asynccontextmanager
    async def send(
        self, url: Url, *, method: str, headers: list[tuple[str, str]], body: bytes, seconds: float
    ) -> AsyncIterator[HttpResponse]:
        """Send one request; the body can be read inside the block. The caller bounds the whole in time."""
        target = httpcore2.URL(
            scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode()
        )
        timeouts = {**dict.fromkeys(("read", "write", "pool"), seconds), "connect": min(seconds, CONNECT_S)}
        headers = [("Host", url.authority), *headers]
        request = httpcore2.Request(
            method, target, headers=headers, content=body or None, extensions={"timeout": timeouts}
        )
        response: httpcore2.Response | None = None
        parts: AsyncGenerator[bytes, None] | None = None
        try:
            response = await self._connections().handle_async_request(request)
            names = [(key.decode("latin-1").lower(), value.decode("latin-1")) for key, value in response.headers]
            parts = _parts(response)
            yield HttpResponse(response.status, names, parts)
        except httpcore2.TimeoutException as error:
            text = f"{url.endpoint} did not answer in time ({_reason(error)})"
            raise Unreachable(text, ErrorCode.connection_timeout) from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError, ssl.SSLError, OSError) as error:
            raise Unreachable(f"{url.endpoint}: {_reason(error)}") from error
        finally:
            if parts is not None:
                await parts.aclose()
            if response is not None:
                await response.aclose()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
            self._pool = None
        self._backend.close()


def _tls_context(ca_file: str) -> ssl.SSLContext:
    if not ca_file:
        return httpx2.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        text = f"`blocks.http.ca_file` {ca_file} cannot be used: {error}; name a file of PEM certificates"
        raise Unreachable(text) from error


async def _parts(response: httpcore2.Response) -> AsyncGenerator[bytes, None]:
    async for part in response.aiter_stream():
        yield part


def _reason(error: BaseException) -> str:
    """The text of the error, or of the first one behind it that has any."""
    link: BaseException | None = error
    while link is not None:
        if str(link):
            return str(link)
        link = link.__cause__ or link.__context__
    return type(error).__name__
