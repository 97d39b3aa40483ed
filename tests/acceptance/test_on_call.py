"""
The three commands of a person on call, tried cold for each incident of the runbook.

`doctor`, `top` and `job show` each name the cause, or what is left of it, and what to do.
"""

import json
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reefknot.stores.sqlite.connection import VERSION
from tests.acceptance.folder import CONFIG, MODULE, PATIENCE_S, Folder, until

STEPS = (
    MODULE
    + """
@rk.block("own.die")
async def die(inputs, context):
    os.kill(os.getpid(), 9)

@rk.block("own.refused")
async def refused(inputs, context):
    raise ConnectionRefusedError("printer.example:9100 refused")
"""
)
CALLS = ("--module", "naps")
WITHIN_S = 15.0


class Told(NamedTuple):
    """The answers of the three commands, and the exit code of `doctor`."""

    code: int
    doctor: str
    top: str
    job: str


@pytest.fixture
def scene(folder: Folder) -> Folder:
    folder.write("naps.py", STEPS)
    return folder


def asked(folder: Folder, job: str) -> Told:
    doctor, top, shown = folder("doctor"), folder("top", "--once"), folder("job", "show", job)
    texts = [" ".join(f"{one.out} {one.err}".split()) for one in (doctor, top, shown)]
    return Told(int(doctor.code), *texts)


def waits(folder: Folder, job: str) -> str:
    """The code of the cause for which the job waits."""
    return str((folder.job(job)["waiting"] or {}).get("code", ""))


def says(found: Told, *texts: str) -> None:
    """Each of the three commands has these texts."""
    for answer in found[1:]:
        for text in texts:
            assert text in answer


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def alerts(folder: Folder) -> list[str]:
    return [one["alert"] for one in folder.json("alert", "list")["alerts"]]


def raised_within(folder: Folder, alert: str, began: float) -> None:
    """The alert is raised soon after this time, by the clock of whoever raised it."""
    until(lambda: alert in alerts(folder))
    (found,) = [one for one in folder.events("alert_raised") if one["alert"] == alert]
    assert at(found) - began < WITHIN_S


def test_no_router_and_no_worker_are_told_everywhere_and_a_dead_part_stays_visible(scene: Folder) -> None:
    looks = "" if scene.engine.startswith("sqlite:") else "slow-looks"  # as often as they are on one of the engines
    worker = scene.part("worker", *CALLS, protection=looks)
    scene.wait("order-7")
    began = at(scene.events("submitted")[0])
    assert waits(scene, "order-7") == "no_router"
    found = asked(scene, "order-7")
    assert found.code == 1
    says(found, "no router is running", "reefknot router start")
    assert "no router is running" in scene("job", "list").err
    raised_within(scene, "no_router", began)  # by a worker that misses a router

    scene.kill(worker)
    router, began = scene.part("router", protection=looks), time.time()
    until(lambda: waits(scene, "order-7") == "no_worker")
    found = asked(scene, "order-7")
    assert found.code == 1
    says(found, "no worker is running", "reefknot worker start")
    assert "worker-1 (pid" in found.doctor
    assert "worker-1 is gone: its process ended" in found.top
    listed = scene("worker", "list")
    assert (listed.code, "gone" in listed.out) == (69, True)
    raised_within(scene, "no_worker", began)  # by a router that misses a worker
    until(lambda: len(scene.events("worker_gone")) == 1)
    (gone,) = scene.events("worker_gone")
    assert (gone["part"], gone["worker_id"], gone["process"]) == ("worker", "worker-1", worker.pid)

    after = scene.part("worker", *CALLS, protection=looks)
    until(lambda: "order-7" in scene.begun())
    assert not scene.json("worker", "list")["gone"], "it runs again under its name"
    scene.go()
    until(lambda: alerts(scene) == [])
    for process in (after, router):
        scene.stop(process)
    assert (scene("worker", "list").out, len(scene.events("worker_gone"))) == ("", 1), "an orderly end is no loss"


def test_of_a_worker_that_died_the_jobs_it_held_are_told(scene: Folder) -> None:
    scene.part("router")
    worker = scene.part("worker", *CALLS)
    scene.wait("order-7")
    until(lambda: scene.json("worker", "list")["workers"][0]["classes"]["cpu"]["active"] == 1)
    scene.kill(worker)
    until(lambda: len(scene.events("worker_gone")) == 1)
    (gone,) = scene.events("worker_gone")
    assert gone["held"] == {"running": 1, "queued": 0, "jobs": ["order-7"]}
    assert "it held 1 running (order-7)" in asked(scene, "order-7").doctor


def test_a_dashboard_alone_raises_the_alert(scene: Folder) -> None:
    scene.wait("order-7")
    process = scene.start("dashboard", "--port", "0", "--json")
    assert process.stdout is not None
    assert process.stdout.readline() == "{\n", "it is served"
    until(lambda: set(alerts(scene)) == {"no_router", "no_worker"})


def test_poison_is_told_with_the_way_out(scene: Folder) -> None:
    scene.submit("own.die", "poison")
    for _ in range(3):
        process = scene.start("up", *CALLS)
        assert process.wait(PATIENCE_S) != 0
    scene.part("router")
    scene.part("worker", *CALLS)
    until(lambda: waits(scene, "poison") == "quarantined")
    found = asked(scene, "poison")
    assert "quarantine requeue ID" in found.job
    assert "its owner vanished 3 times" in found.job
    assert "1 job in quarantine waits for a decision" in found.doctor
    assert "quarantine" in found.doctor.partition("waits for a decision")[2]
    assert "1 job in quarantine; the causes: reefknot quarantine stats --group" in found.top


def test_an_outage_is_told_with_its_destination(scene: Folder) -> None:
    retried = CONFIG.replace("max_attempts: 2, base_delay_ms: 20", "max_attempts: 9, base_delay_ms: 20000")
    scene.write("reefknot.yaml", retried.replace("queue: {v2: {enabled: true}}", QUICK))
    scene.write_lines(
        "pages.jsonl", *({"assignment_id": f"page-{n}", "job": {"type": "own.refused"}} for n in range(130))
    )
    assert scene("submit", "pages.jsonl").code == 0
    scene.up()
    until(lambda: bool(scene.json("top", "--once")["breakers"]))
    jobs = scene.json("job", "list", "--limit", "200")["jobs"]
    held = [one["id"] for one in jobs if one["waiting"] and one["waiting"]["code"] == "destination_down"]
    answers: list[Told] = []

    def is_told() -> bool:
        """A held job is asked about until it waits while it is shown: any of them may be the probe of that moment."""
        answers.append(asked(scene, held[len(answers) % len(held)]))
        return "destination own.refused has been down since 20" in answers[-1].job

    until(is_told)
    found = answers[-1]
    assert "own.refused is down: its breaker at worker-1 is" in found.doctor
    assert "own.refused at worker-1 is" in found.top
    assert "; next probe in" in found.job
    says(found, "repair the destination")
    errors = [one["waiting"]["text"] for one in jobs if one["waiting"] and one["waiting"]["code"] == "retry"]
    assert all("the last one failed: ConnectionRefusedError: printer.example:9100 refused" in one for one in errors)


QUICK = "queue: {v2: {enabled: true, max_queue_size: 500, resource_pools: {cpu: {max_concurrency: 16}}}}"
SMALL = (
    "queue: {v2: {enabled: true, max_queue_size: 4, resource_pools: {cpu: {max_queue_size: 4, max_concurrency: 1}}, "
    "overload_thresholds: {degraded: 0.25, overloaded: 0.5, critical: 0.75}}}"
)


def test_overload_is_told_with_the_full_queue(scene: Folder) -> None:
    scene.write("reefknot.yaml", CONFIG.replace("queue: {v2: {enabled: true}}", SMALL))
    scene.up()
    scene.wait("report-0")
    until(lambda: "report-0" in scene.begun())
    for number in (1, 2, 3):
        scene.wait(f"report-{number}")
    until(lambda: waits(scene, "report-3") == "pool_full")
    until(lambda: "worker-1 cpu is critical" in scene("top", "--once").out)
    found = asked(scene, "report-3")
    for answer in (found.doctor, found.top):
        assert "worker-1 cpu is critical" in answer
        assert "start another worker, give it more slots, or submit less" in answer
    assert "the one slot of cpu at worker-1 is busy" in found.job
    assert "max_concurrency" in found.job


def test_a_full_disk_is_told(scene: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.wait("order-7")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    found = asked(scene, "order-7")
    assert found.code == 1
    says(found, "0 bytes free", "make room")


def test_a_wrong_configuration_is_told_with_its_line(scene: Folder) -> None:
    scene.wait("order-7")
    scene.write("reefknot.yaml", "worker:\n  quarantine_faild: true\n")
    found = asked(scene, "order-7")
    assert found.code == 78
    says(found, "reefknot.yaml:2:3: worker.quarantine_faild", "did you mean 'quarantine_failed'", "correct it")
    assert json.loads(scene("top", "--once", "--json").out)["states"]["pending"] == 1
    scene.write("reefknot.yaml", CONFIG)
    assert "quarantine_faild" not in str(asked(scene, "order-7"))


def move_back(scene: Folder, copy: Path) -> None:
    """The steps of the runbook: the store and its log away together, the copy in their place."""
    state = scene.path / ".reefknot" / "state.db"
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (state.parent / name).unlink(missing_ok=True)
    copy.rename(state)


def runs_again(scene: Folder, job: str) -> None:
    """The store is whole, and the job goes on."""
    assert scene("store", "check").code == 0
    assert scene("audit", "verify").code == 0
    says(asked(scene, job), "no system is running", "reefknot up")
    scene.go()
    scene.up()
    until(lambda: scene.state(job) == "succeeded")


def test_an_upgrade_is_rolled_back_by_the_copy_that_it_kept(scene: Folder) -> None:
    scene.wait("order-7")
    code, _, err = scene.ends(scene.start("store", "migrate", program=("-m", "tests.acceptance.newer")))
    assert code == 0, err
    copy = scene.path / ".reefknot" / f"state.db.v{VERSION}.bak"
    assert str(copy) in err
    found = asked(scene, "order-7")
    assert found.code == 78
    says(found, f"it has version {VERSION + 1}, this program knows up to {VERSION}", "use a newer reefknot", copy.name)
    move_back(scene, copy)
    runs_again(scene, "order-7")


def test_a_damaged_store_is_restored_from_a_backup(scene: Folder) -> None:
    scene.wait("order-7")
    assert scene("store", "backup", "old.db").code == 0
    state = scene.path / ".reefknot" / "state.db"
    content = bytearray(state.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    state.write_bytes(content)
    found = asked(scene, "order-7")
    assert found.code == 65
    says(found, "the file is damaged", "restore a backup")
    move_back(scene, scene.path / "old.db")
    runs_again(scene, "order-7")
