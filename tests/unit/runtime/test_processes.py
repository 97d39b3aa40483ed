"""Marks of processes: one that has ended is known to be gone, and of a stranger nothing is claimed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from reefknot.runtime.processes import is_gone, marked_owner, owner_is_gone, process_mark

ELSEWHERE = "0123456789ab.1.1"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until somebody ends it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def gone_process() -> str:
    """The mark of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marked = process_mark(process.pid)
    process.communicate(b"")
    return marked


def test_a_process_that_ended_is_gone_and_one_that_is_frozen_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    marked = process_mark(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    assert not is_gone(marked)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(marked), "only its exit code is left: its parent has not asked for it yet"
    sleeper.wait()
    assert is_gone(marked)


def test_this_process_is_there_and_a_number_that_another_has_by_now_is_gone() -> None:
    machine, number, began = process_mark().split(".")
    assert is_gone(f"{machine}.{number}.{int(began) + 1}")
    assert not is_gone(f"{machine}.{number}.{began}")


@pytest.mark.parametrize("marked", [ELSEWHERE, "", "x", "a.b.c", "@", "999999999999999999999999.1"])
def test_of_another_machine_or_without_a_mark_nothing_is_known(marked: str) -> None:
    assert not is_gone(marked)
    assert not owner_is_gone(f"worker-1#5@{marked}")


def test_an_owner_is_gone_with_the_process_it_is_marked_with() -> None:
    assert not owner_is_gone("worker-1#5")
    assert owner_is_gone(f"worker-1#5@{gone_process()}")
    owner = marked_owner("5")
    assert owner == f"5@{process_mark()}"
    assert not owner_is_gone(owner)


def test_a_fork_has_a_mark_of_its_own() -> None:
    ours = process_mark()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, process_mark().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reads, 200).decode()
    assert theirs != ours
    assert is_gone(theirs)
