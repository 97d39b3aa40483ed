"""The page of one job: its timeline, its payload and result, and who did what with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.running import RunningSystem, Watched

Visit = Callable[..., Watched]

pytestmark = pytest.mark.slow


def test_a_job_that_was_cancelled_while_it_ran_shows_the_attempt(system: RunningSystem, visit: Visit) -> None:
    system.submit("nap-to-stop", "own.nap", {"seconds": 600})
    page = visit().goto("/work/nap-to-stop", live=True)
    page.wait_for_selector("rect.span.running")
    system.ask("/jobs/nap-to-stop/cancel", {"because": "enough"})
    system.ended("nap-to-stop", "cancelled")
    page.wait_for_selector("rect.span.cancelled")
    assert "1 attempt in" in page.inner_text("section:has(h2:text-is('Timeline'))")
    assert "cancelled" in page.inner_text("tr[data-key='0-1']")
    assert "cancelled after 1 attempt in" in page.inner_text("section:has(h2:text-is('Events'))")
