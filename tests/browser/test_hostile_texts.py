"""
A hundred hostile texts in every field that a page shows: none becomes an element, a script or a dialog.

Every page is rendered with a text in place of every text of its answers. The elements must be those of a harmless text,
and a browser without any content policy must show the text as it is. A page that trusts one field is caught.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from reefknot.console.dashboard import views
from reefknot.console.dashboard.pages import environment
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import load_settings
from reefknot.runtime.log import printable
from reefknot.stores.opening import open_store
from tests.browser.running import OPERATOR, READER, RunningSystem, Watched
from tests.security.test_dashboard_input import HOSTILE

pytestmark = pytest.mark.slow

HARMLESS = "plain"
FEW = 3
"""Rows of a table that are enough to see each of its fields."""
ASKED = {
    "job": {"id": "hostile-0"},
    "quarantined": {"id": "hostile-0"},
    "source": {"name": "notes"},
    "schedule": {"name": "nightly"},
    "policies": {"target": "block:http", "status": "429"},
}


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))
        self.links += [text or "" for name, text in attrs if name in ("href", "src", "action")]


class HostilePages:
    """The answers of all pages, and their rendering with one text in place of every text."""

    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self.answers = answers
        self.templates = environment()

    def render(self, name: str, text: str) -> str:
        view = views.BY_NAME[name]
        fixed = {"static_version": "1", "role": "operator", "can_act": True, "errors": {}, "live_url": "/live"}
        asked = {"current": name, "asked": dict.fromkeys(view.parameters, text), "actor": text, "shown": text}
        pages = {"pages": [one for one in views.VIEWS if one.key]}
        shown = fixed | asked | pages | _replaced(self.answers[name], text)
        return self.templates.get_template(f"{view.template or name}.html").render(shown)


def _replaced(value: Any, text: str) -> Any:
    """A value with the text in place of every text in it. Keys stay, and so do words that a chart's shape hangs on."""
    match value:
        case str():
            return text
        case dict():
            kept = {name: one for name, one in value.items() if name in ("kind", "unit")}
            return {name: _replaced(one, text) for name, one in value.items()} | kept
        case list():
            return [_replaced(one, text) for one in value[:FEW]]
        case tuple() if not hasattr(value, "_fields"):  # one with names is of the page, not of the store
            return tuple(_replaced(one, text) for one in value[:FEW])
        case _:
            return value


@pytest.fixture(scope="module")
def pages(system: RunningSystem) -> HostilePages:
    """Answers of a real system: with jobs, a quarantine, sources, alerts and events."""
    for number in range(2):
        system.submit(f"hostile-{number}", "own.broken", {"text": "it fails"}, tenant_id=None)
        system.submit(f"retried-{number}", "own.flaky", {"failures": 1})
    system.ended("hostile-0", "quarantined")
    system.ended("retried-1", "succeeded")
    tokens = {"TEST_OPERATOR_TOKEN": OPERATOR, "TEST_READER_TOKEN": READER}

    async def answers() -> dict[str, dict[str, Any]]:
        settings = load_settings(environ=tokens, cwd=system.folder)
        async with open_store(f"sqlite:{system.folder}/.reefknot/state.db") as store:
            operator = Operator(store, Redactor(()), None, settings, "sqlite:state.db")
            return {view.name: await view.load(operator, ASKED.get(view.name, {})) for view in views.VIEWS}

    with ThreadPoolExecutor(1) as pool:  # the browser has a loop in this thread
        return HostilePages(pool.submit(lambda: asyncio.run(answers())).result())


REASON = '{{ (one.waiting.text if one.waiting and one.state != "quarantined" else one.reason or "")|short(160) }}'
"""The field of the page of work that the control takes for markup."""

# Texts without a character that means anything to a parser are shown together: they are many, and pages are long.
ACTIVE = [text for text in HOSTILE if set(text) & set("<>&\"'`=\r\n")]
TEXTS = [*ACTIVE, " ".join(text for text in HOSTILE if text not in ACTIVE)]


def test_no_text_becomes_an_element_or_a_link_elsewhere(pages: HostilePages) -> None:
    for name in views.BY_NAME:
        usual = Elements(pages.render(name, HARMLESS)).found
        assert len(usual) > 40
        for text in TEXTS:
            found = Elements(pages.render(name, text))
            assert found.found == usual, (name, text)
            assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in found.links), (name, text)


@pytest.fixture
def bare(browser: Browser) -> Iterator[Page]:
    """A page without any content policy: a script that gets into it runs."""
    context = browser.new_context()
    page = context.new_page()
    yield page
    context.close()


def dialogs_of(page: Page, text: str) -> list[str]:
    """The dialogs that a document opens."""
    heard: list[str] = []

    def refuse(dialog: Any) -> None:
        heard.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", refuse)
    page.set_content(text, wait_until="domcontentloaded")
    page.evaluate("new Promise((done) => setTimeout(done))")
    page.remove_listener("dialog", refuse)
    return heard


def test_a_browser_shows_each_text_as_it_is(pages: HostilePages, bare: Page) -> None:
    names = list(views.BY_NAME)
    for number, text in enumerate(HOSTILE):
        document = pages.render(names[number % len(names)], text)
        assert dialogs_of(bare, document) == [], text
        shown = bare.evaluate("document.body.textContent")
        first = printable(text.splitlines()[0], most=40).rstrip("…").strip()
        assert first in shown, (names[number % len(names)], text)
        assert shown.replace("\n", "").isprintable(), text  # nothing that turns a line around, or hides in it


def trusting(pages: HostilePages, template: str, field: str) -> HostilePages:
    """The same pages with a template that takes one field for markup."""
    broken = HostilePages(pages.answers)
    loader = broken.templates.loader
    assert loader is not None
    source, _, _ = loader.get_source(broken.templates, template)
    assert field in source
    text = source.replace(field, field.replace(" }}", "|safe }}"))
    broken.templates.cache = None if broken.templates.cache is None else {}
    plain = loader.get_source
    broken.templates.loader.get_source = (  # type: ignore[union-attr,method-assign]
        lambda env, name: (text, None, None) if name == template else plain(env, name)
    )
    return broken


def test_a_page_that_trusts_a_field_is_caught(pages: HostilePages, bare: Page) -> None:
    """The control: one forgotten escape, and both looks see it."""
    broken = trusting(pages, "work.html", REASON)
    with pytest.raises(AssertionError):
        test_no_text_becomes_an_element_or_a_link_elsewhere(broken)
    assert dialogs_of(bare, broken.render("work", "<img src=x onerror=alert(1)>")) != []


def test_hostile_jobs_of_a_running_system_are_only_shown(system: RunningSystem, visit: Callable[..., Watched]) -> None:
    """Ids, tenants and messages as submitters send them, in pages as they are served."""
    markup = [text for text in HOSTILE if "<" in text and text.isprintable()]
    for number, text in enumerate(markup):
        system.submit(f"{text}-{number}", "own.broken", {"text": f"{text} fails"}, tenant_id=text)
    system.ended(f"{markup[-1]}-{len(markup) - 1}", "quarantined", tenant=markup[-1])
    window = visit()
    for path in ("/work?type=own.broken", "/quarantine?type=own.broken", "/audit?type=quarantined"):
        page = window.goto(path, live=True)
        shown = page.evaluate("document.body.textContent")
        assert markup[0] in shown
    page = window.goto("/work?type=own.broken", live=True)
    page.click(f"a.id >> text={markup[0]}-0")
    page.wait_for_selector("h1")
    assert f"ValueError: {markup[0]} fails" in page.inner_text("main")
    page.click("button[data-act^='Requeue']")
    page.wait_for_selector("#act .count")
    assert "'<script>alert(1)</script>" in page.inner_text("#act-cli code")
