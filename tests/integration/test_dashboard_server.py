"""The server of the dashboard over real sockets: its bounds, its end, and a store that does not answer."""

import asyncio
import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from reefknot.console.dashboard import api, connections, live, server
from reefknot.console.dashboard.security import RequestGuard, SiteAccess
from reefknot.console.dashboard.server import listening_socket, prepare, serving
from reefknot.console.dashboard.site import Site
from reefknot.core.redaction import Redactor
from reefknot.errors import OperationError, StoreLockedError, StoreReplacedError
from reefknot.policy.settings import Settings, load_settings
from reefknot.stores.opening import open_store
from tests.unit.console.cli import work_items

pytestmark = pytest.mark.real_time

PATIENCE_S = 30
LARGE = 1_000_000
PEM = Path(__file__).with_name("localhost.pem")
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"


class Talk(NamedTuple):
    """A connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: str
    """The headers of a request that is let in."""

    async def ask(self, line: str, more: str = "", body: bytes = b"") -> bytes:
        """The whole answer to one request, on a connection that ends with it."""
        self.writer.write(f"{line} HTTP/1.1\r\n{self.head}Connection: close\r\n{more}\r\n".encode() + body)
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def watch(self) -> bytes:
        """The status of a stream of changes, which goes on."""
        self.writer.write(f"GET /live?view=overview HTTP/1.1\r\n{self.head}\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readline()).split()[1]

    async def until_end(self) -> None:
        """Wait until the other side ends the connection, without a word."""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                assert await self.reader.read() == b""


class Served(NamedTuple):
    """A site over a store, and what connects to it."""

    site: Site
    connect: Callable[[], Awaitable[Talk]]

    async def ask(self, line: str, more: str = "", body: bytes = b"") -> bytes:
        """The whole answer to one request, on a connection of its own."""
        return await (await self.connect()).ask(line, more, body)


@asynccontextmanager
async def served(url: str = "memory:", settings: Settings | None = None) -> AsyncIterator[Served]:
    writers: list[asyncio.StreamWriter] = []
    async with open_store(url, tidy=False) as store:
        how = prepare(settings, port=0)
        site = Site(store, access=how.access, redactor=Redactor(()), shown=url)
        port = how.socket.getsockname()[1]

        async def connect() -> Talk:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return Talk(reader, writer, f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {how.token}\r\n")

        async with serving(site, how):
            yield Served(site, connect)
            for writer in writers:
                writer.close()


def over_tls(folder: Path) -> Settings:
    (folder / "reefknot.yaml").write_text(f"dashboard: {{tls_certificate: {PEM}, tls_key: {PEM}}}")
    return load_settings(str(folder / "reefknot.yaml"), environ={}, cwd=folder)


async def test_headers_that_do_not_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_S", 0.2)
    async with served() as here:
        silent, slow = await here.connect(), await here.connect()
        slow.writer.write(b"GET / HTTP/1.1\r\nHost: ")
        await silent.until_end()
        await slow.until_end()
        monkeypatch.undo()
        assert b" 200 OK" in await here.ask("GET /api/v1/jobs")


async def test_an_answer_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for headers is not the time for the operation."""
    monkeypatch.setattr(server, "HEADER_S", 1.0)
    async with served() as here:
        work = here.site.store.work
        snapshot = work.snapshot

        async def late(*given: Any) -> Any:
            await asyncio.sleep(1.2)
            return await snapshot(*given)

        monkeypatch.setattr(work, "snapshot", late)
        assert b" 200 OK" in await here.ask("GET /api/v1/jobs")


async def test_headers_and_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    async with served() as here:
        large = await here.ask("GET /", f"X: {'x' * server.MOST_HEADER_BYTES}\r\n")
        assert b" 400 " in large
        silent, halfway, slow = [await here.connect() for _ in range(3)]
        halfway.writer.write(b"GET / HTTP/1.1\r\nHost: ")
        slow.writer.write(f"POST /login HTTP/1.1\r\n{slow.head}{FORM}Content-Length: 9\r\n\r\n12".encode())
        for ended in (silent, halfway, slow):
            assert b" 200 OK" in await here.ask("GET /api/v1/jobs")
            await ended.until_end()
            await here.connect()  # for the one that was answered, so that the next one needs room


async def test_connections_that_are_being_answered_stay_and_those_beyond_are_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    async with served() as here:
        watching = [await here.connect() for _ in range(3)]
        assert [await one.watch() for one in watching] == [b"200"] * 3
        for _ in range(5):
            with pytest.raises((ConnectionError, AssertionError)):  # closed before or after it was written to
                assert await here.ask("GET /api/v1/jobs")
        assert [one.writer.is_closing() or one.reader.at_eof() for one in watching] == [False] * 3
    assert len([one for one in caplog.messages if "connections are open" in one]) == 1, "once in a minute"


def greedy(head: str, target: str, number: int, *, tls: bool = False) -> socket.socket:
    """A connection with so many requests at once, whose client has taken one byte of the answers."""
    host, _, port = head.partition("\r\n")[0].removeprefix("Host: ").partition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(PATIENCE_S)
    made.connect((host, int(port)))
    if tls:
        made = ssl.create_default_context(cafile=PEM).wrap_socket(made, server_hostname="localhost")
    request = f"GET {target} HTTP/1.1\r\n{head}"
    made.sendall(f"{request}\r\n".encode() * (number - 1) + f"{request}Connection: close\r\n\r\n".encode())
    assert made.recv(1) == b"H"
    return made


@pytest.fixture
def large_answer(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an answer that no buffer holds, for whoever has a token."""
    monkeypatch.setattr(api, "openapi_document", lambda: "x" * LARGE)
    return "/api/v1/openapi.json"


@pytest.mark.parametrize("has_token", [False, True])
async def test_unread_connections_leave_room(
    has_token: bool, large_answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static files are for everybody, so whoever reaches the port can ask for them again and again."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    async with served() as here:
        watching = await here.connect()
        assert await watching.watch() == b"200"
        target, number = (large_answer, 3) if has_token else ("/static/reefknot.js", 40)
        head = watching.head if has_token else watching.head.partition("Authorization")[0]
        with ExitStack() as held:
            for _ in range(4):
                held.enter_context(await asyncio.to_thread(greedy, head, target, number))
            for _ in range(5):
                assert b" 200 OK" in await here.ask("GET /api/v1/jobs")
        assert not watching.reader.at_eof()


def taken_of(connection: socket.socket, pause: float) -> int:
    """Bytes that a client takes until the other side ends the connection, with a pause before each piece of it."""
    taken = 0
    with connection, suppress(ConnectionError):
        while True:
            time.sleep(pause)
            if not (piece := connection.recv(1 << 16)):
                break
            taken += len(piece)
    return taken


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_takes_nothing_is_let_go_and_a_slow_one_gets_everything(
    tls: bool, large_answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = over_tls(tmp_path) if tls else None
    monkeypatch.setattr(connections, "STALLED_S", 0.8)
    async with served("memory:", settings) as here:
        head = (await here.connect()).head
        silent, slow = [await asyncio.to_thread(greedy, head, large_answer, 1, tls=tls) for _ in range(2)]
        assert await asyncio.to_thread(taken_of, slow, 0.03 if tls else 0.005) > LARGE
        assert await asyncio.to_thread(taken_of, silent, 0) < LARGE


async def test_idle_connections_take_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process runs steps as well, and they need descriptors."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)
    async with served() as here:
        before = len(os.listdir("/proc/self/fd"))
        held = [await here.connect() for _ in range(300)]
        assert b" 200 OK" in await here.ask("GET /api/v1/jobs")
        most = len(os.listdir("/proc/self/fd")) - before - len(held)  # those of the clients are in this process
        assert most <= 25


async def test_a_handshake_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connections, "SECURED_S", 0.2)
    settings = over_tls(tmp_path)

    async with open_store("memory:", tidy=False) as store:
        how = prepare(settings, port=0)
        site = Site(store, access=how.access, redactor=Redactor(()), shown="memory:")
        async with serving(site, how):
            talk = Talk(*await asyncio.open_connection("127.0.0.1", how.socket.getsockname()[1]), head="")
            await talk.until_end()
            talk.writer.close()


async def test_a_client_that_leaves_within_its_body_writes_nothing_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    guarded = RequestGuard.__call__

    async def seen(self: RequestGuard, scope: Any, *given: Any) -> None:
        await guarded(self, scope, *given)
        ended.put_nowait(scope["path"])

    monkeypatch.setattr(RequestGuard, "__call__", seen)
    async with served() as here:
        for target in ("/login", "/api/v1/jobs"):
            talk = await here.connect()
            talk.writer.write(f"POST {target} HTTP/1.1\r\n{talk.head}{FORM}Content-Length: 100\r\n\r\n123".encode())
            talk.writer.close()
        async with asyncio.timeout(PATIENCE_S):
            assert {await ended.get(), await ended.get()} == {"/api/v1/jobs", "/login"}
    assert caplog.messages == []


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the request"])
async def test_a_chunk_with_an_endless_extension_is_refused_once(caplog: pytest.LogCaptureFixture, waits: bool) -> None:
    """The request is under way when its body turns out to be none: also for one whose answer needs no body."""
    async with served() as here:
        for line in ("GET /api/v1/jobs", "POST /api/v1/jobs/retry", "GET /work", "POST /login"):
            talk = await here.connect()
            head = f"{line} HTTP/1.1\r\n{talk.head}{FORM}Transfer-Encoding: chunked\r\n\r\n2;"
            talk.writer.write(head.encode())
            if waits:
                await talk.writer.drain()
                await asyncio.sleep(0)
            talk.writer.write(b"a" * 500_000)
            with suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    await talk.reader.read()
    assert [one for one in caplog.messages if "internal error" in one or "Traceback" in one] == []
    assert sum("is refused: it is not valid HTTP" in one for one in caplog.messages) == 1


def json_of(body: bytes) -> tuple[str, bytes]:
    """The headers of a JSON body, and the body."""
    return f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n", body


async def test_a_key_that_stands_twice_among_many_is_found_soon() -> None:
    names = [b'"%d":1' % number for number in range(20_000)]

    async def seconds_and_answer(here: Served, pairs: list[bytes]) -> tuple[float, bytes]:
        loop, (headers, body) = asyncio.get_running_loop(), json_of(b"{%b}" % b",".join(pairs))
        began = loop.time()
        answer = await here.ask("POST /api/v1/jobs", headers, body)
        return loop.time() - began, answer

    async with served() as here:
        usual, other = await seconds_and_answer(here, names)
        took, answer = await seconds_and_answer(here, [*names, names[-1]])
        assert b"the key stands twice" not in other
        assert b"19999: the key stands twice" in answer
        assert took < 5 * usual + 2


async def test_a_deep_and_wide_body_takes_little_memory() -> None:
    headers, body = json_of(b'{"a":' * 400 + b"[%b1]" % (b'"",' * 50_000) + b"}" * 400)
    async with served() as here:
        tracemalloc.start()
        try:
            assert b" 400 " in await here.ask("POST /api/v1/jobs", headers, body)
            assert tracemalloc.get_traced_memory()[1] < 100 * len(body)
        finally:
            tracemalloc.stop()


async def test_others_are_answered_while_a_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, answered, body_of = threading.Event(), threading.Event(), api.body_of
    seen: list[bool] = []

    def slow(*given: Any) -> Any:
        reading.set()
        seen.append(answered.wait(PATIENCE_S / 3))
        return body_of(*given)

    async with served() as here:
        monkeypatch.setattr(api, "body_of", slow)
        posted = asyncio.create_task(here.ask("POST /api/v1/jobs", *json_of(b"{}")))
        await asyncio.to_thread(reading.wait, PATIENCE_S)
        assert b" 200 OK" in await here.ask("GET /api/v1/jobs")
        answered.set()
        assert b" 400 " in await posted
    assert seen == [True]


async def test_viewers_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 5)
    async with served() as here:
        talks = [await here.connect() for _ in range(30)]
        statuses = await asyncio.gather(*(talk.watch() for talk in talks))
        assert Counter(statuses) == {b"200": 5, b"503": 25}
        for talk in talks:
            talk.writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while await (await here.connect()).watch() != b"200":
                pass  # until the server has seen that a place is free
    assert not [one for one in caplog.messages if "internal error" in one]


async def test_a_request_for_headers_alone_leaves_no_stream_open_and_changes_nothing(tmp_path: Path) -> None:
    """An answer that does not end would keep the connection open, and a viewer counted."""
    path = tmp_path / "state.db"
    await asyncio.to_thread(work_items.submitted, path, "known")
    async with served(f"sqlite:{path}") as here:
        for target in ("/", "/work/known", "/live?view=job&id=known", "/api/v1/jobs", "/metrics", "/login"):
            head, _, body = (await here.ask(f"HEAD {target}")).partition(b"\r\n\r\n")
            assert (b" 200 OK" in head, body) == (True, b""), target
        refused = await here.ask("HEAD /api/v1/jobs/known/cancel")
        assert b" 405 " in refused
        assert b'"state":"pending"' in await here.ask("GET /api/v1/jobs/known")


@pytest.mark.parametrize("name", [".", "..", "a/.."])
async def test_a_job_that_clients_take_out_of_a_path_is_named_in_the_query(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state.db"
    await asyncio.to_thread(work_items.submitted, path, name)
    async with served(f"sqlite:{path}") as here:
        query = f"job={quote(name, safe='')}"
        for target in (f"/jobs/?{query}", f"/jobs//story?{query}"):
            assert b'"state":"pending"' in await here.ask(f"GET /api/v1{target}")
        for target in ("/jobs/", "/jobs//story", "/jobs//story?tenant=a"):
            assert b" 404 " in await here.ask(f"GET /api/v1{target}")
        twice = await here.ask(f"GET /api/v1/jobs/other/story?{query}")
        assert b"job: unknown parameter; accepted here: tenant" in twice
        done = await here.ask(f"POST /api/v1/jobs//cancel?{query}", "Content-Length: 0\r\n")
        assert b'"cancelled":true' in done


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (StoreReplacedError("sqlite:x", "is gone", "start again"), True),
        (StoreLockedError("sqlite:x", "is locked", "try again"), False),
        (OperationError("no", "invalid"), False),
    ],
)
def test_only_a_store_that_is_gone_is_opened_anew(error: Exception, is_lost: bool) -> None:
    told: list[bool] = []
    site = Site(None, access=SiteAccess(), redactor=Redactor(()), on_lost=lambda: told.append(True))  # type: ignore[arg-type]
    site.loss = "the store sqlite:x is gone: check the disk"
    refusal = site.refusal(error)
    assert told == [True] * is_lost
    assert (refusal.message == site.loss) is is_lost


def test_a_free_port_is_taken_only_where_nobody_chose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_socket("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        monkeypatch.setattr(server, "DEFAULT_PORT", taken)
        with listening_socket("127.0.0.1", None) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OperationError, match="the port is in use"):
            listening_socket("127.0.0.1", taken)


async def test_a_server_that_fails_ends_its_task_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("the socket was taken away")

    monkeypatch.setattr(uvicorn.Server, "startup", fail)
    async with open_store("memory:") as store:
        how = prepare(None, port=0)
        site = Site(store, access=how.access, redactor=Redactor(()))
        async with serving(site, how) as task:
            with pytest.raises(OSError, match="taken away"):
                await asyncio.shield(task)
