"""What an import costs a program that starts, each time in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from bench.measure import Contestant, Effort, Timings, measure
from bench.table import MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds, AtMostTimes

OURS = "from reefknot import retry"
CLIENT = "from reefknot import connect"
TENACITY = "import tenacity"
STATEMENTS = (
    "pass",
    OURS,
    CLIENT,
    "import backoff",
    TENACITY,
    "import pyresilience",
    "import stamina",
    "import asyncio",
)
NAMES = {"pass": "empty"}

_TIMED = """
from time import perf_counter
fails = iter((True, False, True, False)).__next__
def work():
    if fails():
        raise ConnectionError("connection refused")
{decorate}
def taken():
    began = perf_counter()
    work()
    return perf_counter() - began
print(*(taken() for _ in range(2)))
"""
DECORATE_OURS = """
from reefknot import retry
work = retry(on=ConnectionError, attempts=2, base_delay=0)(work)
"""
DECORATE_TENACITY = """
import tenacity
work = tenacity.retry(stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_none())(work)
"""


def starting(name: str, statement: str) -> Contestant:
    """From starting the interpreter to its end."""

    def batch(times: int) -> float:
        began = perf_counter()
        for _ in range(times):
            _python(statement)
        return perf_counter() - began

    return Contestant(name, batch)


def failing_first(name: str, decorate: str) -> Contestant:
    """The first call of a process that fails once, as that process measured it."""
    program = _TIMED.format(decorate=decorate)
    return Contestant(name, lambda times: sum(float(_python(program).split()[0]) for _ in range(times)))


def _python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the log line of the first retry, which is made all the same
        text=True,
        check=True,
    )
    return done.stdout


def first_failure(timings: Timings, first: Timings) -> str:
    """The line that says what the light import puts off."""
    ours, theirs = first["reefknot"].best * 1e3, first["tenacity"].best * 1e3
    empty = timings["empty"].best
    our_sum = (timings[OURS].best - empty) * 1e3 + ours
    their_sum = (timings[TENACITY].best - empty) * 1e3 + theirs
    return (
        f"The first failure in a process takes {ours:.1f} ms (tenacity: {theirs:.1f} ms): reefknot loads its failing "
        f"path then, and the first log line loads logging. Import and first failure together, without the interpreter: "
        f"reefknot {our_sum:.1f} ms, tenacity {their_sum:.1f} ms. A program that has loaded re, typing and "
        f"logging already pays less for either."
    )


def run(effort: Effort) -> Run:
    programs = [starting(NAMES.get(statement, statement), statement) for statement in STATEMENTS]
    timings = measure(programs, rounds=effort.process_rounds, batch_seconds=None)
    failing = [failing_first("reefknot", DECORATE_OURS), failing_first("tenacity", DECORATE_TENACITY)]
    first = measure(failing, rounds=effort.process_rounds, batch_seconds=None)
    return Run(timings, (first_failure(timings, first),))


TABLES = (
    Table(
        name="import",
        title="Importing, in a fresh interpreter",
        about="The whole life of an interpreter that does one import, with warm byte code and a warm file cache.",
        unit=MILLISECONDS,
        reference=TENACITY,
        targets={OURS: (AtMostTimes(1.0, TENACITY),), CLIENT: (AtMostSeconds(0.12),)},
        packages=("reefknot", "tenacity", "stamina", "backoff", "pyresilience"),
        run=run,
    ),
)
