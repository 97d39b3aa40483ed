"""What is released: the files of wheel and sdist, the systemd unit, and the configuration of unit and container."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest

from tests.acceptance.folder import until
from tests.warm_commands import run_cold
from tools.make_dist import build, check_sdist, check_wheel, packaged_files
from tools.smoke_test import FEATURES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TOKEN = "token-of-the-deployed-dashboard"
UNIT = DEPLOY / "reefknot.service"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Built here, without another environment: nothing is fetched."""
    return build(sys.executable, tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = built
    assert check_wheel(wheel) == []
    kinds = {Path(name).suffix or Path(name).name for name in packaged_files()}
    assert kinds >= {".py", ".yaml", ".typed", ".html", ".css", ".js"}

    lacking = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(lacking, "w") as less:
        for name in whole.namelist():
            if not name.endswith(("py.typed", "entry_points.txt")):
                less.writestr(name, whole.read(name))
        less.writestr("tests/test_it.py", "")
    assert check_wheel(lacking) == ["missing: reefknot/py.typed", "not ours: tests/test_it.py", "missing: the commands"]


def test_the_sdist_has_what_is_needed_to_build_test_and_deploy(built: tuple[Path, Path]) -> None:
    assert check_sdist(built[1]) == []


def test_every_extra_has_a_feature_that_make_dist_tries() -> None:
    offered = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert set(FEATURES) == offered - {"all", "dev", "bench"}


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment] # names are told apart by case
    parser.read_string(UNIT.read_text())
    return parser


def verified(text: str, folder: Path) -> str:
    """What systemd says of a unit with this text; nothing when it is right."""
    file = folder / "reefknot.service"
    file.write_text(text.replace("/opt/reefknot/bin/reefknot", sys.executable))
    done = run_cold("systemd-analyze", "verify", file)
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if "reefknot.service" in line)


def test_the_unit_is_right_for_systemd(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert verified(text, tmp_path) == ""
    assert "DynamicUsr" in verified(text.replace("DynamicUser", "DynamicUsr"), tmp_path), "the control"


def test_the_unit_and_the_container_run_as_a_user_without_rights_and_stop_after_the_drain() -> None:
    service = unit()["Service"]
    container = (DEPLOY / "Containerfile").read_text()
    lines = container.splitlines()
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["CapabilityBoundingSet"]) == ("yes", "yes", "")
    assert service["ProtectSystem"] == "strict"
    assert lines.index("USER reefknot") > max(n for n, line in enumerate(lines) if line.startswith(("RUN", "COPY")))
    words = shlex.split(service["ExecStart"])
    drain = int(words[words.index("--drain") + 1])
    assert drain + 10 < int(service["TimeoutStopSec"])
    assert f'"--drain", "{drain}"' in container


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command of the unit with the configuration that is shipped, in other folders, at a free port."""
    text = (DEPLOY / "reefknot.yaml").read_text()
    configuration = tmp_path / "reefknot.yaml"
    text, number = re.subn(r"(?m)^  port: \d+", "  port: 0", text)
    assert number == 1, "the port is chosen, so that it is no other one after a restart"
    configuration.write_text(text.replace("/var/lib/reefknot", str(tmp_path)))
    command = unit()["Service"]["ExecStart"].replace("/etc/reefknot/reefknot.yaml", str(configuration))
    words = [sys.executable, "-m", "reefknot", *shlex.split(command)[1:]]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "DASHBOARD_TOKEN": TOKEN}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=output, stderr=output, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_command_of_the_unit_runs_and_ends_at_sigterm(started: subprocess.Popen[str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    until(lambda: "log in with" in output.read_text() or started.poll() is not None)
    assert started.poll() is None, output.read_text()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    (url,) = [line["url"] for line in lines if "url" in line]
    asked = urllib.request.Request(f"{url}api/v1/workers", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        assert [one["worker_id"] for one in json.load(answer)["workers"]] == ["worker-1"]
    assert "log in with the token of dashboard.operator_token (env:DASHBOARD_TOKEN)" in lines[-1]["message"]
    assert TOKEN not in output.read_text()

    started.send_signal(signal.SIGTERM)

    assert started.wait(TIMEOUT_S) == int(unit()["Service"]["SuccessExitStatus"]), output.read_text()
    assert (tmp_path / "state.db").stat().st_mode & 0o077 == 0
