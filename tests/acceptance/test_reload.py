"""SIGHUP, `worker reload` and `router reload`, with real signals and terminals: policies of running systems."""

import fcntl
import json
import os
import signal
import subprocess
import termios
import threading
from typing import Any

import pytest

from tests.acceptance.folder import CONFIG, PATIENCE_S, Folder, until

FAILING = """
@rk.block("own.fail")
async def fail(inputs, context):
    with open("begun.txt", "a") as file:
        file.write(inputs["name"] + "\\n")
    while not os.path.exists(inputs["gate"]):
        await asyncio.sleep(0.02)
    raise ConnectionError("refused")
"""


@pytest.fixture
def failing(folder: Folder) -> Folder:
    """A folder with a step that fails as soon as its gate is open, and is retried twice."""
    module = folder.path / "naps.py"
    module.write_text(module.read_text() + FAILING)
    return folder


def allow(folder: Folder, retries: int) -> None:
    """Write a configuration with so many retries, which the file calls attempts."""
    folder.write("reefknot.yaml", CONFIG.replace("max_attempts: 2", f"max_attempts: {retries}"))


def submit(folder: Folder, name: str, gate: str) -> None:
    folder.submit("own.fail", name, name=name, gate=gate)


def attempts_of(folder: Folder, name: str) -> int:
    """The attempts of a job, when it has ended."""
    until(lambda: folder.state(name) in ("failed", "quarantined"))
    return int(folder.job(name)["attempts"])


def said(process: subprocess.Popen[str], text: str) -> str:
    """The first line on stderr with this text; the test's time limit bounds the wait."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"it never said {text!r}")


@pytest.mark.parametrize("way", ["SIGHUP", "worker", "router"])
def test_a_reload_changes_the_policies_of_work_that_begins_and_of_no_other(failing: Folder, way: str) -> None:
    """C12: one job is in its first attempt while the policies change; it keeps the two retries it began with."""
    process = failing.up()
    submit(failing, "old", "open")
    until(lambda: "old" in failing.begun())
    allow(failing, 4)
    if way == "SIGHUP":
        process.send_signal(signal.SIGHUP)
        assert "policies reloaded" in said(process, "SIGHUP:")
    else:
        reloaded = failing.json(way, "reload")["systems"]
        assert [(one["changed"], one["problems"]) for one in reloaded] == [(True, [])]
    submit(failing, "new", ".")
    (failing.path / "open").touch()

    assert (attempts_of(failing, "old"), attempts_of(failing, "new")) == (3, 5)
    assert len(failing.events("book_stored")) == 2, "both books are in the log"
    assert "policy.reload" in [one["action"] for one in failing.events("operator_action")]
    assert failing("audit", "replay").code == 0, "every decision comes out the same by the book it names"


def test_a_start_with_the_new_file_changes_the_policies_of_all_work(failing: Folder) -> None:
    """The control: the attempts in the file do matter to the first job, when no work was in flight."""
    allow(failing, 4)
    failing.up()
    submit(failing, "old", ".")
    assert attempts_of(failing, "old") == 5


def test_a_file_that_is_bad_or_gone_is_refused_and_the_old_policies_stay(failing: Folder) -> None:
    """One that is bad with its lines. Changes of other settings are named, and wait for the next start."""
    process = failing.up()
    good = failing.config.read_text()
    failing.config.write_text(good.replace("max_attempts: 2", "max_attempts: many"))
    process.send_signal(signal.SIGHUP)
    line = said(process, "max_attempts")
    assert "reefknot.yaml:3:" in line
    assert "'many' is not accepted" in line
    said(process, "the configuration is refused")
    failing.config.rename(failing.path / "moved.yaml")
    process.send_signal(signal.SIGHUP)
    said(process, "the configuration is refused")
    failing.config.write_text(CONFIG.replace("queue: {v2: {", "queue: {v2: {max_queue_size: 7, "))
    process.send_signal(signal.SIGHUP)
    assert "the policies are unchanged" in (line := said(process, "SIGHUP:"))
    assert "changes of worker take effect at the next start" in line
    submit(failing, "one", ".")
    assert attempts_of(failing, "one") == 3
    assert process.poll() is None
    until(lambda: "policy.reload_refused" in [one["action"] for one in failing.events("operator_action")])


def test_a_refusal_by_another_process_is_78_at_the_command_line(failing: Folder) -> None:
    """The operator's own configuration is fine: the one of the running system is another file."""
    theirs = failing.path / "theirs.yaml"
    theirs.write_text(CONFIG)
    failing.up("--config", "theirs.yaml")
    theirs.write_text(CONFIG.replace("max_attempts: 2", "max_attempts: -1"))
    ended = failing("worker", "reload")
    assert ended.code == 78
    assert "theirs.yaml:3:" in ended.err
    assert "the configuration is refused" in ended.out


def test_parts_reload_one_by_one(failing: Folder) -> None:
    failing.part("worker", "--worker-id", "a", "--module", "naps")
    failing.part("worker", "--worker-id", "b", "--module", "naps")
    failing.part("router")
    allow(failing, 3)

    assert len(failing.json("worker", "reload", "--dry-run")["systems"]) == 2
    (one,) = failing.json("worker", "reload", "b")["systems"]
    assert one["changed"] is True
    (router,) = failing.json("router", "reload")["systems"]
    assert router["changed"] is True
    both = failing.json("worker", "reload")["systems"]
    assert sorted(one["changed"] for one in both) == [False, True], "b had it already"
    assert failing("worker", "reload", "c").code == 2
    assert failing("router", "reload", "c").code == 2


def test_a_command_sees_its_answer_while_hangups_come(failing: Folder) -> None:
    process, ending = failing.up(), threading.Event()

    def hang_up() -> None:
        while not ending.wait(0.05):
            process.send_signal(signal.SIGHUP)

    hangups = threading.Thread(target=hang_up)
    hangups.start()
    try:
        answers = [failing("worker", "reload").code for _ in range(2)]
    finally:
        ending.set()
        hangups.join()

    assert answers == [0, 0]


def test_with_nohup_a_hangup_is_ignored(failing: Folder) -> None:
    process = failing.up(before=["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"])
    process.send_signal(signal.SIGHUP)
    submit(failing, "one", ".")
    assert attempts_of(failing, "one") == 3, "it goes on"
    code, _, err = failing.stop(process)
    assert (code, "SIGHUP" in err) == (143, False)


@pytest.mark.parametrize("words", [("up",), ("run", "work.jsonl", "--results", "out.jsonl")], ids=lambda one: one[0])
def test_a_terminal_that_is_closed_drains_the_system(folder: Folder, words: tuple[str, ...]) -> None:
    """The kernel sends SIGHUP; running steps finish, and nothing can be written to the terminal any more."""
    ours, theirs = os.openpty()
    work = {"assignment_id": "one", "job": {"type": "own.wait", "payload": {"name": "one"}}}
    folder.write("work.jsonl", json.dumps(work))
    given: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {"start_new_session": True}
    given["preexec_fn"] = lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
    process = folder.start(*words, "--module", "naps", **given)
    os.close(theirs)
    until(lambda: folder.has_store and folder("worker", "list").code == 0)
    if words[0] == "up":
        folder.wait("one")
    until(lambda: "one" in folder.begun())
    os.close(ours)
    until(lambda: bool(_draining(folder)))
    folder.go()

    assert process.wait(timeout=PATIENCE_S) == 129
    if words[0] == "up":  # whose drain is long enough for any machine
        assert folder.state("one") == "succeeded"
    else:
        assert (folder.path / "out.jsonl").exists(), "results appear at the end of a drain, too"


def _draining(folder: Folder) -> list[str]:
    """Workers that accept nothing any more."""
    listed = folder("worker", "list", "--json")
    return [one["worker_id"] for one in listed.json["workers"] if one["draining"]] if listed.code == 0 else ["gone"]
