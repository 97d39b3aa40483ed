"""The store's file under running systems, and stores that may not be written: what other processes then do."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.runtime.open_files import OpenedFile
from tests.acceptance.folder import CONFIG, Folder, until

STORE = Path(".reefknot") / "state.db"


def deleted(store: Path) -> None:
    store.unlink()


def folder_deleted(store: Path) -> None:
    shutil.rmtree(store.parent)


def moved(store: Path) -> None:
    store.rename(store.with_name("elsewhere.db"))


def replaced(store: Path) -> None:
    copy = store.with_name("copy.db")
    subprocess.run([sys.executable, "-m", "reefknot", "store", "backup", str(copy)], cwd=store.parents[1], check=True)
    copy.replace(store)


def log_deleted(store: Path) -> None:
    Path(f"{store}-wal").unlink()


WAYS: dict[Callable[[Path], None], str] = {
    deleted: "its file was deleted or moved",
    folder_deleted: "its file was deleted or moved",
    moved: "its file was deleted or moved",
    replaced: "was replaced while it was open",
    log_deleted: "was replaced while it was open",
}


@pytest.mark.parametrize(
    ("kind", "harm"), [*(("up", one) for one in WAYS), ("worker", folder_deleted), ("router", folder_deleted)]
)
def test_a_system_whose_store_is_gone_ends_with_69(folder: Folder, kind: str, harm: Callable[[Path], None]) -> None:
    process, reason = folder.up() if kind == "up" else folder.part(kind), WAYS[harm]
    harm(folder.path / STORE)
    code, _, err = folder.ends(process)
    assert code == 69, err
    assert reason in err
    assert f"sqlite:{folder.path / STORE}" in err


@pytest.mark.parametrize("kind", ["up", "worker"])
def test_a_store_that_is_deleted_during_the_drain_ends_it(folder: Folder, kind: str) -> None:
    """The drain would last thirty seconds, and then nothing could be given back."""
    if kind == "worker":
        folder.part("router")
        process = folder.part("worker", "--module", "naps")
    else:
        process = folder.up()
    folder.wait("held")
    until(lambda: folder.begun() == ["held"])
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("shutting down"):
        assert process.poll() is None
    began = time.monotonic()
    folder_deleted(folder.path / STORE)
    code, _, err = folder.ends(process)
    assert (code, WAYS[folder_deleted] in err) == (69, True), err
    assert time.monotonic() - began < 20


def test_a_system_goes_on_beside_everything_that_uses_its_store(folder: Folder) -> None:
    """The control: whoever opens, checks, compacts and copies a store puts no other file in its place."""
    process = folder.up()
    for words in (["store", "check"], ["store", "compact"], ["store", "backup", "copy.db"], ["audit", "verify"]):
        assert folder(*words).code == 0, words
    done = folder("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--wait", "--json")
    assert done.json["results"][0]["status"] == "success"
    assert process.poll() is None
    assert folder.stop(process)[0] == 143


def test_who_waits_for_a_result_hears_that_the_store_is_gone(folder: Folder) -> None:
    process = folder.start("submit", "--type", "own.wait", "--id", "a", "--wait", "--timeout", "600")
    until(lambda: (folder.path / STORE).exists() and folder("job", "show", "a").code == 0)
    shutil.rmtree(folder.path / ".reefknot")
    code, _, err = folder.ends(process)
    assert code == 69
    assert "its file was deleted or moved" in err


def killed_while_open(folder: Folder) -> Path:
    """A store whose system was killed: its write-ahead log is left."""
    process = folder.up()
    folder.kill(process)
    store = folder.path / STORE
    assert Path(f"{store}-wal").exists()
    return store


@pytest.mark.parametrize("words", [("submit", "--type", "own.wait"), ("up", "--for", "0.1"), ("run", "none.jsonl")])
def test_no_new_store_is_made_where_the_rest_of_another_one_is(folder: Folder, words: tuple[str, ...]) -> None:
    folder.write("none.jsonl", "")
    store = killed_while_open(folder)
    store.unlink()
    before = sorted(one.name for one in store.parent.iterdir())
    ended = folder(*words)
    assert (ended.code, "the file was deleted or moved, but" in ended.err) == (69, True)
    assert sorted(one.name for one in store.parent.iterdir()) == before
    for name in ("-wal", "-shm"):
        Path(f"{store}{name}").unlink()
    assert folder(*words).code == 0, "the rest was removed, as the message says"


READING = [
    line.split()
    for line in (
        *("audit tail", "audit verify", "audit replay", "audit analyse", "audit export {out}", "audit verify {store}"),
        *("store check", "store backup {out}", "job list", "job show done", "idempotency stats"),
        *("quarantine list", "quarantine show broken", "quarantine stats", "source list", "source show notes"),
        *("source search ahoy", "source export notes", "source export --output {out}"),
        "source forget old --because gone --dry-run",
    )
]
WRITING = [
    line.split()
    for line in (
        *("job cancel waiting", "quarantine discard broken --because withdrawn", "store compact"),
        *("submit --type own.nap", "up --for 0.1", "source run notes", "source forget old --because gone"),
    )
]


@pytest.fixture
def used(folder: Folder) -> Folder:
    """A folder whose store has a finished, a quarantined and a waiting job, events, and documents of two sources."""
    for name in ("old", "notes"):
        folder.write("reefknot.yaml", CONFIG)  # the one before is not configured any more
        assert folder("source", "add", name, "--connector", "local_files", "--path", "files").code == 0
        assert folder("source", "run", name).code == 0
    steps: list[dict[str, Any]] = [
        {"assignment_id": "done", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}},
        {"assignment_id": "broken", "job": {"type": "fs.blob_get", "payload": {"path": "../a.txt"}}},
    ]
    folder.write_lines("work.jsonl", *steps)
    assert folder("run", "work.jsonl").code == 1
    folder.wait("waiting")
    return folder


def closed(folder: Folder) -> Path:
    """A store that nobody has open."""
    return folder.path / STORE


def crashed(folder: Folder) -> Path:
    """A store with a write-ahead log that was not brought over to the file, and its index."""
    return killed_while_open(folder)


def copied_with_log(folder: Folder) -> Path:
    """A copy of file and log, without the index: the log has to be read anew."""
    store = crashed(folder)
    for file in (store, store.with_name("documents.db")):
        Path(f"{file}-shm").unlink()
    return store


@pytest.fixture
def frozen() -> Iterator[Callable[[Path], dict[str, bytes]]]:
    """Takes the right to write from a store, its files and its folder; the result is what is in them."""
    folders: list[Path] = []

    def freeze(store: Path) -> dict[str, bytes]:
        folders.append(store.parent)
        for file in store.parent.iterdir():
            file.chmod(0o400)
        store.parent.chmod(0o500)
        return content(store)

    yield freeze
    for one in folders:
        one.chmod(0o700)


def content(store: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in store.parent.iterdir()}


@pytest.mark.parametrize("state", [closed, crashed, copied_with_log], ids=lambda one: one.__name__)
def test_a_store_that_may_not_be_written_can_be_read(
    used: Folder, state: Callable[[Folder], Path], frozen: Callable[[Path], dict[str, bytes]]
) -> None:
    store = state(used)
    events = used.json("audit", "verify", "--engine", f"sqlite:{duplicate(store, used.path / 'twin')}")["sequence"]
    before = frozen(store)
    files = [[word.format(out=f"out-{number}", store=store) for word in one] for number, one in enumerate(READING)]
    for words, (code, _, err) in zip(files, used.as_user(*files), strict=True):
        assert code == 0, (words, err)
    ((_, verified, _),) = used.as_user(["audit", "verify", "--json"])
    found = json.loads(verified)

    assert (found["ok"], found["sequence"]) == (True, events), "nothing that is in the log alone is missed"
    for command, (code, _, err) in zip(WRITING, used.as_user(*WRITING), strict=True):
        assert code == 77, (command, err)
        assert "may not be" in err
    assert content(store) == before, "nothing was made or changed"


def duplicate(store: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("", "-wal"):
        if Path(f"{store}{name}").exists():
            shutil.copy(f"{store}{name}", folder / f"{store.name}{name}")
    return folder / store.name


def test_a_reader_that_left_out_the_log_would_miss_events(used: Folder) -> None:
    """The control: an immutable file is read without its log, so a store with one must not be opened that way."""
    store = crashed(used)
    flags, count = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, "SELECT count(*) FROM status"
    opened = [apsw.Connection(f"file:{store}?mode=ro{more}", flags=flags) for more in ("", "&immutable=1")]
    assert len({one.execute(count).get for one in opened}) == 2


def test_a_store_in_use_can_be_read_without_writing(used: Folder, frozen: Callable[[Path], dict[str, bytes]]) -> None:
    """Whoever has the files open goes on writing: rights are asked for when a file is opened."""
    process = used.up()
    frozen(used.path / STORE)
    (code, out, err), (searched, found, _) = used.as_user(["worker", "list", "--json"], ["source", "search", "ahoy"])
    assert (code, searched) == (0, 0), err
    assert "a.txt" in found
    assert [one["worker_id"] for one in json.loads(out)["workers"]] == ["worker-1"]
    assert process.poll() is None


def test_a_file_that_is_written_while_it_is_read_as_frozen_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(b"one")
    frozen, opened = OpenedFile(str(file), frozen=True), OpenedFile(str(file))
    Path(f"{file}-wal").touch()

    assert not frozen.in_place
    assert not opened.in_place
    Path(f"{file}-wal").unlink()
    assert frozen.in_place
    os.utime(file, ns=(0, 1))
    assert not frozen.in_place
    assert opened.in_place, "one that others may write is told by device and inode alone"


def test_an_older_read_only_store_names_a_way_out(used: Folder, frozen: Callable[[Path], dict[str, bytes]]) -> None:
    store = used.path / STORE
    frozen(store)
    ((code, _, err),) = used.as_user(["audit", "verify"], by="newer")
    assert code == 78
    assert "copy it to a folder that may be written" in err
    assert stat.S_IMODE(store.stat().st_mode) == 0o400


MISTAKE = "schedules:\n  nightly: {every: sometimes, assignment: {job: {type: own.nap}}}\n"
LOOKS_AT_A_STORE = (
    *("job list", "job show done", "quarantine list", "quarantine show broken", "quarantine stats", "alert list"),
    *("schedule list", "source list", "telemetry show", "audit tail", "audit verify", "audit replay", "audit head"),
    *("audit export log.jsonl", "idempotency stats", "store check", "store backup copy.db", "source search ahoy"),
)


def test_a_mistake_elsewhere_in_the_configuration_keeps_no_one_from_looking(used: Folder) -> None:
    """The doctor reports it as a finding with its line. An unknown section may be misspelt secrets, and is refused."""
    configured = used.config.read_text()
    used.configure(MISTAKE)
    for line in LOOKS_AT_A_STORE:
        done = used(*line.split())
        assert done.code == 0, (line, done.err)
        assert done.err.count("schedules.nightly.every") <= 1, "it is said once"
    assert "warning: reefknot.yaml:" in used("alert", "list").err
    for line in ("up --for 0.1", "run work.jsonl", "job cancel waiting", "source run notes"):
        assert used(*line.split()).code == 78, line

    done = used("doctor", "--json")
    (found,) = [one for one in done.json["findings"] if one["check"] == "configuration"]
    assert (done.code, done.json["ok"], found["level"]) == (78, False, "problem")
    assert found["text"].startswith(f"reefknot.yaml:{configured.count(chr(10)) + 2}:")
    assert "schedules.nightly.every" in found["text"]
    assert any(one["check"] == "schema" for one in done.json["findings"]), "the store is examined as well"
    used.config.write_text(f"{configured}secretz: {{key: env:KEY}}\n")
    for line in ("alert list", "doctor", "audit tail"):
        assert used(*line.split()).code == 78, line
