"""The executable itself: start-up cost, exit codes, closed and full streams, encodings and terminals."""

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.console.cli.audit_events import attempt, change, entry, in_store

EXECUTABLE = Path(sys.executable).with_name("reefknot")


def python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", f"import sys; from reefknot.console.cli import main; {program}"]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--version"], ("cyclopts", "pydantic", "rich", "yaml", "msgspec", "asyncio")),
        (["policy", "explain", "block:http", "--status", "429", "--json"], ("rich.", "pydantic", "yaml", "asyncio")),
    ],
    ids=["version", "an answer from the built-in book"],
)
def test_a_command_loads_only_what_it_needs(tmp_path: Path, words: list[str], unneeded: tuple[str, ...]) -> None:
    found = f"[name for name in sys.modules if name.startswith({unneeded})]"
    assert python(f"main({words}); print({found}, file=sys.stderr)", tmp_path).stderr == "[]\n"


@pytest.mark.parametrize(("words", "loaded"), [("job list", False), ("quarantine list", True)])
def test_a_look_at_jobs_does_not_load_what_checks_a_configuration(tmp_path: Path, words: str, loaded: bool) -> None:
    """The second one is the control."""
    in_store(tmp_path / "state.db", lambda store: store.audit.append([entry(attempt(1))]))
    (tmp_path / "reefknot.yaml").write_text("engine: sqlite:state.db\n")
    found = "'reefknot.policy.check' in sys.modules, 'pydantic' in sys.modules"
    done = python(f"code = main({words.split()}); print(code, {found}, file=sys.stderr)", tmp_path)
    assert done.stderr.splitlines()[-1] == f"0 {loaded} False"


STEPS = """
import sys
import reefknot

@reefknot.block("own.loaded")
async def loaded(inputs, context):
    return {"loaded": [name for name in ("httpcore2", "httpx2") if name in sys.modules]}
"""


def shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which `reefknot` is the executable."""
    words = ["bash", "-c", re.sub(r"\breefknot\b", str(EXECUTABLE), line)]
    env = {**os.environ, "HOME": str(cwd), **environment}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_without_a_request_does_not_load_the_http_library(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "work.jsonl").write_text('{"assignment_id": "a", "request_id": "r", "job": {"type": "own.loaded"}}')
    done = shell("reefknot run work.jsonl --module steps --results out.jsonl", tmp_path)
    assert json.loads((tmp_path / "out.jsonl").read_text())["output"] == {"loaded": []}, done.stderr


PROGRAMS = [[str(EXECUTABLE)], [str(EXECUTABLE.with_name("rk"))], [sys.executable, "-m", "reefknot"]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_executable_answers_also_where_a_character_has_to_be_an_escape(tmp_path: Path, program: list[str]) -> None:
    words = [*program, "policy", "schedule", "block:http"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=True)
    assert "4 attempts (1 + 3 retries)" in done.stdout


@pytest.mark.parametrize("command", ["--version", "--help", "policy list", "config schema --json"])
@pytest.mark.parametrize("errors", ["", "2>/dev/full"])
def test_an_output_that_cannot_be_written_is_74_for_every_command(tmp_path: Path, command: str, errors: str) -> None:
    done = shell(f"reefknot {command} >/dev/full {errors}", tmp_path)
    told = "" if errors else "reefknot: stdout: no space left on device\n"
    assert (done.returncode, done.stderr) == (74, told)


def tampered(path: Path) -> Path:
    """A store in which every event was changed; `audit verify` prints more than a pipe's buffer holds."""
    in_store(path, lambda store: store.audit.append([entry(attempt(number)) for number in range(300)]))
    change(path, "UPDATE audit SET body = replace(body, 'it broke', 'it never broke')")
    return path


UNGUARDED = "import sys; from reefknot.console.cli.app import run; sys.exit(run(sys.argv[1:]))"


@pytest.mark.parametrize("words", ["audit verify", "audit verify --json", "store check", "config schema"])
def test_a_reader_that_goes_away_does_not_change_the_exit_code(tmp_path: Path, words: str) -> None:
    """`audit verify | head -1`, by a reader that is gone before the first line, and by `head` itself."""
    tampered(tmp_path / ".reefknot" / "state.db")
    for reader in ("true", "head -1", "head -c 1"):
        done = shell(f"reefknot {words} | {reader} >/dev/null; exit ${{PIPESTATUS[0]}}", tmp_path)
        assert done.returncode == (0 if words == "config schema" else 65), (reader, done.stderr)
        assert not re.search("Traceback|Broken", done.stderr)


def test_without_the_guard_of_stdout_the_exit_code_is_lost(tmp_path: Path) -> None:
    """The control: the same command over a stdout that raises when its reader is gone."""
    tampered(tmp_path / ".reefknot" / "state.db")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        words = [sys.executable, "-c", UNGUARDED, "store", "check"]
        done = subprocess.run(words, cwd=tmp_path, stdout=stdout, stderr=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_messages_are_written_at_once(tmp_path: Path, unbuffered: str) -> None:
    """Whoever reads a pipe or a file sees that a system is up before it ends."""
    process = subprocess.Popen(
        [str(EXECUTABLE), "up", "--engine", "memory:"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        ready, _, _ = select.select([process.stderr], [], [], 60)
        assert ready
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_following_ends_when_nobody_reads(tmp_path: Path) -> None:
    """`audit tail --follow | head -1` ends with the next event after `head` has."""
    path = tmp_path / "state.db"
    in_store(path, lambda store: store.audit.append([entry(attempt(1))]))
    following = subprocess.Popen(
        [str(EXECUTABLE), "audit", "tail", "--follow", "--engine", f"sqlite:{path}"], stdout=subprocess.PIPE
    )
    assert following.stdout is not None
    assert following.stdout.readline()
    following.stdout.close()
    in_store(path, lambda store: store.audit.append([entry(attempt(2))]))
    assert following.wait(timeout=60) == 0


@pytest.mark.parametrize("command", ["submit -", "run -", "run - --results out.jsonl"])
@pytest.mark.parametrize("stdin", ["<&-", "0>written"])
def test_a_closed_stdin_is_a_usage_error_and_an_empty_one_is_not(tmp_path: Path, command: str, stdin: str) -> None:
    """The second is the control: nothing to read is not the same as nothing to read from."""
    done = shell(f"reefknot {command} {stdin}", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("reefknot: -: stdin is closed; accepted: one assignment per line, on stdin")
    assert not (tmp_path / ".reefknot").exists(), "nothing was started"
    if command == "submit -":
        empty = shell("reefknot submit - --json </dev/null", tmp_path)
        assert (empty.returncode, '"handed_in": []' in empty.stdout) == (0, True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("policy list >&-", 0),
        ("--version >&-", 0),
        ("policy list >&- 2>&-", 0),
        ("policy show connector:x 2>&-", 2),
        ("policy show connector:x 2>/dev/full", 2),
        ("config check gone.yaml >&- 2>&-", 78),
    ],
)
def test_closed_streams_change_no_exit_code(tmp_path: Path, line: str, code: int) -> None:
    done = shell(f"reefknot {line}", tmp_path)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False)
