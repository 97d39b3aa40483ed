"""The first commands of a newcomer, as processes: `init`, `up`, the command that `up` prints, and nothing running."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.acceptance.folder import PATIENCE_S, ROOT
from tests.warm_commands import WarmCommand, run_cold, run_warm

_HINT = "submit work from another terminal: reefknot "


class Shell:
    """A terminal in an empty folder: commands as processes, with nothing of ours in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        self._environment = kept | {"PYTHONWARNINGS": "error", "COLUMNS": "200", "HOME": str(folder)}
        self._environment["REEFKNOT_LOG_FORMAT"] = "text"  # as on a terminal
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, line: str) -> subprocess.CompletedProcess[str]:
        """One line, as a shell splits it; `reefknot` is this one. A line of several commands gets a real shell."""
        if "&&" not in line:
            name, *words = shlex.split(line)
            assert name == "reefknot"
            return run_warm(*words, cwd=self.folder, env=self._environment, timeout=PATIENCE_S * 2)
        shell = f'reefknot() {{ {sys.executable} -m reefknot "$@"; }}; {line}'
        return run_cold("bash", "-c", shell, cwd=self.folder, env=self._environment)

    def start(self, *words: str) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 1}
        process = WarmCommand(["reefknot", *words], cwd=self.folder, env=self._environment, text=True, **streams)
        self.started.append(process)
        return process

    def hint(self, process: subprocess.Popen[str]) -> str:
        """The command that `up` prints."""
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(_HINT):
                return line.removeprefix(_HINT).strip()
        raise AssertionError("no command was printed")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    yield opened
    for process in opened.started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("init", ["init", "init --full"])
def test_the_command_that_up_prints_works_with_the_file_that_init_writes(shell: Shell, init: str) -> None:
    assert shell(f"reefknot {init}").returncode == 0
    line = shell.hint(shell.start("up"))
    done = shell(f"reefknot {line}")
    assert done.returncode == 0, done.stderr
    assert " success " in done.stdout
    assert (shell.folder / "files" / "a.txt").read_text() == "hello"
    assert "is running on this store" not in shell(f"reefknot {_QUOTED}").stderr


def test_the_printed_command_finds_a_store_and_a_file_that_were_named(shell: Shell) -> None:
    assert shell("reefknot init && mv reefknot.yaml other.yaml").returncode == 0
    line = shell.hint(shell.start("up", "--config", "other.yaml", "--engine", "sqlite:own store.db"))
    done = shell(f"reefknot {line}")
    assert done.returncode == 0, done.stderr
    assert "--config other.yaml" in line
    assert (shell.folder / "own store.db").exists()


def test_without_folders_the_printed_command_is_no_file_step(shell: Shell) -> None:
    """The control: with nothing open to file steps, a file step cannot work."""
    line = shell.hint(shell.start("up"))
    assert "--type http.request" in line
    done = shell("""reefknot submit --type fs.blob_put --inputs '{"path": "a", "content": "b"}' --wait""")
    assert done.returncode == 1
    assert "PERMISSION_DENIED" in done.stdout


@pytest.mark.parametrize("command", ["up --for 0.1", "run work.jsonl", "worker start --for 0.1"])
def test_without_a_file_the_baseline_is_explained_once_with_the_way_to_leave_it(shell: Shell, command: str) -> None:
    """And so are steps whose own options it ignores."""
    (shell.folder / "work.jsonl").write_text("")
    (shell.folder / "parts.py").write_text(_OWN_OPTIONS)
    done = shell(f"reefknot {command} --module parts")
    assert done.returncode == 0, done.stderr
    (ignored,) = [line for line in done.stderr.splitlines() if "are ignored" in line]
    (about,) = [line for line in done.stderr.splitlines() if line != ignored and ("baseline" in line or "v2" in line)]
    assert about.startswith("No reefknot.yaml here: every failure is retried alike")
    assert about.endswith(": reefknot init")
    names = ", ".join(f"order.part-{number}" for number in range(5))
    assert f"attempts, waits, time limits and on= of @rk.block are ignored for {names} and 1 more." in ignored
    assert "To switch it on: reefknot init" in ignored

    assert shell("reefknot init").returncode == 0
    followed = shell(f"reefknot {command} --module parts").stderr
    assert ("v2" in followed, "ignored" in followed) == (False, False), "it was followed"


def test_a_gate_that_something_turned_off_is_named_with_what_turned_it_off(shell: Shell) -> None:
    done = shell("reefknot init && WORKER_QUEUE_V2_ENABLED=false reefknot up --for 0.1")
    about = [line for line in done.stderr.splitlines() if "v2" in line]
    assert len(about) == 1
    assert about[0].startswith("worker.queue.v2 is off (environment WORKER_QUEUE_V2_ENABLED)")
    assert "WORKER_QUEUE_V2_ENABLED=true" in about[0]


_OWN_OPTIONS = """\
import reefknot as rk

rk.block("order.part-0", on=OSError)(lambda inputs, context: {})
for number in range(1, 6):
    rk.block(f"order.part-{number}", attempts=5, base_delay=2)(lambda inputs, context: {})
rk.block("order.plain", resource_class="mail")(lambda inputs, context: {})
"""


_STEP = """submit --type fs.blob_put --inputs {"path":"a.txt","content":"ahoy"} --wait --timeout 60"""
_QUOTED = _STEP.replace("{", "'{").replace("}", "}'")


def test_waiting_with_nothing_running_is_said_at_once_and_still_ends_when_a_system_starts(shell: Shell) -> None:
    assert shell("reefknot init").returncode == 0
    waiting = shell.start(*_STEP.split())
    assert waiting.stderr is not None
    assert select([waiting.stderr], [], [], PATIENCE_S)[0], "nothing was said"
    assert waiting.stderr.readline().startswith("there was no store at .reefknot/state.db: a new one was made")
    line = waiting.stderr.readline()
    assert line.startswith("no router and no worker is running on this store; the work is stored")
    assert waiting.poll() is None, "it waits"

    command = re.search(r"reefknot (up --engine \S+)$", line.strip())
    assert command is not None, line
    shell.start(*command[1].split())

    out, err = waiting.communicate(timeout=PATIENCE_S * 2)
    assert (waiting.returncode, " success " in out) == (0, True), err


def test_with_a_router_alone_the_worker_is_what_is_missing(shell: Shell) -> None:
    assert shell("reefknot init").returncode == 0
    router = shell.start("router", "start")
    assert router.stderr is not None
    assert " is ready" in router.stderr.readline()
    done = shell("""reefknot submit --type fs.delete --inputs '{"path": "a"}' --wait --timeout 0.2""")
    assert done.stderr.startswith("no worker is running on this store")
    assert "reefknot worker start --engine" in done.stderr


PACKAGES = {"nats-py": "nats", "python-docx": "docx"}
"""Modules that have another name than what installs them; parts of OpenTelemetry share one."""


def imported_packages() -> set[str]:
    """The top-level names that the package imports, wherever in a module."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return found


def test_every_extra_installs_only_what_the_package_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {name: [re.split(r"[\[<>=]", one)[0] for one in wanted] for name, wanted in extras.items()}
    every = re.fullmatch(r"reefknot\[(.*)\]", extras["all"][0])

    assert every is not None
    offered = every[1].split(",")
    assert set(offered) == set(extras) - {"all", "dev", "bench"}
    for extra in offered:
        modules = {PACKAGES.get(one, re.sub("^opentelemetry-.*", "opentelemetry", one)) for one in named[extra]}
        assert {one.replace("-", "_") for one in modules} <= imported_packages(), extra
    assert "matplotlib" not in imported_packages(), "the control: one that was installed and never imported"
