"""
`LoopWatch`: a thread that names the step which blocks the event loop, and holds the work of its workers meanwhile.

An `async def` that computes or waits without `await` stops everything else in its loop: other steps, heartbeats, and
the renewal of leases. Without this thread its work would be given to another worker, and its effect would happen twice.
The thread knows that a loop is blocked because the loop does not answer; it asks only while a step runs. It renews the
leases of the idempotency keys that steps in the loop hold as well.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Self

from reefknot.idempotency.once import extend_keys
from reefknot.queue.port.work_queue import Held, Leases
from reefknot.queue.worker.records import RunningStep
from reefknot.queue.worker.service import Worker
from reefknot.runtime.log import LogBudget, error_text, logger, printable

LOOK_S = 0.4
BLOCKED_S = 0.8
"""Seconds without an answer after which a loop counts as blocked. It is reported at the next look."""
RENEWALS = 3
"""Renewals per lease: two in a row may fail without losing the claim."""
MOST_NAMED = 3


class LoopWatch:
    """The watch over the event loop that enters its block, and over the workers in it. It ends with the block."""

    def __init__(self, workers: Sequence[Worker], leases: Leases, *, others: Callable[[], list[Held]] = list) -> None:
        """`others` returns claims of this loop that are not the workers' and are renewed like theirs."""
        self._workers = workers
        self._leases = leases
        self._others = others
        self._stopped = threading.Event()
        self._lines = LogBudget()
        self._asked_at: float | None = None
        """When the loop was asked; None when it has answered."""
        self._is_reported = False
        self._hold_at: dict[str, float] = {}
        """By worker: when its leases are extended next."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        threading.Thread(target=self._run, name="reefknot-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                self.look(monotonic())
            except RuntimeError:  # the loop is closed
                return
            except Exception as error:
                logger().error("leases of work in a blocked event loop were not renewed (%s)", error_text(error))

    def look(self, now: float) -> None:
        """Ask the loop; if it has not answered the last question, report that and hold its work."""
        if self._asked_at is None:
            if any(worker.steps.running for worker in self._workers):
                self._asked_at, self._is_reported = now, False
                self._hold_at.clear()
                self._loop.call_soon_threadsafe(self._answer)
            return
        blocked = now - self._asked_at
        if blocked < BLOCKED_S:
            return
        if not self._is_reported:
            self._is_reported = True
            self._report(blocked)
        self._hold(now)

    def _answer(self) -> None:
        self._asked_at = None

    def _hold(self, now: float) -> None:
        for worker in self._workers:
            lease = worker.settings.lease
            if now < self._hold_at.get(worker.worker_id, now):
                continue
            if held := worker.held():
                self._leases.extend([*held, *self._others()], lease=lease)
            self._hold_at[worker.worker_id] = now + lease / RENEWALS
        if any(worker.is_in_time() for worker in self._workers):
            extend_keys(self._loop, now)

    def _report(self, blocked: float) -> None:
        if self._lines.take(monotonic()) is None:
            return
        steps = [one.assignment for one in self._blocking()]
        names = ", ".join(f"{one.job.type} ({printable(one.assignment_id, most=100)})" for one in steps)
        logger().warning(
            "the event loop is blocked for %.1f s by %s, at %s; nothing else runs in this process meanwhile. A step "
            "that computes or waits without await belongs in a plain function: def, not async def",
            blocked,
            names or "a step",
            _place(sys._current_frames().get(self._watched)),
        )

    def _blocking(self) -> list[RunningStep]:
        """The step whose task the loop runs now; the first few of all that run, if it is a task of a step's own."""
        running = [step for worker in self._workers for step in list(worker.steps.running.values())]
        with suppress(RuntimeError):
            task = asyncio.current_task(self._loop)
            if found := [step for step in running if step.task is task]:
                return found
        return running[:MOST_NAMED]


def _place(frame: FrameType | None) -> str:
    """The innermost line outside of the installed libraries, without any value of its frame."""
    libraries = (sys.prefix, sys.base_prefix)
    inner = frame
    while inner is not None and inner.f_code.co_filename.startswith(libraries):
        inner = inner.f_back
    found = inner or frame
    return "an unknown place" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
