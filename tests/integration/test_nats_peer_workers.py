"""
Workers that know only the documents, against a router of ours on NATS.

One that never sends a heartbeat hears assignments on the shared subject; one that does, on its own.
"""

import asyncio
import json
import subprocess
import time
from typing import Any

import pytest

import reefknot as rk
from reefknot.queue.port.transport import Delivery
from reefknot.queue.router.health import MOST_WORKERS
from tests.acceptance.folder import Folder, until
from tests.integration.peers import ACK, ASSIGN, CANCEL, HEARTBEAT, RESULT, Fields, Peer, assignment

CP1 = "router: {shared_subject: cp1}\n"
QUEUE = {"baseline": "", "v2": "worker: {queue: {v2: {enabled: true}}}\n"}
OVERLOAD = {"overload_status": "healthy", "queue_depth": 1, "worker_id": "theirs"}


def started(folder: Folder, kind: str = "v2") -> None:
    """A router of ours, ready."""
    (folder.path / "reefknot.yaml").write_text(CP1 + QUEUE[kind])
    folder.part("router")


def submit(folder: Folder, name: str, **fields: Any) -> None:
    (folder.path / f"{name}.jsonl").write_text(json.dumps(assignment(name, "their.step", {"n": 1}, **fields)))
    assert folder("submit", f"{name}.jsonl").code == 0


def job(folder: Folder, name: str) -> Fields:
    shown: Fields = folder.json("job", "show", name)
    return shown


def ends(folder: Folder, name: str, state: str = "succeeded") -> Fields:
    """The result of a job, once it has ended so."""
    until(lambda: bool(job(folder, name)["state"] == state))
    result: Fields = job(folder, name)["result"]
    return result


def acknowledge(peer: Peer, name: str, status: str = "accepted", **fields: Any) -> None:
    peer.send(ACK, {"assignment_id": name, "status": status, **fields})


def answer(peer: Peer, message: Fields, status: str = "success", **fields: Any) -> None:
    """A result with the fields of the baseline, and others."""
    known = {key: message[key] for key in ("assignment_id", "request_id")} | {"job": {"type": message["job"]["type"]}}
    peer.send(RESULT, {**known, "status": status, "provider_id": "p", "latency_ms": 3.5, "cost": 0.25, **fields})


@pytest.mark.parametrize("fields", [{}, OVERLOAD], ids=["baseline peer", "v2 peer"])
@pytest.mark.parametrize("kind", QUEUE)
def test_a_worker_that_never_sent_a_heartbeat_is_reached_over_the_shared_subject(
    folder: Folder, peer: Peer, kind: str, fields: Fields
) -> None:
    started(folder, kind)
    words = ("submit", "--type", "their.step", "--inputs", '{"n": 1}', "--id", "a", "--wait", "--json")
    caller: subprocess.Popen[str] = folder.start(*words)
    message = peer.wait_for(ASSIGN, assignment_id="a").fields
    assert (message["version"], message["job"]) == ("1", {"type": "their.step", "payload": {"n": 1}})
    assert isinstance(message["request_id"], str)
    acknowledge(peer, "a", **fields)
    answer(peer, message, **fields, output={"rows": 2})
    code, out, err = folder.ends(caller)
    (result,) = json.loads(out)["results"]
    assert (code, result["status"], result["output"]) == (0, "success", {"rows": 2}), err
    assert (result["provider_id"], result["latency_ms"], result["cost"]) == ("p", 3.5, 0.25)
    assert result.get("overload_status") == fields.get("overload_status")


def test_a_result_of_another_request_is_an_event_and_no_end(folder: Folder, peer: Peer) -> None:
    started(folder)
    submit(folder, "a")
    message = peer.wait_for(ASSIGN, assignment_id="a").fields
    acknowledge(peer, "a")
    answer(peer, {**message, "request_id": "of-another"}, output={"rows": 1})
    answer(peer, message, output={"rows": 2}, error_message="none at all", error_code="NETWORK_ERROR")
    result = ends(folder, "a")
    assert (result["request_id"], result["output"]) == (message["request_id"], {"rows": 2})
    assert result.keys().isdisjoint({"error_message", "error_code"}), "a success has no error"
    reasons = [event.get("reason") for event in job(folder, "a")["events"]]
    assert reasons.count("result ignored: its request_id is of-another") == 1


def test_what_is_rejected_for_now_waits_and_is_tried_again(folder: Folder, peer: Peer) -> None:
    started(folder)
    submit(folder, "a")
    message = peer.wait_for(ASSIGN, assignment_id="a").fields
    full = {"reason": "queue_full", "message": "Queue full, rejecting assignment", "retry_after_ms": 300}
    acknowledge(peer, "a", "rejected", **full, overload_status="critical")
    again = peer.wait_for(ASSIGN, assignment_id="a", number=2).fields
    assert again == message
    acknowledge(peer, "a", "rejected", reason="overloaded")
    peer.wait_for(ASSIGN, assignment_id="a", number=3)
    assert job(folder, "a")["state"] == "pending"
    acknowledge(peer, "a")
    answer(peer, message)
    assert ends(folder, "a")["status"] == "success"


def test_a_rejection_without_a_reason_is_final_and_its_message_arrives(folder: Folder, peer: Peer) -> None:
    """The baseline never rejects for overload: what it rejects is wrong."""
    started(folder)
    submit(folder, "a")
    peer.wait_for(ASSIGN, assignment_id="a")
    acknowledge(peer, "a", "rejected", message="n: a negative number is expected")
    result = ends(folder, "a", "failed")
    assert (result["status"], result["error_code"]) == ("error", "INVALID_INPUT")
    assert result["error_message"] == "n: a negative number is expected"


@pytest.mark.parametrize("status", ["degraded", "overloaded", "critical"])
def test_of_two_workers_the_one_that_is_not_healthy_is_passed_over(folder: Folder, peer: Peer, status: str) -> None:
    started(folder)
    for turn, (chosen, other) in enumerate((("one", "two"), ("two", "one"))):
        peer.beat(chosen, "healthy")
        peer.beat(other, status)
        until(lambda chosen=chosen, other=other: _levels(folder) == {chosen: "healthy", other: status})  # type: ignore[misc]
        for number in range(4):
            name = f"t{turn}-{number}"
            submit(folder, name)
            if status == "critical":
                _refuse_probe(peer, name, chosen, other)
            message = peer.wait_for(f"{ASSIGN}.w.{chosen}", assignment_id=name).fields
            acknowledge(peer, name, worker_id=chosen, overload_status="healthy", queue_depth=0)
            answer(peer, message, worker_id=chosen)
            ends(folder, name)
            assert status == "critical" or not peer.heard(f"{ASSIGN}.w.{other}", assignment_id=name)


def _refuse_probe(peer: Peer, name: str, chosen: str, other: str) -> None:
    """A critical worker is sent one now and then, to see whether it still is; it rejects that."""
    ways = {one: f"{ASSIGN}.w.{one}" for one in (chosen, other)}
    peer.until(lambda: [way for way in ways.values() if peer.heard(way, assignment_id=name)], name)
    if peer.heard(ways[other], assignment_id=name):
        full = {"reason": "queue_full", "retry_after_ms": 60_000, "overload_status": "critical", "queue_depth": 9}
        acknowledge(peer, name, "rejected", worker_id=other, **full)


def _levels(folder: Folder) -> dict[str, str]:
    """The status of each worker's class as the router knows it."""
    (router,) = folder.json("router", "status")["routers"]
    return {name: one["status"] for name, one in router["workers"].get("cpu", {}).items()}


INVENTED = 12_000
"""More workers than a router remembers: with any number of them it knows as many as with these."""


def test_heartbeats_of_workers_that_do_not_exist_hide_no_router(folder: Folder, peer: Peer) -> None:
    started(folder)
    health = {"cpu": {"status": "critical", "queue_depth": 9, "active": 4, "capacity": 4}}
    beat = {"timestamp": int(time.time() * 1000), "classes": health}
    peer.send_all(HEARTBEAT, ({"worker_id": f"invented-{number}", **beat} for number in range(INVENTED)))

    def reported() -> bool:
        """Whether the router has reported since, and says how many workers its report leaves out."""
        (router,) = folder.json("router", "status")["routers"]
        return bool(router.get("workers_left_out", 0) > MOST_WORKERS - 1000)

    until(reported)
    (folder.path / "a.jsonl").write_text(json.dumps(assignment("a", "their.step")))
    done = folder("submit", "a.jsonl")
    assert (done.code, "no router" in done.err) == (0, False), done.err


def test_messages_of_strangers_are_ignored(folder: Folder, peer: Peer) -> None:
    started(folder)
    submit(folder, "a")
    message = peer.wait_for(ASSIGN, assignment_id="a").fields
    answer(peer, {**message, "assignment_id": "stranger"})
    acknowledge(peer, "stranger", "rejected", reason="queue_full")
    for subject in (ACK, RESULT, "caf.worker.heartbeat.v1"):
        for body in (b"no json", b"", b"[]", b'{"assignment_id": 7}'):
            peer.send(subject, body)
    acknowledge(peer, "a")
    answer(peer, message)
    assert ends(folder, "a")["status"] == "success"
    assert folder("job", "show", "stranger").code == 1
    assert [one["id"] for one in folder.json("job", "list")["jobs"]] == ["a"]


def test_a_cancellation_reaches_the_worker_in_the_documents_fields(folder: Folder, peer: Peer) -> None:
    started(folder)
    submit(folder, "a")
    message = peer.wait_for(ASSIGN, assignment_id="a").fields
    acknowledge(peer, "a")
    canceller = folder.start("job", "cancel", "a", "--because", "enough", "--json")
    assert peer.wait_for(CANCEL, assignment_id="a").fields["reason"] == "enough"
    answer(peer, message, "cancelled", error_code="CANCELLED_BY_USER")
    folder.ends(canceller)
    ended = job(folder, "a")
    assert (ended["result"]["status"], ended["result"]["error_code"]) == ("cancelled", "CANCELLED_BY_USER")
    assert (ended["state"], ended["reason"]) == ("cancelled", "enough")


WHOLE = {
    "tenant_id": "acme",
    "options": {"priority": "high", "timeout_ms": 20_000, "retry": {"max_attempts": 2}},
    "resource_class": "cpu",
    "correlation": {"trace_id": "t-1"},
    "executor": {"provider_id": "p", "channel": "c"},
    "metadata": {"order": 7, "text": "Grüße"},
}


def test_an_assignment_is_the_same_bytes_over_nats_and_over_sqlite(folder: Folder, peer: Peer) -> None:
    started(folder)
    submit(folder, "a", **WHOLE)
    submit(folder, "b")
    over_nats = [peer.wait_for(ASSIGN, assignment_id=name).data for name in ("a", "b")]
    assert json.loads(over_nats[0]) == {**assignment("a", "their.step", {"n": 1}, **WHOLE), "version": "1"}
    engine = f"sqlite:{folder.path / 'other.db'}"
    over_sqlite = asyncio.run(_heard_over(folder, engine, 2))
    assert sorted(over_sqlite) == sorted(over_nats)


async def _heard_over(folder: Folder, engine: str, number: int) -> list[bytes]:
    """The assignments that a router over another store sends to the shared subject."""
    async with rk.open_store(engine) as store:
        transport = store.transport()
        line = transport.subscribe(ASSIGN)
        router = await asyncio.to_thread(folder.part, "router", "--engine", engine)
        for name in ("a", "b"):
            caller = folder.start("submit", f"{name}.jsonl", "--engine", engine)
            assert (await asyncio.to_thread(folder.ends, caller))[0] == 0
        heard: list[Delivery] = []
        async with asyncio.timeout(60):
            while len(heard) < number:
                heard.append(await anext(line))
        router.terminate()
        await asyncio.to_thread(router.communicate)
        await transport.close()
        return [one.body for one in heard]
