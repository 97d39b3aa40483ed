"""Actions by clicking: the count before, the effect, its audit event, and the command that does the same."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.running import RunningSystem, Watched, until

Visit = Callable[..., Watched]

pytestmark = pytest.mark.slow


def confirmed(page: Page, *, because: str = "") -> str:
    """Confirm the open dialog; the text of the answer."""
    page.wait_for_selector("#act[open]")
    if because:
        page.fill("#act-because", because)
    page.wait_for_selector("#act-go:enabled")
    answer = page.locator(".told", has_text=f"{page.inner_text('#act-title')}: done").last
    page.click("#act-go")
    answer.wait_for()
    return answer.inner_text()


def act(page: Page, action: str, *, because: str = "") -> str:
    """Click the button of an action and confirm it; the text of the answer."""
    page.click(f"button[data-act^='{action}']")
    return confirmed(page, because=because)


def audited(system: RunningSystem, action: str, **fields: Any) -> None:
    """Wait for the audit event of an action, which may come with the next write."""
    until(lambda: any(fields.items() <= {**one, **(one["details"] or {})}.items() and one["action"] == action
                      for one in system.actions()))  # fmt: skip


def test_a_group_is_requeued_with_its_count_before(system: RunningSystem, visit: Visit) -> None:
    for number in range(3):
        system.submit(f"group-{number}", "own.flaky", {"failures": 4, "text": "the depot is shut"})
    for number in range(3):
        system.ended(f"group-{number}", "quarantined")
    found = system.ask("/quarantine/groups", type="own.flaky")["groups"]
    fingerprint = next(one["fingerprint"] for one in found if "depot" in one["message"])
    count = next(one["count"] for one in found if one["fingerprint"] == fingerprint)

    page = visit().goto(f"/quarantine?fingerprint={fingerprint}", live=True)
    page.click("button[data-act^='Requeue the group']")
    page.wait_for_selector("#act .count")
    assert page.inner_text("#act .count") == f"{count} jobs"
    assert f"{count} own.flaky" in page.inner_text("#act-counts")
    assert page.inner_text("#act-cli code") == f"reefknot quarantine requeue --fingerprint {fingerprint}"
    page.fill("#act-because", "it's mended")
    twin = f"reefknot quarantine requeue --fingerprint {fingerprint} --because 'it'\\''s mended'"
    assert page.inner_text("#act-cli code") == twin

    told = confirmed(page)
    assert f"{count} jobs" in told
    assert "audited as quarantine.requeue" in told
    assert twin in told
    system.ended("group-0", "succeeded")
    audited(system, "quarantine.requeue", count=count, reason="it's mended")
    page.wait_for_selector("text=No quarantined job matches this filter")


def test_the_actions_of_a_group_keep_to_the_filter_of_the_page(system: RunningSystem, visit: Visit) -> None:
    for number, tenant in enumerate(("acme", "globex", "globex")):
        system.quarantined(f"shared-{number}", "the shared cause", tenant)
    page = visit().goto("/quarantine?tenant=globex&error=the+shared+cause")
    assert page.inner_text("td[data-name=Jobs]") == "2"
    page.click("button[data-act^='Discard the group']")
    page.wait_for_selector("#act .count")
    assert page.inner_text("#act .count") == "2 jobs"
    assert "--tenant globex --error 'the shared cause' --fingerprint" in page.inner_text("#act-cli code")
    confirmed(page, because="a test order")
    assert system.job("shared-0", tenant="acme")["state"] == "quarantined"
    assert system.job("shared-1", tenant="globex")["state"] == "discarded"


def test_a_job_is_edited_and_requeued(system: RunningSystem, visit: Visit) -> None:
    """A key that is there twice is refused, and a long number is not rounded."""
    system.quarantined("odd-order", "no such customer", "acme")
    window = visit()
    window.expected = "Failed to load resource"
    page = window.goto("/quarantine/odd-order?tenant=acme")
    page.fill("#payload", '{"text": ')
    page.click("button[data-edit]")
    assert "not JSON" in page.inner_text("#payload-problem")
    assert page.get_attribute("#payload", "aria-invalid") == "true"
    page.fill("#payload", '{"text": "", "text": "which of them?"}')
    page.click("button[data-edit]")
    page.wait_for_selector("#act-problem:visible")
    assert "twice" in page.inner_text("#act-problem")
    page.keyboard.press("Escape")

    page.fill("#payload", '{"text": "", "account": 12345678901234567891}')
    page.click("button[data-edit]")
    page.wait_for_selector("#act[open] pre")
    edited = page.inner_text("#act pre")
    assert '-  "text": "no such customer"' in edited
    assert '"account": 12345678901234567891' in edited
    told = confirmed(page, because="the customer was renamed")
    assert "job odd-order~2" in told
    page.wait_for_url("**/work/odd-order~2?tenant=acme")
    page.wait_for_selector("#main")
    system.ended("odd-order~2", "succeeded", tenant="acme")
    assert system.job("odd-order", tenant="acme")["state"] == "discarded"
    assert page.locator(".told a").get_attribute("href") == "/work/odd-order~2?tenant=acme"


def test_an_action_on_a_quarantined_job_ends_on_the_story_of_that_job(system: RunningSystem, visit: Visit) -> None:
    """A slash in an id, and a page whose job is in quarantine no longer."""
    system.quarantined("receipt/12", "paid twice")
    window = visit()
    page = window.goto("/quarantine/receipt%2F12")
    assert "audited as quarantine.discard" in act(page, "Discard", because="the bank took it back")
    page.wait_for_url("**/work/receipt%2F12")
    page.wait_for_selector(".state:text('discarded')")
    page = window.goto("/quarantine/receipt%2F12")
    assert page.url.endswith("/work/receipt%2F12")


def test_the_effect_of_an_action_needs_no_live_stream(system: RunningSystem, visit: Visit) -> None:
    """A stream that is slow, or away, does not keep the old state and its button on the page."""
    system.submit("no-stream", "own.nap", {"seconds": 600})
    system.ended("no-stream", "running")
    window = visit()
    window.expected = "Failed to load resource"
    window.page.route("**/live?*", lambda route: route.abort())
    page = window.goto("/work/no-stream")
    act(page, "Cancel job", because="nobody waits for it")
    page.wait_for_selector(".page-head .state:text('cancelled')")
    page = window.goto("/workers")
    for verb, state in (("Pause", "paused"), ("Resume", "running")):
        act(page, f"{verb} worker {worker_of(system)}")
        page.wait_for_selector(f".named .state:text('{state}')")


def worker_of(system: RunningSystem) -> str:
    return str(system.ask("/workers")["workers"][0]["worker_id"])


def test_the_focus_stays_among_the_rows_when_one_of_them_leaves(system: RunningSystem, visit: Visit) -> None:
    for number in range(3):
        system.submit(f"row-{number}", "own.flaky", {"failures": 4, "text": "a row that leaves"})
    for number in range(3):
        system.ended(f"row-{number}", "quarantined")
    page = visit().goto("/quarantine?type=own.flaky", live=True)
    page.focus("tr[data-key='row-1/'] button[data-verb=Requeue]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#act-go:enabled")
    page.keyboard.press("Enter")
    page.wait_for_selector(".told")
    page.wait_for_selector("tr[data-key='row-1/']", state="detached")
    assert page.evaluate("document.activeElement.closest('tr')?.dataset.key") == "row-2/"
    assert page.evaluate("document.activeElement.dataset.verb") == "Requeue"

    page.click("tr[data-key='row-2/'] button[data-verb=Discard]")
    assert page.inner_text("#act-cli code").startswith("reefknot quarantine discard row-2")
    confirmed(page, because="the row is wrong")
    page.wait_for_selector("tr[data-key='row-2/']", state="detached")
    assert system.job("row-2")["state"] == "discarded"


def test_a_job_is_discarded_only_with_a_reason(system: RunningSystem, visit: Visit) -> None:
    system.quarantined("withdrawn", "withdrawn by the customer")
    page = visit().goto("/work/withdrawn", live=True)
    page.click("button[data-act^='Discard']")
    page.wait_for_selector("#act-go:enabled")
    assert page.get_attribute("#act-because", "required") is not None
    page.click("#act-go")
    assert page.evaluate("document.querySelector('#act').open")
    assert system.job("withdrawn")["state"] == "quarantined"
    confirmed(page, because="the customer took it back")
    page.wait_for_selector(".state:text('discarded')")
    audited(system, "quarantine.discard", reason="the customer took it back")


@pytest.mark.parametrize(("name", "path"), [("endless", "/work/endless"), ("..", "/work/?id=..")])
def test_a_running_job_is_cancelled(system: RunningSystem, visit: Visit, name: str, path: str) -> None:
    """A browser takes `..` out of a path, so the page and the API have such an id in the query."""
    system.submit(name, "own.nap", {"seconds": 600})
    page = visit().goto(path, live=True)
    page.wait_for_selector(".state:text('running')")
    assert "running → cancelled" in act(page, "Cancel job", because="nobody waits for it")
    page.wait_for_selector(".state:text('cancelled')")
    audited(system, "job.cancel", subject=name)
    act(page, "Retry job")
    until(lambda: system.ask("/jobs/", job=name)["state"] in ("pending", "running"))
    system.ask("/jobs//cancel", {}, job=name)


def test_a_worker_is_drained_and_resumed_and_a_reload_shows_no_older_state(system: RunningSystem, visit: Visit) -> None:
    window, worker = visit(), worker_of(system)
    page = window.goto("/workers", live=True)
    page.click(f"button[data-act='Drain worker {worker}']")
    assert page.inner_text("#act-cli code") == f"reefknot worker drain {worker}"
    assert "the only worker that runs" in page.inner_text("#act-effect")
    confirmed(page)
    page.wait_for_selector(".state:text('draining'), .state:text('drained')")
    audited(system, "worker.drain", subject=worker)
    act(page, f"Resume worker {worker}")
    page.wait_for_selector(".named .state:text('running')")
    for verb, state in (("Pause", "paused"), ("Resume", "running")):
        act(page, f"{verb} worker {worker}")
        page = window.goto("/workers", live=True)
        assert page.inner_text(".named .state") == state


def test_a_source_is_paused_and_resumed(system: RunningSystem, visit: Visit) -> None:
    page = visit().goto("/sources", live=True)
    act(page, "Pause source notes", because="the disk is being moved")
    page.wait_for_selector("tr[data-key='source/notes'] .state:text('paused')")
    audited(system, "source.pause", subject="notes")
    act(page, "Resume source notes")
    page.wait_for_selector("tr[data-key='source/notes'] button[data-act='Pause source notes']")
    assert "schedule.run" in act(page, "Run schedule nightly now")


def test_a_refused_action_says_why_and_keeps_the_dialog(system: RunningSystem, visit: Visit) -> None:
    system.quarantined("gone-meanwhile", "gone meanwhile")
    window = visit()
    window.expected = "Failed to load resource"
    page = window.goto("/quarantine/gone-meanwhile")
    system.ask("/quarantine/discard", {"ids": ["gone-meanwhile"], "because": "somebody else was faster"})
    page.click("button[data-edit]")
    page.wait_for_selector("#act-problem:visible")
    assert "quarantine" in page.inner_text("#act-problem")
    assert page.evaluate("document.querySelector('#act').open")
