"""
Run commands in process, make their output comparable, and compare it with the golden files.

What varies from run to run is replaced by a word in angle brackets; `RULES` lists every replacement. Everything else is
compared byte for byte.
"""

import contextlib
import difflib
import io
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reefknot as rk
from reefknot.console.cli import main
from reefknot.runtime.processes import own_identity
from tests.warm_commands import WarmCommand

FILES = Path(__file__).parent / "files"
WRITES = os.environ.get("REEFKNOT_GOLDEN") == "write"
SETTLED = ("WORKER_RETRIES_V2_ENABLED", "WORKER_QUEUE_V2_ENABLED", "FORCE_COLOR", "PYTHONIOENCODING")
"""Variables that change answers, and so are taken away, with every one that begins with REEFKNOT."""

_HOST = re.escape(socket.gethostname())
_USER = re.escape(own_identity().user)
_MEASURED = (
    "elapsed_s|elapsed_seconds|elapsed|latency_ms|oldest_age_s|oldest_due_s|age_s|due_in_s|lease_seconds_left"
    "|heard_at|heartbeat_at|probed_at|attempt_seconds"
)
"""Fields that hold a measured time, in seconds or milliseconds."""
_LENGTH = r"\d+(?:\.\d+)? (?:ms|s|min)\b"
RULES: list[tuple[str, str]] = [
    # Times: 2026-07-01T21:15:00.123Z with or without fraction and zone, except the example that help and errors give;
    # 21:15:00 alone; milliseconds since 1970, of these years.
    (r"(?!2026-01-25[T ]21:15:00)\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?", "<time>"),
    (r"(?<=dashboard: )http://127\.0\.0\.1:\d+/", "<dashboard>"),
    (r"\S+/dashboard-\d+\.url", "<file>"),
    (r"the dashboard's usual port is in use, so it has a free one\n", ""),  # tests run side by side
    (r"(?<![\d:.T])\d\d:\d\d:\d\d(?:\.\d+)?(?![\d:])", "<clock>"),
    (r"(?<![\w.-])1[6-9]\d{11}(?![\w.])", "<ms>"),
    # Hashes of events depend on times; ids are the seed of the process and a number; chains are named by chance.
    (r'(?<!book_hash": ")(?<!book_hash":")(?<!fingerprint )(?<!, now )\b[0-9a-f]{64}\b', "<hash>"),
    (r"(?<!\d\.)\b[0-9a-f]{16}-[0-9a-f]+\b", "<id>"),  # a number such as 9.123456789012345e-05 is none
    (r"\b(chain )[0-9a-f]{16}\b", r"\1<chain>"),
    (r'("chain": ?")[0-9a-f]{16}"', r'\1<chain>"'),
    (r'("draw": ?)\d[\d.e-]*', r"\1<draw>"),
    # Who and where.
    (r'("(?:pid|process)": ?)\d+', r"\1<pid>"),
    (r"\bprocess=\d+", "process=<pid>"),
    (rf"\bhost={_HOST}(?= )", "host=<host>"),
    (rf'("(?:os_user|actor)": ?"){_USER}"', r'\1<user>"'),
    (rf"\b(os_user|actor)={_USER}(?= )", r"\1=<user>"),
    (r'("(?:rules|result)_hash": ?")[0-9a-f]{16,32}"', r'\1<hash>"'),
    (r'("(?:duration_ms|mean_service_ms)": ?)\d[\d.e-]*', r"\1<duration>"),
    (r"\bduration_ms=\d+", "duration_ms=<duration>"),
    (rf"\bsubmitted: by {_USER} on {_HOST}, process \d+", "submitted: by <user> on <host>, process <pid>"),
    (r"\bpid \d+", "pid <pid>"),
    (rf'("host": ?"){_HOST}"', r'\1<host>"'),
    (rf"(pid <pid> on ){_HOST}\b", r"\1<host>"),
    # Measured times, by the name of their field in JSON and in tables, or by the words before them.
    (rf'("(?:{_MEASURED})": ?)\d[\d.e-]*', r"\1<duration>"),
    (rf"^((?:{_MEASURED}) +)\d[\d.e-]*$", r"\1<duration>"),
    (
        rf"(\battempts? in|\bassignments? in|\bran for|<host>, up for|\bdue waits|\bbeen due for) {_LENGTH}",
        r"\1 <duration>",
    ),
    (rf"^(up for) {_LENGTH}(?=: (?:nothing|\d+ ))", r"\1 <duration>"),
    # Sizes of store files: how many digits a duration has may take another page.
    (r"(copied to \S+, |about 0 of )\d+ bytes", r"\1<size> bytes"),
    (r'("bytes": ?)\d+', r"\1<size>"),
    # Versions.
    (rf"^reefknot {re.escape(rk.__version__)}$", "reefknot <version>"),
    (r"\b(SQLite )\d+\.\d+\.\d+", r"\1<version>"),
    (r'("sqlite": ?")\d+\.\d+\.\d+"', r'\1<version>"'),
]
_COMPILED = [(re.compile(pattern, re.MULTILINE), word) for pattern, word in RULES]


NOUNS = ("", "policy")
"""Command lines that show a help."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Folder:
    """A folder in which commands run, with an environment that says nothing."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.environment = monkeypatch
        monkeypatch.chdir(path)
        monkeypatch.setattr(sys, "path", sys.path[:])
        for name in [one for one in os.environ if one in SETTLED or one.startswith("REEFKNOT")]:
            monkeypatch.delenv(name)
        settled = {
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "TZ": "UTC",
            "LOGNAME": "tester",
            "LANG": "C.UTF-8",
            "REEFKNOT_LOG_FORMAT": "text",  # as a terminal shows it; test_log_lines.py has the other form
        }
        for name, value in settled.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(path / "no-such-folder"))
        monkeypatch.setenv("HOME", str(path))

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file, and the folders above it."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def run(self, line: str) -> Ended:
        """Run one command line. A dashboard would print a port and a token of its own: systems are run without."""
        with pytest.MonkeyPatch.context() as patch:
            if line.startswith("up "):
                patch.setenv("REEFKNOT__DASHBOARD__ENABLED", "false")
            return self._run(line)

    def _run(self, line: str) -> Ended:
        """
        Run one command line, without the program's name, as a shell would split it.

        Steps of one's own go into a registry that the process has once, and a help keeps the width with which it was
        first shown; other tests change both. Such commands get a process of their own.
        """
        if "--module golden_steps" in line or line in NOUNS:
            return self.run_apart(line)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _no_log_handlers():
            try:
                code = int(main(shlex.split(line)))
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
        return Ended(code, out.getvalue(), err.getvalue())

    def run_apart(self, line: str, given: str = "") -> Ended:
        """The same in a process of its own, with this on its stdin."""
        process = started(line, self.path, stdin=subprocess.PIPE)
        out, err = process.communicate(given, timeout=60)
        return Ended(process.returncode, out, err)

    def golden(self, line: str, ended: Ended) -> str:
        """The text of a golden file."""
        parts = [f"$ reefknot {line}".rstrip(), f"exit code: {ended.code}"]
        for name, text in (("stdout", ended.out), ("stderr", ended.err)):
            lines = normal(text, self.path)
            mark = "" if not lines or lines.endswith("\n") else "\n<no newline at the end>"
            parts.append(f"--- {name}\n{lines}{mark}".rstrip("\n"))
        return "\n".join(parts) + "\n"


@contextlib.contextmanager
def _no_log_handlers() -> Iterator[None]:
    """Without pytest's own handlers, so that warnings go to stderr as they do in a process of its own."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = kept


def normal(text: str, folder: Path) -> str:
    """The text without what varies from run to run."""
    text = _in_order(text)
    for path in (str(folder.resolve()), str(folder)):
        text = text.replace(path, "<tmp>")
    for pattern, word in _COMPILED:
        text = pattern.sub(word, text)
    if re.search("^job .* age ", text):
        text = re.sub(rf"(?<=  ){_LENGTH}", "<duration>", text)
    return _without_layout(text) if "──" in text and re.search("<(?:duration|id|pid)>", text) else text


def _without_layout(table: str) -> str:
    """
    A table without the widths of its columns and the places where its lines break.

    Only for tables that hold something whose length varies: that moves everything beside it.
    """
    table = re.sub(r" *\n {8,}", " ", table)
    return re.sub("─+", "──", re.sub(" {2,}", "  ", table))


def _in_order(text: str) -> str:
    """
    What happened to a job (`job show`, `quarantine show`), by kind; in tables, by text.

    Router and worker write at the same time, and the program sorts by milliseconds: the order of kinds is chance.
    """
    if text.startswith("field "):
        lines = text.splitlines(keepends=True)
        told = [number for number, line in enumerate(lines) if re.match(r"\d{4}-\d\d-\d\dT\S+  \w", line)]
        if told:
            first, last = told[0], told[-1] + 1
            lines[first:last] = sorted(lines[first:last], key=lambda line: line.split(maxsplit=1)[1])
        return "".join(lines)
    if not text.startswith("{\n") or not re.search(r'^  "(?:events|history)": \[\n', text, re.MULTILINE):
        return text
    document = json.loads(text)
    assert json.dumps(document, indent=2, ensure_ascii=False) + "\n" == text, "JSON is written in another way"
    for name, kind in (("events", "event_type"), ("history", "what")):
        document.get(name, []).sort(key=lambda one, kind=kind: one[kind])
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


Step = tuple[str, str] | Callable[[Folder], None]
"""The name of a case and its command line, or something that is done between two cases."""


def both(name: str, line: str) -> list[Step]:
    """The same for people and for programs."""
    return [(name, line), (f"{name}_json", f"{line} --json")]


class Scenario(NamedTuple):
    """Commands that run one after the other in one folder."""

    name: str
    steps: list[Step]

    def cases(self) -> list[str]:
        """The names of the golden files."""
        return [f"{self.name}.{step[0]}" for step in self.steps if isinstance(step, tuple)]


def played(scenario: Scenario, folder: Folder) -> dict[str, str]:
    """Run a scenario; gives the text of each of its golden files."""
    found: dict[str, str] = {}
    for step in scenario.steps:
        if isinstance(step, tuple):
            name, line = step
            found[f"{scenario.name}.{name}"] = folder.golden(line, folder.run(line))
        else:
            step(folder)
    return found


def compare(found: dict[str, str]) -> None:
    """Fail with the differences between these texts and the golden files; in write mode, write them."""
    problems = []
    for name, text in found.items():
        path = FILES / f"{name}.txt"
        if WRITES:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file():
            problems.append(
                f"{name}: there is no golden file; REEFKNOT_GOLDEN=write pytest tests/golden writes it\n{text}"
            )
        elif (kept := path.read_text(encoding="utf-8")) != text:
            was, now = kept.splitlines(keepends=True), text.splitlines(keepends=True)
            problems.append("".join(difflib.unified_diff(was, now, f"golden/{name}.txt", "now")))
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


_helps: dict[str, Ended] = {}
"""The answer of `all_commands`, which is the same in every folder."""


def all_commands(folder: Folder) -> dict[str, Ended]:
    """The help of the root and of every command, as the program lists them itself, by the words of the command."""
    if not _helps:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("helps.py"))],
            cwd=folder.path,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=True,
        )
        _helps.update({words: Ended(*ended) for words, ended in json.loads(done.stdout).items()})
    return _helps


def started(line: str, folder: Path, **given: Any) -> subprocess.Popen[str]:
    """A command as a process of its own, as a shell would split it."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given
    return WarmCommand(["reefknot", *shlex.split(line)], cwd=folder, env=os.environ, encoding="utf-8", **streams)
