"""Hands plans to the programs of this folder, and their evidence back."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST = 1800.0

Plan = dict[str, Any]
Life = dict[str, Any]


def plan(scenario: str, mode: str, at: int | None, *, torn: bool = False, flaw: str = "", after_us: int = 0) -> Plan:
    """One fault: where, in which mode, and which wrong way is tried if any."""
    return {"scenario": scenario, "mode": mode, "at": at, "torn": torn, "flaw": flaw, "after_us": after_us}


def carried_out(folder: Path, plans: list[Plan], *, program: str = "tests.faults.dying") -> list[Life]:
    """All of them, shared among as many processes as there are processors."""
    number = min(len(plans), os.cpu_count() or 1)

    def share(which: int) -> list[Life]:
        place = folder / f"{which}"
        place.mkdir(parents=True)
        lines = "".join(json.dumps(one) + "\n" for one in plans[which::number])
        command = [sys.executable, "-m", program, str(place)]
        done = subprocess.run(
            command, input=lines, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(number) as pool:
        return [one for lives in pool.map(share, range(number)) for one in lives]
