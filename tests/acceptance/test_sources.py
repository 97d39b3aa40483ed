"""Sources on the command line: added to a file that stays as it was, tested, synced, paused, searched, exported."""

import asyncio
import json
import os
import signal
import stat
from getpass import getuser
from typing import Any

import pytest

from reefknot.console.operations.operator import Operator
from reefknot.console.operations.sources import run_source
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import load_settings
from reefknot.stores.opening import open_store, options_of
from tests.acceptance.folder import Folder, until
from tests.unit.console.cli.running import Ended

WIKI = '''\
import asyncio
import json
import os
from reefknot.ingest.connectors.registry import connector
from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, SourceError
from reefknot.ingest.port import Document, ItemFailure, Page

FAILURES = {
    "denied": SourceError("the token is not accepted; make a new one and set it", FailureType.PERMANENT),
    "shut": SourceError("this user may not read the wiki", FailureType.PERMANENT, forbidden=True),
    "odd": LookupError("no such space"),
    "slow": None,
    "down": SourceError("connection refused", FailureType.TRANSIENT),
    "limited": SourceError("too many requests", FailureType.RATE_LIMITED, retry_after=600),
}

@connector("team_wiki")
class Wiki:
    """Pages are the entries of pages.json: text by name. The file `how` says what goes wrong."""

    def __init__(self, context):
        unknown = set(context.settings) - {"space", "token", "tags"}
        if unknown:
            raise ParameterError(min(unknown), "***", "space, token or tags")
        self.context = context

    def pages(self):
        if os.path.exists("how"):
            with open("how") as file:
                how = file.read().strip()
            if FAILURES.get(how):
                raise FAILURES[how]
        with open("pages.json") as file:
            return json.load(file)

    async def fetch(self, request):
        while os.path.exists("slow"):
            open("begun", "w").close()
            await asyncio.sleep(0.05)
        pages = self.pages()
        kept = {one.location: one for one in await request.known.after("", 1000)}
        documents = [
            Document(name, name, text, title=f"Page {name}", text=text, problem="cut" if "cut" in text else "")
            for name, text in pages.items()
            if text != "odd" and (name not in kept or kept[name].version != text)
        ]
        odd = [ItemFailure(name, "1", ValueError("odd")) for name, text in pages.items() if text == "odd"]
        gone = tuple(one.id for one in kept.values() if one.location not in pages)
        return Page("c", tuple(documents), gone, tuple(odd), seen=len(pages))

    async def fetch_item(self, location, known):
        raise SourceError(f"{location} is odd; mend it", FailureType.PERMANENT)

    async def test(self):
        token = self.context.secret(self.context.settings["token"])
        return f"{len(self.pages())} pages, token {token}"
'''
TOKEN = "tok-4711-hush-hush"


class WikiFolder(Folder):
    """A folder with a wiki of one's own as a source."""

    def wiki(self, **pages: str) -> None:
        self.write("pages.json", json.dumps(pages))

    def goes(self, how: str) -> None:
        self.write("how", how)

    def sync(self, *words: str) -> Ended:
        return self("source", "run", "wiki", "--module", "wiki", *words)

    def row(self) -> dict[str, Any]:
        """The only source of the list."""
        (found,) = self.json("source", "list")["sources"]
        return dict(found)

    def test(self, *words: str) -> Ended:
        return self("source", "test", "--module", "wiki", *words)


@pytest.fixture
def wiki(folder: Folder) -> WikiFolder:
    """A configured wiki that has not been synced yet."""
    made = folder
    made.__class__ = WikiFolder
    assert isinstance(made, WikiFolder)
    made.write("wiki.py", WIKI)
    made.set_variable("WIKI_TOKEN", TOKEN)
    made.wiki(a="reef knot", b="sheet bend")
    words = ("--connector", "team_wiki", "--set", "space=knots", "--set", "token=env:WIKI_TOKEN", "--module", "wiki")
    assert made("source", "add", "wiki", *words).code == 0
    return made


@pytest.fixture
def synced(wiki: WikiFolder) -> WikiFolder:
    assert wiki.sync().code == 0
    return wiki


CODE = ("--connector", "github_repository")


def test_a_source_is_added_and_everything_else_of_the_file_stays_byte_for_byte(folder: Folder) -> None:
    before = (
        "# ours\nworker:   {quarantine_failed: true}\n\nsources:  # where knowledge is\n    # the first\n"
        "    notes: {connector: github_repository, repository: a/b}\n# the end\n"
    )
    folder.config.write_text(before)
    folder.config.chmod(0o640)
    words = ("--set", "repository=c/d", "--set", "include=['*.md', 'on']", "--cron", "0 7 * * 1-5")
    added = folder("source", "add", "code", "--connector", "github_repository", *words, "--time-zone", "Europe/Berlin")
    assert added.code == 0, added.err
    text = folder.config.read_text()
    start, end = text.index("    code:\n"), text.index("    # the first")
    assert text[:start] + text[end:] == before
    assert text[start:end].splitlines()[1:] == [
        "      connector: github_repository",
        "      repository: c/d",
        '      include: ["*.md", "on"]',
        '      cron: "0 7 * * 1-5"',
        "      time_zone: Europe/Berlin",
    ]
    assert stat.S_IMODE(folder.config.stat().st_mode) == 0o640
    assert folder("config", "check").code == 0


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_every_format_can_be_added_to(folder: Folder, suffix: str) -> None:
    folder.config.unlink()
    start = {"toml": 'engine = "sqlite:s.db" # ours\n', "json": '{\n   "engine": "sqlite:s.db"\n}\n'}.get(suffix, "")
    file = folder.path / f"reefknot.{suffix}"
    if start:
        file.write_text(start)
    for name in ("one", "two"):
        done = folder("source", "add", name, *CODE, "--set", "repository=a/b")
        assert done.code == 0, done.err
    assert file.read_text().startswith(start.removesuffix("\n}\n"))
    listed = folder.json("source", "list")["sources"]
    assert {(one["name"], one["state"]) for one in listed} == {("one", "never synced"), ("two", "never synced")}


REPOSITORY = ("--set", "repository=a/b")


def test_a_mistake_says_what_is_accepted_and_leaves_the_file_alone(folder: Folder) -> None:
    folder.config.write_text("sources:\n  code: {connector: github_repository, repository: a/b}\n")
    before = folder.config.read_bytes()
    for words, told in (
        (("code", *CODE, *REPOSITORY), "already"),
        (("x", *CODE, "--set", "repositry=a/b"), "--set repositry: sources.x.repositry:"),
        (("x", "--connector", "github_repositry", *REPOSITORY), "did you mean 'github_repository'"),
        (("x", "--connector", "unheard_of", "--set", "a=b"), "--module"),
        (("x", *CODE, *REPOSITORY, "--every", "5 minutes"), "15m"),
        (("x", *CODE, *REPOSITORY, "--cron", "often"), "five fields"),
        (("x", *CODE, "--set", f"token={TOKEN}", *REPOSITORY), "env:"),
        (("x", *CODE, "--set", "repository"), "KEY=VALUE"),
        (("x", *CODE, "--set", "repository=[a"), "--set repository"),
        (("../x", *CODE), "letters, digits"),
    ):
        done = folder("source", "add", *words)
        assert (done.code in (1, 2, 78), told in done.err) == (True, True), done.err
        assert TOKEN not in done.err + done.out
        assert folder.config.read_bytes() == before
        assert sorted(os.listdir(folder.path)) == ["files", "naps.py", "reefknot.yaml"]


def test_the_advice_after_an_addition_works_as_it_is_written(wiki: WikiFolder) -> None:
    done = wiki("source", "add", "w", "--connector", "team_wiki", "--module", "wiki", "--every", "1h")
    assert "Next: reefknot source test w --module wiki, then reefknot source run w --module wiki." in done.err
    assert "`reefknot up --module wiki`" in done.err
    done = wiki("source", "add", "v", "--connector", "team_wiki", "--module", "wiki", "--time-zone", "UTC")
    assert (done.code, "--time-zone: accepted with --cron" in done.err) == (2, True)


def test_a_file_that_cannot_be_extended_is_left_alone_as_it_is_by_a_dry_run(folder: Folder) -> None:
    add = ("source", "add", "x", *CODE, "--set", "repository=c/d")
    done = folder(*add, "--dry-run")
    assert (done.code, done.out) == (0, "x:\n  connector: github_repository\n  repository: c/d\n")
    assert "sources" not in folder.config.read_text()
    folder.config.write_text("sources: {code: {connector: github_repository, repository: a/b}}\n")
    done = folder(*add)
    assert (done.code, "by hand: x: {connector: github_repository, repository: c/d}" in done.err) == (78, True)
    assert TOKEN not in folder(*add, "--set", f"token={TOKEN}").err
    folder.config.unlink()
    file = folder.write("reefknot.toml", '[sources.code]\nconnector = "github_repository"\nrepositry = "a/b"\n')
    before = file.read_bytes()
    done = folder(*add)
    assert (done.code, "sources.code.repositry" in done.err) == (78, True)
    assert "reefknot.toml is as it was" in done.err
    assert file.read_bytes() == before


def test_a_check_of_the_configuration_finds_settings_that_a_connector_does_not_accept(folder: Folder) -> None:
    code = "sources:\n  code:\n    connector: github_repository\n"
    wiki = "  wiki: {connector: team_wiki_elsewhere}\n"
    common = "connector, on_change, max_concurrency, page_size, timeout_seconds, retry"
    every = f"(every, cron, time_zone, missed, {common}); did you mean 'every'?"
    for text, code_, *said in (
        (f"{code}    repositry: a/b\n    every: 0s\n{wiki}", 78, "reefknot.yaml:5:5: sources.code.every"),
        (f"{code}    repositry: a/b\n", 78, "reefknot.yaml:4:5: sources.code.repositry"),
        (f"{code}    repository: a/b\n    evry: 5m\n", 78, "yaml:5:5: sources.code.evry: ", "repository, token", every),
        ("sources: {code: {connector: github_repository}}\n", 78, "reefknot.yaml:1:11: sources.code.repository"),
        (f"sources:\n{wiki}", 0, "warning: reefknot.yaml:2", "--module"),
    ):
        folder.config.write_text(text)
        done = folder("config", "check")
        assert done.code == code_
        assert all(one in done.err for one in said), done.err


def test_a_sync_keeps_what_is_new_and_tells_what_it_did(wiki: WikiFolder) -> None:
    first = wiki.sync()
    assert first.code == 0, first.err
    assert first.out.startswith("wiki: 2 new or changed, 0 deleted, 0 unchanged, 0 failed; 2 documents in all")
    wiki.wiki(a="reef knot", c="bowline, cut short")
    counts = {"kept": 1, "deleted": 1, "unchanged": 1, "failed": 0, "documents": 2}
    assert wiki.sync("--json").json.items() >= (counts | {"state": "done"}).items()
    row = wiki.row()
    assert (row["state"], row["documents"], row["problems"], row["schedule"]) == ("healthy", 2, 1, "by hand")
    assert row["to_do"] == ["1 document could be read only in part: reefknot source show wiki"]
    shown = wiki.json("source", "show", "wiki")
    assert shown["settings"] == {"space": "knots", "token": "env:WIKI_TOKEN"}
    assert shown["problem_documents"] == [{"id": "c", "location": "c", "problem": "cut"}]
    assert "could be read only in part: reefknot source show wiki" in wiki("source", "list").out
    text = wiki("source", "show", "wiki").out
    assert "1 document could be read only in part\n" in text
    assert "Page c" not in text
    assert "source show" not in text, "the view does not advise itself"


def test_a_sync_that_only_a_person_can_help_exits_with_1_and_says_what_to_do(wiki: WikiFolder) -> None:
    wiki.goes("denied")
    done = wiki.sync()
    assert done.code == 1
    assert "the token is not accepted; make a new one and set it" in done.out
    assert "reefknot source run wiki --module wiki" in done.err
    row = wiki.row()
    assert (row["state"], row["quarantined"]) == ("needs attention", 1)
    assert "make a new one and set it; then: reefknot source run wiki" in row["to_do"][0]

    (item,) = wiki.json("quarantine", "list")["items"]
    assert "quarantine_failed" not in wiki("quarantine", "list").err
    wiki.write("p.json", '{"a": 1}')
    done = wiki("quarantine", "requeue", item["id"], "--payload", "p.json")
    assert (done.code, "then: reefknot source run wiki" in done.err) == (2, True), "a sync has no payload to edit"
    assert [one["id"] for one in wiki.json("quarantine", "list")["items"]] == [item["id"]]
    wiki.goes("well")
    assert wiki.sync().code == 0
    assert wiki.row()["state"] == "healthy"


def test_a_source_that_waits_for_a_person_shows_no_next_sync_until_it_was_run_again(folder: Folder) -> None:
    folder.config.write_text("sources: {notes: {connector: local_files, path: notes, every: 1h}}\n")
    for code in (1, 0):
        assert folder("source", "run", "notes").code == code
        (row,) = folder.json("source", "list")["sources"]
        assert (row["next_due"] is None) is (code == 1), "at first the folder does not exist"
        (folder.path / "notes").mkdir(exist_ok=True)


def test_an_interrupted_sync_exits_with_130_and_goes_on_at_the_next_run(wiki: WikiFolder) -> None:
    (wiki.path / "slow").touch()
    process = wiki.start("source", "run", "wiki", "--module", "wiki")
    until(lambda: (wiki.path / "begun").exists())
    process.send_signal(signal.SIGINT)
    (wiki.path / "slow").unlink()  # the page that is under way ends, and the exit code says 130 all the same
    code, _, err = wiki.ends(process)
    again = "reefknot source run wiki --module wiki"
    assert code == 130
    assert err == f"wiki: interrupted; the sync goes on at the next `{again}`, or by `reefknot up`\n"
    assert wiki.sync().code == 0


def test_a_source_that_does_not_answer_is_retried_later_and_one_that_limits_its_rate_cools(wiki: WikiFolder) -> None:
    wiki.goes("down")
    done = wiki.sync("--json")
    assert (done.code, done.json["state"], done.json["reason"]) == (75, "retry", "connection refused")
    assert done.json["next_try"] > "2020"
    assert wiki.row()["state"] == "retrying", "a source that never answered is not healthy"
    wiki.goes("well")
    assert wiki.sync().code == 0, "a person does not wait for the retry"
    wiki.goes("limited")
    assert wiki.sync().code == 75
    row = wiki.row()
    assert (row["state"], "too many requests" in row["to_do"][0]) == ("cooling", True)
    wiki.goes("well")
    done = wiki.sync()
    assert (done.code, "not done yet" in done.out) == (75, True), "not even a person gets in before"


def test_an_item_that_cannot_be_read_does_not_hold_the_others(wiki: WikiFolder) -> None:
    wiki.wiki(a="reef knot", b="odd")
    done = wiki.sync("--json")
    assert (done.code, done.json["kept"], done.json["failed"]) == (0, 1, 1)
    row = wiki.row()
    assert (row["state"], row["quarantined"]) == ("needs attention", 1)
    assert row["to_do"] == ["1 item could not be read: reefknot quarantine list --source wiki"]
    (item,) = wiki.json("quarantine", "list", "--source", "wiki")["items"]
    assert "b is odd; mend it" in item["reason"]
    done = wiki.sync("--full")
    assert "1 item in quarantine, for you to decide: reefknot quarantine list --source wiki" in done.err
    assert "retried" not in done.err


def test_a_paused_source_is_not_synced_and_the_pause_is_audited(synced: WikiFolder) -> None:
    pause = ("source", "pause", "wiki", "--because", "it moves", "--as", "ada")
    assert synced(*pause, "--dry-run").code == 0
    assert synced.row()["state"] == "healthy"
    assert synced(*pause).out == "wiki is paused\n"
    assert synced("source", "pause", "wiki").out == "wiki was already paused\n"
    row = synced.row()
    assert (row["state"], row["next_due"]) == ("paused", None)
    assert row["to_do"][0] == "paused by ada because it moves: reefknot source resume wiki"
    done = synced.sync()
    assert (done.code, "paused by ada because it moves" in done.err) == (75, True)
    assert synced("source", "resume", "wiki").code == synced.sync().code == 0
    told = [(one["action"], one["actor"]) for one in synced.events("operator_action") if one["action"] != "source.run"]
    assert told == [("source.pause", "ada"), ("source.resume", getuser())]


def test_a_test_tells_in_one_line_and_by_its_exit_code(wiki: WikiFolder) -> None:
    for how, code in {"well": 0, "denied": 78, "down": 69, "limited": 75, "shut": 77, "odd": 1}.items():
        wiki.goes(how)
        done = wiki.test()
        assert done.code == code, how
        assert done.out.startswith("wiki: OK: 2 pages" if how == "well" else "wiki: FAILED: ")
        assert TOKEN not in done.out
    wiki._commands.environment.delenv("WIKI_TOKEN")
    wiki.goes("well")
    done = wiki.test("wiki")
    assert (done.code, "there is no such environment variable (env:WIKI_TOKEN)" in done.out) == (78, True)


def test_an_error_inside_a_connector_of_ones_own_is_told_with_its_line(wiki: WikiFolder) -> None:
    wiki.goes("odd")
    said = wiki.test().out
    assert "the connector team_wiki failed in " in said
    assert "wiki.py:" in said
    assert "LookupError: no such space" in said
    text = WIKI.replace("self.context = context", "self.context = context\n        context.settings['home']")
    (wiki.path / "wiki.py").unlink()
    wiki.write("new_wiki.py", text.replace("team_wiki", "new_wiki"))
    before = wiki.config.read_bytes()
    done = wiki("source", "add", "w", "--connector", "new_wiki", "--module", "new_wiki")
    assert done.code == 78
    assert "the connector new_wiki failed in " in done.err
    assert "new_wiki.py:27: KeyError: 'home'" in done.err
    assert wiki.config.read_bytes() == before
    wiki.config.write_text("sources:\n  w: {connector: new_wiki}\n")
    done = wiki("source", "test", "--module", "new_wiki")
    assert (done.code, "new_wiki.py:27: KeyError: 'home'" in done.out) == (78, True)


def test_before_the_first_sync_nothing_is_found_and_an_unknown_source_is_refused(wiki: WikiFolder) -> None:
    for words in (("search", "knot"), ("export",)):
        done = wiki("source", *words)
        assert (done.code, "`source run NAME` syncs a source" in done.err) == (69, True)
    for verb in ("run", "test", "pause", "show"):
        done = wiki("source", verb, "wikki")
        assert (done.code, "accepted: wiki" in done.err) == (2, True), done.err
    assert not (wiki.path / ".reefknot").exists()


def test_a_source_without_documents_is_told_from_one_that_nobody_knows(wiki: WikiFolder) -> None:
    words = ("--connector", "team_wiki", "--module", "wiki")
    assert wiki("source", "add", "other", *words).code == 0
    for state in ("no file", "a file"):
        for command in (("search", "knot", "--source", "other"), ("export", "other")):
            done = wiki("source", *command)
            told = "reefknot: other has no documents yet: reefknot source run other\n"
            assert (done.code, done.err) == (1, told), state
        assert wiki.sync().code == 0
    for command in (("search", "knot", "--source", "othr"), ("export", "othr")):
        done = wiki("source", *command)
        assert (done.code, "accepted: other, wiki; did you mean 'other'?" in done.err) == (2, True)


def test_documents_are_found_by_their_words(wiki: WikiFolder) -> None:
    wiki.wiki(a="Der Palstek \x1b[31m und\nder Kreuzknoten", b="Kreuzknoten allein")
    assert wiki.sync().code == 0
    found = wiki("source", "search", "kreuz*", "palstek")
    assert (found.code, found.out.splitlines()[0]) == (0, "Page a  [wiki] a")
    assert "⟦Palstek⟧" in found.out
    assert "\x1b" not in found.out
    assert [hit["id"] for hit in wiki.json("source", "search", "kreuzknoten")["hits"]] == ["b", "a"]
    nothing = wiki("source", "search", "NEAR(", "--source", "wiki")
    assert (nothing.code, "nothing is found in wiki" in nothing.err) == (1, True)
    for words in (('"(*',), ("a", "--source", "other"), ("a", "--limit", "0")):
        assert wiki("source", "search", *words).code == 2


def test_an_export_has_a_line_for_every_document_and_appears_when_it_is_complete(synced: WikiFolder) -> None:
    lines = [json.loads(line) for line in synced("source", "export").out.splitlines()]
    assert [(one["source"], one["id"], one["title"], one["text"]) for one in lines] == [
        ("wiki", "a", "Page a", "reef knot"),
        ("wiki", "b", "Page b", "sheet bend"),
    ]
    out = synced.write("out.jsonl", "earlier")
    assert synced("source", "export", "other", "--output", "out.jsonl").code == 2
    assert out.read_text() == "earlier"
    assert synced("source", "export", "wiki", "--output", "out.jsonl").code == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    assert synced("source", "export", "--output", ".reefknot/documents.db").code != 0, "a database is not replaced"
    assert synced("source", "export", "--output", "nowhere/out.jsonl").code == 2


def test_what_is_kept_of_a_source_that_is_gone_is_listed_and_removed_with_the_reason(synced: WikiFolder) -> None:
    forget = ("source", "forget", "wiki", "--because", "moved")
    assert synced(*forget).code == 2, "it is configured"
    synced.config.write_text("")
    row = synced.row()
    assert (row["name"], row["state"], row["documents"]) == ("wiki", "not configured", 2)
    assert "reefknot source forget wiki" in synced("source", "list").out
    assert synced("source", "forget", "wiki").code == 2
    done = synced(*forget, "--dry-run")
    assert (done.code, done.out) == (0, "wiki would be forgotten, with 2 documents\n")
    assert len(synced("source", "export").out.splitlines()) == 2
    done = synced(*forget, "--as", "ada")
    assert (done.code, done.out) == (0, "wiki is forgotten, with 2 documents\n")
    assert synced.json("source", "list")["sources"] == []
    assert synced("source", "export").out == ""
    assert synced.events("operator_action")[-1]["details"] == {"reason": "moved", "documents": 2, "jobs": 0}


def test_documents_are_kept_where_the_configuration_says_and_in_no_folder_for_steps(wiki: WikiFolder) -> None:
    configured = wiki.config.read_text()
    wiki.config.write_text("ingestion: {documents: kept/here.db}\n" + configured)
    assert wiki.sync().code == 0
    assert (wiki.path / "kept" / "here.db").exists()
    assert wiki("source", "search", "knot").code == 0
    wiki.config.write_text("ingestion: {documents: files/documents.db}\n" + configured)
    done = wiki("config", "check")
    assert (done.code, "the documents of sources" in done.err) == (78, True)


def asked(wiki: WikiFolder, **given: Any) -> dict[str, Any]:
    """The answer to a request for a sync, in a process that runs no connector."""

    async def ask() -> dict[str, Any]:
        settings = load_settings(str(wiki.config), environ=os.environ, cwd=wiki.path)
        async with open_store(wiki.engine, **options_of(settings), tidy=False) as store:
            return await run_source(Operator(store, Redactor(()), "ann", settings, wiki.engine), "wiki", **given)

    return asyncio.run(ask())


def test_a_sync_that_is_asked_for_waits_for_a_system_that_runs_it_once(synced: WikiFolder) -> None:
    synced.wiki(a="reef knot", b="sheet bend", c="bowline")
    waiting = asked(synced)
    assert (waiting["running_system"], waiting["existing"]) == (False, False)
    assert "no system runs over this store" in waiting["note"]

    (synced.path / "slow").touch()
    synced.up("--module", "wiki")
    until(lambda: (synced.path / "begun").exists())
    until(lambda: bool(asked(synced)["running_system"]))  # a system reports every second
    again = asked(synced, full=True)
    assert (again["job"], again["existing"], again["full"]) == (waiting["job"], True, False)
    note = "a sync of it is under way; ask for a full one when that has ended"
    assert (again["running_system"], again["note"]) == (True, note)
    (synced.path / "slow").unlink()
    until(lambda: synced.state(waiting["job"]) == "succeeded")
    found = synced.row()
    assert (found["documents"], found["cursor"], found["sync_job"]) == (3, "c", waiting["job"])
    told = [(one["action"], one["actor"]) for one in synced.events("operator_action")]
    assert told == [("source.run", getuser()), ("source.run", "ann")]
