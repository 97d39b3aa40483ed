"""Sources whose documents, connector or place in the configuration change, and a `source run` that was killed."""

import time
from typing import Any

import pytest

from tests.acceptance.folder import Folder, until

GREETING = """\
import reefknot as rk

@rk.connector("greeting")
class Greeting:
    def __init__(self, context):
        pass

    async def fetch(self, request):
        assert request.cursor in ("", "greeted"), request.cursor
        new = () if request.cursor else (rk.Document("hello", "hello", "1", text="ahoy from a connector"),)
        return rk.Page("greeted", new)
"""


@pytest.fixture
def notes(folder: Folder) -> Folder:
    """A folder that was synced once: two documents."""
    (folder.path / "notes").mkdir()
    for name in ("bowline", "sheet bend"):
        (folder.path / "notes" / f"{name}.txt").write_text(f"how to tie a {name}")
    configure(folder, notes="{connector: local_files, path: notes}")
    assert folder("source", "run", "notes").code == 0
    return folder


def configure(folder: Folder, more: str = "", **sources: str) -> None:
    lines = [f"  {name}: {text}" for name, text in sources.items()]
    folder.write("reefknot.yaml", "\n".join([more, "sources:" if lines else "", *lines, ""]))


def row(folder: Folder, name: str = "notes") -> dict[str, Any]:
    found = [one for one in folder.json("source", "list")["sources"] if one["name"] == name]
    return found[0] if found else {}


def delete_documents(folder: Folder) -> None:
    for file in (folder.path / ".reefknot").glob("documents.db*"):
        file.unlink()


def test_after_the_file_of_documents_was_deleted_the_next_sync_reads_everything(notes: Folder) -> None:
    delete_documents(notes)
    assert row(notes)["state"] == "healthy"
    done = notes("source", "run", "notes")
    assert (done.code, "2 new or changed" in done.out) == (0, True), done.err
    assert notes("source", "search", "bowline").code == 0


def test_a_running_system_reads_everything_again_too(notes: Folder) -> None:
    delete_documents(notes)
    configure(notes, notes="{connector: local_files, path: notes, every: 1s}")
    system = notes.start("up")
    until(lambda: row(notes)["documents"] == 2)
    system.terminate()
    system.wait(30)


def test_a_file_that_is_still_there_keeps_its_sources(notes: Folder) -> None:
    """The control: two files of documents would each have a part."""
    more = "ingestion: {documents: other.db}"
    configure(notes, more, notes="{connector: local_files, path: notes}")
    done = notes("source", "run", "notes")
    assert done.code == 75
    old = str(notes.path / ".reefknot" / "documents.db")
    assert (old in done.err, "reefknot source run notes --full" in done.err) == (True, True)
    found = row(notes)
    assert (found["state"], old in found["to_do"][0]) == ("kept elsewhere", True)
    assert notes("source", "run", "notes", "--full").code == 0
    assert (row(notes)["state"], row(notes)["documents"]) == ("healthy", 2)


def test_another_connector_gets_neither_the_cursor_nor_the_documents_of_the_one_before(notes: Folder) -> None:
    notes.write("greeting.py", GREETING)
    configure(notes, notes="{connector: greeting}")
    module = ("--module", "greeting.py")
    done = notes("source", "run", "notes", *module)
    assert done.code == 78
    assert "from the connector local_files, and it is greeting now" in done.err
    assert row(notes)["state"] == "other connector"
    assert notes("source", "search", "bowline").code == 0, "nothing is lost before somebody decides"
    done = notes("source", "run", "notes", *module, "--full")
    assert (done.code, "1 document in all" in done.out) == (0, True), done.err
    assert notes("source", "search", "bowline").code == 1
    assert notes("source", "search", "ahoy").code == 0
    assert row(notes)["state"] == "healthy"


def test_jobs_of_a_source_that_was_taken_out_are_listed_and_ended_by_forgetting_it(folder: Folder) -> None:
    configure(folder, gone="{connector: local_files, path: nowhere}")
    assert folder("source", "run", "gone").code == 1
    (item,) = folder.json("quarantine", "list")["items"]
    configure(folder)
    found = row(folder, "gone")
    assert (found["state"], found["quarantined"]) == ("not configured", 1)
    assert "1 job in quarantine" in found["to_do"][0]
    folder("quarantine", "requeue", item["id"])
    assert "1 open job" in row(folder, "gone")["to_do"][0]
    done = folder("source", "forget", "gone", "--because", "it moved", "--dry-run")
    assert (done.code, done.out) == (0, "gone would be forgotten, with 0 documents and 1 job\n")
    assert folder("source", "forget", "gone", "--because", "it moved").code == 0
    shown = folder.job(item["id"])
    assert (shown["state"], shown["reason"]) == ("cancelled", "it moved")
    assert row(folder, "gone") == {}
    done = folder("source", "forget", "gone", "--because", "it moved")
    assert (done.code, "nothing is left of a source 'gone'" in done.err) == (2, True)


def test_a_folder_is_named_from_where_one_stands(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.path / "work" / "docs").mkdir(parents=True)
    monkeypatch.chdir(folder.path / "work")
    folder("source", "add", "docs", "--connector", "local_files", "--path", "docs")
    assert "path: work/docs" in (folder.path / "reefknot.yaml").read_text()
    done = folder("source", "add", "more", "--connector", "local_files", "--path", "missing")
    assert (done.code, "There is no folder missing yet" in done.err) == (0, True)


def test_a_file_that_is_read_only_stays_as_it_is(folder: Folder) -> None:
    file = folder.path / "reefknot.yaml"
    before = file.read_text()
    file.chmod(0o444)
    done = folder("source", "add", "docs", "--connector", "local_files", "--path", "files")
    assert (done.code, "is read-only" in done.err, file.read_text()) == (77, True, before)


def test_a_wrong_setting_and_a_source_that_cannot_be_watched_are_refused_with_their_place(folder: Folder) -> None:
    before = folder.config.read_text()
    words = ("--connector", "github_repository", "--set", "repository=a/b", "--on-change")
    done = folder("source", "add", "code", *words)
    assert (done.code, "cannot be watched; set every or cron" in done.err) == (78, True)
    assert folder.config.read_text() == before
    configure(folder, code="{connector: github_repository, repository: a/b, on_change: true}")
    done = folder("config", "check")
    assert (done.code, "reefknot.yaml:3:" in done.err) == (78, True), done.err
    configure(folder, docs="{connector: local_files, path: files, pathh: x}")
    done = folder("source", "test", "docs")
    column = 1 + len("  docs: {connector: local_files, path: files, ")
    assert (done.code, f"reefknot.yaml:3:{column}: sources.docs.pathh" in done.out) == (78, True), done.out


SLOW_PAGES = """\
import os
import time
import reefknot as rk

@rk.connector("slow_pages")
async def fetch(context, request):
    number = int(request.cursor or 0)
    if number == 2 and os.path.exists("hangs"):
        open("reached", "w").close()
        time.sleep(60)
    return rk.Page(str(number + 1), (rk.Document(str(number), f"p{number}", "1"),), is_last=number == 4)
"""


def test_the_next_run_goes_on_at_once(folder: Folder) -> None:
    folder.write("slow.py", SLOW_PAGES)
    (folder.path / "hangs").touch()
    words = ("source", "add", "slow", "--connector", "slow_pages", "--module", "slow")
    assert folder(*words).code == 0
    killed = folder.start("source", "run", "slow", "--module", "slow")
    until(lambda: (folder.path / "reached").exists())
    folder.kill(killed)
    (folder.path / "hangs").unlink()

    began = time.monotonic()
    done = folder("source", "run", "slow", "--module", "slow")
    assert (done.code, "3 new or changed" in done.out) == (0, True), done
    assert time.monotonic() - began < 30, "a lease of a minute is not waited for"
    assert folder.json("source", "list")["sources"][0]["documents"] == 5
