"""The page of one job: its timeline, its payload and result, and who did what with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.running import RunningSystem, Watched, until

Visit = Callable[..., Watched]

pytestmark = pytest.mark.slow


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
