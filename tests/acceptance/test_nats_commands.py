"""Commands on a store on NATS, each a process of its own: what is wrong is said by name, and no secret is shown."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import nats
import pytest

from reefknot.app.nats_servers import NatsServer, find_nats_server, running_nats
from reefknot.runtime.seeds import new_id
from tests.acceptance.folder import until
from tests.nats_servers import kill, restart
from tests.warm_commands import WarmCommand, run_warm

FINE, USAGE, UNREACHABLE, FORBIDDEN, MISCONFIGURED = 0, 2, 69, 77, 78
LONG_S = 120.0
TOKEN = "tok-Zq81-never-shown"
STEPS = """\
import reefknot

@reefknot.block("own.hello")
def hello(inputs, context):
    return {"hello": inputs.get("name", "world")}
"""
TOO_OLD = """
import sys
from reefknot.engines.jetstream import connection
connection.OLDEST_SERVER = (99, 0, 0)
from reefknot.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Person:
    """Types commands in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        self.environment = kept | {"COLUMNS": "200", "XDG_CONFIG_HOME": str(folder)}
        (folder / "steps.py").write_text(STEPS)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._fine(run_warm(*words, cwd=self.folder, env=self.environment, timeout=LONG_S))

    def cold(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Python runs these words, from its start."""
        return self._fine(
            subprocess.run(
                [sys.executable, *words],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=LONG_S,
                check=False,
            )
        )

    def _fine(self, ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def refused(self, code: int, *words: str, program: Sequence[str] = ()) -> str:
        """What a command says that must end with this code, and has no data."""
        ended = self.cold(*program, *words) if program else self(*words)
        assert ended.returncode == code, (ended.returncode, ended.stderr)
        assert ended.stdout == ""
        return ended.stderr

    def done(self, *words: str) -> str:
        ended = self(*words)
        assert ended.returncode == FINE, ended.stderr
        return ended.stdout

    @contextmanager
    def running(self, *words: str) -> Iterator[Path]:
        """A command that goes on, and the file with what it says on stderr."""
        said = self.folder / "said.txt"
        with said.open("w") as file:
            streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": file}
            process = WarmCommand(["reefknot", *words], cwd=self.folder, env=self.environment, **streams)
        try:
            yield said
            process.send_signal(SIGTERM)
            process.wait(LONG_S)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def person(tmp_path: Path) -> Person:
    folder = tmp_path / "person"
    folder.mkdir()
    return Person(folder)


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    """A store of its own on the shared server."""
    return f"{nats_server.url}/{new_id()}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def other_server(folder: Path, settings: str) -> Iterator[str]:
    """The URL of a server with settings that `running_nats` does not have."""
    folder.mkdir()
    (folder / "server.conf").write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n{settings}\n')
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [find_nats_server(), "--config", str(folder / "server.conf")], stdout=log, stderr=log, cwd=folder
        )
    try:
        until(lambda: any(file.stat().st_size for file in folder.glob("*.ports")))
        (ports,) = folder.glob("*.ports")
        yield json.loads(ports.read_text())["nats"][0]
    finally:
        process.kill()
        process.wait()


def ask(url: str, subject: str, body: Any = None) -> Any:
    async def story() -> Any:
        client = await nats.connect(url)
        try:
            answer = await client.request(subject, b"" if body is None else json.dumps(body).encode(), timeout=10)
            return json.loads(answer.data)
        finally:
            await client.close()

    return asyncio.run(story())


def edit(url: str, stream: str, **changes: Any) -> None:
    found = ask(url, f"$JS.API.STREAM.INFO.{stream}")["config"]
    answer = ask(url, f"$JS.API.STREAM.UPDATE.{stream}", found | changes)
    assert "error" not in answer, answer


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("job", "list"), ("submit", "--type", "own.hello"), ("up",), ("worker", "list")])
def test_where_no_server_is_a_command_says_so(person: Person, words: tuple[str, ...]) -> None:
    (person.folder / "reefknot.yaml").write_text("nats: {patience_seconds: 1}\n")
    said = person.refused(UNREACHABLE, *words, "--engine", f"nats://127.0.0.1:{free_port()}")

    assert "the server cannot be reached" in said
    assert "check that a NATS server runs there" in said


def test_a_server_without_jetstream_is_named(person: Person, tmp_path: Path) -> None:
    with other_server(tmp_path / "plain", "") as url:
        said = person.refused(MISCONFIGURED, "submit", "--type", "own.hello", "--engine", url)

    assert "JetStream is not enabled there; start the server with -js" in said


def test_a_server_that_is_too_old_is_named(person: Person, nats_server: NatsServer) -> None:
    said = person.refused(MISCONFIGURED, "job", "list", "--engine", nats_server.url, program=("-c", TOO_OLD))

    assert "and 99.0.0 or later is needed; update the NATS server" in said


def test_a_store_that_is_full_refuses_work_and_keeps_what_it_accepted(person: Person, tmp_path: Path) -> None:
    lines = [
        {"assignment_id": f"b{number}", "job": {"type": "own.hello", "payload": {"x": "y" * 9000}}}
        for number in range(40)
    ]
    (person.folder / "many.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = f'jetstream {{ store_dir: "{tmp_path / "full" / "data"}", max_file_store: 150KB }}'
    with other_server(tmp_path / "full", settings) as url:
        said = person.refused(UNREACHABLE, "submit", "many.jsonl", "--engine", url)
        listed = json.loads(person.done("job", "list", "--json", "--engine", url))["jobs"]

    assert "give it more space" in said
    assert [one["id"] for one in sorted(listed, key=lambda one: int(one["id"][1:]))] == [
        f"b{number}" for number in range(len(listed))
    ]
    assert 0 < len(listed) < len(lines)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_name_that_nobody_has_used_is_refused_by_a_command_that_only_looks(person: Person, url: str) -> None:
    server, _, name = url.rpartition("/")

    said = person.refused(UNREACHABLE, "job", "list", "--engine", url)

    assert f"there is no store named {name}" in said
    assert ask(server, f"$JS.API.STREAM.INFO.{name}_state")["error"]["err_code"] == 10059, "it was made"
    person.done("submit", "--type", "own.hello", "--id", "first", "--engine", url)
    assert "first" in person.done("job", "list", "--engine", url)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_msgs": 100}, "max_msgs is 100, not -1"),
        ({"subject_delete_marker_ttl": 1_000_000_000, "allow_rollup_hdrs": True}, "subject_delete_marker_ttl is"),
    ],
    ids=["bounded", "markers"],
)
def test_a_stream_that_somebody_changed_is_named(person: Person, url: str, changes: Any, named: str) -> None:
    server, _, name = url.rpartition("/")
    person.done("submit", "--type", "own.hello", "--engine", url)
    edit(server, f"{name}_state", **changes)

    for words in (("job", "list"), ("submit", "--type", "own.hello")):
        said = person.refused(MISCONFIGURED, *words, "--engine", url)
        assert f"the stream {name}_state was changed: {named}" in said
        assert f"nats stream edit {name}_state" in said


@pytest.mark.parametrize(
    "words", [("check",), ("backup", "copy.db"), ("migrate",), ("compact",)], ids=lambda one: one[0]
)
def test_what_is_for_files_is_refused_with_what_there_is_instead(
    person: Person, url: str, words: tuple[str, ...]
) -> None:
    said = person.refused(USAGE, "store", *words, "--engine", url)

    assert f"{url} is a store on NATS and has no file of its own" in said
    assert "reefknot doctor" in said


# ---- configuration and secrets ---------------------------------------------------------------------------------------


def test_every_mistake_of_the_section_nats_is_named_with_its_line(person: Person) -> None:
    (person.folder / "reefknot.yaml").write_text(
        "engine: nats://127.0.0.1:4222\nnats:\n  guarantee: exactly-once\n  replicas: 9\n  token: plain-text-secret\n"
        "  patience: 3\n"
    )

    said = person.refused(MISCONFIGURED, "config", "check")

    assert "reefknot.yaml:3:" in said
    assert "fenced" in said
    assert "reefknot.yaml:4:" in said
    assert "reefknot.yaml:5:" in said
    assert "env:" in said
    assert "reefknot.yaml:6:" in said
    assert "patience_seconds" in said
    assert "plain-text-secret" not in said


def test_a_token_by_reference_opens_the_store_for_every_command_and_is_never_shown(
    person: Person, tmp_path: Path
) -> None:
    with running_nats(tmp_path / "nats", token=TOKEN) as (server,):
        plain = f"nats://127.0.0.1:{server.port}"
        (person.folder / "reefknot.yaml").write_text(f"engine: {plain}\nnats: {{token: 'env:NATS_TOKEN'}}\n")
        said = person.refused(MISCONFIGURED, "job", "list")
        assert "NATS_TOKEN" in said

        person.environment["NATS_TOKEN"] = "tok-wrong-one"
        for words in (("job", "list"), ("submit", "--type", "own.hello"), ("doctor",)):
            ended = person(*words)
            assert ended.returncode == FORBIDDEN, ended.stderr
            shown = ended.stdout + ended.stderr
            assert "the server refuses this user" in shown
            assert "tok-wrong-one" not in shown

        person.environment["NATS_TOKEN"] = TOKEN
        for words in (
            ("submit", "--type", "own.hello"),
            ("job", "list"),
            ("doctor",),
            ("config", "show"),
            ("top", "--once"),
        ):
            ended = person(*words)
            assert ended.returncode == FINE, ended.stderr
            assert TOKEN not in ended.stdout + ended.stderr


def test_a_token_in_the_address_is_never_shown(person: Person, tmp_path: Path) -> None:
    with running_nats(tmp_path / "nats", token=TOKEN) as (server,):
        url = f"{server.url}/mine"
        assert TOKEN in url
        commands = [
            ("submit", "--type", "own.hello"),
            ("submit", "--type", "own.hello", "--wait", "--timeout", "0.1"),
            ("job", "list"),
            ("worker", "list"),
            ("router", "status"),
            ("top", "--once"),
            ("audit", "verify"),
            ("store", "check"),
            ("doctor",),
            ("up", "--for", "0.1"),
            ("worker", "start", "--for", "0.1"),
            ("router", "start", "--for", "0.1"),
        ]
        for words in commands:
            ended = person(*words, "--engine", url)
            assert TOKEN not in ended.stdout + ended.stderr, words
        wrong = person.refused(FORBIDDEN, "job", "list", "--engine", url.replace(TOKEN, "tok-wrong-one"))
    assert "tok-wrong-one" not in wrong


# ---- a server that goes away -----------------------------------------------------------------------------------------


def test_a_running_system_says_once_that_the_server_is_away_and_goes_on_when_it_is_back(
    person: Person, own_nats_server: NatsServer
) -> None:
    url = own_nats_server.url
    with person.running("up", "--module", "steps.py", "--engine", url) as said:
        until(lambda: "steps: " in said.read_text())
        kill(own_nats_server)
        until(lambda: "is lost" in said.read_text())
        assert "the server cannot be reached" in person.refused(UNREACHABLE, "job", "list", "--engine", url)
        restart(own_nats_server)
        until(lambda: f"connected to {url} again" in said.read_text())
        out = person.done("submit", "--type", "own.hello", "--wait", "--engine", url)
    assert '{"hello": "world"}' in out
    text = said.read_text()
    assert text.count(" is lost (") == 1, text
    assert text.count(f"connected to {url} again") == 1, text
    assert text.count("a heartbeat was not sent") <= 1, text


def test_every_noun_works_on_a_store_on_nats(person: Person, url: str) -> None:
    """The tour of an operator, with a router and a worker in processes of their own."""
    (person.folder / "reefknot.yaml").write_text(f"engine: {url}\n")
    (person.folder / "more.jsonl").write_text('{"assignment_id": "m1", "job": {"type": "own.hello"}}\n')
    with person.running("up", "--module", "steps.py") as said:
        until(lambda: "steps: " in said.read_text())
        assert "success" in person.done("submit", "--type", "own.hello", "--id", "a", "--wait")
        person.done("submit", "--type", "own.hello", "--id", "later", "--in", "1h")
        assert "cancelled" in person.done("job", "cancel", "later")
        assert "succeeded" in person.done("job", "show", "a")
        assert "worker-1" in person.done("worker", "list")
        assert "paused" in person.done("worker", "pause")
        assert "running again" in person.done("worker", "resume")
        assert "healthy" in person.done("router", "status")
        assert "1 router, 1 worker" in person.done("top", "--once")
        assert "internally consistent" in person.done("audit", "verify")
        assert "completed" in person.done("audit", "tail")
        person.done("quarantine", "list")
        person.done("idempotency", "stats")
        assert "1 succeeded" in person.done("run", "more.jsonl", "--module", "steps.py")
        assert "draining" in person.done("worker", "drain")
