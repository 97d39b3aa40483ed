"""What the documents show, runs: every page in a process of its own, in an empty folder, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("run_page.py")
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]
TIMEOUT_S = 60


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_text(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    page = folder / "page.md"
    page.write_text(text)
    return run_page(page, folder / "cwd")


def test_there_is_a_page_to_check() -> None:
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_snippet_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path / "cwd")

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_broken_snippet_is_caught_with_its_line(tmp_path: Path) -> None:
    done = run_text("# Title\n\n```python\nx = 1\nassert x == 2\n```\n", tmp_path)

    assert done.returncode != 0
    assert 'page.md", line 5' in done.stderr


def test_a_snippet_that_warns_is_caught(tmp_path: Path) -> None:
    done = run_text("```python\nimport warnings\nwarnings.warn('old', DeprecationWarning)\n```\n", tmp_path)

    assert done.returncode != 0
    assert "DeprecationWarning: old" in done.stderr


def test_the_snippets_of_a_page_share_their_names_and_their_folder(tmp_path: Path) -> None:
    page = (
        "```python\nfrom pathlib import Path\nPath('x').write_text('1')\n```\n"
        "Text.\n\n- in a list:\n\n"
        "  ```py\n  assert Path('x').read_text() == '1'\n  assert __name__ == '__main__'\n  ```\n"
    )
    done = run_text(page, tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cwd" / "x").exists()


@pytest.mark.parametrize("language", ["python", "console"])
def test_a_snippet_opts_out_with_a_reason(tmp_path: Path, language: str) -> None:
    done = run_text(
        f"<!-- no-run: needs a server -->\n```{language} no-run\n1 / 0\n$ reefknot nonsense\n```\n", tmp_path
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["", "Text.\n", "<!-- no-run: -->\n", "<!-- no-run: why -->\n\n"])
def test_a_snippet_cannot_opt_out_without_a_reason_in_the_line_before(tmp_path: Path, before: str) -> None:
    done = run_text(f"{before}```python no-run\n```\n", tmp_path)

    assert done.returncode != 0
    assert "no-run needs a line before it" in done.stderr


def test_an_unknown_word_beside_the_language_is_refused(tmp_path: Path) -> None:
    done = run_text("```python norun\n```\n", tmp_path)

    assert done.returncode != 0
    assert "'norun' is not known here" in done.stderr


@pytest.mark.parametrize(
    "fence",
    [
        "```console\n$ reefknot no-such-noun\n```\n",
        "```bash\n$ rk no-such-noun\n```\n",
        "```bash\nreefknot no-such-noun\n```\n",
        "```console\n$ reefknot \\\n  no-such-noun\n```\n",
    ],
)
def test_a_command_that_fails_is_caught(tmp_path: Path, fence: str) -> None:
    done = run_text(f"Text.\n\n{fence}", tmp_path)

    assert done.returncode != 0
    assert "page.md:4: `" in done.stderr
    assert "no-such-noun` exited with" in done.stderr


def test_output_and_the_commands_of_others_are_left_alone(tmp_path: Path) -> None:
    done = run_text("```console\n$ false\n$ make nonsense\nreefknot is shown here as output\n```\n", tmp_path)

    assert done.returncode == 0, done.stderr
