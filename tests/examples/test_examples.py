"""Every example runs by itself, quickly, in an empty folder, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TIMEOUT_S = 30


def run_example(example: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(example)],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = run_example(example, tmp_path)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_broken_example_is_caught(tmp_path: Path) -> None:
    example = tmp_path / "broken.py"
    example.write_text("assert 1 == 2\n")

    assert run_example(example, tmp_path).returncode != 0
