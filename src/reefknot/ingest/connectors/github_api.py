"""
GitHub's REST API as a connector needs it: a GET, its answer, and what a refusal means.

Every answer is bounded in time and size. The token goes to the configured server alone: redirects are followed within
its origin, and nothing is read from the environment. Failures are `SourceError`s that say what to do; nothing is
retried here.
"""

import asyncio
import re
import ssl
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httpx2
import msgspec
from msgspec import Struct

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import ReefknotError, SourceError
from reefknot.retrying.failures import read_hints

CONNECT_S = 10.0
READ_S = 30.0
WHOLE_S = 90.0
"""Time for one request with its body, however steadily it drips."""
TOKEN_S = 60.0
"""Time for which a token is used before it is read again: a new one is taken without a restart."""
LARGEST_JSON = 16 * 1024 * 1024
"""Bytes of an answer, unpacked: a hundred issues of the largest size have half of it. As text they need four times."""
MOST_OBJECTS = 50_000
"""Objects of an answer: an empty one has two bytes, and takes a hundred in memory."""
MOST_TREE_OBJECTS = 200_000
"""Twice as many as GitHub puts into a tree."""
MOST_QUOTES = 40
"""Quotation marks for each object that is allowed, above which an answer is not looked through."""
LARGEST_TEXT = 4096
"""Characters of a refusal's body that are looked at."""
SECONDARY_S = 60.0
"""Wait after a rate limit that names no time: what GitHub asks for."""
MOST_REDIRECTS = 3
MOST_PACKING = 64 * 1024
"""Bytes that a packed body may have more than its content: what packs nothing is not read for ever."""
RIGHTS = "a fine-grained token needs read access to Contents, Issues and Pull requests of this repository"

_JSON = "application/vnd.github+json"
RAW = "application/vnd.github.raw+json"
_TEXT_OR_OBJECT = re.compile(rb'"(?:[^"\\]|\\.)*+"|\{', re.DOTALL)
_LIMIT_WORDS = ("rate limit", "abuse detection")
_T = TypeVar("_T")


class ApiAnswer(Struct, frozen=True):
    """An answer with its body read."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""

    @property
    def etag(self) -> str:
        return self.headers.get("etag", "")[:256]

    @property
    def has_next(self) -> bool:
        """Whether the listing has a next page, by its Link header."""
        return 'rel="next"' in self.headers.get("link", "")

    @property
    def is_unchanged(self) -> bool:
        return self.status == 304


class _Refusal(Struct):
    message: str = ""


class _Moved(Struct):
    full_name: str = ""


class GithubApi:
    """The API of one repository. Its connections are opened when they are needed."""

    def __init__(
        self,
        base_url: str,
        repository: str,
        *,
        token: Callable[[], str] | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._origin = origin_of(urlsplit(self._base))
        self._repository = repository
        self._token = token
        self._token_text = ""
        self._token_ends = -inf
        self._ca_file = ca_file
        self._client: httpx2.AsyncClient | None = None
        self.remaining: str = ""
        """The requests that are left of the rate limit, according to the last answer."""

    async def get(
        self,
        path: str,
        query: Mapping[str, str | int] | None = None,
        *,
        etag: str = "",
        accept: str = _JSON,
        most: int | None = None,
        expected: Sequence[int] = (),
    ) -> ApiAnswer:
        """
        The answer to a GET of a path beneath the repository, and "" for the repository itself.

        Statuses other than 200, 304 and the `expected` ones are raised as `SourceError`. An answer of more than `most`
        bytes (default: `LARGEST_JSON`) is a permanent failure.
        """
        where = f"/repos/{self._repository}{path}"
        words = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in (query or {}).items())
        answer = await self._follow(
            f"{self._base}{where}{'?' if words else ''}{words}", etag, accept, LARGEST_JSON if most is None else most
        )
        if answer.status in (200, 304, *expected):
            return answer
        if answer.status in (301, 308):
            raise await self._moved(answer)
        message = self._message_of(answer)
        if answer.status == 401:
            self._token_ends = -inf
        raise failure_of(answer, message, where=where, repository=self._repository, has_token=self._token is not None)

    def decoded(self, answer: ApiAnswer, kind: type[_T], *, objects: int = MOST_OBJECTS) -> _T:
        """
        The body as a value of this kind. One that is something else is a transient failure: a proxy's page, say.

        An answer of more than `objects` objects is a permanent failure, and is not decoded.
        """
        if has_more_objects(answer.body, objects):
            text = f"{self._base} answered with more than {objects} objects, which is too many; check `base_url:`"
            raise SourceError(text, FailureType.PERMANENT)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = f"{self._base} did not answer with what GitHub's API answers ({error}); check `base_url:`"
            raise SourceError(text, FailureType.TRANSIENT) from None

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _follow(self, url: str, etag: str, accept: str, most: int) -> ApiAnswer:
        """The answer behind the temporary redirects within the server's origin."""
        for _ in range(MOST_REDIRECTS):
            answer = await self._send(url, etag, accept, most)
            if answer.status not in (302, 307):
                return answer
            url = self._same_origin(urljoin(url, answer.headers.get("location", "")))
        raise SourceError(f"{self._base} redirects in a circle; check `base_url:`", FailureType.PERMANENT)

    def _same_origin(self, url: str) -> str:
        parts = urlsplit(url)
        if origin_of(parts) != self._origin:
            other = f"{parts.scheme}://{parts.hostname}"[:200]
            text = f"{self._base} sends to another server ({other}), which gets no token; check `base_url:`"
            raise SourceError(text, FailureType.PERMANENT)
        return url

    async def _send(self, url: str, etag: str, accept: str, most: int) -> ApiAnswer:
        headers = {"Accept": accept, "Accept-Encoding": "gzip", **self._authorization()}
        if etag:
            headers["If-None-Match"] = etag
        try:
            async with asyncio.timeout(WHOLE_S), self._connected().stream("GET", url, headers=headers) as response:
                known = {name.lower(): value for name, value in response.headers.items()}
                self.remaining = known.get("x-ratelimit-remaining", self.remaining)
                is_answer = response.status_code == 200
                body = await _bounded_body(response, most if is_answer else LARGEST_TEXT, cut=not is_answer)
                return ApiAnswer(response.status_code, known, body)
        except (TimeoutError, httpx2.TimeoutException) as error:
            is_unreachable = isinstance(error, httpx2.ConnectTimeout)
            text = f"{self._base} did not answer in time"
            raise SourceError(text, FailureType.TRANSIENT, unreachable=is_unreachable) from error
        except (httpx2.TransportError, httpx2.StreamError, zlib.error, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SourceError:
        reason = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            text = f"the certificate of {self._base} is not trusted ({reason}); set `ca_file:` to its authority's"
            return SourceError(text, FailureType.PERMANENT)
        is_refused = isinstance(error, httpx2.ConnectError)
        text = f"{self._base} cannot be reached: {reason}"
        return SourceError(text, FailureType.TRANSIENT, unreachable=is_refused)

    def _authorization(self) -> dict[str, str]:
        if self._token is None:
            return {}
        if clock.now() >= self._token_ends:
            self._token_text, self._token_ends = self._resolved(self._token), clock.now() + TOKEN_S
        return {"Authorization": f"Bearer {self._token_text}"}

    def _resolved(self, reference: Callable[[], str]) -> str:
        try:
            token = reference().strip()
        except (ReefknotError, OSError, LookupError, ValueError) as error:
            raise SourceError(f"the setting `token` cannot be used: {error}", FailureType.PERMANENT) from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            problem = "what the setting `token` refers to is empty, or has characters that no token has"
            text = f"{problem}; store the token alone there"
            raise SourceError(text, FailureType.PERMANENT)
        return token

    def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                headers={"User-Agent": "reefknot", "X-GitHub-Api-Version": "2022-11-28"},
                verify=self._trust(),
                timeout=httpx2.Timeout(READ_S, connect=CONNECT_S),
                limits=httpx2.Limits(max_connections=4, max_keepalive_connections=4),
                follow_redirects=False,
                trust_env=False,
            )
        return self._client

    def _trust(self) -> ssl.SSLContext | bool:
        if self._origin[0] == "http":
            return False  # on this machine, without TLS: nothing to trust
        if self._ca_file is None:
            return httpx2.create_ssl_context(trust_env=False)
        try:
            return ssl.create_default_context(cafile=str(self._ca_file))
        except OSError as error:  # ssl.SSLError is one
            text = f"`ca_file:` {self._ca_file} cannot be used: {error}; name a file of PEM certificates"
            raise SourceError(text, FailureType.PERMANENT) from error

    def _message_of(self, answer: ApiAnswer) -> str:
        """The server's own sentence, without the token, should it repeat it."""
        try:
            message = msgspec.json.decode(answer.body, type=_Refusal).message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = answer.body.decode("utf-8", "replace")
        own = self._authorization().get("Authorization", "").removeprefix("Bearer ")
        return " ".join((message.replace(own, "…") if own else message).split())[:200]

    async def _moved(self, answer: ApiAnswer) -> SourceError:
        """The failure for a repository that has another name now, with that name if the server tells it."""
        name = ""
        parts = urlsplit(urljoin(f"{self._base}/", answer.headers.get("location", "")))
        head, found, tail = parts.path.partition("/repositories/")
        if found and origin_of(parts) == self._origin:
            number = tail.partition("/")[0]
            url = parts._replace(path=f"{head}/repositories/{quote(number)}", query="", fragment="").geturl()
            there = await self._follow(url, "", _JSON, LARGEST_JSON)
            name = self.decoded(there, _Moved).full_name if there.status == 200 else ""
        to, what = (f" to {name}", f"set `repository: {name}`") if name else ("", "set `repository:` to its new name")
        return SourceError(f"the repository {self._repository} has moved{to}; {what}", FailureType.PERMANENT)


async def _bounded_body(response: httpx2.Response, most: int, *, cut: bool) -> bytes:
    """The body, unpacked. One of more than `most` bytes is cut, or a permanent failure."""
    packed = response.headers.get("content-encoding", "").lower() == "gzip"
    unpack = zlib.decompressobj(31)
    body = bytearray()
    received = 0
    async for part in response.aiter_raw():
        received += len(part)
        # In a thread: a few bytes may unpack to a great many, and zlib lets the loop go on meanwhile.
        body += await asyncio.to_thread(unpack.decompress, part, most + 1 - len(body)) if packed else part
        if unpack.unused_data:
            raise zlib.error("there is something behind the end of the body")
        if len(body) > most or received > most + MOST_PACKING:
            if cut:
                return bytes(body[:most])
            raise SourceError(f"an answer has more than {most} bytes, which is too large", FailureType.PERMANENT)
    if packed and not unpack.eof:
        raise zlib.error("the body ends in the middle")
    return bytes(body)


def has_more_objects(body: bytes, most: int) -> bool:
    """Whether JSON has more objects than `most`. Braces in texts are not counted; nothing is decoded."""
    if body.count(b"{") <= most:
        return False
    if body.count(b'"') > most * MOST_QUOTES:
        return True
    found = (True for one in _TEXT_OR_OBJECT.finditer(body) if one[0] == b"{")
    return sum(islice(found, most + 1)) > most


def failure_of(answer: ApiAnswer, message: str, *, where: str, repository: str, has_token: bool) -> SourceError:
    """A refusal as a failure: its kind, what to do, and the time that the server asks to wait."""
    status = answer.status
    _, hint, is_spent = read_hints(answer)
    words = message.lower()
    is_secondary = "retry-after" in answer.headers or any(one in words for one in _LIMIT_WORDS)
    if status == 429 or (status == 403 and (is_spent or is_secondary)):
        wait = max(1.0, hint) if hint is not None else SECONDARY_S
        which = "the rate limit is spent" if is_spent else "a secondary rate limit was reached"
        return SourceError(
            f"GitHub: {which}; again in {wait:.0f} s ({message})", FailureType.RATE_LIMITED, retry_after=wait
        )
    if status == 408 or status >= 500:
        return SourceError(f"GitHub answered {status} to {where}: {message}", FailureType.TRANSIENT, retry_after=hint)
    text = _refused(status, message, where, repository, has_token)
    return SourceError(text, FailureType.PERMANENT, forbidden=status in (401, 403))


def _refused(status: int, message: str, where: str, repository: str, has_token: bool) -> str:
    match status:
        case 401:
            what = "it expired or was revoked; make a new one, and store it where the setting `token` says"
            return f"the token is not valid ({message}): {what}"
        case 403:
            return f"GitHub refuses {where} ({message}): {RIGHTS}"
        case 404 if has_token:
            return f"GitHub has no {where}, or the token may not see it: check `repository: {repository}`; {RIGHTS}"
        case 404:
            what = "a private one needs the setting `token`, such as env:NAME"
            return f"GitHub has no {where} that everybody may see: check `repository: {repository}`; {what}"
        case 451:
            return f"GitHub may not show {where} for legal reasons ({message}); remove the source, or exclude it"
        case _:
            return f"GitHub answered {status} to {where}: {message}"


def origin_of(parts: SplitResult) -> tuple[str, str, int | None]:
    """Scheme, host and port of a URL. A port that is no number is None, and equals no other origin's."""
    default = {"http": 80, "https": 443}.get(parts.scheme)
    try:
        return parts.scheme, (parts.hostname or "").lower(), parts.port or default
    except ValueError:
        return parts.scheme, (parts.hostname or "").lower(), -1


def path_of(*parts: Any) -> str:
    """A path of these parts, each of them encoded; the slashes within a part stay."""
    return "".join(f"/{quote(str(part))}" for part in parts)
