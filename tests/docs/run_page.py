"""
Runs the snippets of one page, in order, as a reader would: `run_page.py PAGE`, in a folder that is the reader's own.

Python fences share one namespace. In console and bash fences, lines `$ reefknot …` are run and must exit with 0; other
commands and the output shown are left alone. A fence that cannot run says so, with its reason in the line before:

    <!-- no-run: needs a mailbox -->
    ```python no-run
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt

PYTHON = frozenset({"python", "python3", "py"})
SHELL = frozenset({"console", "bash", "sh", "shell"})
REASON = re.compile(r"^\s*<!-- no-run: \S.* -->\s*$")
COMMAND = re.compile(r"^\$ (?P<command>(?:reefknot|rk)(?:\s.*)?)$")
BARE_COMMAND = re.compile(r"^(?P<command>(?:reefknot|rk)(?:\s.*)?)$")


class PageError(Exception):
    """The page is written in a way that cannot be checked."""


class SnippetError(Exception):
    """A command of the page failed."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A block of the page that is to be run. `line` is that of its first line of content, from 1."""

    language: str
    content: str
    line: int


def fences(text: str) -> Iterator[Fence]:
    """The fences to run. One that opts out without a reason is an error, and so is a word that means nothing here."""
    lines = text.splitlines()
    for token in MarkdownIt().parse(text):
        if token.type != "fence" or token.map is None:
            continue
        start = token.map[0]
        language, *words = token.info.split() or [""]
        if language not in PYTHON | SHELL:
            continue
        if words == ["no-run"]:
            if start == 0 or not REASON.match(lines[start - 1]):
                raise PageError(f"line {start + 1}: no-run needs a line before it: <!-- no-run: reason -->")
            continue
        if words:
            raise PageError(f"line {start + 1}: {' '.join(words)!r} is not known here, only no-run is")
        yield Fence(language, token.content, start + 2)


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


def run_commands(fence: Fence, page: Path) -> None:
    here = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    for line, command in commands(fence):
        done = subprocess.run(["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise SnippetError(f"{page.name}:{line}: `{command}` exited with {done.returncode}")


def run(page: Path) -> None:
    # A module of its own in the place of this one: classes of the page find their names, `__main__` guards run.
    module = ModuleType("__main__")
    found = list(fences(page.read_text(encoding="utf-8")))
    sys.modules["__main__"] = module
    for fence in found:
        if fence.language in PYTHON:
            run_python(fence, page, module.__dict__)
        else:
            run_commands(fence, page)


if __name__ == "__main__":
    sys.path[0] = ""  # what a reader has: the folder they are in
    run(Path(sys.argv[1]))
