"""Router and workers as processes of their own over one file; what is done well before 25 s waited for no lease."""

import json
import signal
import time

from tests.acceptance.folder import PATIENCE_S, Folder, until

BEFORE_ANY_LEASE_S = 25.0
NAPS = ("--module", "naps")


def held(folder: Folder) -> dict[str, int]:
    """What each router looks after, as it last said."""
    return {one["router_id"]: one["pending"] for one in folder.json("router", "status")["routers"]}


def test_a_worker_that_is_killed_loses_nothing_and_everything_has_one_result(folder: Folder) -> None:
    """One worker knows the steps, the other does not; the first is killed in the middle and comes back."""
    router = folder.part("router")
    first = folder.part("worker", "--worker-id", "own", *NAPS)
    second = folder.part("worker", "--worker-id", "reader")
    assert [one["worker_id"] for one in folder.json("worker", "list")["workers"]] == ["own", "reader"]

    steps, reads = [f"step-{n}" for n in range(6)], [f"read-{n}" for n in range(10)]
    for name in steps:
        folder.wait(name)
    for name in reads:
        folder.submit("fs.blob_get", name, path="a.txt")
    until(lambda: len(folder.begun()) >= 4)
    began = time.monotonic()
    folder.kill(first)
    folder.part("worker", "--worker-id", "own", *NAPS)
    folder.go()
    until(lambda: folder.have_succeeded(*steps, *reads))
    assert time.monotonic() - began < BEFORE_ANY_LEASE_S
    assert len(folder.begun()) == 6 + 4, "what ran when it was killed was run again, and nothing else"

    folder.write_lines("again.jsonl", *map(_waiting, steps))
    results = folder("submit", "again.jsonl", "--wait", "--json").json["results"]
    assert {one["assignment_id"]: one["status"] for one in results} == dict.fromkeys(steps, "success")
    assert len(folder.begun()) == 6 + 4, "the same ids are the same work: each has its one result"

    for process in (router, second):
        assert folder.stop(process)[0] == 143
    if folder.engine.startswith("sqlite:"):
        assert folder("store", "check").code == 0


def _waiting(name: str) -> dict[str, object]:
    return {"assignment_id": name, "request_id": "r", "job": {"type": "own.wait", "payload": {"name": name}}}


def test_what_a_killed_worker_had_is_done_by_another_one_that_knows_the_steps(folder: Folder) -> None:
    folder.part("router")
    first = folder.part("worker", "--worker-id", "one", *NAPS)
    steps = [f"step-{n}" for n in range(4)]
    for name in steps:
        folder.wait(name)
    until(lambda: len(folder.begun()) >= 4)
    folder.part("worker", "--worker-id", "two", *NAPS)
    began = time.monotonic()
    folder.kill(first)
    until(lambda: len(folder.begun()) >= 5)
    assert len(folder.begun()) == 5, "after a crash they run one at a time"
    folder.go()
    until(lambda: folder.have_succeeded(*steps))
    assert time.monotonic() - began < BEFORE_ANY_LEASE_S
    assert sorted(folder.begun()) == sorted(steps * 2)


def test_what_a_killed_router_had_taken_on_is_answered_by_the_other_one(folder: Folder) -> None:
    routers = [folder.part("router"), folder.part("router")]
    folder.part("worker", *NAPS)
    assert [one["router_id"] for one in folder.json("router", "status")["routers"]] == ["router-1", "router-2"]
    steps = [f"step-{n}" for n in range(4)]
    for name in steps:
        folder.wait(name)
    until(lambda: len(folder.begun()) >= 4 and sum(held(folder).values()) == 4)
    began = time.monotonic()
    routers[0 if held(folder)["router-1"] else 1].kill()
    folder.go()
    folder.submit("fs.blob_get", "after", path="a.txt")
    until(lambda: folder.json("router", "status")["handed_in"] == {"succeeded": 5})
    assert time.monotonic() - began < BEFORE_ANY_LEASE_S
    assert sorted(folder.begun()) == steps, "a result that was there already was fetched, not made again"


def test_a_worker_of_its_own_helps_a_whole_system_and_obeys_commands(folder: Folder) -> None:
    system = folder.start("up")
    assert system.stderr is not None
    assert system.stderr.readline().startswith("up ")
    worker = folder.part("worker", *NAPS)
    assert [one["worker_id"] for one in folder.json("worker", "list")["workers"]] == ["worker-1", "worker-2"]
    folder.nap("first", 0)
    until(lambda: folder.state("first") == "succeeded")

    folder.wait("long")
    until(lambda: "long" in folder.begun())
    assert folder.json("job", "cancel", "long", "--because", "enough")["state"] == "cancelled"
    assert (folder.state("long"), folder.job("long")["reason"]) == ("cancelled", "enough")

    assert folder.json("worker", "pause", "worker-2", "--as", "ann")["paused"] is True
    folder.nap("second", 0)
    assert folder.json("worker", "resume")["resumed"] is True
    until(lambda: folder.state("second") == "succeeded")
    assert folder.json("worker", "drain", "worker-2")["drained"] is True
    assert folder("audit", "export", "events.jsonl").code == 0
    told = (folder.path / "events.jsonl").read_text()
    for action in ("worker.pause", "worker.resume", "worker.drain"):
        assert action in told

    code, out, _ = folder.stop(worker, signal.SIGINT)
    assert (code, out.startswith("worker worker-2 ran for ")) == (130, True)
    assert [one["worker_id"] for one in folder.json("worker", "list")["workers"]] == ["worker-1"], "it said goodbye"


def test_a_second_worker_of_the_same_name_is_refused_while_the_first_lives(folder: Folder) -> None:
    first = folder.part("worker", "--worker-id", "mine")
    code, out, err = folder.ends(folder.start("worker", "start", "--worker-id", "mine"))
    assert (code, out) == (75, "")
    assert "worker mine is running already" in err
    folder.kill(first)
    ended = folder.ends(folder.start("worker", "start", "--worker-id", "mine", "--for", "0.1", "--json"))
    assert (ended[0], json.loads(ended[1])["summary"]["worker_id"]) == (0, "mine")


def test_a_step_that_runs_gets_its_time_and_a_second_signal_takes_it_away(folder: Folder) -> None:
    folder.part("router")
    worker = folder.part("worker", *NAPS)
    folder.nap("long", 60)
    until(lambda: "long" in folder.begun())
    worker.send_signal(signal.SIGTERM)
    assert worker.stderr is not None
    until(lambda: worker.stderr is not None and "shutting down;" in worker.stderr.readline())
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 143
    assert folder.state("long") in ("pending", "running"), "it is kept"
