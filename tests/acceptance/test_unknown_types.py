"""Accepted work and a process that was started without its module: what is typed, and what happens to the work."""

import json
import subprocess

import pytest

from tests.acceptance.folder import CONFIG, Folder, until

STEPS = """\
import reefknot as rk

@rk.block("invoice.render")
async def render(inputs, context):
    with open("rendered.txt", "a") as file:
        file.write(context.assignment_id + "\\n")
    return {"pages": 2}
"""
LONGER_THAN_A_MOMENT = ("--for", "4")


def invoice(folder: Folder, *names: str) -> None:
    folder.write("steps.py", STEPS)
    for name in names:
        assert folder("submit", "--type", "invoice.render", "--id", name).code == 0


def up(folder: Folder, *words: str) -> str:
    """A system that ends by itself; returns what it printed."""
    code, out, err = folder.ends(folder.start("up", *words))
    assert code == 0, err
    return out + err


def up_until_succeeded(folder: Folder, *names: str) -> None:
    process = folder.start("up", "--module", "steps")
    until(lambda: folder.have_succeeded(*names))
    assert folder.stop(process)[0] == 143


MINE = {"assignment_id": "mine", "request_id": "r", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
INVOICE = {"assignment_id": "i-1", "request_id": "r", "job": {"type": "invoice.render"}}
WAITING = MINE | {"job": {"type": "own.wait", "payload": {"name": "mine"}}}


def run(folder: Folder, *words: str) -> tuple[int, str, str]:
    folder.write_lines("other.jsonl", MINE)
    return folder.ends(folder.start("run", "other.jsonl", *words))


def run_that_waits(folder: Folder) -> subprocess.Popen[str]:
    folder.write_lines("own.jsonl", WAITING)
    process = folder.start("run", "own.jsonl", "--module", "naps")
    until(lambda: folder.begun() == ["mine"])
    return process


@pytest.mark.parametrize("configured", [True, False], ids=["configured", "baseline"])
def test_a_start_without_the_module_leaves_the_backlog_to_one_with_it(folder: Folder, configured: bool) -> None:
    if not configured:
        (folder.path / "reefknot.yaml").unlink()
    invoice(folder, "i-1", "i-2")
    up(folder, *LONGER_THAN_A_MOMENT)
    assert (folder.state("i-1"), folder.state("i-2")) == ("pending", "pending")
    up_until_succeeded(folder, "i-1", "i-2")
    assert sorted((folder.path / "rendered.txt").read_text().split()) == ["i-1", "i-2"]


def test_a_run_of_another_file_leaves_the_jobs_of_others_and_with_all_it_runs_them(folder: Folder) -> None:
    invoice(folder, "i-1", "i-2")
    folder.submit("fs.blob_get", "theirs", path="a.txt")
    code, out, err = run(folder)
    assert (code, out.partition(":")[2].strip()) == (0, "1 succeeded; 0 retries")
    assert "3 other jobs are open in this store and left to others: `reefknot up` or `run --all` runs them" in err
    assert [folder.state(name) for name in ("i-1", "i-2", "theirs")] == ["pending"] * 3, "also what it could have run"
    code, _, err = run(folder, "--all", "--module", "steps")
    assert (code, "left to others" in err) == (0, False), err
    assert folder.have_succeeded("i-1", "i-2", "theirs")


def test_a_run_beside_a_system_leaves_its_jobs_to_it(folder: Folder) -> None:
    """The system sends nothing to the workers of the run, and the run is served by its own."""
    folder.part("router")
    folder.wait("theirs")
    process = run_that_waits(folder)
    folder.submit("fs.blob_get", "read", path="a.txt")
    until(lambda: sum(one["pending"] for one in folder.json("router", "status")["routers"]) == 3)
    folder.go()
    code, _, err = folder.ends(process)
    assert code == 0, err
    assert "2 other jobs are open" in err
    assert folder.begun() == ["mine"]
    assert {folder.state("theirs"), folder.state("read")} <= {"pending", "running"}, "its router holds them"
    folder.part("worker", "--module", "naps")
    until(lambda: folder.have_succeeded("theirs", "read"))


def test_a_run_does_not_count_as_a_system_for_what_others_submit(folder: Folder) -> None:
    process = run_that_waits(folder)
    read = ("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id", "read")
    waited = folder(*read, "--wait", "--timeout", "0.2")
    assert (waited.code, "no router and no worker is running on this store" in waited.err) == (75, True)
    folder.go()
    assert folder.ends(process)[0] == 0


def test_a_run_whose_places_are_taken_by_jobs_of_others_says_so(folder: Folder) -> None:
    folder.configure("router: {max_queue_size: 2}\n")
    for name in ("a", "b"):
        folder.submit("fs.blob_get", name, path="a.txt")
    code, _, err = run(folder)
    assert code == 75
    assert "start `reefknot up`, or run all together with --all" in err
    assert run(folder, "--all")[0] == 0


TPU = CONFIG.replace("{v2: {enabled: true}}", "{v2: {enabled: true, resource_pools: {tpu: {max_concurrency: 1}}}}")


@pytest.mark.parametrize(
    ("modules", "resource_class", "error", "reason", "mended"),
    [
        ((), "cpu", "INVALID_INPUT", "no worker knows its type", CONFIG),
        (("--module", "steps"), "tpu", "RESOURCE_UNAVAILABLE", "no worker has its class", TPU),
    ],
    ids=["type", "class"],
)
def test_what_nobody_knows_for_long_is_quarantined_with_its_answer_and_comes_back(
    folder: Folder, modules: tuple[str, ...], resource_class: str, error: str, reason: str, mended: str
) -> None:
    folder.configure("router: {patience_seconds: 1}\n")
    folder.write("steps.py", STEPS)
    folder.write_lines("work.jsonl", INVOICE | {"resource_class": resource_class})
    process = folder.start("up", *modules)
    waited = folder("submit", "work.jsonl", "--wait", "--json")
    (result,) = waited.json["results"]
    assert (waited.code, result["status"], result["error_code"]) == (1, "error", error)
    assert modules or "'invoice.render' is not known here" in result["error_message"]
    assert "reefknot quarantine requeue i-1" in result["error_message"]
    assert "1 quarantined" in folder.stop(process)[1]
    (item,) = folder.json("quarantine", "list")["items"]
    assert (item["id"], item["reason"], item["attempts"]) == ("i-1", reason, 0)
    folder.config.write_text(mended)
    assert folder("quarantine", "requeue", "i-1").code == 0
    up_until_succeeded(folder, "i-1")


def test_what_was_queued_behind_a_slot_outlives_a_restart_without_the_module(folder: Folder) -> None:
    """A worker of the same name finds its old queue, and cannot run what is in it."""
    folder.configure("router: {patience_seconds: 2}\n")
    names = [f"w-{n}" for n in range(6)]
    process = folder.up()
    for name in names:
        folder.wait(name)
    until(lambda: len(folder.begun()) >= 4)
    until(lambda: sum(one["pending"] for one in folder.json("router", "status")["routers"]) == 6)
    folder.kill(process)
    up(folder, "--for", "6")
    assert {folder.state(name) for name in names} <= {"pending", "running"}
    folder.go()
    folder.up()
    until(lambda: folder.have_succeeded(*names))


MAIL = """\
import reefknot as rk

@rk.block("mail.send", resource_class="emails")
async def send(inputs, context):
    return {"sent": True}
"""


def test_a_submission_runs_in_the_class_of_its_step_and_a_misspelt_class_is_warned_of(folder: Folder) -> None:
    folder.write("mail_steps.py", MAIL)
    folder.part("router")
    folder.part("worker", "--worker-id", "mail-1", "--module", "mail_steps")

    assert folder("submit", "--type", "mail.send", "--id", "m-1", "--wait").code == 0
    jobs = folder.json("job", "list", "--class", "emails")["jobs"]
    assert [one["id"] for one in jobs] == ["m-1"]
    (worker,) = folder.json("worker", "list")["workers"]
    assert worker["classes"]["emails"]["capacity"] == 4

    work = {"assignment_id": "m-2", "resource_class": "email", "job": {"type": "mail.send"}}
    folder.write("work.json", json.dumps([work]))
    misspelt = folder.start("submit", "work.json")
    _, said = misspelt.communicate(timeout=60)
    assert misspelt.returncode == 0
    assert "no running worker has the class 'email'; did you mean 'emails'?" in said
