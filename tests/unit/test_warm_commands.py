"""A warm command is a process like any other: whatever a test may look at is as after a cold start."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests.warm_commands import WarmCommand, run_warm

SHOWN = """\
import os, signal, sys, warnings
print(os.getcwd(), sys.argv, sys.path, sys.flags.utf8_mode, os.environ.get("MARK"), __name__)
print(warnings.filters, [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)])
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.fileno(), stream.isatty(), stream.line_buffering, stream.encoding, stream.errors, stream.mode)
print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
sys.exit("ended")
"""
STREAMS: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONWARNINGS": "error", "PYTHONUTF8": "1", "MARK": "seen"}


def cold(*args: str, cwd: Path, env: dict[str, str]) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", *args], cwd=cwd, env=env, text=True, check=False, **STREAMS)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [("--version",), ("job", "list"), ("nonsense",), ("config", "show", "--json")])
def test_a_command_answers_as_after_a_cold_start(
    tmp_path: Path, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    done = run_warm(*words, cwd=tmp_path, env=environment)

    assert (done.returncode, done.stdout, done.stderr) == cold("reefknot", *words, cwd=tmp_path, env=environment)


def test_python_is_set_up_as_after_a_cold_start(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    with WarmCommand(["shown", "word"], cwd=tmp_path, env=environment, text=True, **STREAMS) as process:
        out, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert (process.returncode, out, err) == cold("shown", "word", cwd=tmp_path, env=environment)


def test_one_that_is_killed_is_seen_to_be(tmp_path: Path, environment: dict[str, str]) -> None:
    """The control: it lives until then."""
    process = WarmCommand(["reefknot", "up"], cwd=tmp_path, env=environment, text=True, **STREAMS)
    assert process.stderr is not None
    process.stderr.readline()
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_in_a_session_of_its_own_a_terminal_is_its_own(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "owner.py").write_text("import os; print(os.getsid(0) == os.getpid() == os.tcgetpgrp(0))")
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True}
    master, slave = pty.openpty()
    try:
        with WarmCommand(["owner"], cwd=tmp_path, env=environment, text=True, stdin=slave, **streams) as process:
            assert process.communicate(timeout=60)[0] == "True\n"
    finally:
        os.close(master)
        os.close(slave)
