"""Fixtures for pytest, there as soon as reefknot is installed: `virtual_time`, `no_wait`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reefknot.engines.clocks import SkippingClock, VirtualClock


@pytest.fixture(name="virtual_time")
def _virtual_time() -> "Iterator[VirtualClock]":
    """The test runs in virtual time; the fixture is the clock."""
    from reefknot.testing import virtual_time

    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="no_wait")
def _no_wait() -> "Iterator[SkippingClock]":
    """Retries do not wait; the fixture is the clock that counted the waits."""
    from reefknot.testing import no_wait

    with no_wait() as clock:
        yield clock
