"""Connectors with mistakes, and sources that cannot be read as a whole: what the command line says of them."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from reefknot.ingest.connectors.text_extraction import installation_note
from tests.acceptance.folder import Folder
from tests.unit.console.cli.running import Ended

MODULE = """\
import reefknot as rk

def fail():
    {fail}

@rk.connector("own_one")
async def fetch(request):
    fail()
    one = dict(id="1", location="a", version="1", text="ahoy")
    return rk.Page({page})
"""


def synced(folder: Folder, *, fail: str = "pass", page: str = "'c', (rk.Document(**one),)") -> Ended:
    """The end of a sync by a connector that fails so, or returns such a page."""
    folder.write("own_mistakes.py", MODULE.format(fail=fail, page=page))
    folder.write("reefknot.yaml", "sources:\n  k: {connector: own_one}\n")
    sys.modules.pop("own_mistakes", None)  # that of the test before
    return folder("source", "run", "k", "--module", "own_mistakes")


def test_an_error_of_a_connector_is_told_by_its_class_and_its_line(folder: Folder) -> None:
    for fail, code, told in (
        ("{}['x']", 75, "k: not done yet: KeyError: 'x' (in "),
        ("assert False", 75, "k: not done yet: AssertionError (in "),
        ("raise SystemExit(3)", 1, "k: the sync failed: SystemExit: 3 (in "),
        ("raise ConnectionError('connection refused')", 75, "k: not done yet: connection refused\n"),
    ):
        done = synced(folder, fail=fail)
        assert (done.code, done.out.startswith(told)) == (code, True), done.out
        if "(in " in told:
            assert f"{os.sep}own_mistakes.py:4)" in done.out
            assert told.partition(": ")[2].partition(": ")[2] in folder("source", "list").out, "and in the list"
        shutil.rmtree(folder.path / ".reefknot")


def test_a_mistake_in_a_page_is_not_retried_and_nothing_of_the_page_is_kept(folder: Folder) -> None:
    done = synced(folder, page="'c', (rk.Document(**one), rk.Document(**one | {'location': 'b'}))")
    assert (done.code, "correct the connector" in done.out) == (1, True), done.out
    assert done.out.startswith("k: the sync failed: the connector own_one returned documents[1].id='1' twice")
    assert folder.json("source", "list")["sources"][0]["documents"] == 0


def test_text_that_is_no_unicode_is_kept_with_a_problem(folder: Folder) -> None:
    """The control of the page above, too: without a mistake it is kept."""
    done = synced(folder, page="'c', (rk.Document(**one | {'text': 'ahoy \\ud800'}),)")
    assert (done.code, "1 new or changed" in done.out) == (0, True), done.err
    assert "1 document could be read only in part" in done.err
    assert "no valid Unicode" in folder("source", "show", "k").out


def test_a_connector_without_a_test_is_said_to_be_not_tested(folder: Folder) -> None:
    assert synced(folder).code == 0
    done = folder("source", "test", "--module", "own_mistakes")
    assert done.code == 0
    assert done.out.startswith("k: NOT TESTED: its settings are accepted, and nothing was reached: ")
    (found,) = folder.json("source", "test", "--module", "own_mistakes")["sources"]
    assert (found["ok"], found["tested"]) == (True, False)
    assert "Exits with 0 when no source fails" in folder("source", "test", "--help").out


def outcome_for_a_user(folder: Folder, *shut: Path) -> tuple[int, str]:
    """The exit code and the answer of `source test`, by a user who may not read these."""
    for one in shut:
        one.chmod(0)
    try:
        ((code, out, _),) = folder.as_user(["source", "test", "--json"])
    finally:
        for one in shut:
            one.chmod(0o700)
    (found,) = json.loads(out)["sources"]
    return code, found["answer"]


DENIED = "permission denied: allow this user to read it, or `exclude` it"


def test_a_test_of_a_folder_names_what_this_user_may_not_read(folder: Folder) -> None:
    shut = folder.path / "files" / "shut"
    shut.mkdir()
    assert folder("source", "add", "notes", "--connector", "local_files", "--path", "files").code == 0
    code, answer = outcome_for_a_user(folder, folder.path / "files")
    assert (code, "may not be read by this user" in answer) == (77, True), answer
    code, answer = outcome_for_a_user(folder, shut)
    assert code == 0
    assert answer.endswith(f"files: 1 file; cannot be read: shut/: {DENIED}{installation_note()}")


@pytest.mark.parametrize(
    ("connector", "found"), [("local_files", "1 file"), ("obsidian_vault", "0 notes, 1 attachment")]
)
def test_a_test_opens_every_file_and_fails_when_none_can_be_read(folder: Folder, connector: str, found: str) -> None:
    files = [*(folder.path / "files").iterdir(), *(folder.path / "files" / f"{one}.txt" for one in "wxyz")]
    for one in files[1:]:
        one.write_text("ahoy")
    assert folder("source", "add", "notes", "--connector", connector, "--path", "files").code == 0

    some, all_but_one = outcome_for_a_user(folder, *files[1:])
    code, none = outcome_for_a_user(folder, *files)

    named = "; ".join(f"{one}.txt: {DENIED}" for one in "wxy")
    assert all_but_one.endswith(installation_note())
    told = all_but_one.removesuffix(installation_note()).partition("; Obsidian")[0]
    assert (some, told) == (0, f"{folder.path / 'files'}: {found}; cannot be read: {named}; and 1 more")
    assert (code, none.partition(";")[0]) == (77, f"{folder.path / 'files'}: no file"), none
    assert none.endswith("; and 2 more")
