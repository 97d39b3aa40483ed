"""
Follows one page of a fresh clone, from top to bottom, as its reader would.

    follow.py CLONE PAGE        in a folder of one's own

Python fences share one namespace. Python between lines `<!-- run` and `-->` is not shown to the reader, and belongs to
it. A fence that names a file is written to it. Of console fences every command is run, and what the page shows beneath
it has to be in what it prints. A command that this reader cannot follow is an error: the page may not lead anywhere
untried.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.docs.run_page import SHELL, fences
from tests.warm_commands import run_cold

MADE = "-o .venv/.made -o .venv/.run"
"""The environment is there already: nothing is installed again."""
INSTEAD = {
    "make run": f"make {MADE} run ARGS=--fast",
    "make test": f"make {MADE} -n test",
    "python -m pip install .": "python -m pip check",
}
"""The same, in a clone whose environment is linked to the one that runs this: shorter, and without going in circles."""


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
    line = INSTEAD.get(command, command)
    done = run_cold("bash", "-c", line, cwd=None if ours else clone, timeout=None)
    if done.returncode != 0:
        return f"`{command}` exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lacks = missing(shown, done.stdout + done.stderr)
    print(f"$ {command}\n{done.stdout[-3000:]}")
    return f"`{command}` does not print {lacks}; it prints\n{done.stdout[-2000:]}" if lacks else None


def follow(clone: Path, page: Path) -> None:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    for fence in list(fences(page.read_text(encoding="utf-8"))):
        if fence.file:
            Path(fence.file).write_text(fence.content, encoding="utf-8")
        elif fence.language in SHELL:
            for command, shown in commands(fence.content):
                wrong = run_command(command, shown, clone)
                if wrong is not None:
                    sys.exit(f"{page.name}:{fence.line}: {wrong}")
        else:
            code = compile("\n" * (fence.line - 1) + fence.content, str(page), "exec", dont_inherit=True)
            exec(code, module.__dict__)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), Path(sys.argv[2]))
