"""Hosts, origins, tokens and roles: what another site, another machine or a reader must not reach."""

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reefknot import clock
from reefknot.console.dashboard import live, security
from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.console.dashboard.login import own_path
from reefknot.console.dashboard.security import CONTENT_POLICY, MOST_BODY_BYTES, MOST_FAILURES, MOST_SESSIONS
from reefknot.console.dashboard.site import Site
from reefknot.errors import ConfigurationError
from reefknot.policy.settings import load_settings
from reefknot.runtime.addresses import is_loopback
from tests.rows import for_each_row
from tests.security import site_client
from tests.security.site_client import HOST, OPERATOR, ORIGIN, PORT, READER, access, ask, bearer, build, login

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
GOOD_HOSTS = (HOST, f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}")
BAD_HOSTS = (
    *("evil.example", f"evil.example:{PORT}", "127.0.0.1.evil", "127.0.0.1:9999", "127.0.0.1", "localhost", "", None),
)
CROSS = {
    "origin of another site": (("Origin", "http://evil.example"),),
    "origin with another port": (("Origin", "http://127.0.0.1:9999"),),
    "origin with another scheme": (("Origin", f"https://{HOST}"),),
    "opaque origin": (("Origin", "null"),),
    "no origin at all in the header": (("Origin", ""),),
    "two origins": (("Origin", ORIGIN), ("Origin", "http://evil.example")),
    "fetched by another site": (("Sec-Fetch-Site", "cross-site"),),
    "fetched by another port": (("Sec-Fetch-Site", "same-site"),),
}
OWN = {
    "none": (),
    "same": (("Origin", ORIGIN),),
    "fetched by ourselves": (("Sec-Fetch-Site", "same-origin"), ("Origin", ORIGIN)),
    "typed": (("Sec-Fetch-Site", "none"),),
}
PAGES = ("/", "/jobs", "/quarantine", "/logout", "/live", "/metrics", "/no/such/page", "/static/login.js", "/login")
PATHS = sorted({f"{PREFIX}{route.path}" for route in ROUTES} | set(PAGES) | {f"{PREFIX}/openapi.json"})


class Recorder:
    """Stands behind the guard in place of all routes, and notes what gets through."""

    def __init__(self, site: Site) -> None:
        self.reached: list[tuple[str, str]] = []
        self.app = build(site)
        self.app.router = self._reached

    async def _reached(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def lets_through(self, method: str, path: str, headers: Any, host: str | None) -> bool:
        before = len(self.reached)
        await ask(self.app, method, path, headers, host=host)
        return len(self.reached) > before


def is_plain_look(method: str, path: str, kind: str) -> bool:
    """Whether this is a link of another site to a page, which is allowed: it reads nothing and does nothing."""
    is_page = not path.startswith((PREFIX, "/live", "/metrics"))
    return method in ("GET", "HEAD") and is_page and kind.startswith("fetched")


async def forbidden_that_gets_through(site: Site) -> tuple[list[Any], int]:
    """Every request of the matrix that must not reach a route and does, and the number of those that may and do."""
    recorder, found, fine = Recorder(site), [], 0
    session = recorder_session(site)
    for method, path, headers in product(METHODS, PATHS, ((bearer(),), session)):
        through = [host for host in BAD_HOSTS if await recorder.lets_through(method, path, headers, host)]
        found += [(method, path, "host", host) for host in through]
        for kind, cross in CROSS.items():
            got_through = await recorder.lets_through(method, path, (*headers, *cross), HOST)
            if got_through and not is_plain_look(method, path, kind):
                found.append((method, path, "origin", kind))
        for own in OWN.values():
            fine += await recorder.lets_through(method, path, (*headers, *own), HOST)
    return found, fine


def recorder_session(site: Site, token: str = OPERATOR) -> tuple[tuple[str, str], ...]:
    """The headers of a session: its cookie and its key."""
    secret = site.access.login(token, None, "127.0.0.1") or ""
    return ("Cookie", f"{site.access.cookie}={secret}"), ("X-Reefknot-Key", site.access.key_of(secret))


async def test_no_request_of_another_host_or_origin_reaches_a_route(site: Site) -> None:
    found, fine = await forbidden_that_gets_through(site)
    assert not found
    # A bearer's four, and a cookie's: without any word of an origin it may only read.
    reading = 2 * 8 * len(PATHS)
    acting = 6 * 7 * len(PATHS) + 6 * sum(security.is_open(path) for path in PATHS)
    assert fine == reading + acting


@pytest.mark.parametrize("guard", ["forbidden_host", "forbidden_origin"])
async def test_the_matrix_sees_a_guard_taken_away(guard: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(security, guard, lambda *_, **__: None)
    found, _ = await forbidden_that_gets_through(site)
    assert {one[2] for one in found} == {guard.removeprefix("forbidden_")}


async def test_every_name_of_the_own_machine_is_answered(site: Site) -> None:
    recorder = Recorder(site)
    assert [host for host in GOOD_HOSTS if not await recorder.lets_through("GET", "/", (bearer(),), host)] == []


async def test_a_name_that_is_allowed_is_answered_with_and_without_the_port_and_behind_tls() -> None:
    asked = [("ops.example", "https://ops.example"), (f"ops.example:{PORT}", f"http://ops.example:{PORT}")]
    asked += [("ops.example", "https://evil.example"), ("other.example", "https://other.example")]
    async with site_client.new_site(allowed_hosts=["Ops.example"]) as site:
        recorder = Recorder(site)
        with_origin = [(host, (bearer(), ("Origin", origin))) for host, origin in asked]
        through = [await recorder.lets_through("POST", "/logout", given, host) for host, given in with_origin]
    assert through == [True, True, False, False]


NOBODY = {
    "no token": (),
    "wrong token": (bearer("wrong"),),
    "empty token": (bearer(""),),
    "token as basic": (("Authorization", f"Basic {OPERATOR}"),),
    "two tokens": (bearer(), bearer("wrong")),
    "a cookie that nobody gave": (("Cookie", f"reefknot_session_{PORT}=guessed"),),
    "the token as a cookie": (("Cookie", f"reefknot_session_{PORT}={OPERATOR}"),),
    "a session of another port": (("Cookie", "reefknot_session_1=guessed"),),
}


async def reached_by_nobody(site: Site) -> list[Any]:
    """What is reached without a token, beside the login and what is no data."""
    recorder = Recorder(site)
    return [
        (method, path, kind)
        for method, path, (kind, headers) in product(METHODS, PATHS, NOBODY.items())
        if await recorder.lets_through(method, path, headers, HOST) and not security.is_open(path)
    ]


async def test_without_a_token_nothing_but_the_login_is_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a token that is not compared."""
    monkeypatch.setattr(security, "MOST_FAILURES", 10**9)
    assert await reached_by_nobody(site) == []
    monkeypatch.setattr(security.SiteAccess, "role_of", lambda *_: "operator")
    assert {"wrong token", "empty token"} <= {kind for _, _, kind in await reached_by_nobody(site)}


async def test_a_token_in_the_address_is_no_token(site: Site) -> None:
    app = build(site)
    asked = [f"{PREFIX}/jobs?token={OPERATOR}", f"{PREFIX}/jobs?access_token={OPERATOR}"]
    assert [(await ask(app, "GET", one)).status for one in asked] == [401, 401]


async def reached_by_readers(site: Site) -> tuple[list[Any], int]:
    """The actions that a reader reaches, and the number of looks."""
    recorder, session = Recorder(site), recorder_session(site, READER)
    actions, looks = [], 0
    for method, path, credentials in product(METHODS, PATHS, ((bearer(READER),), session)):
        if security.is_open(path) or path == "/logout":
            continue
        if await recorder.lets_through(method, path, (*credentials, ("Origin", ORIGIN)), HOST):
            actions += [] if method in ("GET", "HEAD") else [(method, path)]
            looks += method in ("GET", "HEAD")
    return actions, looks


async def test_a_reader_reaches_no_action(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a role that is not compared."""
    actions, looks = await reached_by_readers(site)
    assert not actions
    assert looks == 2 * 2 * sum(not security.is_open(path) and path != "/logout" for path in PATHS)
    monkeypatch.setattr(security, "OPERATOR", "reader")
    assert (await reached_by_readers(site))[0]


async def test_metrics_are_for_whoever_has_a_token(site: Site) -> None:
    app = build(site)
    for token in ("wrong", ""):
        answered = await ask(app, "GET", "/metrics", [bearer(token)])
        assert answered.status == 401
        assert "www-authenticate" in answered.headers
    for token in (OPERATOR, READER):
        answered = await ask(app, "GET", "/metrics", [bearer(token)])
        assert answered.headers["content-type"].startswith("text/plain; version=0.0.4")
        names = {one.name for one in text_string_to_metric_families(answered.text)}
        assert {"reefknot_retry_attempts", "reefknot_queue_depth"} <= names


async def test_every_action_of_the_api_needs_the_operators_token(site: Site) -> None:
    app, actions = build(site), [route for route in ROUTES if not route.is_read]
    paths = [f"{PREFIX}{route.path}".replace("{", "").replace("}", "") for route in actions]
    as_json = ("Content-Type", "application/json")
    assert len(paths) > 10
    for token, status in ((OPERATOR, 400), (READER, 403)):
        answered = [await ask(app, "POST", one, (bearer(token), as_json), b'{"no": 1}') for one in paths]
        assert {one.status for one in answered} == {status}


FORM = [("Content-Type", "application/x-www-form-urlencoded"), ("Origin", ORIGIN)]


async def test_a_session_is_not_the_token_and_ends_with_the_logout(site: Site) -> None:
    app = build(site)
    answered = await ask(app, "POST", "/login?x=1", FORM, f"token={OPERATOR}&name=Ada&next=/quarantine".encode())
    set_cookie = answered.headers["set-cookie"]

    assert (answered.status, answered.headers["location"]) == (303, "/quarantine")
    assert OPERATOR not in set_cookie
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(set_cookie.split("; "))
    assert set_cookie.startswith(f"reefknot_session_{PORT}=")

    cookie = ("Cookie", set_cookie.partition(";")[0])
    assert (await ask(app, "GET", f"{PREFIX}/jobs", [cookie])).status == 200
    assert (await ask(app, "POST", "/logout", [cookie, ("Origin", ORIGIN)])).status == 303
    assert (await ask(app, "GET", f"{PREFIX}/jobs", [cookie])).status == 401


async def gained_by_a_replayed_cookie(site: Site) -> list[Any]:
    """What a server on another port of this host reaches with the cookie that every browser sends it."""
    recorder, (cookie, (_, right)) = Recorder(site), recorder_session(site)
    other = recorder_session(site)[1][1]
    keys = {"none": (), "empty": ("",), "wrong": ("0" * 64,), "of another session": (other,), "two": (right, other)}
    found = []
    for method, path, (kind, given) in product(METHODS, PATHS, keys.items()):
        headers = (cookie, *(("X-Reefknot-Key", key) for key in given), *OWN["fetched by ourselves"])
        if await recorder.lets_through(method, path, headers, HOST) and not security.is_open(path):
            found.append((method, path, kind))
    return found


async def test_a_cookie_without_its_key_reaches_no_route(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a key that is not compared: then the cookie alone is enough, which browsers send to every port."""
    assert await gained_by_a_replayed_cookie(site) == []
    monkeypatch.setattr(security.SiteAccess, "is_unlocked", lambda *_: True)
    gained = {("POST", "/api/v1/quarantine/discard", "none"), ("GET", "/", "none")}
    assert gained <= set(await gained_by_a_replayed_cookie(site))


async def test_a_look_with_a_cookie_alone_gets_a_page_without_data_and_a_program_is_refused(site: Site) -> None:
    app = build(site)
    cookie, _ = await login(app, name="Ada")
    looks = ("/work", f"{PREFIX}/jobs", "/live?view=work")
    page, program, stream = [await ask(app, "GET", one, [cookie]) for one in looks]

    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert not [word for word in ("memory:", "Ada", "data-live", "<table") if word in page.text]
    assert page.text.count("<script") == 1
    assert (program.status, program.json["error"]["kind"]) == (401, "unauthorized")
    assert "X-Reefknot-Key" in program.json["error"]["message"]
    assert stream.status == 401


async def test_a_login_without_a_script_reads_and_does_nothing(site: Site) -> None:
    app = build(site)
    answered = await ask(app, "POST", "/login", FORM, f"token={OPERATOR}".encode())
    session = [("Cookie", answered.headers["set-cookie"].partition(";")[0]), *OWN["fetched by ourselves"]]
    assert [(await ask(app, "GET", one, session)).status for one in ("/", "/quarantine")] == [200, 200]
    assert (await ask(app, "POST", f"{PREFIX}/quarantine/discard", session)).status == 403


@pytest.mark.real_time
async def test_an_action_carries_the_name_that_was_typed_at_the_login(stored: Path) -> None:
    async with site_client.opened_site(stored) as site:
        app = build(site)
        headers = [*await login(app, name="Ada%0ALovelace"), ("Origin", ORIGIN)]
        answered = await ask(app, "POST", f"{PREFIX}/jobs/waiting/cancel", headers)
    assert (answered.status, answered.json["actor"]) == (200, "Ada\\nLovelace")


def test_logins_of_readers_end_no_session_of_an_operator() -> None:
    mine = access()
    operators = mine.login(OPERATOR, None, "a") or ""
    readers = [mine.login(READER, None, "a") or "" for _ in range(MOST_SESSIONS + 10)]
    assert mine.session(operators) is not None
    assert sum(mine.session(one) is not None for one in readers) == MOST_SESSIONS


async def test_of_several_cookies_of_the_name_the_right_one_counts(site: Site) -> None:
    """Another server of this host may have set one, for a longer path."""
    app = build(site)
    (name, value), key = await login(app)
    (_, another), _ = await login(app, READER)
    for first in (f"reefknot_session_{PORT}=wrong", another):
        both = [(name, f"{first}; {value}; a=b"), key]
        assert (await ask(app, "GET", f"{PREFIX}/jobs", both)).status == 200
        assert (await ask(app, "POST", f"{PREFIX}/jobs/retry", [*both, ("Origin", ORIGIN)])).status == 400
    assert (await ask(app, "POST", "/logout", [*both, ("Origin", ORIGIN)])).status == 303
    assert (await ask(app, "GET", f"{PREFIX}/jobs", [(name, value), key])).status == 401


@pytest.mark.parametrize("ending", ["logout", "time"])
async def test_a_live_stream_ends_with_its_session(ending: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does not one that came with the token itself."""
    monkeypatch.setattr(live, "PING_S", 0.05)
    app, now = build(site), clock.now()
    session = await login(app)
    streams = [asyncio.create_task(ask(app, "GET", "/live?view=workers", one)) for one in (session, [bearer()])]
    await asyncio.sleep(0)
    if ending == "logout":
        assert (await ask(app, "POST", "/logout", [*session, ("Origin", ORIGIN)])).status == 303
    else:
        monkeypatch.setattr(clock, "now", lambda: now + 2 * security.SESSION_S)
    async with asyncio.timeout(15):
        await streams[0]
    assert not streams[1].done()
    site.closing.set()
    assert (await streams[1]).status == 200


@pytest.mark.parametrize("tls", [True, False])
async def test_with_tls_a_browser_is_told_to_come_back_over_tls(tls: bool) -> None:
    """But not to localhost: it would be for all servers of this machine."""
    async with site_client.new_site(tls=tls, allowed_hosts=["dash.example.org"]) as site:
        answered = [
            await ask(build(site), "GET", "/login", host=one) for one in ("dash.example.org", f"localhost:{PORT}")
        ]
    assert ["strict-transport-security" in one.headers for one in answered] == [tls, False]


@for_each_row("name", ["*", "*.example.org", "https://dash.example.org", "a b", "", "dash/x", "a:b"])
def test_a_host_that_no_browser_sends_is_refused_by_the_configuration(name: str, tmp_path: Path) -> None:
    hosts = {"allowed_hosts": ["dash.example.org:8443", name]}
    (tmp_path / "reefknot.yaml").write_text(json.dumps({"dashboard": hosts}))
    with pytest.raises(ConfigurationError, match=r"allowed_hosts.*accepted: a host's name such as dash.example.org"):
        load_settings(str(tmp_path / "reefknot.yaml"), environ={}, cwd=tmp_path)


def test_sessions_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, now = access(), 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    first = mine.login(OPERATOR, None, "a") or ""
    assert mine.session(first) is not None

    now += security.SESSION_S
    assert mine.session(first) is None

    many = [mine.login(OPERATOR, None, "a") or "" for _ in range(MOST_SESSIONS + 10)]
    living = [mine.session(one) is not None for one in many]
    assert living == [False] * 10 + [True] * MOST_SESSIONS


async def test_wrong_tokens_are_throttled_by_address_and_logged(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    app, jobs = build(site), f"{PREFIX}/jobs"
    wrong = [await ask(app, "GET", jobs, [bearer("wrong-guess")]) for _ in range(MOST_FAILURES + 1)]
    last_wrong = wrong.pop()
    right = await ask(app, "GET", jobs, [bearer()])

    assert {one.status for one in wrong} == {401}
    assert last_wrong.status == 429
    assert right.status == 200, "all programs of a machine share its address: one with an old token must not lock it"
    assert last_wrong.headers["retry-after"] == "60"
    assert last_wrong.json["error"]["kind"] == "throttled"
    assert sum("a wrong token from 127.0.0.1" in one for one in caplog.messages) == MOST_FAILURES
    assert "wrong-guess" not in caplog.text

    mine = access()
    for number in range(MOST_FAILURES):
        assert mine.role_of("wrong", "a") is None, number
    assert mine.role_of("wrong", "b") is None
    assert mine.role_of(OPERATOR, "a") == "operator"
    with pytest.raises(security.ThrottledError):
        mine.role_of("wrong", "a")
    now += security.FAILURES_S
    assert mine.role_of("wrong", "a") is None


def test_the_memory_of_failed_logins_is_bounded() -> None:
    mine = access()
    for number in range(security.MOST_CLIENTS + 50):
        mine.role_of("wrong", f"address {number}")
    assert len(mine._failures) == security.MOST_CLIENTS


PROTECTED = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    **{f"{name}-policy": "same-origin" for name in ("referrer", "cross-origin-opener", "cross-origin-resource")},
}
ANSWERED = [("GET", one) for one in ("/login", "/", f"{PREFIX}/jobs", f"{PREFIX}/nothing", "/static/login.js")]
ANSWERED += [("GET", "/static/nothing.js"), ("POST", "/login"), ("DELETE", f"{PREFIX}/jobs")]


@pytest.mark.real_time  # a thread reads files
async def test_every_response_has_the_headers(site: Site) -> None:
    app = build(site)
    assert "unsafe" not in CONTENT_POLICY
    for (method, path), headers, host in product(ANSWERED, ((), (bearer(),)), (HOST, "evil")):
        answered = await ask(app, method, path, headers, host=host)
        kept = PROTECTED | {"cache-control": "no-cache" if path.startswith("/static/") else "no-store"}
        assert {name: answered.headers.get(name) for name in kept} == kept, (method, path, headers, host)
        assert "server" not in answered.headers


async def test_the_login_page_has_no_inline_code_and_escapes_where_it_goes_on(site: Site) -> None:
    page = (await ask(build(site), "GET", "/login?next=/jobs%22%3E%3Cscript%3Ealert(1)%3C/script%3E")).text
    assert not [code for code in ("<script>", "onload", " style=") if code in page]
    assert "/jobs&quot;&gt;&lt;script&gt;" in page


LURES = ("//evil.example", "https://evil.example", "/\\evil.example", "\\\\evil", "/login", "", "/" * 3000)


@for_each_row("given", [*LURES, "/a\r\nSet-Cookie: x"])
def test_a_login_leads_to_no_other_site(given: str) -> None:
    assert own_path(given) == "/"


async def test_a_browser_without_a_session_is_led_to_the_login_and_a_program_is_told(site: Site) -> None:
    app = build(site)
    looks = ("/jobs?state=failed&type=a%20b", f"{PREFIX}/jobs", "/live")
    page, program, stream = [await ask(app, "GET", one) for one in looks]
    assert (page.status, page.headers["location"]) == (303, "/login?next=/jobs%3Fstate%3Dfailed%26type%3Da%2520b")
    assert (program.status, program.headers["www-authenticate"]) == (401, 'Bearer realm="reefknot"')
    assert program.json["error"]["kind"] == "unauthorized"
    assert stream.status == 401


async def test_a_body_beyond_the_limit_is_refused_by_its_length_and_by_its_bytes(site: Site) -> None:
    app, lied = build(site), ("Content-Type", "application/json")
    large = MOST_BODY_BYTES + 1
    for length, more, body in ((str(large), (), b""), ("10", (lied,), b" " * large), ("-1", (), b"")):
        headers = (bearer(), ("Content-Length", length), *more)
        answered = await ask(app, "POST", f"{PREFIX}/jobs/retry", headers, body)
        assert (answered.status, answered.json["error"]["kind"]) == (413, "too_large")


async def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_S", 0.01)

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(security.RequestRefusedError) as told:
        await security.Body({"headers": []}, receive).receive()
    assert told.value.status == 408


LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")
FAR = ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.example", "127.0.0.1.evil", "2130706433")


def test_an_address_is_loopback_only_when_nobody_else_can_reach_it() -> None:
    assert ([*filter(is_loopback, LOOPBACK)], [*filter(is_loopback, FAR)]) == ([*LOOPBACK], [])
