"""The trail of an assignment in the audit log: who submitted it, how it ended, what that costs, who took a key over."""

import asyncio
import getpass
import json
import os
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import apsw
import pytest

import reefknot as rk
from reefknot.app.system import running_system
from reefknot.audit.model.event import decode
from reefknot.audit.port import AuditQuery
from reefknot.policy.settings import load_settings
from tests.acceptance.folder import Folder, events_in, rehash, until
from tests.otlp_receiver import receiving
from tests.warm_commands import run_cold

OUTSIDE = Path(__file__).parents[2] / "examples" / "verify_chain.py"
NUMBER = 20
LARGEST = 1000
"""Bytes of all events of an assignment that succeeds at the first try."""
CALLER = """
import asyncio, sys
import reefknot as rk

async def main():
    async with rk.connect("sqlite:" + sys.argv[1]) as client:
        for _ in range(int(sys.argv[2])):
            result = await client.run("own.nap", {"seconds": 0})
            assert result.status == "success", result

asyncio.run(main())
"""


def by_work(folder: Folder) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events_in(folder.store):
        if event.get("work_id"):
            found[event["work_id"]].append(event)
    return found


def size(events: list[dict[str, Any]]) -> int:
    """Bytes of these events, with a process and a duration of usual length: those of a slow, old machine are longer."""
    usual = {"process": 12345, "duration_ms": 123}
    same = [event | {name: value for name, value in usual.items() if name in event} for event in events]
    return sum(map(raw_size, same))


def raw_size(event: dict[str, Any]) -> int:
    return len(json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())


def long_names(usual: int = 12) -> int:
    """Characters of this user's and this host's names beyond those of usual ones."""
    return max(0, len(getpass.getuser()) + len(socket.gethostname()) - usual)


def test_every_assignment_has_its_submitter_and_its_end_in_less_than_a_kilobyte(folder: Folder) -> None:
    folder.up()
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(folder.store), str(NUMBER)], cwd=folder.path)
    assert caller.wait(60) == 0
    trails: dict[str, list[dict[str, Any]]] = {}

    def complete() -> bool:
        trails.clear()
        trails.update(by_work(folder))
        return sum(len(events) for events in trails.values()) == 4 * NUMBER  # a routing is written a moment later

    until(complete)
    for events in trails.values():
        told = {event["event_type"]: event for event in events}
        assert sorted(told) == ["admission", "completed", "routing", "submitted"]
        submitted, completed = told["submitted"], told["completed"]
        who = (submitted["actor"], submitted["host"], submitted["process"])
        assert who == (getpass.getuser(), socket.gethostname(), caller.pid)
        assert (completed["status"], completed["worker_id"], "attempts" in completed) == ("success", "worker-1", False)
        assert completed["operation"] == "own.nap"
        assert completed["duration_ms"] >= 0
    sizes = [size(events) for events in trails.values()]
    assert max(sizes) <= LARGEST + long_names(), sizes
    rules = [event for event in events_in(folder.store) if event["event_type"] == "rules_stored"]
    assert len(rules) == 1
    admissions = [event for events in trails.values() for event in events if event["event_type"] == "admission"]
    assert {event["inputs"]["rules_hash"] for event in admissions} == {rules[0]["rules_hash"]}
    whole = [size([*events, rules[0]]) for events in trails.values()]
    assert min(whole) > LARGEST + long_names(), "the control: with its rules in it, an assignment's trail is too large"


LONGEST_ID = 36


def test_a_first_try_success_takes_a_thousand_bytes_with_a_tenant_and_long_ids(folder: Folder) -> None:
    folder.configure("  http: {allow: [127.0.0.1]}\n  sql: {connections: {main: 'sqlite:files/some.db'}}\n")
    folder.write("files/old.txt", "old")
    apsw.Connection(str(folder.path / "files" / "some.db")).execute("CREATE TABLE t (a)")
    with receiving() as server:
        steps: dict[str, dict[str, Any]] = {
            "fs.blob_put": {"path": "new.txt", "content": "ahoy"},
            "fs.blob_get": {"path": "a.txt"},
            "fs.delete": {"path": "old.txt"},
            "http.request": {"url": f"{server.url}/"},
            "sql.query": {"connection": "main", "query": "SELECT 1"},
            "own.nap": {"seconds": 0},
        }
        names = {kind: f"order-{kind}-".ljust(LONGEST_ID, "7") for kind in steps}
        tenant = "a-tenant-".ljust(LONGEST_ID, "7")
        jobs = [{"assignment_id": names[kind], "job": {"type": kind, "payload": steps[kind]}} for kind in steps]
        folder.write_lines("work.jsonl", *(one | {"tenant_id": tenant} for one in jobs))
        code, out, err = folder.run_file("work.jsonl")
    assert code == 0, out + err
    events = by_work(folder)
    assert {name: len(trail) for name, trail in events.items()} == dict.fromkeys(names.values(), 4)
    sizes = {name: size(trail) for name, trail in events.items()}
    assert max(sizes.values()) <= LARGEST + long_names(), sizes


LARGEST_EXPORTED = 1300
"""Bytes of the exported lines of such an assignment, with numbers of five digits and names of eight characters."""
DIGITS = 5
SHORT_NAMES = 8


def uuids(number: int, tenant: str) -> list[dict[str, Any]]:
    """Assignments in which everything that may be a UUID is one."""
    same = {"tenant_id": tenant, "job": {"type": "own.nap", "payload": {"seconds": 0}}}
    ids = [[str(uuid4()) for _ in range(3)] for _ in range(number)]
    return [{"assignment_id": a, "request_id": b, "correlation": {"trace_id": c}, **same} for a, b, c in ids]


def run_one_by_one(folder: Folder, work: list[dict[str, Any]]) -> None:
    folder.write_lines("work.jsonl", *work)
    code, out, err = folder.run_file("work.jsonl", "--in-flight", "1")
    assert code == 0, out + err


@pytest.mark.parametrize("is_baseline", [False, True])
def test_with_uuids_the_record_of_a_success_is_small_as_exported_too(folder: Folder, is_baseline: bool) -> None:
    if is_baseline:
        (folder.path / "reefknot.yaml").unlink()
    run_one_by_one(folder, uuids(10, str(uuid4())))
    trails = by_work(folder)
    sizes = [size(events) for events in trails.values()]
    assert (len(sizes), {len(events) for events in trails.values()}) == (10, {4})
    assert max(sizes) <= LARGEST + long_names(), sizes
    ends = [event for events in trails.values() for event in events if event["event_type"] == "completed"]
    assert [one["worker_id"] for one in ends] == ["worker-1"] * 10

    assert folder("audit", "export", "log.jsonl").code == 0
    lines: Counter[str] = Counter()
    for line in (folder.path / "log.jsonl").read_bytes().splitlines(keepends=True)[1:]:
        read = json.loads(line)
        lines[read["event"].get("work_id") or ""] += len(line) + DIGITS - len(str(read["seq"]))
    usual = {work: size(events) - sum(map(raw_size, events)) for work, events in trails.items()}
    exported = [lines[work] + more for work, more in usual.items()]
    assert max(exported) <= LARGEST_EXPORTED + long_names(SHORT_NAMES), exported
    for words in (("verify",), ("verify", "log.jsonl"), ("replay",), ("replay", "log.jsonl")):
        assert folder("audit", *words).code == 0, words
    done = run_cold(sys.executable, OUTSIDE, "log.jsonl", "log.jsonl.head.json", cwd=folder.path)
    assert (done.returncode, "the chain fits its head" in done.stdout) == (0, True), done


def test_every_event_of_an_assignment_is_found_by_its_tenant_its_correlation_and_its_trace(folder: Folder) -> None:
    """Also when another tenant has an assignment of the same id, in the store as in an exported file."""
    (one,) = uuids(1, str(uuid4()))
    others = [*uuids(2, str(uuid4())), one | {"tenant_id": str(uuid4()), "request_id": str(uuid4())}]
    run_one_by_one(folder, [one, *others])
    assert folder("audit", "export", "log.jsonl").code == 0
    whole = ["admission", "completed", "routing", "submitted"]

    def found(*words: str) -> list[str]:
        done = folder("audit", "tail", "--json", *words)
        assert done.code == 0, done.err
        return sorted(json.loads(line)["event"]["event_type"] for line in done.out.splitlines())

    assert found("--work", one["assignment_id"]) == sorted(whole * 2), "the control: two tenants have it"
    for words in (
        ("--tenant", one["tenant_id"]),
        ("--correlation", one["request_id"]),
        ("--trace", one["correlation"]["trace_id"], "--tenant", one["tenant_id"]),
    ):
        assert found(*words) == whole, words
        assert folder.json("audit", "analyse", "log.jsonl", *words)["events"] == 4, words
    for tenant in (one["tenant_id"], others[-1]["tenant_id"]):
        shown = folder.json("job", "show", one["assignment_id"], "--tenant", tenant)
        assert sorted(event["event_type"] for event in shown["events"]) == whole
        (routed,) = (event for event in shown["events"] if event["event_type"] == "routing")
        assert routed["worker_id"] == "worker-1"


def test_events_go_in_the_four_write_transactions_of_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "naps.py").write_text(
        "import reefknot as rk\n\n@rk.block('own.empty')\nasync def empty(inputs, context):\n    return {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    gates = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}

    async def main(number: int) -> float:
        settings = load_settings(None, environ=gates, cwd=tmp_path)
        async with running_system(f"sqlite:{tmp_path / str(number)}.db", settings, modules=("naps",)) as system:
            store: Any = system.store
            for _ in range(5):
                await system.client.run("own.empty")
            before = store.batches
            for _ in range(NUMBER):
                await system.client.run("own.empty")
            written = (store.batches - before) / NUMBER
            ended = await store.audit.read(AuditQuery(event_type="completed"))
            assert len(ended) == NUMBER + 5
            return float(written)

    # Of several tries the best: heartbeats and statuses of a slow machine's seconds are counted too.
    assert min(asyncio.run(main(number)) for number in range(3)) <= 4.5


def test_an_assignment_that_ends_without_a_result_has_its_end_on_record(folder: Folder) -> None:
    """Cancelled while nobody runs, cancelled at work, and expired while it waits."""
    folder.nap("early", 60)
    assert folder("job", "cancel", "early", "--as", "ann").code == 0
    folder.up()
    folder.wait("running")
    until(lambda: "running" in folder.begun())
    assert folder("job", "cancel", "running", "--as", "ann").code == 0
    ends: dict[str, dict[str, Any]] = {}

    def complete() -> bool:
        trails = by_work(folder)
        ends.update((name, one) for name in trails for one in trails[name] if one["event_type"] == "completed")
        return len(ends) == 2

    until(complete)
    assert {name: end["status"] for name, end in ends.items()} == {"early": "cancelled", "running": "cancelled"}
    assert ends["early"]["attempts"] == 0
    assert "result_hash" not in ends["early"]


def test_a_name_given_with_as_stands_beside_the_user_the_host_and_the_process(folder: Folder) -> None:
    folder.nap("a", 60)
    process = folder.start("job", "cancel", "a", "--as", "auditor")
    code, _, err = folder.ends(process)
    assert code == 0, err
    (action,) = [one for one in events_in(folder.store) if one["event_type"] == "operator_action"]
    claimed = (action["actor"], action["os_user"], action["host"], action["process"])
    assert claimed == ("auditor", getpass.getuser(), socket.gethostname(), process.pid)


OWNER = """
import asyncio, os, sys
import reefknot as rk

async def main():
    async with rk.open_store("sqlite:" + sys.argv[1]) as store:
        @rk.idempotent(key=lambda: "order-7", store=store, name="charge")
        async def charge():
            print("in hand", flush=True)
            await asyncio.sleep(60)
        await charge()

asyncio.run(main())
"""


def test_a_key_that_is_taken_over_from_a_killed_process_has_both_owners_and_fences_on_record(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    words = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "in hand\n"
        owner.kill()

    async def take_over() -> str:
        async with rk.open_store(f"sqlite:{path}") as store:

            @rk.idempotent(key=lambda: "order-7", store=store, name="charge")
            async def charge() -> str:
                return "paid"

            assert await charge() == "paid"
            return await charge()

    assert asyncio.run(take_over()) == "paid"
    events = [decode(json.dumps(one).encode()) for one in events_in(path)]
    assert [event.event_type for event in events] == ["taken_over", "idempotency", "idempotency"]
    told: Any = events[0]
    assert told.idempotency_key == "charge:order-7"
    assert told.operation == "charge"
    assert told.fence > told.previous_fence
    assert f".{owner.pid}." in told.previous_owner
    assert f".{os.getpid()}." in told.owner


def piped(folder: Folder, *words: str) -> tuple[int, str]:
    """A command whose stdout is a pipe."""
    code, out, err = folder.ends(folder.start(*words))
    assert code in (0, 65), err
    return code, out


def test_a_running_system_keeps_heads_elsewhere_and_a_forged_log_does_not_fit_them(folder: Folder) -> None:
    folder.configure("audit: {heads: {path: elsewhere/heads.jsonl, every_seconds: 1}}\n")
    process = folder.up()
    heads = folder.path / "elsewhere" / "heads.jsonl"
    folder.nap("a", 0)
    until(lambda: heads.exists() and len(heads.read_bytes().splitlines()) >= 1)
    folder.stop(process)
    code, out = piped(folder, "audit", "verify", "--json")
    said = json.loads(out)
    assert (code, said["compared_with"], said["proven_up_to"]) == (0, str(heads), said["sequence"])
    connection = apsw.Connection(str(folder.store))
    connection.execute("UPDATE audit SET body = replace(body, 'actor', 'actress') WHERE event_type = 'submitted'")
    assert connection.changes() == 1
    rehash(connection)
    connection.close()
    assert piped(folder, "audit", "verify")[0] == 65
    heads.unlink()
    code, out = piped(folder, "audit", "verify")
    assert (code, "internally consistent; without a head this shows accidents, not intent" in out) == (0, True)


def test_a_place_of_heads_that_hangs_delays_nothing_and_is_reported_once(folder: Folder) -> None:
    """Opening a pipe that nobody else has open hangs, as a mount does whose server is gone."""
    os.mkfifo(folder.path / "heads.jsonl")
    folder.configure("audit: {heads: {path: heads.jsonl, every_seconds: 1}}\n")
    folder.nap("a", 0)
    process = folder.up("--for", "3")
    code, _, err = folder.ends(process)
    assert (code, folder.begun()) == (0, ["a"])
    assert err.count("the head of the audit log cannot be written to") == 1, err
