"""Files are opened beneath a folder and nowhere else, with the kernel's help and without it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reefknot.steps import fs
from reefknot.steps.fs import LINKS, folder_beneath, open_beneath

Open = Callable[[tuple[str, ...]], bytes]


@pytest.fixture(params=["openat2", "walk"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Reads a file beneath `root`; beside it there is a secret, and links that lead to it."""
    if request.param == "walk":
        monkeypatch.setattr(fs, "_openat2_offered", False)
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    (root / "own").symlink_to("inner")
    os.mkfifo(root / "pipe")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)

    def opened(parts: tuple[str, ...]) -> bytes:
        file = open_beneath(descriptor, parts, os.O_RDONLY)
        try:
            return os.read(file, 100)
        finally:
            os.close(file)

    yield opened
    os.close(descriptor)


def test_a_file_beneath_is_read_and_a_pipe_without_a_writer_does_not_block(read: Open) -> None:
    assert read(("inner", "file")) == b"inside"
    assert read(("pipe",)) == b""


@pytest.mark.parametrize("parts", [("link",), ("folder", "secret"), ("own", "file")])
def test_no_link_is_followed_wherever_it_leads(read: Open, parts: tuple[str, ...]) -> None:
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the number says which
        read(parts)
    assert refused.value.errno in LINKS


def test_this_kernel_confines_by_itself() -> None:
    """The tests above are two different ones only where the kernel offers `openat2`."""
    assert fs.has_openat2()


@pytest.mark.parametrize("offered", [True, False])
def test_folders_are_made_on_the_way_but_never_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    monkeypatch.setattr(fs, "_openat2_offered", offered)
    (tmp_path / "outside").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with folder_beneath(descriptor, ("a", "b"), make=True):
            assert (root / "a" / "b").is_dir()
        with pytest.raises(OSError), folder_beneath(descriptor, ("link", "b"), make=True):  # noqa: PT011
            pass
        with pytest.raises(FileNotFoundError), folder_beneath(descriptor, ("c",)):
            pass
    finally:
        os.close(descriptor)
    assert list((tmp_path / "outside").iterdir()) == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    for parts in (("a", "b"), ("a", "b", "c")):
        with folder_beneath(descriptor, parts, make=True):
            pass
        with pytest.raises(FileNotFoundError):
            fs.open_by_walking(descriptor, (*parts, "x", "y"), os.O_RDONLY)

    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)
