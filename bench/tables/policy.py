"""The policy book: what asking costs, on the command line and in a running worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from timeit import Timer

from bench.measure import Contestant, Effort, measure
from bench.table import MICROSECONDS, MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds, AtMostTimes
from reefknot.console.cli.config import recommended
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.policy.layers import Gate
from reefknot.policy.model.book import Request
from reefknot.policy.model.defaults import builtin_book

EMPTY = "empty interpreter"
VERSION = "reefknot --version"
EXPLAIN = "policy explain, built in"
EXPLAIN_FILE = "policy explain, with a file"
EXPLAIN_TABLE = "policy explain, with a file, as a table"

JOBS, JOBS_FILE = "job list, built in", "job list, with a file"
SHOW, SHOW_FILE = "config show, built in", "config show, with a file"
TAIL, TAIL_FILE = "audit tail, built in", "audit tail, with a file"

LOOKUP = "a dictionary lookup"
CACHED = "resolve, seen before"
FIRST = "resolve, for the first time"

UNGATED = "an if on a local name"
GATED = "the gate of a worker"

_ASK = ("policy", "explain", "--target", "block:http", "--status", "429")


def command(name: str, words: tuple[str, ...], folder: Path) -> Contestant:
    """A command from its start to its end, in a folder whose configuration it finds or does not find."""
    environment = _environment(folder)

    def batch(times: int) -> float:
        began = perf_counter()
        for _ in range(times):
            subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        return perf_counter() - began

    return Contestant(name, batch)


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(folder)}


def run_cold(effort: Effort) -> Run:
    reefknot = str(Path(sys.executable).with_name("reefknot"))
    with tempfile.TemporaryDirectory() as made:
        bare, configured = Path(made, "bare"), Path(made, "configured")
        bare.mkdir()
        configured.mkdir()
        (configured / "reefknot.yaml").write_text(recommended(), encoding="utf-8")
        for folder in (bare, configured):  # a store to look at
            submit = (reefknot, "submit", "--type", "fs.delete", "--inputs", '{"path": "a.txt"}')
            subprocess.run(submit, cwd=folder, env=_environment(folder), capture_output=True, check=True)
        contestants = [
            command(EMPTY, (sys.executable, "-c", "pass"), bare),
            command(VERSION, (reefknot, "--version"), bare),
            command(EXPLAIN, (reefknot, *_ASK, "--json"), bare),
            command(EXPLAIN_FILE, (reefknot, *_ASK, "--json"), configured),
            command(EXPLAIN_TABLE, (reefknot, *_ASK), configured),
            *(
                command(name, (reefknot, *words, "--json"), folder)
                for names, words in (
                    ((JOBS, JOBS_FILE), ("job", "list")),
                    ((SHOW, SHOW_FILE), ("config", "show")),
                    ((TAIL, TAIL_FILE), ("audit", "tail")),
                )
                for name, folder in zip(names, (bare, configured), strict=True)
            ),
        ]
        return Run(measure(contestants, rounds=max(5, effort.process_rounds // 2), batch_seconds=None))


def run_resolve(effort: Effort) -> Run:
    book = builtin_book()
    failure = Failure(ErrorCode.http_error, FailureType.RATE_LIMITED, "too many requests", 429)
    request = Request(retries=2)
    names = {"book": book, "failure": failure, "request": request, "table": {"block:http": book}}
    contestants = [
        Contestant(LOOKUP, Timer("table['block:http']", globals=names).timeit),
        Contestant(CACHED, Timer("book.resolve('block:http', failure, request=request)", globals=names).timeit),
        Contestant(
            FIRST,
            Timer("book._cache.clear(); book.resolve('block:http', failure, request=request)", globals=names).timeit,
        ),
    ]
    return Run(measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds))


def run_gate(effort: Effort) -> Run:
    names: dict[str, object] = {"gate": Gate(True, "the file"), "plain": True}
    contestants = [
        Contestant(UNGATED, Timer("if plain: pass", globals=names).timeit),
        Contestant(GATED, Timer("if gate.on: pass", globals=names).timeit),
    ]
    return Run(measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds))


TABLES = (
    Table(
        name="policy-cold",
        title="Asking the policy book from a cold start",
        about=(
            "The whole life of a command, with warm byte code and a warm file cache. The file is the recommended one "
            "that `reefknot init` writes."
        ),
        unit=MILLISECONDS,
        reference=EMPTY,
        targets={
            VERSION: (AtMostSeconds(0.15),),
            EXPLAIN: (AtMostSeconds(0.4),),
            EXPLAIN_FILE: (AtMostSeconds(0.4), AtMostTimes(1.3, EXPLAIN)),
            EXPLAIN_TABLE: (AtMostSeconds(0.4),),
            JOBS_FILE: (AtMostTimes(1.3, JOBS),),
            TAIL_FILE: (AtMostTimes(1.3, TAIL),),
            SHOW_FILE: (AtMostTimes(1.3, SHOW),),
        },
        packages=("reefknot", "cyclopts", "rich"),
        run=run_cold,
    ),
    Table(
        name="policy-resolve",
        title="Resolving a policy",
        about=(
            "The policy for a target, a failure and a request. A worker asks once per failure; what was asked before "
            "is kept, because there are few kinds of failure."
        ),
        unit=MICROSECONDS,
        reference=LOOKUP,
        targets={CACHED: (AtMostSeconds(2e-6),)},
        packages=("reefknot",),
        run=run_resolve,
    ),
    Table(
        name="policy-gate",
        title="Asking whether v2 is in force",
        about="The gate is read once, into a frozen record; a worker only looks at one field of it.",
        unit=MICROSECONDS,
        reference=UNGATED,
        targets={GATED: (AtMostSeconds(0.1e-6),)},
        packages=("reefknot",),
        run=run_gate,
    ),
)
