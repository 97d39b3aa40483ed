"""
What the documents show, runs, and prints what they show.

Every page runs in a process of its own, in an empty folder, with warnings as errors. What these processes import is
imported once for all of them; the commands that a page gives to a shell, and the newcomer's pages, start cold.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from reefknot.console.cli.app import application, with_default_watch
from tests.docs.run_page import SHELL, PageError, commands, fences, missing
from tests.warm_commands import run_warm

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


def shows_something_to_run(page: Path) -> bool:
    try:
        return any(True for _ in fences(page.read_text(encoding="utf-8")))
    except PageError:
        return True  # the run says what is wrong


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if shows_something_to_run(page)]
NEEDS_MORE = {"README.md": "the network: it reads https://example.org"}
"""Pages that need more than they show, with what a reader has all the same."""


def run_page(page: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_", "OTEL_"))}
    own |= {"PYTHONWARNINGS": "error", "PYTHONPATH": str(ROOT), "COLUMNS": "240"}
    return run_warm(str(page), *words, cwd=folder, env=own, timeout=TIMEOUT_S, program="tests.docs.run_page")


def run_text(text: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    page = folder / "page.md"
    page.write_text(text)
    return run_page(page, folder / "cwd", *words)


def test_there_is_a_page_to_check() -> None:
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize(
    ("text", "something"),
    [
        ("# Title\n\n```text\nx\n```\n", False),
        ("```python\nx = 1\n```\n", True),
        ("Text.\n\n```python no-run\n```\n", True),
    ],
)
def test_only_a_page_with_nothing_to_run_is_left_out(tmp_path: Path, text: str, something: bool) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)

    assert shows_something_to_run(page) is something


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_snippet_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path / "cwd")

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in NEEDS_MORE and "<!-- run\n" in page.read_text(encoding="utf-8")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_reader_needs_none_of_the_hidden_blocks(page: Path, tmp_path: Path) -> None:
    """A page without such blocks has proved it above."""
    done = run_page(page, tmp_path / "cwd", "--visible")

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_text_names_the_file_that_a_fence_is_written_to(page: Path) -> None:
    """A reader does not see `file=`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    named = [(one.file, "\n".join(lines[: one.line - 2])) for one in fences("\n".join(lines)) if one.file]

    assert [file for file, before in named if f"`{file}`" not in before] == []


def test_a_hidden_block_that_makes_what_the_page_uses_is_caught(tmp_path: Path) -> None:
    page = "<!-- run\nx = 1\n-->\n```python\nassert x == 1\n```\n"

    assert run_text(page, tmp_path).returncode == 0
    assert "NameError: name 'x' is not defined" in run_text(page, tmp_path, "--visible").stderr


def refused(text: str) -> list[str]:
    """The commands that are not run, and that the command line does not take."""
    found = []
    for fence in fences(text, opted_out=True):
        for line, command in commands(fence) if fence.language in SHELL else ():
            first = command.partition("; ")[0]
            words = shlex.split(re.sub(r"^(?:[A-Z0-9_]+=\S* )+", "", first), comments=True)
            if words[0] not in ("reefknot", "rk"):
                continue
            ends = [number for number, word in enumerate(words) if word in ("|", "&&", "&", ">", ">>", "2>", "<", ";")]
            try:
                application().parse_args(
                    with_default_watch(words[1 : min(ends, default=None)]), exit_on_error=False, print_error=False
                )
            except CycloptsError as error:
                found.append(f"{line}: {command}: {error}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_that_cannot_run_here_is_one_all_the_same(page: Path) -> None:
    assert refused(page.read_text(encoding="utf-8")) == []


def test_a_command_that_is_not_run_and_is_none_is_caught() -> None:
    text = "<!-- no-run: it lasts -->\n```console no-run\n$ A=1 reefknot worker start {} --module x\n```\n"

    assert len(refused(text.format("canary"))) == 1
    assert refused(text.format("--worker-id canary")) == [], "the control"


def test_variables_before_a_command_are_set_for_it(tmp_path: Path) -> None:
    page = "```console\n$ WORKER_RETRIES_V2_ENABLED={} reefknot config show\n```\n"

    assert run_text(page.format("true"), tmp_path).returncode == 0
    assert "exited with 78" in run_text(page.format("maybe"), tmp_path).stderr


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
def test_a_snippet_opts_out_with_a_reason(language: str) -> None:
    text = f"<!-- no-run: needs a server -->\n```{language} no-run\n1 / 0\n$ reefknot nonsense\n```\n"

    assert list(fences(text)) == []


@pytest.mark.parametrize("before", ["", "Text.\n", "<!-- no-run: -->\n", "<!-- no-run: why -->\n\n"])
def test_a_snippet_cannot_opt_out_without_a_reason_in_the_line_before(before: str) -> None:
    with pytest.raises(PageError, match="no-run needs a line before it"):
        list(fences(f"{before}```python no-run\n```\n"))


def test_hidden_python_is_run_in_its_turn(tmp_path: Path) -> None:
    hidden = "<!-- run\nx.append(2)\n\nassert x == [1, 2]\n-->\n"
    page = f"```python\nx = [1]\n```\n{hidden}```python\nassert x == [1, 2]\n```\n"

    assert [(fence.language, fence.line) for fence in fences(page)] == [("python", 2), ("python", 5), ("python", 10)]
    assert run_text(page, tmp_path).returncode == 0
    broken = run_text(page.replace("[1, 2]\n-->", "[1]\n-->"), tmp_path)
    assert 'page.md", line 7' in broken.stderr


@pytest.mark.parametrize("hidden", ["<!-- run x = 1\n-->", "<!-- run\nx = 1 -->", "<!-- run -->"])
def test_hidden_python_has_its_markers_in_lines_of_their_own(hidden: str) -> None:
    with pytest.raises(PageError, match="line 3: <!-- run is a line of its own"):
        list(fences(f"Text.\n\n{hidden}\n"))


def test_a_fence_that_names_a_file_is_written_to_it(tmp_path: Path) -> None:
    page = "```python file=own.py\nx = 1 / 0 if False else 2\n```\n```python\nimport own\n\nassert own.x == 2\n```\n"

    assert run_text(page, tmp_path).returncode == 0
    assert (tmp_path / "cwd" / "own.py").read_text().startswith("x = 1")


@pytest.mark.parametrize("word", ["file=../own.py", "file=/own.py", "file=", "file=own.py no-run"])
def test_a_fence_names_a_file_in_the_readers_folder_and_nothing_else(word: str) -> None:
    with pytest.raises(PageError, match="is not known here"):
        list(fences(f"```python {word}\n```\n"))


def test_the_cells_of_a_notebook_await_in_one_loop_and_share_their_names(tmp_path: Path) -> None:
    first = "```python cell\nimport asyncio\n\nloop = asyncio.get_running_loop()\nevent = asyncio.Event()\n```\n"
    second = "```python cell\nloop.call_soon(event.set)\nawait event.wait()\n```\n"

    done = run_text(first + second + "```python\nassert event.is_set()\n```\n", tmp_path)
    assert done.returncode == 0, done.stderr
    broken = run_text(first + second.replace("event.wait()", "event.wait(7)"), tmp_path / "cwd")
    assert 'page.md", line 9' in broken.stderr


def test_only_a_cell_awaits_outside_of_a_function(tmp_path: Path) -> None:
    page = "```python\nimport asyncio\n\nawait asyncio.sleep(0)\n```\n"

    assert "SyntaxError: 'await' outside function" in run_text(page, tmp_path).stderr
    with pytest.raises(PageError, match="'cell' is not known here"):
        list(fences("```console cell\n```\n"))


def test_an_unknown_word_beside_the_language_is_refused() -> None:
    with pytest.raises(PageError, match="'norun' is not known here"):
        list(fences("```python norun\n```\n"))


def test_a_page_that_cannot_be_checked_does_not_pass(tmp_path: Path) -> None:
    assert run_text("```python norun\n```\n", tmp_path).returncode != 0


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```console\n$ reefknot no-such-noun\n```\n", "reefknot no-such-noun"),
        ("```bash\n$ rk no-such-noun\n```\n", "rk no-such-noun"),
        ("```bash\nreefknot no-such-noun\n```\n", "reefknot no-such-noun"),
        ("```console\n$ reefknot \\\n  no-such-noun\n```\n", "reefknot no-such-noun"),
    ],
)
def test_our_own_commands_are_found_with_their_lines(text: str, command: str) -> None:
    (fence,) = fences(f"Text.\n\n{text}")

    assert list(commands(fence)) == [(4, command)]


def test_a_command_that_fails_is_caught(tmp_path: Path) -> None:
    done = run_text("Text.\n\n```console\n$ reefknot no-such-noun\n```\n", tmp_path)

    assert done.returncode != 0
    assert "page.md:4: `reefknot no-such-noun` exited with" in done.stderr


def test_a_command_that_needs_a_shell_gets_one(tmp_path: Path) -> None:
    done = run_text("```console\n$ reefknot --version > version.txt && reefknot init\n```\n", tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cwd" / "version.txt").read_text().startswith("reefknot ")
    assert (tmp_path / "cwd" / "reefknot.yaml").exists()


def test_a_command_works_in_the_readers_folder_and_sees_what_a_snippet_wrote(tmp_path: Path) -> None:
    page = (
        "```python\nfrom pathlib import Path\nPath('reefknot.yaml').write_text('nonsense: 1\\n')\n```\n\n"
        "```console\n$ reefknot config check\n```\n"
    )
    done = run_text(page, tmp_path)

    assert done.returncode != 0
    assert "`reefknot config check` exited with 78" in done.stderr


def test_output_and_the_commands_of_others_are_left_alone(tmp_path: Path) -> None:
    done = run_text("```console\n$ false\n$ make nonsense\nreefknot is shown here as output\n```\n", tmp_path)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["reefknot --version", "reefknot --version | cat"])
def test_a_line_that_the_command_does_not_print_is_caught(tmp_path: Path, command: str) -> None:
    page = f"```console\n$ {command}\nreefknot {{}}\n```\n"

    assert run_text(page.format("…"), tmp_path).returncode == 0
    assert "did not print ['reefknot\\\\ 17']" in run_text(page.format("17"), tmp_path).stderr


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [(["a … c"], []), (["a  b c"], []), (["…", "", "────"], []), (["a … d"], [r"a\ .*\ d"])],
)
def test_blanks_and_rules_do_not_count_and_dots_stand_for_anything(lines: list[str], lacks: list[str]) -> None:
    assert missing(lines, "x\na b   c\n") == lacks


def test_a_command_in_the_background_stays_until_it_is_killed(tmp_path: Path) -> None:
    waits = 'python -c "print(7, flush=True); import time; open({!r}, {!r}); time.sleep(600)" &'
    page = (
        f"```console\n$ export NAME=here\n$ {waits.format('a', 'w')}\n7\n$ {waits.format('b', 'w')}\n7\n"
        "$ kill %1; wait\n$ kill %2\n$ echo $NAME > a\n```\n"
    )
    done = run_text(page, tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cwd" / "a").read_text() == "here\n"
    assert (tmp_path / "cwd" / "b").exists()


@pytest.mark.parametrize("shown", ["nats://…\n", ""])
def test_a_command_in_the_background_that_is_never_ready_is_caught(tmp_path: Path, shown: str) -> None:
    done = run_text(f"```console\n$ reefknot dev no-such-server &\n{shown}```\n", tmp_path)

    assert "`reefknot dev no-such-server &` " + ("did not print" if shown else "shows no line") in done.stderr
