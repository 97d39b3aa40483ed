"""
A router that knows only the documents, against a worker of ours on NATS, baseline and v2.

It sends assignments by every way, and reads acks, results and heartbeats as JSON.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.folder import Folder, until
from tests.integration.peers import ACK, ASSIGN, CANCEL, HEARTBEAT, RESULT, Fields, Peer, assignment

WORKER = "w1"
STEERED = f"{ASSIGN}.w.{WORKER}"
BASELINE = ""
"""No configuration at all: the shared subject is heard by default."""
V2 = """\
worker:
  retries: {v2: {enabled: true, default_policy: {max_attempts: 2, base_delay_ms: 20, jitter_type: none}}}
  queue:
    v2:
      enabled: true
      max_queue_size: SIZE
      rejection_policy: POLICY
      resource_pools: {cpu: {max_concurrency: 1}}
      policies: {defer: {max_defer_time_ms: 1000}}
"""
V2_FIELDS = {"overload_status", "queue_depth", "worker_id", "reason", "retry_after_ms"}
RESULT_FIELDS = {"assignment_id", "request_id", "status", "provider_id", "job", "latency_ms", "cost"}


def started(folder: Folder, configuration: str) -> None:
    """A worker of ours, ready for assignments."""
    (folder.path / "reefknot.yaml").write_text(configuration)
    folder.part("worker", "--worker-id", WORKER, "--module", "naps")


def v2(size: int, policy: str = "reject_new") -> str:
    return V2.replace("SIZE", str(size)).replace("POLICY", policy)


def nap(name: str, **fields: Any) -> Fields:
    return assignment(name, "own.nap", {"seconds": 0, "name": name}, **fields)


def wait(name: str, **fields: Any) -> Fields:
    """A step that goes on until the folder's `go` is called."""
    return assignment(name, "own.wait", {"name": name}, **fields)


def filled(folder: Folder, peer: Peer, *names: str) -> list[Fields]:
    """The acks of these assignments, which wait behind one that runs."""
    peer.send(STEERED, wait("runs"))
    until(lambda: folder.begun() == ["runs"])
    acks = []
    for name in names:  # one after the other: each is to find the one before it in the queue
        peer.send(STEERED, wait(name))
        acks.append(peer.ack(name))
    return acks


def succeed(peer: Peer, *names: str) -> None:
    assert {name: peer.result(name)["status"] for name in names} == dict.fromkeys(names, "success")


@pytest.mark.parametrize("is_v2", [False, True], ids=["baseline", "v2"])
def test_assignments_by_every_way_are_answered_in_the_documents_fields(folder: Folder, peer: Peer, is_v2: bool) -> None:
    started(folder, v2(10) if is_v2 else BASELINE)
    executor = {"provider_id": "theirs", "channel": "c"}
    more = {"executor": executor, "tenant_id": "acme", "correlation": {"trace_id": "t-1"}, "a_new_field": 1}
    ways: dict[str, Callable[[Fields], object]] = {
        "core": lambda message: peer.send(ASSIGN, message),
        "stored": lambda message: peer.store(ASSIGN, message),
        "steered": lambda message: peer.send(STEERED, message),
    }
    for name, send in ways.items():
        send(nap(name, **more))
        ack, result = peer.ack(name), peer.result(name)
        assert (ack["status"], ack["message"]) == ("accepted", "Assignment queued")
        assert ack.keys() & V2_FIELDS == ({"overload_status", "queue_depth", "worker_id"} if is_v2 else set())
        assert RESULT_FIELDS | {"trace_id", "tenant_id", "timestamp", "retries_used", "output"} <= result.keys()
        assert result.keys() & V2_FIELDS == ({"overload_status", "queue_depth", "worker_id"} if is_v2 else set())
        said = [result[key] for key in ("request_id", "status", "provider_id", "job", "trace_id", "tenant_id")]
        assert said == [f"r-{name}", "success", "theirs", {"type": "own.nap"}, "t-1", "acme"]
        numbers = [result[key] for key in ("latency_ms", "cost", "timestamp", "retries_used")]
        assert all(isinstance(one, int | float) for one in numbers), numbers
        if is_v2:
            assert (ack["overload_status"], ack["queue_depth"], ack["worker_id"]) == ("healthy", 0, WORKER)
            assert (result["overload_status"], result["queue_depth"]) == ("healthy", 0)
    until(lambda: peer.waiting_in(f"{peer.store_name}_assign") == 0)


def test_a_worker_that_is_told_so_leaves_the_shared_subject_alone(folder: Folder, peer: Peer) -> None:
    started(folder, "router: {shared_subject: off}\n")
    peer.send(ASSIGN, nap("unheard"))
    peer.send(STEERED, nap("heard"))
    succeed(peer, "heard")
    assert not peer.heard(ACK, assignment_id="unheard")
    assert f"{peer.store_name}_assign" not in peer.streams()


def test_a_worker_names_the_other_stream_on_the_shared_subject_and_goes_on(folder: Folder, peer: Peer) -> None:
    theirs = f"{peer.store_name}_theirs"
    peer.make_stream(theirs, [ASSIGN])
    worker = folder.start("worker", "start", "--worker-id", WORKER, "--module", "naps")
    peer.wait_for(HEARTBEAT, worker_id=WORKER)
    peer.send(STEERED, nap("steered"))
    succeed(peer, "steered")
    worker.terminate()
    _, _, said = folder.ends(worker)
    assert f"the subject {ASSIGN} belongs to the stream {theirs}" in said
    assert "router.shared_subject: off" in said


def test_headers_override_the_payload(folder: Folder, peer: Peer) -> None:
    started(folder, BASELINE)
    peer.send(STEERED, nap("a", tenant_id="theirs"), headers={"tenant_id": "acme", "trace_id": "t-2"})
    result = peer.result("a")
    assert (result["tenant_id"], result["trace_id"]) == ("acme", "t-2")


def test_a_repeated_id_runs_once_and_has_one_result(folder: Folder, peer: Peer) -> None:
    started(folder, v2(10))
    peer.send(STEERED, wait("twice"))
    until(lambda: folder.begun() == ["twice"])
    peer.send(ASSIGN, wait("twice"))
    peer.store(ASSIGN, wait("twice"))
    peer.send(STEERED, wait("twice"))
    assert {peer.ack("twice", number)["status"] for number in (1, 2, 3, 4)} == {"accepted"}
    folder.go()
    peer.send(STEERED, nap("after"))
    succeed(peer, "twice", "after")
    assert len(peer.heard(RESULT, assignment_id="twice")) == 1
    assert folder.begun() == ["twice", "after"]


def test_a_full_queue_rejects_the_heartbeat_is_critical_and_both_recover(folder: Folder, peer: Peer) -> None:
    started(folder, v2(5))
    acks = filled(folder, peer, *"abcde")
    levels = ["healthy", "healthy", "degraded", "overloaded", "critical"]
    assert [(one["overload_status"], one["queue_depth"]) for one in acks] == list(zip(levels, range(1, 6), strict=True))

    peer.send(STEERED, wait("late"))
    late = peer.ack("late")
    assert (late["status"], late["message"]) == ("rejected", "Queue full, rejecting assignment")
    assert (late["reason"], late["overload_status"], late["queue_depth"]) == ("queue_full", "critical", 5)
    assert int(late["retry_after_ms"]) == late["retry_after_ms"] > 0
    peer.until(lambda: _beats(peer, status="critical", queue_depth=5, active=1, capacity=1), "a critical heartbeat")

    folder.go()
    succeed(peer, "runs", *"abcde")
    peer.until(lambda: _beats(peer, status="healthy", queue_depth=0, active=0)[1:], "a heartbeat of recovery")
    peer.send(STEERED, wait("late"))
    assert peer.ack("late", 2)["overload_status"] == "healthy"
    succeed(peer, "late")


def _beats(peer: Peer, **fields: Any) -> list[Fields]:
    """Heartbeats of the worker whose class `cpu` has these values."""
    beats = [one.fields for one in peer.heard(HEARTBEAT, worker_id=WORKER)]
    return [one for one in beats if fields.items() <= one["classes"]["cpu"].items()]


def test_the_baseline_accepts_without_end_and_withholds_what_it_knows(folder: Folder, peer: Peer) -> None:
    """The control: the same flood, without a bound."""
    started(folder, BASELINE)
    names = [f"n{number}" for number in range(30)]
    for name in names:
        peer.send(STEERED, wait(name))
    acks = [peer.ack(name) for name in names]
    assert {one["status"] for one in acks} == {"accepted"}
    assert not any(one.keys() & V2_FIELDS for one in acks)
    folder.go()
    succeed(peer, *names)
    assert not any(one.fields.keys() & V2_FIELDS for one in peer.heard(RESULT))
    assert {one["classes"]["cpu"]["queue_depth"] for one in _beats(peer)} == {0}


def test_drop_oldest_answers_for_the_one_that_is_dropped(folder: Folder, peer: Peer) -> None:
    started(folder, v2(2, "drop_oldest"))
    filled(folder, peer, "old", "young")
    peer.store(ASSIGN, wait("new"))
    new, dropped, result = peer.ack("new"), peer.ack("old", 2), peer.result("old")
    assert (new["status"], new["message"]) == ("accepted", "Assignment queued (dropped oldest)")
    assert (dropped["status"], dropped["reason"]) == ("rejected", "dropped_oldest")
    assert (result["status"], result["error_code"]) == ("error", "SYSTEM_OVERLOAD")
    folder.go()
    succeed(peer, "runs", "young", "new")
    assert "old" not in folder.begun()


@pytest.mark.parametrize("subject", [ASSIGN, STEERED])
def test_drop_oldest_holds_for_ten_that_come_at_once(folder: Folder, peer: Peer, subject: str) -> None:
    started(folder, v2(3, "drop_oldest"))
    filled(folder, peer)
    names = [f"n{number}" for number in range(10)]
    for name in names:
        peer.send(subject, wait(name))
    acks = [peer.ack(name) for name in names]
    assert {one["status"] for one in acks} == {"accepted"}
    assert max(one["queue_depth"] for one in acks) == 3
    for name in names[:7]:
        assert (peer.ack(name, 2)["reason"], peer.result(name)["error_code"]) == ("dropped_oldest", "SYSTEM_OVERLOAD")
    folder.go()
    succeed(peer, "runs", *names[7:])
    assert sorted(folder.begun()) == sorted(["runs", *names[7:]])


def test_defer_says_for_how_long_and_does_it_then(folder: Folder, peer: Peer) -> None:
    started(folder, v2(4, "defer"))
    acks = filled(folder, peer, *"abcde")
    ends = ["Assignment deferred for 500ms", "Queue at capacity, cannot defer"]
    assert [one["message"] for one in acks] == [*["Assignment queued"] * 3, *ends]
    assert (acks[-1]["status"], acks[-1]["reason"]) == ("rejected", "queue_full")
    folder.go()
    succeed(peer, "runs", *"abcd")


def test_degrade_takes_retries_away_by_the_level_that_the_ack_names(folder: Folder, peer: Peer) -> None:
    started(folder, v2(5, "degrade"))
    filled(folder, peer, "a", "b")
    for name, said in {
        "usual": "Assignment queued",
        "light": "Assignment accepted with degradation: light",
        "medium": "Assignment accepted with degradation: medium",
        "none": "Queue at capacity, cannot degrade",
    }.items():
        peer.send(STEERED, assignment(name, "own.flaky"))
        assert peer.ack(name)["message"] == said
    folder.go()
    results = {name: peer.result(name) for name in ("usual", "light", "medium")}
    ends = {name: (one["status"], one["retries_used"]) for name, one in results.items()}
    assert ends == {"usual": ("success", 1), "light": ("success", 1), "medium": ("error", 0)}
    assert results["medium"]["error_code"] == "NETWORK_ERROR"


@pytest.mark.parametrize("is_v2", [False, True], ids=["baseline", "v2"])
def test_what_runs_and_what_waits_can_be_cancelled(folder: Folder, peer: Peer, is_v2: bool) -> None:
    started(folder, v2(5) if is_v2 else BASELINE)
    filled(folder, peer, "a", "b", "c", "d", "e")
    for name in ("e", "runs"):
        peer.send(CANCEL, {"assignment_id": name, "reason": "enough"})
        result = peer.result(name)
        assert (result["status"], result["error_code"]) == ("cancelled", "CANCELLED_BY_USER")
    peer.send(CANCEL, {"assignment_id": "nobody"})
    folder.go()
    succeed(peer, *"abcd")


INVALID: list[tuple[str, Fields | bytes]] = [
    ("request_id", {"assignment_id": "i1", "job": {"type": "own.nap"}}),
    ("job", {"assignment_id": "i2", "request_id": "r"}),
    ("job.type", {"assignment_id": "i3", "request_id": "r", "job": {}}),
    ("version", nap("i4", version="2")),
    ("options.timeout_ms", nap("i5", options={"timeout_ms": -1})),
    ("options.timeout_ms", nap("i6", options={"timeout_ms": "soon"})),
    ("options.priority", nap("i7", options={"priority": "urgent"})),
    ("job.payload", assignment("i8", "own.nap") | {"job": {"type": "own.nap", "payload": [1]}}),
    ("job.payload_ref", assignment("i9", "own.nap") | {"job": {"type": "own.nap", "payload_ref": "s3://x"}}),
    ("job.type", assignment("i10", "no.such")),
    ("resource_class", nap("i11", resource_class="quantum")),
]


@pytest.mark.parametrize("is_v2", [False, True], ids=["baseline", "v2"])
def test_what_is_invalid_is_rejected_by_its_field_and_harms_nobody(folder: Folder, peer: Peer, is_v2: bool) -> None:
    started(folder, v2(5) if is_v2 else BASELINE)
    for number, (field, message) in enumerate(INVALID, 1):
        (peer.store if number % 2 else peer.send)(ASSIGN, message)
        ack = peer.ack(f"i{number}")
        assert (ack["status"], ack["message"].startswith(f"{field}: ")) == ("rejected", True), ack
        assert ack.get("reason") == (("unknown_job_type" if number == 10 else "invalid") if is_v2 else None)
    for number, unreadable in enumerate((b"no json", b"", b"\xff\xfe{}", b'{"assignment_id": "half"'), 1):
        (peer.store if number % 2 else peer.send)(ASSIGN, unreadable)
        ack = peer.wait_for(ACK, number=number, assignment_id="").fields
        assert (ack["status"], ack["message"].startswith("the message: ")) == ("error", True), ack
    peer.send(ASSIGN, nap("fine"))
    succeed(peer, "fine")
    until(lambda: peer.waiting_in(f"{peer.store_name}_assign") == 0)
    assert len(peer.heard(RESULT)) == 1, "what was rejected has no result"
