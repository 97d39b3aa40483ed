"""
Runs the snippets of one page, in order, as a reader would: `python -m tests.docs.run_page PAGE`, in a folder that is
the reader's own.

Python fences share one namespace. In console and bash fences, lines `$ reefknot …` are run and must exit with 0, and
so are those that make the reader's files and variables (`mkdir`, `mv`, `echo`, `printf`, `python -c`, `export`) or wait
(`until`); other commands are left alone. Each line that is shown beneath a command has to be printed by it, where `…`
stands for anything. A command runs in this process, because starting one for each takes most of the time; one that
needs a shell gets a shell. One that ends in `&` stays up until `kill %N` or the end of the page, and is ready once it
has printed the lines beneath it. A fence that cannot run says so, with its reason in the line before:

    <!-- no-run: needs a mailbox -->
    ```python no-run

A fence of `python file=steps.py` or `yaml file=a.yaml` is not run but written to that file, in the reader's folder.
A fence of `python cell` is a cell of a notebook: it runs within an event loop, the same one for all cells, and may
`await`. `tests/acceptance/test_jupyter.py` runs them in a real kernel.
Python between a line `<!-- run` and a line `-->` is run in its turn and not shown: a check that would only be in the
way. What the page shows must not need it: with `--visible` it is left out.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_it import MarkdownIt

PYTHON = frozenset({"python", "python3", "py"})
SHELL = frozenset({"console", "bash", "sh", "shell"})
HIDDEN = re.compile(r"<!-- run\n(?P<content>.*?)^-->\s*\Z", re.DOTALL | re.MULTILINE)
NAMED_FILE = re.compile(r"file=(?P<name>(?:\w+/)*\w+\.\w+)")
REASON = re.compile(r"^\s*<!-- no-run: \S.* -->\s*$")
VARIABLES = r"(?:[A-Z0-9_]+=[^\s;&|]* )*"
SERVERS = r"gunicorn|uvicorn|curl|python -m pytest|python \w+\.py"
OURS = rf"(?:reefknot|rk|mkdir|mv|echo|printf|export|kill|until|python -c|{SERVERS})"
COMMAND = re.compile(rf"^\$ (?P<command>{VARIABLES}{OURS}(?:\s.*)?)$")
FOR_A_SHELL = re.compile(r"[|&;<>()$`*?~#]")
USUAL_PORTS = ("8321", "4222", r"(?:(?<=127\.0\.0\.1:)|(?<=--port ))8000")
"""The ports that pages name. Tests run side by side, so a page that starts a server gets free ones instead."""
READY_WITHIN_S = 40
BARE_COMMAND = re.compile(rf"^(?P<command>{VARIABLES}{OURS}(?:\s.*)?)$")


class PageError(Exception):
    """The page is written in a way that cannot be checked."""


class SnippetError(Exception):
    """A command of the page failed."""


@dataclass(frozen=True, slots=True)
class Fence:
    """
    A block of the page that is to be run. `line` is that of its first line of content, from 1.

    With a `file` its content is written there instead. A cell may `await`.
    """

    language: str
    content: str
    line: int
    file: str = ""
    is_hidden: bool = False
    is_cell: bool = False


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
            yield Fence("python", hidden["content"], token.map[0] + 2, is_hidden=True)
        if token.type != "fence" or token.map is None:
            continue
        start = token.map[0]
        language, *words = token.info.split() or [""]
        file = NAMED_FILE.fullmatch(" ".join(words))
        if language not in PYTHON | SHELL and file is None:
            continue
        if words == ["no-run"]:
            if start == 0 or not REASON.match(lines[start - 1]):
                raise PageError(f"line {start + 1}: no-run needs a line before it: <!-- no-run: reason -->")
            if opted_out:
                yield Fence(language, token.content, start + 2)
            continue
        if opted_out:
            continue
        is_cell = language in PYTHON and words == ["cell"]
        if words and file is None and not is_cell:
            known = "only no-run, file=NAME and, for Python, cell are"
            raise PageError(f"line {start + 1}: {' '.join(words)!r} is not known here, {known}")
        yield Fence(language, token.content, start + 2, file["name"] if file else "", is_cell=is_cell)


def shown(fence: Fence) -> Iterator[tuple[int, str, list[str]]]:
    """
    Our own commands in a shell fence, each with its line and the output that is shown beneath it.

    A backslash joins a command to its next line.
    """
    lines = list(enumerate(fence.content.splitlines(), fence.line))
    prompted = fence.language == "console" or any(line.startswith("$ ") for _, line in lines)
    pattern = COMMAND if prompted else BARE_COMMAND
    while lines:
        number, line = lines.pop(0)
        if not (found := pattern.match(line)):
            continue
        command = found["command"]
        while command.endswith("\\") and lines:
            command = command[:-1] + lines.pop(0)[1].strip().removeprefix("> ")
        output = list[str]()
        while prompted and lines and not lines[0][1].startswith("$ "):
            output.append(lines.pop(0)[1])
        yield number, command, output


def commands(fence: Fence) -> Iterator[tuple[int, str]]:
    """Our own commands in a shell fence, each with its line."""
    return ((number, command) for number, command, _ in shown(fence))


def missing(lines: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed, apart from blanks; `…` stands for anything within a line."""
    flat = [" ".join(line.split()) for line in printed.splitlines()]
    patterns = [re.escape(" ".join(line.split())).replace("…", ".*") for line in lines if line.strip("… ─")]
    return [one for one in patterns if not any(re.fullmatch(one, line) for line in flat)]


def run_python(fence: Fence, page: Path, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    """Line numbers are those of the page, so that a traceback points at it."""
    padded = "\n" * (fence.line - 1) + fence.content
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if fence.is_cell else 0
    code = compile(padded, str(page), "exec", flags=flags, dont_inherit=True)

    async def run_cell() -> None:
        result = eval(code, namespace)
        if inspect.isawaitable(result):
            await result

    if fence.is_cell:
        runner.run(run_cell())
    else:
        exec(code, namespace)


def run_here(words: list[str]) -> int:
    """The exit code of a command of ours. It leaves folder, environment and arguments of this process as they were."""
    from reefknot.console.cli import main

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


def environment(command: str = "") -> dict[str, str]:
    """The variables of a reader at a terminal, who sees log lines as text unless they go to a file."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return os.environ | {"PATH": path, "REEFKNOT_LOG_FORMAT": "auto" if "2>" in command else "text"}


def run_in_shell(command: str) -> tuple[int, str]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-c", command], env=environment(command), text=True, check=False, **streams)
    return done.returncode, done.stdout


def run_and_print(command: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    if FOR_A_SHELL.search(command) or "--module" in command or not command.startswith(("reefknot", "rk")):
        return run_in_shell(command)  # a module that the reader has changed is loaded again
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        os.environ["REEFKNOT_LOG_FORMAT"] = "text"
        code = run_here(shlex.split(command))
    printed.seek(0)
    return code, printed.read()


def export(command: str) -> None:
    """Set the variables of an `export` for all that follows."""
    done = subprocess.run(
        ["bash", "-c", f"{command}; env -0"], env=environment(), capture_output=True, text=True, check=True
    )
    for name, _, value in (one.partition("=") for one in done.stdout.split("\0")):
        if name and f" {name}=" in command:
            os.environ[name] = value


class Background:
    """The commands of a page that end in `&`, by the numbers that a shell gives them: one more than the highest."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: str, lines: list[str]) -> str:
        """Start a command and wait for its lines; returns what is wrong, or nothing."""
        with tempfile.TemporaryFile() as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            words = ["bash", "-c", command.removesuffix("&")]
            process = subprocess.Popen(words, env=environment(), start_new_session=True, **streams)
            self._started[max(self._started, default=0) + 1] = process
            ends = time.monotonic() + READY_WITHIN_S
            while True:
                ended = process.poll() is not None
                output.seek(0)
                printed = output.read().decode()
                lacks = missing(lines, printed)
                if not lacks or ended or time.monotonic() > ends:
                    return f"did not print {lacks}:\n{printed}" if lacks else ""
                time.sleep(0.05)

    def stop(self, number: int) -> None:
        process = self._started.pop(number)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(50)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def stop_all(self) -> None:
        for number in sorted(self._started, reverse=True):
            self.stop(number)


def run_commands(fence: Fence, page: Path, background: Background) -> None:
    for line, command, lines in shown(fence):
        wrong = ""
        if command.endswith("&"):
            wrong = background.start(command, lines) if lines else "shows no line by which it is ready"
        elif command.startswith("kill %"):
            for number in re.findall(r"%(\d+)", command.partition(";")[0]):
                background.stop(int(number))
        elif command.startswith("export "):
            export(command)
        else:
            code, printed = run_and_print(command)
            print(f"$ {command}\n{printed}")
            lacks = missing(lines, printed)
            if code != 0:
                wrong = f"exited with {code}"
            elif re.search("^Traceback", printed, re.MULTILINE):
                wrong = "ended with a traceback"
            elif lacks:
                wrong = f"did not print {lacks}"
        if wrong:
            raise SnippetError(f"{page.name}:{line}: `{command}` {wrong}")


def free_port() -> int:
    """A port below those that systems give to connections, so that none of them takes it before its server does."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def with_free_ports(text: str) -> str:
    for port in USUAL_PORTS if re.search(r"^\$ .* &$", text, re.MULTILINE) else ():
        text = re.sub(port, str(free_port()), text)
    return text


def run(page: Path, *, visible: bool = False) -> None:
    # A module of its own in the place of this one: classes of the page find their names, `__main__` guards run.
    module = ModuleType("__main__")
    found = list(fences(with_free_ports(page.read_text(encoding="utf-8"))))
    sys.modules["__main__"] = module
    background, runner = Background(), asyncio.Runner()
    try:
        for fence in found:
            if fence.file:
                Path(fence.file).parent.mkdir(parents=True, exist_ok=True)
                Path(fence.file).write_text(fence.content, encoding="utf-8")
            elif fence.language not in PYTHON:
                run_commands(fence, page, background)
            elif not (visible and fence.is_hidden):
                run_python(fence, page, module.__dict__, runner)
    finally:
        runner.close()
        background.stop_all()


if __name__ == "__main__":
    sys.path[:] = ["", *(path for path in sys.path[1:] if path != os.environ["PYTHONPATH"])]  # what a reader has:
    del os.environ["PYTHONPATH"]  # the folder they are in
    run(Path(sys.argv[1]), visible="--visible" in sys.argv[2:])
