"""The executable itself: start-up cost, exit codes, closed and full streams, encodings and terminals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reefknot

EXECUTABLE = Path(sys.executable).with_name("reefknot")


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(EXECUTABLE), *words],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_version_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import sys; from reefknot.cli import main; main(['--version']);"
        "print(sorted({'cyclopts', 'pydantic', 'rich', 'yaml', 'msgspec', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout.splitlines()[1] == "[]"


def test_an_answer_from_the_built_in_book_loads_neither_what_draws_nor_what_reads_files(tmp_path: Path) -> None:
    program = (
        "import sys; from reefknot.cli import main;"
        "main(['policy', 'explain', 'block:http', '--status', '429', '--json']);"
        "print(sorted(name for name in sys.modules if name.startswith(('rich.', 'pydantic', 'yaml', 'asyncio'))),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stderr == "[]\n"


STEPS = """
import sys
import reefknot

@reefknot.block("own.loaded")
async def loaded(inputs, context):
    return {"loaded": [name for name in ("httpcore2", "httpx2") if name in sys.modules]}
"""


def test_a_run_without_a_request_does_not_load_the_http_library(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "work.jsonl").write_text('{"assignment_id": "a", "request_id": "r", "job": {"type": "own.loaded"}}')
    words = ["run", "work.jsonl", "--module", "steps", "--results", "out.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "reefknot", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    assert json.loads((tmp_path / "out.jsonl").read_text())["output"] == {"loaded": []}, done.stderr


@pytest.mark.parametrize("alias", ["reefknot", "rk"])
def test_the_executable_answers(tmp_path: Path, alias: str) -> None:
    done = subprocess.run(
        [EXECUTABLE.with_name(alias), "policy", "explain", "block:http", "--status", "404", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert '"decision": "stop"' in done.stdout


def test_the_module_answers_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reefknot", "--version"], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout == f"reefknot {reefknot.__version__}\n"


def test_the_executable_ends_with_the_code_of_the_error(tmp_path: Path) -> None:
    assert run("policy", "show", "connector:imap", cwd=tmp_path).returncode == 2


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`reefknot config schema | head -1`"""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [str(EXECUTABLE), "config", "schema"],
            cwd=tmp_path,
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(write)

    assert (done.returncode, done.stderr) == (0, b"")


def test_an_output_that_cannot_hold_a_character_gets_an_escape(tmp_path: Path) -> None:
    done = run("policy", "schedule", "block:http", cwd=tmp_path, PYTHONIOENCODING="ascii")

    assert done.returncode == 0, done.stderr
    assert "4 attempts (1 + 3 retries)" in done.stdout


def test_an_output_that_is_full_is_reported_once(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(EXECUTABLE), "config", "schema"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )

    assert (done.returncode, done.stderr) == (1, b"reefknot: no space left on device\n")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("policy list >&-", 0),
        ("policy list >&- 2>&-", 0),
        ("policy show connector:x 2>&-", 2),
        ("policy show connector:x 2>/dev/full", 2),
        ("config check gone.yaml >&- 2>&-", 78),
    ],
)
def test_closed_streams_change_no_exit_code(tmp_path: Path, line: str, code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{EXECUTABLE} {line}"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )

    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def on_a_terminal(cwd: Path, **environment: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [str(EXECUTABLE), "policy", "templates"],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(cwd), "TERM": "xterm-256color", **environment},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0
        return os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


COLOUR = re.compile(r"\x1b\[(?:\d+;)*3[0-9](?:;\d+)*m")


def test_a_terminal_gets_colours_unless_it_wants_none(tmp_path: Path) -> None:
    assert COLOUR.search(on_a_terminal(tmp_path))
    assert not COLOUR.search(on_a_terminal(tmp_path, NO_COLOR="1"))
