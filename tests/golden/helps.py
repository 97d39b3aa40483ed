"""
The help of every command, as the program lists them itself; run as a process of its own, it prints them as JSON.

A process of its own, because a help keeps the width with which it was first shown in a process.
"""

import contextlib
import io
import json
import re

from reefknot.console.cli import main


def subcommands(help_text: str) -> list[str]:
    """The names in the panel of commands that a help shows."""
    names, inside = [], False
    for line in help_text.splitlines():
        if line.startswith("╭"):
            inside = line.startswith("╭─ Commands ")
        elif inside and (found := re.match(r"│ ([a-z][a-z0-9-]*)(?: |$)", line)):
            names.append(found[1])
    return names


def helps() -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of `--help`, by the words of the command; the root has none."""
    found: dict[str, tuple[int, str, str]] = {}
    waiting = [""]
    while waiting:
        words = waiting.pop(0)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words.split(), "--help"])
        found[words] = (int(code), out.getvalue(), err.getvalue())
        waiting += [f"{words} {one}".strip() for one in subcommands(out.getvalue())]
    return found


if __name__ == "__main__":
    print(json.dumps(helps()))
