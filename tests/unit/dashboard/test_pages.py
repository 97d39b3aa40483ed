"""Pages in process: what an empty store shows, what an error says, and which command each action names."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.operators import filled
from reefknot.cli.app import application
from reefknot.config.settings import load_settings
from reefknot.dashboard import pages, views
from reefknot.dashboard.live import ViewKey
from reefknot.dashboard.server import build_app
from reefknot.errors import StoreUnavailableError
from tests.security.site_client import READER, Answered, ask, bearer, opened_site, stored_work

CONFIG = """\
sources:
  notes: {connector: local_files, path: notes}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.nap, payload: {}}}}
"""
TEMPLATES = Path(pages.__file__).parent / "templates"
TARGETS = (
    "/",
    "/alerts",
    "/work",
    "/quarantine",
    "/policies",
    "/policies?target=block:http&status=429",
    "/workers",
    "/sources",
    "/audit",
    "/audit/verify",
    "/audit/replay",
    "/health",
)


class Shown(HTMLParser):
    """The commands of a page, and its buttons that act."""

    def __init__(self, answered: Answered) -> None:
        super().__init__()
        self.commands: list[str] = []
        self.actions: list[dict[str, str | None]] = []
        self._box = False
        self.feed(answered.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-act" in given:
            self.actions.append(given)
        self._box = given.get("class") == "cli" or (self._box and tag == "code")

    def handle_data(self, data: str) -> None:
        if self._box and data.strip():
            self.commands.append(data)
            self._box = False


def answers(path: Path, *targets: str, token: str | None = None, config: str = CONFIG) -> dict[str, Answered]:
    """The pages of these addresses, over the store in this file."""
    (path.parent / "reefknot.yaml").write_text(config)

    async def story() -> dict[str, Answered]:
        settings = load_settings(environ={}, cwd=path.parent)
        async with opened_site(path, settings) as site:
            app = build_app(site)
            return {one: await ask(app, "GET", one, [bearer(token) if token else bearer()]) for one in targets}

    return asyncio.run(story())


def test_every_page_of_an_empty_store_answers_and_names_a_command_to_type(tmp_path: Path) -> None:
    for target, answered in answers(tmp_path / "state.db", *TARGETS, config="{}\n").items():
        assert answered.status == 200, (target, answered.text[:300])
        assert Shown(answered).commands, target
        if target in ("/work", "/quarantine", "/workers", "/sources", "/audit"):
            assert 'class="empty"' in answered.text, target


def test_what_if_answers_in_the_words_of_explain_with_what_ingestion_does(tmp_path: Path) -> None:
    targets = ("/policies?target=block:http&status=429", "/policies?target=connector:imap_mailbox&status=503")
    limited, outage = answers(tmp_path / "state.db", *targets).values()

    assert "Retried: up to" in limited.text
    assert "http_error 429 (rate_limited)" in limited.text
    assert "In ingestion" not in limited.text
    assert "each failure spends an attempt" in outage.text
    assert "open its breaker" in outage.text


def test_every_command_that_a_page_shows_is_one_of_the_command_line(tmp_path: Path) -> None:
    """Twins of actions and commands to type are parsed as the command line would."""
    path = tmp_path / "state.db"
    stored_work(path)
    filters = ("/work?state=pending&since=1h&sort=oldest", "/quarantine?reason=x&before=1h", "/audit?since=1h&work=a")
    targets = (*TARGETS, *filters, "/work/waiting", "/work/held", "/quarantine/held")
    app = application()
    seen: set[str] = set()
    for target, answered in answers(path, *targets).items():
        assert answered.status == 200, (target, answered.text[:300])
        shown = Shown(answered)
        seen.update(shown.commands)
        for one in shown.actions:  # the script appends the reason that was typed
            seen.add(f"{one['data-cli']}{'' if one['data-because'] == 'none' else ' --because x'}")
    verbs = {" ".join(shlex.split(command)[1:3]) for command in seen}
    assert {"quarantine requeue", "quarantine discard", "job cancel", "source pause", "schedule run", "doctor"} <= verbs
    for command in sorted(seen):
        program, *words = shlex.split(command)
        assert program == "reefknot", command
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_every_action_names_its_route_its_event_and_its_command(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    stored_work(path)
    found = answers(path, "/work/waiting", "/quarantine", "/quarantine/held", "/sources")
    actions = [one for answered in found.values() for one in Shown(answered).actions]
    assert len(actions) >= 10
    for one in actions:
        assert (one["data-url"] or "").startswith("/api/v1/")
        assert re.fullmatch(r"[a-z]+\.[a-z]+", one["data-event"] or "")
        assert (one["data-cli"] or "").startswith("reefknot ")


def test_a_reader_gets_no_action(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    stored_work(path)
    for answered in answers(
        path, "/work/waiting", "/quarantine", "/quarantine/held", "/sources", token=READER
    ).values():
        assert answered.status == 200
        assert "data-act" not in answered.text
        assert "/api/v1" not in answered.text


def test_a_store_that_is_away_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> Any:
        raise StoreUnavailableError("state.db", "it cannot be opened", "check the disk")

    monkeypatch.setattr(views, "VIEWS", tuple(replace(view, load=away) for view in views.VIEWS))
    for answered in answers(tmp_path / "state.db", "/", "/work").values():
        assert answered.status == 503
        assert answered.headers["retry-after"]
        assert "it cannot be opened; check the disk" in answered.text
        assert "reefknot doctor" in answered.text


def test_no_template_trusts_a_text_or_has_a_style_or_script_of_its_own() -> None:
    for template in TEMPLATES.glob("*.html"):
        text = template.read_text()
        assert not re.search(r"\|\s*safe\b|autoescape|Markup", text), template.name
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text), template.name
        assert all(" src=" in one for one in re.findall(r"<script[^>]*>", text)), template.name


def test_a_live_fragment_is_the_live_part_of_its_page(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    stored_work(path)

    (tmp_path / "reefknot.yaml").write_text(CONFIG)

    async def story() -> None:
        async with opened_site(path, load_settings(environ={}, cwd=tmp_path)) as site:
            renderer = pages.PageRenderer(site)
            for view in views.VIEWS:
                if view.is_live:
                    asked = tuple(one for one in (("id", "held"), ("name", "notes")) if one[0] in view.parameters)
                    text, took = await renderer.fragment(ViewKey(view.name, "operator", asked))
                    assert text.count("data-live=") == 1
                    assert "<html" not in text
                    assert 0 <= took < 5

    asyncio.run(story())


def test_an_unknown_view_has_no_stream(tmp_path: Path) -> None:
    wanting = ("/live", "/live?view=nothing", "/live?view=health", "/live?view=job", "/live?view=source")
    found = answers(tmp_path / "state.db", *wanting)
    assert {one.status for one in found.values()} == {400}


@pytest.mark.slow
def test_pages_of_fifty_thousand_events_answer_soon(tmp_path: Path) -> None:
    """A tenth of a second on an idle machine; the limit is one that a busy machine keeps."""
    path = asyncio.run(filled(tmp_path, items=5_000, events=50_000))
    filters = ("/work?error=rare", "/work?tenant=tenant-rare", "/quarantine?reason=spent", "/audit?text=rare")
    targets = (*TARGETS, *filters, "/work/job-500", "/quarantine/job-9")

    async def story() -> None:
        async with opened_site(path) as site:
            app = build_app(site)
            for target in targets:
                began = time.monotonic()
                answered = await ask(app, "GET", target, [bearer()])
                assert answered.status in (200, 404), (target, answered.text[:300])
                assert time.monotonic() - began < 5, target

    asyncio.run(story())
