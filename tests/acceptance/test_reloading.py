"""`up --reload` and `worker start --reload`: a step that is edited while its jobs wait and run, with real processes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.folder import Folder, until

STEPS = """\
import asyncio
import os
import reefknot as rk
from shop.version import VERSION

@rk.block("shop.answer")
async def answer(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(inputs["name"] + "\\n")
    while VERSION == 1 and not os.path.exists("go"):
        await asyncio.sleep(0.02)
    return {"version": VERSION}
"""
JOBS = [f"job-{number}" for number in range(8)]


@pytest.fixture
def shop(folder: Folder) -> Folder:
    """A folder with a package of steps, the first version of which waits for a file."""
    (folder.path / "shop").mkdir()
    (folder.path / "shop" / "__init__.py").write_text("")
    (folder.path / "shop" / "steps.py").write_text(STEPS)
    write_version(folder, 1)
    return folder


def write_version(folder: Folder, version: int) -> None:
    """The size of the file stays the same, and so may the second of its change."""
    (folder.path / "shop" / "version.py").write_text(f"VERSION = {version}\n")


def start(folder: Folder, *words: str) -> tuple[subprocess.Popen[str], Path]:
    """The command, and the file that has what it says."""
    said = folder.path / "said.txt"
    with said.open("w") as file:
        process = folder.start(*words, stderr=file, stdout=subprocess.DEVNULL)
    return process, said


def test_a_step_that_is_edited_while_jobs_wait_and_run_answers_with_its_new_code(shop: Folder) -> None:
    process, said = start(shop, "up", "--reload", "--module", "shop.steps", "--drain", "0.1")
    until(lambda: "steps: " in said.read_text())
    for name in JOBS:
        shop.submit("shop.answer", name, name=name)
    until(lambda: "job-0" in shop.begun())
    write_version(shop, 2)
    until(lambda: shop.have_succeeded(*JOBS))

    assert f"{Path('shop', 'version.py')} changed; restarting the steps" in said.read_text()
    found = [shop.job(name) for name in JOBS]
    assert [one["result"]["output"] for one in found] == [{"version": 2}] * len(JOBS)
    assert {one["crashes"] for one in found} == {0}, "work in flight was handed back"
    assert sorted(one["work_id"] for one in shop.events("completed")) == sorted(JOBS), "each ended once"

    (shop.path / "shop" / "steps.py").write_text(STEPS.replace("def answer", "def answer("))
    until(lambda: "waiting for the next change" in said.read_text())
    assert f"shop{os.sep}steps.py:7: SyntaxError" in said.read_text()
    shop.submit("shop.answer", "after", name="after")
    assert shop.state("after") == "pending"
    (shop.path / "shop" / "steps.py").write_text(STEPS.replace("VERSION}", "VERSION + 1}"))
    until(lambda: shop.state("after") == "succeeded")
    assert shop.job("after")["result"]["output"] == {"version": 3}

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert shop("worker", "list").code == 69, "its child has ended too"


def test_steps_that_cannot_be_imported_are_an_error_in_the_log_with_file_and_line(shop: Folder) -> None:
    shop.set_variable("REEFKNOT_LOG_FORMAT", "json")
    process, said = start(shop, "up", "--reload", "--module", "shop.steps")
    until(lambda: "steps: " in said.read_text())
    shop.write("shop/steps.py", STEPS.replace("def answer", "def answer("))
    until(lambda: "waiting for the next change" in said.read_text())
    shop.stop(process)
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    cause, waits = (line["message"] for line in lines if line["level"] == "error")
    assert f"shop{os.sep}steps.py:7: SyntaxError" in cause
    assert "waiting for the next change of their files" in waits


def test_a_worker_reloads_and_does_not_outlive_a_watcher_that_is_killed(shop: Folder) -> None:
    router = shop.part("router")
    process, said = start(shop, "worker", "start", "--reload", "--module", "shop.steps", "--drain", "0.1")
    until(lambda: "worker-1 is ready" in said.read_text())
    shop.submit("shop.answer", "one", name="one")
    until(lambda: "one" in shop.begun())
    write_version(shop, 2)
    until(lambda: shop.state("one") == "succeeded")
    pid = shop.json("worker", "list")["workers"][0]["pid"]
    assert pid != process.pid
    process.kill()
    process.wait(30)
    until(lambda: not is_running(pid))
    router.terminate()
    router.wait(30)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path(f"/proc/{pid}").exists() else False


def test_what_cannot_be_reloaded_is_refused(folder: Folder) -> None:
    for words, text in {
        ("up", "--reload"): "--reload: there is no --module, so there is nothing to watch",
        ("up", "--reload", "--module", "json"): "--reload: no file of json is beneath",
        ("up", "--reload", "--module", "naps", "--engine", "memory:"): "--reload: a memory: store ends with its",
        ("worker", "start", "--reload"): "--reload: there is no --module",
    }.items():
        done = folder(*words)
        assert (done.code, text in done.err) == (2, True), done.err
