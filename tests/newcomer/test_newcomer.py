"""Somebody clones the repository and does what the README and the first tutorial say."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_commands import run_cold

ROOT = Path(__file__).resolve().parents[2]
FOLLOW = Path(__file__).with_name("follow.py")
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is committed, and the environment that is there already."""
    folder = tmp_path_factory.mktemp("newcomer") / "reefknot"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=TIMEOUT_S)
    (folder / ".venv").symlink_to(sys.prefix)
    yield folder
    (folder / ".venv").unlink()


def environment(clone: Path, home: Path) -> dict[str, str]:
    """A newcomer's: nothing of ours is set."""
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "LC_ALL", "TERM")}
    own = {
        "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{clone / 'src'}{os.pathsep}{clone}",
    }
    shown = {"NO_COLOR": "1", "COLUMNS": "200", "REEFKNOT_LOG_FORMAT": "text"}  # as a terminal shows it
    return kept | own | shown | {"HOME": str(home), "TMPDIR": str(home)}


def followed(clone: Path, page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    words = (sys.executable, FOLLOW, clone, page)
    return run_cold(*words, cwd=folder, env=environment(clone, folder), timeout=TIMEOUT_S)


def test_the_clone_runs_its_own_code_and_lacks_nothing(clone: Path, tmp_path: Path) -> None:
    program = "import reefknot; print(reefknot.__file__); print(reefknot.__version__)"
    done = run_cold(sys.executable, "-c", program, cwd=tmp_path, env=environment(clone, tmp_path), check=True)
    assert done.stdout.startswith(str(clone))


@pytest.mark.slow
def test_the_readme_can_be_followed(clone: Path, tmp_path: Path) -> None:
    done = followed(clone, clone / "README.md", tmp_path / "readme")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "$ make run" in done.stdout
    assert "contents of https://example.org" in done.stdout
    assert "gave up: all attempts are spent" in done.stdout


@pytest.mark.slow
def test_the_tutorial_can_be_followed(clone: Path, tmp_path: Path) -> None:
    done = followed(clone, clone / "docs" / "tutorial.md", tmp_path / "tutorial")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "trying again in" in done.stderr, "the log line that the page promises"
    assert "after 3 attempts" in done.stdout, "the job that recovers"
    assert done.stdout.rstrip().endswith("the dashboard shows oslo"), "the last thing on the page"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert False\n```\n", "AssertionError"),
        ("```console\n$ reefknot no-such-command\n```\n", "exited with 2"),
        ("```console\n$ reefknot --version\nreefknot 99.9\n```\n", "does not print"),
        ("```console\n$ install-it-all\n```\n", "not known how to follow"),
    ],
)
def test_a_page_that_cannot_be_followed_is_caught(clone: Path, tmp_path: Path, text: str, complaint: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = followed(clone, page, tmp_path / "folder")
    assert done.returncode != 0
    assert complaint in done.stderr
