"""`reefknot init --example`: each project that it writes runs, and so do its tests, with the real frameworks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli.config import EXAMPLES, example_files
from tests.acceptance.folder import NO_DASHBOARD, Folder
from tests.unit.console.cli.running import Commands
from tests.warm_commands import run_cold

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "reefknot.testing.pytest_plugin"]
TESTS = {"django": ["manage.py", "test"], "fastapi": PYTEST, "flask": PYTEST, "worker": PYTEST}
PACKAGES = {"django": "django", "fastapi": "fastapi uvicorn httpx pytest", "flask": "flask pytest", "worker": "pytest"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_project_is_small_and_formatted_and_its_tests_pass(name: str, rk: Commands, tmp_path: Path) -> None:
    done = rk("init", "--example", name)
    assert done.code == 0
    assert f"Wrote {name}-app: " in done.err
    assert f"It needs reefknot and these packages: pip install {PACKAGES[name]}\n" in done.err
    project = tmp_path / f"{name}-app"
    for words in (["format", "--check"], ["check", "--select", "E,F,I,UP,B"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--line-length", "120", "--no-cache"]
        ran = run_cold(*ruff, project, cwd=project)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    readme = (project / "README.md").read_text().splitlines()
    assert len(readme) <= 12
    assert sum(line.startswith("    ") for line in readme) == 2, "two commands"
    assert rk("config", "check", str(project / "reefknot.yaml")).code == 0

    kept = {one: value for one, value in os.environ.items() if not one.startswith(("REEFKNOT", "WORKER_", "PYTEST"))}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading those of others takes half of the time
    ran = run_cold(sys.executable, *TESTS[name], cwd=project, env=kept)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout or "OK" in ran.stderr
    assert not list(project.rglob("state.db")), "tests leave no store behind"


def test_a_project_of_workers_runs(folder: Folder) -> None:
    assert folder("init", "--example", "worker").code == 0
    project = folder.path / "worker-app"
    command = [sys.executable, "-m", "reefknot", "up", "--module", "steps.py", "--for", "60"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    up = subprocess.Popen(command, cwd=project, env=os.environ | NO_DASHBOARD, **streams)
    try:
        submit = [sys.executable, "submit.py", "7", "ada@example.com"]
        ran = run_cold(*submit, cwd=project)
        assert ran.stdout == "success {'sent_to': 'ada@example.com'}\n", ran.stderr
        other = run_cold(*submit[:3], "bob@example.com", cwd=project)
        assert (other.returncode, other.stdout) == (1, "")
        assert other.stderr.startswith("not submitted: id 'order-7' was used with another job"), other.stderr
    finally:
        up.terminate()
        out, _ = up.communicate(timeout=60)
    assert "1 succeeded" in out


def test_what_is_there_is_kept(rk: Commands, tmp_path: Path) -> None:
    (tmp_path / "flask-app").mkdir()
    done = rk("init", "--example", "flask")
    assert (done.code, done.err) == (1, "reefknot: flask-app exists already; move it away\n")
    dry = rk("init", "--example", "flask", "--dry-run")
    assert dry.code == 1
    assert not any((tmp_path / "flask-app").iterdir())


def test_a_dry_run_lists_the_files_and_writes_none(rk: Commands, tmp_path: Path) -> None:
    done = rk("init", "--example", "worker", "--dry-run")
    assert done.code == 0
    assert done.out.splitlines() == [f"worker-app/{one}" for one in example_files("worker")]
    assert json.loads(rk("init", "--example", "worker", "--dry-run", "--json").out)["written"] is False
    assert not any(tmp_path.iterdir())


def test_a_wrong_example_is_refused(rk: Commands, tmp_path: Path) -> None:
    alone = "give it without --full, --force and --template"
    known = "accepted: fastapi, flask, django, worker; did you mean 'fastapi'?"
    for words, text in {
        ("fastapy",): f"'fastapy' is unknown; {known}",
        ("flask", "--full"): alone,
        ("flask", "--force"): alone,
        ("flask", "--template", "mailbox"): alone,
    }.items():
        done = rk("init", "--example", *words)
        assert (done.code, text in done.err) == (2, True), done.err
    assert not any(tmp_path.iterdir())
