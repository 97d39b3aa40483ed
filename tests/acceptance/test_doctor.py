"""`reefknot doctor`, in a process of its own: every finding with its level, what to do, and the exit code."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import apsw

from reefknot.console.nats_servers import NatsServer, running_nats
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.testing.conformance.harness import event
from tests.acceptance.folder import until
from tests.acceptance.test_nats_commands import (
    FINE,
    FORBIDDEN,
    MISCONFIGURED,
    UNREACHABLE,
    Person,
    ask,
    edit,
    free_port,
    other_server,
    person,
    url,
)
from tests.nats_servers import kill

__all__ = ["person", "url"]
UNSERVED = 1
DAMAGED = 65
LOCKED = 75
LATER = ("submit", "--type", "own.hello", "--in", "24h")
"""A job that is open and not due: that no system runs is not a problem yet."""
AROUND = ["python", "extras"]
"""What is checked where nothing is configured, before the store."""


def findings(person: Person, *words: str, code: int = FINE) -> dict[str, dict[str, Any]]:
    """By check: the last finding."""
    ended = person("doctor", "--json", *words)
    assert ended.returncode == code, (ended.returncode, ended.stdout, ended.stderr)
    answer = json.loads(ended.stdout)
    assert answer["ok"] is (code == FINE)
    return {one["check"]: one for one in answer["findings"]}


def monitoring_url(server: NatsServer) -> str:
    (ports,) = server.folder.glob("*.ports")
    address: str = json.loads(ports.read_text())["monitoring"][0]
    return address


SQLITE = ("--engine", "sqlite:a.db")


def test_a_file_that_is_well(person: Person) -> None:
    person.done("submit", "--type", "own.hello", "--id", "one", *SQLITE)
    person.done("job", "cancel", "one", *SQLITE)
    found = findings(person, *SQLITE)
    assert {one["level"] for one in found.values()} == {"ok"}
    of_the_file = ["library", "file", "disk", "schema", "durability", "content"]
    assert list(found) == [*AROUND, *of_the_file, "systems", "leases", "audit"]
    assert "nothing to do" in person("doctor", *SQLITE).stderr


def test_a_due_job_that_waits_while_nothing_runs_is_a_problem_and_one_for_later_a_warning(person: Person) -> None:
    person.done(*LATER, *SQLITE)
    before = files_of(person.folder, "a")
    found = findings(person, *SQLITE)["systems"]
    assert files_of(person.folder, "a") == before, "looking changes nothing"
    assert (found["level"], found["text"]) == ("warning", "1 job waits for later, and no system is running")
    assert "`reefknot up`" in found["way_out"]

    person.done("submit", "--type", "own.hello", *SQLITE)
    found = findings(person, *SQLITE, code=UNSERVED)["systems"]
    text = "1 job waits: no system is running, neither router nor worker"
    assert (found["level"], found["cause"], found["text"]) == ("problem", "unserved", text)
    assert "`reefknot up`" in found["way_out"]
    assert "1 problem" in person("doctor", *SQLITE).stderr


def test_a_file_that_somebody_keeps_locked_is_a_problem(person: Person) -> None:
    """Readers do not notice: in WAL mode, only who wants to write has to wait."""
    person.done(*LATER, *SQLITE)
    holder = apsw.Connection(str(person.folder / "a.db"))
    try:
        holder.execute("BEGIN EXCLUSIVE").fetchall()
        found = findings(person, *SQLITE, code=LOCKED)["lock"]
        assert (found["level"], found["cause"]) == ("problem", "locked")
        holder.execute("ROLLBACK").fetchall()
        assert "lock" not in findings(person, *SQLITE), "the control: nobody keeps it any more"
    finally:
        holder.close()


def test_a_file_that_is_not_there_is_a_warning_and_a_problem_when_it_was_named(person: Person) -> None:
    assert findings(person)["file"]["level"] == "warning"
    named = findings(person, *SQLITE, code=UNREACHABLE)["file"]
    assert (named["level"], named["way_out"]) == ("problem", "check the name in --engine")
    assert not (person.folder / "a.db").exists()
    for name in ("a" * 300, f"{'a' * 300}/a.db"):
        found = findings(person, "--engine", f"sqlite:{name}", code=UNREACHABLE)
        assert list(found) == [*AROUND, "library", "file"]
        assert "file name too long" in found["file"]["text"].lower()
        assert found["file"]["way_out"] == "check its name, its folders and its disk"


def test_a_file_that_is_damaged_is_a_problem(person: Person) -> None:
    person.done("submit", "--type", "own.hello", *SQLITE)
    file = person.folder / "a.db"
    content = bytearray(file.read_bytes())
    for place in range(4096, len(content), 4096):
        content[place : place + 64] = b"\xff" * 64
    file.write_bytes(content)
    found = findings(person, *SQLITE, code=DAMAGED)
    assert [one["cause"] for one in found.values() if one["level"] == "problem"] == ["damaged"]


def test_a_store_on_nats_that_is_well_and_a_server_that_syncs_always(
    person: Person, url: str, nats_server: NatsServer, own_nats_server: NatsServer
) -> None:
    person.done(*LATER, "--engine", url)
    found = findings(person, "--engine", url, "--monitor", monitoring_url(nats_server))
    assert {name for name, one in found.items() if one["level"] != "ok"} == {"sync", "bound", "systems"}
    assert "1 open jobs" in found["mirror"]["text"]
    assert found["sync"]["text"].startswith("every 120 s: a power cut of the server may lose")
    assert "sync_interval to always" in found["sync"]["way_out"]

    always = ("--engine", own_nats_server.url)
    found = findings(person, *always, "--monitor", monitoring_url(own_nats_server))
    assert (found["sync"]["level"], "survives a power cut" in found["sync"]["text"]) == ("ok", True)
    assert "not known from here" in findings(person, *always)["sync"]["text"]


def test_missing_streams_are_a_warning_and_not_made_and_a_changed_one_is_a_problem(person: Person, url: str) -> None:
    for _ in range(2):
        found = findings(person, "--engine", url)["stream"]
        assert (found["level"], "there is no stream" in found["text"]) == ("warning", True)
    server, _, name = url.rpartition("/")
    person.done(*LATER, "--engine", url)
    edit(server, f"{name}_state", max_age=86_400_000_000_000)
    found = findings(person, "--engine", url, code=MISCONFIGURED)["stream"]
    assert f"{name}_state was changed: max_age is 86400000000000, not 0" in found["text"]
    assert found["way_out"] == f"set it back: nats stream edit {name}_state"


def test_a_store_of_an_earlier_design_is_a_problem_with_a_way_out(person: Person, url: str) -> None:
    server, _, name = url.rpartition("/")
    person.done(*LATER, "--engine", url)
    older = [f"{name}.{branch}.>" for branch in ("work", "blob", "key", "command", "status", "value", "pool", "outbox")]
    edit(server, f"{name}_state", subjects=older)
    found = findings(person, "--engine", url, code=MISCONFIGURED)["stream"]
    assert found["text"] == f"its stream {name}_state was made by an earlier design"
    assert f"delete the streams {name}_state and {name}_audit" in found["way_out"]


def test_a_server_that_cannot_be_used_is_one_problem(person: Person, tmp_path: Path) -> None:
    nowhere = findings(person, "--engine", f"nats://127.0.0.1:{free_port()}", code=UNREACHABLE)
    assert list(nowhere) == [*AROUND, "server"]
    with other_server(tmp_path / "plain", "") as url:
        plain = findings(person, "--engine", url, code=MISCONFIGURED)
    assert list(plain) == [*AROUND, "server", "jetstream"]
    with running_nats(tmp_path / "nats", token="right-token") as (server,):
        wrong = findings(person, "--engine", f"nats://127.0.0.1:{server.port}", code=FORBIDDEN)
    assert list(wrong) == [*AROUND, "server"]


def test_replicas_are_compared_and_one_that_is_away_is_named(person: Person, nats_cluster: list[NatsServer]) -> None:
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in nats_cluster)
    person.configure(f"engine: nats://{hosts}\nnats: {{replicas: 3}}\n")
    person.done(*LATER)
    assert "3 copies, all of them current" in findings(person)["replicas"]["text"]

    person.configure(f"engine: nats://{hosts}\n")
    assert "3 copies, all of them current" in findings(person)["replicas"]["text"]

    kill(nats_cluster[2])
    # After the election of new leaders, for which each of these commands may wait half a minute.
    until(lambda: f"{nats_cluster[2].name} is" in person("doctor").stdout, patience=90)
    assert findings(person)["replicas"]["level"] == "warning"


def files_of(folder: Path, name: str = "b") -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.glob(f"{name}.db*")}


def crashed_store(person: Person) -> Path:
    """The log of a store whose process was killed; file and log are copied to b.db, as by hand."""
    holder = None
    try:
        for name in ("one", "two", "three"):
            person.done(*LATER, "--id", name, *SQLITE)
            if holder is None:
                holder = apsw.Connection(str(person.folder / "a.db"))
                holder.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # whoever leaves next keeps the log
        for end in ("", "-wal"):
            shutil.copy(person.folder / f"a.db{end}", person.folder / f"b.db{end}")
    finally:
        if holder is not None:
            holder.close()
    return person.folder / "b.db-wal"


def test_a_log_in_which_nothing_can_be_read_is_a_finding_and_stays(person: Person) -> None:
    log = crashed_store(person)
    assert "log" not in findings(person, "--engine", "sqlite:b.db"), "the control: a log that is whole"
    whole = log.read_bytes()
    places = ((0, "problem"), (8, "problem"), (16, "problem"), (24, "problem"), (32, "warning"))
    spoilt = [(whole[:place] + b"\xaa\xbb" + whole[place + 2 :], level) for place, level in places]
    for content, level in (*spoilt, (bytes(range(256)) * 20, "problem")):
        log.write_bytes(content)
        before = files_of(person.folder)
        found = findings(person, "--engine", "sqlite:b.db", code=DAMAGED if level == "problem" else FINE)["log"]
        assert (found["level"], found["cause"] == "damaged") == (level, level == "problem")
        assert f"b.db-wal has {len(content)} bytes and no valid frame" in found["text"]
        assert "copy the file and its log before" in found["way_out"]
        assert files_of(person.folder) == before

    address = f"file:{person.folder / 'b.db'}?mode=ro&vfs=unix-none"
    careless = apsw.Connection(address, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    careless.execute("PRAGMA locking_mode = EXCLUSIVE; SELECT count(*) FROM sqlite_schema").fetchall()
    careless.close()
    assert not log.exists(), "the control: a reader that cleans up behind itself"


def test_an_empty_file_beside_its_log_is_a_problem_and_the_log_stays(person: Person) -> None:
    person.done(*LATER, "--engine", "sqlite:b.db")
    file, log = person.folder / "b.db", person.folder / "b.db-wal"
    holder = apsw.Connection(str(file))
    try:
        holder.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        person.done(*LATER, "--engine", "sqlite:b.db")
        left = {name: (person.folder / name).read_bytes() for name in ("b.db-wal", "b.db-shm")}
    finally:
        holder.close()
    file.write_bytes(b"")
    for name, content in left.items():
        (person.folder / name).write_bytes(content)
    before = files_of(person.folder)

    found = findings(person, "--engine", "sqlite:b.db", code=DAMAGED)["file"]

    assert (found["level"], found["cause"]) == ("problem", "damaged")
    assert f"b.db has 0 bytes, and its log {len(left['b.db-wal'])} bytes" in found["text"]
    assert files_of(person.folder) == before

    careless = apsw.Connection(str(file))
    careless.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    careless.execute("BEGIN IMMEDIATE; ROLLBACK").fetchall()
    careless.close()
    assert not log.exists(), "the control: a look for locks that opens an empty file"


def test_looking_changes_nothing_on_nats_where_a_process_died(person: Person, url: str) -> None:
    person.configure(f"engine: {url}\naudit: {{jsonl: {{path: events.jsonl}}}}\n")
    server, _, name = url.rpartition("/")

    def stream() -> tuple[Any, ...]:
        found = ask(server, f"$JS.API.STREAM.INFO.{name}_state")
        return found["config"], found["state"]["messages"], found["state"]["last_seq"]

    async def dies() -> None:
        store = await JetStreamStore.open(url, SystemClock())
        await store.audit.append([event("left")])
        await store.connection.close()  # and nothing else

    person.done(*LATER)
    asyncio.run(dies())
    before = stream()

    found = findings(person)

    assert stream() == before
    assert (found["copies"]["level"], found["leases"]["level"]) == ("ok", "ok")
    assert "left" in person.done("audit", "tail")
    person.done(*LATER)
    assert stream() != before, "the control: a command that is no doctor"


def test_the_configuration_its_secrets_and_its_dashboard_are_findings_too(person: Person) -> None:
    person.configure("secrets: {api: 'env:NO_SUCH_VARIABLE'}\n")
    person.done(*LATER)

    found = findings(person)

    assert found["config"]["text"].endswith("reefknot.yaml, no warnings")
    assert found["dashboard"]["text"] == "on 127.0.0.1, for this host alone"
    ended = person("doctor")
    told = "warning  secrets     secrets.api (env:NO_SUCH_VARIABLE): there is no such environment variable; set"
    assert told in ended.stdout
    assert "2 warnings" in ended.stderr, "the job waits, too"
    assert ended.returncode == FINE


def test_the_file_of_a_secret_is_named_when_others_can_read_it_or_it_is_none(person: Person) -> None:
    tokens = "dashboard: {operator_token: 'file:open.txt', reader_token: 'file:pipe'}"
    person.configure(f"{tokens}\nnats: {{credentials: ours.creds, tls_key: pipe}}\n")
    for name in ("open.txt", "ours.creds"):
        (person.folder / name).write_text("xyzzy-the-password")
        (person.folder / name).chmod(0o644)
    os.mkfifo(person.folder / "pipe", 0o644)
    folder = person.folder

    ended = person("doctor")

    assert ended.returncode == FINE, ended.stderr
    lines = [one.split(maxsplit=2)[2] for one in ended.stdout.splitlines() if one.startswith("warning  secrets ")]
    elsewhere = "set it for the processes that need it; this one may be another user's"
    for_all = "can be read by every user of this host; chmod 600"
    assert sorted(lines) == [
        f"dashboard.operator_token ({folder / 'open.txt'}) {for_all} {folder / 'open.txt'}",
        f"dashboard.reader_token (file:pipe): is not a regular file; {elsewhere}",
        f"nats.credentials ({folder / 'ours.creds'}) {for_all} {folder / 'ours.creds'}",
        f"nats.tls_key ({folder / 'pipe'}) is not a regular file; correct its path",
    ]
    assert "xyzzy" not in ended.stdout + ended.stderr


def test_logins_are_only_tried_on_request(person: Person) -> None:
    url = f"postgresql://shop:xyzzy@127.0.0.1:{free_port()}/shop"
    person.configure(f"blocks: {{sql: {{connections: {{shop: '{url}'}}}}}}\n")
    assert "logins" not in findings(person)
    ended = person("doctor", "--logins")
    assert "ok       logins " in ended.stdout
    assert "its login could not be checked now" in ended.stderr
    assert "xyzzy" not in ended.stdout + ended.stderr


def test_a_stream_of_peers_that_nobody_takes_from_is_a_warning(person: Person, url: str) -> None:
    server, _, name = url.rpartition("/")
    person.done(*LATER, "--engine", url)
    assert "shared" not in findings(person, "--engine", url)
    subjects = [f"{name}.caf.exec.assign.v1"]
    stream = {"name": f"{name}_assign", "subjects": subjects, "retention": "workqueue", "storage": "file"}
    assert "error" not in ask(server, f"$JS.API.STREAM.CREATE.{name}_assign", stream)

    taken = findings(person, "--engine", url)["shared"]
    person.configure("router: {shared_subject: off}\n")
    found = findings(person, "--engine", url)["shared"]

    assert (found["level"], taken["level"]) == ("warning", "ok")
    assert found["way_out"].endswith(f"nats stream rm {name}_assign")
    assert taken["text"] == f"{name}_assign keeps 0 assignments of peers"
