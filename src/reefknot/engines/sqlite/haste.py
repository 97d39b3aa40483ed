"""
The interpreter's lock changes hands sooner while a writer has something to write.

A thread that comes back from the disk needs the interpreter's lock again. It insists on it only after it has waited for
the switch interval, 5 ms, without seeing the lock free; a busy loop frees it at every turn, takes it back at once, and
so puts the question off again and again: waits of 100 ms and more were seen. So the interval is short while somebody
writes. It is the whole process's: it is put back when the last writer rests, unless somebody else has set another one
meanwhile, and one that is short already is left alone.
"""

import os
import sys
import threading
from math import isclose

SHORT = 0.00002
"""Seconds. Less than one turn of a busy loop, also with the 50 µs by which Linux lets a short wait last longer."""


class Haste:
    """Who is in a hurry. One for the process; several threads may say so at once."""

    __slots__ = ("_before", "_lock", "_who")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._who: set[object] = set()
        self._before: float | None = None

    def begin(self, who: object) -> None:
        """Until `who` ends it. Saying so twice is saying so once."""
        with self._lock:
            self._who.add(who)
            if self._before is None:
                interval = sys.getswitchinterval()
                if interval > SHORT:
                    self._before = interval
                    sys.setswitchinterval(SHORT)

    def end(self, who: object) -> None:
        with self._lock:
            self._who.discard(who)
            if not self._who:
                self._restore()

    def forget(self) -> None:
        """In a child process: the threads that were in a hurry are not in it."""
        self._lock = threading.Lock()
        self._who.clear()
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None and isclose(sys.getswitchinterval(), SHORT, rel_tol=0.02):  # it is kept in whole µs
            sys.setswitchinterval(before)


HASTE = Haste()
os.register_at_fork(after_in_child=HASTE.forget)
