"""
Folders that change at random between syncs and between the pages of one.

After all that, one sync that nobody disturbs makes the documents equal to the folder: the same locations, the same
texts, no id twice, and each file that only moved has the id that it had. The controls break one thing each, and the
same story has to catch them.
"""

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.ingest.connectors import folders, local_files
from reefknot.ingest.connectors.local_files import LocalFiles
from tests.unit.ingest.connectors.memory_sink import MemorySink, context, sync

SEEDS = range(25)
CONTROL_SEEDS = range(40)
"""Stories among which every broken sync must be caught."""
LONG_AGO = -(10**15)


class File:
    """A file of the model, whatever its name is now."""

    def __init__(self, path: Path, content: str) -> None:
        self.path = path
        self.content = content
        self.id = ""
        self.is_moved = self.is_edited = self.is_copied = False


class World:
    """A folder, its model, and random changes of both."""

    def __init__(self, root: Path, seed: int, forbidden: set[str]) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.files: list[File] = []
        self.sink = MemorySink()
        self.forbidden = forbidden
        self.was_forbidden = False
        self._numbers = iter(range(1_000_000))
        (root.parent / "outside").mkdir(exist_ok=True)
        (root.parent / "outside/secret.txt").write_text("secret")

    def change(self) -> None:
        """A random change."""
        changes: list[Callable[[], None]] = [self.create, self.create, self.edit, self.delete, self.rename, self.rename]
        changes += [self.rename_folder, self.copy, self.link, self.replace_by_link, self.forbid, self.allow]
        self.random.choice(changes)()

    def place(self) -> Path:
        """A new name, in a folder that may be new."""
        folder = self.root.joinpath(*self.random.choices(["a", "m", "m.x", "z", "."], k=self.random.randrange(3)))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.random.choice('amz')}{next(self._numbers)}.txt"

    def create(self, content: str = "") -> None:
        file = File(self.place(), content or f"content {next(self._numbers):06}")
        file.is_copied = bool(content)
        file.path.write_text(file.content)
        self.files.append(file)

    def one(self) -> File | None:
        return self.random.choice(self.files) if self.files else None

    def edit(self) -> None:
        """Write as many characters, and set the time of modification back."""
        if file := self.one():
            times = file.path.stat()
            file.content = f"content {next(self._numbers):06}"
            file.path.write_text(file.content)
            os.utime(file.path, ns=(times.st_atime_ns, times.st_mtime_ns))
            file.is_edited, file.is_copied = True, False

    def delete(self) -> None:
        if file := self.one():
            file.path.unlink()
            self.files.remove(file)

    def rename(self) -> None:
        if file := self.one():
            new = self.place()
            file.path.rename(new)
            file.path, file.is_moved = new, True

    def rename_folder(self) -> None:
        found = [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]
        if found:
            old = self.random.choice(found)
            new = self.root / f"{self.random.choice('amz')}{next(self._numbers)}"
            old.rename(new)
            for file in self.files:
                if file.path.is_relative_to(old):
                    file.path, file.is_moved = new / file.path.relative_to(old), True

    def copy(self) -> None:
        if file := self.one():
            file.is_copied = True
            self.create(file.content)

    def link(self) -> None:
        self.place().symlink_to(self.random.choice([self.root.parent / "outside", self.root, Path("nowhere")]))

    def replace_by_link(self) -> None:
        if file := self.one():
            file.path.unlink()
            file.path.symlink_to(self.root.parent / "outside/secret.txt")
            self.files.remove(file)

    def forbid(self) -> None:
        if file := self.one():
            self.forbidden.add(self.random.choice([file.path.name, file.path.parent.name]))
            self.forbidden.discard(self.root.name)
            self.was_forbidden = True

    def allow(self) -> None:
        self.forbidden.clear()

    # ---- syncs ----

    def sync(self, *, disturbed: bool) -> None:
        def disturb() -> None:
            # In the last round nobody waits for a file that moves about.
            if json.loads(self.sink.place.cursor).get("round", 1) < 3 and self.random.random() < 0.7:
                self.change()

        connector = LocalFiles(context(self.root))
        between = disturb if disturbed else lambda: None
        asyncio.run(sync(connector, self.sink, limit=self.random.choice([1, 2, 5, 100]), between=between))

    def check(self) -> None:
        """Compare after a sync that was not disturbed, and note the ids."""
        expected = {str(file.path.relative_to(self.root)): file.content for file in self.files}
        kept = self.sink.by_location()
        assert {location: document.text for location, document in kept.items()} == expected
        assert len({document.id for document in kept.values()}) == len(kept)
        for file in self.files:
            found = kept[str(file.path.relative_to(self.root))].id
            # A file that moves to where it cannot be read is not known again.
            is_known = not file.is_moved or not (file.is_edited or file.is_copied or self.was_forbidden)
            if file.id and is_known:
                assert found == file.id, f"{file.path} has another id"
            file.id, file.is_moved, file.is_edited = found, False, False
        self.was_forbidden = False


def story(root: Path, seed: int, forbidden: set[str]) -> None:
    root.mkdir(parents=True)
    world = World(root, seed, forbidden)
    for _ in range(4):
        for _ in range(world.random.randrange(12)):
            world.change()
        world.sync(disturbed=True)
        world.allow()
        world.sync(disturbed=False)
        world.check()


@pytest.fixture(autouse=True)
def _without_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harder case."""
    monkeypatch.setattr(folders, "generation_of", lambda descriptor: "")


@pytest.mark.parametrize("seed", SEEDS)
def test_documents_equal_the_folder_after_any_changes(tmp_path: Path, forbidden: set[str], seed: int) -> None:
    story(tmp_path / "folder", seed, forbidden)


def trusting_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folders, local_files):
        monkeypatch.setattr(module, "times_of", lambda about: f"{about.st_size}-{about.st_mtime_ns}-{about.st_ino}")
    monkeypatch.setattr(folders, "SETTLED_NS", LONG_AGO)


def pruning_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "MOST_ROUNDS", 1)


def deleting_what_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    presence = folders.OpenFolder.presence

    def seen(self: folders.OpenFolder, location: str) -> folders.Presence:
        found = presence(self, location)
        return folders.Presence.GONE if found is folders.Presence.UNKNOWN else found

    monkeypatch.setattr(folders.OpenFolder, "presence", seen)


def moving_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFiles, "_gone_among", lambda self, items: list(items))


@pytest.mark.parametrize("broken", [trusting_times, pruning_at_once, deleting_what_cannot_be_seen, moving_copies])
def test_a_broken_sync_is_caught(
    tmp_path: Path, forbidden: set[str], monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)

    for seed in CONTROL_SEEDS:
        try:
            story(tmp_path / str(seed) / "folder", seed, forbidden)
        except AssertionError:
            return
    pytest.fail("no story noticed it")
