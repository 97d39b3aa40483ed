"""
The share of mutants that the tests notice, from the figures that mutmut leaves behind.

A mutant that hangs or crashes was noticed. One that no test reaches was not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

STATS = Path(__file__).resolve().parent.parent / "mutants" / "mutmut-cicd-stats.json"
TARGET = 0.90


def score(stats: Mapping[str, int]) -> tuple[int, int]:
    """(noticed, all that count)."""
    noticed = stats["killed"] + stats["timeout"] + stats["segfault"]
    missed = stats["survived"] + stats["no_tests"] + stats["suspicious"]
    return noticed, noticed + missed


def main() -> int:
    stats = json.loads(STATS.read_text(encoding="utf-8"))
    noticed, counted = score(stats)
    if counted == 0:
        print("no mutant was run")
        return 1
    share = noticed / counted
    print(f"{noticed} of {counted} mutants noticed: {share:.1%} (at least {TARGET:.0%} wanted)")
    if unseen := stats["total"] - stats["skipped"] - counted:
        print(f"{unseen} more were made and not run: this is the score of a part")
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
