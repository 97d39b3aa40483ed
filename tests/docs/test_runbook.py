"""The runbook shows what its commands print: every line beneath a command is in that command's output, in order."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reefknot.cli import main
from reefknot.core.waiting import WaitCode
from tests.docs.run_page import FOR_A_SHELL, PYTHON, Fence, fences

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "runbook.md"
TIMEOUT_S = 120
FULL_DISK = re.compile(
    r"<!-- no-run: needs a full disk -->\n```console no-run\n(?P<content>.*?)^```", re.DOTALL | re.MULTILINE
)


def shown(content: str) -> Iterator[tuple[str, list[str]]]:
    """Every command, with the lines that are shown beneath it."""
    command, lines = "", list[str]()
    for line in [*content.splitlines(), "$ "]:
        if not line.startswith("$ "):
            lines.append(line)
            continue
        if command:
            yield command, lines
        command, lines = line[2:], []


def missing(lines: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed, apart from blanks; `…` stands for anything within a line."""
    flat = [" ".join(line.split()) for line in printed.splitlines()]
    patterns = [re.escape(" ".join(line.split())).replace("…", ".*") for line in lines if line.strip("… ")]
    return [one for one in patterns if not any(re.fullmatch(one, line) for line in flat)]


def in_a_shell(command: str, folder: Path, program: str = "-m reefknot") -> str:
    """What a command prints, whatever its exit code: the page shows that where it matters."""
    line = f'reefknot() {{ {sys.executable} {program} "$@"; }}; {command}'
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def printed_by(command: str, folder: Path) -> str:
    """What a command prints. One that needs no shell runs in this process: starting one takes most of the time."""
    if FOR_A_SHELL.search(command):
        return in_a_shell(command, folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(shlex.split(command)[1:]) == 0, err.getvalue()
    return out.getvalue() + err.getvalue()


def test_every_line_that_the_page_shows_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    for name in [one for one in os.environ if one.startswith(("REEFKNOT", "WORKER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REEFKNOT_LOG_FORMAT", "text")  # as on a terminal
    namespace: dict[str, object] = {"__name__": "__main__"}
    compared = 0
    for fence in fences(PAGE.read_text(encoding="utf-8")):
        if fence.language in PYTHON:
            _run(fence, namespace)
            continue
        assert not fence.file
        for command, lines in shown(fence.content):
            printed = printed_by(command, tmp_path)
            assert missing(lines, printed) == [], f"{command}\n{printed}"
            compared += 1
    assert compared > 15


def test_the_page_has_every_cause_for_which_a_job_waits() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [one.value for one in WaitCode if f"`{one.value}`" not in page] == []


def _run(fence: Fence, namespace: dict[str, object]) -> None:
    exec(compile("\n" * (fence.line - 1) + fence.content, str(PAGE), "exec", dont_inherit=True), namespace)


def test_what_the_page_shows_of_a_full_disk_is_printed(tmp_path: Path) -> None:
    in_a_shell("reefknot init && reefknot submit --type fs.delete --inputs '{}' --id first", tmp_path)
    (tmp_path / "full").touch()
    found = FULL_DISK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    for command, lines in shown(found["content"]):
        printed = in_a_shell(command, tmp_path, "-m tests.faults.full_disk full")
        assert missing(lines, printed) == [], f"{command}\n{printed}"

    (tmp_path / "full").unlink()
    again = in_a_shell("reefknot submit --type fs.delete --inputs '{}' --id order-7; echo \"exit code $?\"", tmp_path)
    assert again.startswith("order-7\nexit code 0"), "with room it goes on"


@pytest.mark.parametrize(("line", "lacks"), [("a … c", []), ("a  b c", []), ("…", []), ("a … d", ["a .* d"])])
def test_a_line_that_is_not_printed_is_caught(line: str, lacks: list[str]) -> None:
    assert missing([line], "x\na b   c\n") == [one.replace(" ", r"\ ") for one in lacks]
