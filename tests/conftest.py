"""
Fixtures that tests of every folder may use, signals as a terminal has them, and a collection that hides its tests from
the garbage collector.

Eight thousand tests and what they import are a quarter of a million objects that live until the end. Walking them takes
a quarter of a second for every `gc.collect()` of a test, and for every full collection in between. While they are made
none of them is garbage, so that the collector rests.

Hypothesis loads Trio and asks the collector who holds its random numbers: both have to be there before they are hidden.

Processes that share the tests take whole files, so that what a file prepares is made once; the browser's files are one
share, so that one Chromium and one system are enough for them. Long files come first: the short ones even out the end.

A test that is a coroutine runs in virtual time, or in real time with the marker `real_time` (`tests/stories.py`).

The name of a test is sent to and from each process that runs tests, and kept in all of them: a parameter of ten million
characters is named by its beginning and its length.

A shell ignores interrupts for what it runs in the background, and `nohup` hang-ups. Commands that a test starts would
inherit that, and never end.
"""

import gc
import inspect
import os
import signal

import hypothesis  # noqa: F401
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.nats_servers import nats_cluster, nats_server, own_nats_server
from tests.stories import run_story

__all__ = ["nats_cluster", "nats_server", "own_nats_server"]

LONGEST_NAME = 2000
BROWSER = "tests/browser/"
SLOW = ("docs", "newcomer", "faults", "acceptance", "month", "simulation", "security", "integration")
LONG_FIRST = (BROWSER, *(f"tests/{folder}/" for folder in SLOW), "")

os.environ["REEFKNOT_LOG_FORMAT"] = "text"  # tests read what services say; those of the forms ask for one by name


def pytest_configure() -> None:
    gc.disable()
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


class WholeFiles(LoadFileScheduling):  # type: ignore[misc]  # untyped there
    """Gives each process a file at a time, in their order; the files of the browser are one."""

    def _split_scope(self, nodeid: str) -> str:
        return BROWSER if nodeid.startswith(BROWSER) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return WholeFiles(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next(rank for rank, path in enumerate(LONG_FIRST) if item.nodeid.startswith(path)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    is_real_time = pyfuncitem.get_closest_marker("real_time") is not None
    run_story(pyfuncitem.obj, pyfuncitem.funcargs, is_real_time=is_real_time)
    return True


def pytest_make_parametrize_id(val: object) -> str | None:
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_NAME:
        return None
    return f"{val[:20]!a} of {len(val)}"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
