"""Tables, charts and settings in a real browser: sorting, selections, pages, a search, values, theme and times."""

from collections.abc import Callable

import pytest

from tests.browser.running import RunningSystem, Watched, until
from tests.browser.test_actions import audited, confirmed

Visit = Callable[..., Watched]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stocked(system: RunningSystem) -> RunningSystem:
    """More jobs than a page has, of two tenants, some in quarantine."""
    for number in range(120):
        system.submit(f"stock-{number:03}", "own.flaky")
    for number, tenant in enumerate(("acme", "acme", "globex", None)):
        system.quarantined(f"pick-{number}", f"pick me {number}", tenant)
    system.ended("stock-119", "succeeded")
    return system


def test_a_table_is_sorted_by_a_column_and_stays_so_over_updates(stocked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/quarantine?error=pick+me", live=True)
    head = page.locator("section:has(h2:text-is('Jobs')) th", has_text="Failure")
    head.locator("button").click()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    rows = page.locator("tr:has(input[data-pick]) td[data-name=Failure]").all_inner_texts()
    assert rows == sorted(rows, reverse=True)
    stocked.submit("pick-9", "own.broken", {"text": "pick me 9"})
    page.wait_for_selector("tr[data-key='pick-9/']")
    rows = page.locator("tr:has(input[data-pick]) td[data-name=Failure]").all_inner_texts()
    assert rows == sorted(rows, reverse=True)
    assert "pick me 9" in rows[0]
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") is None


def test_selected_rows_of_several_tenants_are_requeued_with_one_dialog(stocked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/quarantine?error=pick+me", live=True)
    for name in ("pick-0/acme", "pick-2/globex"):
        page.check(f"tr[data-key='{name}'] input[data-pick]")
    assert page.inner_text("[data-picked] strong") == "2 selected"
    page.click("[data-picked] button[data-verb=Discard]")
    page.wait_for_selector("#act .count")
    assert page.inner_text("#act-title") == "Discard 2 selected jobs"
    assert page.inner_text("#act .count") == "2 jobs"
    twin = "reefknot quarantine discard pick-0 --tenant acme && reefknot quarantine discard pick-2 --tenant globex"
    assert page.inner_text("#act-cli code") == twin
    told = confirmed(page, because="they were tests")
    assert "2 jobs" in told
    assert stocked.job("pick-0", tenant="acme")["state"] == "discarded"
    assert stocked.job("pick-2", tenant="globex")["state"] == "discarded"
    assert stocked.job("pick-1", tenant="acme")["state"] == "quarantined"
    audited(stocked, "quarantine.discard", count=1, reason="they were tests")
    page.wait_for_selector("[data-picked]", state="hidden")


def test_selected_jobs_are_cancelled_and_retried(stocked: RunningSystem, visit: Visit) -> None:
    for number in range(3):
        stocked.submit(f"asleep-{number}", "own.nap", {"seconds": 600})
    page = visit().goto("/work?type=own.nap", live=True)
    page.wait_for_selector("tr[data-key='asleep-2/']")
    for number in range(3):
        page.check(f"tr[data-key='asleep-{number}/'] input[data-pick]")
    page.click("[data-picked] button[data-verb=Cancel]")
    assert "3 jobs" in confirmed(page, because="nobody waits for them")
    until(lambda: {stocked.job(f"asleep-{number}")["state"] for number in range(3)} == {"cancelled"})
    page.wait_for_selector("tr[data-key='asleep-2/'] .state:text('cancelled')")
    page.check("tr[data-key='asleep-0/'] input[data-pick]")
    page.check("tr[data-key='asleep-1/'] input[data-pick]")
    page.click("[data-picked] button[data-verb=Retry]")
    assert "2 jobs" in confirmed(page)
    until(lambda: stocked.job("asleep-1")["state"] in ("pending", "running"))
    for number in range(2):
        stocked.ask(f"/jobs/asleep-{number}/cancel", {})


def test_all_rows_of_a_page_are_selected_at_once(stocked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/work?type=own.flaky", live=True)
    page.check("input[data-pick-all]")
    assert page.inner_text("[data-picked] strong") == "50 selected"
    page.uncheck("tr:has(input[data-pick]) >> nth=0 >> input")
    assert page.inner_text("[data-picked] strong") == "49 selected"
    assert page.evaluate("document.querySelector('[data-pick-all]').indeterminate")


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_pages_of_a_list_lead_forth_and_back(stocked: RunningSystem, visit: Visit, script: bool) -> None:
    page = visit(java_script_enabled=script).goto("/work?type=own.flaky&sort=oldest")
    seen = []
    for _ in range(2):
        seen.append(page.locator("tbody tr").first.get_attribute("data-key"))
        page.click("a[rel=next]")
        page.wait_for_function("key => document.querySelector('tbody tr')?.dataset.key !== key", arg=seen[-1])
    for expected in reversed(seen):
        page.click("a[rel=prev]")
        page.wait_for_selector(f"tbody tr:first-child[data-key='{expected}']")
    assert page.locator("a[rel=prev]").count() == 0


def test_a_job_is_found_by_its_id(stocked: RunningSystem, visit: Visit) -> None:
    window = visit()
    window.expected = "400"
    page = window.goto("/work", live=True)
    page.keyboard.press("/")
    page.keyboard.type("stock-007")
    page.keyboard.press("Enter")
    page.wait_for_url("**/work/stock-007")
    page.wait_for_selector("#main")
    page = window.goto("/work?find=nothing-of-that-name")
    assert "no job has this" in page.inner_text("#error-find")


def test_charts_have_three_spans_and_values_on_hover_and_by_keyboard(stocked: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/", live=True)
    for words, step in (("2 hours", "120"), ("24 hours", "900"), ("15 minutes", "10")):
        page.click(f".spans a:text-is('{words}')")
        page.wait_for_selector(f".spans a[aria-current]:text-is('{words}')")
        page.wait_for_selector("#live-state[data-state=live]")
        chart = page.locator("svg.chart", has=page.locator("title", has_text="Jobs ended")).first
        assert chart.get_attribute("data-step") == step
        chart.hover()
        assert "succeeded:" in page.inner_text(".tip")
    chart.focus()
    assert page.inner_text(".tip strong") == "now"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".tip strong") == "10 s ago"
    page.keyboard.press("Home")
    assert page.inner_text(".tip strong") in ("15 min ago", "890 s ago")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")


def test_theme_and_times_are_remembered(stocked: RunningSystem, visit: Visit) -> None:
    window = visit(color_scheme="light", timezone_id="Asia/Kolkata")
    page = window.goto("/work", live=True)
    page.select_option("#theme", "dark")
    page.select_option("#times", "local")
    for path in ("/work", "/quarantine"):
        page = window.goto(path, live=True)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(int(part) for part in background.strip("rgb()").split(",")) < 150
        time = page.locator("tbody time").first
        zone = "{dateStyle: 'short', timeStyle: 'medium', timeZone: 'Asia/Kolkata'}"
        script = f"at => new Intl.DateTimeFormat('sv-SE', {zone}).format(new Date(at))"
        assert time.inner_text() == page.evaluate(script, time.get_attribute("datetime"))
        assert "Asia/" in (time.get_attribute("title") or "")
    page.select_option("#theme", "")
    page.select_option("#times", "")
    assert "ago" in page.locator("tbody time").first.inner_text()


def test_a_schedule_has_its_last_runs(stocked: RunningSystem, visit: Visit) -> None:
    window = visit()
    page = window.goto("/sources")
    page.click("a:has-text('nightly')")
    page.wait_for_url("**/schedules/nightly")
    page.wait_for_selector("#live-state[data-state=live]")
    page.click("button[data-verb='Run now']")
    confirmed(page)
    page.wait_for_selector("td[data-name=Job] a:text('nightly@')")
