"""Spare files of processes that were killed are removed, those of living ones are not."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reefknot.runtime import files
from reefknot.runtime.files import whole_file
from reefknot.steps.fs import FsSettings, _spare, remove_spare_files


@contextmanager
def process(work: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """A process that does the work, waits where the work says so, and is killed when the block or the caller says."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda: signal.pause() if os.write(told, b".") else None)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"."

    def kill() -> None:
        nonlocal child
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0

    try:
        yield kill
    finally:
        kill()
        os.close(ready)
        os.close(told)


def exporting(path: Path) -> Callable[[Callable[[], None]], None]:
    def work(pause: Callable[[], None]) -> None:
        with whole_file(path) as file:
            file.write(b"half")
            file.flush()
            pause()

    return work


def putting(folder: Path, name: str) -> Callable[[Callable[[], None]], None]:
    def work(pause: Callable[[], None]) -> None:
        opened = os.open(folder, os.O_RDONLY)
        with _spare(opened, name) as (_, stream):
            stream.write(b"half")
            stream.flush()
            pause()

    return work


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.rglob("*") if one.is_file()}


def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with process(exporting(tmp_path / "e2.jsonl")) as kill:
        assert names(tmp_path) == set(), "it has no name yet"
        kill()
    assert names(tmp_path) == set()


def test_the_next_writer_of_a_file_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no files without a name."""
    monkeypatch.setattr(files, "_nameless_file", lambda folder: None)
    path = tmp_path / "e2.jsonl"
    others = {"e2.jsonl.000000000001", ".e2.jsonl.000000000001", ".e2.jsonl.lock", "e2.jsonl.12", ".other.jsonl.12"}
    for name in others:
        (tmp_path / name).touch()
    with process(exporting(path)) as kill:
        (left,) = names(tmp_path) - others
        with whole_file(path) as file:
            file.write(b"whole")
        assert left in names(tmp_path), "its process lives"
        kill()
        assert left in names(tmp_path)
    with whole_file(path) as file:
        file.write(b"whole")
    assert names(tmp_path) == {"e2.jsonl", *others}
    assert path.read_bytes() == b"whole"


def test_a_file_that_fails_to_be_written_leaves_nothing_and_an_old_number_refuses_no_successor(tmp_path: Path) -> None:
    with pytest.raises(KeyError), whole_file(tmp_path / "a"):
        raise KeyError
    assert names(tmp_path) == set()
    (tmp_path / f".e2.jsonl.{os.getpid()}").touch()
    with whole_file(tmp_path / "e2.jsonl") as file:
        file.write(b"whole")
    assert names(tmp_path) == {"e2.jsonl"}


def test_spare_files_of_killed_steps_are_removed_beneath_the_roots_and_nothing_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    spare = ".b.txt.0123456789abcdef.part"
    others = {"b.txt", "my.part", ".b.txt.part", ".b.txt.0123.part", "b.txt.0123456789abcdef.part"}
    for name in others:
        (root / "a" / name).touch()
    (outside / spare).touch()
    (root / "link").symlink_to(outside)
    (root / spare).symlink_to(outside / spare)
    settings = FsSettings(roots=(root, tmp_path / "missing"))
    with process(putting(root / "a" / "b", "lives.txt")), process(putting(root / "a", "dies.txt")) as kill:
        kill()
        assert remove_spare_files(settings) == 1
        assert not any(name.startswith(".dies.txt") for name in names(root))
        assert any(name.startswith(".lives.txt") for name in names(root))
    assert (outside / spare).exists()
    assert others <= names(root)
    assert remove_spare_files(settings) == 1


def test_without_locks_a_file_that_is_being_written_would_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr("reefknot.runtime.files.fcntl.flock", lambda *_: None)
    with process(putting(tmp_path, "lives.txt")):
        assert remove_spare_files(FsSettings(roots=(tmp_path,))) == 1


def test_a_spare_file_that_went_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((False, True))
    monkeypatch.setattr("reefknot.steps.fs.is_ours", lambda _: next(answers))
    opened = os.open(tmp_path, os.O_RDONLY)
    with _spare(opened, "a") as (name, _):
        assert name in names(tmp_path)
    os.close(opened)
    assert next(answers, "both were asked for") == "both were asked for"


def test_a_database_is_never_replaced(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    store.write_bytes(b"SQLite format 3\0 and more")
    with pytest.raises(FileExistsError, match="is a database, which is not replaced"), whole_file(store):
        pass
    assert store.read_bytes() == b"SQLite format 3\0 and more"
