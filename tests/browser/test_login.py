"""The login in a real browser: the address that is printed, and what a page of another site gets out of a session."""

import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.running import MODULE, MOST_MS, OPERATOR, PATIENCE_S, READER, RunningSystem, Watched, until


@pytest.fixture
def stranger(browser: Browser) -> Iterator[Page]:
    """A window without a login."""
    context = browser.new_context()
    context.set_default_timeout(MOST_MS)
    yield context.new_page()
    context.close()


def test_the_printed_address_logs_in_and_its_token_is_nowhere_afterwards(stranger: Page, system: RunningSystem) -> None:
    page, asked = stranger, list[tuple[str, str]]()
    page.on("request", lambda request: asked.append((request.url, request.headers.get("referer", ""))))
    page.goto(f"{system.url}/policies#token={OPERATOR}")
    page.wait_for_url(f"{system.url}/policies")
    assert OPERATOR not in page.url
    assert not [one for one in asked if OPERATOR in one[0].partition("#")[0] + one[1]]
    assert page.evaluate("document.cookie") == ""
    page.go_back()
    assert OPERATOR not in page.url
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert OPERATOR not in cookie["value"]


def test_a_wrong_token_is_told_and_can_be_corrected(stranger: Page, system: RunningSystem) -> None:
    stranger.goto(f"{system.url}/#token=wrong-token-of-yesterday")
    stranger.wait_for_selector("#problem:not(:empty)")
    assert "is not accepted" in stranger.inner_text("#problem")
    assert "wrong-token" not in stranger.url
    stranger.fill("input[name=token]", OPERATOR)
    stranger.fill("input[name=name]", "Ada")
    stranger.click("button[type=submit]")
    stranger.wait_for_url(f"{system.url}/")


ATTACK = """<!doctype html><title>evil</title>
<iframe src="{url}/"></iframe>
<form id="form" method="post" action="{url}/api/v1/jobs/{job}/cancel" target="answer"><input name="x"></form>
<iframe name="answer"></iframe>
<script>
window.results = [];
async function attack(path, options) {{
  try {{
    const answer = await fetch("{url}" + path, options);
    results.push(path + " " + answer.type + " " + (await answer.text()).length);
  }} catch (error) {{ results.push("refused"); }}
}}
(async () => {{
  const action = {{method: "POST", credentials: "include", mode: "no-cors", body: "{{}}"}};
  await attack("/api/v1/jobs/{job}/cancel", action);
  await attack("/api/v1/jobs", {{credentials: "include"}});
  await attack("/api/v1/jobs", {{credentials: "include", mode: "no-cors"}});
  await attack("/metrics", {{credentials: "include"}});
  document.getElementById("form").submit();
  results.push("done");
}})();
</script>
"""


class Unheard(list[str]):
    """Complaints that nobody keeps."""

    def append(self, _: str) -> None:
        return


class OtherSite:
    """
    A server on another port of this host: its requests are of the same site and yet of another origin.

    Browsers send it the cookies of all ports, and it replays them.
    """

    def __init__(self, shown: str = "a harmless page") -> None:
        cookies = self.cookies = list[str]()

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cookies.extend(self.headers.get_all("Cookie", []))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(shown.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
                """Nothing: a test prints nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def replay(self, url: str, method: str, path: str) -> tuple[int, str]:
        """The status and the text of a request with everything that a browser on a page of `url` would send."""
        host = url.removeprefix("http://")
        headers = {"Host": host, "Origin": url, "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
        connection = HTTPConnection(host, timeout=PATIENCE_S)
        try:
            body = b'{"because": "replayed"}' if method == "POST" else None
            connection.request(method, path, body, headers | {"Cookie": "; ".join(self.cookies)})
            answer = connection.getresponse()
            is_stream = answer.status == 200 and path.startswith("/live")
            return answer.status, answer.readline().decode() if is_stream else answer.read().decode()
        finally:
            connection.close()


def test_a_page_of_another_origin_gets_nothing_of_it(visit: Callable[..., Watched], system: RunningSystem) -> None:
    """`SameSite` alone would not help here: another port of this machine is the same site."""
    job = system.submit("not-yours", "no.such.block")
    window = visit(shared=False)
    window.complaints = Unheard()  # that the browser complains is right here
    with OtherSite(ATTACK.format(url=system.url, job=job)) as other:
        window.page.goto(other.url)
        window.page.wait_for_function("window.results.includes('done')")
        results = window.page.evaluate("window.results")
    assert len(results) == 5
    assert [one for one in results if one not in ("refused", "done") and not one.endswith(" opaque 0")] == []
    assert not [one for one in system.actions() if one["subject"] == job]


def gained(system: RunningSystem, browser: Browser, job: str) -> list[str]:
    """Everything that another server gets with the cookies of somebody who is logged in here and visits it."""
    window = Watched(browser, system, "operator")
    window.complaints = Unheard()
    with OtherSite() as other:
        window.page.goto(other.url)
        looks = ("/", "/work", f"/work/{job}", f"/quarantine/{job}", "/api/v1/jobs", "/live?view=work", "/metrics")
        actions = (f"/api/v1/jobs/{job}/cancel", "/api/v1/workers/drain", "/api/v1/jobs/retry", "/logout")
        found = [f"GET {path}" for path in looks if is_data(*other.replay(system.url, "GET", path), job=job)]
        found += [f"POST {path}" for path in actions if other.replay(system.url, "POST", path)[0] not in (401, 403)]
        assert found or any(f"reefknot_session_{system.url.rpartition(':')[2]}" in one for one in other.cookies)
    found += [one["action"] for one in system.actions() if one["subject"] == job]
    if not found:
        assert window.goto("/work").locator("footer", has_text="operator").count() == 1, "the session goes on"
    window.close()
    return found


def is_data(status: int, text: str, *, job: str) -> bool:
    """Whether an answer shows anything of the system: a job, a number, a stream."""
    return status == 200 and any(word in text for word in (job, "reefknot_queue", "event:", ": ping", "data-live"))


def test_another_server_of_this_host_gets_nothing_by_the_cookie(browser: Browser, system: RunningSystem) -> None:
    """`Origin`, `Host` and `Sec-Fetch-Site` are no help here: whoever has the cookie writes them as it likes."""
    job = system.submit("overheard", "own.nap", {"seconds": 600})
    assert gained(system, browser, job) == []
    assert system.job(job)["state"] in ("pending", "running")


NO_KEY = """
from reefknot.console.dashboard.security import SiteAccess
SiteAccess.is_unlocked = lambda *_: True
"""


def test_a_session_that_is_its_cookie_alone_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    """The control: a server that does not ask for the key."""
    with RunningSystem.prepared(tmp_path, module=MODULE + NO_KEY) as careless:
        job = careless.submit("overheard", "own.nap", {"seconds": 600})
        found = gained(careless, browser, job)
    expected = {"GET /work", "GET /api/v1/jobs", f"POST /api/v1/jobs/{job}/cancel", "POST /logout", "job.cancel"}
    assert expected <= {*found}


@pytest.mark.parametrize("role", ["operator", "reader"])
def test_without_a_script_a_login_reads_and_has_no_action(visit: Callable[..., Watched], role: str) -> None:
    window = visit(role, java_script_enabled=False)
    page = window.goto("/quarantine")
    assert "reader" in page.inner_text("footer")
    assert page.locator("[data-act]").count() == 0
    page.click("#leave button")
    page.wait_for_url("**/login")


def test_who_signs_out_leaves_no_key_and_may_come_back(visit: Callable[..., Watched]) -> None:
    window = visit(shared=False)
    window.page.click("#leave button")
    window.page.wait_for_url("**/login")
    assert window.page.evaluate("localStorage.getItem('reefknot-key')") is None
    assert window.page.context.cookies() == []
    window.page.goto(f"{window.system.url}/work#token={READER}")
    window.page.wait_for_selector("footer:has-text('reader')")
    assert window.page.url == f"{window.system.url}/work"


def test_a_session_whose_key_is_gone_leads_to_the_login(visit: Callable[..., Watched]) -> None:
    """Somebody cleared the storage, or the cookie came back without it."""
    window = visit(shared=False)
    window.page.evaluate("localStorage.clear()")
    window.page.goto(f"{window.system.url}/work?state=failed")
    window.page.wait_for_url("**/login?next=**")
    window.page.fill("input[name=token]", OPERATOR)
    window.page.click("button[type=submit]")
    window.page.wait_for_url("**/work?state=failed")
    window.page.wait_for_selector("#main")
    until(lambda: window.page.locator("#main").count() == 1)
