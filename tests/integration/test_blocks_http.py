"""`http.request` against real servers on this machine."""

import asyncio
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from reefknot.core.classify import classify
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.steps.addresses import HttpSettings, read_allowed
from reefknot.steps.http import HARMLESS_HEADERS, HttpRequest
from tests.integration.stepping import Loopback, Reply, Seen, context, refused, run, step
from tests.pace import within


def settings(**more: Any) -> HttpSettings:
    return HttpSettings((read_allowed("127.0.0.1"), read_allowed("localhost")), **more)


def block(**more: Any) -> HttpRequest:
    return HttpRequest(settings(**more))


@contextmanager
def serving(answer: Callable[[Seen], Reply] | Reply) -> Iterator[Loopback]:
    with Loopback(answer if callable(answer) else lambda seen: answer) as server:
        yield server


def ask(reply: Reply, **inputs: Any) -> StepResult:
    with serving(reply) as server:
        return run(block(), url=server.url(), **inputs)


@pytest.mark.parametrize("reference", ["env:HOOK", "file:/run/secrets/hook", "config:alerts.webhook"])
def test_references_of_the_configuration_alone_are_resolved(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH_OF_ANOTHER", "http://127.0.0.1:9/")
    with serving(Reply(200, {}, b"heard")) as server:
        addresses = iter([None, server.url("/secret")])
        own = block(references={reference: lambda: next(addresses)})
        unread, heard = run(own, url=reference), run(own, url=reference)
        foreign = run(own, url="env:PATH_OF_ANOTHER")
        assert [one.path for one in server.seen] == ["/secret"]

    assert heard.outputs["body"] == "heard"
    refused(unread, ErrorCode.resource_unavailable, "cannot be read")
    refused(foreign, ErrorCode.resource_unavailable, "is not alerts.webhook of this worker's configuration")


def test_a_2xx_is_ok_with_status_headers_and_body() -> None:
    result = ask(Reply(201, {"X-One": "1"}, b"made"))
    assert result.status is StepStatus.OK
    assert (result.outputs["status_code"], result.outputs["body"]) == (201, "made")
    assert result.outputs["headers"]["x-one"] == "1"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 304])
def test_any_other_status_is_an_http_error_that_keeps_the_body(status: int) -> None:
    result = ask(Reply(status, {}, b"" if status == 304 else b"sorry"))
    assert (result.status, result.error_code) == (StepStatus.ERROR, ErrorCode.http_error)
    assert result.metadata["http_status_code"] == result.http_status == status
    assert result.outputs["body"] == ("" if status == 304 else "sorry")
    assert f"HTTP {status}" in result.error_message


def test_the_text_of_an_error_has_no_control_characters_of_the_server() -> None:
    result = ask(Reply(500, {}, "oops\x1b[2J\x00\x9b31m\u202egnp.exe\u2028end".encode()))
    assert result.error_message.isprintable()
    assert "oops\\x1b[2J\\x00\\x9b31m\\u202egnp.exe end" in result.error_message


@pytest.mark.parametrize(
    ("status", "headers", "bounds"),
    [
        (503, lambda: {"Retry-After": "7"}, (7, 7)),
        (
            429,
            lambda: {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(minutes=1), usegmt=True)},
            (50, 60),
        ),
        (403, lambda: {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()) + 120)}, (100, 120)),
    ],
    ids=["seconds", "a date", "the reset of a spent limit"],
)
def test_retry_after_is_heard(status: int, headers: Callable[[], dict[str, str]], bounds: tuple[float, float]) -> None:
    metadata = ask(Reply(status, headers())).metadata
    assert bounds[0] <= metadata["retry_after"] <= bounds[1]
    assert metadata.get("limit_reached", False) is (status == 403)


@pytest.mark.parametrize("reset", ["²", "٣", "1e9", "-1", "soon"])
def test_a_reset_that_is_no_number_is_no_hint(reset: str) -> None:
    """`"²".isdigit()` is true, and `int("²")` raises."""
    answer = f"HTTP/1.1 429 No\r\nX-RateLimit-Remaining: 0\r\nX-RateLimit-Reset: {reset}\r\nContent-Length: 0\r\n\r\n"

    def behave(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(answer.encode("latin-1" if reset == "²" else "utf-8"))

    with raw(behave) as port:
        result = run(block(), url=f"http://127.0.0.1:{port}/")

    assert (result.error_code, result.http_status) == (ErrorCode.http_error, 429)
    assert result.metadata == {"http_status_code": 429, "limit_reached": True}


def test_a_403_that_talks_of_a_rate_limit_is_one() -> None:
    result = ask(Reply(403, {}, b'{"message": "API rate limit exceeded"}'))
    failure = classify(result.error_message, code=result.error_code, http_status=result.http_status)
    assert failure.failure_type is FailureType.RATE_LIMITED


def test_the_idempotency_key_is_sent_unless_one_is_given() -> None:
    with serving(Reply()) as server:
        run(block(), url=server.url())
        run(block(), url=server.url(), headers={"Idempotency-Key": "mine"})
    assert [seen.headers["idempotency-key"] for seen in server.seen] == ["assignment-1/0", "mine"]


@pytest.mark.real_time
async def test_a_key_that_is_not_ascii_is_sent_as_its_hash() -> None:
    """An assignment may have any id; `Idempotency-Key` can only carry ASCII."""
    key, one = "Bestellung-Käse/0", block()
    with serving(Reply()) as server:
        assert (await one.run({"url": server.url()}, context(key=key))).ok
        await one.close()
        assert server.seen[0].headers["idempotency-key"] == sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('attachment; filename="Käse Öl.txt"', "attachment; filename*=UTF-8''K%C3%A4se%20%C3%96l.txt"),
        ("attachment; filename=日本.txt; size=3", "attachment; filename*=UTF-8''%E6%97%A5%E6%9C%AC.txt; size=3"),
        ('inline; filename="a;\\"ö\\".txt"', "inline; filename*=UTF-8''a%3B%22%C3%B6%22.txt"),
        ('attachment; filename="plain.txt"', 'attachment; filename="plain.txt"'),
    ],
)
def test_a_parameter_that_is_not_ascii_is_encoded(given: str, sent: str) -> None:
    with serving(Reply()) as server:
        assert run(block(), url=server.url(), headers={"Content-Disposition": given}).ok
    assert server.seen[0].headers["content-disposition"] == sent


@pytest.mark.parametrize(
    ("inputs", "body", "kind"),
    [
        ({"body": "täxt"}, "täxt".encode(), "text/plain; charset=utf-8"),
        ({"body": {"a": [1, None]}}, b'{"a":[1,null]}', "application/json"),
        ({"body_base64": b64encode(b"\x00\xff").decode()}, b"\x00\xff", "application/octet-stream"),
        ({"body": "a=1", "headers": {"Content-Type": "x/y"}}, b"a=1", "x/y"),
    ],
)
def test_a_body_is_text_or_json_or_bytes(inputs: dict[str, Any], body: bytes, kind: str) -> None:
    with serving(Reply()) as server:
        result = run(block(), url=server.url(), method="post", **inputs)
    assert result.ok
    assert [(seen.method, seen.body, seen.headers["content-type"]) for seen in server.seen] == [("POST", body, kind)]


def test_an_answer_that_is_no_text_comes_as_base64() -> None:
    assert ask(Reply(body=b"\xff\x00")).outputs["body_base64"] == "/wA="


@pytest.mark.real_time
async def test_connections_are_kept_between_steps() -> None:
    with serving(Reply()) as server:
        one = block()
        assert (await step(one, url=server.url())).ok
        assert (await step(one, url=server.url("/again"))).ok
        await one.close()
        assert (len(server.seen), server.connections) == (2, 1)


MANY = {f"a{n}": "b" for n in range(101)}


@pytest.mark.parametrize(
    ("inputs", "code", "words"),
    [
        ({}, ErrorCode.missing_required_field, "url: missing; accepted: http://HOST"),
        ({"url": 7}, ErrorCode.invalid_input, "url: 7 is not accepted"),
        ({"url": "nonsense"}, ErrorCode.invalid_input, "url: not a URL"),
        ({"url": "http://a.com", "colour": 1}, ErrorCode.invalid_input, "colour: no such input; accepted: url, method"),
        ({"url": "http://a.com", "method": "BREW"}, ErrorCode.invalid_input, "method: 'BREW' is not accepted"),
        ({"url": "http://a.com", "headers": []}, ErrorCode.invalid_input, "headers: [] is not accepted"),
        ({"url": "http://a.com", "headers": {"a b": "c"}}, ErrorCode.invalid_input, "headers: 'a b'"),
        ({"url": "http://a.com", "headers": {"A": "b\r\nC: d"}}, ErrorCode.invalid_input, "without line breaks"),
        ({"url": "http://a.com", "headers": {"X-Name": "Müller"}}, ErrorCode.invalid_input, "X-Name is not ASCII"),
        ({"url": "http://a.com", "headers": {"X-Name": "日本"}}, ErrorCode.invalid_input, "X-Name is not ASCII"),
        ({"url": "http://a.com", "headers": {"A": "b\x85c"}}, ErrorCode.invalid_input, "without line breaks"),
        ({"url": "http://a.com", "headers": {"Host": "b.com"}}, ErrorCode.invalid_input, "Host is set by the block"),
        ({"url": "http://a.com", "headers": {"Transfer-Encoding": "chunked"}}, ErrorCode.invalid_input, "Transfer-Enc"),
        ({"url": "http://a.com", "headers": MANY}, ErrorCode.invalid_input, "at most 100"),
        ({"url": "http://a.com", "headers": {"a": "b" * 70_000}}, ErrorCode.invalid_input, "larger than 65536"),
        ({"url": "http://a.com", "body": "a", "body_base64": "YQ=="}, ErrorCode.invalid_input, "one of them"),
        ({"url": "http://a.com", "timeout_ms": 0}, ErrorCode.invalid_input, "timeout_ms: 0"),
        ({"url": "http://10.0.0.1/"}, ErrorCode.permission_denied, "url: 10.0.0.1 is not a public address"),
        ({"url": "ftp://a.com/"}, ErrorCode.permission_denied, "url: the scheme 'ftp'"),
    ],
)
def test_bad_inputs_are_refused_by_name(inputs: dict[str, Any], code: ErrorCode, words: str) -> None:
    refused(run(block(), **inputs), code, words)


def redirecting(*targets: str, status: int = 302) -> Callable[[Seen], Reply]:
    """/0 leads to the first target, /1 to the second …"""
    there = Reply(body=b"there")
    return lambda seen: Reply(status, {"Location": targets[int(seen.path[1:])]}) if seen.path[1:].isdigit() else there


def test_three_redirects_are_followed_and_a_fourth_is_not() -> None:
    with serving(redirecting("/1", "/2", "/3", "/end")) as server:
        assert run(block(), url=server.url("/1")).outputs["body"] == "there"
        server.seen.clear()
        refused(run(block(), url=server.url("/0")), ErrorCode.execution_failed, "more than 3 redirects")
        assert len(server.seen) == 4


CREDENTIALS = [
    *("Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "X-Auth-Token", "X-Amz-Security-Token"),
    *("PRIVATE-TOKEN", "X-Vault-Token", "X-Functions-Key", "Ocp-Apim-Subscription-Key", "X-Goog-Api-Key"),
    *("DD-API-KEY", "DD-APPLICATION-KEY", "X-Shopify-Access-Token", "X-CSRF-Token", "X-Access", "X-MBX-APIKEY"),
    *("CF-Access-Client-Id", "CF-Access-Client-Secret", "X-RapidAPI-Key", "apikey", "Api_Key", "X-Auth-User"),
    *("X-Auth-Email", "X-Client-Cert", "X-Parse-Session", "X-Figma-Key", "X-Plex-Identity", "X-Signed"),
    *("Idempotency-Key"),
]


def test_no_header_but_the_harmless_ones_follows_to_another_origin() -> None:
    harmless = {"Accept": "text/csv", "Accept-Language": "de", "User-Agent": "shop/1"}
    with serving(redirecting("/end")) as other, serving(redirecting(other.url("/end"))) as server:
        run(block(), url=server.url("/0"), headers=dict.fromkeys(CREDENTIALS, "hush") | harmless)
    sent = other.seen[0].headers
    assert "hush" not in sent.values()
    assert {name: sent[name.lower()] for name in harmless} == harmless
    assert set(sent) <= HARMLESS_HEADERS | {"host", "content-length"}


def test_the_type_of_a_body_follows_with_it() -> None:
    with serving(redirecting("/end")) as other, serving(redirecting(other.url("/end"), status=307)) as server:
        run(block(), url=server.url("/0"), method="POST", body={"a": 1})
    assert (other.seen[0].body, other.seen[0].headers["content-type"]) == (b'{"a":1}', "application/json")


def test_within_an_origin_all_headers_are_sent_again() -> None:
    """The control: it is the other origin that makes them go."""
    with serving(redirecting("/end")) as server:
        run(block(), url=server.url("/0"), headers=dict.fromkeys(CREDENTIALS, "hush"))
    assert {server.seen[1].headers[name.lower()] for name in CREDENTIALS} == {"hush"}


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [(301, "GET", b""), (302, "GET", b""), (303, "GET", b""), (307, "POST", b"hello"), (308, "POST", b"hello")],
)
def test_a_redirected_post_goes_on_as_its_status_says(status: int, method: str, body: bytes) -> None:
    with serving(redirecting("/end", status=status)) as server:
        run(block(), url=server.url("/0"), method="POST", body="hello")
    assert (server.seen[1].method, server.seen[1].body) == (method, body)


def test_an_answer_beyond_the_limit_is_an_error_and_a_failure_keeps_its_status_and_its_beginning() -> None:
    with serving(lambda seen: Reply(int(seen.path[1:]), body=b"x" * 2000)) as server:
        answer, failure = (run(block(max_response_bytes=1000), url=server.url(path)) for path in ("/200", "/503"))
    refused(answer, ErrorCode.execution_failed, "larger than 1000 bytes")
    assert (failure.error_code, failure.http_status) == (ErrorCode.http_error, 503)
    assert failure.outputs["body"] == "x" * 1000


def test_too_many_headers_are_refused() -> None:
    refused(ask(Reply(200, {f"X-{n}": "1" for n in range(300)})), ErrorCode.execution_failed, "headers")


@contextmanager
def raw(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does to each connection what it is told."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                behave(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def drip(connection: socket.socket, first: bytes) -> None:
    """A byte at a time, forever."""
    connection.sendall(first)
    while True:
        connection.sendall(b"a")
        time.sleep(0.02)  # the server's own pace; the test waits for the block's deadline


def hang(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


@pytest.mark.parametrize(
    "behave",
    [
        hang,
        lambda connection: drip(connection, b"HTTP/1.1 200 OK\r\nX: "),
        lambda connection: drip(connection, b"HTTP/1.1 200 OK\r\n\r\n"),
        lambda connection: drip(connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"),
    ],
    ids=["silence", "endless header", "endless body", "endless chunk"],
)
def test_nothing_hangs_past_the_attempt(behave: Callable[[socket.socket], None]) -> None:
    with raw(behave) as port:
        result = within(1.3, lambda: run(block(), 0.3, url=f"http://127.0.0.1:{port}/"))
    assert result.error_code is ErrorCode.connection_timeout


@pytest.mark.real_time
async def test_requests_that_were_given_up_leave_room_for_others() -> None:
    """More of them than there are connections in the pool."""
    with raw(hang) as port, serving(Reply()) as server:
        one = block()
        await asyncio.gather(*(step(one, 0.2, url=f"http://127.0.0.1:{port}/") for _ in range(100)))
        answers = await asyncio.gather(*(step(one, 5.0, url=server.url()) for _ in range(100)))
        await one.close()
        assert all(answer.ok for answer in answers)


def test_an_attempt_without_a_limit_has_none() -> None:
    with serving(Reply()) as server:
        assert run(block(), float("inf"), url=server.url()).ok


def test_its_own_time_limit_is_a_connection_timeout() -> None:
    with raw(hang) as port:
        result = run(block(), 30.0, url=f"http://127.0.0.1:{port}/", timeout_ms=100)
    refused(result, ErrorCode.connection_timeout, "0.1 s")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"y" * 200_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["nothing", "cut", "another protocol", "a header without end", "bad chunk"],
)
def test_a_broken_answer_is_a_network_error(answer: bytes) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with raw(behave) as port:
        result = run(block(), url=f"http://127.0.0.1:{port}/")

    assert result.error_code is ErrorCode.network_error, result


def test_nobody_there_is_a_network_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert run(block(), url=f"http://127.0.0.1:{port}/").error_code is ErrorCode.network_error


def test_a_name_without_an_address_is_a_network_error() -> None:
    async def nobody(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    result = run(HttpRequest(settings(), resolve=nobody), url="http://nobody.example/")

    refused(result, ErrorCode.network_error, "could not be resolved")


CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""For localhost alone, signed by itself, valid until 2120; its key is beside it and guards nothing."""


def trusted() -> ssl.SSLContext:
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(CERTIFICATE)
    return trust


@pytest.fixture
def secured() -> Iterator[Loopback]:
    with Loopback(lambda seen: Reply(body=seen.headers["host"].encode()), trust=trusted()) as server:
        yield server


def test_tls_is_checked_against_the_name_not_the_address(secured: Loopback) -> None:
    """The connection goes to 127.0.0.1, and the certificate is for localhost."""
    result = run(block(ca_file=str(CERTIFICATE)), url=secured.url(host="localhost"))
    assert result.outputs["body"] == f"localhost:{secured.port}"


def test_a_certificate_for_another_name_or_of_an_unknown_authority_is_refused(secured: Loopback) -> None:
    other = run(block(ca_file=str(CERTIFICATE)), url=secured.url(host="127.0.0.1"))
    refused(other, ErrorCode.network_error, "certificate")
    refused(run(block(), url=secured.url(host="localhost")), ErrorCode.network_error, "certificate")


def test_a_redirect_from_https_to_http_is_not_followed() -> None:
    with serving(Reply()) as plain, Loopback(redirecting(plain.url("/end")), trust=trusted()) as server:
        result = run(block(ca_file=str(CERTIFICATE)), url=server.url("/0", host="localhost"))
    assert result.error_code is ErrorCode.permission_denied
    assert plain.seen == []


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask(Reply()).ok
