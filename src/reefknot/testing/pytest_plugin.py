"""Pytest fixtures, available as soon as reefknot is installed: `virtual_time`, `no_wait`, `no_retry`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reefknot.engines.clocks import SkippingClock, VirtualClock


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
