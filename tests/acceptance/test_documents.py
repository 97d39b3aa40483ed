"""Documents from outside: searched by fields, and followed by a consumer in another process, while others write."""

import asyncio
import json
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from reefknot.console.dashboard.server import build_app
from reefknot.ingest.connectors import text_extraction
from reefknot.policy.settings import load_settings
from tests.acceptance.folder import PRODUCT, ROOT, Folder, until
from tests.security.site_client import READER, Answered, ask, bearer, opened_site

NOTE = "---\ntags: [boat]\naliases: [Nodus]\ntitle: 2026\n---\nA reef knot joins two ends.\n"


@pytest.fixture
def notes(folder: Folder) -> Folder:
    (folder.path / "notes").mkdir()
    (folder.path / "notes" / "knot.md").write_text(NOTE)
    (folder.path / "notes" / "bend.md").write_text("A sheet bend joins two ropes.\n")
    assert folder("source", "add", "notes", "--connector", "obsidian_vault", "--path", "notes").code == 0
    assert folder("source", "run", "notes").code == 0
    return folder


def found(folder: Folder, *words: str) -> set[str]:
    done = folder("source", "search", *words, "--json")
    assert done.code in (0, 1), done.err
    return {hit["location"] for hit in done.json["hits"]}


def test_a_search_by_fields(notes: Folder) -> None:
    assert found(notes, "joins") == {"knot.md", "bend.md"}
    assert found(notes, "joins", "tag:boat") == {"knot.md"} == found(notes, "title:2026") == found(notes, "nodus")
    assert found(notes, "file:bend", "source:notes", "after:2020") == {"bend.md"}
    assert found(notes, "joins", "before:2020") == set()
    wrong = notes("source", "search", "tga:boat")
    assert (wrong.code, "did you mean 'tag'?" in wrong.err, "before, after" in wrong.err) == (2, True, True)
    unknown = notes("source", "search", "joins", "source:nots")
    assert (unknown.code, "did you mean 'notes'?" in unknown.err) == (2, True)


def test_a_source_is_tested_with_a_note_on_the_texts_read(notes: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_extraction, "PACKAGES", ("no_such_package",))
    assert "pip install '.[text]' in a checkout" in notes("source", "test", "notes").out


def changes(folder: Folder, *words: str) -> list[dict[str, Any]]:
    done = folder("source", "changes", "--json", *words)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_moves_updates_deletions_and_forgotten_sources_are_changes(notes: Folder) -> None:
    first = changes(notes)
    assert [(one["change"], one["location"]) for one in first] == [("kept", "bend.md"), ("kept", "knot.md")]
    assert first[1]["text"] == "A reef knot joins two ends.\n"
    after = first[-1]["cursor"]
    assert changes(notes, "--after", after) == []

    (notes.path / "notes" / "knot.md").rename(notes.path / "notes" / "moved.md")
    (notes.path / "notes" / "bend.md").unlink()
    assert notes("source", "run", "notes").code == 0
    second = changes(notes, "--after", after)
    assert [(one["change"], one["location"]) for one in second] == [("kept", "moved.md"), ("deleted", "bend.md")]
    assert [one["id"] for one in second] == [first[1]["id"], first[0]["id"]]
    assert notes("source", "run", "notes", "--full").code == 0
    assert changes(notes, "--after", second[-1]["cursor"]) == [], "nothing has changed, although all was read again"

    config = notes.path / "reefknot.yaml"
    config.write_text(config.read_text().partition("sources:")[0])
    assert notes("source", "forget", "notes", "--because", "gone").code == 0
    third = changes(notes, "--after", second[-1]["cursor"])
    assert [(one["change"], one["id"]) for one in third] == [("deleted", first[1]["id"])]

    lost = notes("source", "changes", "--after", "1")
    assert (lost.code, "start over" in lost.err) == (1, True)


WRITER = """
import asyncio, sys
from reefknot.runtime.clocks import SystemClock
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import Document

async def main(name):
    documents = await SqliteDocuments(".reefknot/documents.db", SystemClock(), patience=60).start()
    for turn in range(15):
        kept = [Document(f"{name}{n}", f"{name}/{n}.md", "1", text=f"{turn}") for n in range(turn % 7, 15)]
        await documents.put("notes", kept, deleted=[f"{name}{n}" for n in range(turn % 5)])
    await documents.close()

asyncio.run(main(sys.argv[1]))
"""


BACKWARDS = """
import sys
from reefknot.ingest import document_rows
document_rows._CHANGES = document_rows._CHANGES.replace("ORDER BY sequence LIMIT", "ORDER BY sequence DESC LIMIT")
from reefknot.console.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("program", [PRODUCT, ("-c", BACKWARDS)], ids=["follows", "control"])
def test_a_follower_gets_all_changes_of_several_processes_in_order(notes: Folder, program: tuple[str, ...]) -> None:
    """The control: a feed that begins with the newest change."""
    follower = notes.start("source", "changes", "--follow", "--json", program=program)
    with nullcontext() if program == PRODUCT else pytest.raises(AssertionError):  # lines are missing, or out of order
        follow(notes, follower)


def follow(notes: Folder, follower: subprocess.Popen[str]) -> None:
    """Two processes write, and the follower's lines are a mirror of what they leave."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name], cwd=notes.path, env={"PYTHONPATH": str(ROOT / "src")})
        for name in "ab"
    ]
    assert [one.wait(120) for one in writers] == [0, 0]
    last = changes(notes, "--no-text")[-1]["sequence"]
    mirror: dict[str, str] = {}
    sequence = 0
    assert follower.stdout is not None
    while sequence < last:
        change = json.loads(follower.stdout.readline())
        assert change["sequence"] > sequence, "out of order"
        sequence = change["sequence"]
        if change["change"] == "deleted":
            mirror.pop(change["id"], None)
        else:
            mirror[change["id"]] = change["text"]
    notes.stop(follower)
    exported = [json.loads(line) for line in notes("source", "export", "notes").out.splitlines()]
    assert mirror == {one["id"]: one["text"] for one in exported}


def answers(folder: Folder, *targets: str) -> list[Answered]:
    async def main() -> list[Answered]:
        settings = load_settings(environ={}, cwd=folder.path)
        async with opened_site(folder.path / ".reefknot" / "state.db", settings) as site:
            app = build_app(site)
            return [await ask(app, "GET", target, [bearer(READER)]) for target in targets]

    return asyncio.run(main())


def test_searches_and_changes_over_the_http_api_and_on_the_page(notes: Folder) -> None:
    api = "/api/v1/documents"
    searches = [f"{api}/search?words={words}" for words in ("joins%20tag:boat", "tga:boat", "a*+" * 300)]
    feeds = [f"{api}/changes?limit=1", f"{api}/changes?after=1"]
    pages = ["/documents?words=tag:boat", "/documents?words=tga:boat"]
    hits, wrong, many, feed, lost, page, bad = answers(notes, *searches, *feeds, *pages)
    assert [hit["location"] for hit in hits.json["hits"]] == ["knot.md"]
    assert (wrong.status, "did you mean 'tag'?" in wrong.text) == (400, True)
    assert (many.status, "at most 32" in many.text) == (400, True)
    assert (lost.status, lost.json["error"]["kind"], "start over" in lost.text) == (409, "conflict", True)
    assert (page.status, "knot.md" in page.text) == (200, True)
    assert (bad.status, "did you mean" in bad.text) == (400, True)
    (first,) = feed.json["changes"]
    later = (f"{feed.json['next']}&text=false", first["sequence"])
    rest, end = answers(notes, *(f"{api}/changes?after={after}" for after in later))
    assert [(one["change"], one["location"], one["text"]) for one in rest.json["changes"]] == [("kept", "knot.md", "")]
    assert [one["location"] for one in end.json["changes"]] == ["knot.md"]


def test_a_system_that_syncs_is_followed(notes: Folder) -> None:
    """What `reefknot up` keeps arrives at a consumer that waits for it."""
    config = notes.path / "reefknot.yaml"
    connector = "connector: obsidian_vault"
    config.write_text(config.read_text().replace(connector, f"{connector}\n    every: 1s"))
    follower = notes.start("source", "changes", "--follow", "--json")
    up = notes.up()
    (notes.path / "notes" / "new.md").write_text("new\n")
    seen: list[str] = []

    def is_there() -> bool:
        assert follower.stdout is not None
        seen.append(json.loads(follower.stdout.readline())["location"])
        return "new.md" in seen

    until(is_there)
    for process in (follower, up):
        notes.stop(process)
