"""Every table on a pseudo-terminal of 60, 80 and 120 columns: nothing is wider, and nothing is lost unsaid."""

import ast
import asyncio
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.cells import cell_len

import reefknot as rk
import reefknot.console.cli
from reefknot.console.cli.output import LONGEST_WORD, fitting_columns
from tests.acceptance.folder import until
from tests.warm_commands import run_warm

EXPLAIN = ("policy", "explain", "block:http", "--status", "429")
TABLES: dict[str, list[tuple[str, ...]]] = {
    "job._put_jobs": [("job", "list"), ("job", "list", "--state", "quarantined")],
    "job.put_details": [("job", "show", "gone"), ("quarantine", "show", "gone")],
    "quarantine._list.text": [("quarantine", "list")],
    "quarantine.stats.text": [("quarantine", "stats")],
    "quarantine._put_groups.text": [("quarantine", "stats", "--group")],
    "source_view.put_sources.text": [("source", "list")],
    "source_view.put_source.text": [("source", "show", "vault")],
    "queue._list.text": [("queue", "list")],
    "schedule._list.text": [("schedule", "list")],
    "schedule.show_.text": [("schedule", "show", "nightly")],
    "telemetry._put": [("telemetry", "show")],
    "idempotency.show_key": [("idempotency", "show", "order-7")],
    "idempotency.stats": [("idempotency", "stats")],
    "alert._put": [("alert", "list")],
    "audit._put_analysis": [("audit", "analyse")],
    "worker_and_router._list_workers.text": [("worker", "list")],
    "top._put_view": [("top", "--once")],
    "worker_and_router._put_router": [("router", "status")],
    "policy.put_policies": [("policy", "list")],
    "policy.put_policy": [EXPLAIN, ("policy", "show", "block:http")],
    "policy.put_answer": [("policy", "explain", "connector:imap_mailbox", "--status", "429")],
    "policy.put_schedule": [(*EXPLAIN, "--seed", "7"), ("policy", "schedule", "operation:nats.connect")],
    "policy.show_policy.text": [("policy", "show", "connector:imap_mailbox")],
    "policy.templates": [("policy", "templates")],
    "config.show_config.text": [("config", "show")],
    "submit.Submission._put_table": [("submit", "work.jsonl", "--wait")],
}
"""By the function that prints a table: commands that show it."""

COMMANDS = [words for commands in TABLES.values() for words in commands]
WIDTHS = (60, 80, 120)
PLENTY = 1000

CHILD = """\
import json, sys
from reefknot.console.cli import main
for words in json.loads(sys.argv[1]):
    for stream in (sys.stdout, sys.stderr):
        print("\\x1e", file=stream, flush=True)
    main(words)
"""
CONFIG = """\
worker:
  quarantine_failed: true
  retries:
    v2:
      enabled: true
      default_policy: {max_attempts: 2, base_delay_ms: 20, jitter_type: none}
  queue: {v2: {enabled: true}}
blocks:
  fs: {roots: [files]}
sources:
  vault: {connector: obsidian_vault, path: vault, every: 1h}
  offline: {connector: local_files, path: no-such-folder, cron: "0 7 * * 1-5"}
alerts: {rules: {quarantine_growth: {threshold: 0, for_seconds: 0}}}
schedules:
  nightly: {cron: "30 2 * * *", time_zone: Europe/Berlin, assignment: {job: {type: own.flaky}}}
"""
STEPS = """\
import reefknot as rk

asked = 0

@rk.block("own.flaky")
async def flaky(inputs, context):
    global asked
    asked += 1
    if asked == 1:
        raise ConnectionError("not now")
    return {"words": "one result of several words " * 4}
"""
LONG_ID = "order-2026-01-25-0000000000000000000001"


class Shown(NamedTuple):
    """The lines of one command on a terminal, and its messages."""

    lines: list[str]
    messages: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose store has something for every table, and a system that runs on it."""
    path = tmp_path_factory.mktemp("tables")
    (path / "files").mkdir()
    (path / "vault").mkdir()
    (path / "vault" / "Broken.md").write_text("---\ntags: [never closed\n---\nwords")
    (path / "reefknot.yaml").write_text(CONFIG)
    (path / "steps.py").write_text(STEPS)
    jobs = [
        {"assignment_id": LONG_ID, "tenant_id": "acme", "job": {"type": "own.flaky"}},
        {"assignment_id": "gone", "job": {"type": "fs.blob_get", "payload": {"path": "no/such/file.txt"}}},
    ]
    (path / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in jobs))
    words = [sys.executable, "-m", "reefknot", "up", "--module", "steps"]
    with subprocess.Popen(words, cwd=path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as system:
        try:
            until(lambda: run_warm("submit", "work.jsonl", "--wait", cwd=path, env=os.environ).returncode == 1)
            asyncio.run(keep_a_key(path))
            shown = {"router status": "worker-1", "telemetry show": "local_files", "alert list": "quarantine_growth"}
            for line, text in shown.items():
                until(lambda: text in run_warm(*line.split(), cwd=path, env=os.environ).stdout)  # noqa: B023 - at once
            yield path
        finally:
            system.kill()


async def keep_a_key(path: Path) -> None:
    async def charge() -> dict[str, int]:
        return {"receipt": 7}

    async with rk.open_store(f"sqlite:{path / '.reefknot' / 'state.db'}") as store:
        manager = rk.RetryManager(idempotency=store.idempotency, audit=store.audit)
        await manager.execute_with_retry("API_REQUEST", "charge", charge, idempotency_key="order-7")


def on_a_terminal(path: Path, width: int, commands: list[tuple[str, ...]]) -> list[Shown]:
    """What these commands print on a terminal of this width, without colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with (path / f"messages-{width}").open("w+b") as messages:
        words = [sys.executable, "-c", CHILD, json.dumps(commands)]
        child = subprocess.Popen(
            words, cwd=path, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=messages
        )
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert child.wait(60) == 0
        messages.seek(0)
        said = messages.read().decode().split("\x1e\n")[1:]
    text = re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r\n", "\n")
    outs = [one.removeprefix("\n").splitlines() for one in text.split("\x1e")[1:]]
    assert len(outs) == len(said) == len(commands), said
    return [Shown(lines, message) for lines, message in zip(outs, said, strict=True)]


@pytest.fixture(scope="module")
def terminals(folder: Path) -> dict[int, dict[tuple[str, ...], Shown]]:
    return {
        width: dict(zip(COMMANDS, on_a_terminal(folder, width, COMMANDS), strict=True)) for width in (*WIDTHS, PLENTY)
    }


SENTENCE = re.compile(
    r"Retried: |Not retried: |Under load: |gate |[a-z]+:\S+: |retries per minute|\d+ events|router "
    r"|submitted so far|reefknot top|jobs  |rates  |\d{4}-|\S+: (its|it|no|paused|reefknot|\d+) |\d+ documents? could "
)
"""Lines of text around a table. A terminal breaks them."""


def table_of(shown: Shown) -> list[str]:
    return [line for line in shown.lines if not SENTENCE.match(line)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_table_fits_the_terminal_and_says_what_it_leaves_out(
    terminals: dict[int, dict[tuple[str, ...], Shown]], words: tuple[str, ...], width: int
) -> None:
    shown, whole = terminals[width][words], terminals[PLENTY][words]
    lines = table_of(shown)

    assert len(lines) > 1, "it shows something"
    assert [line for line in lines if cell_len(line) > width] == []
    text = " ".join(lines)
    left_out = re.findall(r"left out, to fit \d+ columns: (.*); --wide shows all", shown.messages)
    names = set(left_out[0].split(", ")) if left_out else set()
    assert not names or width >= 80, "below 80 columns nothing is left out"
    header = re.split(r" {3,}", table_of(whole)[0])
    for name in header:
        missing = [word for word in name.split() if word not in text.split()]
        assert not missing or name in names or not _has_values(table_of(whole), name), (name, text)
    if not names:
        words_of = {word[:LONGEST_WORD] for line in table_of(whole)[2:] for word in line.split()}
        assert [word for word in words_of if _is_settled(word) and word not in text] == []


def _is_settled(word: str) -> bool:
    """Whether a word of a table is the same a second later, and at every width: no time, no bar, no line."""
    return re.search(r"[0-9│█·◆─]", word) is None


def _has_values(lines: list[str], name: str) -> bool:
    """Whether a column has something in it, where the terminal is wide enough for all."""
    start = lines[0].index(name)
    return any(line[start : start + len(name)].strip() for line in lines[2:])


def test_explain_keeps_where_a_value_comes_from(terminals: dict[int, dict[tuple[str, ...], Shown]]) -> None:
    for width in WIDTHS:
        text = "\n".join(terminals[width][EXPLAIN].lines)
        assert "source" in text
        assert re.search(r"reefknot\.yaml:\d+:\d+", text), text


def test_wide_shows_all_columns_however_narrow_the_terminal_is(folder: Path) -> None:
    commands = [(*words, "--wide") for words in (("job", "list"), ("quarantine", "list"), ("policy", "list"))]
    for shown in on_a_terminal(folder, 60, [*commands, ("worker", "list", "--wide")]):
        assert "left out" not in shown.messages
        assert max(map(len, shown.lines)) > 60
        assert not any(line.startswith(" ") for line in shown.lines[2:] if "source" not in line), "no cell is broken"


def test_every_function_that_prints_a_table_is_tested_here() -> None:
    printers = {"put_table", "put_jobs", "put_fields"}
    found = set()
    for file in Path(reefknot.console.cli.__file__).parent.rglob("*.py"):
        if file.stem != "output":
            found |= {f"{file.stem}.{name}" for name in _callers(ast.parse(file.read_text()), printers)}
    assert found == set(TABLES)


def _callers(tree: ast.AST, called: set[str], path: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that call one of these, each by the names of what it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _callers(node, called, (*path, node.name))
        else:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called:
                yield ".".join(path)
            yield from _callers(node, called, path)


def test_a_table_that_would_lose_a_column_is_noticed() -> None:
    """The control: what a terminal of 60 columns did to six columns before."""
    columns = ("target", "attempts", "waits", "time limit", "overrides for", "defined in")
    row = [["operation:nats.key_value.put"], ["4 (1 + 3)"], ["100 ms"], ["no limit"], ["rate_limited"], ["built-in"]]

    whole = ("target", "attempts")
    optional = ("overrides for", "defined in")

    assert fitting_columns(columns, [row], width=60, whole=whole, optional=optional) is None, "blocks of lines"
    at_80 = fitting_columns(columns, [row], width=80, whole=whole, optional=optional)
    assert at_80 is not None
    assert 4 not in at_80, "the first optional column goes first"
    assert 5 in at_80
    assert len(fitting_columns(columns, [row], width=120) or {}) == 6
