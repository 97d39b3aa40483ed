"""
Follows one page of a fresh clone, from top to bottom, as its reader would.

    follow.py CLONE PAGE        in a folder of one's own

Python fences share one namespace. Python between lines `<!-- run` and `-->` is not shown to the reader, and belongs to
it. A fence that names a file is written to it. Of console fences every command is run, and what the page shows beneath
it has to be in what it prints. A command that this reader cannot follow is an error: the page may not lead anywhere
untried.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PYTHON = frozenset({"python", "python3", "py"})
SHELL = frozenset({"console", "bash", "sh", "shell"})
MADE = "-o .venv/.made -o .venv/.run"
"""The environment is there already: nothing is installed again."""
INSTEAD = {
    "make run": f"make {MADE} run ARGS=--fast",
    "make test": f"make {MADE} -n test",
    "python -m pip install .": "python -m pip check",
}
"""The same, in a clone whose environment is linked to the one that runs this: shorter, and without going in circles."""


def fences(text: str) -> Iterator[tuple[str, str, int]]:
    """Language, content, and the line it begins in. What opts out of being run is left to the reader."""
    inside: list[str] | None = None
    language, begin, indent = "", 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"^(\s*)```(.*)$", line)
        if inside is None and line == "<!-- run":
            indent, language, begin, inside = 0, "python", number + 1, []
        elif line == "-->" and inside is not None:
            yield language, "\n".join(inside) + "\n", begin
            inside = None
        elif fence is None:
            if inside is not None:
                inside.append(line[indent:])
        elif inside is None:
            indent, language, begin, inside = len(fence[1]), fence[2].strip(), number + 1, []
        else:
            yield language, "\n".join(inside) + "\n", begin
            inside = None


def commands(content: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, with what the page shows beneath it."""
    command, shown = "", list[str]()
    for line in [*content.splitlines(), "$ "]:
        if command.endswith("\\"):
            command = command[:-1] + line.strip().removeprefix("> ")
        elif line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:].split("   #")[0].split("  #")[0].strip(), []
        elif line.strip():
            shown.append(line)


def missing(shown: list[str], printed: str) -> list[str]:
    """What the page shows and the command did not print. An ellipsis stands for anything, blanks for any blanks."""
    flat = " ".join(printed.split())
    pieces = [" ".join(piece.split()) for line in shown for piece in line.split("…")]
    return [piece for piece in pieces if piece and piece not in flat]


def run_command(command: str, shown: list[str], clone: Path) -> str | None:
    """None when all is well."""
    ours = re.match(r"(reefknot|rk|mkdir|echo|printf)\b", command)
    if not ours and command not in INSTEAD:
        return f"`{command}`: not known how to follow this"
    done = subprocess.run(
        ["bash", "-c", INSTEAD.get(command, command)],
        cwd=None if ours else clone,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return f"`{command}` exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lacks = missing(shown, done.stdout + done.stderr)
    print(f"$ {command}\n{done.stdout[-3000:]}")
    return f"`{command}` does not print {lacks}; it prints\n{done.stdout[-2000:]}" if lacks else None


def follow(clone: Path, page: Path) -> None:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    for language, content, line in list(fences(page.read_text(encoding="utf-8"))):
        named = re.fullmatch(r"python file=(\w+\.py)", language)
        if named is not None:
            Path(named[1]).write_text(content, encoding="utf-8")
        elif language in PYTHON:
            exec(compile("\n" * (line - 1) + content, str(page), "exec", dont_inherit=True), module.__dict__)
        elif language in SHELL:
            for command, shown in commands(content):
                wrong = run_command(command, shown, clone)
                if wrong is not None:
                    sys.exit(f"{page.name}:{line}: {wrong}")


if __name__ == "__main__":
    follow(Path(sys.argv[1]), Path(sys.argv[2]))
