"""Pages in process: what an empty store shows, what an error says, and which command each action names."""

import asyncio
import json
import re
import shlex
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from bench.operators import filled
from reefknot.app.alert_watch import AlertsRecord, RecordedAlert
from reefknot.console.cli.app import application
from reefknot.console.dashboard import live, pages, server, views
from reefknot.console.dashboard.formats import cursor_words, places, words_of
from reefknot.console.operations.alerts import active_alerts
from reefknot.console.operations.job_filters import FILTERS, FORM
from reefknot.errors import StoreUnavailableError
from reefknot.policy.settings import load_settings
from reefknot.queue.model.notes import CHECKPOINT, LINES, Notes, StepLine, StepLog, StepProgress
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Held
from tests.rows import for_each_row
from tests.security.site_client import READER, Answered, ask, bearer, opened_site, stored_work
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.test_families import family

CONFIG = """\
sources:
  notes: {connector: local_files, path: notes}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.nap, payload: {}}}}
"""
TEMPLATES = Path(pages.__file__).parent / "templates"
TARGETS = (
    *("/", "/alerts", "/work", "/quarantine", "/policies", "/policies?target=block:http&status=429"),
    *("/workers", "/sources", "/audit", "/audit/verify", "/audit/replay", "/health"),
)


class Shown(HTMLParser):
    """The commands of a page, and its buttons that act."""

    def __init__(self, answered: Answered) -> None:
        super().__init__()
        self.commands: list[str] = []
        self.actions: list[dict[str, str | None]] = []
        self._box = self._code = False
        self.feed(answered.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-act" in given:
            self.actions.append(given)
        if self._box and tag == "code":
            self._code = True
            self.commands.append("")
        self._box = given.get("class") == "cli"

    def handle_endtag(self, tag: str) -> None:
        if self._code and tag == "code":
            self._code = False
            self.commands = [one for one in self.commands if one]  # that of the dialog is empty until it opens

    def handle_data(self, data: str) -> None:
        if self._code:
            self.commands[-1] += data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def worked(path: Path) -> Path:
    stored_work(path)
    return path


def answers(path: Path, *targets: str, token: str | None = None, config: str = CONFIG) -> dict[str, Answered]:
    (path.parent / "reefknot.yaml").write_text(config)

    async def story() -> dict[str, Answered]:
        settings = load_settings(environ={}, cwd=path.parent)
        async with opened_site(path, settings) as site:
            app = server.build_app(site)
            return {one: await ask(app, "GET", one, [bearer(token) if token else bearer()]) for one in targets}

    return asyncio.run(story())


def test_every_page_of_an_empty_store_answers_and_names_a_command_to_type(path: Path) -> None:
    for target, answered in answers(path, *TARGETS, config="{}\n").items():
        assert answered.status == 200, (target, answered.text[:300])
        assert Shown(answered).commands, target
        if target in ("/work", "/quarantine", "/workers", "/sources", "/audit"):
            assert 'class="empty"' in answered.text, target


def test_the_page_of_work_asks_for_every_field_of_its_form_and_names_the_command_with_that_filter(worked: Path) -> None:
    examples = {name: field.example.split(",")[0] for name, field in FORM.items()}
    assert set(examples) < set(FILTERS), "a field that is no filter"
    found = answers(worked, *(f"/work?{name}={example}" for name, example in examples.items()))
    for (name, example), answered in zip(examples.items(), found.values(), strict=True):
        assert answered.status == 200, (name, answered.text[:300])
        assert re.search(
            rf'{FORM[name].label}<input name="{name}" type="text" value="{re.escape(example)}"', answered.text
        )
        assert Shown(answered).commands[0] == f"reefknot job list --{name.replace('_', '-')} {example}"


def test_what_a_step_says_is_on_the_page_of_its_job_on_the_overview_and_in_the_api(path: Path) -> None:
    item = WorkItem("long", "own.step", "cpu@worker-1", payload=b"{}")
    in_store(path, lambda one: one.work.assign([item], start={"long"}, owner="worker-1#1"))
    log = StepLog((StepLine(0, 1, "begins"), StepLine(1500, 2, "<b>bold</b> \\x1b[31m")), dropped=3)
    parts = {CHECKPOINT: b'{"page":"<i>3</i>"}', LINES: encode(log)}
    notes = Notes(2, StepProgress(3, 10, "<u>page 3</u>"), parts)
    assert in_store(path, lambda one: one.work.note(Held("long", "worker-1#1", 1), notes))

    api = "/api/v1/jobs/long"
    found = answers(path, "/work/long", "/", api, f"{api}/logs", f"{api}/logs?after=4", f"{api}/logs?after=x")
    page, overview, job, logs, later, wrong = found.values()
    progress = "3 of 10 (30 %), &lt;u&gt;page 3&lt;/u&gt;"
    assert all(text in page.text for text in (progress, "&lt;i&gt;3&lt;/i&gt;", "&lt;b&gt;bold&lt;/b&gt; \\x1b[31m"))
    assert '<progress value="3" max="10"></progress>' in page.text
    assert "3 earlier lines are not kept" in page.text
    assert "reefknot job logs long" in Shown(page).commands
    assert "Steps under way" in overview.text
    assert progress in overview.text
    told = json.loads(job.text)
    assert told["progress"] == {"done": 3, "of": 10, "percent": 30, "text": "<u>page 3</u>"}
    assert (told["checkpoint"]["number"], told["checkpoint"]["value"]) == (2, {"page": "<i>3</i>"})
    lines = json.loads(logs.text)
    assert (lines["dropped"], [one["number"] for one in lines["lines"]]) == (3, [4, 5])
    assert lines["lines"][0] == {"number": 4, "at": "1970-01-01T00:00:00.000Z", "attempt": 1, "text": "begins"}
    assert [one["number"] for one in json.loads(later.text)["lines"]] == [5]
    assert wrong.status == 400


def test_what_if_answers_in_the_words_of_explain_with_what_ingestion_does(path: Path) -> None:
    targets = ("/policies?target=block:http&status=429", "/policies?target=connector:imap_mailbox&status=503")
    limited, outage = (one.text for one in answers(path, *targets).values())
    assert "Retried: up to" in limited
    assert "http_error 429 (rate_limited)" in limited
    assert "In ingestion" not in limited
    assert "each failure spends an attempt" in outage
    assert "open its breaker" in outage


def test_every_command_that_a_page_shows_is_one_of_the_command_line(worked: Path) -> None:
    """Twins of actions and commands to type are parsed as the command line would."""
    filters = ("/work?state=pending&since=1h&sort=oldest", "/quarantine?reason=x&before=1h", "/audit?since=1h&work=a")
    targets = (*TARGETS, *filters, "/work/waiting", "/work/held", "/quarantine/held")
    app = application()
    seen: set[str] = set()
    for target, answered in answers(worked, *targets).items():
        assert answered.status == 200, (target, answered.text[:300])
        shown = Shown(answered)
        seen.update(shown.commands)
        for one in shown.actions:  # the script appends the reason that was typed
            ids = " picked" if "data-many" in one else ""  # and the ids of the selected rows
            seen.add(f"{one['data-cli']}{ids}{'' if one['data-because'] == 'none' else ' --because x'}")
    verbs = {" ".join(shlex.split(command)[1:3]) for command in seen}
    assert {"quarantine requeue", "quarantine discard", "job cancel", "source pause", "schedule run", "doctor"} <= verbs
    for command in sorted(seen):
        program, *words = shlex.split(command)
        assert program == "reefknot", command
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_every_action_names_its_route_its_event_and_its_command_and_a_reader_gets_none(worked: Path) -> None:
    targets = ("/work/waiting", "/quarantine", "/quarantine/held", "/sources")
    actions = [one for answered in answers(worked, *targets).values() for one in Shown(answered).actions]
    assert len(actions) >= 10
    for one in actions:
        assert (one["data-url"] or "").startswith("/api/v1/")
        assert re.fullmatch(r"[a-z]+\.[a-z]+", one["data-event"] or "")
        assert (one["data-cli"] or "").startswith("reefknot ")
    for answered in answers(worked, *targets, token=READER).values():
        assert answered.status == 200
        assert "data-act" not in answered.text
        assert "/api/v1" not in answered.text


def test_a_store_that_is_away_is_told_with_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> Any:
        raise StoreUnavailableError("state.db", "it cannot be opened", "check the disk")

    monkeypatch.setattr(views, "VIEWS", tuple(replace(view, load=away) for view in views.VIEWS))
    for answered in answers(path, "/", "/work").values():
        assert answered.status == 503
        assert answered.headers["retry-after"]
        assert "it cannot be opened; check the disk" in answered.text
        assert "reefknot doctor" in Shown(answered).commands


def test_no_template_trusts_a_text_or_has_a_style_or_script_of_its_own() -> None:
    for template in TEMPLATES.glob("*.html"):
        text = template.read_text()
        assert not re.search(r"\|\s*safe\b|autoescape|Markup", text), template.name
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text), template.name
        assert all(" src=" in one for one in re.findall(r"<script[^>]*>", text)), template.name


@pytest.mark.real_time
async def test_a_live_fragment_is_the_live_part_of_its_page(worked: Path) -> None:
    (worked.parent / "reefknot.yaml").write_text(CONFIG)
    async with opened_site(worked, load_settings(environ={}, cwd=worked.parent)) as site:
        renderer = pages.PageRenderer(site)
        for view in views.VIEWS:
            if view.is_live:
                named = ("id", "held"), ("name", "nightly" if view.name == "schedule" else "notes")
                asked = tuple(one for one in named if one[0] in view.parameters)
                text, took = await renderer.fragment(live.ViewKey(view.name, "operator", asked))
                assert (text.count("data-live="), "<html" in text, 0 <= took < 5) == (1, False, True)


def test_a_parameter_that_a_page_does_not_know_is_refused_and_an_unknown_view_has_no_stream(path: Path) -> None:
    """A misspelled filter must not show everything; the API refuses it as well."""
    for target, answered in answers(
        path, "/work?foo=bar", "/work?stat=failed&type=x", "/?state=a", "/work/a?id=b"
    ).items():
        assert answered.status == 400, target
        assert "is unknown; accepted: " in answered.text, target
    wanting = ("/live", "/live?view=nothing", "/live?view=health", "/live?view=job", "/live?view=source")
    assert {one.status for one in answers(path, *wanting).values()} == {400}


def test_an_absent_job_is_reported_in_the_words_of_pages_and_a_source_has_one_with_its_settings(path: Path) -> None:
    targets = ("/work/no%2Fbody", "/quarantine/no%2Fbody", "/sources/notes", "/sources/nobody")
    *jobs, known, unknown = answers(path, *targets).values()
    for answered in jobs:
        assert answered.status == 404
        assert "--tenant" not in answered.text
        assert '<input name="tenant"' in answered.text
        assert 'no/body" class="acts-row"' in answered.text
    assert (known.status, unknown.status) == (200, 404)
    assert "<dt>path</dt>" in known.text
    assert "source.pause" in known.text


def test_the_quarantine_is_filtered_and_its_counts_are_those_of_the_filter(worked: Path) -> None:
    filters = ("", "?tenant=nobody", "?since=1h&error=", "?error=of+nobody")
    everything, none, young, old = answers(worked, *(f"/quarantine{one}" for one in filters)).values()
    assert "in the order of their ids" in everything.text
    assert "jobs in quarantine" in everything.text
    for empty in (none, old):
        assert "No quarantined job matches this filter" in empty.text
        assert re.search(r"<b>0</b><span>jobs that match, of \d", empty.text)
    assert re.search(r"<b>[1-9]\d*</b><span>jobs that match, of \d", young.text)
    assert "--since 1h" in young.text


def test_the_actions_of_a_group_are_for_the_jobs_of_its_row_alone(worked: Path) -> None:
    """A group with jobs of other tenants, on a page for one of them."""
    (page,) = answers(worked, "/quarantine?since=1h&error=&type=fs.blob_get").values()
    acts = [one for one in Shown(page).actions if "the group" in (one["data-act"] or "")]
    assert [one["data-verb"] for one in acts][:2] == ["Requeue", "Discard"]
    for one in acts:
        body = json.loads(one["data-body"] or "")
        assert body == {"since": "1h", "type": "fs.blob_get", "fingerprint": (one["data-act"] or "").split()[-1]}
        given = dict(zip(*[iter(shlex.split(one["data-cli"] or "")[3:])] * 2, strict=True))
        assert given == {f"--{name}": text for name, text in body.items()}


def test_counts_of_filtered_work_are_of_all_jobs_and_without_a_system_no_chart_has_a_value_of_now(worked: Path) -> None:
    shown = answers(worked, "/work?sort=oldest", "/work?state=pending", "/")
    everything, filtered, page = (one.text for one in shown.values())
    assert "<h2>Jobs</h2><p>3 pending" in everything
    assert "<h2>Jobs</h2><p>all jobs: 3 pending" in filtered
    for name in ("queued", "waits for", "in quarantine", "level, 0 healthy to 3 critical"):
        assert f"{name} <b>no system runs</b>" in page
    assert page.count(': nothing recorded yet"') == 5, "those four, and the share that recovered"


def test_a_rule_is_resolved_where_it_can_be(path: Path) -> None:
    (answered,) = answers(path, "/alerts").values()
    assert "below 0" not in answered.text.replace("below 0.9", "")
    assert answered.text.count(">at 0<") == 4, "critical_workers, audit_outage, no_router, no_worker"
    assert ">above 300 s<" in answered.text
    assert 'data-go="l"' in answered.text


def test_policies_name_a_place_once_and_without_its_folder(tmp_path: Path) -> None:
    config = "worker: {retries: {v2: {enabled: true, default_policy: {max_attempts: 7, base_delay_ms: 50}}}}\n"
    for answered in answers(tmp_path / "state.db", "/policies", "/policies?target=block:http", config=config).values():
        shown = re.sub(r' title="[^"]*"', "", answered.text)
        assert "reefknot.yaml:1" in shown
        assert f"{tmp_path}/reefknot.yaml" not in shown
        assert "built-in: " not in shown


def test_the_fields_of_a_policy_read_as_on_the_command_line(tmp_path: Path) -> None:
    config = "worker: {retries: {v2: {enabled: true, default_policy: {base_delay_ms: 90000, max_delay_ms: 1800000}}}}\n"
    one, every = answers(tmp_path / "state.db", "/policies?target=block:http", "/policies", config=config).values()
    assert all(f"<b>{text}</b>" in one.text for text in ("90 s", "1800 s", "4 attempts (1 + 3 retries)"))
    assert all(f">{text}</td>" in every.text for text in ("90 s", "1800 s"))


def test_verify_says_how_far_heads_prove_the_log() -> None:
    none = {"heads_missing": None, "compared_with": None}
    assert "accidents and not intent" in " ".join(views.proof(none))
    one = {"chain": "c", "sequence": 972, "proven_up_to": 165, "mismatches_total": 0}
    text = " ".join(views.proof({**one, "heads_missing": None, "compared_with": "heads.jsonl"}))
    assert "heads.jsonl" in text
    assert "event 165 of 972" in text
    assert "Events 166 to 972" in text
    bare = {**one, "chain": "d", "proven_up_to": None}
    text = " ".join(views.proof({"heads_missing": None, "compared_with": "heads.jsonl", "chains": [one, bare]}))
    assert "of chain c: nothing up to event 165" in text
    assert "No head was kept of chain d" in text


@for_each_row(
    ("line", "words"),
    [
        ("reefknot top", ["reefknot", "top"]),
        (
            """job show 'a b' --because 'it'"'"'s late' x""",
            ["job", "show", "'a b'", "--because", """'it'"'"'s late'""", "x"],
        ),
        (r"""--because 'it'\''s late'""", ["--because", r"""'it'\''s late'"""]),
        ("odd  'line", ["odd  'line"]),
    ],
)
def test_a_command_is_broken_between_its_words_alone(line: str, words: list[str]) -> None:
    assert words_of(line) == words


def test_a_cursor_is_shown_for_people() -> None:
    table = {
        None: "",
        "2026-11-01T00:00:00Z": "2026-11-01T00:00:00Z",
        '{"uid": 41, "folders": {"a": 1, "b": 2}}': "uid 41, folders (2 entries)",
        "[1, 2]": "[1, 2]",
        '{"cut': '{"cut',
    }
    assert {given: cursor_words(given) for given in table} == table
    assert places(["/a/b.yaml:6:24", "/a/b.yaml:8:60", "built-in: worker default"]) == "b.yaml:6, 8; worker default"


def test_an_active_alert_has_its_value_of_now() -> None:
    raised = AlertsRecord(active={"quarantine_growth": RecordedAlert("quarantine_growth", 15.0, 10.0, 0, "jobs: 15")})
    (shown,) = active_alerts(raised, [], {"quarantine_growth": 29.0})["alerts"]
    assert (shown["value"], shown["now"]) == (15.0, 29.0)
    assert "<b>now 29</b>" in str(pages.environment().globals["part"].alert(shown))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.real_time
async def test_pages_of_fifty_thousand_events_answer_soon(tmp_path: Path) -> None:
    """A tenth of a second on an idle machine; the limit is one that a busy machine keeps."""
    path = await filled(tmp_path, items=5_000, events=50_000)
    filters = ("/work?error=rare", "/work?tenant=tenant-rare", "/quarantine?reason=spent", "/audit?text=rare")
    targets = (*TARGETS, *filters, "/work/job-500", "/quarantine/job-9")
    async with opened_site(path) as site:
        app = server.build_app(site)
        for target in targets:
            began = time.monotonic()
            answered = await ask(app, "GET", target, [bearer()])
            assert answered.status in (200, 404), (target, answered.text[:300])
            assert time.monotonic() - began < 5, target


def test_the_page_of_a_job_shows_its_parent_its_children_and_what_it_waits_for(path: Path) -> None:
    family(path)
    targets = ("/work/site", "/work/site%3A2", "/work/second", "/work/site%3A2%3A1", "/api/v1/jobs/site")
    top, gathered, second, child, by_api = answers(path, *targets).values()
    assert top.status == 200, top.text[:300]
    assert re.search(r'id="children".*1 pending, 1 succeeded.*site:1.*site:2', top.text.replace("%3A", ":"), re.DOTALL)
    cancels = [one for one in Shown(top).actions if "--tree" in (one["data-cli"] or "")]
    assert [one["data-url"] for one in cancels] == ["/api/v1/jobs/cancel"]
    assert json.loads(cancels[0]["data-body"] or "{}") == {"ids": ["site"], "tree": True}
    assert re.search(r'id="parent".*site', gathered.text, re.DOTALL)
    assert re.search(r'id="after".*first.*pending', second.text, re.DOTALL)
    assert "it waits for another job, first" in second.text
    assert 'id="children"' not in child.text
    assert json.loads(by_api.text)["children_by_state"] == {"succeeded": 1, "pending": 1}
