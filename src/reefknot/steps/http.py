"""
`http.request`: one request, and at most three redirects.

    read the inputs → check the URL → send → follow a redirect, or read the body → make the result

2xx is ok. Any other status is `http_error`, with the status and the server's own hints as metadata and the body kept.
Each redirect is checked like the first URL. When it leaves the origin, only the few headers of `HARMLESS_HEADERS`
follow: any other name may carry a credential. What may be called is in `addresses`.

Headers are ASCII on the wire. A parameter such as `filename="…"` is encoded as RFC 8187 has it, an idempotency key that
is not ASCII is sent as its hash, and any other value that is not ASCII is refused by its name.

A body is read with a bound at every step. One layer of gzip or deflate is undone piece by piece, and the reading stops
as soon as the result is too large, or grows out of proportion to what came over the wire: a bomb is never held in
memory, only its beginning.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from importlib import import_module
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.core.checks import HEADER_VALUES, ascii_header
from reefknot.core.failure import ErrorCode
from reefknot.errors import shown
from reefknot.idempotency.model import header_key
from reefknot.queue.model.messages import StepResult, StepStatus
from reefknot.retrying.failures import read_hints
from reefknot.runtime.log import printable
from reefknot.steps.addresses import AddressRules, BadUrl, Forbidden, HttpSettings, Unreachable, Url, read_url
from reefknot.steps.inputs import Inputs, Refusal, answers_refusals, failed, invalid, text_or_base64, time_limit
from reefknot.steps.port import BlockContext

if TYPE_CHECKING:
    from reefknot.steps.http_client import HttpClient, HttpResponse, Resolve

MOST_REDIRECTS = 3
MOST_HEADERS = 100
LARGEST_HEADERS = 64 * 1024
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_URL = "http://HOST/… or https://HOST/…"
_HEADERS = "a mapping of names to texts"
_REDIRECTS = (301, 302, 303, 307, 308)
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_RESERVED_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te", "trailer", "expect")
)
_BODY_HEADERS = frozenset(("content-type", "content-encoding", "content-language"))
HARMLESS_HEADERS = _BODY_HEADERS | {"accept", "accept-encoding", "accept-language", "cache-control", "user-agent"}
"""The headers that follow a redirect to another origin."""
_REFERENCE = re.compile(r"env:|config:|file:(?!//)")
_EXCERPT = 200
MOST_GROWTH = 100
FREE_GROWTH = 64 * 1024
"""Bytes below which a body may grow by more than the ratio without being a bomb."""
_STEP = 64 * 1024
_ACCEPTED = "gzip, deflate or none, one layer"
ACCEPT_ENCODING = "gzip, deflate"


class _Request(Struct, frozen=True):
    """A request that was read and checked."""

    url: Url
    method: str
    headers: dict[str, str]
    body: bytes = b""


class HttpRequest:
    """The block `http.request`: sends one request and follows its redirects."""

    type = "http.request"

    def __init__(self, settings: HttpSettings | None = None, *, resolve: "Resolve | None" = None) -> None:
        self._settings = settings or HttpSettings()
        self._rules = AddressRules(self._settings.allow)
        self._resolve = resolve
        self._client: HttpClient | None = None
        self._loading = Lock()

    def destination(self, inputs: Mapping[str, Any]) -> str:
        """Host and port of the URL."""
        try:
            return self._url(str(inputs.get("url", ""))).endpoint
        except (BadUrl, Forbidden, Refusal):
            return "http"

    @answers_refusals
    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        try:
            request, seconds = self._read_request(inputs, context)
            client = await asyncio.to_thread(self.load) if self._client is None else self._client
            async with time_limit(seconds, f"{request.url.endpoint} did not finish", ErrorCode.connection_timeout):
                return await self._follow(client, request, seconds)
        except (BadUrl, Forbidden) as error:
            return failed(error.code, f"url: {error}")
        except Unreachable as error:
            return failed(error.code, printable(str(error)))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def load(self) -> "HttpClient":
        """
        The client. Call it in a thread: loading its library takes as long as the rest of a short command.

        A process that is there to work loads it as it starts, and the first request does not wait for it.
        """
        with self._loading:
            if self._client is None:
                library = import_module("reefknot.steps.http_client")
                self._client = library.HttpClient(self._rules, resolve=self._resolve, ca_file=self._settings.ca_file)
            return self._client

    def _read_request(self, given: Mapping[str, Any], context: BlockContext) -> tuple[_Request, float]:
        inputs = Inputs(given, "url", "method", "headers", "body", "body_base64")
        url = self._url(inputs.text("url", accepted=_URL))
        self._rules.check_host(url.host, url.port)
        method = inputs.text("method", accepted=", ".join(METHODS), default="GET")
        if method.upper() not in METHODS:
            raise invalid("method", method, ", ".join(METHODS))
        headers = _read_headers(inputs.value("headers"))
        body, content_type = _read_body(inputs)
        if content_type and "content-type" not in headers:
            headers["content-type"] = content_type
        headers.setdefault("idempotency-key", header_key(context.idempotency_key))
        if context.traceparent is not None:
            headers.setdefault("traceparent", context.traceparent)
        headers.setdefault("accept-encoding", ACCEPT_ENCODING)
        headers.setdefault("accept", "*/*")
        headers.setdefault("user-agent", "reefknot")
        return _Request(url, method.upper(), headers, body), inputs.seconds(context.seconds)

    def _url(self, written: str) -> Url:
        """The URL of a request. A reference of the configuration is resolved here, so its URL is in no payload."""
        if not _REFERENCE.match(written):
            return read_url(written)
        read = self._settings.references.get(written)
        found = None if read is None else read()
        if found is None:
            reason = "is not alerts.webhook of this worker's configuration" if read is None else "cannot be read"
            raise Refusal(ErrorCode.resource_unavailable, f"url: the reference {shown(written)} {reason}")
        return read_url(found)

    async def _follow(self, client: "HttpClient", request: _Request, seconds: float) -> StepResult:
        for _ in range(MOST_REDIRECTS + 1):
            headers = list(request.headers.items())
            if request.body or request.method in ("POST", "PUT", "PATCH"):
                headers.append(("content-length", str(len(request.body))))
            async with client.send(
                request.url, method=request.method, headers=headers, body=request.body, seconds=seconds
            ) as response:
                _check_headers(response)
                location = response.header("location")
                if response.status not in _REDIRECTS or not location:
                    return await self._result(request, response)
                request = self._redirected(request, response.status, location)
        text = f"more than {MOST_REDIRECTS} redirects; the last one leads to {request.url.endpoint}"
        raise Refusal(ErrorCode.execution_failed, text)

    def _redirected(self, request: _Request, status: int, location: str) -> _Request:
        try:
            url = request.url.joined(location)
        except (BadUrl, ValueError) as error:
            text = f"the redirect of {request.url.endpoint} cannot be followed: {printable(str(error), most=_EXCERPT)}"
            raise Refusal(ErrorCode.execution_failed, text, http_status_code=status) from None
        self._rules.check_host(url.host, url.port)
        if request.url.scheme == "https" and url.scheme == "http":
            raise Forbidden(f"{request.url.endpoint} redirects from https to http, which is not followed")
        headers, method, body = dict(request.headers), request.method, request.body
        if url.origin != request.url.origin:
            headers = {name: value for name, value in headers.items() if name in HARMLESS_HEADERS}
        if status == 303 or (status in (301, 302) and method == "POST"):
            method = method if method == "HEAD" else "GET"
            body = b""
            headers = {name: value for name, value in headers.items() if name not in _BODY_HEADERS}
        return _Request(url, method, headers, body)

    async def _result(self, request: _Request, response: "HttpResponse") -> StepResult:
        ok = 200 <= response.status < 300
        problem = ""
        try:
            encoding = "" if request.method == "HEAD" else response.header("content-encoding")
            body = await read_body(response.body, encoding, most=self._settings.max_response_bytes)
        except BodyRefused as refused:
            if ok:
                text = f"{request.url.endpoint}: {refused}"
                raise Refusal(ErrorCode.execution_failed, text, http_status_code=response.status) from None
            body, problem = refused.kept, str(refused)
        headers = {name: response.header(name) for name, _ in response.headers}
        outputs = {"status_code": response.status, "headers": headers}
        outputs |= text_or_base64(body, text="body", base64="body_base64")
        if ok:
            return StepResult(outputs=outputs, metadata={"http_status_code": response.status})
        metadata = _failure_metadata(response)
        if problem:
            metadata["body_cut"] = problem
        text = _message(request.url, response.status, body)
        return StepResult(StepStatus.ERROR, ErrorCode.http_error, outputs, text, metadata)


def _ascii_value(name: str, value: str) -> str:
    """The value with parameters that are not ASCII encoded (RFC 8187); `Refusal` when something else is not."""
    sent = ascii_header(value)
    if sent is None:
        text = (
            f"headers: the value of {name} is not ASCII, which is all that a header can carry; accepted: "
            f"{HEADER_VALUES}; percent-encode it, or put it into the body"
        )
        raise Refusal(ErrorCode.invalid_input, text)
    return sent


def _read_headers(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid("headers", given, _HEADERS)
    if len(given) > MOST_HEADERS:
        raise Refusal(ErrorCode.invalid_input, f"headers: {len(given)} of them; accepted: at most {MOST_HEADERS}")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid("headers", name, "names of letters, digits and -")
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or _CONTROL.search(value):
            accepted = f"for {name} a text without line breaks or other control characters"
            raise Refusal(ErrorCode.invalid_input, f"headers: the value is not accepted; accepted: {accepted}")
        if name.lower() in _RESERVED_HEADERS or name.lower() in headers:
            raise Refusal(ErrorCode.invalid_input, f"headers: {name} is set by the block itself, or given twice")
        headers[name.lower()] = _ascii_value(name, value.strip())
    if sum(len(name) + len(value) for name, value in headers.items()) > LARGEST_HEADERS:
        raise Refusal(ErrorCode.invalid_input, f"headers: larger than {LARGEST_HEADERS} bytes together")
    return headers


def _read_body(inputs: Inputs) -> tuple[bytes, str]:
    """The body's bytes and content type: text as text, bytes from base64, anything else as JSON."""
    if inputs.has("body") and inputs.has("body_base64"):
        raise Refusal(ErrorCode.invalid_input, "body: given together with body_base64; accepted: one of them")
    if inputs.has("body_base64"):
        return inputs.base64_bytes("body_base64"), "application/octet-stream"
    body = inputs.value("body")
    if body is None:
        return b"", ""
    if isinstance(body, str):
        try:
            return body.encode(), "text/plain; charset=utf-8"
        except UnicodeEncodeError:
            raise invalid("body", body, "text that can be written as UTF-8") from None
    try:
        return msgspec.json.encode(body), "application/json"
    except (TypeError, ValueError, RecursionError):
        raise invalid("body", body, "a text, or a value that JSON can say") from None


def _check_headers(response: "HttpResponse") -> None:
    size = sum(len(name) + len(value) for name, value in response.headers)
    if len(response.headers) > 2 * MOST_HEADERS or size > LARGEST_HEADERS:
        accepted = f"at most {2 * MOST_HEADERS} of {LARGEST_HEADERS} bytes together"
        text = f"the response has {len(response.headers)} headers of {size} bytes; accepted: {accepted}"
        raise Refusal(ErrorCode.execution_failed, text, http_status_code=response.status)


def _failure_metadata(response: "HttpResponse") -> dict[str, Any]:
    """The metadata of a failure: the status, how long to wait, whether a limit is spent."""
    _, hint, limit_reached = read_hints(SimpleNamespace(headers=dict(response.headers)))
    metadata: dict[str, Any] = {"http_status_code": response.status}
    if hint is not None:
        metadata["retry_after"] = hint
    if limit_reached:
        metadata["limit_reached"] = True
    return metadata


def _message(url: Url, status: int, body: bytes) -> str:
    """The status and the beginning of the body: some services say "rate limit" nowhere else."""
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    excerpt = printable(" ".join(body[: 4 * _EXCERPT].decode("utf-8", "replace").split()), most=_EXCERPT)
    return f"HTTP {status}{phrase} from {url.endpoint}" + (f": {excerpt}" if excerpt else "")


class BodyRefused(Exception):  # noqa: N818 - it reads as what happened
    """The body is too large, a bomb, or in an encoding that is not undone. `kept` is what was read before."""

    def __init__(self, message: str, kept: bytes) -> None:
        super().__init__(message)
        self.kept = kept


async def read_body(parts: AsyncIterator[bytes], encoding: str, *, most: int) -> bytes:
    """The whole body, decoded; `BodyRefused` beyond the bounds."""
    inflate = _inflater(encoding)
    kept = bytearray()
    wire = 0
    async for part in parts:
        wire += len(part)
        if inflate is None:
            _append(kept, part, most)
            continue
        for piece in _inflated(inflate, part, kept):
            _append(kept, piece, most)
            if len(kept) > FREE_GROWTH and len(kept) > wire * MOST_GROWTH:
                text = f"the body grows more than {MOST_GROWTH}-fold when it is unpacked; it was not unpacked further"
                raise BodyRefused(text, bytes(kept))
    if inflate is not None and wire and not inflate.eof:
        raise BodyRefused("the compressed body ends too early", bytes(kept))
    return bytes(kept)


def _append(kept: bytearray, piece: bytes, most: int) -> None:
    kept += piece[: most - len(kept) + 1]
    if len(kept) > most:
        del kept[most:]
        text = f"the body is larger than {most} bytes, the limit of blocks.http.max_response_bytes"
        raise BodyRefused(text, bytes(kept))


class _Inflater:
    """A decoder of gzip, of zlib, and of the bare deflate that some servers send instead."""

    def __init__(self, kind: str) -> None:
        self._first = kind == "deflate"
        self._wbits = zlib.MAX_WBITS | (16 if kind == "gzip" else 0)
        self._zlib = zlib.decompressobj(self._wbits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    def step(self, data: bytes) -> tuple[bytes, bytes]:
        """A bounded piece of output, and the input that is left."""
        if self._first and data:
            self._first = False
            if data[0] & 0x0F != 8:
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
        piece = self._zlib.decompress(data, _STEP)
        rest = self._zlib.unused_data.lstrip(b"\0")  # zeros after the end are padding
        if not rest:
            return piece, self._zlib.unconsumed_tail
        if self._wbits == zlib.MAX_WBITS:
            raise zlib.error("bytes follow its end")
        self._zlib = zlib.decompressobj(self._wbits)  # gzip may have several members, one after the other
        return piece, rest


def _inflated(inflate: _Inflater, part: bytes, kept: bytearray) -> Iterator[bytes]:
    rest, piece = part, b""
    while rest or len(piece) == _STEP:  # a full piece: there may be more without more input
        try:
            piece, rest = inflate.step(rest)
        except zlib.error as error:
            raise BodyRefused(f"the compressed body is damaged: {error}", bytes(kept)) from error
        yield piece


def _inflater(encoding: str) -> _Inflater | None:
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return None
    if kind in ("gzip", "x-gzip", "deflate"):
        return _Inflater("deflate" if kind == "deflate" else "gzip")
    raise BodyRefused(f"the body is encoded as {kind[:60]!r}; accepted: {_ACCEPTED}", b"")
