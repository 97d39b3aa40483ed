"""
Fixtures that tests of every folder may use, signals as a terminal has them, and a collection that hides its tests from
the garbage collector.

Eight thousand tests and what they import are a quarter of a million objects that live until the end. Walking them takes
a quarter of a second for every `gc.collect()` of a test, and for every full collection in between. While they are made
none of them is garbage, so that the collector rests.

Hypothesis loads Trio and asks the collector who holds its random numbers: both have to be there before they are hidden.

The name of a test is sent to and from each process that runs tests, and kept in all of them: a parameter of ten million
characters is named by its beginning and its length.

A shell ignores interrupts for what it runs in the background, and `nohup` hang-ups. Commands that a test starts would
inherit that, and never end.
"""

from __future__ import annotations

import gc
import os
import signal

import hypothesis  # noqa: F401

from tests.nats_servers import nats_cluster, nats_server, own_nats_server

__all__ = ["nats_cluster", "nats_server", "own_nats_server"]

LONGEST_NAME = 2000

os.environ["REEFKNOT_LOG_FORMAT"] = "text"  # tests read what services say; those of the forms ask for one by name


def pytest_configure() -> None:
    gc.disable()
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_make_parametrize_id(val: object) -> str | None:
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_NAME:
        return None
    return f"{val[:20]!a} of {len(val)}"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
