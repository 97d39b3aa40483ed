"""
A guided tour of retries: `python -m reefknot.demo --retry`.

A small HTTP service on this machine fails on purpose, and each scene shows what a retry does about it. Nothing leaves
the machine. With `--fast` time is virtual. Every number shown is counted, not written down beforehand.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import reefknot as rk
from reefknot.runtime.log import printable

LOOPBACK = "127.0.0.1"
BLOCKS_PER_SECOND = 20
WIDEST_BAR = 48
STOPPED_BY_SIGNAL = 130


# ---- the service -----------------------------------------------------------------------------------------------------


class Response(NamedTuple):
    """The service's response to one request."""

    status: int
    retry_after: int | None = None
    hangs: bool = False


OK, DOWN, HANGS = Response(200), Response(503), Response(200, hangs=True)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, service: Service, *rest: Any) -> None:
        self._service = service
        super().__init__(*rest)

    def do_GET(self) -> None:
        answer = self._service.respond(self.path)
        if answer.hangs:
            self._service.closing.wait(30)
            return
        with suppress(ConnectionError):  # the caller is gone: killed, or its attempt was cancelled
            self._send(answer)

    def _send(self, answer: Response) -> None:
        body = b"here you are\n"
        self.send_response(answer.status)
        if answer.retry_after is not None:
            self.send_header("Retry-After", str(answer.retry_after))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the standard library's
        """Log nothing: the tour prints every request."""


class Service:
    """An HTTP service with scripted responses per path; the last one is repeated."""

    def __init__(self) -> None:
        self.requests = 0
        self.closing = Event()
        self._responses: dict[str, list[Response]] = {}
        self._server = ThreadingHTTPServer((LOOPBACK, 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def script(self, path: str, *responses: Response) -> None:
        """Script the responses of `path`, and count requests from 0."""
        self._responses[path] = list(responses)
        self.requests = 0

    def respond(self, path: str) -> Response:
        self.requests += 1
        waiting = self._responses.get(path, [Response(404)])
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# ---- the tour -------------------------------------------------------------------------------------------------------


def line_printer() -> Callable[[str, str], None]:
    """A function that prints a line in a style, in colour where rich is installed and stdout is a terminal."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda text, style: print(printable(text), flush=True)
    console = Console(highlight=False)
    return lambda text, style: console.print(Text(printable(text), style=style), soft_wrap=True)


@contextmanager
def logged_from(level: int) -> Iterator[None]:
    """Log nothing below this level: a demo prints every retry itself."""
    logger = logging.getLogger("reefknot")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class Tour:
    """Prints, fetches and waits for the scenes."""

    def __init__(self, service: Service, pause: Callable[[float], None]) -> None:
        self.service = service
        self.pause = pause
        self._say = line_printer()
        self._open = build_opener(ProxyHandler({})).open  # not through a proxy of this machine
        self._scene = 0

    def scene(self, title: str, code: str) -> None:
        self._scene += 1
        self._say("", "")
        self._say(f"{self._scene}. {title}", "bold")
        self._say(f"   {code}", "cyan")

    def line(self, text: str, style: str = "") -> None:
        self._say(f"   {text}", style)

    def conclude(self, text: str) -> None:
        self._say(f"   => {text}", "green")

    def fetch(self, path: str) -> str:
        """Send a GET, and print its status."""
        try:
            with self._open(f"http://{LOOPBACK}:{self.service.port}{path}", timeout=5) as answer:
                text: str = answer.read().decode().strip()
        except HTTPError as error:
            error.close()
            self._answered(path, error.code)
            raise
        self._answered(path, 200)
        return text

    async def afetch(self, path: str) -> str:
        """`fetch`, awaited; cancelling it closes the connection."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self.service.port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            self._answered(path, int(head.split()[1]))
            return body.strip()
        finally:
            writer.close()

    def _answered(self, path: str, status: int) -> None:
        self.line(f"GET {path:<8} {status} {HTTPStatus(status).phrase}", "" if status == HTTPStatus.OK else "yellow")

    def bar(self, event: rk.RetryEvent) -> None:
        """The `on_retry` hook: draws the wait that begins now."""
        delay = event.delay or 0.0
        blocks = min(WIDEST_BAR, max(1, round(delay * BLOCKS_PER_SECOND)))
        cause = "" if event.failure is None or event.failure.http_status else f"  after {event.failure.exception}"
        self.line(f"wait {delay:5.2f} s  {'█' * blocks}{cause}", "blue")

    def note(self, error: Exception) -> None:
        """Print the notes that reefknot added to an exception."""
        for line in getattr(error, "__notes__", []):
            self.line(f"note: {line}", "dim")


# ---- the scenes ------------------------------------------------------------------------------------------------------


def plain_failure(tour: Tour) -> None:
    tour.scene("A service is down, without retries", "fetch(url)")
    tour.service.script("/flaky", DOWN)
    try:
        tour.fetch("/flaky")
    except HTTPError as error:
        tour.conclude(f"the caller gets {type(error).__name__} {error.code} at once")


def recovery(tour: Tour) -> None:
    tour.scene("A retry that recovers", '@rk.retry(attempts=5, base_delay=0.3, jitter="equal")')
    tour.service.script("/flaky", DOWN, DOWN, DOWN, OK)
    fetch = rk.retry(attempts=5, base_delay=0.3, jitter="equal", on_retry=tour.bar)(tour.fetch)

    text = fetch("/flaky")
    tour.conclude(
        f"{text!r}, after {tour.service.requests} requests; waits double, and jitter spreads the retries of a fleet"
    )


def server_hint(tour: Tour) -> None:
    tour.scene("The server sets the wait: Retry-After", "@rk.retry(attempts=3, base_delay=0.1)")
    fetch = rk.retry(attempts=3, base_delay=0.1, on_retry=tour.bar, name="fetch")(tour.fetch)
    tour.service.script("/busy", Response(429, retry_after=1), OK)
    fetch("/busy")
    tour.conclude("the backoff would be 0.1 s at most; the server's 1 s is honoured, plus a little jitter")

    tour.service.script("/busy", Response(429, retry_after=3600))
    try:
        fetch("/busy")
    except HTTPError as error:
        tour.note(error)
        tour.conclude("an hour exceeds max_retry_after (300 s): the caller gets the error now, not in an hour")


def deadline(tour: Tour) -> None:
    tour.scene("A deadline that holds", 'rk.Retrier(attempts=100, deadline=1.5, strategy="fixed", base_delay=0.4, …)')
    tour.service.script("/down", DOWN)
    retrier = rk.Retrier(
        attempts=100, deadline=1.5, strategy="fixed", base_delay=0.4, jitter="none", on_retry=tour.bar, name="fetch"
    )

    outcome = retrier.run(tour.fetch, "/down")
    assert outcome.error is not None
    tour.note(outcome.error)
    tour.conclude(
        f"given up after {outcome.elapsed:.2f} s: one more wait would have exceeded the deadline, so it was not started"
    )


def nesting(tour: Tour) -> None:
    tour.scene("A retry inside a retry", "@rk.retry(attempts=3, …) around @rk.retry(attempts=3, …)")
    tour.service.script("/down", DOWN)
    inner = rk.retry(attempts=3, base_delay=0.1, on_retry=tour.bar, name="inner")(tour.fetch)

    @rk.retry(attempts=3, base_delay=0.1, on_retry=tour.bar, name="outer")
    def report() -> str:
        return inner("/down")

    try:
        report()
    except HTTPError as error:
        tour.note(error)
        tour.conclude(f"{tour.service.requests} requests, not {3 * 3}: the outer retry sees that the inner one gave up")


def breaker(tour: Tour) -> None:
    billing = rk.CircuitBreaker("billing", failures=3, cooldown=1.0)
    tour.scene(
        "A circuit breaker", 'rk.Retrier(attempts=10, breaker=rk.CircuitBreaker("billing", failures=3, cooldown=1), …)'
    )
    tour.service.script("/bill", DOWN, DOWN, DOWN, OK)
    retrier = rk.Retrier(attempts=10, base_delay=0.1, breaker=billing, on_retry=tour.bar)

    retrier.run(tour.fetch, "/bill")
    tour.line(f"the breaker is {billing.state} after {tour.service.requests} failures in a row")
    refused = retrier.run(tour.fetch, "/bill")
    tour.line(f"next call: {refused.error}", "yellow")
    tour.line(f"the service saw {tour.service.requests} requests: the breaker rejected the call")
    tour.line("one second later")
    tour.pause(1.0)
    retrier.call(tour.fetch, "/bill")
    tour.conclude(f"one probe succeeded, and the breaker is {billing.state} again")


def asynchronous(tour: Tour) -> None:
    tour.scene("Async code, where a hanging attempt can be cancelled", "@rk.retry(attempt_timeout=0.25, deadline=3)")
    tour.service.script("/hangs", HANGS, OK)
    fetch = rk.retry(attempt_timeout=0.25, deadline=3, base_delay=0.2, on_retry=tour.bar)(tour.afetch)

    text = asyncio.run(fetch("/hangs"))
    tour.conclude(
        f"{text!r}: a hanging attempt was cancelled after 0.25 s, and request {tour.service.requests} was answered"
    )


Scene = Callable[[Tour], None]
SCENES: tuple[Scene, ...] = (plain_failure, recovery, server_hint, deadline, nesting, breaker, asynchronous)


# ---- main --------------------------------------------------------------------------------------------------------


def _tour(fast: bool) -> None:
    with ExitStack() as opened:
        pause: Callable[[float], None] = time.sleep
        if fast:
            pause = opened.enter_context(rk.testing.virtual_time()).advance
        opened.enter_context(logged_from(logging.CRITICAL + 1))
        tour = Tour(opened.enter_context(Service()), pause)
        tour.line(f"A service that fails on purpose listens on {LOOPBACK}:{tour.service.port}.")
        for scene in SCENES:
            scene(tour)
            if not fast:
                time.sleep(0.4)
        tour.line("")
        tour.line("Read on in README.md and docs/tutorial.md.")


def main(*, fast: bool = False) -> int:
    """Run the tour, with `fast` in virtual time, and return its exit code."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # for a terminal without the block character
    try:
        _tour(fast)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED_BY_SIGNAL
    return 0
