"""The interpreter's switch interval: short while somebody writes, and never left changed."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from reefknot.engines.sqlite.haste import SHORT, Haste

USUAL = 0.004


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 6)


def test_it_is_short_until_the_last_one_has_ended() -> None:
    haste = Haste()
    haste.begin("one")
    haste.begin("one")
    haste.begin("two")
    assert interval() == SHORT
    haste.end("one")
    assert interval() == SHORT
    haste.end("two")
    assert interval() == USUAL


def test_an_end_without_a_beginning_changes_nothing() -> None:
    haste = Haste()
    haste.end("nobody")
    assert interval() == USUAL


def test_what_somebody_else_has_set_meanwhile_stays() -> None:
    haste = Haste()
    haste.begin("one")
    sys.setswitchinterval(0.002)
    haste.end("one")
    assert interval() == 0.002


def test_an_interval_that_is_shorter_already_is_left_alone() -> None:
    sys.setswitchinterval(SHORT / 2)
    haste = Haste()
    haste.begin("one")
    assert interval() == SHORT / 2
    haste.end("one")
    assert interval() == SHORT / 2


def test_a_child_process_has_the_usual_interval_and_can_be_in_a_hurry_again() -> None:
    """What the hook after a fork does. The threads that were in a hurry stayed behind, maybe holding the lock."""
    haste = Haste()
    haste.begin("one")
    haste._lock.acquire()
    haste.forget()
    assert interval() == USUAL
    haste.begin("two")
    assert interval() == SHORT
    haste.end("two")
    assert interval() == USUAL


def test_many_threads_leave_the_interval_as_they_found_it() -> None:
    haste = Haste()

    def hurry(name: int) -> None:
        for _ in range(200):
            haste.begin(name)
            os.getpid()
            haste.end(name)

    threads = [threading.Thread(target=hurry, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert interval() == USUAL
