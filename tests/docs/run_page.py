"""
Runs the snippets of one page, in order, as a reader would: `run_page.py PAGE`, in a folder that is the reader's own.

Python fences share one namespace. In console and bash fences, lines `$ reefknot …` are run and must exit with 0, and
so are those that make the reader's files (`mkdir`, `echo`, `printf`); other commands and the output shown are left
alone. A command runs in this process, because starting one for each takes most of the time; one that needs a shell
gets a shell. A fence that cannot run says so, with its reason in the line before:

    <!-- no-run: needs a mailbox -->
    ```python no-run

A fence of `python file=steps.py` is not run but written to that file, in the reader's folder. Python between a line
`<!-- run` and a line `-->` is run in its turn and not shown: what the reader has anyway, such as a network, or a check
that would only be in the way.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt

PYTHON = frozenset({"python", "python3", "py"})
SHELL = frozenset({"console", "bash", "sh", "shell"})
HIDDEN = re.compile(r"<!-- run\n(?P<content>.*?)^-->\s*\Z", re.DOTALL | re.MULTILINE)
NAMED_FILE = re.compile(r"file=(?P<name>\w+\.\w+)")
REASON = re.compile(r"^\s*<!-- no-run: \S.* -->\s*$")
VARIABLES = r"(?:[A-Z0-9_]+=[^\s;&|]* )*"
OURS = r"(?:reefknot|rk|mkdir|echo|printf)"
COMMAND = re.compile(rf"^\$ (?P<command>{VARIABLES}{OURS}(?:\s.*)?)$")
FOR_A_SHELL = re.compile(r"[|&;<>()$`*?~#]")
BARE_COMMAND = re.compile(rf"^(?P<command>{VARIABLES}{OURS}(?:\s.*)?)$")


class PageError(Exception):
    """The page is written in a way that cannot be checked."""


class SnippetError(Exception):
    """A command of the page failed."""


@dataclass(frozen=True, slots=True)
class Fence:
    """
    A block of the page that is to be run. `line` is that of its first line of content, from 1.

    With a `file` its content is written there instead.
    """

    language: str
    content: str
    line: int
    file: str = ""


def fences(text: str, *, opted_out: bool = False) -> Iterator[Fence]:
    """
    The fences to run, hidden ones included; or those that have `opted_out`.

    One that opts out without a reason is an error, and so is a word that means nothing here.
    """
    lines = text.splitlines()
    for token in MarkdownIt().disable("inline").parse(text):  # what is within a paragraph takes half of the time
        is_hidden = token.type == "html_block" and token.content.startswith("<!-- run")
        if is_hidden and token.map is not None and not opted_out:
            hidden = HIDDEN.match(token.content)
            if hidden is None:
                raise PageError(f"line {token.map[0] + 1}: <!-- run is a line of its own, and so is its -->")
            yield Fence("python", hidden["content"], token.map[0] + 2)
        if token.type != "fence" or token.map is None:
            continue
        start = token.map[0]
        language, *words = token.info.split() or [""]
        if language not in PYTHON | SHELL:
            continue
        if words == ["no-run"]:
            if start == 0 or not REASON.match(lines[start - 1]):
                raise PageError(f"line {start + 1}: no-run needs a line before it: <!-- no-run: reason -->")
            if opted_out:
                yield Fence(language, token.content, start + 2)
            continue
        if opted_out:
            continue
        file = NAMED_FILE.fullmatch(" ".join(words))
        if words and file is None:
            raise PageError(f"line {start + 1}: {' '.join(words)!r} is not known here, only no-run and file=NAME are")
        yield Fence(language, token.content, start + 2, file["name"] if file else "")


def commands(fence: Fence) -> Iterator[tuple[int, str]]:
    """Our own commands in a shell fence, each with its line; a backslash joins it to the next."""
    lines = enumerate(fence.content.splitlines(), fence.line)
    prompted = any(line.startswith("$ ") for line in fence.content.splitlines())
    pattern = COMMAND if prompted or fence.language == "console" else BARE_COMMAND
    for number, line in lines:
        if not (found := pattern.match(line)):
            continue
        command = found["command"]
        while command.endswith("\\"):
            _, following = next(lines, (0, ""))
            command = command[:-1] + following.strip().removeprefix("> ")
        yield number, command


def run_python(fence: Fence, page: Path, namespace: dict[str, object]) -> None:
    """Line numbers are those of the page, so that a traceback points at it."""
    padded = "\n" * (fence.line - 1) + fence.content
    exec(compile(padded, str(page), "exec", dont_inherit=True), namespace)


def run_here(words: list[str]) -> int:
    """The exit code of a command of ours. It leaves folder, environment and arguments of this process as they were."""
    from reefknot.cli import main

    folder, environment, arguments = Path.cwd(), dict(os.environ), sys.argv
    sys.argv = words
    try:
        return main(words[1:])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def run_in_shell(command: str) -> int:
    here = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def run_commands(fence: Fence, page: Path) -> None:
    for line, command in commands(fence):
        needs_shell = FOR_A_SHELL.search(command) or not command.startswith(("reefknot", "rk"))
        code = run_in_shell(command) if needs_shell else run_here(shlex.split(command))
        if code != 0:
            raise SnippetError(f"{page.name}:{line}: `{command}` exited with {code}")


def run(page: Path) -> None:
    # A module of its own in the place of this one: classes of the page find their names, `__main__` guards run.
    module = ModuleType("__main__")
    found = list(fences(page.read_text(encoding="utf-8")))
    sys.modules["__main__"] = module
    for fence in found:
        if fence.file:
            Path(fence.file).write_text(fence.content, encoding="utf-8")
        elif fence.language in PYTHON:
            run_python(fence, page, module.__dict__)
        else:
            run_commands(fence, page)


if __name__ == "__main__":
    sys.path[0] = ""  # what a reader has: the folder they are in
    run(Path(sys.argv[1]))
