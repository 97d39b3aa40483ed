"""Every page in a real browser, while a system in another process runs work."""

from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser

from reefknot.console.dashboard.security import CONTENT_POLICY
from tests.browser.running import OPERATOR, RunningSystem, Watched, until
from tests.browser.test_actions import act

Visit = Callable[..., Watched]

pytestmark = pytest.mark.slow

NAMES = {
    "/": "overview",
    **{
        f"/{name}": name
        for name in ("alerts", "work", "quarantine", "policies", "workers", "sources", "audit", "health")
    },
    **{f"/audit/{name}": name for name in ("verify", "replay")},
    "/work/story": "job",
    "/quarantine/stuck?tenant=acme": "quarantined",
    "/policies?target=block:http&status=429": "what-if",
}
"""Every page, and the name of its picture."""
NOT_LIVE = ("/quarantine/", "/policies", "/audit/", "/health")


def is_live(path: str) -> bool:
    return not path.startswith(NOT_LIVE)


@pytest.fixture(scope="module")
def worked(system: RunningSystem) -> RunningSystem:
    """A system with jobs of several ends: one recovered, some in quarantine, one that runs."""
    system.submit("story", "own.flaky", {"failures": 2})
    system.submit("stuck", "own.broken", {"text": "the order is empty"}, tenant_id="acme")
    for number in range(5):
        system.submit(f"fine-{number}", "own.flaky")
        system.submit(f"given-up-{number}", "own.flaky", {"failures": 9})
    system.submit("long", "own.nap", {"seconds": 600})
    system.ended("story", "succeeded")
    system.ended("stuck", "quarantined", tenant="acme")
    system.ended("given-up-4", "quarantined")
    return system


@pytest.mark.parametrize(("scheme", "widths"), [("light", (1280, 360)), ("dark", (360, 1280))])
def test_every_page_is_drawn_without_a_complaint_and_fits_a_phone(
    worked: RunningSystem, visit: Visit, tmp_path: Path, scheme: str, widths: tuple[int, int]
) -> None:
    """Console, scripts and the content policy are watched; 360 pixels are enough for a page, which may be turned."""
    window = visit(color_scheme=scheme)
    for path, name in NAMES.items():
        for turn, width in enumerate(widths):
            window.page.set_viewport_size({"width": width, "height": 900})
            page = window.page if turn else window.goto(path, live=is_live(path))
            assert page.locator("h1").count() == 1
            wide, inner = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide <= inner, f"{path} is {wide} pixels wide in a window of {inner}"
            page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png")
    background = window.page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(int(part) for part in background.strip("rgb()").split(",")) > 384
    assert bright == (scheme == "light")


def test_the_content_policy_is_strict_on_every_page(worked: RunningSystem) -> None:
    for path in NAMES:
        request = Request(worked.url + path, headers={"Authorization": f"Bearer {OPERATOR}"})
        with urlopen(request) as response:
            assert response.headers["Content-Security-Policy"] == CONTENT_POLICY
            text = response.read().decode()
        assert "unsafe" not in CONTENT_POLICY
        assert " style=" not in text
        assert "<style" not in text
        assert text.count("<script") == 1, path
        assert ' onclick="' not in text


def test_a_page_follows_the_work_and_keeps_focus_scroll_and_open_details(worked: RunningSystem, visit: Visit) -> None:
    window = visit()
    page = window.goto("/audit", live=True)
    details = page.locator("tbody tr").nth(3).locator("details")
    key = page.locator("tbody tr").nth(3).get_attribute("data-key")
    details.locator("summary").click()
    page.evaluate("window.scrollTo(0, 120)")
    first = page.locator("tbody tr").first.get_attribute("data-key")

    worked.submit("followed", "own.flaky")

    page.wait_for_function("first => document.querySelector('tbody tr').dataset.key !== first", arg=first)
    assert page.locator(f"tr[data-key='{key}'] details").get_attribute("open") is not None
    focused = "document.activeElement.closest('tr')?.dataset.key"
    assert page.evaluate(focused) == key
    assert page.evaluate("window.scrollY") == 120


def test_a_phone_shows_the_first_row_and_folds_the_filter(worked: RunningSystem, visit: Visit) -> None:
    window = visit(viewport={"width": 360, "height": 740})
    window.expected = "400"
    for path in ("/work", "/audit"):
        page = window.goto(path, live=True)
        assert not page.locator("form.filter").is_visible()
        box = page.locator("tbody tr").first.bounding_box()
        assert box is not None
        assert box["y"] < 500, path
    page.keyboard.press("/")
    assert page.locator("form.filter").is_visible()
    assert page.evaluate("document.activeElement.name") == "type"
    page = window.goto("/work?since=yesterday")
    assert page.locator("input[name=since]").is_visible(), "an error is never folded away"
    page.set_viewport_size({"width": 1280, "height": 900})
    assert window.goto("/work").locator("form.filter").is_visible()
    page = visit(viewport={"width": 360, "height": 740}, java_script_enabled=False).goto("/work")
    assert page.locator("tbody tr").count() >= 5, "it reads fine without a script"
    assert page.locator("noscript span").is_visible()


def test_what_if_knows_the_blocks_of_running_systems(worked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/policies?target=own.flaky&exception=TimeoutError")
    assert page.locator("datalist option[value='block:own.flaky']").count() == 1
    assert page.input_value("input[name=target]") == "block:own.flaky"
    assert page.inner_text("p.count").startswith("Retried: up to ")
    assert "--target block:own.flaky" in page.inner_text("main")
    assert page.locator("svg.chart text", has_text="ms").count() >= 2
    window = visit()
    window.expected = "400"
    page = window.goto("/policies?target=own.flakey&status=503")
    assert "did you mean block:own.flaky?" in page.inner_text("#error-target")


def test_a_source_has_a_page(worked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/sources")
    page.click("text=notes")
    page.wait_for_url("**/sources/notes")
    page.wait_for_selector("#live-state[data-state=live]")
    act(page, "Sync notes now")
    page.wait_for_selector(".tile:has-text('document') b:text-is('1')")
    assert "notes" in page.locator("dl.facts dd", has_text="notes").first.inner_text()


def test_the_overview_counts_what_another_process_does(worked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/", live=True)
    tile = page.locator("a.tile[href='/quarantine'] b")
    before = int(tile.inner_text().replace(",", ""))
    worked.submit("one-more", "own.broken", {"text": "one more that fails"})
    count = "Number(document.querySelector(\"a.tile[href='/quarantine'] b\").textContent)"
    page.wait_for_function(f"before => {count} > before", arg=before)
    assert page.locator("svg.chart").count() >= 6
    assert page.locator("svg.chart title").count() >= 6


def test_a_text_that_somebody_types_survives_updates(worked: RunningSystem, visit: Visit) -> None:
    """The filter is no part of what is replaced, and a selection inside a live part holds its update back."""
    page = visit().goto("/work", live=True)
    page.fill("input[name=type]", "own.fl")
    worked.submit("typed", "own.flaky")
    page.wait_for_selector("text=typed")
    assert page.input_value("input[name=type]") == "own.fl"


def test_a_filter_is_in_the_address_and_a_bad_one_is_told_beside_its_field(worked: RunningSystem, visit: Visit) -> None:
    """And what is not there says what to do."""
    window = visit()
    window.expected = "Failed to load resource"
    page = window.goto("/work")
    page.select_option("select[name=state]", "quarantined")
    page.fill("input[name=tenant]", "acme")
    page.click("form.filter button.main")
    page.wait_for_url("**/work?state=quarantined*tenant=acme*")
    page.wait_for_selector("#main")
    assert page.locator("tbody tr").count() >= 1
    assert set(page.locator("tbody td[data-name=Tenant]").all_inner_texts()) == {"acme"}
    page = window.goto("/work?since=yesterday")
    field = page.locator("input[name=since]")
    assert field.get_attribute("aria-invalid") == "true"
    assert "15m, 2h, 7d" in page.locator(f"#{field.get_attribute('aria-describedby')}").inner_text()
    assert field.input_value() == "yesterday"
    shown = window.goto("/work/nobody").inner_text("main")
    assert "there is no job 'nobody'" in shown
    assert "reefknot job list" in shown
    assert "there is nothing at this address" in window.goto("/nowhere").inner_text("main")


def test_a_keyboard_is_enough(worked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/", live=True)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    pages = ("l alerts", "w work", "q quarantine", "p policies", "k workers", "s sources")
    for key, name in (one.split() for one in pages):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/{name}")
        page.wait_for_selector("#main")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url("**/quarantine")
    page.wait_for_selector("#main")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "type"
    page.keyboard.type("own.broken")
    page.keyboard.press("Enter")
    page.wait_for_url("**/quarantine?type=own.broken*")
    page.wait_for_selector("#main")
    for _ in range(60):  # a focus that is visible goes through everything that can be used
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.verb") == "Requeue":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector("#act[open] .count")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.verb") == "Requeue"


def test_an_address_with_a_token_is_for_its_role_and_loses_its_token(worked: RunningSystem, visit: Visit) -> None:
    """At the login, and when an operator or reader who is logged in opens a printed address."""
    window = visit("reader", shared=False)
    assert window.page.url == f"{worked.url}/"
    assert "reader" in window.page.inner_text("footer")
    window.goto(f"/#token={OPERATOR}")
    window.page.wait_for_selector("footer:has-text('operator')")
    assert window.page.url == f"{worked.url}/"
    assert OPERATOR not in window.page.evaluate("JSON.stringify(history.state) + location.href")
    assert window.page.context.cookies()[0]["httpOnly"]

    window.expected = "403"
    window.goto("/#token=one-of-yesterday")
    window.page.wait_for_selector(".told:has-text('is not accepted')")
    assert "one-of-yesterday" not in window.page.url
    assert "operator" in window.page.inner_text("footer")


def test_a_reader_sees_no_action(worked: RunningSystem, visit: Visit) -> None:
    window = visit("reader")
    for path in NAMES:
        page = window.goto(path, live=path in ("/quarantine", "/workers"))
        assert page.locator("[data-act], #act, textarea").count() == 0, path
    assert "reader" in page.inner_text("footer")


def test_a_lost_connection_and_an_ended_session_are_told(browser: Browser, tmp_path: Path) -> None:
    """A system that dies, and one that is started again at the same address, where nobody is logged in."""
    with RunningSystem.prepared(tmp_path) as mortal:
        window = Watched(browser, mortal, "operator")
        window.expected = "Failed to load resource"
        page = window.goto("/workers", live=True)
        mortal.kill()
        page.wait_for_selector("#lost:visible")
        assert page.inner_text("#live-state") == "not live"
        assert page.evaluate("document.querySelector('#lost').offsetWidth") >= 1200
    with RunningSystem.prepared(tmp_path, port=int(mortal.url.rpartition(":")[2])):
        page.wait_for_selector("#lost-why:has-text('session has ended')")
        window.close()


def test_a_job_that_was_cancelled_while_it_ran_shows_the_attempt(system: RunningSystem, visit: Visit) -> None:
    system.submit("nap-to-stop", "own.nap", {"seconds": 600})
    page = visit().goto("/work/nap-to-stop", live=True)
    page.wait_for_selector("rect.span.running")
    assert '"seconds": 600' in page.inner_text("#payload")
    assert "It has not ended." in page.inner_text("section:has(h2:text-is('Result'))")
    system.ask("/jobs/nap-to-stop/cancel", {"because": "enough"})
    system.ended("nap-to-stop", "cancelled")
    page.wait_for_selector("rect.span.cancelled")
    assert "1 attempt in" in page.inner_text("section:has(h2:text-is('Timeline'))")
    assert "cancelled" in page.inner_text("tr[data-key='0-1']")
    told = page.inner_text("section:has(h2:text-is('Events'))")
    assert "cancelled after 1 attempt in" in told
    assert told.index(": job.cancel nap-to-stop: enough") < told.index("carried out by worker-1: cancel nap-to-stop")


def test_a_run_that_crashed_is_on_the_timeline_and_among_the_attempts(browser: Browser, tmp_path: Path) -> None:
    with RunningSystem.prepared(tmp_path) as mortal:
        mortal.submit("cut-off", "own.nap", {"seconds": 600})
        mortal.ended("cut-off", "running")
        mortal.kill()
    with RunningSystem.prepared(tmp_path) as heir:
        until(lambda: heir.job("cut-off")["crashes"] == 1 and heir.job("cut-off")["state"] == "running")
        window = Watched(browser, heir, "operator")
        page = window.goto("/work/cut-off")
        assert page.locator("rect.span.crashed").count() == page.locator("rect.span.running").count() == 1
        assert "1 attempt and 1 that crashed in" in page.inner_text("section:has(h2:text-is('Timeline'))")
        rows = page.locator("section:has(h2:text-is('Attempts')) tbody tr").all_inner_texts()
        assert ["crashed" in one and "its worker vanished" in one for one in rows] == [True, False]
        window.close()


def test_payload_result_key_and_who_did_what_are_on_the_page(system: RunningSystem, visit: Visit) -> None:
    system.quarantined("bill/12", "the order is empty")
    edited = {"payload": {"text": ""}, "because": "the order was completed"}
    system.ask("/quarantine/jobs/bill%2F12/edit", edited)
    system.ended("bill/12~2", "succeeded")

    page = visit().goto("/work/bill%2F12")
    assert '"text": "the order is empty"' in page.inner_text("#payload")
    assert '"error_code"' in page.inner_text("#result")
    assert "bill/12/0" in page.inner_text("dl.facts")
    told = page.inner_text("section:has(h2:text-is('Events'))")
    assert ": replaced by bill/12~2" in told.split("discarded by ", 1)[1]
    assert "given up" not in told, "the type is the name, as in the audit log"
    assert "retry refused after 1 attempt (not_retryable)" in told
    assert told.index("submitted by ") < told.index("routing to ") < told.index("admission accepted by ")

    page.click("a:text-is('bill/12~2')")
    page.wait_for_selector("h1:has-text('bill/12~2')")
    assert '"mended": true' in page.inner_text("#result")
    assert "the order was completed" in page.inner_text("section:has(h2:text-is('Events'))")
    assert page.locator("a:text-is('bill/12')").count() == 1


@pytest.mark.parametrize("width", [1280, 360])
def test_the_timeline_of_two_runs_is_readable(system: RunningSystem, visit: Visit, width: int) -> None:
    """Every word and every bar is inside of the card, and bars of the second run begin after those of the first."""
    name = f"two-runs-{width}"
    system.submit(name, "own.flaky", {"failures": 5})
    system.ended(name, "quarantined")
    system.ask("/quarantine/requeue", {"ids": [name]})
    system.ended(name, "succeeded")
    page = visit(viewport={"width": width, "height": 900}).goto(f"/work/{name}")
    rows = page.locator(".timeline .row p b").all_inner_texts()
    assert rows == [*(f"run 1, attempt {number}" for number in range(1, 5)), "run 2, attempt 1", "run 2, attempt 2"]
    card = page.locator("section:has(.timeline)").bounding_box()
    assert card is not None
    bars = []
    for one in page.locator(".timeline p, .timeline text, .timeline rect.span").all():
        box = one.bounding_box()
        assert box is not None
        assert card["x"] <= box["x"], one.inner_text()
        assert box["x"] + box["width"] <= card["x"] + card["width"] + 1
        assert box["height"] >= 10, "not too small to be read"
        if one.evaluate("element => element.tagName") == "rect":
            bars.append(box["x"])
    assert len(bars) == 6
    assert bars == sorted(bars)
    assert bars[4] > bars[3]
    waits = page.locator(".timeline .row").nth(4).locator("line.waiting").bounding_box()
    assert waits is None or waits["x"] >= bars[3] - 1, "the second run waits from its requeue on"


def test_an_error_is_found_in_small_letters(system: RunningSystem, visit: Visit) -> None:
    system.quarantined("shouted", "the LEDGER is shut")
    page = visit().goto("/work?error=ledger+is")
    assert page.locator("a:text-is('shouted')").count() == 1
