"""The http block is no way into the network: the interpreter's audit events count each connection and refuse it."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps.addresses import HttpSettings, read_allowed
from reefknot.steps.http import HttpRequest
from tests.integration.stepping import Loopback, Reply, step

PUBLIC = "93.184.216.34"
TARGETS = ("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "172.16.0.1", "100.64.0.1", "0.0.0.0")


def in_other_digits(text: str, zero: int, nought: str = "") -> str:
    return "".join(
        (nought if one == "0" and nought else chr(zero + int(one))) if one.isdigit() else one for one in text
    )


def spellings(address: str) -> Iterator[str]:
    """One IPv4 address in the ways that some program or other understands."""
    number = int(IPv4Address(address))
    a, b, c, d = address.split(".")
    high, low = f"{number >> 16:x}", f"{number & 0xFFFF:x}"
    yield from (address, f"{address}.", str(number), hex(number), f"0{number:o}", hex(number).upper())
    yield from (f"{a}.{b}.{int(c) * 256 + int(d)}", f"{a}.{int(b) * 65536 + int(c) * 256 + int(d)}")
    yield from (
        ".".join(hex(int(part)) for part in (a, b, c, d)),
        f"{hex(int(a))}.{int(b) * 65536 + int(c) * 256 + int(d)}",
    )
    yield from (".".join(f"0{int(part):o}" for part in (a, b, c, d)), ".".join(part.zfill(3) for part in (a, b, c, d)))
    yield from (
        in_other_digits(address, 0xFF10),
        in_other_digits(address, 0x245F, "⓪"),
        in_other_digits(address, 0x0660),
    )
    yield from (address.replace(".", "。"), address.replace(".", "．"), address.replace(".", "%2e"))
    yield from (f"[::ffff:{address}]", f"[::ffff:{high}:{low}]", f"[0:0:0:0:0:ffff:{high}:{low}]", f"[::{address}]")
    yield from (
        f"[64:ff9b::{address}]",
        f"[64:ff9b::{high}:{low}]",
        f"[2002:{high}:{low}::]",
        f"[2002:{high}:{low}::1]",
    )
    yield from (f"[2001:0:{high}:{low}::1]", f"[fe80::5efe:{high}:{low}]", f"[2a00::5efe:{high}:{low}]")
    yield from (f"{address}.nip.example", f"{address.replace('.', '-')}.nip.example")


HOSTS = (
    *("localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "a.localhost", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "lo\u00adcalhost"),
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::1%25lo]", "[::1%lo]", "[fe80::1]", "[fc00::1]", "[fd00:ec2::254]"),
    *("[ff02::1]", "[fec0::1]", "[2001:db8::1]", "[64:ff9b:1::1]", "[100::1]", "[3fff::1]", "[5f00::1]"),
    *("metadata.google.internal", "metadata", "kubernetes.default.svc", "printer.local", "router.lan", "db.internal"),
    *("224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.0.192", "168.63.129.16"),
    *("mixed.example", "inside.example", "mapped.example", "nat64.example", "sixtofour.example", "empty.example"),
)
WHOLE = (
    *("http://example.com@127.0.0.1/", "http://127.0.0.1@example.com/", "http://u:p@10.0.0.1/"),
    *("http://a@b@127.0.0.1/", "http://127.0.0.1\\@example.com/", "http://example.com\\@127.0.0.1/"),
    *("http://127.0.0.1#@example.com/", "http://127.0.0.1:80\\@example.com:80/", "http://127.0.0.1?@example.com/"),
    *("http:///127.0.0.1/", "http:127.0.0.1", "http:/127.0.0.1/", "//127.0.0.1/", "http://\t127.0.0.1/"),
    *("http://127.0.0.1\t/", "http://127.0.0.1\n.example.com/", "http://\u202e127.0.0.1/", "http://127.0.0.1:080/"),
    *("http://127.0.0.1:99999/", "http://127.0.0.1:22/", "file:///etc/passwd", "file://127.0.0.1/etc/passwd"),
    *("ftp://127.0.0.1/", "gopher://127.0.0.1:6379/_INFO", "dict://127.0.0.1:11211/stat", "ldap://127.0.0.1/"),
    *("unix:/var/run/docker.sock", "http+unix://%2fx.sock/", "jar:http://127.0.0.1!/", "data:text/plain,x"),
    *("javascript:1", "ws://127.0.0.1/", "HTTP://127.0.0.1/", "http://"),
)
CORPUS = (
    *(f"http://{host}/" for address in TARGETS for host in spellings(address)),
    *(f"https://{host}:8443/x?y#z" for host in HOSTS),
    *WHOLE,
)
NAMES = {
    "mixed.example": [PUBLIC, "10.0.0.1"],
    "inside.example": ["192.168.0.7"],
    "public.example": [PUBLIC],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "empty.example": [],
    "sixtofour.example": ["2002:7f00:1::"],
}


async def obliging(host: str, port: int) -> list[str]:
    """A resolver that understands all too much, as real ones do."""
    if host in NAMES:
        return NAMES[host]
    plain = host.removesuffix(".nip.example").replace("-", ".")
    try:
        return [socket.inet_ntoa(socket.inet_aton(plain))]
    except (OSError, UnicodeError):
        return ["127.0.0.1"]  # localhost, metadata and everything else of the inside


class Counter:
    """Every connection of this process while it is armed. Audit hooks stay for good, so there is one."""

    def __init__(self) -> None:
        self.armed = False
        self.let_through: set[int] = set()
        self.connected: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "socket.connect" or not self.armed or not isinstance(args[1], tuple):
            return
        host, port = args[1][0], args[1][1]
        if port not in self.let_through:
            self.connected.append(str(host))
            raise ConnectionRefusedError("counted, and not made")


COUNTER = Counter()
sys.addaudithook(COUNTER)


@contextmanager
def counted(*let_through: int) -> Iterator[list[str]]:
    COUNTER.connected, COUNTER.let_through, COUNTER.armed = [], set(let_through), True
    try:
        yield COUNTER.connected
    finally:
        COUNTER.armed = False


async def results(block: HttpRequest, urls: list[str]) -> dict[str, StepResult]:
    try:
        return {url: await step(block, 5.0, url=url) for url in urls}
    finally:
        await block.close()


def test_no_url_of_the_corpus_reaches_a_socket() -> None:
    with counted() as connected:
        answers = asyncio.run(results(HttpRequest(resolve=obliging), list(CORPUS)))
    assert len(set(CORPUS)) >= 200
    assert connected == []
    assert [url for url, answer in answers.items() if answer.ok] == []
    codes = {answer.error_code for answer in answers.values()}
    assert codes <= {ErrorCode.permission_denied, ErrorCode.invalid_input, ErrorCode.network_error}


def test_a_public_address_is_connected_to() -> None:
    """The control of the counting: what may be called does reach the socket."""
    names = ["http://public.example/", "https://public.example:8443/"]
    urls = [f"http://{PUBLIC}/", *names, f"http://[64:ff9b::{PUBLIC}]/"]
    with counted() as connected:
        asyncio.run(results(HttpRequest(resolve=obliging), urls))
    assert connected == [PUBLIC, PUBLIC, PUBLIC, str(ip_address(f"64:ff9b::{PUBLIC}"))]


def naive(url: str) -> str | None:
    """The usual check: resolve, and ask the standard library. Gives where it would connect to."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not host:
        return None
    try:
        answers = [str(ip_address(host))]
    except ValueError:
        answers = asyncio.run(obliging(host, 80))
    return answers[0] if answers and ip_address(answers[0]).is_global else None


def test_a_naive_check_lets_some_of_the_corpus_through() -> None:
    """The control of the corpus: it holds what the usual check overlooks."""
    let_through = [address for address in map(naive, CORPUS) if address]
    assert len(let_through) >= 10


def test_no_redirect_reaches_another_socket() -> None:
    """The same corpus once more, behind a server that may be called."""
    targets = [url for url in CORPUS if url.isprintable() and url.isascii()]
    with Loopback(lambda seen: Reply(302, {"Location": targets[int(seen.path[1:])]})) as server:
        settings = HttpSettings((read_allowed(f"127.0.0.1:{server.port}"),))
        urls = [server.url(f"/{number}") for number in range(len(targets))]
        with counted(server.port) as connected:
            answers = asyncio.run(results(HttpRequest(settings, resolve=obliging), urls))

    assert len(server.seen) >= len(urls) >= 150
    assert connected == []
    assert [url for url, answer in answers.items() if answer.ok] == []


class Rebinding:
    """Answers a public address at first and the inside after it, over and over."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        return [PUBLIC] if self.asked % 2 else ["127.0.0.1"]


@pytest.mark.real_time
async def test_a_rebinding_resolver_is_asked_once_and_its_answer_used() -> None:
    resolver = Rebinding()
    block = HttpRequest(resolve=resolver)
    with counted() as connected:
        steps = [await step(block, 5.0, url=f"http://a{number}.rebind.example/") for number in range(100)]
        await block.close()
    assert resolver.asked == 100
    assert connected == [PUBLIC] * 50
    assert [one.error_code for one in steps] == [ErrorCode.network_error, ErrorCode.permission_denied] * 50


async def test_looking_twice_would_be_rebound() -> None:
    """The control: who checks one answer and connects by another gets the inside."""
    resolver = Rebinding()
    assert await resolver("a.rebind.example", 80) == [PUBLIC], "this one was checked"
    assert await resolver("a.rebind.example", 80) == ["127.0.0.1"], "and this one is connected to"


@pytest.mark.parametrize("listed", ["127.0.0.1:{other}", "localhost", "10.0.0.0/8"])
def test_a_listed_place_opens_no_other(listed: str) -> None:
    with Loopback(lambda seen: Reply()) as server:
        allow = read_allowed(listed.format(other=server.port + 1 if server.port < 65535 else 1))
        block = HttpRequest(HttpSettings((allow,)))
        answers = asyncio.run(results(block, [server.url()]))
    assert [answer.error_code for answer in answers.values()] == [ErrorCode.permission_denied]
    assert server.connections == 0
