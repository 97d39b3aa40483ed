"""
The server: its socket, the application that it serves, and its life inside the event loop of a command.

The socket is bound before anything heavy is imported, so that a port in use is reported at once. The server has no
signal handlers and no log of its own, and ends with the command: streams to browsers are closed first.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reefknot import clock
from reefknot.console.dashboard.connections import REPORTED_EVERY_S, ListeningSocket
from reefknot.console.dashboard.security import RequestGuard, SiteAccess
from reefknot.console.dashboard.site import HttpRefusal, Site
from reefknot.errors import ConfigurationError, OperationError, ReefknotError
from reefknot.runtime.addresses import is_loopback
from reefknot.runtime.files import whole_file
from reefknot.runtime.log import logger, printable
from reefknot.stores.port.engines import file_of

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

    from reefknot.policy.schema import DashboardSection
    from reefknot.policy.settings import Settings

DEFAULT_PORT = 8321
MOST_CONNECTIONS = 256
MOST_HEADER_BYTES = 32 * 1024
HEADER_S = 10.0
"""Longest time from the begin of a connection, or the end of a response, to the end of the next request's headers."""
SEND_BUFFER_BYTES = 64 * 1024
"""What the kernel keeps for a client. It would keep megabytes, and meanwhile a slow client seems to take nothing."""
GRACE_S = 2
SHORTEST_TOKEN = 16
NEEDED = ("starlette", "uvicorn", "jinja2")
STATIC = Path(__file__).with_name("static")

# ---- the application -------------------------------------------------------------------------------------------------


def build_app(site: Site) -> Starlette:
    """The application of a site: pages, static files, the API, metrics and the login, all behind the guard."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute, Mount
    from starlette.staticfiles import StaticFiles

    from reefknot.console.dashboard import api, login, pages

    static = Mount("/static", StaticFiles(directory=STATIC))
    routes: list[BaseRoute] = [*login.routes(site), *api.routes(site), static, *pages.routes(site)]

    async def refuse(request: Request, error: Exception) -> Response:
        return refused(site, request, site.refusal(error))

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = _HTTP_TEXTS.get(error.status_code, error.detail)
        refusal = HttpRefusal(error.status_code, _HTTP_KINDS.get(error.status_code, "invalid"), text)
        return refused(site, request, refusal, error.headers)

    handlers: dict[Any, Any] = dict.fromkeys((ReefknotError, TimeoutError, ConnectionError), refuse)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestGuard, access=site.access, redactor=site.redactor)],
        exception_handlers={**handlers, HTTPException: refuse_http},
    )
    app.router.redirect_slashes = False
    return app


_HTTP_TEXTS = {404: "there is nothing at this address", 405: "this address does not take that method; see Allow"}
_HTTP_KINDS = {404: "not_found", 405: "wrong_method"}


def refused(site: Site, request: Request, refusal: HttpRefusal, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a request that failed: JSON of the API, text of the metrics, a page elsewhere."""
    from starlette.responses import JSONResponse, PlainTextResponse

    from reefknot.console.dashboard import pages

    all_headers = {**(headers or {}), **refusal.headers}
    if request.url.path.startswith("/api/"):
        return JSONResponse(refusal.tree(), refusal.status, all_headers)
    if request.url.path == "/metrics":
        return PlainTextResponse(f"{refusal.message}\n", refusal.status, all_headers)
    response = pages.error_page(site, request, refusal)
    response.headers.update(all_headers)
    return response


# ---- address and tokens ----------------------------------------------------------------------------------------------


class Serving(Struct):
    """A bound socket, and the access to what will be served on it."""

    socket: ListeningSocket
    access: SiteAccess
    url: str
    token: str | None
    """The token when this start made it; a configured one is never shown."""
    certificate: tuple[str, str] | None = None
    token_from: str = ""
    """The setting and the reference of a configured token."""
    is_moved: bool = False
    """Whether the usual port is in use, so that a free one was taken."""
    link_file: Path | None = None
    """The file with the address and its token, for as long as it is served."""

    @property
    def link(self) -> str:
        """The address to open, with the token behind `#` unless the token is configured."""
        return self.url if self.token is None else f"{self.url}#token={self.token}"

    def keep_link(self, store: str) -> Path:
        """
        Write the address with its token into a file that only this user can read, and return its path.

        The file is next to the store's file, else among the temporary files. The address is not logged, because a log
        is kept for longer, and read by people who may not act here.
        """
        path = file_of(store)
        folder = None if path is None else Path(path).absolute().parent
        name, text = f"dashboard-{self.access.port}.url", f"{self.link}\n".encode()
        try:
            if folder is None:
                raise FileNotFoundError
            self.link_file = folder / name
            with whole_file(self.link_file, durable=False) as file:
                file.write(text)
        except OSError:  # a store that may only be read, or that is on a server
            handle, made = mkstemp(prefix="reefknot-", suffix=f"-{name}", dir=os.environ.get("RUNTIME_DIRECTORY"))
            with open(handle, "wb") as file:
                file.write(text)
            self.link_file = Path(made)
        return self.link_file


def prepare(
    settings: Settings | None,
    *,
    host: str | None = None,
    port: int | None = None,
    read_only: bool = False,
    has_flags: bool = True,
) -> Serving:
    """
    Check the section `dashboard`, bind its socket and make the tokens; whatever cannot be served is refused.

    With `has_flags`, the command has `--host` and `--port`, which an error may advise.
    """
    from reefknot.policy.schema import DashboardSection

    section = DashboardSection() if settings is None else settings.configuration.dashboard
    host = host or section.host
    tokens = _configured_tokens(settings)
    certificate = _certificate(section, settings)
    _check_reach(host, section)
    made = None
    if "operator" not in tokens and not read_only:
        tokens["operator"] = made = secrets.token_urlsafe(32)
    if read_only:
        tokens.pop("operator", None)
        if "reader" not in tokens:
            tokens["reader"] = made = secrets.token_urlsafe(32)
    chosen = section.port if port is None else port
    bound = listening_socket(host, chosen, has_flags=has_flags)
    number = bound.getsockname()[1]
    access = SiteAccess(
        operator_token=tokens.get("operator"),
        reader_token=tokens.get("reader"),
        host=host,
        port=number,
        allowed_hosts=section.allowed_hosts,
        tls=certificate is not None,
    )
    shown = f"[{host}]" if ":" in host else host
    setting = "reader_token" if read_only else "operator_token"
    token_from = "" if made else f"dashboard.{setting} ({getattr(section, setting)})"
    url = f"http{'s' * access.tls}://{shown}:{number}/"
    return Serving(bound, access, url, made, certificate, token_from, chosen is None and number != DEFAULT_PORT)


def _configured_tokens(settings: Settings | None) -> dict[str, str]:
    """The tokens that the configuration names; one that cannot be read or is short is an error."""
    from reefknot.policy.reading.session import Problem
    from reefknot.policy.secrets import resolve_at

    found: dict[str, str] = {}
    problems: list[object] = []
    for role in ("operator", "reader"):
        path = ("dashboard", f"{role}_token")
        if settings is None:
            continue
        secret = resolve_at(settings.tree, path, environ=os.environ, folder=settings.folder)
        if isinstance(secret, Problem):
            problems.append(secret)
        elif secret is not None:
            found[role] = secret.reveal().strip()
            if len(found[role]) < SHORTEST_TOKEN:
                text = f"the token is too short; accepted: at least {SHORTEST_TOKEN} characters, best random ones"
                problems.append(settings.tree.problem(path, text))
    if problems:
        raise ConfigurationError(problems)
    if len(found) == 2 and found["operator"] == found["reader"]:
        raise OperationError(
            "dashboard: operator_token and reader_token are the same; give each its own", "misconfigured"
        )
    return found


def _certificate(section: DashboardSection, settings: Settings | None) -> tuple[str, str] | None:
    """The files of certificate and key, None without TLS."""
    if (section.tls_certificate is None) != (section.tls_key is None):
        text = "dashboard: tls_certificate and tls_key belong together; set both, or none of them"
        raise OperationError(text, "misconfigured")
    if section.tls_certificate is None or section.tls_key is None or settings is None:
        return None
    certificate, key = (str(settings.folder / one) for one in (section.tls_certificate, section.tls_key))
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        text = f"dashboard: tls_certificate {certificate} and tls_key {key} cannot be used: {error}"
        raise OperationError(printable(text), "misconfigured") from None
    return certificate, key


def _check_reach(host: str, section: DashboardSection) -> None:
    """Refuse an address that others reach, unless TLS and tokens are configured."""
    from reefknot.console.operations.health import missing_protection

    if is_loopback(host):
        return
    missing = [f"dashboard.{name}" for name in missing_protection(section, host)]
    if missing:
        text = (
            f"the dashboard is not served on {printable(host, most=80)} without TLS and a configured token, because "
            f"other machines reach that address; set {', '.join(missing)}, or serve it on 127.0.0.1, for example "
            "behind an SSH tunnel"
        )
        raise OperationError(text, "misconfigured")


def listening_socket(host: str, port: int | None, *, has_flags: bool = True) -> ListeningSocket:
    """A socket that listens. Without a chosen port it is 8321, or a free one when that is taken."""
    try:
        return _listening(host, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port is None:
            return _listening(host, 0)
        shown = f"{printable(host, most=80)}:{DEFAULT_PORT if port is None else port}"
        if error.errno == errno.EADDRINUSE:
            ways = "--port or dashboard.port" if has_flags else "dashboard.port or REEFKNOT__DASHBOARD__PORT"
            text = (
                f"the dashboard cannot be served on {shown}: the port is in use, perhaps by another reefknot; choose "
                f"another with {ways} (0 takes a free one), or stop the other program"
            )
            raise OperationError(text, "temporary") from None
        reason = (error.strerror or type(error).__name__).lower()
        ways = "--host and --port, or dashboard.host and port" if has_flags else "dashboard.host and dashboard.port"
        text = f"the dashboard cannot be served on {shown}: {reason}; check {ways}"
        raise OperationError(text, "misconfigured") from None


def _listening(host: str, port: int) -> ListeningSocket:
    plain = host.strip("[]")
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM)
    bound = ListeningSocket(family, kind, protocol)
    bound.most = MOST_CONNECTIONS
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted ones inherit it
        bound.setblocking(False)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


# ---- serving ---------------------------------------------------------------------------------------------------------


def missing_extra() -> str | None:
    """The sentence about packages that are not installed; None when the dashboard can be served."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if not absent:
        return None
    way_out = "pip install '.[dashboard]' in a checkout"
    return f"the dashboard needs the extra 'dashboard': {way_out} (missing: {', '.join(absent)})"


@asynccontextmanager
async def serving(site: Site, how: Serving) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the site inside the running loop for as long as the block lasts. The task ends before that only by an
    error of the server."""
    server = await asyncio.to_thread(_server, site, how)  # the imports take a while, and the loop has work
    task = asyncio.create_task(server.serve(sockets=[how.socket]), name="dashboard")
    try:
        yield task
    finally:
        site.closing.set()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=GRACE_S + 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        how.socket.close()
        if how.link_file is not None:
            with suppress(OSError):
                how.link_file.unlink()


def _protocol(room: ListeningSocket) -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    reported_at = -REPORTED_EVERY_S

    class BoundedProtocol(H11Protocol):
        """HTTP/1.1 that does not wait for ever for the headers of a request, and tells whose is being answered."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._connection = room.found(transport.get_extra_info("socket").fileno())
            if self._connection is not None:
                self._connection.is_secured = True
                self._connection.is_answered = self._is_answered
            self._expect_request()

        def on_response_complete(self) -> None:
            if self._connection is not None and self._has_role():
                room.renew(self._connection)
            super().on_response_complete()
            self._expect_request()

        def send_400_response(self, msg: str) -> None:
            """Refuse what is not HTTP, such as a chunk with an endless extension, and end the connection. The request
            that it is part of may be under way: nothing more is sent for that one."""
            nonlocal reported_at
            if clock.now() - reported_at >= REPORTED_EVERY_S:  # any client can send it
                reported_at = clock.now()
                sender = printable(str(self.client[0]) if self.client else "unknown", most=60)
                logger().warning("dashboard: a request of %s is refused: it is not valid HTTP", sender)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                if cycle.response_started:
                    self.transport.close()
                    return
            super().send_400_response(msg)

        def _is_answered(self) -> bool:
            cycle = self.cycle
            is_whole = cycle is not None and not cycle.response_complete and not cycle.more_body
            return is_whole and self._has_role()

        def _has_role(self) -> bool:
            return self.cycle is not None and self.cycle.scope["state"].get("role") is not None

        def _expect_request(self) -> None:
            before = self.cycle
            if before is None or before.response_complete:  # else the next one is being answered already
                self.loop.call_later(HEADER_S, lambda: self.transport.close() if self.cycle is before else None)

    return BoundedProtocol


def _server(site: Site, how: Serving) -> Server:
    import uvicorn

    class EmbeddedServer(uvicorn.Server):
        """A server inside a command, whose signals are the command's."""

        def capture_signals(self) -> Any:
            return nullcontext()

    certificate, key = how.certificate or (None, None)
    config = uvicorn.Config(
        build_app(site),
        http=_protocol(how.socket),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=64,  # at most this number is accepted in one turn of the loop
        timeout_keep_alive=5,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    config.load()
    return EmbeddedServer(config)
