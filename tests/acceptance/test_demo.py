"""`make run`: eight scenes that show what they say, through a pipe and on a terminal, and a store that is kept."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from reefknot.console.cli.config import recommended
from reefknot.demo import show
from tests.acceptance.folder import ROOT, until
from tests.acceptance.terminal import Terminal
from tests.warm_commands import run_cold, run_warm

TIMEOUT_S = 180


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "kept"


@pytest.fixture(scope="module")
def told(kept: Path) -> str:
    """The lines that a reader of a log sees."""
    words = [sys.executable, "-m", "reefknot.demo", "--fast", "--keep", str(kept)]
    own = {"PYTHONWARNINGS": "error", "PYTHONUTF8": "1", "WORKER_QUEUE_V2_ENABLED": "false"}
    done = run_cold(*words, env=os.environ | own, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def scene(told: str, number: int) -> str:
    return told.partition(f"\n{number}. ")[2].partition(f"\n{number + 1}. ")[0]


SHOWN = {
    1: ["'here you are', after 4 requests"],
    2: ["given up after 1."],
    3: ["3 callers, 1 charge;"],
    6: ["$ reefknot quarantine list", "not_retryable", "=> invoice-1: success"],
    7: ["Not retried: http_error 404"],
    8: [": OK, nothing up to event ", "the hash does not fit", "exit code 65"],
}


def test_there_are_eight_scenes_and_each_shows_what_it_says(told: str) -> None:
    assert re.findall(r"^(\d)\. ", told, re.MULTILINE) == [str(number) for number in range(1, 9)]
    for number, texts in SHOWN.items():
        assert [one for one in texts if one not in scene(told, number)] == [], scene(told, number)
    assert scene(told, 3).count("GET /charge") == 1
    assert scene(told, 7).count("$ reefknot policy explain") == 3


def test_a_killed_system_loses_nothing(told: str) -> None:
    text = scene(told, 4)
    left = re.search(r"left in the store: (.*)", text)
    assert left is not None
    assert sum(map(int, re.findall(r"\d+", left[1]))) == 8
    assert "=> 8 of 8 succeeded, 0 lost" in text


def test_overload_is_one_line_and_everything_ends_well(told: str) -> None:
    text = scene(told, 5)
    assert len(re.findall(r" done; worker ", text)) == 1, "nothing is redrawn where it would be a new line"
    assert "\x1b" not in told
    assert "\r" not in told
    assert "=> 30 of 30 succeeded" in text
    assert int(re.findall(r"the queue was full (\d+) times", text)[0]) > 0


def test_the_store_is_kept_and_the_printed_commands_work_in_it(told: str, kept: Path) -> None:
    assert f"cd {kept}" in told
    printed = re.findall(r"^   \S*reefknot ([a-z].*)$", told.rpartition("are kept.")[2], re.MULTILINE)
    assert printed == ["top", "job show invoice-1", "audit tail", "dashboard", "up"]
    for words in ("top", "job show invoice-1", "audit tail", "dashboard --for 0.1", "up --for 0.1", "audit replay"):
        done = run_warm(*words.split(), cwd=kept, env=os.environ)
        assert done.returncode == 0, done.stderr


def test_on_a_terminal_the_overload_is_one_line_that_is_drawn_over_itself(tmp_path: Path) -> None:
    terminal = Terminal("--fast", "--keep", str(tmp_path / "kept"), cwd=tmp_path, program="reefknot.demo")
    try:
        terminal.until(lambda _: "\n6. " in terminal.plain)
        drawn = [line for line in scene(terminal.plain, 5).split("\n") if "done; worker" in line]
        assert len(drawn) == 1
        assert drawn[0].count("\r") > 2
        assert all(len(one) < 80 for one in drawn[0].split("\r"))
        terminal.type(b"\x03")
        assert terminal.ends() == 130, "it stops its system"
    finally:
        terminal.close()


def test_ctrl_c_stops_it_with_the_system_that_it_started(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    terminal = Terminal("--keep", str(kept), cwd=tmp_path, program="reefknot.demo")
    try:
        terminal.until(lambda text: "orders are accepted" in text)
        terminal.type(b"\x03")
        assert terminal.ends() == 130
        assert f"stopped; what there was is in {kept}" in terminal.text.replace("\r\n", "")
        until(lambda: not _running_in(kept))
    finally:
        terminal.close()


def _running_in(folder: Path) -> list[int]:
    """Processes whose working directory is this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_its_configuration_is_the_recommended_one_with_two_changes(tmp_path: Path) -> None:
    show.set_up(tmp_path, 4711)
    text = (tmp_path / "reefknot.yaml").read_text()
    assert "127.0.0.1:4711" in text
    before = set(recommended().splitlines())
    changed = {line for line in before if "max_queue_size: 1000" in line or "allow: []" in line}
    assert before - set(text.splitlines()) == changed


def planned(folder: Path, *targets: str) -> str:
    """The commands that make would run."""
    return run_cold("make", "-n", *targets, cwd=folder, check=True).stdout


def test_make_run_installs_only_what_the_show_needs_unless_there_is_everything(tmp_path: Path) -> None:
    """In a clone without an environment; the control is `make test`, which needs everything."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    assert re.findall(r"make_venv\.sh (\S+)", planned(tmp_path, "run")) == ["http,dashboard,metrics"]
    assert set(re.findall(r"make_venv\.sh (\S+)", planned(tmp_path, "test"))) == {"dev,bench,all"}
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".made").touch()
    assert "make_venv.sh" not in planned(tmp_path, "run")
