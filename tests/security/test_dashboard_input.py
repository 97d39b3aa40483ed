"""What requests bring: no look changes a store, no hostile text breaks an answer or gets into it as code."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import apsw
import msgspec
import pytest

from reefknot.console.dashboard import api, formats
from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.api_types import PREFIX, ApiRoute
from reefknot.console.dashboard.site import Site
from reefknot.console.operations import jobs
from reefknot.policy.settings import Settings, load_settings
from tests.security.site_client import ORIGIN, Answered, ask, bearer, build, login, opened_site
from tests.stories import InLoop

CONFIGURED = """
sources:
  notes: {connector: local_filesystem, path: ., every: 1h}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.step, payload: {}}}}
"""


AS_JSON = [bearer(), ("Content-Type", "application/json; charset=utf-8")]


@pytest.fixture
def path(stored: Path) -> Path:
    stored.with_name("reefknot.yaml").write_text(CONFIGURED)
    return stored


@pytest.fixture
def site(path: Path) -> InLoop:
    return InLoop(lambda: opened_site(path))


def settings(path: Path) -> Settings:
    return load_settings(str(path.parent / "reefknot.yaml"), environ={}, cwd=path.parent)


def dump(path: Path) -> dict[str, list[Any]]:
    """Every row of every table."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(map(repr, connection.execute(f'SELECT * FROM "{name}"'))) for name in names}
    finally:
        connection.close()


VALUES = {"job": "held", "name": "notes", "key": "a-key", "worker": "worker-1", "router": "router"}
SEARCHES = {"/search": "?text=held", "/documents/search": "?words=reef"}


def filled(route: ApiRoute) -> str:
    path = with_schedule(route.path)
    for name, value in VALUES.items():
        path = path.replace(f"{{{name}}}", quote(value, safe=""))
    query = "?target=block:http" if path.startswith("/policies/") else SEARCHES.get(path, "")
    return f"{PREFIX}{path}{query}"


def with_schedule(path: str) -> str:
    """The path with the name of a schedule, if it has a place for one; other names are those of sources."""
    return path.replace("/schedules/{name}", "/schedules/nightly")


def looks(app: Any) -> Iterator[str]:
    """Every address that a look can go to: those of the table, and those of the pages."""
    yield from (filled(route) for route in ROUTES if route.is_read)
    yield f"{PREFIX}/openapi.json"
    for route in app.router.routes:
        methods = getattr(route, "methods", None) or ()
        if "GET" in methods and not route.path.startswith(PREFIX) and route.path != "/live":
            path = with_schedule(route.path).replace("{job:path}", "held").replace("{job}", "held")
            yield path.replace("{name}", "notes").replace("{id:path}", "held")


async def look_at_everything(path: Path) -> list[tuple[str, str, int]]:
    """Ask for everything, with every method that may not change anything; the addresses and their statuses."""
    async with opened_site(path, settings(path)) as site:
        app = build(site)
        session = await login(app)
        return [
            (method, target, (await ask(app, method, target, session)).status)
            for target in looks(app)
            for method in ("GET", "HEAD", "OPTIONS", "TRACE")
        ]


def test_no_look_changes_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    before = dump(path)
    asked = asyncio.run(look_at_everything(path))
    assert dump(path) == before
    assert len(asked) >= 4 * 20
    assert {status for method, _, status in asked if method == "GET"} <= {200, 303, 404}
    assert sum(status == 200 for method, _, status in asked if method == "GET") >= 15
    assert {status for method, _, status in asked if method in ("OPTIONS", "TRACE")} <= {403, 405}


def test_a_look_that_cancels_would_be_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one route whose question is an action."""

    def cancels(route: ApiRoute) -> ApiRoute:
        call = lambda operator, *_: jobs.cancel_job(operator, "waiting")  # noqa: E731
        return msgspec.structs.replace(route, call=call) if route.name == "quarantine_stats" else route

    monkeypatch.setattr(api, "ROUTES", tuple(map(cancels, ROUTES)))
    before = dump(path)

    asyncio.run(look_at_everything(path))

    assert dump(path) != before


_MARKUP = (
    *("<script>alert(1)</script>", '"><script>alert(1)</script>', "'><img src=x onerror=alert(1)>"),
    *("<svg/onload=alert(1)>", "</title><script>alert(1)</script>", "</textarea><script>alert(1)</script>"),
    *("<!--<script>", "<marquee>", "]]><script>alert(1)</script>", "javascript:alert(1)"),
    *("data:text/html,<script>alert(1)</script>", "{{7*7}}", "{% raw %}", "${7*7}", "#{7*7}", "<%= 7*7 %>"),
    *("{{''.__class__}}", '" autofocus onfocus=alert(1) x="', "&lt;script&gt;", "&#60;script&#62;"),
    *("<iframe srcdoc='x'>", "<a href='javascript:alert(1)'>x</a>", "<base href=//evil.example>"),
    *("<meta http-equiv=refresh content=0>", "<style>*{display:none}</style>", "＜script＞"),
)
_INJECTIONS = (
    *("' OR 1=1 --", "'; DROP TABLE work; --", '" OR ""="', "1; ATTACH DATABASE 'x' AS y", "%", "_", "*", "a > b"),
    *("subject.>", "$(touch x)", "`touch x`", "; touch x", "| touch x", "a\nb", "a\r\nSet-Cookie: x=1"),
    *("a\r\n\r\n<html>", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\tb", "\x7f", "\u202eevil", "\u2028", "\u200b"),
    *("\ufeffbom", "\N{PILE OF POO}" * 30),
)
_PATHS = (
    *("../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "..\\..\\windows", "/etc/passwd", "//evil.example", ".", ".."),
    *("...", "a/b/c", "a//b", "/", "a/", "a b", " ", "%00", "%2e%2e", "%", "%zz", "?", "#", "a?b=c", "a#b"),
    *("file:///etc/passwd", "CON", "~root"),
)
_ODD = (
    *("null", "true", "0", "-1", "1e309", "NaN", "9" * 400, "0x10", "[]", "{}", '{"a": 1}', "a" * 4000, "ü" * 2000),
    *("__proto__", "constructor", "undefined", "٣", "²", "1970-01-01", "99999-01-01T00:00:00Z", "-15m", "15 m"),
    *("1" * 9 + "d", "2026-01-25T21:15:00+99:99", "é" + "\u0301" * 100),
)
HOSTILE = (*_MARKUP, *_INJECTIONS, *_PATHS, *_ODD)


def texts_of(kind: type[msgspec.Struct]) -> list[str]:
    """The fields that take a text."""
    return [one.name for one in msgspec.structs.fields(kind) if str in getattr(one.type, "__args__", (one.type,))]


def hostile_requests(route: ApiRoute, text: str) -> Iterator[tuple[str, bytes]]:
    """Addresses and bodies of a route with the text in each place that takes one."""
    path = f"{PREFIX}{route.path}"
    for name in route.path_names:
        path = path.replace(f"{{{name}}}", quote(text, safe=""))
    others = [name for name in texts_of(route.parameters) if name not in route.path_names]
    dry: dict[str, Any] = {} if route.is_read else {"dry_run": True}
    yield path, b"" if route.is_read else json.dumps(dry).encode()
    if others:
        yield f"{path}?" + "&".join(f"{name}={quote(text, safe='')}" for name in others[:1]), json.dumps(dry).encode()
        every = "&".join(f"{name}={quote(text, safe='')}" for name in others)
        yield f"{path}?{every}", json.dumps(dry).encode()
    if route.body is not None:
        yield path, json.dumps({**dry, **dict.fromkeys(texts_of(route.body), text)}).encode()
        yield path, json.dumps({**dry, text: text}).encode()


def check(answered: Answered, target: str) -> None:
    """No answer is an internal error."""
    assert answered.status in (200, 400, 404, 409, 503), (target, answered)
    assert answered.headers["content-type"] == "application/json", target
    json.loads(answered.body)
    assert all(name not in answered.headers for name in ("set-cookie", "location")), target


def test_no_hostile_text_makes_an_internal_error_of_the_api(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)

    async def work() -> int:
        number = 0
        async with opened_site(path, settings(path)) as site:
            app = build(site)
            for route in (one for one in ROUTES if texts_of(one.parameters) or one.body is not None):
                for turn, text in enumerate(HOSTILE):
                    first, *others = hostile_requests(route, text)
                    chosen = [others[turn % len(others)]] if others else []  # each place has its turn
                    for target, body in (first, *chosen):
                        check(await ask(app, route.method, target, AS_JSON, body), target)
                        number += 1
        return number

    assert len(set(HOSTILE)) == 100
    assert asyncio.run(work()) > 3000


NO_UTF8 = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"ids": [1]}', "ids[0]: expected str, got int"),
        (b'{"ids": "a"}', "ids: expected array, got str"),
        (b'{"dry_run": 1}', "dry_run: expected bool, got int"),
        (b'{"dryrun": true}', "dryrun: unknown field; accepted: ids, "),
        (b'{"all": true, "all": false}', "all: the key stands twice"),
        (b'{"all": NaN}', "NaN is no JSON value"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "the body has a number of too many digits; accepted: up to 4300"),
        (b'{"a": "\xff"}', "the body is not JSON: 'utf-8' codec can't decode byte 0xff"),
        *(('{"all": true}'.encode(name), "the body is not JSON in UTF-8") for name in NO_UTF8),
        (b"[]", "the body: expected object, got array"),
        (b"null", "the body: expected object, got null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"reason": "  ", "all": true}', "reason='  ' is not accepted"),
        (b'{"ids": ["a"], "all": true}', "all: not together with ids"),
        (b"{}", "select jobs by ids, a filter"),
        (b'{"all": true, "limit": 1}', "limit: unknown field; accepted: ids, "),
        (b'{"all": true, "after": "a"}', "after: unknown field; accepted: ids, "),
        (b'{"ids": ["a", "\\ud800"]}', "ids[1]: half of a surrogate pair"),
        (b'{"because": "\xed\xa0\x80", "ids": ["a"]}', "because: half of a surrogate pair"),
        (b'{"\\udfff": 1}', "the body: half of a surrogate pair"),
        (b'{"before": 1e400}', "before: the number is too large"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else "",
)
@pytest.mark.real_time
async def test_a_wrong_body_is_refused_by_the_name_of_its_field(body: bytes, named: str, site: Site) -> None:
    answered = await ask(build(site), "POST", f"{PREFIX}/quarantine/requeue", AS_JSON, body)
    assert answered.status == 400
    assert named in answered.json["error"]["message"]
    assert answered.json["error"]["kind"] == "invalid"


@pytest.mark.parametrize("verb", ["requeue", "discard", "purge"])
@pytest.mark.real_time
async def test_no_action_on_the_quarantine_takes_a_page_and_then_all_jobs(verb: str, site: Site) -> None:
    body = b'{"type": "own.step", "all": true, "limit": 1, "because": "x"}'
    answered = await ask(build(site), "POST", f"{PREFIX}/quarantine/{verb}", AS_JSON, body)
    assert (answered.status, answered.json["error"]["parameter"]) == (400, "limit")
    assert (await site.store.quarantine.stats()).total == 2


_HALF = "\ud800"


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("assignment_id", {"assignment_id": _HALF, "job": {"type": "own.step"}}),
        ("tenant_id", {"tenant_id": f"a{_HALF}", "job": {"type": "own.step"}}),
        ("resource_class", {"resource_class": _HALF, "job": {"type": "own.step"}}),
        ("job.type", {"job": {"type": _HALF}}),
        ("job.payload.list[1].deep", {"job": {"type": "own.step", "payload": {"list": [1, {"deep": _HALF}]}}}),
        ("job.payload", {"job": {"type": "own.step", "payload": {_HALF: 1}}}),
        ("job.payload.n", {"job": {"type": "own.step", "payload": {"n": float("inf")}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.real_time
async def test_what_cannot_be_stored_is_refused_with_the_place(place: str, fields: dict[str, Any], site: Site) -> None:
    body = json.dumps(fields).replace("Infinity", "1e400").encode()
    answered = await ask(build(site), "POST", f"{PREFIX}/jobs", AS_JSON, body)
    assert (answered.status, answered.json["error"]["parameter"]) == (400, place)


@pytest.mark.real_time
async def test_ids_with_slashes_blanks_and_other_letters_are_found(site: Site) -> None:
    app, ids = build(site), ("with/slash", "ümlaut ☃", "held too")
    answered = [await ask(app, "GET", f"{PREFIX}/jobs/{quote(one, safe='')}", [bearer()]) for one in ids]
    assert [(one.status, one.json["id"]) for one in answered] == [(200, one) for one in ids]


@pytest.mark.real_time
async def test_the_page_of_no_job_is_no_internal_error(site: Site) -> None:
    app = build(site)
    for target, status in (("/work/", 404), ("/quarantine/", 404), ("/work/?tenant=a", 404), ("/live?view=job", 400)):
        answered = await ask(app, "GET", target, [bearer()])
        assert (answered.status, "job" in answered.text) == (status, True), target


@pytest.mark.real_time
@pytest.mark.parametrize("job", [".", "..", "...", "a/..", "%2e"])
async def test_the_links_to_a_job_lead_to_it_in_every_browser(job: str, site: Site) -> None:
    """A browser takes the parts `.` and `..` out of a path, also when they are percent-encoded."""
    link = formats.job_path(job, "t.1")
    assert not {unquote(part) for part in link.partition("?")[0].split("/")} & {".", ".."}
    app = build(site)
    body = json.dumps({"assignment_id": job, "tenant_id": "t.1", "job": {"type": "own.step"}}).encode()
    assert (await ask(app, "POST", f"{PREFIX}/jobs", AS_JSON, body)).status == 200
    answered = await ask(app, "GET", link, AS_JSON)
    assert answered.status == 200
    assert f"Job {job}" in answered.text


def test_pages_show_hostile_texts_as_texts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)

    async def work() -> list[tuple[str, str, Answered]]:
        async with opened_site(path, settings(path)) as site:
            app = build(site)
            session, found = await login(app), []
            pages = [one for one in looks(app) if not one.startswith(PREFIX)]
            for text in _MARKUP:
                for page in [*pages, "/nothing/"]:
                    target = f"{page}?job={quote(text)}&state={quote(text)}&type={quote(text)}&target={quote(text)}"
                    found.append((text, target, await ask(app, "GET", target, [*session, ("Origin", ORIGIN)])))
        return found

    for text, target, answered in asyncio.run(work()):
        assert answered.status < 500, target
        if answered.headers.get("content-type", "").startswith("text/html"):
            assert "<script>alert" not in answered.text, (text, target)
            assert not any(mark in answered.text for mark in (text,) if "<" in mark), (text, target)
