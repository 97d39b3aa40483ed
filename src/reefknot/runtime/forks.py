"""
`FORKS`: what a fork does to the stores that its process has open.

A child inherits connections that it must not use: their threads are the parent's alone, their sockets are shared with
it, and SQLite counts the locks of its files by process. So a fork waits until no thread is in the middle of a use
(`in_use`), and in the child every store lets go of what it inherited (`in_child`): its calls are refused from then on,
and a new one may be opened in its place.
"""

import os
import threading
import time
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakMethod, WeakSet

from reefknot.errors import StoreUnavailableError

LONGEST_WAIT_S = 5.0
"""How long a fork waits for a use to end; a child cannot open again what was in use all the time."""


class Forks:
    """The forks that led to this process. There is one of these, `FORKS`."""

    def __init__(self) -> None:
        self.generation = 0
        """The number of forks that led to this process: cheaper to compare than a process id."""
        self.lock = threading.Lock()
        """A lock that no thread of the parent can hold: it is new in every child."""
        self._adding = threading.Lock()
        """Held while one of the lists changes, and during a fork: a child finds them whole."""
        self._uses: WeakSet[threading.Lock] = WeakSet()
        self._taken: list[threading.Lock] = []
        self._lettings_go: list[Callable[[], Callable[[], None] | None]] = []
        self._kept: list[Any] = []

    def in_use(self) -> threading.Lock:
        """A new lock, to be held while something is used that a fork must not interrupt."""
        lock = threading.Lock()
        with self._adding:
            self._uses.add(lock)
        return lock

    def in_child(self, let_go: Callable[[], None]) -> None:
        """Call this in every child. Of a method, its object is not kept alive."""
        with self._adding:
            alive = [one for one in self._lettings_go if one() is not None]
            self._lettings_go = [*alive, WeakMethod(let_go) if isinstance(let_go, MethodType) else lambda: let_go]

    def keep(self, inherited: object) -> None:
        """Keep what was inherited for as long as this process lives: its end would be the end of the parent's, too."""
        self._kept.append(inherited)

    def before(self) -> None:
        """Wait until nothing is in use. A thread that never ends its use does not hold up a fork for ever."""
        until = time.monotonic() + LONGEST_WAIT_S
        self._taken = [self._adding] if self._adding.acquire(timeout=LONGEST_WAIT_S) else []
        for one in list(self._uses):
            if one.acquire(timeout=max(0.0, until - time.monotonic())):
                self._taken.append(one)

    def after(self) -> None:
        taken, self._taken = self._taken, []
        for lock in taken:
            lock.release()

    def after_in_child(self) -> None:
        self.generation += 1
        self.lock, self._adding = threading.Lock(), threading.Lock()
        self.after()
        for one in self._lettings_go:
            let_go = one()
            if let_go is not None:
                let_go()


def opened_before_fork(store: str) -> StoreUnavailableError:
    """The refusal of a store, or of its client, in a fork of the process that opened it."""
    problem = "it was opened before this process was forked, and belongs to the parent"
    way_out = "open it again in the child, with connect or open_store; a client of connect_sync does that by itself"
    return StoreUnavailableError(store, problem, way_out)


FORKS = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=FORKS.before, after_in_parent=FORKS.after, after_in_child=FORKS.after_in_child)
