"""Commands on a store on NATS, each a process of its own: what is wrong is said by name, and no secret is shown."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Any

import nats
import nkeys
import pytest

from reefknot.console.nats_servers import NatsServer, find_nats_server, running_nats
from reefknot.runtime.seeds import new_id
from tests.acceptance.folder import Folder, until
from tests.nats_servers import kill, restart
from tests.warm_commands import WarmCommand, run_cold, run_warm

FINE, USAGE, UNREACHABLE, FORBIDDEN, MISCONFIGURED = 0, 2, 69, 77, 78
LONG_S = 120.0
IMPATIENT = {"REEFKNOT__NATS__PATIENCE_SECONDS": "2"}
"""Instead of five seconds for a first connection, where there will be none."""
CERTIFICATE = Path(__file__).parents[1] / "integration" / "localhost.pem"
TOKEN = "tok-Zq81-never-shown"
STEPS = """\
import reefknot

@reefknot.block("own.hello")
def hello(inputs, context):
    return {"hello": inputs.get("name", "world")}

@reefknot.block("own.large")
def large(inputs, context):
    return {"text": "y" * 9000}
"""
TOO_OLD = """
import sys
from reefknot.stores.jetstream import wire
wire.OLDEST_SERVER = (99, 0, 0)
from reefknot.console.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Person:
    """Types commands in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        self.environment = kept | {"COLUMNS": "200", "XDG_CONFIG_HOME": str(folder), "REEFKNOT_LOG_FORMAT": "text"}
        (folder / "steps.py").write_text(STEPS)

    def __call__(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self._fine(run_warm(*words, cwd=self.folder, env=self.environment | more, timeout=LONG_S))

    def cold(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Python runs these words, from its start."""
        return self._fine(run_cold(sys.executable, *words, cwd=self.folder, env=self.environment))

    def _fine(self, ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def configure(self, text: str) -> None:
        (self.folder / "reefknot.yaml").write_text(text)

    def refused(self, code: int, *words: str, program: Sequence[str] = ()) -> str:
        """What a command says that must end with this code, and has no data."""
        ended = self.cold(*program, *words) if program else self(*words, **IMPATIENT)
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


def test_what_a_server_lacks_is_named_with_what_to_do(person: Person, tmp_path: Path, nats_server: NatsServer) -> None:
    """JetStream, a version, large messages."""
    submit = ("submit", "--type", "own.hello")
    with other_server(tmp_path / "plain", "") as url:
        said = person.refused(MISCONFIGURED, *submit, "--engine", url)
    assert "JetStream is not enabled there; start the server with -js" in said
    said = person.refused(MISCONFIGURED, "job", "list", "--engine", nats_server.url, program=("-c", TOO_OLD))
    assert "and 99.0.0 or later is needed; update the NATS server" in said
    settings = f'max_payload: 64KB\njetstream {{ store_dir: "{tmp_path / "small" / "data"}" }}'
    with other_server(tmp_path / "small", settings) as url:
        for words in (submit, ("job", "list"), ("up",)):
            said = person.refused(MISCONFIGURED, *words, "--engine", url)
            assert "its server takes messages of 65536 bytes" in said
            assert "raise max_payload of the server" in said


def test_a_server_without_tls_is_told_nothing_where_tls_is_asked_for(person: Person, tmp_path: Path) -> None:
    """Nor is the password, which a client that goes on would send as plain text."""
    heard: list[bytes] = []

    def plain(listening: socket.socket) -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:
                return
            connected.sendall(b'INFO {"version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
            heard.append(connected.recv(4096))
            connected.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=plain, args=(listening,), daemon=True)
        thread.start()
        address = f"tls://me:{TOKEN}@127.0.0.1:{listening.getsockname()[1]}"
        said = person.refused(MISCONFIGURED, "job", "list", "--engine", address)
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(LONG_S)

    assert "its server does not ask for TLS, and this side does" in said
    assert heard
    assert set(heard) == {b""}


def test_a_certificate_that_is_not_trusted_is_told_from_a_server_that_is_away(person: Person, tmp_path: Path) -> None:
    settings = f"""
        jetstream {{ store_dir: "{tmp_path / "safe" / "data"}" }}
        tls {{ cert_file: "{CERTIFICATE}", key_file: "{CERTIFICATE}" }}
    """
    with other_server(tmp_path / "safe", settings) as url:
        said = person.refused(UNREACHABLE, "job", "list", "--engine", url.replace("nats://", "tls://"))
        assert "no connection with TLS can be made" in said
        assert "check nats.tls_ca" in said

        address = f"tls://localhost:{url.rpartition(':')[2]}"
        person.configure(f"engine: {address}\nnats: {{tls_ca: {CERTIFICATE}}}\n")
        assert person.done("submit", "--type", "own.hello", "--id", "a") == "a\n"


def test_a_file_of_credentials_that_is_not_there_is_named(person: Person, url: str) -> None:
    person.configure(f"engine: {url}\nnats: {{credentials: gone.creds}}\n")
    said = person.refused(UNREACHABLE, "job", "list")
    assert "gone.creds" in said
    assert "check nats.credentials" in said


@contextmanager
def limited_accounts(folder: Path, *accounts: tuple[str, str]) -> Iterator[list[str]]:
    """The URLs of a server's accounts of these limits, the only user of each with these permissions."""
    parts = [
        f"A{n}: {{ jetstream: {limits}, users: [{{user: u{n}, password: p, permissions: {{ {permissions} }}}}] }}"
        for n, (limits, permissions) in enumerate(accounts)
    ]
    settings = f'jetstream {{ store_dir: "{folder / "data"}" }}\naccounts {{ {", ".join(parts)} }}'
    with other_server(folder, settings) as url:
        yield [url.replace("nats://", f"nats://u{n}:p@") for n in range(len(accounts))]


def many(person: Person, number: int, *, size: int = 9000, type_: str = "own.hello") -> list[str]:
    """The ids in a file of so many assignments, whose payloads have this size."""
    lines = [
        {"assignment_id": f"b{one}", "job": {"type": type_, "payload": {"x": "y" * size}}} for one in range(number)
    ]
    (person.folder / "many.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [str(line["assignment_id"]) for line in lines]


def jobs(person: Person, url: str) -> dict[str, str]:
    """All jobs and their states."""
    listed = json.loads(person.done("job", "list", "--limit", "1000", "--json", "--engine", url))["jobs"]
    return {one["id"]: one["state"] for one in listed}


def test_a_limit_of_the_account_that_is_reached_is_named_and_shown_by_doctor(person: Person, tmp_path: Path) -> None:
    many(person, 5)
    submit = ("submit", "--type", "own.hello")
    limits = ("{max_streams: 1}", "{max_consumers: 1}", "{max_file: 1000}")
    roomy = "{max_streams: 9, max_consumers: 5, max_file: 1MB}"
    accounts = [(one, "") for one in (*limits, roomy)]
    with limited_accounts(tmp_path / "server", *accounts) as (streams, consumers, storage, last):
        for url in (streams, consumers):
            person.done(*submit, "--engine", url)
        for url, words, told in (
            (f"{streams}/more", submit, "more_state cannot be made (maximum number of streams"),
            (f"{streams}/more", ("up",), "check the limits of the account"),
            (consumers, ("job", "list"), "raise max_consumers of this account"),
            (storage, ("submit", "many.jsonl"), "raise the storage limit of this account"),
        ):
            assert told in person.refused(UNREACHABLE, *words, "--engine", url)
        person.done(*submit, "--engine", last)
        # Consumers of earlier commands may be left for ten seconds, and then there are too few for this one.
        until(lambda: person("doctor", "--engine", last).returncode == FINE)
        shown = person.done("doctor", "--engine", last)
    assert "1 of 9 streams with" in shown
    assert "of 5 consumers; raise max_consumers of the account" in shown
    assert "where its server or account runs full, a change may be stored in part; nats stream edit" in shown


def test_what_the_user_may_not_do_is_77_at_once(person: Person, tmp_path: Path) -> None:
    denied = (
        'publish: {deny: ["$JS.API.>"]}',
        'subscribe: {deny: ["_INBOX.>"]}',
        'publish: {deny: ["$JS.API.STREAM.CREATE.>"]}',
        'publish: {deny: ["reefknot.>"]}',
    )
    with limited_accounts(tmp_path / "server", *(("enabled", one) for one in denied)) as urls:
        for url, permissions in zip(urls, denied, strict=True):
            for words in (("submit", "--type", "own.hello"), ("up",)):
                said = person.refused(FORBIDDEN, *words, "--engine", url)
                assert "the server refuses this user (permissions violation for " in said, permissions
                told = ("`reefknot dev permissions --role ", "no role has this permission: an administrator makes")
                assert any(one in said for one in told), permissions


def test_a_server_that_is_full_refuses_work_and_tells_what_it_accepted(person: Person, tmp_path: Path) -> None:
    ids = many(person, 40)
    settings = f'jetstream {{ store_dir: "{tmp_path / "full" / "data"}", max_file_store: 150KB }}'
    with other_server(tmp_path / "full", settings) as url:
        ended = person("submit", "many.jsonl", "--engine", url)
        listed = jobs(person, url)

    accepted = ended.stdout.split()
    assert ended.returncode == UNREACHABLE
    assert "give it more space" in ended.stderr
    assert 0 < len(accepted) < len(ids)
    assert accepted == ids[: len(accepted)]
    assert set(accepted) <= set(listed) <= set(ids[: len(accepted) + 1]), "and at most the one that was refused"


def test_a_full_store_is_said_and_all_that_it_accepted_ends_when_there_is_room(person: Person, url: str) -> None:
    server, _, name = url.rpartition("/")
    person.configure(f"engine: {url}\nnats: {{max_bytes: 1048576}}\n")
    ids = many(person, 150, size=1, type_="own.large")
    assert person.done("submit", "many.jsonl").split() == ids
    with person.running("up", "--module", "steps.py") as said:
        until(lambda: "maximum bytes exceeded; give it more space" in said.read_text())
        large = json.dumps({"x": "y" * 100_000})
        refused = person.refused(UNREACHABLE, "submit", "--type", "own.hello", "--id", "late", "--inputs", large)
        assert "maximum bytes exceeded; give it more space" in refused
        found = jobs(person, url)
        assert set(found) == set(ids), "nothing of what was refused, and all that was accepted"
        assert set(found.values()) > {"succeeded"}

        edit(server, f"{name}_state", max_bytes=64 << 20)
        until(lambda: set(jobs(person, url).values()) == {"succeeded"})
        assert set(jobs(person, url)) == set(ids)
    assert "internally consistent" in person.done("audit", "verify")


def test_a_full_stream_of_peers_is_said_and_gets_what_waits_later(person: Person, own_nats_server: NatsServer) -> None:
    server = own_nats_server.url
    person.configure(f"engine: {server}\nrouter: {{shared_subject: cp1}}\n")
    stream = {"name": "peers", "subjects": ["caf.exec.assign.v1"], "max_msgs": 1, "discard": "new"}
    assert "error" not in ask(server, "$JS.API.STREAM.CREATE.peers", stream)
    with person.running("router", "start") as said:
        until(lambda: " is ready" in said.read_text())
        for number in range(3):
            person.done("submit", "--type", "own.hello", "--id", f"a{number}")
        until(lambda: "assignments to caf.exec.assign.v1 find no receiver (maximum messages" in said.read_text())
        assert set(jobs(person, server).values()) == {"pending"}

        edit(server, "peers", max_msgs=100)
        until(lambda: ask(server, "$JS.API.STREAM.INFO.peers")["state"]["messages"] >= 3)
    assert said.read_text().count("find no receiver") == 1


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


def test_a_store_of_an_earlier_design_is_refused_by_name_and_left_as_it_is(person: Person, url: str) -> None:
    """With the two streams that the earlier design made, and with that of its events alone."""
    server, _, name = url.rpartition("/")
    kept = {"retention": "limits", "storage": "file", "discard": "new", "num_replicas": 1, "allow_atomic": True}
    branches = ("work", "blob", "key", "command", "status", "value", "pool", "outbox")
    state, audit = f"{name}_state", f"{name}_audit"
    records = {"subjects": [f"{name}.{one}.>" for one in branches], "max_msgs_per_subject": 1, "allow_msg_ttl": True}
    for stream, more in ((state, records), (audit, {"subjects": [f"{name}.audit.>"]})):
        assert "error" not in ask(server, f"$JS.API.STREAM.CREATE.{stream}", {"name": stream, **kept, **more})
    commands = [("up",), ("worker", "start"), ("router", "start"), ("submit", "--type", "own.hello"), ("job", "list")]
    for words in commands:
        said = person.refused(MISCONFIGURED, *words, "--engine", url)
        assert f"its stream {state} was made by an earlier design" in said
        assert f"use a store of another name, or delete the streams {state} and {audit}" in said
    ask(server, f"$JS.API.STREAM.DELETE.{state}", None)
    for words in commands[:4]:
        assert f"its stream {audit} was made by an earlier design" in person.refused(
            MISCONFIGURED, *words, "--engine", url
        )
    examined = person("doctor", "--engine", url)
    assert examined.returncode == MISCONFIGURED, examined.stdout
    assert f"{audit} was made by an earlier design" in examined.stdout
    ask(server, f"$JS.API.STREAM.DELETE.{audit}", None)
    person.done("submit", "--type", "own.hello", "--engine", url)


def test_every_mistake_of_the_section_nats_is_named_with_its_line(person: Person) -> None:
    person.configure(
        "engine: nats://127.0.0.1:4222\nnats:\n  guarantee: exactly-once\n  replicas: 9\n  token: plain-text-secret\n"
        "  patience: 3\n"
    )
    said = person.refused(MISCONFIGURED, "config", "check")
    for text in ("yaml:3:", "fenced", "yaml:4:", "yaml:5:", "env:", "yaml:6:", "patience_seconds"):
        assert text in said, text
    assert "plain-text-secret" not in said


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that asks for a token."""
    with running_nats(tmp_path_factory.mktemp("secured"), token=TOKEN) as (server,):
        yield server


def test_a_token_by_reference_opens_the_store_and_is_never_shown(person: Person, secured: NatsServer) -> None:
    person.configure(f"engine: nats://127.0.0.1:{secured.port}\nnats: {{token: 'env:NATS_TOKEN'}}\n")
    assert "NATS_TOKEN" in person.refused(MISCONFIGURED, "job", "list")
    tried: list[tuple[str, ...]] = [("job", "list"), ("submit", "--type", "own.hello", "--in", "24h"), ("doctor",)]
    person.environment["NATS_TOKEN"] = "tok-wrong-one"
    for words in tried:
        ended = person(*words, **IMPATIENT)
        assert ended.returncode == FORBIDDEN, ended.stderr
        assert "the server refuses this user" in ended.stdout + ended.stderr
        assert "tok-wrong-one" not in ended.stdout + ended.stderr
    person.environment["NATS_TOKEN"] = TOKEN
    for words in (*tried[1:], *tried, ("config", "show"), ("top", "--once")):
        ended = person(*words)
        assert ended.returncode == FINE, ended.stderr
        assert TOKEN not in ended.stdout + ended.stderr


def test_a_token_in_the_address_is_never_shown(person: Person, secured: NatsServer) -> None:
    url = f"{secured.url}/mine"
    assert TOKEN in url
    submit, soon = ("submit", "--type", "own.hello"), ("--for", "0.1")
    commands: list[tuple[str, ...]] = [
        *(submit, (*submit, "--wait", "--timeout", "0.1"), ("job", "list"), ("worker", "list"), ("router", "status")),
        *(("top", "--once"), ("audit", "verify"), ("store", "check"), ("doctor",)),
        *(("up", *soon), ("worker", "start", *soon), ("router", "start", *soon)),
    ]
    for words in commands:
        ended = person(*words, "--engine", url)
        assert TOKEN not in ended.stdout + ended.stderr, words
    wrong = person.refused(FORBIDDEN, "job", "list", "--engine", url.replace(TOKEN, "tok-wrong-one"))
    assert "tok-wrong-one" not in wrong


def test_a_system_says_once_that_the_server_is_away_and_goes_on(person: Person, own_nats_server: NatsServer) -> None:
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


def test_a_system_whose_credentials_are_refused_goes_on_when_they_are_right(person: Person, tmp_path: Path) -> None:
    folder = tmp_path / "server"

    def reload(old: str, new: str) -> None:
        file = folder / "server.conf"
        file.write_text(file.read_text().replace(old, new))
        (ports,) = folder.glob("*.ports")
        os.kill(int(ports.stem.rpartition("_")[2]), SIGHUP)

    settings = f'jetstream {{ store_dir: "{folder / "data"}" }}\nauthorization {{ token: "{TOKEN}" }}'
    with other_server(folder, settings) as url:
        person.configure(f"engine: {url}\nnats: {{token: 'env:NATS_TOKEN'}}\n")
        person.environment["NATS_TOKEN"] = TOKEN
        with person.running("up", "--module", "steps.py") as said:
            until(lambda: "steps: " in said.read_text())
            reload(TOKEN, "another")
            until(lambda: f"{url} refuses this user" in said.read_text())
            person.refused(FORBIDDEN, "job", "list")
            reload("another", TOKEN)
            until(lambda: f"connected to {url} again" in said.read_text())
            assert '{"hello": "world"}' in person.done("submit", "--type", "own.hello", "--wait")
    assert said.read_text().count("refuses this user") == 1
    assert TOKEN not in said.read_text()


ENDS_WITHIN_S = 20.0
"""15 s, and what a loaded machine takes more."""
TERMINATED = 143


def test_a_system_ends_soon_without_its_server_and_leaves_its_work(folder: Folder, own_nats_server: NatsServer) -> None:
    folder.set_variable("REEFKNOT__ENGINE", own_nats_server.url)
    system = folder.up("--drain", "1")
    for name in ("order-1", "order-2"):
        folder.wait(name)
    until(lambda: set(folder.begun()) == {"order-1", "order-2"})
    kill(own_nats_server)
    began = time.monotonic()
    code, _, err = folder.stop(system)
    took = time.monotonic() - began
    assert (code, took < ENDS_WITHIN_S) == (TERMINATED, True), (took, err)
    restart(own_nats_server)
    folder.go()
    folder.start("up", "--module", "naps")
    until(lambda: folder.have_succeeded("order-1", "order-2"))


UNBOUNDED = ["subs", "data", "payload", "imports", "exports", "conn", "leaf"]
STORAGE = ["mem_storage", "disk_storage", "streams", "consumer"]


class Key:
    """A pair of keys, and what it signs."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(self.seed)
        self.name: str = self._pair.public_key.decode()

    def signs(self, subject: Key, claims: dict[str, Any]) -> str:
        parts = [
            {"typ": "JWT", "alg": "ed25519-nkey"},
            {"jti": "x", "iat": 1, "iss": self.name, "name": "x", "sub": subject.name, "nats": {"version": 2} | claims},
        ]
        text = b".".join(_encoded(json.dumps(part).encode()) for part in parts)
        return b".".join((text, _encoded(self._pair.sign(text)))).decode()


def _encoded(text: bytes) -> bytes:
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def account(*limits: str) -> dict[str, Any]:
    return {"type": "account", "limits": dict.fromkeys(limits, -1) | {"wildcards": True}}


@contextmanager
def signing_server(folder: Path) -> Iterator[tuple[str, Key]]:
    """The URL of a server with an operator, and the key of its account."""
    operator = Key(nkeys.PREFIX_BYTE_OPERATOR)
    system, ours = Key(nkeys.PREFIX_BYTE_ACCOUNT), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    settings = f"""
        operator: {operator.signs(operator, {"type": "operator", "system_account": system.name})}
        system_account: {system.name}
        resolver: MEMORY
        resolver_preload: {{
            {system.name}: {operator.signs(system, account(*UNBOUNDED))}
            {ours.name}: {operator.signs(ours, account(*UNBOUNDED, *STORAGE))}
        }}
        jetstream {{ store_dir: "{folder / "data"}" }}
    """
    with other_server(folder, settings) as url:
        yield url, ours


def write_credentials(file: Path, issuer: Key) -> str:
    """A file that lets its user in; answers its secret."""
    user = Key(nkeys.PREFIX_BYTE_USER)
    token = issuer.signs(user, {"type": "user", "subs": -1, "data": -1, "payload": -1})
    secret = user.seed.decode()
    texts = {"NATS USER JWT": token, "USER NKEY SEED": secret}
    file.write_text(
        "".join(f"-----BEGIN {name}-----\n{text}\n------END {name}------\n" for name, text in texts.items())
    )
    return secret


def test_a_file_of_credentials_opens_the_store_unseen_and_anothers_does_not(person: Person, tmp_path: Path) -> None:
    with signing_server(tmp_path / "server") as (url, ours):
        secret = write_credentials(person.folder / "ours.creds", ours)
        person.configure(f'engine: "{url}"\nnats: {{credentials: ours.creds}}\n')
        lines = ("submit --type own.hello --in 24h", "doctor", "job list", "config show")
        shown = [person.done(*line.split()) for line in lines]
        assert "own.hello" in shown[2]
        assert not any(secret in one for one in shown)
        write_credentials(person.folder / "theirs.creds", Key(nkeys.PREFIX_BYTE_ACCOUNT))
        person.configure(f'engine: "{url}"\nnats: {{credentials: theirs.creds}}\n')
        assert "authorization" in person.refused(FORBIDDEN, "submit", "--type", "own.hello").lower()


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(person: Person) -> None:
    """`doctor` too: it would wait for ever for somebody to write."""
    os.mkfifo(person.folder / "pipe")
    (person.folder / "cert.pem").write_text("")
    for key, other in (
        ("credentials", ""),
        ("tls_ca", ""),
        ("tls_certificate", "tls_key"),
        ("tls_key", "tls_certificate"),
    ):
        section = f"{key}: pipe, {other}: cert.pem" if other else f"{key}: pipe"
        person.configure(f'engine: "nats://127.0.0.1:{free_port()}"\nnats: {{{section}}}\n')
        ended = person("doctor")
        assert ended.returncode == UNREACHABLE
        assert f"the file of nats.{key} is not a regular file; check nats.{key}" in ended.stdout
