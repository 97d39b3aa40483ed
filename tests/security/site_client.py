"""Requests to the dashboard's application in process, byte by byte: also those that no client would send."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import unquote

from reefknot.console.dashboard.security import SiteAccess
from reefknot.console.dashboard.server import build_app
from reefknot.console.dashboard.site import Site
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import Settings
from reefknot.stores.opening import open_store
from tests.unit.console.cli import work_items

PORT = 8321
HOST = f"127.0.0.1:{PORT}"
ORIGIN = f"http://{HOST}"
OPERATOR, READER = "operator-token-of-a-test", "reader-token-of-the-test"

Headers = Iterable[tuple[str, str]]


class Answered(NamedTuple):
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def access(**more: Any) -> SiteAccess:
    given: dict[str, Any] = {"operator_token": OPERATOR, "reader_token": READER, "port": PORT}
    return SiteAccess(**given | more)


@asynccontextmanager
async def opened_site(path: Path, settings: Settings | None = None, **more: Any) -> AsyncIterator[Site]:
    """A site over the store in this file."""
    async with open_store(f"sqlite:{path}", tidy=False) as store:
        yield Site(store, access=access(**more), redactor=Redactor(()), settings=settings, shown=f"sqlite:{path}")


@asynccontextmanager
async def new_site(**more: Any) -> AsyncIterator[Site]:
    """A site over an empty store in memory."""
    async with open_store("memory:") as store:
        yield Site(store, access=access(**more), redactor=Redactor(()), shown="memory:")


def bearer(token: str = OPERATOR) -> tuple[str, str]:
    return ("Authorization", f"Bearer {token}")


def request_scope(method: str, target: str, headers: Headers) -> dict[str, Any]:
    """A request as a server hands it to an application."""
    path, _, query = target.partition("?")
    fixed: dict[str, Any] = {"type": "http", "scheme": "http", "http_version": "1.1", "root_path": ""}
    ends = {"client": ("127.0.0.1", 50000), "server": ("127.0.0.1", PORT)}
    address = {"path": unquote(path, errors="surrogateescape"), "raw_path": path.encode()}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return fixed | ends | address | {"method": method, "query_string": query.encode(), "headers": encoded}


async def ask(
    app: Any, method: str, target: str, headers: Headers = (), body: bytes = b"", host: str | None = HOST
) -> Answered:
    """The answer of an application to one request; `host` is None for one without that header."""
    scope = request_scope(method, target, [*([] if host is None else [("Host", host)]), *headers])
    messages: list[Any] = []
    told = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if told:
            return told.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    async with asyncio.timeout(20):
        await app(scope, receive, send)
    begin = messages[0]
    answered = {name.decode("latin-1"): value.decode("latin-1") for name, value in begin["headers"]}
    return Answered(begin["status"], answered, b"".join(one.get("body", b"") for one in messages[1:]))


def build(site: Site) -> Any:
    return build_app(site)


async def login(app: Any, token: str = OPERATOR, name: str = "") -> list[tuple[str, str]]:
    """The headers of a new session: its cookie, and its key."""
    form = [("Content-Type", "application/x-www-form-urlencoded"), ("Origin", ORIGIN), ("Accept", "application/json")]
    answered = await ask(app, "POST", "/login", form, f"token={token}&name={name}".encode())
    assert answered.status == 200, answered
    return [("Cookie", answered.headers["set-cookie"].partition(";")[0]), ("X-Reefknot-Key", answered.json["key"])]


def stored_work(path: Path) -> None:
    """A store with a job in each state that a look can meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_stored())


@cache
def _stored() -> bytes:
    """The file of that store, which is made once."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "state.db")
        work_items.submitted(path, "waiting", "with/slash", "ümlaut ☃")
        work_items.quarantined(path, "held")
        work_items.quarantined(path, "held too", "crash_suspect")
        assert not Path(f"{path}-wal").exists(), "everything is in the one file"
        return path.read_bytes()
