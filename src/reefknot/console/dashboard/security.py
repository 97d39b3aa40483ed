"""
Access to the dashboard: which hosts and origins are answered, who may do what, and the headers of every response.

A browser that was lured to another site is the attacker here: it can send requests to this machine, and by DNS
rebinding under a name of that site's own. So a request has to name this server in `Host`, must not come from another
origin, and needs a token that no other site knows. The token comes once, in the body of the login, which begins a
session.

Browsers send a cookie to every port of its host, so another server on this machine sees the session's and can replay
it. A cookie alone therefore gets no data and has no effect: the session has a key as well, which the pages' script
keeps in the storage of this origin and sends in a header. A login without a script gets no key, and may read only.
Every request that is not GET or HEAD needs the role of an operator.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from msgspec import Struct, json

from reefknot import clock
from reefknot.queue.model.messages import LARGEST_MESSAGE
from reefknot.runtime.addresses import is_loopback, is_wildcard
from reefknot.runtime.log import error_text, logger, printable

if TYPE_CHECKING:
    from reefknot.core.redaction import Redactor

Role = Literal["operator", "reader"]
OPERATOR: Role = "operator"
READER: Role = "reader"

SESSION_S = 12 * 3600.0
MOST_SESSIONS = 256
"""Sessions of one role."""
MOST_FAILURES = 10
FAILURES_S = 60.0
"""At most `MOST_FAILURES` wrong tokens of an address are logged in `FAILURES_S` seconds; more are answered with 429."""
MOST_CLIENTS = 1024
LONGEST_NAME = 200
BODY_S = 15.0
"""Longest time for the body of a request to arrive."""
MOST_BODY_BYTES = LARGEST_MESSAGE
KEY_HEADER = "x-reefknot-key"
"""The header with the key of a session: no browser sends it by itself."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # Not "no-referrer": browsers would send `Origin: null` with our own forms.
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_STAY_SECURE = (b"strict-transport-security", b"max-age=2592000")
"""With TLS, a browser comes back over TLS only, for a month. It would do so for all ports of a name."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# ---- who may -------------------------------------------------------------------------------------------------------


class LoginSession(Struct, frozen=True):
    """A login: the role of its token, the name that was typed, and when it ends."""

    role: Role
    actor: str | None
    ends_at: float
    needs_key: bool = True
    """Whether its cookie counts only together with its key; one without a key is a reader's."""


class ThrottledError(Exception):
    """An address has sent too many wrong tokens."""

    def __init__(self, *, retry_after: float) -> None:
        super().__init__(f"too many wrong tokens from this address; try again in {retry_after:.0f} s")
        self.retry_after = max(1, round(retry_after))


class SiteAccess:
    """The tokens and sessions of one server, and the names by which it is called. Everything in it is bounded."""

    def __init__(
        self,
        *,
        operator_token: str | None = None,
        reader_token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Iterable[str] = (),
        tls: bool = False,
    ) -> None:
        """With None as its token, a role cannot be used. `port` is the bound one."""
        tokens: dict[Role, str | None] = {OPERATOR: operator_token, READER: reader_token}
        self._tokens: dict[Role, bytes] = {role: _digest(text) for role, text in tokens.items() if text is not None}
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._failures: OrderedDict[str, list[float]] = OrderedDict()
        self._key_maker = secrets.token_bytes(32)
        self.tls = tls
        self.port = port
        self.own_hosts, self.proxied_hosts = host_names(host, port, allowed_hosts, tls=tls)

    @property
    def cookie(self) -> str:
        """The name of the session's cookie. Cookies of one host are shared by its ports, so the port is in it."""
        return f"reefknot_session_{self.port}"

    def login(self, token: str, name: str | None, client: str, *, has_key: bool = True) -> str | None:
        """The secret of a new session, None for a wrong token. One without a key may read, whatever its token."""
        role = self.role_of(token, client)
        if role is None:
            return None
        role = role if has_key else READER
        secret = secrets.token_urlsafe(32)
        mine = [key for key, one in self._sessions.items() if one.role == role]
        for oldest in mine[: max(0, len(mine) - MOST_SESSIONS + 1)]:  # of this role alone: readers end no operator's
            del self._sessions[oldest]
        claimed = printable((name or "").strip(), most=LONGEST_NAME) or None
        self._sessions[_digest(secret)] = LoginSession(role, claimed, clock.now() + SESSION_S, has_key)
        return secret

    def key_of(self, secret: str) -> str:
        """The key of a session, which does not follow from its cookie without what this process alone knows."""
        return hmac.new(self._key_maker, secret.encode("utf-8", "surrogatepass"), sha256).hexdigest()

    def is_unlocked(self, session: LoginSession, secret: str, keys: list[str]) -> bool:
        """Whether a request with the cookie of a session may use it: it brings the key as well, or needs none."""
        expected = self.key_of(secret).encode()
        given = [key.encode("utf-8", "surrogatepass") for key in keys]
        return not session.needs_key or (len(given) == 1 and hmac.compare_digest(expected, given[0]))

    def logout(self, secret: str) -> None:
        self._sessions.pop(_digest(secret), None)

    def session(self, secret: str) -> LoginSession | None:
        """The session of a cookie, None when it has ended or never was."""
        key = _digest(secret)
        found = self._sessions.get(key)
        if found is not None and found.ends_at <= clock.now():
            del self._sessions[key]
            return None
        return found

    def role_of(self, token: str, client: str) -> Role | None:
        """
        The role that a token gives, None for a wrong one, which is counted and logged.

        A right one is accepted whatever was sent before: all programs of one machine have the same address. Tokens are
        too long to be guessed, so the bound protects the log from clients that keep sending an old one.
        """
        given = _digest(token)
        matches: list[Role] = [role for role, known in self._tokens.items() if hmac.compare_digest(known, given)]
        if matches:
            return matches[0]
        now = clock.now()
        failed = [at for at in self._failures.get(client, ()) if now - at < FAILURES_S]
        if len(failed) >= MOST_FAILURES:
            raise ThrottledError(retry_after=failed[0] + FAILURES_S - now)
        self._failures[client] = [*failed, now]
        self._failures.move_to_end(client)
        while len(self._failures) > MOST_CLIENTS:
            self._failures.popitem(last=False)
        logger().warning("dashboard: a wrong token from %s", printable(client, most=60))
        return None


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


# ---- hosts and origins -----------------------------------------------------------------------------------------------


def host_names(host: str, port: int, allowed: Iterable[str], *, tls: bool) -> tuple[frozenset[str], frozenset[str]]:
    """The values of `Host` that mean this server: by its address, and by `allowed_hosts`, which a proxy may serve."""
    usual_port = port == (443 if tls else 80)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    names = {shown.lower(), *(LOOPBACK_NAMES if is_loopback(host) or is_wildcard(host) else ())}
    own = {f"{name}:{port}" for name in names} | (names if usual_port else set())
    others = set()
    for name in (one.lower() for one in allowed):
        has_port = name.rpartition(":")[2].isdecimal() and not name.endswith("]")
        others |= {name} if has_port else {name, f"{name}:{port}"}
    return frozenset(own), frozenset(others)


def forbidden_host(access: SiteAccess, headers: dict[str, list[str]]) -> str | None:
    """The reason to refuse a request by its `Host`, None when it names this server."""
    given = headers.get("host", [])
    if len(given) != 1:
        return "a request names its host once"
    if given[0].lower() not in access.own_hosts | access.proxied_hosts:
        return (
            f"host {printable(given[0], most=80)!r} is not served here; open the address that was printed at the "
            "start, or add the name to dashboard.allowed_hosts"
        )
    return None


def forbidden_origin(access: SiteAccess, method: str, headers: dict[str, list[str]], *, is_data: bool) -> str | None:
    """
    The reason to refuse a request by the site that it comes from, None when it comes from here or from no site.

    Another site may lead to a page by a link, a plain navigation; everything else of it is refused.
    """
    sites, origins = headers.get("sec-fetch-site", []), headers.get("origin", [])
    reads = method in ("GET", "HEAD")
    if any(site not in ("same-origin", "none") for site in sites) and not (reads and not is_data):
        return "requests from another site are refused"
    if len(origins) > 1 or any(not _is_own_origin(access, one, headers["host"][0]) for one in origins):
        return "requests from another origin are refused"
    return None


def _is_own_origin(access: SiteAccess, origin: str, host: str) -> bool:
    scheme, separator, name = origin.lower().partition("://")
    schemes = ("http", "https") if host.lower() in access.proxied_hosts else ("https" if access.tls else "http",)
    return bool(separator) and scheme in schemes and name == host.lower()


# ---- the guard -------------------------------------------------------------------------------------------------------


class RequestRefusedError(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None, is_locked: bool = False) -> None:
        """With `is_locked`, the request has the cookie of a session and lacks its key."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.is_locked = is_locked


class RequestGuard:
    """ASGI middleware in front of every route: host, origin, token, role, size of the body, headers of the response."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, access: SiteAccess, redactor: Redactor
    ) -> None:
        self._app = app
        self._access = access
        self._redactor = redactor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # nothing here speaks over WebSockets
        from starlette.requests import ClientDisconnect

        answer = Answer(scope, send, tls=self._access.tls)
        try:
            self._admit(scope)
            await self._app(scope, Body(scope, receive).receive, answer.send)
        except RequestRefusedError as error:
            await answer.refuse(error)
        except ThrottledError as error:
            await answer.refuse(RequestRefusedError(429, str(error), retry_after=error.retry_after))
        except ClientDisconnect:
            return  # no client to answer; not logged, because any client can cause it
        except Exception as error:
            logger().error("dashboard: internal error: %s", self._redactor(error_text(error)))
            await answer.refuse(
                RequestRefusedError(500, "internal error; see the log of the server, and please report it")
            )

    def _admit(self, scope: Scope) -> None:
        """Let the request in with its role and its name in the state, or raise."""
        access, method, path = self._access, scope["method"], scope["path"]
        headers = _headers(scope)
        reason = forbidden_host(access, headers) or forbidden_origin(access, method, headers, is_data=is_data(path))
        if reason is not None:
            raise RequestRefusedError(403, reason)
        state = scope.setdefault("state", {})
        state["role"] = state["actor"] = None
        state["is_valid"] = _always
        if is_open(path):
            return
        self._identify(state, scope, headers)
        if state["role"] is None:
            raise RequestRefusedError(401, _REFUSED if any(headers.get("authorization", [])) else _MISSING)
        if method not in ("GET", "HEAD") and state["role"] != OPERATOR and path != "/logout":
            raise RequestRefusedError(403, "the role of this token may read only; actions need the operator's token")

    def _identify(self, state: MutableMapping[str, Any], scope: Scope, headers: dict[str, list[str]]) -> None:
        """Set the role by the bearer token, or by the cookie's session and its key. A cookie comes by itself, so a
        request with effects has to say as well which site it comes from; every browser says so."""
        access = self._access
        bearer = headers.get("authorization", [])
        if bearer:
            scheme, _, token = bearer[0].partition(" ")
            is_bearer = len(bearer) == 1 and scheme.lower() == "bearer"
            state["role"] = access.role_of(token.strip(), client_address(scope)) if is_bearer else None
            return
        found = [(one, secret) for secret in cookies_of(headers, access.cookie) if (one := access.session(secret))]
        keys = headers.get(KEY_HEADER, [])
        unlocked = [(one, secret) for one, secret in found if access.is_unlocked(one, secret, keys)]
        if not unlocked:
            if found and not keys:
                raise RequestRefusedError(401, _LOCKED, is_locked=True)
            return
        session, secret = unlocked[0]
        if scope["method"] not in ("GET", "HEAD") and not (headers.get("origin") or headers.get("sec-fetch-site")):
            raise RequestRefusedError(403, "a request with a cookie and effects says where it comes from: send Origin")
        state["role"], state["actor"] = session.role, session.actor
        state["is_valid"] = lambda: access.session(secret) is not None


_LOCKED = "the cookie of a session does not suffice: its key is missing, which the pages send as X-Reefknot-Key"
_MISSING = "a token is needed; log in, or send it as Authorization: Bearer TOKEN"
_REFUSED = (
    "this token is not accepted: `up` and `dashboard` make a new one with each start, unless dashboard.operator_token "
    "names one; it is sent as Authorization: Bearer TOKEN"
)


def is_open(path: str) -> bool:
    """Whether a path is for everybody: the login, and the files that are no data."""
    return path == "/login" or path.startswith("/static/")


def is_data(path: str) -> bool:
    """Whether a path is for programs and scripts: no link of another site leads to it."""
    return path.startswith(("/api/", "/live", "/metrics"))


def client_address(scope: Scope) -> str:
    return str((scope.get("client") or ("unknown",))[0])


def cookies_of(headers: dict[str, list[str]], name: str) -> list[str]:
    """The values of all cookies of a name. Another server of this host may have set one of the same name."""
    pairs = (pair.strip().partition("=") for line in headers.get("cookie", []) for pair in line.split(";"))
    return [value for key, _, value in pairs if key == name]


def _always() -> bool:
    """Whether a request stays valid that brought the token itself, or needs none."""
    return True


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


class Body:
    """The body of a request, bounded in size and time."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._size = 0
        self._ends_at = asyncio.get_running_loop().time() + BODY_S
        self._is_read = False
        for length in _headers(scope).get("content-length", []):
            if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
                raise RequestRefusedError(413, f"the body is too large; accepted: at most {MOST_BODY_BYTES} bytes")

    async def receive(self) -> Message:
        if self._is_read:  # from here on, only the end of the connection is waited for
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._receive()
        except TimeoutError:
            raise RequestRefusedError(408, f"the body did not arrive within {BODY_S:g} s") from None
        self._size += len(message.get("body", b""))
        if self._size > MOST_BODY_BYTES:
            raise RequestRefusedError(413, f"the body is too large; accepted: at most {MOST_BODY_BYTES} bytes")
        self._is_read = not message.get("more_body", False)
        return message


def _is_for_this_machine(scope: Scope) -> bool:
    """Whether a request is for a name that other servers of this machine have as well."""
    return any(one.lower().startswith(LOOPBACK_NAMES) for one in _headers(scope).get("host", []))


class Answer:
    """The response of a request: the headers of every response, and the refusal where nothing was sent yet."""

    def __init__(self, scope: Scope, send: Send, *, tls: bool = False) -> None:
        self._scope = scope
        self._send = send
        self._headers = (*_HEADERS, _STAY_SECURE) if tls and not _is_for_this_machine(scope) else _HEADERS
        self._has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            caching = b"no-cache" if self._scope["path"].startswith("/static/") else b"no-store"
            ours = (*self._headers, (b"cache-control", caching))
            names = {name for name, _ in ours}
            kept = [one for one in message.get("headers", ()) if one[0].lower() not in names]
            message["headers"] = [*kept, *ours]
        await self._send(message)

    async def refuse(self, error: RequestRefusedError) -> None:
        """Tell why: as JSON to programs, to a browser as the page that sends the key or as the login, else as text."""
        if self._has_begun:
            return
        path = self._scope["path"]
        headers: list[tuple[bytes, bytes]] = []
        is_look = self._scope["method"] in ("GET", "HEAD") and not is_data(path)
        if is_look and error.is_locked:
            await self._put(200, b"text/html; charset=utf-8", OPENING_PAGE, [])
            return
        if is_look and error.status == 401:
            asked = self._scope.get("query_string", b"").decode("latin-1")
            onward = quote(f"{quote(path)}?{asked}" if asked else quote(path), safe="/")
            await self._put(303, b"text/plain", b"", [(b"location", f"/login?next={onward}".encode())])
            return
        if error.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="reefknot"'))
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        if path.startswith("/api/"):
            body = json.encode({"error": {"kind": KINDS.get(error.status, "invalid"), "message": str(error)}})
            await self._put(error.status, b"application/json", body, headers)
        else:
            await self._put(error.status, b"text/plain; charset=utf-8", f"{error}\n".encode(), headers)

    async def _put(self, status: int, kind: bytes, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        length = (b"content-length", str(len(body)).encode())
        all_headers = [(b"content-type", kind), length, *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": all_headers})
        is_head = self._scope["method"] == "HEAD"
        await self.send({"type": "http.response.body", "body": b"" if is_head else body})


OPENING_PAGE = Path(__file__).with_name("templates").joinpath("opening.html").read_bytes()
"""The answer to a look with a cookie alone: a page without data, whose script asks again with the session's key."""
KINDS = {401: "unauthorized", 403: "forbidden", 408: "temporary", 413: "too_large", 429: "throttled", 500: "internal"}
"""The kind of a refusal in the API, by its status."""
