"""
The report of the proof of concept, written from the tests that show it.

Runs the tests POC-001 … POC-008 and puts down what they measured and whether they passed. It brings no number and no
verdict of its own. `poc_report.py` writes the page; `poc_report.py --check` only compares, and fails when the page on
disk says something else. Either fails when a row of the matrix does not hold or is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/acceptance/test_spec2_poc.py"
PAGE = ROOT / "docs" / "poc-report.md"
IDS = tuple(f"POC-{number:03}" for number in range(1, 9))
TIMEOUT_S = 60

HEAD = f"""\
# Proof of concept: retry v2

<!--
Written by tools/poc_report.py from the results of {TESTS}. Change those, not this page.
-->

The test matrix of the proof of concept, run through the engine that everything else uses. Time is virtual and jitter is
off, so waits are exact. The work is a step with `retry_count=3`: one execution and at most three retries.

*Enabled* is the CP2 policy: 100 ms, doubling, at most 30 s, and the table of error codes decides what is retried.
*Disabled* is the CP1 baseline: 100 ms more each time, every failure retried. It is a preset of the same engine, not a
second loop. How the flag is read (environment, then file, else off) is the policy book's matter and is tested there.

| id | test | flag | error type | expected | verdict |
| --- | --- | --- | --- | --- | --- |
"""
RUNS = """
## Measured

Every run behind a verdict, in the order it was made.

| id | flag | the step fails with | on its first | waits | executions | end |
| --- | --- | --- | --- | --- | --- | --- |
"""


class ReportError(Exception):
    """The test run does not hold what the report needs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One piece of work that a test ran to its end."""

    flag: str
    error: str
    fails: int
    waits_ms: tuple[int, ...]
    executions: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the matrix, with what its test measured."""

    poc: str
    name: str
    flag: str
    error: str
    expected: str
    runs: tuple[Run, ...]
    holds: bool


def run_tests() -> str:
    """The results as JUnit XML. Failing tests are results too; a run that did not happen is an error."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={results}",
                "-k",
                "poc",
                TESTS,
            ],
            cwd=ROOT,
            # Of no use to these tests, and three quarters of the time: whatever plugins happen to be installed.
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode not in {0, 1} or not results.exists():
            raise ReportError(f"the tests did not run:\n{done.stdout}{done.stderr}")
        return results.read_text(encoding="utf-8")


def rows(results: str) -> list[Row]:
    """The rows of the matrix, in its order; one that no test speaks for is an error."""
    found: dict[str, Row] = {}
    for case in ET.fromstring(results).iter("testcase"):  # noqa: S314 - our own test run wrote it
        row = _row(case)
        if row is None:
            continue
        if row.poc in found:
            raise ReportError(f"two tests speak for {row.poc}")
        found[row.poc] = row
    if missing := [poc for poc in IDS if poc not in found]:
        raise ReportError(f"no test speaks for {', '.join(missing)}")
    return [found[poc] for poc in IDS]


def _row(case: ET.Element) -> Row | None:
    said = [(item.get("name", ""), item.get("value", "")) for item in case.iter("property")]
    fields = dict(said)
    if "poc" not in fields:
        return None
    runs = tuple(_run(value) for name, value in said if name == "run")
    unwell = any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped"))
    return Row(
        poc=fields["poc"],
        name=fields["name"],
        flag=fields["flag"],
        error=fields["error"],
        expected=fields["expected"],
        runs=runs,
        holds=bool(runs) and not unwell,
    )


def _run(text: str) -> Run:
    data = json.loads(text)
    return Run(**(data | {"waits_ms": tuple(data["waits_ms"])}))


def page(matrix: Sequence[Row]) -> str:
    """The report as Markdown."""
    verdicts = [
        f"| {row.poc} | {row.name} | {row.flag} | `{row.error}` | {row.expected} | {_verdict(row.holds)} |"
        for row in matrix
    ]
    measured = [f"| {row.poc} | {_measured(run)} |" for row in matrix for run in row.runs]
    held = sum(row.holds for row in matrix)
    tail = f"\n{held} of {len(matrix)} rows hold.\n"
    return HEAD + "\n".join(verdicts) + "\n" + tail + RUNS + "\n".join(measured) + "\n"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**does not hold**"


def _measured(run: Run) -> str:
    waits = ", ".join(f"{wait} ms" for wait in run.waits_ms) or "none"
    times = "1 execution" if run.fails == 1 else f"{run.fails} executions"
    end = "ok" if run.ok else "error"
    return f"{run.flag} | `{run.error}` | {times} | {waits} | {run.executions} | {end}"


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: poc_report.py [--check]", file=sys.stderr)
        return 2
    matrix = rows(run_tests())
    text = page(matrix)
    if arguments:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} does not say what the tests measured; run tools/poc_report.py")
            return 1
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    broken = [row.poc for row in matrix if not row.holds]
    print(f"does not hold: {', '.join(broken)}" if broken else f"all {len(matrix)} rows hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
