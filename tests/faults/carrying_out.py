"""Hands plans to the programs of this folder, and their evidence back."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST = 1800.0
IN_MEMORY = Path("/dev/shm")
"""What a death leaves behind is in memory anyway; only power cuts tell a disk from it, and those are replayed."""

Plan = dict[str, Any]
Life = dict[str, Any]


def plan(scenario: str, mode: str, at: int | None, *, torn: bool = False, flaw: str = "", after_us: int = 0) -> Plan:
    """One fault: where, in which mode, and which wrong way is tried if any."""
    return {"scenario": scenario, "mode": mode, "at": at, "torn": torn, "flaw": flaw, "after_us": after_us}


def carried_out(folder: Path, plans: list[Plan], *, program: str = "tests.faults.dying") -> list[Life]:
    """All of them, shared among as many processes as there are processors."""
    number = min(len(plans), os.cpu_count() or 1)

    def share(which: int) -> list[Life]:
        lines = "".join(json.dumps(one) + "\n" for one in plans[which::number])
        folder.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else folder) as place:
            command = [sys.executable, "-m", program, place]
            done = subprocess.run(
                command, input=lines, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(number) as pool:
        return [one for lives in pool.map(share, range(number)) for one in lives]
