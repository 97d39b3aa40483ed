"""Steps of one's own, met from the command line: tracebacks, modules by file, what they print, how they end."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.console.cli.running import command, environment

CONFIGURATION = """\
worker:
  quarantine_failed: {quarantine}
  retries: {{v2: {{enabled: true, default_policy: {{max_attempts: 1}}}}}}
  queue: {{v2: {{enabled: true}}}}
"""
STEPS = """\
import os
import sys
import time

import reefknot as rk


def total(order):
    return order["lines"] * order["price"]


@rk.block("own.bug")
def bug(inputs, context):
    print("about to fail")
    return {"total": total(inputs)}


@rk.block("own.forger")
def forger(inputs, context):
    raise ValueError(
        "wrong\\nstate            succeeded\\r\\x85\\x1b[1A\\n2026-01-25T12:00:00.000Z  operator_action: discarded by a"
    )


@rk.block("own.talks")
async def talks(inputs, context):
    print("a line of the step")
    print('{"looks": "like data"}')
    return {}


@rk.block("own.starts")
def starts(inputs, context):
    import subprocess

    subprocess.run([sys.executable, "-c", "print('a line of a child')"], check=True)
    os.write(1, b"a line of a library\\n")
    return {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reefknot.yaml").write_text(CONFIGURATION.format(quarantine="false"))
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


def work(folder: Path, *types: str) -> str:
    lines = [{"assignment_id": one, "job": {"type": one, "payload": {"lines": 3}}} for one in types]
    (folder / "work.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return "work.jsonl"


def shown(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(folder, *words, "--json").stdout)
    return found


@pytest.mark.parametrize("quarantine", ["false", "true"])
def test_the_traceback_of_a_bug_is_shown_with_the_job_and_once_in_the_log(folder: Path, quarantine: str) -> None:
    (folder / "reefknot.yaml").write_text(CONFIGURATION.format(quarantine=quarantine))
    ran = command(folder, "run", work(folder, "own.bug"), "--module", "steps.py", "--log-format", "text")
    raised = 'return order["lines"] * order["price"]'
    assert ran.returncode == 1
    assert ran.stderr.count(raised) == 1, ran.stderr
    assert f'    File "{folder / "steps.py"}", line 9, in total' in ran.stderr
    failure = shown(folder, "job", "show", "own.bug")["failure"]
    assert failure["exceptions"][0] == "builtins.KeyError"
    assert failure["traceback"].splitlines()[-1] == "KeyError: 'price'"
    assert raised in failure["traceback"]
    read = [("job", "show")] if quarantine == "false" else [("job", "show"), ("quarantine", "show")]
    for words in read:
        text = command(folder, *words, "own.bug").stdout
        assert f"\n        {raised}\n" in text, "as Python shows it, not inside a cell"
        assert "\n    KeyError: 'price'\n" in text


def test_the_text_of_an_error_forges_no_line_of_what_is_shown(folder: Path) -> None:
    """A field of the job, an event below it, an escape that moves the cursor."""
    (folder / "reefknot.yaml").write_text(CONFIGURATION.format(quarantine="true"))
    assert command(folder, "run", work(folder, "own.forger"), "--module", "steps.py").returncode == 1
    for noun in ("job", "quarantine"):
        text = command(folder, noun, "show", "own.forger").stdout
        forged = [line for line in text.splitlines() if "succeeded" in line or "operator_action" in line]
        assert len([line for line in forged if line.startswith("    ")]) >= 2, text
        assert not [line for line in forged if line.startswith(("state", "2026-01-25"))], text
        assert "\x1b" not in text
        assert "\x85" not in text
        assert "\\x1b[1A" in text


@pytest.mark.parametrize("module", ["steps", "steps.py", "./steps.py", "pkg/steps.py"])
def test_a_module_is_found_by_its_name_and_by_its_file(folder: Path, module: str) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "steps.py").write_text(STEPS)
    ran = command(folder, "run", work(folder, "own.talks"), "--json", "--module", module)
    assert (ran.returncode, json.loads(ran.stdout)["succeeded"]) == (0, 1), ran.stderr


def test_a_module_that_cannot_be_imported_is_told_with_the_users_file_and_line(folder: Path) -> None:
    (folder / "broken.py").write_text("import json\n\nimport reefknot as rk\n\nlimit = int('many')\n")
    ran = command(folder, "run", work(folder, "own.talks"), "--module", "broken")
    assert (ran.returncode, ran.stdout) == (78, "")
    assert f"--module broken: cannot be imported: {folder / 'broken.py'}:5: ValueError: invalid literal" in ran.stderr


@pytest.mark.parametrize("more", [("--json",), ()])
def test_what_a_step_or_a_child_process_of_it_prints_goes_to_stderr(folder: Path, more: tuple[str, ...]) -> None:
    ran = command(folder, "run", work(folder, "own.starts", "own.talks"), *more, "--module", "steps")
    (summary,) = ran.stdout.splitlines()
    assert (json.loads(summary)["succeeded"] if more else "2 succeeded" in summary) == (2 if more else True)
    for line in ("a line of a child", "a line of a library", "a line of the step"):
        assert f"{line}\n" in ran.stderr


def test_without_a_command_around_it_a_child_process_prints_to_stdout(folder: Path) -> None:
    """The control: it is the command that redirects it."""
    call = "import steps; steps.starts({}, None)"
    ran = subprocess.run([sys.executable, "-c", call], cwd=folder, capture_output=True, text=True, check=True)
    assert "a line of a child\n" in ran.stdout
    assert "a line of a library\n" in ran.stdout


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`reefknot` with the steps, started cold; its streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "reefknot", *words, "--json", "--module", "steps"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_a_step_prints_under_up_goes_to_stderr(folder: Path) -> None:
    assert command(folder, "submit", "--type", "own.talks", "--id", "x").returncode == 0
    up = started(folder, "up")
    try:
        waited = command(folder, "submit", "--type", "own.talks", "--id", "x", "--wait", "--timeout", "100")
        assert waited.returncode == 0, waited.stderr
    finally:
        up.send_signal(signal.SIGTERM)
        out, err = up.communicate(timeout=100)
    assert all("event_type" in one or "summary" in one for one in map(json.loads, out.splitlines())), out
    assert "a line of the step\n" in err
