"""A fork waits until nothing is in use, and in its child every store lets go. Real ones: tests/integration."""

import threading

import pytest

from reefknot.runtime import forks
from reefknot.runtime.forks import Forks


class Store:
    def __init__(self, made: Forks, told: list[str], name: str) -> None:
        self.told, self.name = told, name
        made.in_child(self.let_go)

    def let_go(self) -> None:
        self.told.append(self.name)


def test_a_fork_waits_for_a_use_to_end_and_nothing_begins_meanwhile() -> None:
    made = Forks()
    used, free = made.in_use(), made.in_use()
    used.acquire()
    forking = threading.Thread(target=made.before)
    forking.start()
    assert forking.is_alive()
    used.release()
    forking.join(30)
    assert not used.acquire(blocking=False), "held until the fork is over"
    assert not free.acquire(blocking=False)
    made.after()
    assert used.acquire(blocking=False)
    assert made.generation == 0


def test_a_use_that_never_ends_holds_up_no_fork_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT_S", 0.01)
    made = Forks()
    used = made.in_use()
    with used:
        made.before()
        made.after()
        assert used.locked(), "it is not taken from the one who has it"


def test_in_a_child_every_store_that_lives_lets_go_and_new_ones_may_be_opened() -> None:
    made, told = Forks(), list[str]()
    kept, gone = Store(made, told, "kept"), Store(made, told, "gone")
    made.in_child(lambda: told.append("module"))
    del gone
    before = made.lock
    made.before()
    made.after_in_child()
    assert told == ["kept", "module"]
    assert made.generation == 1
    assert made.lock is not before
    assert made.in_use().acquire(blocking=False)
    assert kept.name == "kept"
