"""
Virtual time in which files, threads and loopback servers take part: a month passes in minutes.

Virtual time alone does not wait for what is real. This loop does: before its time jumps, every call in a thread has
ended, and no open connection has had anything to read for a moment. Whatever a whole system does once a second to show
that it lives, it does here once in five minutes, because nothing that a month is about depends on it.
"""

import os
import selectors
import stat
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, TypeVar
from unittest.mock import patch

from msgspec import structs

from reefknot.app import activity, alert_watch, commands
from reefknot.app import system as running
from reefknot.clock import using_clock
from reefknot.console.dashboard import live as live_pages
from reefknot.ingest import orchestrator
from reefknot.policy.settings import Settings
from reefknot.queue import presence
from reefknot.queue.model import routing
from reefknot.queue.router import dispatch
from reefknot.queue.router import service as router_service
from reefknot.queue.worker import pool
from reefknot.queue.worker.settings import WorkerSettings
from reefknot.runtime.clocks import EPOCH, LoopClock, VirtualLoop, run_in_virtual_loop
from reefknot.stores.sqlite import reads, transport

T = TypeVar("T")

PULSE_S = 300.0
QUIET_S = 0.03
"""Real seconds without a byte on any connection after which a pending timer may fire."""


class MonthLoop(VirtualLoop):
    """A virtual loop whose time stands still while a thread works or a server on this machine answers."""

    def __init__(self) -> None:
        super().__init__()
        self._jump = self._jumping.select
        self._jumping.select = self._select  # type: ignore[method-assign]

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0 and not self.is_held and self._is_connected() and (ready := self._really(QUIET_S)):
            return ready
        return self._jump(timeout)

    def _really(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        return selectors.DefaultSelector.select(self._jumping, seconds)

    def _is_connected(self) -> bool:
        """Whether a socket is open, apart from the pair by which threads wake the loop."""
        own = self._ssock.fileno()  # type: ignore[attr-defined]
        return any(
            key.fd != own and stat.S_ISSOCK(os.fstat(key.fd).st_mode) for key in self._jumping.get_map().values()
        )


@contextmanager
def slow_pulse() -> Iterator[None]:
    """A scope in which systems report, listen and look around once in five minutes instead of once a second."""
    pages = ("REFRESH_S", "SHORTEST_REST_S", "LONGEST_REST_S", "PING_S")
    changes: list[tuple[Any, dict[str, Any]]] = [
        (running, {"STATUS_EVERY_S": PULSE_S, "worker_settings": _slow(running.worker_settings)}),
        (commands, {"CONTROL_S": PULSE_S}),
        (
            presence,
            {"STATUS_KEPT_S": 5 * PULSE_S, "STATUS_EVERY_S": PULSE_S, "LOOK_S": PULSE_S, "LOOK_FOR_GONE_S": PULSE_S},
        ),
        (activity, {"LOOK_EVERY_S": PULSE_S / 2, "WRITE_EVERY_S": PULSE_S}),
        (alert_watch, {"LOOK_EVERY_S": PULSE_S}),
        (routing, {"HEARTBEAT_S": PULSE_S, "PROBE_EVERY_S": PULSE_S}),
        (transport, {"SEEN_EVERY_S": PULSE_S}),
        (dispatch, {"FLEET_EVERY_S": 5 * PULSE_S}),
        (pool, {"IDLE_S": PULSE_S}),
        (orchestrator, {"IDLE_S": PULSE_S, "PERIOD_S": PULSE_S / 2}),
        (router_service, dict.fromkeys(("CHECK_S", "CALLERS_S", "CLAIM_S", "RECALL_S", "CONTROL_S"), PULSE_S)),
        (live_pages, dict.fromkeys(pages, 5 * PULSE_S)),
        (reads, dict.fromkeys(("POLL_S", "RARE_POLL_S", "BUSY_POLL_S", "FAST_POLL_S"), PULSE_S)),
    ]
    with ExitStack() as stack:
        for module, values in changes:
            stack.enter_context(patch.multiple(module, **values))
        yield


def _slow(settings_of: Callable[[Settings], WorkerSettings]) -> Callable[[Settings], WorkerSettings]:
    return lambda settings: structs.replace(settings_of(settings), heartbeat=PULSE_S)


def live(main: Coroutine[Any, Any, T], *, since: datetime) -> T:
    """The result of a coroutine that runs in virtual time, which begins at `since`."""
    loop = MonthLoop()
    loop.advance(since.timestamp() - EPOCH)
    threading.current_thread().name = "month"
    with slow_pulse(), using_clock(LoopClock(loop)):
        return run_in_virtual_loop(main, loop)
