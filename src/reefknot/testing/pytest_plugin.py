"""
Pytest fixtures, available as soon as reefknot is installed: `virtual_time`, `no_wait`, `no_retry`, `reefknot_system`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reefknot.runtime.clocks import SkippingClock, VirtualClock
    from reefknot.testing import SyncVirtualSystem


@pytest.fixture(name="virtual_time")
def _virtual_time() -> "Iterator[VirtualClock]":
    """Virtual time for the test; the value is the clock."""
    from reefknot.testing import virtual_time

    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="no_wait")
def _no_wait() -> "Iterator[SkippingClock]":
    """Retries without waiting for the test; the value is the clock that recorded the waits."""
    from reefknot.testing import no_wait

    with no_wait() as clock:
        yield clock


@pytest.fixture(name="no_retry")
def _no_retry() -> "Iterator[None]":
    """Calls with one attempt for the test."""
    from reefknot.testing import no_retry

    with no_retry():
        yield


@pytest.fixture(name="reefknot_system")
def _reefknot_system() -> "Iterator[Callable[..., SyncVirtualSystem]]":
    """Systems in virtual time, ended with the test: `reefknot_system(modules=["steps"])`, as `system_sync`."""
    from contextlib import ExitStack

    from reefknot.testing import system_sync

    with ExitStack() as opened:
        yield lambda *args, **kwargs: opened.enter_context(system_sync(*args, **kwargs))
