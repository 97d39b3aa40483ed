"""Results, copies and stores are for their owner alone, whatever the umask and whoever made the file beforehand."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from reefknot.runtime.files import make_private, make_store_private, private_opener
from tests.warm_commands import run_cold

CONFIG = "audit: {jsonl: {path: copy/audit.jsonl}}\nblocks: {fs: {roots: [files]}}\n"
PREMADE = (".reefknot/state.db", "results.jsonl", "copy/audit.jsonl.copied")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def reefknot(folder: Path, *words: str) -> None:
    run_cold(sys.executable, "-m", "reefknot", *words, cwd=folder, umask=0, check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("ahoy")
    (tmp_path / "reefknot.yaml").write_text(CONFIG)
    line = {"assignment_id": "a", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    (tmp_path / "work.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


@pytest.mark.parametrize("premade", [False, True])
def test_no_file_of_a_run_can_be_read_by_others(folder: Path, premade: bool) -> None:
    """A umask of 0 leaves every right that a file is made with."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    for name in PREMADE if premade else ():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        (folder / name).chmod(0o666)
    reefknot(folder, "run", "work.jsonl", "--results", "results.jsonl", "--force")
    reefknot(folder, "audit", "export", "log.jsonl")
    reefknot(folder, "store", "backup", "backup.db")
    made = {path for path in folder.rglob("*") if path.is_file()} - before

    assert {"state.db", "results.jsonl", "audit.jsonl", "audit.jsonl.copied", "log.jsonl"} <= {one.name for one in made}
    assert {str(path.relative_to(folder)): oct(mode(path)) for path in made if mode(path) & 0o077} == {}


def test_a_plain_open_follows_the_umask(tmp_path: Path) -> None:
    """The control: without the opener, others may read."""
    before = os.umask(0)
    try:
        (tmp_path / "plain").write_text("")
        with open(tmp_path / "private", "w", opener=private_opener):
            pass
    finally:
        os.umask(before)
    assert (mode(tmp_path / "plain"), mode(tmp_path / "private")) == (0o666, 0o600)


@pytest.mark.parametrize(
    ("given", "content", "left"),
    [(0o644, b"", 0o600), (0o664, b"", 0o600), (0o644, b"x", 0o600), (0o640, b"x", 0o600), (0o666, b"x", 0o660)],
)
def test_a_store_keeps_only_rights_of_a_writing_group(tmp_path: Path, given: int, content: bytes, left: int) -> None:
    """A reader of a store writes to the memory that its processes share, so 0640 shares nothing."""
    store = tmp_path / "state.db"
    store.write_bytes(content)
    store.chmod(given)
    make_store_private(str(store))
    assert mode(store) == left


def test_devices_and_files_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mode(Path(os.devnull))
    with open(os.devnull, "wb", opener=private_opener):
        pass
    assert mode(Path(os.devnull)) == before

    theirs = tmp_path / "theirs"
    theirs.touch()
    theirs.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    make_private(str(theirs))
    assert mode(theirs) == 0o644
