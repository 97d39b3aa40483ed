"""A folder in which a person types commands: some in this process, some as processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from reefknot.audit.model.chain import Head, link
from tests.unit.console.cli.running import Commands, Ended
from tests.warm_commands import WarmCommand, run_cold

CONFIG = """\
worker:
  quarantine_failed: true
  retries: {v2: {enabled: true, default_policy: {max_attempts: 2, base_delay_ms: 20, jitter_type: none}}}
  queue: {v2: {enabled: true}}
blocks:
  fs: {roots: [files]}
"""
MODULE = """\
import asyncio
import os
import reefknot as rk

@rk.block("own.nap")
async def nap(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(inputs.get("name", "") + "\\n")
    await asyncio.sleep(inputs["seconds"])
    return {"slept": inputs["seconds"]}

@rk.block("own.wait")
async def wait(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(inputs.get("name", "") + "\\n")
    while not os.path.exists("go"):
        await asyncio.sleep(0.05)
    return {}

@rk.block("own.flaky")
async def flaky(inputs, context):
    if context.attempt <= inputs.get("failures", 1):
        raise ConnectionError("not now")
    return {}
"""
MANY = """\
import contextlib, io, json, sys
from reefknot.console.cli import main
if "newer" in sys.argv:
    from tests.acceptance.newer import become_newer
    become_newer()
ended = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""
PRODUCT = ("-m", "reefknot")
PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]

NO_DASHBOARD = {"REEFKNOT__DASHBOARD__ENABLED": "false"}
"""For systems of tests that are not about it: they start and end a little faster."""


def without(protection: str) -> tuple[str, ...]:
    """The program without one of its protections (`weakened`), or as it is."""
    return ("-m", "tests.acceptance.weakened", protection) if protection else PRODUCT


class Folder:
    """A folder with a configuration, and commands that run in it: on the usual store, or on `engine`."""

    def __init__(self, path: Path, commands: Commands, *, engine: str = "") -> None:
        self.path = path
        self.engine = engine or f"sqlite:{path / '.reefknot' / 'state.db'}"
        """The address of the store, for programs that are given one."""
        self._commands = commands
        (path / "files").mkdir()
        (path / "files" / "a.txt").write_text("ahoy")
        (path / "reefknot.yaml").write_text(CONFIG)
        (path / "naps.py").write_text(MODULE)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        self._environment = kept | {"PYTHONWARNINGS": "error", "PYTHONUTF8": "1", "COLUMNS": "200"}
        self._environment["REEFKNOT_LOG_FORMAT"] = "text"
        if engine:
            self.set_variable("REEFKNOT__ENGINE", engine)
        self._started: list[subprocess.Popen[str]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The variables of all commands, for a process that is not started by `start`."""
        return dict(self._environment)

    def set_variable(self, name: str, value: str) -> None:
        """Set a variable of the environment for all commands."""
        self._commands.environment.setenv(name, value)
        self._environment[name] = value

    def __call__(self, *words: str) -> Ended:
        """A short command, in this process: starting another for each would be most of the time."""
        done = self._commands(*words)
        assert "Traceback" not in done.err, done.err
        return done

    @property
    def has_store(self) -> bool:
        """Whether a command finds the store; one on a server is always there."""
        return not self.engine.startswith("sqlite:") or (self.store.exists() and self.store.stat().st_size > 0)

    @property
    def store(self) -> Path:
        """The file of the store, where that is a file."""
        return self.path / ".reefknot" / "state.db"

    @property
    def config(self) -> Path:
        return self.path / "reefknot.yaml"

    def configure(self, more: str) -> None:
        """Append to the configuration."""
        self.config.write_text(self.config.read_text() + more)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text)
        return path

    def write_lines(self, name: str, *lines: Mapping[str, Any]) -> None:
        """A file of JSON with a document a line."""
        self.write(name, "".join(f"{json.dumps(line)}\n" for line in lines))

    def json(self, *words: str) -> Any:
        done = self(*words, "--json")
        assert done.code == 0, done.err
        return done.json

    def events(self, kind: str, *words: str) -> list[dict[str, Any]]:
        """The audited events of a type, the oldest first."""
        done = self("audit", "tail", "--type", kind, "--lines", "1000", "--json", *words)
        return [json.loads(line)["event"] for line in done.out.splitlines()]

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.json("job", "show", name)
        return found

    def state(self, name: str) -> str:
        return str(self.job(name)["state"])

    def states(self) -> dict[str, str]:
        """The state of each job by its id."""
        return {one["id"]: one["state"] for one in self.json("job", "list", "--limit", "1000")["jobs"]}

    def have_succeeded(self, *names: str) -> bool:
        found = self.states()
        return all(found.get(name) == "succeeded" for name in names)

    def submit(self, kind: str, id_: str, *words: str, **inputs: object) -> None:
        done = self("submit", "--type", kind, "--id", id_, "--inputs", json.dumps(inputs), *words)
        assert done.code == 0, done.err

    def start(
        self, *words: str, program: Sequence[str] = PRODUCT, before: Sequence[str] = (), **given: Any
    ) -> subprocess.Popen[str]:
        """
        A command as a process of its own.

        `program` is what Python runs, and words before the command; `before` is a program that starts Python.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | given
        process: subprocess.Popen[str]
        path = os.pathsep.join([str(ROOT), self._environment.get("PYTHONPATH", "")])
        off = NO_DASHBOARD if words[:1] == ("up",) else {}
        environment = off | self._environment | ({} if program == PRODUCT else {"PYTHONPATH": path})
        if program[0] != "-m" or before or "preexec_fn" in given:
            command = [*before, sys.executable, *program, *words]
            process = subprocess.Popen(command, cwd=self.path, env=environment, text=True, **streams)
        else:
            process = WarmCommand([*program[1:], *words], cwd=self.path, env=environment, text=True, **streams)
        self._started.append(process)
        return process

    def up(self, *words: str, **start: Any) -> subprocess.Popen[str]:
        """A system, as soon as it says that it is up."""
        process = self.start("up", "--module", "naps", *words, **start)
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while " WARNING reefknot: " in said[-1]:  # of the work that it has taken up by then
            said.append(process.stderr.readline())
        assert said[-1].startswith("up "), said
        return process

    def part(self, kind: str, *words: str, protection: str = "") -> subprocess.Popen[str]:
        """A router or a worker, as soon as it says that it is ready; what it says before is of its configuration."""
        process = self.start(kind, "start", *words, program=without(protection))
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while not (lines[-1].startswith(f"{kind} ") and " is ready" in lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        return process

    def ends(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Its exit code, and what it said."""
        out, err = process.communicate(timeout=PATIENCE_S)
        assert not re.search("^Traceback", err or "", re.MULTILINE), err  # those of steps are indented
        return process.returncode, out, err

    def stop(self, process: subprocess.Popen[str], how: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send it a signal: its exit code, and what it said."""
        process.send_signal(how)
        return self.ends(process)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End it as a power cut would."""
        process.kill()
        process.wait()

    def as_user(self, *commands: Sequence[str], by: str = "this version") -> list[tuple[int, str, str]]:
        """
        Code and output of each command, in one process of a user to whom permissions apply.

        Root may write everything, and gives its privileges away. `by="newer"` runs them as a made-up newer version.
        """
        plain = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
        words = [*plain, sys.executable, "-c", MANY, json.dumps(commands), by]
        done = run_cold(*words, cwd=self.path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        ended: list[tuple[int, str, str]] = json.loads(done.stdout)
        return ended

    def run_file(self, name: str, *words: str, **start: Any) -> tuple[int, str, str]:
        """`reefknot run` as a process, to its end."""
        return self.ends(self.start("run", name, "--module", "naps", *words, **start))

    def nap(self, name: str, seconds: float) -> None:
        self.submit("own.nap", name, seconds=seconds, name=name)

    def wait(self, name: str) -> None:
        """A step that goes on until `go` is called."""
        self.submit("own.wait", name, name=name)

    def go(self) -> None:
        (self.path / "go").touch()

    def begun(self) -> list[str]:
        file = self.path / "begun.txt"
        return file.read_text().split() if file.exists() else []

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def until(holds: Callable[[], bool], *, patience: float = PATIENCE_S) -> None:
    """A bounded wait for another process. It gets most of the processor: a look that takes long is a rare one."""
    ends = time.monotonic() + patience
    while True:
        began = time.monotonic()
        if holds():
            return
        now = time.monotonic()
        assert now < ends, "it did not come to that"
        time.sleep(max(0.05, 3 * (now - began)))


def events_in(path: Path) -> list[dict[str, Any]]:
    """Every event in the file of a store, as it stands there."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return [json.loads(body) for (body,) in connection.execute("SELECT body FROM audit ORDER BY sequence")]
    finally:
        connection.close()


def rehash(connection: apsw.Connection) -> None:
    """Make the chain of a store again, as a forger does who knows how it is made."""
    head = Head(str(connection.execute("SELECT chain FROM audit_head").get))
    for sequence, body in connection.execute("SELECT sequence, body FROM audit ORDER BY sequence").fetchall():
        head, hashed = link(head, str(body).encode())
        connection.execute("UPDATE audit SET hash = ? WHERE sequence = ?", (hashed, sequence))
    connection.execute("UPDATE audit_head SET hash = ?", (head.hash,))


def throughout(seconds: float, holds: Callable[[], bool]) -> None:
    """Look now and then for so long, and find that it holds every time."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert holds(), "it did not stay that way"
        time.sleep(0.2)
