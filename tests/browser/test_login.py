"""The login in a real browser: the address that is printed, and what a page of another site gets out of a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.browser.running import MOST_MS, OPERATOR, RunningSystem, Watched


def test_the_printed_address_logs_in_and_its_token_is_nowhere_afterwards(
    browser: Browser, system: RunningSystem
) -> None:
    context = browser.new_context()
    context.set_default_timeout(MOST_MS)
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append((request.url, request.headers.get("referer", ""))))
    try:
        page.goto(f"{system.url}/policies#token={OPERATOR}")
        page.wait_for_url(f"{system.url}/policies")

        assert OPERATOR not in page.url
        assert not [one for one in asked if OPERATOR in one[0].partition("#")[0] + one[1]]
        assert page.evaluate("document.cookie") == ""
        page.go_back()
        assert OPERATOR not in page.url
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert OPERATOR not in cookie["value"]
    finally:
        context.close()


def test_a_wrong_token_is_told_and_can_be_corrected(browser: Browser, system: RunningSystem) -> None:
    context = browser.new_context()
    context.set_default_timeout(MOST_MS)
    page = context.new_page()
    try:
        page.goto(f"{system.url}/#token=wrong-token-of-yesterday")
        page.wait_for_selector("#problem:not(:empty)")
        assert "is not accepted" in page.inner_text("#problem")
        assert "wrong-token" not in page.url

        page.fill("input[name=token]", OPERATOR)
        page.fill("input[name=name]", "Ada")
        page.click("button[type=submit]")
        page.wait_for_url(f"{system.url}/")
    finally:
        context.close()


# ---- another site ----------------------------------------------------------------------------------------------------

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


@pytest.fixture
def other_site(system: RunningSystem) -> Iterator[Callable[[str], str]]:
    """Another site on this machine, so that its requests are of the same site and yet of another origin."""
    job = ""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = ATTACK.format(url=system.url, job=job).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
            """Nothing: a test prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def address(of_job: str) -> str:
        nonlocal job
        job = of_job
        return f"http://127.0.0.1:{server.server_port}/"

    yield address
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_page_of_another_origin_gets_nothing_out_of_a_session(
    visit: Callable[..., Watched], system: RunningSystem, other_site: Callable[[str], str]
) -> None:
    """`SameSite` alone would not help here: another port of this machine is the same site."""
    job = system.submit("not-yours", "no.such.block")
    window = visit()
    window.complaints = Unheard()  # that the browser complains is right here
    page = window.page
    page.goto(other_site(job))
    page.wait_for_function("window.results.includes('done')")
    results = page.evaluate("window.results")

    assert len(results) == 5
    assert [one for one in results if one not in ("refused", "done") and not one.endswith(" opaque 0")] == []
    assert not [one for one in system.actions() if one["subject"] == job]
