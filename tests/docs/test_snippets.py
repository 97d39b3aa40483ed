"""
What the documents show, runs, and prints what they show.

Every page runs in a process of its own, in an empty folder, with warnings as errors. What these processes import is
imported once for all of them; the commands that a page gives to a shell, and the newcomer's pages, start cold.
"""

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


def fenced(*lines: str, info: str = "python") -> str:
    return "\n".join([f"```{info}", *lines, "```\n"])


def console(*lines: str) -> str:
    return fenced(*lines, info="console")


HIDDEN = "<!-- run\nx.append(2)\n\nassert x == [1, 2]\n-->\n"
IN_ITS_TURN = f"{fenced('x = [1]')}{HIDDEN}{fenced('assert x == [1, 2]')}"
HIDES_WHAT_IT_USES = f"<!-- run\nx = 1\n-->\n{fenced('assert x == 1')}"
CELLS = (
    fenced("import asyncio", "", "loop = asyncio.get_running_loop()", "event = asyncio.Event()", info="python cell")
    + fenced("loop.call_soon(event.set)", "await event.wait()", info="python cell")
    + fenced("assert event.is_set()")
)
WAITS = 'python -c "print(7, flush=True); import time; open({!r}, {!r}); time.sleep(600)" &'
RIGHT: dict[str, tuple[str, dict[str, str]]] = {
    "snippets share their names and their folder": (
        fenced("from pathlib import Path", "Path('x').write_text('1')")
        + "Text.\n\n- in a list:\n\n"
        + "  ```py\n  assert Path('x').read_text() == '1'\n  assert __name__ == '__main__'\n  ```\n",
        {"x": "1"},
    ),
    "hidden python is run in its turn": (IN_ITS_TURN, {}),
    "a hidden block may make what the page uses": (HIDES_WHAT_IT_USES, {}),
    "a fence that names a file is written to it": (
        fenced("x = 1 / 0 if False else 2", info="python file=own.py") + fenced("import own", "", "assert own.x == 2"),
        {"own.py": "x = 1"},
    ),
    "cells await in one loop and share their names": (CELLS, {}),
    "variables before a command are set for it": (console("$ WORKER_RETRIES_V2_ENABLED=true reefknot config show"), {}),
    "a command that needs a shell gets one": (
        console("$ reefknot --version > version.txt && reefknot init"),
        {"version.txt": "reefknot ", "reefknot.yaml": ""},
    ),
    "output and the commands of others are left alone": (
        console("$ false", "$ make nonsense", "reefknot is shown here as output"),
        {},
    ),
    "dots stand for anything": (console("$ reefknot --version", "reefknot …"), {}),
    "dots stand for anything in a shell": (console("$ reefknot --version | cat", "reefknot …"), {}),
    "a command in the background stays until it is killed": (
        console(
            *("$ export NAME=here", f"$ {WAITS.format('a', 'w')}", "7", f"$ {WAITS.format('b', 'w')}", "7"),
            *("$ kill %1; wait", "$ kill %2", "$ echo $NAME > a"),
        ),
        {"a": "here\n", "b": ""},
    ),
}
WRONG: dict[str, tuple[str, str]] = {
    "a snippet that fails": ("# Title\n\n" + fenced("x = 1", "assert x == 2"), 'page.md", line 5'),
    "a snippet that warns": (
        fenced("import warnings", "warnings.warn('old', DeprecationWarning)"),
        "DeprecationWarning: old",
    ),
    "hidden python that fails": (IN_ITS_TURN.replace("[1, 2]\n-->", "[1]\n-->"), 'page.md", line 7'),
    "a cell that fails": (CELLS.replace("event.wait()", "event.wait(7)"), 'page.md", line 9'),
    "await outside of a cell": (
        fenced("import asyncio", "", "await asyncio.sleep(0)"),
        "SyntaxError: 'await' outside function",
    ),
    "a page that cannot be checked": (fenced(info="python norun"), "'norun' is not known here"),
    "a variable that is wrong": (
        console("$ WORKER_RETRIES_V2_ENABLED=maybe reefknot config show"),
        "config show` exited with 78",
    ),
    "a command that fails": (
        "Text.\n\n" + console("$ reefknot no-such-noun"),
        "page.md:4: `reefknot no-such-noun` exited with",
    ),
    "a command that finds what a snippet wrote": (
        fenced("from pathlib import Path", "Path('reefknot.yaml').write_text('nonsense: 1\\n')")
        + console("$ reefknot config check"),
        "`reefknot config check` exited with 78",
    ),
    "a line that is not printed": (console("$ reefknot --version", "reefknot 17"), "did not print ['reefknot\\\\ 17']"),
    "a line that is not printed in a shell": (
        console("$ reefknot --version | cat", "reefknot 17"),
        "did not print ['reefknot\\\\ 17']",
    ),
    "a server that is never ready": (
        console("$ reefknot dev no-such-server &", "nats://…"),
        "`reefknot dev no-such-server &` did not print",
    ),
    "a server that shows no line": (
        console("$ reefknot dev no-such-server &"),
        "`reefknot dev no-such-server &` shows no line",
    ),
}


@pytest.mark.parametrize(("text", "files"), RIGHT.values(), ids=RIGHT.keys())
def test_a_page_that_is_right_passes(tmp_path: Path, text: str, files: dict[str, str]) -> None:
    done = run_text(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name: (tmp_path / "cwd" / name).read_text()[: len(begin)] for name, begin in files.items()} == files


@pytest.mark.parametrize(("text", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_a_page_that_is_wrong_is_caught(tmp_path: Path, text: str, complaint: str) -> None:
    done = run_text(text, tmp_path)
    assert (done.returncode != 0, complaint in done.stderr) == (True, True), done.stderr


def test_a_hidden_block_that_makes_what_the_page_uses_is_caught(tmp_path: Path) -> None:
    assert "NameError: name 'x' is not defined" in run_text(HIDES_WHAT_IT_USES, tmp_path, "--visible").stderr


REFUSED = {
    "no-run needs a line before it": [
        f"{before}{fenced(info='python no-run')}"
        for before in ("", "Text.\n", "<!-- no-run: -->\n", "<!-- no-run: why -->\n\n")
    ],
    "line 3: <!-- run is a line of its own": [
        f"Text.\n\n{hidden}\n" for hidden in ("<!-- run x = 1\n-->", "<!-- run\nx = 1 -->", "<!-- run -->")
    ],
    "is not known here": [
        fenced(info=f"python {word}")
        for word in ("file=../own.py", "file=/own.py", "file=", "file=own.py no-run", "norun")
    ],
    "'cell' is not known here": [fenced(info="console cell")],
}


@pytest.mark.parametrize(("message", "texts"), REFUSED.items(), ids=REFUSED.keys())
def test_a_mark_that_is_not_right_is_refused(message: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(PageError, match=message):
            list(fences(text))


def test_fences_are_found_with_their_lines_and_opt_out_with_a_reason() -> None:
    assert [(fence.language, fence.line) for fence in fences(IN_ITS_TURN)] == [("python", n) for n in (2, 5, 10)]
    for language in ("python", "console"):
        text = fenced("1 / 0", "$ reefknot nonsense", info=f"{language} no-run")
        assert list(fences(f"<!-- no-run: needs a server -->\n{text}")) == []


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (console("$ reefknot no-such-noun"), "reefknot no-such-noun"),
        (fenced("$ rk no-such-noun", info="bash"), "rk no-such-noun"),
        (fenced("reefknot no-such-noun", info="bash"), "reefknot no-such-noun"),
        (console("$ reefknot \\", "  no-such-noun"), "reefknot no-such-noun"),
    ],
)
def test_our_own_commands_are_found_with_their_lines(text: str, command: str) -> None:
    (fence,) = fences(f"Text.\n\n{text}")
    assert list(commands(fence)) == [(4, command)]


@pytest.mark.parametrize(
    ("lines", "lacks"), [(["a … c"], []), (["a  b c"], []), (["…", "", "────"], []), (["a … d"], [r"a\ .*\ d"])]
)
def test_blanks_and_rules_do_not_count_and_dots_stand_for_anything(lines: list[str], lacks: list[str]) -> None:
    assert missing(lines, "x\na b   c\n") == lacks
