"""
Nothing beneath a root leads out of it, not even while another process swaps folders for links.

What is opened as `door/file` is either the file inside, or nothing.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reefknot.steps.fs import BlobPut, Folders, FsSettings, has_openat2, open_beneath, open_by_walking
from tests.integration.stepping import run

OPENS = 100_000
PATIENCE_S = 120.0
SWAPPING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    for _ in range(1000):
        libc.renameat2(-100, b"door", -100, b"link", 2)
    if os.getppid() != int(sys.argv[2]):
        break
"""


@dataclass
class Yard:
    root: Path
    outside: Path


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """A root with a door in it that is being swapped all the time."""
    made = Yard(tmp_path / "root", tmp_path / "outside")
    (made.root / "door").mkdir(parents=True)
    made.outside.mkdir()
    (made.root / "door" / "file").write_text("inside")
    (made.outside / "file").write_text("outside")
    (made.root / "link").symlink_to(made.outside)
    command = [sys.executable, "-S", "-c", SWAPPING, str(made.root), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        yield made
        swapper.kill()


def race(yard: Yard, attempt: Callable[[int], int], times: int) -> Counter[str]:
    """How often the file inside was opened, how often nothing, how often the file outside."""
    root = os.open(yard.root, os.O_RDONLY | os.O_DIRECTORY)
    outside = (yard.outside / "file").stat().st_ino
    found: Counter[str] = Counter()
    try:
        for _ in range(times):
            try:
                file = attempt(root)
            except OSError:
                found["nothing"] += 1
                continue
            found["escaped" if os.fstat(file).st_ino == outside else "inside"] += 1
            os.close(file)
    finally:
        os.close(root)
    return found


def raced_well(yard: Yard, attempt: Callable[[int], int]) -> int:
    """How many escaped of so many opens, and of more until both sides of the door were met often enough."""
    found = race(yard, attempt, OPENS)
    until = time.monotonic() + PATIENCE_S
    while min(found["inside"], found["nothing"]) <= 100:
        assert time.monotonic() < until, f"no race: {found}"
        found += race(yard, attempt, 1000)
    return found["escaped"]


@pytest.mark.parametrize("opening", [open_beneath, open_by_walking], ids=["by the kernel", "by walking"])
def test_none_of_100000_racing_opens_gets_out(yard: Yard, opening: Callable[..., int]) -> None:
    assert has_openat2()
    assert raced_well(yard, lambda root: opening(root, ("door", "file"), os.O_RDONLY)) == 0


def test_a_check_of_the_path_before_opening_it_escapes(yard: Yard) -> None:
    """The control: the usual `realpath` check, in the same race."""
    real = os.path.realpath(yard.root)

    def checked(root: int) -> int:
        path = os.path.join(real, "door", "file")
        if not os.path.realpath(path).startswith(real + os.sep):
            raise PermissionError(path)
        return os.open(path, os.O_RDONLY)

    until = time.monotonic() + PATIENCE_S
    escaped = 0
    while not escaped and time.monotonic() < until:
        escaped = race(yard, checked, 1000)["escaped"]
    assert escaped > 0


def test_no_racing_write_lands_outside(yard: Yard) -> None:
    kept = number = 0
    until = time.monotonic() + PATIENCE_S
    while number < 150 or not (kept or time.monotonic() > until):
        block = BlobPut(Folders(FsSettings((yard.root,))))
        kept += run(block, path=f"door/new-{number % 7}", content="x").ok
        number += 1

    assert kept > 0
    assert [file.name for file in yard.outside.iterdir()] == ["file"]
    assert (yard.outside / "file").read_text() == "outside"
