"""Questions of operators about work and quarantine, over a store with a hundred thousand jobs and a million events."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from bench.measure import FULL, Effort, Timing
from bench.operators import EVENTS, ITEMS, Percentiles, filled, percentiles, questions
from bench.table import MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds, Target
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore

LONGEST_P95_S = 0.1
LONGEST_SCAN_S = 0.3
"""The longest p95 of what reads the whole quarantine."""
SCANS = ("quarantine groups", "requeue of all, as a dry run")
TIMES = 100
FEW = (10_000, 100_000, 20)
"""Jobs, events and repetitions of a quick look."""


async def _asked(folder: Path, items: int, events: int, times: int) -> dict[str, Percentiles]:
    path = await filled(folder, items=items, events=events)
    store = await SqliteStore(path, SystemClock()).start()
    operator = Operator(store, Redactor(), "bench")
    try:
        asked = {name: partial(ask, operator) for name, ask in questions(items).items()}
        return {name: await percentiles(ask, times) for name, ask in asked.items()}
    finally:
        await store.close()


def run(effort: Effort) -> Run:
    items, events, times = (ITEMS, EVENTS, TIMES) if effort is FULL else FEW
    timings: dict[str, Timing] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, found in asyncio.run(_asked(Path(folder), items, events, times)).items():
            timings |= {f"{name}, p50": Timing(found.p50, found.p50), f"{name}, p95": Timing(found.p95, found.p95)}
            targets[f"{name}, p95"] = (AtMostSeconds(LONGEST_SCAN_S if name in SCANS else LONGEST_P95_S),)
    return Run(timings, (f"{items:,} jobs, {events:,} events.",), targets=targets, columns=("p50", "p95"))


TABLES = (
    Table(
        name="operators",
        title="Questions of operators",
        about=(
            "What the command line, the HTTP API and the pages ask of a store in a file: a page of 50 jobs by each "
            "filter, one job's story, the quarantine. `rare` is what ten of the oldest jobs have, the longest way for "
            "a filter. A page that has read its share of jobs is shown short, and the next one goes on."
        ),
        unit=MILLISECONDS,
        reference="",
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
