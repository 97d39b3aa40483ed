"""The show: a Ctrl-C that Python drops still ends it."""

import signal
import weakref

import pytest

from reefknot.demo.show import CtrlC


class Thing:
    """Something that can be collected."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_raised_at_the_next_check() -> None:
    """It comes inside a callback of the garbage collector, where no exception goes any further."""
    with CtrlC() as ctrl_c:
        ctrl_c.check()
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        assert reference() is None
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
